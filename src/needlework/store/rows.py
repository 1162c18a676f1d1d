"""What a store holds: a Row for each trial, an Observation for each head. docs/store.md describes every column."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

SCHEMA_VERSION = 2
# Raised when an intervention, a phase or a task's prompt changes its meaning: old answers are then asked for again. A changed
# score raises tasks.scores.SCORES_VERSION instead: old answers stay, and are scored again.
SEMANTICS_VERSION = 2
LM_EVAL = "lm-eval"  # kind of the rows that lm-evaluation-harness asks for and scores: no plan asks for them
ANSWER_FINISH = "answer_finish"  # fact of a row whose answer is there though its task could not score it: how it finished


@dataclass(frozen=True)
class Row:
    """One sample under one intervention, and everything that came of it."""

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
    versions: str = ""  # which row of the table `versions` made it
    kind: str = ""  # of its task, whatever name the plan gave the task
    ability: str = ""  # retrieval | knowledge | perplexity, as the task declares; "" is judged by no rule
    boundary: str = ""  # who owned the last prompt token: decode | prefill; "" where nothing is decoded
    scoring: str = ""  # hash of everything that turns its answer into scores; "" for scores of an older version
    greedy: Sequence[bool] = ()  # of each option: the model would have said it
    asked: int = 1  # 0: the plan that ran last no longer asks for it, so no report counts it
    tokens: Sequence[int] = ()  # of the answer; none where nothing is generated, and in rows of before this column


@dataclass(frozen=True)
class Observation:
    """What one head looked at, summed over an experiment's samples."""

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

JSON_COLUMNS: dict[str, type] = {  # and what their JSON is
    **dict.fromkeys(("spans", "facts", "scores", "receipt"), dict),
    **dict.fromkeys(("logprobs", "margins", "greedy", "tokens"), list),
}
_REAL = {"seconds", "needle_mass", "entropy", "copy_score"}
WHOLE_COLUMNS = {"seed", "prompt_tokens", "layer", "head", "samples", "asked"}


def columns(cls: type) -> str:
    kind = {**dict.fromkeys(_REAL, "REAL"), **dict.fromkeys(WHOLE_COLUMNS, "INTEGER")}
    return ", ".join(f"{f.name} {kind.get(f.name, 'TEXT')} NOT NULL" for f in fields(cls))


def digest(names: Iterable[str]) -> str:
    """A hash of a set of names, in whatever order they come."""
    return hashlib.sha256("\n".join(sorted(set(names))).encode()).hexdigest()[:24]
