"""The prefills that requests need (readings), how many of them one forward takes, and which may be padded.

Prompts of several lengths share one forward where their cache is not needed afterwards and no count depends on padding. In a
causal model later tokens cannot change earlier ones, so padding is on the right, and each row's logits are taken after its own
last token. This is checked on the model itself first; a model that fails the check is prefilled one length at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from needlework.interventions.acts import ChangeOutputs, ClearState, ExposeColumns, KeepBest, LimitKeys, SilenceHeads
from needlework.model.hooked_model import HookedModel
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared

logger = logging.getLogger("needlework")
_FORWARD_FLOPS = {"cpu": 6e7, "cuda": 2e11}  # FLOPs a device could do in the fixed overhead of a forward
PIECE_TOKENS = {"cpu": 4096}  # of one forward: with more, activations leave the CPU caches, and page faults outweigh the gain
PAD = 0  # any token id: no real token attends to it
_UNEVEN = (LimitKeys, ExposeColumns, ChangeOutputs, ClearState)  # their effect on a token depends on its position
_PROOF_LENGTHS = (12, 5, 9)
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """One prefill: a prompt, or a prefix of it, under one request's prefill acts."""

    item: Prepared
    tokens: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.tokens, *self.item.group[1:])


def readings_of(item: Prepared) -> dict[str, Reading]:
    """Return the prefills that a request needs: its own prompt ("own") and the twin that a cache half comes from, by half."""
    tokens = item.prefill_tokens
    own = {"own": Reading(item, item.request.prompt[:tokens])}
    return own | {half: Reading(item, twin[:tokens]) for half, twin in item.twins.items()}


@dataclass
class Read:
    """The results of prefills: row i of the cache belongs to reading i."""

    memory: Memory | None  # None if it is not needed afterwards
    logits: Tensor  # [readings, vocabulary] after the last token
    receipts: list[Receipt]


def group(items: Sequence[Prepared]) -> tuple[list[Reading], list[Mapping[str, int]]]:
    """Return the distinct readings that requests need, and for each request the indices of its own among them, by name."""
    place_of: dict[tuple[object, ...], int] = {}
    readings: list[Reading] = []
    places: list[Mapping[str, int]] = []
    for item in items:
        place = {}
        for name, reading in readings_of(item).items():
            if reading.key not in place_of:
                place_of[reading.key] = len(readings)
                readings.append(reading)
            place[name] = place_of[reading.key]
        places.append(place)
    return readings, places


def forward_tokens(body: HookedModel) -> float:
    """Return the fixed cost of one more forward, in tokens."""
    return _FORWARD_FLOPS.get(body.device.type, 1e9) / (2 * body.anatomy.parameters)


def watched(body: HookedModel) -> bool:
    """Return whether an observer or a foreign forward hook must see every row in every layer."""
    if body.observer is not None:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in body.model.modules())


def by_pieces(members: Sequence[T], tokens: int, body: HookedModel) -> Iterator[list[T]]:
    """Yield slices of members, each as large as one forward takes best; all members at once if an observer is set.

    Args:
        tokens: Tokens of each member.
    """
    most = PIECE_TOKENS.get(body.device.type)
    step = len(members) if most is None or body.observer is not None else max(1, most // max(1, tokens))
    for first in range(0, len(members), max(1, step)):
        yield list(members[first : first + step])


def out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; CPU allocation failures are plain RuntimeErrors."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )


class Padding:
    """Decides which requests may be prefilled in padded rows, and how many rows one forward takes."""

    def __init__(self, body: HookedModel) -> None:
        self.body = body
        self._proven: bool | None = None

    def allowed(self, item: Prepared) -> bool:
        """Return whether a request may be padded: it scores single-token options only, and its acts treat all tokens alike.

        Needs an open session.
        """
        ends = bool(item.request.options) and item.request.steps == 1
        return ends and not item.one_piece and even(item) and not watched(self.body) and self.proven()

    def proven(self) -> bool:
        """Return whether padded rows give the same logits as unpadded ones. Checked once; needs an open session."""
        if self._proven is None:
            try:
                self._proven = self._prove()
            except Exception as error:  # whatever it is, it would have been an error of a real reading
                logger.debug("prompts cannot be padded: %s", error)
                if out_of_memory(error):  # another time it may be otherwise
                    return False
                self._proven = False
        return self._proven

    def _prove(self) -> bool:
        body, longest = self.body, max(_PROOF_LENGTHS)
        tokens = torch.arange(len(_PROOF_LENGTHS) * longest, device=body.device).view(-1, longest) * 7 % body.anatomy.vocabulary
        ends = torch.tensor(_PROOF_LENGTHS, device=body.device)
        padded = tokens.masked_fill(torch.arange(longest, device=body.device) >= ends[:, None], PAD)

        def read(ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            rows = body.compile([()] * len(ids), [0] * len(ids), "prefill", torch.arange(len(ids), device=body.device))
            return body.feed(ids, body.new_memory(len(ids)), "prefill", rows, Tally(len(ids)), keep=keep)

        together = read(padded, ends - 1)
        alone = [
            read(row[None, :end], torch.tensor([end - 1], device=body.device)) for row, end in zip(tokens, ends, strict=True)
        ]
        return body.agree(torch.cat(alone), together)

    def pieces(self, lengths: Sequence[int]) -> list[list[int]]:
        """Partition readings into forwards so that the cost of padding plus forwards is least (dynamic programming).

        Args:
            lengths: Tokens that each reading has left.

        Returns:
            Indices of the readings of each forward.
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        most, each = PIECE_TOKENS.get(self.body.device.type, 1 << 62), forward_tokens(self.body)
        best, cut = [0.0], [0]  # least cost of the first n in that order, and where their last forward begins
        for n in range(1, len(order) + 1):
            least, begins = float("inf"), n - 1
            for first in range(n - 1, -1, -1):
                longest = lengths[order[first]]
                if first < n - 1 and (n - first) * longest > most:
                    break
                cost = best[first] + (n - first) * longest + each
                if cost < least:
                    least, begins = cost, first
            best.append(least)
            cut.append(begins)
        parted, n = [], len(order)
        while n:
            parted.append(order[cut[n] : n])
            n = cut[n]
        return parted[::-1]


def even(item: Prepared) -> bool:
    """Return whether a request's prefill acts count the same for every token, so that padding can be subtracted from receipts.

    Where one layer has both fixed ablations and top-k selection, the number of zeroed heads depends on the token.
    """
    acts = item.acts["prefill"]
    kept = {act.layer for act in acts if isinstance(act, KeepBest)}
    both = any(isinstance(act, SilenceHeads) and act.layer in kept for act in acts)
    return not both and not any(isinstance(act, _UNEVEN) for act in acts)


def without_padding(receipt: Receipt, tokens: int, fed: int) -> Receipt:
    """Return the receipt of the first `tokens` of `fed` tokens, for acts that count the same for each token."""
    if tokens == fed:
        return receipt
    counts = {}
    for at, count in receipt.counts.items():
        if any(number * tokens % fed for number in count.values()):
            raise AssertionError(f"an uneven count in a padded row: {count} in {fed} tokens")
        counts[at] = {what: number * tokens // fed for what, number in count.items()}
    return Receipt(counts, receipt.swapped, receipt.notes)
