"""Tables of a store: a Row for each trial, an Observation for each head. docs/store.md describes every column."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from needlework.interventions import Ranking

SCHEMA_VERSION = 2
# Increment when the semantics of an intervention, a phase or a task's prompt change: old stores are then refused. For a
# changed score, increment tasks.scores.SCORES_VERSION instead: stored answers are then scored again.
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

JSON_COLUMNS: dict[str, type] = {  # column -> type of its JSON
    **dict.fromkeys(("spans", "facts", "scores", "receipt"), dict),
    **dict.fromkeys(("logprobs", "margins", "greedy", "tokens"), list),
}
_REAL = {"seconds", "needle_mass", "entropy", "copy_score"}
WHOLE_COLUMNS = {"seed", "prompt_tokens", "layer", "head", "samples", "asked"}


class _Meta(BaseModel):
    """Base of objects in the table `meta`. Fields that are not declared may have any value."""

    model_config = ConfigDict(strict=True, extra="allow")


class _AttentionPart(_Meta):
    query_heads: int


class _Layer(_Meta):
    kind: str = "other"
    attention: _AttentionPart | None = None
    recurrent: dict[str, Any] | None = None


class _Anatomy(_Meta):
    layers: list[_Layer] = []
    window: int | None = None
    parameters: int | None = None


class _Check(_Meta):
    law: str
    outcome: str


class _Software(_Meta):
    needlework: str


class _Checkup(_Meta):
    checks: list[_Check]
    quick: bool
    at: str
    versions: _Software
    identity: dict[str, Any] = {}


class _Model(_Meta):
    weights: str = ""
    tokenizer: str = ""
    dtype: str = ""
    window_rule: str = ""
    source: str = ""
    anatomy: _Anatomy | None = None
    checkup: _Checkup | None = None


class _Task(_Meta):
    kind: str = ""
    options: dict[str, Any] = {}


class _Experiment(_Meta):
    tasks: dict[str, _Task] = {}
    models: list[str] = []
    interventions: list[str] = []


class _RecordedRanking(_Meta):
    """A head ranking, and each head's attention mass on the first token by layer (empty if it comes from a file)."""

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


META: dict[str, TypeAdapter[Any]] = {  # type of each entry of the table `meta`; other keys are not checked
    "semantics_version": TypeAdapter(int | None),
    "scores_version": TypeAdapter(int | None),
    "models": TypeAdapter(dict[str, _Model]),
    "experiments": TypeAdapter(dict[str, _Experiment]),
    "plan": TypeAdapter(dict[str, Any]),
    "recorded": TypeAdapter(list[tuple[str, str, str, str]]),
    "skipped": TypeAdapter(list[str]),
    "rankings": TypeAdapter(dict[str, dict[str, _RecordedRanking]]),
    "planned": TypeAdapter(list[tuple[str, str, str, int]]),
}


def columns(cls: type) -> str:
    kind = {**dict.fromkeys(_REAL, "REAL"), **dict.fromkeys(WHOLE_COLUMNS, "INTEGER")}
    return ", ".join(f"{f.name} {kind.get(f.name, 'TEXT')} NOT NULL" for f in fields(cls))


def digest(names: Iterable[str]) -> str:
    """Hash a set of names, independent of their order."""
    return hashlib.sha256("\n".join(sorted(set(names))).encode()).hexdigest()[:24]
