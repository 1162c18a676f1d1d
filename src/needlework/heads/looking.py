"""Watching where every head looks, sample by sample: at the needle, from the question, at the token being said.

One look at some samples serves every method that ranks by attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from needlework.errors import NeedleworkError
from needlework.heads.pieces import in_pieces
from needlework.model.attention import Block, Forward
from needlework.requests import Request
from needlework.tasks import toy
from needlework.tasks.base import Item
from needlework.tasks.prompts import token_ids
from needlework.toy.words import WORD_ID

if TYPE_CHECKING:
    from needlework.subject import Subject

Progress = Callable[[float], None]
_TAIL = 16  # tokens at a prompt's end that count as its question where nothing says which these are
NULL_QUESTION = {True: "?", False: "N/A"}  # a question without content, in the toy language and in others


class Spotter:
    """An observer that knows which sample each row belongs to, and where its needle and its question stand."""

    each_sample = True

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._number = self._tokens = torch.empty(0)
        self._spans: dict[str, Tensor] = {}

    def begin(self, requests: Sequence[Request], device: torch.device) -> None:
        """A new batch: slot i of its forwards belongs to request i, whose sample is its number."""
        self._number = torch.tensor([request.key for request in requests], device=device)
        shape = (len(requests), max(len(request.prompt) for request in requests))
        self._tokens = torch.full(shape, -1, device=device)
        self._spans = {name: torch.zeros(shape, dtype=torch.bool, device=device) for name in ("needle", "question")}
        for slot, request in enumerate(requests):
            self._tokens[slot, : len(request.prompt)] = torch.tensor(request.prompt, device=device)
            for name, mask in self._spans.items():
                for start, end in request.spans.get(name, ()):
                    mask[slot, start:end] = True

    def see(self, forward: Forward, layer: int, block: Block, probabilities: Tensor) -> None:
        raise TypeError(f"{type(self).__name__} must define see()")

    def chose(self, slots: Tensor, tokens: Tensor) -> None:
        """The tokens that this decode step produced, one a row."""

    def number(self, slots: Tensor) -> Tensor:
        return self._number[slots]

    def within(self, name: str, slots: Tensor, positions: Tensor) -> Tensor:
        """Whether each position of each row lies in the span, [rows, positions]."""
        mask = self._spans[name][slots]
        return mask.gather(1, positions.clamp(0, mask.shape[1] - 1)) & (positions >= 0) & (positions < mask.shape[1])


@contextmanager
def watching(subject: Subject, spotter: Spotter) -> Iterator[None]:
    before, subject.body.observer = subject.body.observer, spotter
    try:
        yield
    finally:
        subject.body.observer = before


K = TypeVar("K")


def stacked(parts: Sequence[dict[K, Tensor]], samples: Sequence[int]) -> dict[K, Tensor]:
    """Sums [samples, heads] of several slices of samples as those of all; what a slice does not name is 0 there."""
    widths = {key: sums.shape[1] for part in parts for key, sums in part.items()}
    return {
        key: torch.cat(
            [
                part[key].cpu() if key in part else torch.zeros(count, width, dtype=torch.float64)
                for part, count in zip(parts, samples, strict=True)
            ]
        )
        for key, width in widths.items()
    }


class Look(Spotter):
    """Sums for every sample and head: [samples, heads] by layer and name."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.sums: dict[tuple[int, str], Tensor] = {}
        self.copied = torch.zeros(samples, dtype=torch.float64)  # tokens said that stand in the needle
        self._looked: dict[int, Tensor] = {}  # layer -> position that each row's heads look at most, this step

    @classmethod
    def joined(cls, looks: Sequence[Look]) -> Look:
        """Looks at some samples and then at others, as one at all of them."""
        if len(looks) == 1:
            return looks[0]
        whole = cls(sum(look.samples for look in looks))
        whole.sums = stacked([look.sums for look in looks], [look.samples for look in looks])
        whole.copied = torch.cat([look.copied for look in looks])
        return whole

    def see(self, forward: Forward, layer: int, block: Block, probabilities: Tensor) -> None:
        slots, p = forward.slots, probabilities
        on_needle = (p * self.within("needle", slots, block.k_positions)[:, None, None]).sum(-1)  # [rows, heads, queries]
        asking = self.within("question", slots, block.q_positions)[:, None].to(p.dtype)  # [rows, 1, queries]
        self._add(layer, "question_mass", slots, (on_needle * asking).sum(-1))
        self._add(layer, "question_tokens", slots, asking.sum(-1).expand(-1, p.shape[1]))
        if forward.phase == "prefill":
            return
        self._add(layer, "queries", slots, torch.full(p.shape[:2], p.shape[2], device=p.device))
        self._add(layer, "needle_mass", slots, on_needle.sum(-1))
        self._add(layer, "entropy", slots, entropy(p).sum(-1))
        self._add(layer, "entropy_no_sink", slots, entropy(p, (block.k_positions != 0)[:, None, None]).sum(-1))
        self._looked[layer] = block.k_positions.gather(1, p[:, :, -1].argmax(-1))

    def chose(self, slots: Tensor, tokens: Tensor) -> None:
        known, needle = self._tokens[slots], self._spans["needle"][slots]
        copied = ((known == tokens[:, None]) & needle).any(1)
        self.copied.index_add_(0, self.number(slots).cpu(), copied.cpu().double())
        for layer, looked in self._looked.items():
            at = looked.clamp(0, known.shape[1] - 1)
            hit = (known.gather(1, at) == tokens[:, None]) & self.within("needle", slots, looked)
            self._add(layer, "copies", slots, hit)
        self._looked.clear()

    def _add(self, layer: int, name: str, slots: Tensor, values: Tensor) -> None:
        if (layer, name) not in self.sums:
            self.sums[layer, name] = torch.zeros(self.samples, values.shape[1], dtype=torch.float64, device=values.device)
        self.sums[layer, name].index_add_(0, self.number(slots), values.double())

    def all_heads(self, name: str) -> np.ndarray:
        """[samples, heads], the heads in the order of the model."""
        return torch.cat([sums for (_, what), sums in sorted(self.sums.items()) if what == name], 1).cpu().numpy()


def entropy(p: Tensor, counted: Tensor | None = None) -> Tensor:
    """In nats, over the last dimension; of the keys that are counted only, their probabilities divided by what they sum to."""
    p = p if counted is None else p * counted
    plain: Tensor = -torch.special.xlogy(p, p).sum(-1)
    if counted is None:
        return plain
    mass = p.sum(-1)
    safe = mass.clamp_min(torch.finfo(p.dtype).tiny)
    return torch.where(mass > 0, plain / safe + safe.log(), 0.0)  # of the share p / mass


def question_of(item: Item) -> tuple[int, int]:
    """Where the prompt asks: its span; in the toy language the words after "question :" or "ask :"; else its last tokens."""
    if ranges := item.spans.get("question"):
        return ranges[-1]
    end = len(item.prompt)
    if item.facts.get("world") == "toy":
        for number in range(end - 3, 0, -1):
            if item.prompt[number] in (WORD_ID["question"], WORD_ID["ask"]):
                answers = [i for i in range(number + 3, end) if item.prompt[i] == WORD_ID["answer"]]
                return number + 2, answers[0] if answers else end
    return max(0, end - _TAIL), end


def _requests(items: Sequence[Item]) -> list[Request]:
    requests = []
    for number, item in enumerate(items):
        if item.ending is None or not item.spans.get("needle"):
            raise NeedleworkError(f"{item.id}: ranking by attention needs a needle's span, and how an answer ends (item.ending)")
        spans = {"needle": item.spans["needle"], "question": (question_of(item),)}
        requests.append(Request(item.prompt, max_new_tokens=item.ending[0], stop=item.ending[1], spans=spans, sample=number))
    return requests


def _without_question(subject: Subject, item: Item, request: Request) -> Request:
    """The same prompt with a question that asks for nothing in its place, as QRHead's calibration has it."""
    (start, end), language = request.spans["question"][0], toy.is_toy(subject.tokenizer)
    null = token_ids(subject.tokenizer, NULL_QUESTION[language])
    prompt = (*request.prompt[:start], *null, *request.prompt[end:])
    moved = len(null) - (end - start)
    needle = tuple((a, b) if b <= start else (a + moved, b + moved) for a, b in request.spans["needle"])
    spans = {"needle": needle, "question": ((start, start + len(null)),)}
    return replace(request, prompt=prompt, spans=spans, max_new_tokens=1)


_LOOKS: WeakKeyDictionary[Any, tuple[tuple[Item, ...], dict[bool, Look]]] = WeakKeyDictionary()  # the newest of each subject


def look(subject: Subject, items: Sequence[Item], progress: Progress, null: bool = False) -> Look:
    """What every head looked at while each sample was answered; with `null`, while nothing was asked for in its question."""
    key = tuple(items)
    known, looks = _LOOKS.get(subject, ((), {}))
    if known != key:
        looks = {}
        _LOOKS[subject] = (key, looks)
    if null not in looks:
        looks[null] = Look.joined(in_pieces(subject, partial(_looked, null=null), items, progress))
    return looks[null]


def _looked(subject: Subject, items: Sequence[Item], progress: Progress, null: bool) -> Look:
    spotter, requests = Look(len(items)), _requests(items)
    if null:
        requests = [_without_question(subject, *pair) for pair in zip(items, requests, strict=True)]
    with watching(subject, spotter):
        for done, (i, answer) in enumerate(subject.engine.run(requests)):
            if answer.error:
                raise NeedleworkError(f"{items[i].id}: {answer.error}")
            progress((done + 1) / len(requests))
    return spotter
