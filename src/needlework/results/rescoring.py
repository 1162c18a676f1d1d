"""Compute scores again from stored answers, without model, tokenizer or torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.results.disk import claimed
from needlework.results.rows import ANSWER_FINISH, LM_EVAL, Row
from needlework.results.store import Store
from needlework.tasks.base import Item, Mode, Task
from needlework.tasks.scores import SCORES_VERSION

_BATCH = 500


def scoring(task: Task) -> str:
    """Return the scores' version and a hash of the task's kind and options; rows with another value are rescored.

    All options are hashed, whether or not a score reads them: rescoring too often costs no inference.
    """
    if task.kind == LM_EVAL:  # scored by lm-eval, which keeps its own versions
        return ""
    content = [task.kind, task.model_dump(mode="json")]
    return f"{SCORES_VERSION}-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]}"


class _NotStored(tuple[int, ...]):
    """Placeholder for prompt tokens that a row does not store: a score that reads them raises instead of being wrong."""

    def _tell(self, *_: object) -> NoReturn:
        raise NeedleworkError("a stored row does not keep its prompt's tokens; `needlework run` makes the prompt again")

    __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = __hash__ = _tell  # type: ignore[assignment]


def stored_facts(item: Item, mode: Mode) -> dict[str, Any]:
    """Return the facts column of an item's row: the task's facts, and what `stored_item` needs to rebuild the item."""
    facts = {**item.facts}
    if item.twin_target:
        facts["twin_target"] = item.twin_target
    if item.answer is not None:
        facts["answer_option"] = item.answer
    if mode == "choices":
        facts["option_ids"] = [list(option) for part in (item, *item.also) for option in part.options]
    if mode == "perplexity":
        facts["prompt_ids"] = list(item.prompt)
    return facts


def stored_item(trial: Row) -> Item:
    """Rebuild the sample of a row, without the fields that only the model reads."""
    facts = {**trial.facts}
    facts.pop(ANSWER_FINISH, None)
    prompt, options = facts.pop("prompt_ids", None), facts.pop("option_ids", ())
    return Item(
        id=trial.sample,
        cluster=trial.cluster,
        prompt=_NotStored() if prompt is None else tuple(prompt),
        prompt_text=trial.prompt,
        target=trial.target,
        spans={name: tuple((start, end) for start, end in span) for name, span in trial.spans.items()},
        options=tuple(tuple(option) for option in options),
        answer=facts.pop("answer_option", None),
        twin_target=facts.pop("twin_target", ""),
        facts=facts,
    )


def stored_answer(trial: Row) -> Answer:
    """Rebuild the answer of a row, with the fields that scores read."""
    logs, greedy = tuple(trial.logprobs), tuple(trial.greedy)
    if trial.mode == "generate":
        return Answer(tuple(trial.tokens), logs, finish="stop", text=trial.output)
    options = (logs,) if trial.mode == "perplexity" else tuple((value,) for value in logs)
    return Answer(option_logprobs=options, greedy=greedy)


def stored_finish(trial: Row) -> str:
    """Return how the answer finished, even if scoring failed."""
    return str(trial.facts.get(ANSWER_FINISH, trial.finish))


def rescored(trial: Row, task: Task) -> Row:
    """Return the row with newly computed scores; errors of the task are raised."""
    finish = stored_finish(trial)
    if finish == "failed":
        return replace(trial, scoring=scoring(task))
    scores = task.score(stored_item(trial), stored_answer(trial))
    facts = {name: value for name, value in trial.facts.items() if name != ANSWER_FINISH}
    return replace(trial, scores=scores, scoring=scoring(task), finish=finish, error="", facts=facts)


@dataclass(frozen=True)
class Rescored:
    """Counts of a rescoring."""

    rows: int  # processed: rows of the plan whose task is recorded
    changed: int  # rows with other scores than before
    kept: int  # rows that could not be scored and keep their scores
    why: str  # error of the first of these


def rescore_directory(directory: Path | str) -> Rescored:
    """Lock a run's directory and rescore its store."""
    store = Store(directory)
    try:
        with claimed(directory):
            return rescore(store)
    finally:
        store.close()


def rescore(store: Store, make_task: Callable[[Mapping[str, Any]], Task] | None = None) -> Rescored:
    """Compute the scores of all rows of the plan again, except those that lm-eval scored."""
    rows = changed = kept = 0
    why = ""
    for task, trials in _batches(store, make_task):
        again = []
        for trial in trials:
            rows += 1
            try:
                if isinstance(task, NeedleworkError):
                    raise task
                new = rescored(trial, task)
            except Exception as error:
                kept, why = kept + 1, why or f"{trial.task}: {error}"
                continue
            changed += json.dumps(new.scores, sort_keys=True) != json.dumps(trial.scores, sort_keys=True)
            again.append(new)
        store.add(again)
    (asked,) = store.db.execute("SELECT count(*) FROM trials WHERE asked AND kind != ?", (LM_EVAL,)).fetchone()
    if not kept and rows == asked:  # else some rows, e.g. of unknown tasks, keep old scores
        store.set_meta("scores_version", SCORES_VERSION)
    return Rescored(rows, changed, kept, why)


def _batches(
    store: Store, make_task: Callable[[Mapping[str, Any]], Task] | None
) -> Iterator[tuple[Task | NeedleworkError, Sequence[Row]]]:
    """Yield rows with the task that scores them, or with the error why the task is not available."""
    if make_task is None:
        from needlework.tasks import make_task as known_tasks

        make_task = known_tasks
    for name, experiment in (store.meta("experiments") or {}).items():
        for task_name, known in experiment.get("tasks", {}).items():
            where = "experiment = ? AND task = ? AND kind = ? AND kind != ? AND asked"
            kind = known.get("kind", "")
            values = (name, task_name, kind, LM_EVAL)
            rowids = [row for (row,) in store.db.execute(f"SELECT rowid FROM trials WHERE {where}", values)]
            if not rowids:
                continue
            try:
                task: Task | NeedleworkError = make_task({"kind": kind, **known.get("options", {})})
            except NeedleworkError as error:  # e.g. its plugin is not installed
                task = error
            for start in range(0, len(rowids), _BATCH):
                batch = rowids[start : start + _BATCH]
                yield task, list(store.rows(f"rowid IN ({', '.join('?' for _ in batch)})", batch))
