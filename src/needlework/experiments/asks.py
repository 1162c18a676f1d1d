"""Questions: one prompt under one intervention, who wants the answer, and which are asked together. Free of torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from needlework.experiments.models import Sketch
from needlework.experiments.plan import Experiment, NamedTask
from needlework.interventions import Intervention
from needlework.interventions.acts import Phase
from needlework.requests import Request, sample_key
from needlework.store import SEMANTICS_VERSION as SEMANTICS_VERSION
from needlework.store import digest
from needlework.tasks.base import Item, Mode

Key = tuple[str, str, str]  # experiment, task, trial id: a row of one model


@dataclass(frozen=True)
class Settings:
    """How an answer is decoded."""

    mode: Mode
    boundary: Phase
    max_new_tokens: int
    stop: frozenset[int]

    def text(self) -> str:
        if self.mode != "generate":  # scoring reads everything at once: nothing is decoded and nothing stops
            return self.mode
        return f"generate {self.max_new_tokens} {self.boundary} {sorted(self.stop)}"


@dataclass(frozen=True)
class Home:
    """A row that wants an answer."""

    experiment: str
    task: NamedTask
    item: Item
    seed: int


@dataclass
class Ask:
    """One prompt under one intervention, and the rows that its answer goes to."""

    id: str
    prompt_id: str
    item: Item
    intervention: Intervention
    settings: Settings
    homes: list[Home] = field(default_factory=list)

    def request(self) -> Request:
        whole_text = self.settings.mode == "perplexity"  # scored from its second token on
        return Request(
            prompt=self.item.prompt[:1] if whole_text else self.item.prompt,
            intervention=self.intervention,
            max_new_tokens=self.settings.max_new_tokens,
            stop=self.settings.stop,
            spans={} if whole_text else self.item.spans,
            twins=self.item.twins,
            boundary=self.settings.boundary,
            sample=sample_key(self.item.prompt),
            options=() if self.settings.mode == "generate" else self.options(),
        )

    def options(self) -> tuple[tuple[int, ...], ...]:
        """Continuations that are scored."""
        return (self.item.prompt[1:],) if self.settings.mode == "perplexity" else self.item.options

    def wanted(self) -> list[Key]:
        """The rows that this answer goes to."""
        return [(home.experiment, home.task.name, self.id) for home in self.homes]


@dataclass(frozen=True)
class Watched:
    """A task whose attention is recorded: all its samples, with nothing done to the model."""

    experiment: Experiment
    task: NamedTask
    asks: tuple[Ask, ...]

    def content(self) -> str:
        """A hash of what is recorded: every prompt, and how it is answered."""
        return digest(ask.id for ask in self.asks)


@dataclass
class Work:
    """Everything that a plan asks of one model."""

    sketch: Sketch
    asks: list[Ask] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # what this model has no parts for, in words
    repeated: int = 0  # the same question twice in one task: asked and counted once


def item_digest(item: Item) -> str:
    """A hash of the tokens of a sample and of everything an intervention reads from it."""
    content: list[Any] = [
        list(item.prompt),
        {name: [list(part) for part in span] for name, span in item.spans.items()},
        {name: list(twin) for name, twin in item.twins.items()},
        [list(option) for option in item.options],
    ]
    return _hash(json.dumps(content, sort_keys=True, separators=(",", ":")))


def trial_id(sketch: Sketch, digest: str, intervention: str, settings: Settings) -> str:
    """Equal ids mean equal answers: only what can change an answer goes in. Pinned by a golden test."""
    identity = sketch.identity()
    parts = [str(SEMANTICS_VERSION), *(identity[key] for key in sorted(identity)), digest, intervention, settings.text()]
    return _hash("\0".join(parts))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def chunks(work: Work, most_asks: int, most_flops: float) -> Iterator[Sequence[Ask]]:
    """Questions that are handed over together: all interventions of a prompt, prompts of like length side by side.

    What a chunk holds depends on the plan alone, never on what is already done. A resumed run asks an unfinished chunk
    again as a whole, so that the same questions share a batch and every number comes out as in an uninterrupted run.
    """
    prompts: dict[tuple[str, str], list[Ask]] = {}
    for ask in work.asks:
        prompts.setdefault((ask.settings.text(), ask.prompt_id), []).append(ask)
    order = sorted(prompts.values(), key=lambda asks: (asks[0].settings.mode, len(asks[0].item.prompt)))
    batch: list[Ask] = []
    flops = 0.0
    for asks in order:
        cost = sum(2.0 * work.sketch.anatomy.parameters * (len(ask.item.prompt) + answer_tokens(ask)) for ask in asks)
        other = bool(batch) and batch[0].settings.mode != asks[0].settings.mode  # generating and scoring are two calls
        if batch and (other or len(batch) + len(asks) > most_asks or flops + cost > most_flops):
            yield batch
            batch, flops = [], 0.0
        batch += asks
        flops += cost
    if batch:
        yield batch


def answer_tokens(ask: Ask) -> int:
    """How many tokens are read after the prompt, at most."""
    return sum(map(len, ask.options())) if ask.settings.mode != "generate" else ask.settings.max_new_tokens
