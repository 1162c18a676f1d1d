"""Scores from stored answers: no model, no tokenizer and no torch is needed to score a row again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.store import ANSWER_FINISH, LM_EVAL, Row, Store, claimed
from needlework.tasks.base import Item, Mode, Task
from needlework.tasks.scores import SCORES_VERSION

# Rows of store version 1 know neither the tokens of their options nor which of the wrong ones the model would have said.
# These scores of theirs cannot be computed again, and stay: their rules are as they were.
_NOT_IN_VERSION_1 = ("top1", "correct_per_token")
_BATCH = 500


def scoring(task: Task) -> str:
    """A hash of what turns an answer into scores. All of the task's options are in it, whether or not a score reads them:
    only the task knows, and to score a row once too often costs no inference. Its first number is the scores' version."""
    if task.kind == LM_EVAL:  # scored by lm-eval, whose versions stand in its own files
        return ""
    content = [task.kind, task.model_dump(mode="json")]
    return f"{SCORES_VERSION}-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]}"


class _NotStored(tuple[int, ...]):
    """Tokens that a row does not keep: a score that reads them must fail, not come out otherwise."""

    def _tell(self, *_: object) -> NoReturn:
        raise NeedleworkError("a stored row does not keep its prompt's tokens; `needlework run` makes the prompt again")

    __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = __hash__ = _tell  # type: ignore[assignment]


def stored_facts(item: Item, mode: Mode) -> dict[str, Any]:
    """The facts of an item's row: what the task says of it, and what `stored_item` needs to make it again."""
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
    """The sample of a row, without what only a model reads."""
    facts = {**trial.facts}
    facts.pop(ANSWER_FINISH, None)
    prompt, options = facts.pop("prompt_ids", None), facts.pop("option_ids", None)
    if options is None and trial.mode == "choices":
        options = [()] * len(trial.logprobs)  # of store version 1
    return Item(
        id=trial.sample,
        cluster=trial.cluster,
        prompt=_NotStored() if prompt is None else tuple(prompt),
        prompt_text=trial.prompt,
        target=trial.target,
        spans={name: tuple((start, end) for start, end in span) for name, span in trial.spans.items()},
        options=tuple(tuple(option) for option in options or ()),
        answer=facts.pop("answer_option", None),
        twin_target=facts.pop("twin_target", ""),
        facts=facts,
    )


def stored_answer(trial: Row) -> Answer:
    """What came back for a row, as far as scores can read it."""
    logs, greedy = tuple(trial.logprobs), tuple(trial.greedy)
    if trial.mode == "generate":
        return Answer(tuple(trial.tokens), logs, finish="stop", text=trial.output)
    options = (logs,) if trial.mode == "perplexity" else tuple((value,) for value in logs)
    return Answer(option_logprobs=options, greedy=greedy)


def stored_finish(trial: Row) -> str:
    """How the answer finished, whether or not it could be scored."""
    return str(trial.facts.get(ANSWER_FINISH, trial.finish))


def lasting_scores(trial: Row) -> dict[str, float]:
    """Scores that stay if they cannot be computed again."""
    return {name: trial.scores[name] for name in _NOT_IN_VERSION_1 if name in trial.scores}


def rescored(trial: Row, task: Task) -> Row:
    """The row with the scores that its answer gets now. Raises what the task raises."""
    finish = stored_finish(trial)
    text_of_version_1 = trial.kind == "perplexity" and "prompt_ids" not in trial.facts  # its rules are as they were, too
    if finish == "failed" or text_of_version_1:
        return replace(trial, scoring=scoring(task))
    scores = {**lasting_scores(trial), **task.score(stored_item(trial), stored_answer(trial))}
    facts = {name: value for name, value in trial.facts.items() if name != ANSWER_FINISH}
    return replace(trial, scores=scores, scoring=scoring(task), finish=finish, error="", facts=facts)


@dataclass(frozen=True)
class Rescored:
    """What a rescoring did."""

    rows: int  # that were looked at: those that a plan asks for
    changed: int  # with other scores than before
    kept: int  # that could not be scored and keep what they have
    why: str  # of one that could not be scored


def rescore_directory(directory: Path | str) -> Rescored:
    """`rescore` for a run's directory, which is claimed meanwhile so that nobody else writes into it."""
    store = Store(directory)
    try:
        with claimed(directory):
            return rescore(store)
    finally:
        store.close()


def rescore(store: Store, make_task: Callable[[Mapping[str, Any]], Task] | None = None) -> Rescored:
    """Compute the scores of every row again that the plan asks for. What lm-eval scored is left alone."""
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
    if not kept and rows == asked:  # rows whose task the store does not tell of have the scores that they had
        store.set_meta("scores_version", SCORES_VERSION)
    return Rescored(rows, changed, kept, why)


def _batches(
    store: Store, make_task: Callable[[Mapping[str, Any]], Task] | None
) -> Iterator[tuple[Task | NeedleworkError, Sequence[Row]]]:
    """Rows with the task that scores them, or with the reason why there is none."""
    if make_task is None:
        from needlework.tasks import make_task as known_tasks

        make_task = known_tasks
    for name, experiment in (store.meta("experiments") or {}).items():
        for task_name, known in experiment["tasks"].items():
            where = "experiment = ? AND task = ? AND kind = ? AND kind != ? AND asked"
            values = (name, task_name, known["kind"], LM_EVAL)
            rowids = [row for (row,) in store.db.execute(f"SELECT rowid FROM trials WHERE {where}", values)]
            if not rowids:
                continue
            try:
                task: Task | NeedleworkError = make_task({"kind": known["kind"], **known["options"]})
            except NeedleworkError as error:  # of a package that is not installed
                task = error
            for start in range(0, len(rowids), _BATCH):
                batch = rowids[start : start + _BATCH]
                yield task, list(store.rows(f"rowid IN ({', '.join('?' for _ in batch)})", batch))
