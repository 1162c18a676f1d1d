"""Rows of a store (docs/store.md describes every column), and their scores, computed again without model or torch."""

# ruff: noqa: UP013
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NoReturn,
    NotRequired,  # pydantic needs these before Python 3.12
)

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from typing_extensions import TypedDict

from needlework.errors import NeedleworkError
from needlework.interventions import Ranking
from needlework.receipts import NOTHING_TO_HIDE, Receipt
from needlework.requests import Answer
from needlework.tasks.base import SCORES_VERSION, Item, Mode, Task

if TYPE_CHECKING:
    from needlework.results.store import Store

SCHEMA_VERSION = 2
# Increment when the semantics of an intervention, a phase or a task's prompt change: old stores are then refused. For a
# changed score, increment tasks.base.SCORES_VERSION instead: stored answers are then scored again.
SEMANTICS_VERSION = 2
LM_EVAL = "lm-eval"  # kind of rows that lm-evaluation-harness requests and scores; they are in no plan
ANSWER_FINISH = "answer_finish"  # fact of a row whose scoring failed: how its answer finished


@dataclass(frozen=True)
class Row:
    """One trial: a sample under an intervention, its answer and its scores."""

    id: str  # hash of weights, tokenizer, prompt ids, intervention text, decoding settings and semantics version
    experiment: str
    model: str
    task: str
    sample: str
    cluster: str
    seed: int
    intervention: str  # text form
    mode: str  # generate | choices | perplexity
    prompt: str
    prompt_tokens: int
    target: str
    output: str
    finish: str  # stop | length | failed | scored
    error: str
    seconds: float
    spans: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    logprobs: Sequence[float] = ()
    margins: Sequence[float] = ()
    receipt: Mapping[str, Any] = field(default_factory=dict)
    prompt_id: str = ""  # hash of the prompt's tokens, spans, twins and options
    versions: str = ""  # id in the table `versions`
    kind: str = ""  # of its task; `task` is the plan's name for it
    ability: str = ""  # retrieval | knowledge | perplexity, as the task declares; "": used by no rule
    boundary: str = ""  # phase of the last prompt token: decode | prefill; "" where nothing is decoded
    scoring: str = ""  # hash of everything that turns its answer into scores; "" for lm-eval, else it forces rescoring
    greedy: Sequence[bool] = ()  # for each option: whether greedy decoding would generate it
    asked: int = 1  # 0: not in the plan that ran last, so reports exclude it
    tokens: Sequence[int] = ()  # of the answer; empty where nothing is generated, and in rows older than this column


@dataclass(frozen=True)
class Observation:
    """Attention statistics of one head over an experiment's samples of a task."""

    experiment: str
    model: str
    task: str
    layer: int
    head: int
    samples: int
    needle_mass: float
    entropy: float
    copy_score: float


RowKey = tuple[str, str, str, str]  # experiment, model, task, trial id
Recording = tuple[str, str, str]  # experiment, model, task

# Types of columns, read from the annotations of Row and Observation: a new field needs nothing else.
_SQL_TYPES = {"int": "INTEGER", "float": "REAL"}  # all others: TEXT
_JSON_TYPES: dict[str, type] = {"Mapping": dict, "Sequence": list}
JSON_COLUMNS = {  # column -> type of its JSON
    f.name: _JSON_TYPES[kind] for f in fields(Row) if (kind := str(f.type).split("[")[0]) in _JSON_TYPES
}
# Condition on a row's receipt: a part of its intervention had nothing to act on, so it is not the condition that it names.
NOTHING_HIDDEN = f"instr(receipt, '\"{NOTHING_TO_HIDE}') > 0"


# Types of the objects in the table `meta`. Fields that are not declared may have any value.
_Attention = TypedDict("_Attention", {"query_heads": int})
_Layer = TypedDict("_Layer", {"kind": str, "attention": _Attention | None, "recurrent": dict[str, Any] | None}, total=False)
_Anatomy = TypedDict("_Anatomy", {"layers": list[_Layer], "window": int | None, "parameters": int | None}, total=False)
_Check = TypedDict("_Check", {"law": str, "outcome": str})
_Software = TypedDict("_Software", {"needlework": str})
_Checkup = TypedDict(
    "_Checkup",
    {"checks": list[_Check], "quick": bool, "at": str, "versions": _Software, "identity": NotRequired[dict[str, Any]]},
)
_Identity = TypedDict("_Identity", {"weights": str, "tokenizer": str, "dtype": str, "window_rule": str}, total=False)


class _Model(_Identity, total=False):
    source: str
    anatomy: _Anatomy | None
    checkup: _Checkup | None


_Task = TypedDict("_Task", {"kind": str, "options": dict[str, Any]}, total=False)
_Experiment = TypedDict("_Experiment", {"tasks": dict[str, _Task], "models": list[str], "interventions": list[str]}, total=False)


class _RecordedRanking(BaseModel):
    """A head ranking, and each head's attention mass on the first token by layer (empty if it comes from a file)."""

    model_config = ConfigDict(strict=True, extra="allow")
    order: str
    sinks: dict[int, Annotated[list[float], Field(min_length=1)]]
    sinks_by_entropy: dict[int, Annotated[list[float], Field(min_length=1)]]

    @model_validator(mode="after")
    def _fits(self) -> _RecordedRanking:
        ranked = [(head.layer, head.index) for head in Ranking.parse(self.order).order]
        for layer, sinks in self.sinks.items():
            heads = [head for at, head in ranked if at == layer]
            if len(self.sinks_by_entropy.get(layer, ())) != len(sinks) or not heads or max(heads) >= len(sinks):
                raise ValueError(f"layer {layer} has other heads than its order")
        return self


_LayerRow = TypedDict(
    "_LayerRow",
    {"layer": int, "phase": str, "tokens": int, "added": float, "attention": float | None, "recurrent": float | None},
)
META: dict[str, TypeAdapter[Any]] = {  # type of each entry of the table `meta`; other keys are not checked
    "semantics_version": TypeAdapter(int | None),
    "scores_version": TypeAdapter(int | None),
    "models": TypeAdapter(dict[str, _Model]),
    "experiments": TypeAdapter(dict[str, _Experiment]),
    "plan": TypeAdapter(dict[str, Any]),
    "recorded": TypeAdapter(list[tuple[str, str, str, str]]),
    "layers": TypeAdapter(list[tuple[str, str, str, list[_LayerRow]]]),
    "skipped": TypeAdapter(list[str]),
    "rankings": TypeAdapter(dict[str, dict[str, _RecordedRanking]]),
    "planned": TypeAdapter(list[tuple[str, str, str, int]]),
}


def column_types(cls: type) -> dict[str, str]:
    """Return the SQL type of each column of a table."""
    return {f.name: _SQL_TYPES.get(str(f.type), "TEXT") for f in fields(cls)}


def columns(cls: type) -> str:
    """Return the SQL declaration of a table's columns."""
    return ", ".join(f"{name} {kind} NOT NULL" for name, kind in column_types(cls).items())


def default_of(column: str) -> str:
    """Return the SQL literal of a column of Row for rows that are older than it."""
    row_field = next(f for f in fields(Row) if f.name == column)
    if row_field.default_factory is not MISSING:
        return f"'{json.dumps(row_field.default_factory())}'"
    value = json.dumps(row_field.default) if column in JSON_COLUMNS else row_field.default
    return str(value) if column_types(Row)[column] != "TEXT" else f"'{value}'"


def digest(names: Iterable[str]) -> str:
    """Hash a set of names, independent of their order."""
    return hashlib.sha256("\n".join(sorted(set(names))).encode()).hexdigest()[:24]


_BATCH = 500  # rows that are scored again together


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
    """Rebuild the answer of a row; how it finished is known even if scoring failed."""
    finish = trial.facts.get(ANSWER_FINISH, trial.finish)
    error, logs = trial.error if finish == "failed" else "", tuple(trial.logprobs)
    rest = {"margins": tuple(trial.margins), "receipt": Receipt.from_dict(trial.receipt), "finish": finish, "error": error}
    if trial.mode == "generate":
        return Answer(tuple(trial.tokens), logs, text=trial.output, **rest)
    options = (logs,) if trial.mode == "perplexity" else tuple((value,) for value in logs)
    return Answer(option_logprobs=options, greedy=tuple(trial.greedy), **rest)


@dataclass(frozen=True)
class Rescored:
    """Counts of a rescoring."""

    rows: int  # processed: rows of the plan whose task is recorded
    changed: int  # rows with other scores than before
    kept: int  # rows that could not be scored and keep their scores
    why: str  # error of the first of these


def rescore(store: Store, make_task: Callable[[Mapping[str, Any]], Task] | None = None) -> Rescored:
    """Compute the scores of all rows of the plan again, except those that lm-eval scored."""
    if make_task is None:
        from needlework.tasks import make_task as known_tasks

        make_task = known_tasks
    rows = changed = kept = 0
    why = ""
    experiments = store.meta("experiments") or {}
    for name, task_name, known in [(e, t, known) for e in experiments for t, known in experiments[e].get("tasks", {}).items()]:
        kind = known.get("kind", "")
        task: Task | None = None
        where = "experiment = ? AND task = ? AND kind = ? AND kind != ? AND asked"
        rowids = store.db.execute(f"SELECT rowid FROM trials WHERE {where}", (name, task_name, kind, LM_EVAL)).fetchall()
        rows += len(rowids)
        for start in range(0, len(rowids), _BATCH):
            batch = [row for (row,) in rowids[start : start + _BATCH]]
            again = []
            for trial in list(store.rows(f"rowid IN ({', '.join('?' for _ in batch)})", batch)):
                try:
                    task = task or make_task({"kind": kind, **known.get("options", {})})  # raises if its plugin is missing
                    answer, new = stored_answer(trial), dict[str, Any]()
                    if answer.finish != "failed":
                        facts = {name: value for name, value in trial.facts.items() if name != ANSWER_FINISH}
                        new = {
                            "scores": task.score(stored_item(trial), answer),
                            "finish": answer.finish,
                            "error": "",
                            "facts": facts,
                        }
                    again.append(replace(trial, scoring=scoring(task), **new))
                except Exception as error:
                    kept, why = kept + 1, why or f"{trial.task}: {error}"
                    continue
                changed += json.dumps(again[-1].scores, sort_keys=True) != json.dumps(trial.scores, sort_keys=True)
            store.add(again)
    (asked,) = store.db.execute("SELECT count(*) FROM trials WHERE asked AND kind != ?", (LM_EVAL,)).fetchone()
    if not kept and rows == asked:  # else some rows, e.g. of unknown tasks, keep old scores
        store.set_meta("scores_version", SCORES_VERSION)
    return Rescored(rows, changed, kept, why)
