"""Run samples under interventions on a model: samples become requests, and requests become answers and scores.

All model requests go through this module: plans, head rankings and their evaluation, recurrent ablations, pruning figures,
model cards and lm-eval. It has two entry points, the second built on the first, which take the requests of `Item.requests`:

- `run_requests` runs requests and raises for an answer that failed;
- `measure` runs every sample under every intervention and scores the answers.

Work that needs activations and not only answers goes through `map_samples`, so that it can also run on remote workers. Does
not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Phase
from needlework.interventions.base import NONE, Intervention
from needlework.requests import Answer, Request, stop_tokens
from needlework.tasks.base import Ending, Item, Task

if TYPE_CHECKING:
    from needlework.engine.prefill import KeptPrefills
    from needlework.subject import Subject

T = TypeVar("T")
Progress = Callable[[float], None]  # called with the share of the work that is done, from 0 to 1
SampleFunction = Callable[["Subject", Sequence[Any], Progress], T]  # must be picklable to run on remote workers


def no_progress(share: float) -> None:
    """Ignore progress; the default."""


@dataclass(frozen=True)
class Sample:
    """One sample of a task. Tasks that generate need `item.ending`: token limit and stop tokens."""

    task: Task
    item: Item

    def requests(self, intervention: Intervention = NONE, boundary: Phase = "decode") -> list[Request]:
        """Return the requests of this sample: one, unless it has several prompts."""
        return self.item.requests(self.task.mode, intervention, self.item.ending, boundary)

    def score(self, answer: Answer) -> dict[str, float]:
        """Return the task's scores of an answer."""
        return self.task.score(self.item, answer)


def task_ending(subject: Subject, task: Task) -> Ending:
    """Return the token limit of a task, and the token ids that end an answer: the task's stop and the model's end tokens."""
    most, stop = task.ending(require_tokenizer(subject))
    eos = getattr(subject.model.generation_config, "eos_token_id", None)
    return most, stop_tokens(eos, () if stop is None else (stop,), partial(subject.encode, continuation=True))


def make_samples(subject: Subject, task: Task, seed: int) -> list[Sample]:
    """Return all samples of a task for this model and seed, each with its ending."""
    ending, anatomy = task_ending(subject, task), subject.anatomy
    items = task.items(require_tokenizer(subject), seed, anatomy.window, anatomy.max_tokens)
    return [Sample(task, item if item.ending else replace(item, ending=ending)) for item in items]


def require_tokenizer(subject: Subject) -> Any:
    """Return the model's tokenizer; raise if it has none, since tasks are text."""
    if subject.tokenizer is None:
        raise NeedleworkError("this model has no tokenizer, and tasks need one; save it beside the model: save_pretrained(...)")
    return subject.tokenizer


def run_requests(
    subject: Subject,
    requests: Sequence[Request],
    names: Sequence[str] | None = None,
    progress: Progress = no_progress,
    kept: KeptPrefills | None = None,
) -> list[Answer]:
    """Run requests in one run of the engine and return their answers in order, with their text.

    Args:
        requests: The engine shares prefixes and layers among them, so pass related requests in one call.
        names: The name of each request in error messages, e.g. the ids of samples.
        progress: Called with the share of finished answers after each answer.
        kept: Prefills of earlier runs on a local model, which are not read again.

    Raises:
        NeedleworkError: A request is invalid, or its answer failed (not finite, or an intervention that did not act).
    """
    answers: dict[int, Answer] = {}
    for i, answer in subject.engine.run(requests) if kept is None else subject.engine.run(requests, kept):
        if answer.error:
            under = f" under {requests[i].intervention}" if requests[i].intervention.parts else ""
            raise NeedleworkError(f"{names[i] if names else f'request {i}'}{under}: {answer.error}")
        answers[i] = subject.with_text(answer)
        progress(len(answers) / len(requests))
    return [answers[i] for i in range(len(requests))]


@dataclass(frozen=True)
class Results:
    """The answers to samples under interventions."""

    samples: Sequence[Sample]
    interventions: Sequence[Intervention]
    answers: Sequence[Sequence[Answer]]  # [interventions][samples]

    @cached_property
    def scores(self) -> list[list[dict[str, float]]]:
        """Every score of every answer: [interventions][samples][name]."""
        return [[sample.score(answer) for sample, answer in zip(self.samples, row, strict=True)] for row in self.answers]

    def values(self, score: str = "correct") -> np.ndarray:
        """Return one score of every answer: array [interventions, samples]."""
        return np.array([[scores[score] for scores in row] for row in self.scores]).reshape(len(self.answers), len(self.samples))


def measure(
    subject: Subject,
    samples: Sequence[Sample],
    interventions: Sequence[Intervention] = (NONE,),
    *,
    boundary: Phase = "decode",
    progress: Progress = no_progress,
) -> Results:
    """Run every sample under every intervention, in one run of the engine, and return the answers with their scores.

    Equal interventions run once. A failed answer raises: see `run_requests`. The subject may be local, or a `RemoteSubject`
    whose workers run the requests.

    Example:
        samples = make_samples(subject, make_task({"kind": "niah"}), seed=0)
        correct = measure(subject, samples, [NONE, parse("ablate_attention()")]).values("correct")  # [2, samples]
    """
    distinct = list(dict.fromkeys(interventions))
    asked = [(act, i, request) for act in distinct for i, one in enumerate(samples) for request in one.requests(act, boundary)]
    names = [samples[i].item.id for _, i, _ in asked]
    parts: dict[tuple[Intervention, int], list[Answer]] = {}
    for (act, i, _), answer in zip(asked, run_requests(subject, [r for *_, r in asked], names, progress), strict=True):
        parts.setdefault((act, i), []).append(answer)
    answers = [[reduce(add, parts[act, i]) for i in range(len(samples))] for act in interventions]
    return Results(samples, interventions, answers)


@runtime_checkable
class Remote(Protocol):
    """A subject whose model is loaded by remote workers, which run functions on samples and requests of its engine."""

    def map_samples(self, function: SampleFunction[T], samples: Sequence[Any], progress: Progress, whole: bool) -> list[T]: ...


def map_samples(
    subject: Subject, function: SampleFunction[T], samples: Sequence[Any], progress: Progress, whole: bool = False
) -> list[T]:
    """Apply a function of (subject, samples, progress) to the samples and return its results in the order of the samples.

    A local model gets all samples in one call. Remote workers get a slice of the samples per call, so the caller joins the
    results; with `whole`, one worker gets all samples, for results that cannot be joined from slices.
    """
    if isinstance(subject, Remote):
        return subject.map_samples(function, samples, progress, whole)
    return [function(subject, samples, progress)]
