"""Observers that sum attention statistics per sample and head, for the methods that rank heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from needlework.errors import NeedleworkError
from needlework.measure import Progress, map_samples, run_requests
from needlework.model.attention import Forward, QueryBlock
from needlework.observation import NEEDLE, AttentionObserver, entropy
from needlework.requests import Request
from needlework.subject import Subject
from needlework.tasks import toy
from needlework.tasks.base import Item
from needlework.tasks.prompts import token_ids
from needlework.toy.words import WORD_ID

_TAIL = 16  # number of last prompt tokens that count as the question where it is not marked
NULL_QUESTION = {True: "?", False: "N/A"}  # a question without content, by whether the language is the toy language


class SampleObserver(AttentionObserver):
    """Base class of observers that keep sums per sample and head.

    Requests must be numbered from 0 in `Request.sample`. `spans` are those that `in_span` is called with.
    """

    def __init__(self, samples: int, *spans: str) -> None:
        super().__init__(*spans)
        self.count = samples
        self.sums: dict[tuple[int, str], Tensor] = {}  # (layer, name) -> [samples, heads]
        self._numbers = torch.empty(0)  # [slots]

    def begin(self, requests: Sequence[Request], device: torch.device) -> None:
        super().begin(requests, device)
        self._numbers = torch.tensor(self.samples, device=device)

    def numbers(self, slots: Tensor) -> Tensor:
        """Return the sample number of each row, [rows]."""
        return self._numbers.to(slots.device)[slots]

    def add(self, layer: int, name: str, slots: Tensor, values: Tensor) -> None:
        """Add values [rows, heads] to the sums of the rows' samples."""
        if (layer, name) not in self.sums:
            self.sums[layer, name] = torch.zeros(self.count, values.shape[1], dtype=torch.float64, device=values.device)
        self.sums[layer, name].index_add_(0, self.numbers(slots.to(values.device)), values.double())

    def all_heads(self, name: str) -> np.ndarray:
        """Return the sums of this name for all heads of the model, ordered by layer, [samples, heads]."""
        return torch.cat([sums.cpu() for (_, what), sums in sorted(self.sums.items()) if what == name], 1).numpy()


Observer = TypeVar("Observer", bound=SampleObserver)


def join_observers(observers: Sequence[Observer]) -> Observer:
    """Join observers of consecutive slices of the samples into one; sums that a slice does not have are 0 there."""
    if len(observers) == 1:
        return observers[0]
    whole = copy.copy(observers[0])
    whole.count = sum(observer.count for observer in observers)
    widths = {key: sums.shape[1] for observer in observers for key, sums in observer.sums.items()}
    whole.sums = {
        key: torch.cat([o.sums[key].cpu() if key in o.sums else torch.zeros(o.count, width).double() for o in observers])
        for key, width in widths.items()
    }
    return whole


END, LAST = "needle_end", "last"  # spans: the last token of each stretch of the needle, and that of the prompt


class AttentionSums(SampleObserver):
    """Observer that sums attention on the needle and its last token, entropy and copied tokens per sample and head."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples, NEEDLE, "question", END, LAST)
        self._looked: dict[int, Tensor] = {}  # layer -> [rows, heads] most attended position in this step

    def see(self, forward: Forward, layer: int, block: QueryBlock, probabilities: Tensor) -> None:
        slots, p = forward.slots, probabilities
        self._add_roles(layer, slots, block, p)
        on_needle = (p * self.in_span(NEEDLE, slots, block.k_positions)[:, None, None]).sum(-1)  # [rows, heads, queries]
        asking = self.in_span("question", slots, block.q_positions)[:, None].to(p.dtype)  # [rows, 1, queries]
        self.add(layer, "question_mass", slots, (on_needle * asking).sum(-1))
        self.add(layer, "question_tokens", slots, asking.sum(-1).expand(-1, p.shape[1]))
        if forward.phase == "prefill":
            return
        self.add(layer, "queries", slots, torch.full(p.shape[:2], p.shape[2], device=p.device))
        self.add(layer, "needle_mass", slots, on_needle.sum(-1))
        self.add(layer, "entropy", slots, entropy(p).sum(-1))
        self.add(layer, "entropy_no_sink", slots, entropy(p, (block.k_positions != 0)[:, None, None]).sum(-1))
        self._looked[layer] = block.k_positions.gather(1, p[:, :, -1].argmax(-1))

    def _add_roles(self, layer: int, slots: Tensor, block: QueryBlock, p: Tensor) -> None:
        """Add attention from the needle's ends to the rest of the needle, and from the end of the prompt to the needle's ends."""
        for asking, to, name, count in ((END, NEEDLE, "gathered", "ends"), (LAST, END, "aggregated", "lasts")):
            queries = self.in_span(asking, slots, block.q_positions)  # [rows, queries]
            keys = self.in_span(to, slots, block.k_positions)[:, None] & (
                block.k_positions[:, None] != block.q_positions[..., None]
            )
            mass = (p * keys[:, None]).sum(-1) * queries[:, None]  # [rows, heads, queries]
            self.add(layer, name, slots, mass.sum(-1))
            self.add(layer, count, slots, queries.sum(1, keepdim=True).expand(-1, p.shape[1]))

    def chose(self, slots: Tensor, tokens: Tensor) -> None:
        copied = self.copied(NEEDLE, slots, tokens)[:, None]
        for layer, looked in self._looked.items():
            self.add(layer, "copies", slots, self.copied_from(NEEDLE, slots, tokens, looked))
            self.add(layer, "copied", slots, copied.to(looked.device).expand(looked.shape))
        self._looked.clear()


def question_span(item: Item) -> tuple[int, int]:
    """Return start and end of the question in the prompt.

    It is the span "question" if there is one, in the toy language the words after "question :" or "ask :", and otherwise the
    last tokens of the prompt.
    """
    if ranges := item.spans.get("question"):
        return ranges[-1]
    end = len(item.prompt)
    if item.facts.get("world") == "toy":
        for number in range(end - 3, 0, -1):
            if item.prompt[number] in (WORD_ID["question"], WORD_ID["ask"]):
                answers = [i for i in range(number + 3, end) if item.prompt[i] == WORD_ID["answer"]]
                return number + 2, answers[0] if answers else end
    return max(0, end - _TAIL), end


_latest: WeakKeyDictionary[Any, tuple[tuple[Item, ...], dict[bool, AttentionSums]]] = WeakKeyDictionary()


def observe_samples(subject: Subject, items: Sequence[Item], progress: Progress, null: bool = False) -> AttentionSums:
    """Observe every head while the model answers each sample; with `null`, with each question replaced by one without content.

    The latest samples of each model are cached, so that all methods that rank by attention share one run.
    """
    known, found = _latest.get(subject, ((), {}))
    if known != tuple(items):
        found = {}
        _latest[subject] = (tuple(items), found)
    if null not in found:
        found[null] = join_observers(map_samples(subject, partial(_observe, null=null), items, progress))
    return found[null]


def _observe(subject: Subject, items: Sequence[Item], progress: Progress, null: bool) -> AttentionSums:
    requests = []
    for number, item in enumerate(items):
        if item.ending is None or not item.spans.get("needle"):
            raise NeedleworkError(f"{item.id}: ranking by attention needs a needle's span, and how an answer ends (item.ending)")
        prompt, needle, (start, end) = item.prompt, item.spans["needle"], question_span(item)
        if null:  # as in QRHead's calibration
            empty = token_ids(subject.tokenizer, NULL_QUESTION[toy.is_toy(subject.tokenizer)])
            prompt = (*prompt[:start], *empty, *prompt[end:])
            moved = len(empty) - (end - start)
            needle = tuple((a, b) if b <= start else (a + moved, b + moved) for a, b in needle)
            end = start + len(empty)
        ends = tuple((b - 1, b) for _, b in needle)
        spans = {NEEDLE: needle, "question": ((start, end),), END: ends, LAST: ((len(prompt) - 1, len(prompt)),)}
        most = 1 if null else item.ending[0]
        requests.append(Request(prompt, max_new_tokens=most, stop=item.ending[1], spans=spans, sample=number))
    observer = AttentionSums(len(items))
    with subject.body.observed_by(observer):
        run_requests(subject, requests, [item.id for item in items], progress)
    return observer
