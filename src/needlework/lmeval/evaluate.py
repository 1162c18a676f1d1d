"""`needlework eval`: lm-eval's tasks under several interventions in one pass over the data, into a store that resumes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError
from needlework.experiments.asks import SEMANTICS_VERSION
from needlework.experiments.models import Sketch, sketch
from needlework.experiments.plan import Model
from needlework.experiments.progress import hid_nothing
from needlework.interventions import Intervention, parse
from needlework.lmeval import answers
from needlework.lmeval import paper as preset
from needlework.lmeval.arguments import check_phases
from needlework.lmeval.questions import Shown, build, find_tasks, quiet, templates_once
from needlework.lmeval.retained import Line, Lookup, lines, lookups
from needlework.lmeval.work import Job, ask, write_files
from needlework.requests import Request, prepare
from needlework.store import LM_EVAL, Store, claimed
from needlework.terminal import plain


@dataclass(frozen=True)
class Summary:
    """What an evaluation found."""

    lines: list[Line]
    lookups: list[Lookup]
    files: list[Path]  # results.json of each intervention
    failed: int
    idle: list[str]  # conditions that hid nothing in any of their trials, in words
    asked: int  # questions under an intervention that were asked now; the rest was there


def evaluate(
    model: str | Path,
    tasks: Sequence[str],
    interventions: Sequence[str],
    out: str | Path,
    *,
    data: str | Path | None = None,
    paper: bool = False,
    limit: float | None = None,
    shots: int | None = None,
    chat: bool | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    memory_bytes: int | None = None,
    progress: bool = True,
) -> Summary:
    """Ask everything, or what a stopped evaluation left. Whatever is wrong is said before the model is loaded."""
    acts = [parse(text) for text in interventions]
    for act in acts:
        check_phases(act)
    if not paper and not (tasks and acts):
        raise NeedleworkError("name at least one task and one intervention, e.g. --tasks mini-mmlu --intervene none; or --paper")
    seen = sketch(Model("eval", Path(str(model)).name, str(model), dtype=dtype, device=device))
    if paper:
        tasks, acts, shots = _paper(seen, tasks, acts, shots)
    named = {str(act): act for act in acts}
    loaded = find_tasks(tasks, None if data is None else Path(data))
    from needlework.lmeval.model import NeedleworkLM

    lm = NeedleworkLM(seen.directory, device=device, dtype=dtype, memory_bytes=memory_bytes)
    has_template = bool(getattr(seen.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise NeedleworkError(f"{seen.name} has no chat template; leave the chat option out")
    use_chat = has_template and paper if chat is None else chat
    shown = Shown(limit, shots, use_chat, use_chat)
    with templates_once():
        with quiet():
            job = Job(seen, lm, named, build(loaded, lm, shown))
        _check(job, memory_bytes)
        with claimed(out) as folder:
            store = Store(folder, create=True)
            try:
                _sign(store, job, tasks)
                asked = ask(job, store, progress)
                files = write_files(job, loaded, shown, folder)
                idle = hid_nothing(store, f"asked AND kind = '{LM_EVAL}'")
            finally:
                store.close()
    rows = list(job.rows.values())
    return Summary(lines(rows, _homes(loaded)), lookups(rows), files, sum(t.finish == "failed" for t in rows), idle, asked)


def _paper(
    seen: Sketch, tasks: Sequence[str], acts: Sequence[Intervention], shots: int | None
) -> tuple[Sequence[str], list[Intervention], int | None]:
    from needlework.tasks.toy import is_toy

    toy = is_toy(seen.tokenizer)
    texts = preset.interventions(seen.anatomy)
    return (
        tasks or (preset.TOY_TASKS if toy else preset.TASKS),
        [*(parse(text) for text in texts), *acts],
        (0 if toy else preset.SHOTS) if shots is None else shots,
    )


def _check(job: Job, memory_bytes: int | None) -> None:
    """Every intervention against one question of each kind: what cannot be asked of it cannot be asked of the others."""
    for question in job.questions:
        if any(not continuation for some in question.pairs for _, continuation in some):
            raise NeedleworkError(
                f"{question.name}: an answer has no token of its own after its prompt, the tokenizer joins the two. lm-eval"
                " puts nothing between a chat template and an answer: the template must end with white space, or leave it out"
            )
    first = {question.mode: question for question in job.questions}
    for question in first.values():
        for act in job.acts.values():
            if question.mode == "generate":
                request = Request(question.generations[0].prompt, act)
            else:
                request = Request(question.pairs[0][0][0], act, options=(question.pairs[0][0][1],))
            prepare(request, job.seen.anatomy)
    if job.seen.costs is not None and memory_bytes is not None:
        job.seen.costs.check(memory_bytes, (prepare(request, job.seen.anatomy) for request in _longest(job)))


def _longest(job: Job) -> Iterator[Request]:
    """The largest request of each kind of question, under each intervention."""
    generations = [one for question in job.questions for one in question.generations]
    pairs = [pair for question in job.questions for some in question.pairs for pair in some]
    for act in job.acts.values():
        if generations:
            one = max(generations, key=lambda one: len(one.prompt) + one.max_new_tokens)
            yield Request(one.prompt, act, one.max_new_tokens)
        if pairs:
            context, continuation = max(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
            yield Request(context, act, options=(continuation,))


def _sign(store: Store, job: Job, tasks: Sequence[str]) -> None:
    """Refuse a store that another model of this name, or another meaning, has written; say what is written now."""
    if store.meta("semantics_version") not in (None, SEMANTICS_VERSION):
        raise NeedleworkError(f"{store.directory} was made with another semantics version; choose another directory")
    seen, models = job.seen, store.meta("models") or {}
    for what, mine in seen.identity().items():
        if seen.name in models and models[seen.name].get(what) != mine:
            raise NeedleworkError(f"{store.directory} was made with another {what} of {seen.name}; choose another directory")
    about = {**seen.identity(), "source": seen.model.source, "anatomy": seen.anatomy.to_dict()}
    store.set_meta("semantics_version", SEMANTICS_VERSION)
    store.set_meta("models", {**models, seen.name: about})
    if store.meta("plan") is None:
        store.set_meta("plan", {"name": "eval", "about": "General ability through lm-eval", "fast": False, "text": ""})
    experiment = {
        "about": "General ability: " + ", ".join(tasks),
        "models": [seen.name],
        "seeds": [0],
        "boundary": "decode",
        "interventions": list(job.acts),
        "tasks": {q.task.task_name: {"kind": LM_EVAL, "mode": q.mode, "chance": q.facts().get("chance", 0.0), "options": {}}
                  for q in job.questions},
    }  # fmt: skip
    store.set_meta("experiments", {**(store.meta("experiments") or {}), answers.EXPERIMENT: experiment})


def _homes(loaded: Any) -> dict[str, str]:
    """The outermost group of every task, or the task itself."""
    groups, children = loaded.get("groups") or {}, set()
    for members in (loaded.get("group_map") or {}).values():
        children |= set(members)
    homes = {name: name for name in loaded["tasks"]}
    for name, group in groups.items():
        if name not in children:
            homes |= {task.task_name: name for task in group.get_all_tasks()}
    return homes


def table(summary: Summary) -> Any:
    """The summary for a terminal."""
    from rich.text import Text

    from needlework.inspection import Sheet

    columns = ("asked", "intervention", "right", "retained, raw", "retained, chance-corrected")
    shown = Sheet(columns, "general ability", words=columns)
    for line in summary.lines:
        names = Text(plain(line.name)), Text(plain(line.intervention))
        shown.add_row(*names, line.accuracy.text(), line.raw.text(), line.corrected.text())
    for one in summary.lookups:
        shown.add_row("part of the letter's loss that is its look-up", Text(plain(one.intervention)), "", "", one.part.text())
    return shown
