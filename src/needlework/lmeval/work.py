"""The pass over the data: what is not in the store yet is asked, chunk by chunk, and lm-eval's files are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.experiments.asks import Settings, trial_id
from needlework.experiments.models import Sketch
from needlework.interventions import Intervention
from needlework.lmeval import answers
from needlework.lmeval.questions import Question, Shown, quiet
from needlework.store import LM_EVAL, Row, Store

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

CHUNK_ASKS = 2048  # what an interruption may cost, and what shares batches
CHUNK_FLOPS = 5e13


@dataclass
class Job:
    """One model, its questions and what is done to it."""

    seen: Sketch
    lm: NeedleworkLM
    acts: dict[str, Intervention]
    questions: list[Question]
    rows: dict[tuple[int, str], Row] = field(default_factory=dict)  # (question, intervention) -> its row

    def settings(self, question: Question) -> Settings:
        most = max((one.max_new_tokens for one in question.generations), default=1)
        return Settings(question.mode, "decode", most, frozenset())

    def ids(self) -> dict[tuple[int, str], str]:
        """Row ids: what cannot change an answer is not in them."""
        digests = [question.digest() for question in self.questions]
        return {
            (i, text): trial_id(self.seen, digests[i], text, self.settings(question))
            for i, question in enumerate(self.questions)
            for text in self.acts
        }


def _chunks(job: Job) -> Iterator[list[int]]:
    """Questions that are asked together: those with examples in front by task, so that the examples are read once."""

    def order(i: int) -> tuple[object, ...]:
        question = job.questions[i]
        return question.mode, question.task.task_name if question.task.config.num_fewshot else "", question.tokens, i

    chunk: list[int] = []
    flops = 0.0
    for i in sorted(range(len(job.questions)), key=order):
        question = job.questions[i]
        cost = 2.0 * job.seen.anatomy.parameters * question.tokens * len(job.acts)
        other = bool(chunk) and job.questions[chunk[0]].mode != question.mode
        if chunk and (other or len(chunk) * len(job.acts) >= CHUNK_ASKS or flops + cost > CHUNK_FLOPS):
            yield chunk
            chunk, flops = [], 0.0
        chunk.append(i)
        flops += cost
    if chunk:
        yield chunk


def ask(job: Job, store: Store, progress: bool) -> int:
    """Ask what is not in the store yet, chunk by chunk; how much that was."""
    from needlework.lmeval.teller import tell

    ids = job.ids()
    there = {t.id: t for t in store.rows("experiment = ? AND model = ?", (answers.EXPERIMENT, job.seen.name))}
    job.rows = {key: there[trial] for key, trial in ids.items() if trial in there}
    _mark(job, store)
    missing = len(ids) - len(job.rows)
    versions = ""
    with _bar(missing, progress) as advance:
        for chunk in _chunks(job):
            todo = [(i, text) for i in chunk for text in job.acts if (i, text) not in job.rows]
            if not todo:
                continue
            versions = versions or store.note_versions(_versions(job))
            start = time.monotonic()
            told = tell(job.lm, [(job.questions[i], job.acts[text]) for i, text in todo])
            seconds = (time.monotonic() - start) / len(todo)
            made = {
                (i, text): answers.row(job.questions[i], one, job.seen.name, ids[i, text], text, seconds, versions)
                for (i, text), one in zip(todo, told, strict=True)
            }
            store.add(list(made.values()))
            job.rows |= made
            advance(len(todo))
    return missing


def _mark(job: Job, store: Store) -> None:
    """Rows of these tasks with other prompts (other examples, another template) are not counted together with these."""
    prompts: dict[str, set[str]] = {}
    for question in job.questions:
        prompts.setdefault(question.task.task_name, set()).add(question.digest())
    where = "kind = ? AND model = ? AND task = ?"
    for task, digests in prompts.items():
        values = (LM_EVAL, job.seen.name, task)
        rows = store.db.execute(f"SELECT experiment, model, task, id, prompt_id FROM trials WHERE {where}", values)
        store.mark_asked({row[:4] for row in rows if row[4] in digests}, where, values)


def _versions(job: Job) -> dict[str, str]:
    from importlib.metadata import version

    from needlework.experiments.live import LiveActor

    return {**LiveActor(job.lm.subject, job.seen.model).versions(), "lm_eval": version("lm_eval")}


@contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    if not progress or not total:
        yield lambda count: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("ability"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as shown:
        task = shown.add_task("ability", total=total)
        yield lambda count: shown.advance(task, count)


def write_files(job: Job, loaded: Any, shown: Shown, folder: Path) -> list[Path]:
    """lm-eval's result files of every intervention."""
    from needlework.lmeval import results

    paths = []
    for text in job.acts:
        mine = [job.rows[i, text] for i in range(len(job.questions))]
        said: dict[int, Any] = {}
        for question, trial in zip(job.questions, mine, strict=True):
            said |= zip(map(id, question.instances), answers.responses(question, trial), strict=True)
        about = {
            "pretrained": job.seen.model.source,
            "intervention": text,
            "dtype": job.seen.model.dtype,
            "failed": sum(trial.finish == "failed" for trial in mine),
            **{f"{key}_sha": value for key, value in job.seen.identity().items() if key in ("weights", "tokenizer")},
        }
        with quiet():
            found = results.aggregate(loaded, job.questions, said, shown)
        paths.append(results.write(results.place(folder, text), found, about, shown))
    return paths
