"""Samples that heads are ranked and judged on: of a retrieval task, inside the model's window, asked under any intervention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions.base import NONE, Intervention
from needlework.requests import Request, stop_tokens
from needlework.stats import accuracy
from needlework.tasks import toy
from needlework.tasks.base import Item, Task, make_task

if TYPE_CHECKING:
    from needlework.subject import Subject

Progress = Callable[[float], None]
LEAST_RETRIEVAL = 0.5  # of the untouched model: where it finds less, there is hardly anything that a head could be credited with
MOST_SAMPLES = 100_000
_DEPTHS = (0, 25, 50, 75, 100)
_NIAH: dict[str, dict[str, Any]] = {
    "toy": {"kind": "niah", "lengths": (64, 128, 192), "depths": _DEPTHS, "distractors": 3},
    "english": {"kind": "niah", "lengths": (192, 256), "depths": _DEPTHS, "reserve_tokens": 60},
}
_RECALL: dict[str, Any] = {"sizes": (4, 8, 16)}
NAMES = ("niah", "recall")


@dataclass(frozen=True)
class Sample:
    """One sample of a task. Its item says how an answer ends."""

    task: Task
    item: Item

    def request(self, act: Intervention = NONE) -> Request:
        assert self.item.ending is not None
        new_tokens, stop = self.item.ending
        return Request(self.item.prompt, act, new_tokens, stop, self.item.spans, self.item.twins)


def named_tasks(name: str, subject: Subject) -> list[Task]:
    """The tasks that a name stands for: needles in a haystack, or lists of keys and values, in the model's own language."""
    if name not in NAMES:
        raise NeedleworkError(f"there is no task {name!r} to rank heads by; {did_you_mean(name, NAMES)} Or give a plan")
    if name == "niah":
        return [make_task(_NIAH["toy" if toy.is_toy(_tokenizer(subject)) else "english"])]
    return [make_task({"kind": kind, **_RECALL}) for kind in ("mqar", "phone_book")]


def retrieval_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Those of some tasks whose answers stand in the prompt and are generated."""
    return [task for task in tasks if task.ability == "retrieval" and task.mode == "generate"]


def draw(
    subject: Subject, tasks: Sequence[Task], samples: int, seed: int, without: Collection[tuple[int, ...]] = ()
) -> list[Sample]:
    """So many samples, spread evenly over tasks and their grids; the same ones for the same seed. None of the prompts `without`.

    Needles that the model's window leaves out are left out here: no head could have seen them.
    """
    check_count(samples)
    if not tasks:
        raise NeedleworkError("no task asks for something that stands in its prompt; give one of kind niah, mqar or phone_book")
    drawn: list[Sample] = []
    for number, task in enumerate(tasks):
        wanted = samples * (number + 1) // len(tasks) - samples * number // len(tasks)
        drawn += _spread(list(_of_task(subject, task, wanted, seed, without)), wanted)
    if not drawn and without:
        raise NeedleworkError(
            f"no samples are left that nothing was ranked or chosen by ({len(without)} were drawn already): give the task"
            " more prompts, or fewer --samples"
        )
    if not drawn:
        raise NeedleworkError("no needle of these tasks lies in the model's window; choose shorter lengths")
    return drawn


def check_heads(subject: Subject) -> None:
    if not subject.anatomy.heads:
        raise NeedleworkError(f"{subject.anatomy.architecture} has no attention heads, so there is nothing to rank")


def check_count(samples: int) -> None:
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= MOST_SAMPLES:
        raise NeedleworkError(f"samples={samples!r} must be a whole number, at least 1 and at most {MOST_SAMPLES:,}")


def _of_task(subject: Subject, task: Task, wanted: int, seed: int, without: Collection[tuple[int, ...]]) -> Iterator[Sample]:
    tokenizer, anatomy = _tokenizer(subject), subject.anatomy
    extent = task.extent()
    if extent is not None and "samples" in type(task).model_fields:
        each: int = task.samples  # type: ignore[attr-defined]
        task = task.model_copy(update={"samples": -(-wanted * each // extent.samples)})
    most, stop = task.ending(tokenizer)
    eos = getattr(subject.model.generation_config, "eos_token_id", None)
    ends = stop_tokens(eos, () if stop is None else (stop,), partial(subject.encode, continuation=True))
    seen = set(without)
    for item in task.items(tokenizer, seed, anatomy.window, anatomy.max_tokens):
        if item.facts.get("in_window", True) and item.spans.get("needle") and item.prompt not in seen:
            seen.add(item.prompt)
            yield Sample(task, item if item.ending else replace(item, ending=(most, ends)))


def _spread(items: list[Sample], count: int) -> list[Sample]:
    return items if len(items) <= count else [items[i * len(items) // count] for i in range(count)]


def _tokenizer(subject: Subject) -> Any:
    if subject.tokenizer is None:
        raise NeedleworkError("this model has no tokenizer, and tasks need one; save it beside the model: save_pretrained(...)")
    return subject.tokenizer


def correct(subject: Subject, samples: Sequence[Sample], acts: Sequence[Intervention], progress: Progress) -> np.ndarray:
    """Whether each sample is answered right under each intervention, [acts, samples]: one run of the engine for all."""
    place = {act: i for i, act in enumerate(dict.fromkeys(acts))}
    distinct = list(place)
    right = np.zeros((len(distinct), len(samples)))
    requests = [sample.request(act) for act in distinct for sample in samples]
    for done, (i, answer) in enumerate(subject.engine.run(requests)):
        act, number = divmod(i, len(samples))
        sample = samples[number]
        if answer.error:
            raise NeedleworkError(f"{sample.item.id} under {distinct[act]}: {answer.error}")
        right[act, number] = sample.task.score(sample.item, subject.with_text(answer))["correct"]
        progress((done + 1) / len(requests))
    return np.asarray(right[[place[act] for act in acts]])


def untouched(subject: Subject, samples: Sequence[Sample], progress: Progress) -> np.ndarray:
    """Which samples the model answers right with nothing done to it; an error if these are too few to rank heads by."""
    right: np.ndarray = correct(subject, samples, [NONE], progress)[0]
    share = accuracy(right)
    if share.value < LEAST_RETRIEVAL:
        raise NeedleworkError(
            f"with nothing done to it the model retrieves {share.text()}: no ranking can be had from a task that it cannot do"
            f" (at least {LEAST_RETRIEVAL:.0%}); give a plan with shorter or other tasks (--task), or a model that retrieves"
        )
    return right


def clusters(samples: Sequence[Sample]) -> list[str]:
    """Samples with one haystack are one cluster."""
    return [f"{sample.task.kind}/{sample.item.cluster}" for sample in samples]
