"""Heads by what happens without them, with them alone, or with their words put into another prompt's mouth.

What is measured is always the log-likelihood of the right answer, on samples that the model answers right by itself. A silenced
head says nothing at any position (phase both) unless a method is asked for the decode phase alone: then the prompt is read
once for all heads, and only what a head says while the answer is given counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from needlework.anatomy import Anatomy, Head
from needlework.errors import NeedleworkError
from needlework.heads.answers import Question, answer_tokens, questions, some
from needlework.heads.methods import Scores, method
from needlework.heads.pieces import in_pieces
from needlework.interventions.acts import Act, ChangeOutputs, Place, Scene
from needlework.interventions.attention import AblateAttention, AblateHeads, OnlyHeads
from needlework.interventions.base import NONE, Intervention, Part
from needlework.requests import Request
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from torch import Tensor

    from needlework.subject import Subject

Progress = Callable[[float], None]
When = Literal["both", "decode"]
_ROWS_AT_ONCE = 256  # of prompts whose heads' words are kept while they are patched into others
_LEAST_GAP = 0.1  # nats between prompt and twin, below which nothing is left to restore


class Trial(NamedTuple):
    """One question under one intervention."""

    question: Question
    intervention: Intervention


class Outcome(NamedTuple):
    """What became of the right answers of some trials."""

    log_p: np.ndarray  # [trials]
    right: np.ndarray  # [trials] it is still what the model would say; of the decode phase known only if nothing is done to it


def no_progress(share: float) -> None:
    """For what is a small part of the work."""


def ask(
    subject: Subject,
    trials: Sequence[Trial],
    when: When = "both",
    progress: Progress = no_progress,
    span: tuple[float, float] = (0.0, 1.0),
) -> Outcome:
    """All trials in one run of the engine, so that whatever they have in common is computed once.

    `span` is the part of the whole work that this is, for the progress.
    """
    log_p, right = np.full(len(trials), np.nan), np.zeros(len(trials), bool)
    for done, (i, answer) in enumerate(subject.engine.run([_request(trial, when) for trial in trials])):
        if answer.error:
            raise NeedleworkError(f"{trials[i].question.item.id} under {trials[i].intervention}: {answer.error}")
        log_p[i] = answer.totals[0] if when == "both" else sum(answer.logprobs)
        if when == "both":
            right[i] = answer.greedy[0]
        elif trials[i].intervention == NONE:
            right[i] = answer.tokens == trials[i].question.answer
        progress(span[0] + (span[1] - span[0]) * (done + 1) / len(trials))
    return Outcome(log_p, right)


def _request(trial: Trial, when: When) -> Request:
    question, item = trial.question, trial.question.item
    if when == "both":  # scoring: prompt and answer are one text, and heads are silent in all of it
        return Request(item.prompt, trial.intervention, options=(question.answer,), spans=item.spans)
    forced = () if trial.intervention == NONE else question.answer  # untouched, it may say what it likes
    return Request(item.prompt, trial.intervention, len(question.answer), forced=forced, spans=item.spans)


def keeping(heads: Collection[Head], anatomy: Anatomy, when: When = "both") -> Intervention:
    """These heads speak and no others; none and all are allowed."""
    if len(heads) == len(anatomy.heads):
        return NONE
    return OnlyHeads(heads=tuple(heads), phase=when) if heads else AblateAttention(phase=when)


def _each_act(
    subject: Subject, items: Sequence[Item], acts: Sequence[Intervention], when: When, progress: Progress
) -> tuple[list[Question], np.ndarray]:
    """The samples that are answered right, and the log-likelihoods of their answers [samples, acts]."""
    if when == "both":
        asked = questions(subject, items)
        trials = [Trial(question, act) for question in asked for act in acts]
        return asked, ask(subject, trials, when, progress).log_p.reshape(len(asked), len(acts))
    # The untouched model shares the reading of its prompt with all acts: it is asked along with them, not before.
    every = [Question(i, item, answer_tokens(subject, item), np.nan) for i, item in enumerate(items)]
    outcome = ask(subject, [Trial(question, act) for question in every for act in (NONE, *acts)], when, progress)
    log_p, right = (x.reshape(len(every), 1 + len(acts)) for x in outcome)
    asked = some([replace(x, log_p=float(log_p[i, 0])) for i, x in enumerate(every) if right[i, 0]], items)
    return asked, log_p[right[:, 0], 1:]


def evidence(asked: Sequence[Question], items: Sequence[Item]) -> dict[str, Any]:
    """Which samples a method looked at: those that the model answers right."""
    return {"given": len(items), "used": [question.place for question in asked]}


@method("leave_one_out", "causal", "what the right answer loses (log P) when this head alone is silenced everywhere")
def leave_one_out(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, when: When = "both") -> Scores:
    acts = [AblateHeads(heads=(head,), phase=when) for head in subject.anatomy.heads]
    asked, log_p = _each_act(subject, items, acts, when, progress)
    whole = np.array([question.log_p for question in asked])
    return Scores.of_samples(whole[:, None] - log_p, **evidence(asked, items), phase=when)


@method("add_one_in", "causal", "what the right answer gains (log P) when of all heads only this one speaks, over none at all")
def add_one_in(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, when: When = "both") -> Scores:
    acts = [keeping((), subject.anatomy, when), *(keeping((head,), subject.anatomy, when) for head in subject.anatomy.heads)]
    asked, log_p = _each_act(subject, items, acts, when, progress)
    return Scores.of_samples(log_p[:, 1:] - log_p[:, :1], **evidence(asked, items), phase=when)


method("leave_one_out_decode", "causal", "as leave_one_out, but heads are silenced only while the answer is given")(
    partial(leave_one_out, when="decode")
)
method("add_one_in_decode", "causal", "as add_one_in, but heads are silenced only while the answer is given")(
    partial(add_one_in, when="decode")
)


class Tape:
    """What every head says to one text, position by position; a model that calls a layer several times has several turns."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, int], list[Tensor]] = {}  # layer, position -> by turn [heads, dim]

    def record(self, outputs: Tensor, place: Place) -> Tensor:
        for query, position in enumerate(place.positions.tolist()):
            self._said.setdefault((place.layer, position), []).append(outputs[query].clone())
        return outputs

    def playing(self, head: Head) -> Callable[[Tensor, Place], Tensor]:
        """A function that lets this head say what is on the tape."""
        turns: dict[tuple[int, int], int] = {}

        def play(outputs: Tensor, place: Place) -> Tensor:
            for query, position in enumerate(place.positions.tolist()):
                key = (place.layer, position)
                said = self._said[key]
                outputs[query, head.index] = said[turns.get(key, 0) % len(said)][head.index]
                turns[key] = turns.get(key, 0) + 1
            return outputs

        return play


class _Changed(Part):
    """A function of one's own on what the heads of some layers say."""

    name = "changed"
    side = "attention"
    function: Any

    def stands_for(self, scene: Scene) -> Iterable[Act]:
        return [ChangeOutputs(layer, self.function) for layer in self.where(scene.anatomy)]


@method(
    "patching",
    "causal",
    "share of the right answer's log P that this head restores in a twin prompt with another needle",
)
def patching(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """The head's outputs at every position come from the prompt, all else from its twin: 0 restores nothing, 1 all of it."""
    asked = [question for question in questions(subject, items) if question.item.twins]
    if not asked:
        raise NeedleworkError("patching needs samples with a twin, a prompt with another needle: set twins: true in the task")
    in_twin = ask(subject, [Trial(_twin(question), NONE) for question in asked]).log_p
    gaps = np.array([question.log_p for question in asked]) - in_twin
    kept = [i for i, gap in enumerate(gaps) if gap >= _LEAST_GAP]
    if not kept:
        raise NeedleworkError("patching: the twins' needles do not make the right answer less likely, so nothing can be restored")
    used = [asked[i] for i in kept]
    patched = np.concatenate(in_pieces(subject, _patched, used, progress))
    each = (patched - in_twin[kept, None]) / gaps[kept, None]
    return Scores.of_samples(each, **evidence(used, items), gap=float(gaps[kept].mean()))


def _patched(subject: Subject, asked: Sequence[Question], progress: Progress) -> np.ndarray:
    """Log-likelihood of the answer in the twin with what each head says to the prompt, [questions, heads]."""
    heads, each = subject.anatomy.heads, []
    at_once = max(1, _ROWS_AT_ONCE // len(heads))
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        tapes = [Tape() for _ in some]
        ask(subject, [Trial(one, _Changed(function=tape.record)) for one, tape in zip(some, tapes, strict=True)])
        trials = [
            Trial(_twin(one), _Changed(function=tape.playing(head), layers=(head.layer,)))
            for one, tape in zip(some, tapes, strict=True)
            for head in heads
        ]
        share = (start / len(asked), (start + len(some)) / len(asked))
        each.append(ask(subject, trials, progress=progress, span=share).log_p.reshape(len(some), len(heads)))
    return np.concatenate(each)


def _twin(question: Question) -> Question:
    """The same answer asked of the twin prompt, in which another needle stands."""
    item = question.item
    return replace(question, item=replace(item, prompt=next(iter(item.twins.values()))))
