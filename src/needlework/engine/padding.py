"""Padding: prompts of several lengths in one forward, where nothing will go on from them and no count depends on the padding.

What follows a token cannot change it in a causal model, so padding stands on the right, and each row's logits are those
after its own last token. That is seen to be so on the model itself before it is relied upon; a model that fails is read
one length at a time. What a padded row remembers is of no use to anyone, and is let go.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from needlework.engine.budget import out_of_memory
from needlework.engine.reading import PIECE_TOKENS, forward_tokens, watched
from needlework.interventions.acts import ChangeOutputs, ClearState, ExposeColumns, KeepBest, LimitKeys, SilenceHeads
from needlework.model.body import Body
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared

logger = logging.getLogger("needlework")
PAD = 0  # any token does: nothing sees it
_UNEVEN = (LimitKeys, ExposeColumns, ChangeOutputs, ClearState)  # what they do to a token depends on where it stands
_PROOF_LENGTHS = (12, 5, 9)


class Padding:
    """Which requests of one body may be read in padded rows, and how many at a time."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._proven: bool | None = None

    def allowed(self, item: Prepared) -> bool:
        """Whether a request may be padded: it only asks what comes next, and its acts do the same to every token.

        Needs an open session.
        """
        ends = bool(item.request.options) and item.request.steps == 1
        return ends and not item.one_piece and even(item) and not watched(self.body) and self.proven()

    def proven(self) -> bool:
        """Whether rows that are padded give what each of them gives alone. Tried once; needs an open session."""
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
        """Places of readings with so many tokens left, parted into forwards so that padding and forwards cost least together."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        most, each = PIECE_TOKENS.get(self.body.device.type, 1 << 62), forward_tokens(self.body)
        best, cut = [0.0], [0]  # cost of the first n in that order, and where the last forward of them begins
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
    """Whether the acts of a request do as much to one token as to any other, so that what was done can be counted by tokens.

    How many heads are zeroed where some are silenced and the best of all are kept depends on the token.
    """
    acts = item.acts["prefill"]
    kept = {act.layer for act in acts if isinstance(act, KeepBest)}
    both = any(isinstance(act, SilenceHeads) and act.layer in kept for act in acts)
    return not both and not any(isinstance(act, _UNEVEN) for act in acts)


def without_padding(receipt: Receipt, tokens: int, fed: int) -> Receipt:
    """What was done to the first `tokens` of `fed` tokens, by acts that do the same to each."""
    if tokens == fed:
        return receipt
    counts = {}
    for at, count in receipt.counts.items():
        if any(number * tokens % fed for number in count.values()):
            raise AssertionError(f"an uneven count in a padded row: {count} in {fed} tokens")
        counts[at] = {what: number * tokens // fed for what, number in count.items()}
    return Receipt(counts, receipt.swapped, receipt.notes)
