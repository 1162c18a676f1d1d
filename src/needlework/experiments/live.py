"""Loaded models as a run sees them. The only module of a run that needs torch, and only when a model is loaded."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from needlework.errors import NeedleworkError
from needlework.experiments.asks import Ask, Work, answer_tokens
from needlework.experiments.models import Sketch, sketch
from needlework.experiments.plan import Model
from needlework.receipts import Receipt
from needlework.requests import Answer, Prepared, Request, prepare

if TYPE_CHECKING:
    from needlework.subject import Subject

Options = Sequence[tuple[int, ...]]


class Scored(Protocol):
    """Log-likelihoods of one question's options, token by token."""

    @property
    def logprobs(self) -> tuple[tuple[float, ...], ...]: ...
    @property
    def greedy(self) -> tuple[bool, ...]: ...
    @property
    def receipt(self) -> Receipt: ...
    @property
    def error(self) -> str: ...


class Seen(Protocol):
    """What one head looked at."""

    @property
    def layer(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def needle_mass(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def copy_score(self) -> float: ...


class Actor(Protocol):
    """A loaded model: it answers, scores options and lets its attention be watched. Results come as they finish."""

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]: ...
    def scores(self, asked: Sequence[tuple[Request, Options]]) -> Iterator[tuple[int, Scored]]: ...
    def watch(self, requests: Sequence[Request], span: str) -> Sequence[Seen]: ...
    def versions(self) -> dict[str, str]: ...


class Models(Protocol):
    """Where a run's models come from: looked at first, all of them, and loaded one at a time."""

    def look(self, model: Model) -> Sketch: ...
    def load(self, seen: Sketch) -> Actor: ...


class LiveModels:
    """Models from disk or hub."""

    def __init__(self, memory_bytes: int | None = None) -> None:
        self.memory_bytes = memory_bytes

    def look(self, model: Model) -> Sketch:
        return sketch(model)

    def load(self, seen: Sketch) -> Actor:
        from needlework.subject import load

        model = seen.model
        subject = load(
            seen.directory, device=model.device, dtype=model.dtype, window=model.window, memory_bytes=self.memory_bytes
        )
        return LiveActor(subject, model)


class _Scores(NamedTuple):
    logprobs: tuple[tuple[float, ...], ...]
    greedy: tuple[bool, ...]
    receipt: Receipt
    error: str
def check_memory(source: Models, works: Sequence[Work]) -> None:
    """Refuse, before anything is loaded or written, a limit that the largest question of some model does not fit into."""
    for work in works:
        if work.sketch.costs is not None:
            work.sketch.costs.check(getattr(source, "memory_bytes", None), _largest(work))


def _largest(work: Work) -> Iterator[Prepared]:
    """The longest question of each kind under each intervention."""
    longest: dict[tuple[str, str], Ask] = {}
    for ask in sorted(work.asks, key=lambda ask: len(ask.item.prompt) + answer_tokens(ask)):
        longest[ask.settings.mode, str(ask.intervention)] = ask
    for ask in longest.values():
        with suppress(NeedleworkError):  # what cannot be asked of this prompt fails its own trial
            yield prepare(ask.request(), work.sketch.anatomy)



class LiveActor:
    def __init__(self, subject: Subject, model: Model) -> None:
        self.subject, self.model = subject, model

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        for i, answer in self.subject.engine.run(requests):
            yield i, self.subject.with_text(answer)

    def scores(self, asked: Sequence[tuple[Request, Options]]) -> Iterator[tuple[int, Scored]]:
        for i, answer in self.subject.engine.run([request for request, _ in asked]):
            yield i, _Scores(answer.option_logprobs, answer.greedy, answer.receipt, answer.error)

    def watch(self, requests: Sequence[Request], span: str) -> Sequence[Seen]:
        from needlework.observation import observe

        with observe(self.subject, span=span) as seen:
            self.subject.answer(requests)
        return seen.table()

    def versions(self) -> dict[str, str]:
        import torch
        import transformers

        return {
            **software(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": str(self.subject.body.device),
            "dtype": self.model.dtype,
            "kernels": self.subject.body.kernels,
        }


def software() -> dict[str, str]:
    from needlework import __version__

    return {"needlework": __version__, "python": platform.python_version()}


def as_actor(subject: Any, model: Model) -> Actor:
    """A subject that is already in memory."""
    return LiveActor(subject, model)
