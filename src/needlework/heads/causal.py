"""Rank heads by interventions: ablate one head, ablate all others, or patch its outputs into another prompt.

All methods measure the log-likelihood of the correct answer, on samples that the model answers correctly without intervention.
Heads are ablated at every position (phase "both") or only while the answer is generated (phase "decode").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from needlework.anatomy import Anatomy, Head
from needlework.errors import NeedleworkError
from needlework.heads.methods import Scores, method
from needlework.heads.samples import Question, answer_tokens, correct_questions, require_nonempty
from needlework.interventions.acts import Act, ChangeOutputs, LoweringContext, Place
from needlework.interventions.attention import AblateAttention, AblateHeads, OnlyHeads
from needlework.interventions.base import NONE, Intervention, Part
from needlework.measure import Progress, map_samples, no_progress, run_requests
from needlework.requests import Request
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from torch import Tensor

    from needlework.subject import Subject

When = Literal["both", "decode"]
_ROWS_AT_ONCE = 256  # batch limit of patching: prompts times heads
_LEAST_GAP = 0.1  # nats between prompt and twin; samples with a smaller gap are not used


class QuestionTrial(NamedTuple):
    """One question under one intervention."""

    question: Question
    intervention: Intervention


class AnswerScores(NamedTuple):
    """Log-likelihoods of the correct answers of a sequence of trials."""

    log_p: np.ndarray  # [trials]
    right: np.ndarray  # [trials] whether greedy decoding gives the answer; in phase "decode" False under any intervention


def score_answers(
    subject: Subject,
    trials: Sequence[QuestionTrial],
    when: When = "both",
    progress: Progress = no_progress,
    span: tuple[float, float] = (0.0, 1.0),
) -> AnswerScores:
    """Score the correct answers of all trials in one run of the engine, which computes shared prefixes once.

    Args:
        subject: The model.
        trials: Questions under interventions.
        when: The phase of the interventions. With "both", prompt and answer are scored as one text; with "decode", the answer
            is generated with its tokens forced, or freely where there is no intervention.
        progress: Called with the share of the caller's work that is done.
        span: Start and end of this call within the caller's work, as shares.
    """
    names = [trial.question.item.id for trial in trials]
    part = lambda share: progress(span[0] + (span[1] - span[0]) * share)  # noqa: E731
    answers = run_requests(subject, [_request(trial, when) for trial in trials], names, part)
    if when == "both":
        return AnswerScores(
            np.array([answer.totals[0] for answer in answers]), np.array([answer.greedy[0] for answer in answers])
        )
    said = zip(trials, answers, strict=True)
    right = [trial.intervention == NONE and answer.tokens == trial.question.answer for trial, answer in said]
    return AnswerScores(np.array([sum(answer.logprobs) for answer in answers]), np.array(right))


def _request(trial: QuestionTrial, when: When) -> Request:
    question, item = trial.question, trial.question.item
    if when == "both":
        return Request(item.prompt, trial.intervention, options=(question.answer,), spans=item.spans)
    forced = () if trial.intervention == NONE else question.answer
    return Request(item.prompt, trial.intervention, len(question.answer), forced=forced, spans=item.spans)


def keep_only(heads: Collection[Head], anatomy: Anatomy, when: When = "both") -> Intervention:
    """Return the intervention that ablates all heads except these; `heads` may be empty or all heads."""
    if len(heads) == len(anatomy.heads):
        return NONE
    return OnlyHeads(heads=tuple(heads), phase=when) if heads else AblateAttention(phase=when)


def _score_interventions(
    subject: Subject, items: Sequence[Item], acts: Sequence[Intervention], when: When, progress: Progress
) -> tuple[list[Question], np.ndarray]:
    """Return the samples that are answered correctly, and the log-likelihoods of their answers [samples, acts]."""
    if when == "both":
        asked = correct_questions(subject, items)
        trials = [QuestionTrial(question, act) for question in asked for act in acts]
        return asked, score_answers(subject, trials, when, progress).log_p.reshape(len(asked), len(acts))
    # The prefill is the same with and without these interventions: requested together, it is computed once.
    every = [Question(i, item, answer_tokens(subject, item), np.nan) for i, item in enumerate(items)]
    outcome = score_answers(
        subject, [QuestionTrial(question, act) for question in every for act in (NONE, *acts)], when, progress
    )
    log_p, right = (x.reshape(len(every), 1 + len(acts)) for x in outcome)
    asked = require_nonempty([replace(x, log_p=float(log_p[i, 0])) for i, x in enumerate(every) if right[i, 0]], items)
    return asked, log_p[right[:, 0], 1:]


def evidence(asked: Sequence[Question], items: Sequence[Item]) -> dict[str, Any]:
    """Return which samples a method used, for the ranking file: those that the model answers correctly."""
    return {"given": len(items), "used": [question.place for question in asked]}


@method("leave_one_out", "causal", "what the right answer loses (log P) when this head alone is silenced everywhere")
def leave_one_out(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, when: When = "both") -> Scores:
    """Score a head by the log P of the correct answer that is lost when only this head is ablated."""
    acts = [AblateHeads(heads=(head,), phase=when) for head in subject.anatomy.heads]
    asked, log_p = _score_interventions(subject, items, acts, when, progress)
    whole = np.array([question.log_p for question in asked])
    return Scores.of_samples(whole[:, None] - log_p, **evidence(asked, items), phase=when)


@method("add_one_in", "causal", "what the right answer gains (log P) when of all heads only this one speaks, over none at all")
def add_one_in(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, when: When = "both") -> Scores:
    """Score a head by the log P of the correct answer with all other heads ablated, minus that with all heads ablated."""
    acts = [keep_only((), subject.anatomy, when), *(keep_only((head,), subject.anatomy, when) for head in subject.anatomy.heads)]
    asked, log_p = _score_interventions(subject, items, acts, when, progress)
    return Scores.of_samples(log_p[:, 1:] - log_p[:, :1], **evidence(asked, items), phase=when)


method("leave_one_out_decode", "causal", "as leave_one_out, but heads are silenced only while the answer is given")(
    partial(leave_one_out, when="decode")
)
method("add_one_in_decode", "causal", "as add_one_in, but heads are silenced only while the answer is given")(
    partial(add_one_in, when="decode")
)


class OutputRecorder:
    """Recorder of the outputs of all heads on one text, which replays those of one head on another text of equal length.

    A model that calls a layer several times has several outputs at a position; they are replayed in the same order.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}  # (layer, position) -> outputs [heads, dim] of each call

    def record(self, outputs: Tensor, place: Place) -> Tensor:
        for query, position in enumerate(place.positions.tolist()):
            self._outputs.setdefault((place.layer, position), []).append(outputs[query].clone())
        return outputs

    def replay(self, head: Head) -> Callable[[Tensor, Place], Tensor]:
        """Return a function that replaces this head's outputs by the recorded ones."""
        calls: dict[tuple[int, int], int] = {}

        def replace_outputs(outputs: Tensor, place: Place) -> Tensor:
            for query, position in enumerate(place.positions.tolist()):
                key = (place.layer, position)
                recorded = self._outputs[key]
                outputs[query, head.index] = recorded[calls.get(key, 0) % len(recorded)][head.index]
                calls[key] = calls.get(key, 0) + 1
            return outputs

        return replace_outputs


class _ApplyFunction(Part):
    """Intervention that applies a function to the head outputs of some layers."""

    name = "apply_function"
    side = "attention"
    function: Any

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        return [ChangeOutputs(layer, self.function) for layer in self.where(context.anatomy)]


@method(
    "patching",
    "causal",
    "share of the right answer's log P that this head restores in a twin prompt with another needle",
)
def patching(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Patch the head's outputs on the prompt into the twin prompt, at every position.

    The score is (patched - twin) / (prompt - twin) in log P of the correct answer: 0 restores nothing, 1 restores all of it.
    """
    asked = [question for question in correct_questions(subject, items) if question.item.twins]
    if not asked:
        raise NeedleworkError("patching needs samples with a twin, a prompt with another needle: set twins: true in the task")
    in_twin = score_answers(subject, [QuestionTrial(_twin(question), NONE) for question in asked]).log_p
    gaps = np.array([question.log_p for question in asked]) - in_twin
    kept = [i for i, gap in enumerate(gaps) if gap >= _LEAST_GAP]
    if not kept:
        raise NeedleworkError("patching: the twins' needles do not make the right answer less likely, so nothing can be restored")
    used = [asked[i] for i in kept]
    patched = np.concatenate(map_samples(subject, _patched, used, progress))
    each = (patched - in_twin[kept, None]) / gaps[kept, None]
    return Scores.of_samples(each, **evidence(used, items), gap=float(gaps[kept].mean()))


def _patched(subject: Subject, asked: Sequence[Question], progress: Progress) -> np.ndarray:
    """Return the answers' log-likelihoods in the twins with each head patched, [questions, heads]."""
    heads, each = subject.anatomy.heads, []
    at_once = max(1, _ROWS_AT_ONCE // len(heads))
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        recorders = [OutputRecorder() for _ in some]
        score_answers(
            subject,
            [QuestionTrial(one, _ApplyFunction(function=recorder.record)) for one, recorder in zip(some, recorders, strict=True)],
        )
        trials = [
            QuestionTrial(_twin(one), _ApplyFunction(function=recorder.replay(head), layers=(head.layer,)))
            for one, recorder in zip(some, recorders, strict=True)
            for head in heads
        ]
        share = (start / len(asked), (start + len(some)) / len(asked))
        each.append(score_answers(subject, trials, progress=progress, span=share).log_p.reshape(len(some), len(heads)))
    return np.concatenate(each)


def _twin(question: Question) -> Question:
    """Return the question with its prompt replaced by the twin, which has another needle; the answer stays the same."""
    item = question.item
    return replace(question, item=replace(item, prompt=next(iter(item.twins.values()))))
