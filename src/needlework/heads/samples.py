"""Draw the samples that heads are ranked and evaluated on, and tokenize their correct answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from needlework.errors import NeedleworkError
from needlework.measure import Progress, Sample, make_samples, measure, require_tokenizer, run_requests
from needlework.requests import Request
from needlework.stats import Estimate, accuracy
from needlework.tasks import toy
from needlework.tasks.base import Item, Task, make_task
from needlework.tasks.prompts import token_ids

if TYPE_CHECKING:
    from needlework.subject import Subject

LEAST_RETRIEVAL = 0.5  # least accuracy without intervention: below it, too little retrieval is left to rank heads by
MOST_SAMPLES = 100_000
_DEPTHS = (0, 25, 50, 75, 100)
_NIAH_TOY = {"kind": "niah", "lengths": (64, 128, 192), "depths": _DEPTHS, "distractors": 3}
_NIAH_ENGLISH = {"kind": "niah", "lengths": (192, 256), "depths": _DEPTHS, "reserve_tokens": 60}
NAMES = ("niah", "recall")


def named_tasks(name: str, subject: Subject) -> list[Task]:
    """Return the tasks of one of NAMES ("niah", or "recall" for key-value lists), in the model's language."""
    if name == "niah":
        return [make_task(_NIAH_TOY if toy.is_toy(require_tokenizer(subject)) else _NIAH_ENGLISH)]
    return [make_task({"kind": kind, "sizes": (4, 8, 16)}) for kind in ("mqar", "phone_book")]


def draw_samples(
    subject: Subject, tasks: Sequence[Task], samples: int, seed: int, without: Collection[tuple[int, ...]] = ()
) -> list[Sample]:
    """Draw samples, spread evenly over tasks and their grids; deterministic for a seed.

    Samples whose needle lies outside of the model's attention window are skipped, because no head can attend to it. Fewer than
    `samples` are returned where a task has no more.

    Args:
        tasks: Retrieval tasks.
        samples: Number of samples to draw.
        seed: Seed of the tasks.
        without: Prompts (token ids) to skip, e.g. those drawn for another purpose.
    """
    check_count(samples)
    if not tasks:
        raise NeedleworkError("no task asks for something that stands in its prompt; give one of kind niah, mqar or phone_book")
    drawn: list[Sample] = []
    for number, task in enumerate(tasks):
        wanted = samples * (number + 1) // len(tasks) - samples * number // len(tasks)
        extent = task.extent()
        if extent is not None and "samples" in type(task).model_fields:
            each: int = task.samples  # type: ignore[attr-defined]
            task = task.model_copy(update={"samples": -(-wanted * each // extent.samples)})
        found: dict[tuple[int, ...], Sample] = {}
        for sample in make_samples(subject, task, seed):
            item = sample.item
            if item.facts.get("in_window", True) and item.spans.get("needle") and item.prompt not in without:
                found.setdefault(item.prompt, sample)
        some = list(found.values())
        drawn += some if len(some) <= wanted else [some[i * len(some) // wanted] for i in range(wanted)]
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


def measure_baseline(subject: Subject, samples: Sequence[Sample], progress: Progress) -> Estimate:
    """Return the accuracy of the model without intervention; raise if it is too low."""
    share = accuracy(measure(subject, samples, progress=progress).values()[0])
    if share.value < LEAST_RETRIEVAL:
        raise NeedleworkError(
            f"with nothing done to it the model retrieves {share.text()}: no ranking can be had from a task that it cannot do"
            f" (at least {LEAST_RETRIEVAL:.0%}); give a plan with shorter or other tasks (--task), or a model that retrieves"
        )
    return share


def sample_clusters(samples: Sequence[Sample]) -> list[str]:
    """Return the cluster of each sample, e.g. its haystack; samples of one cluster are resampled together."""
    return [f"{sample.task.kind}/{sample.item.cluster}" for sample in samples]


@dataclass(frozen=True)
class AnsweredItem:
    """A sample with the tokens of its correct answer and their log-likelihood."""

    place: int  # index among the given items
    item: Item
    answer: tuple[int, ...]
    log_p: float  # log-likelihood of the answer without intervention, in nats


def answer_tokens(subject: Subject, item: Item) -> tuple[int, ...]:
    """Return the tokens of the correct answer as they follow the prompt.

    They are the correct option, if the item has options. Otherwise the target is tokenized together with the prompt, because
    tokenizers merge a space with the next word; or alone where that changes the prompt's tokens (e.g. a chat template).
    """
    if item.options and item.answer is not None:
        return item.options[item.answer]
    tokenizer = subject.tokenizer
    if tokenizer is None or not item.target:
        raise NeedleworkError(
            f"{item.id}: its right answer is not known in tokens; give it options, or a target and a model with a tokenizer"
        )
    for special in (False, True):
        whole = token_ids(tokenizer, item.prompt_text + item.target, special)
        if whole[: len(item.prompt)] == item.prompt and len(whole) > len(item.prompt):
            return whole[len(item.prompt) :]
    return token_ids(tokenizer, item.target)


def select_correct(subject: Subject, items: Sequence[Item]) -> list[AnsweredItem]:
    """Return the samples whose correct answer greedy decoding gives without intervention, in order; raise if there are none."""
    answers = [answer_tokens(subject, item) for item in items]
    requests = [Request(item.prompt, options=(answer,)) for item, answer in zip(items, answers, strict=True)]
    got = run_requests(subject, requests, [item.id for item in items])
    found = [AnsweredItem(i, item, answers[i], got[i].totals[0]) for i, item in enumerate(items) if got[i].greedy[0]]
    return require_correct(found, items)


def require_correct(found: list[AnsweredItem], items: Sequence[Item]) -> list[AnsweredItem]:
    """Return the samples that are answered correctly; raise if there are none."""
    if not found:
        raise NeedleworkError(
            f"the model answers none of the {len(items)} samples right, so no head can be credited with it; choose an easier"
            " task (shorter lengths), or a model that retrieves"
        )
    return found


def evidence(used: Sequence[AnsweredItem], items: Sequence[Item]) -> dict[str, Any]:
    """Return which samples a method used, for the ranking file: those that the model answers correctly."""
    return {"given": len(items), "used": [x.place for x in used]}
