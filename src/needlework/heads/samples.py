"""Draw the samples that heads are ranked and evaluated on, and tokenize their correct answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from needlework.errors import NeedleworkError
from needlework.interventions.base import NONE, Intervention
from needlework.measure import Progress, Sample, make_samples, measure, no_progress, require_tokenizer, run_requests
from needlework.requests import Request
from needlework.stats import Estimate, accuracy
from needlework.subject import Subject
from needlework.tasks import toy
from needlework.tasks.base import Item, Task, make_task
from needlework.tasks.prompts import token_ids

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
    """Draw samples of retrieval tasks, spread evenly over tasks and their grids; deterministic for a seed.

    Samples whose needle lies outside of the model's attention window are skipped, because no head can attend to it, and so are
    prompts in `without`, such as those drawn for another purpose. Fewer are returned where a task has no more.
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
    log_p: float = math.nan  # log-likelihood of the answer without intervention, in nats


AblationPhase = Literal["both", "decode"]
AnswerTrial = tuple[AnsweredItem, Intervention]


def with_answers(subject: Subject, items: Sequence[Item]) -> list[AnsweredItem]:
    """Return all samples with the tokens of their correct answers, whose log-likelihood is not known yet."""
    return [AnsweredItem(i, item, answer_tokens(subject, item)) for i, item in enumerate(items)]


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
    every = with_answers(subject, items)
    return keep_correct(every, *score_answers(subject, [(x, NONE) for x in every]))


def keep_correct(every: Sequence[AnsweredItem], log_p: np.ndarray, right: np.ndarray) -> list[AnsweredItem]:
    """Return the samples that are answered correctly, each with its log-likelihood; raise if there are none."""
    if not right.any():
        raise NeedleworkError(
            f"the model answers none of the {len(every)} samples right, so no head can be credited with it; choose an easier"
            " task (shorter lengths), or a model that retrieves"
        )
    return [replace(x, log_p=float(log_p[i])) for i, x in enumerate(every) if right[i]]


def score_answers(
    subject: Subject, trials: Sequence[AnswerTrial], phase: AblationPhase = "both", progress: Progress = no_progress
) -> tuple[np.ndarray, np.ndarray]:
    """Score the correct answers of all trials in one run of the engine, which computes shared prefixes once.

    Args:
        phase: The phase of the interventions. With "both", prompt and answer are scored as one text; with "decode", the answer
            is generated with its tokens forced, or freely where there is no intervention.

    Returns:
        Log-likelihoods of the answers [trials]; and whether greedy decoding gives them [trials], which in phase "decode" is
        False under any intervention.
    """
    requests = []
    for x, act in trials:
        if phase == "both":
            requests.append(Request(x.item.prompt, act, options=(x.answer,), spans=x.item.spans))
        else:
            forced = () if act == NONE else x.answer
            requests.append(Request(x.item.prompt, act, len(x.answer), forced=forced, spans=x.item.spans))
    answers = run_requests(subject, requests, [x.item.id for x, _ in trials], progress)
    if phase == "both":
        return np.array([answer.totals[0] for answer in answers]), np.array([answer.greedy[0] for answer in answers])
    right = [act == NONE and answer.tokens == x.answer for (x, act), answer in zip(trials, answers, strict=True)]
    return np.array([sum(answer.logprobs) for answer in answers]), np.array(right)


def evidence(used: Sequence[AnsweredItem], items: Sequence[Item]) -> dict[str, Any]:
    """Return which samples a method used, for the ranking file: those that the model answers correctly."""
    return {"given": len(items), "used": [x.place for x in used]}
