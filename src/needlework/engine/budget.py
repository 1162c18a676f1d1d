"""How much fits into memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import psutil
import torch

from needlework.engine.prefill import readings_of
from needlework.model.body import Body
from needlework.requests import Prepared

if TYPE_CHECKING:
    from needlework.engine.decode import Track

_ACTIVATIONS = 24  # values kept per token and hidden unit while a layer runs, seen over the families


class Budget:
    """A number of bytes, and what a prompt or a row costs. Estimates: the engine halves when they prove too low."""

    def __init__(self, body: Body, limit: int | None) -> None:
        self.limit = limit or default_limit(body.device)
        self.body = body
        config = body.model.config.get_text_config(decoder=True)
        self.bytes = int(next(body.model.parameters()).element_size())
        self.hidden = int(config.hidden_size)

    def prompt_bytes(self, tokens: int) -> int:
        """Peak while a prompt is read, its memory included."""
        anatomy = self.body.anatomy
        return tokens * (2 * anatomy.kv_bytes_per_token + _ACTIVATIONS * self.hidden * self.bytes) + anatomy.state_bytes

    def row_bytes(self, item: Prepared) -> int:
        """What one trial adds: a decoding row, or a row for each of its options with the logits of all their tokens."""
        anatomy, steps, options = self.body.anatomy, item.request.steps, len(item.request.options)
        own_keys = steps if self.body.shareable else steps + item.prefill_tokens
        scores = 4 * sum(part.query_heads for _, part in anatomy.attention_parts()) * (item.prefill_tokens + steps)
        logits = 12 * anatomy.vocabulary * (steps if options else 1)
        return max(1, options) * (2 * (own_keys * anatomy.kv_bytes_per_token + anatomy.state_bytes) + logits + scores)

    def fits(self, batch: Sequence[tuple[int, Prepared]], running: Sequence[Track]) -> bool:
        """Whether a batch may be read while these trials decode."""
        items = [item for _, item in batch]
        now = sum(self.row_bytes(track.prepared) for track in running)
        return now + self._batch_bytes(items) <= self.limit

    def _batch_bytes(self, items: Sequence[Prepared]) -> int:
        keys = {reading.key for item in items for reading in readings_of(item).values()}
        return sum(self.row_bytes(item) for item in items) + len(keys) * self.prompt_bytes(items[0].prefill_tokens)

    def batches(self, requests: Sequence[tuple[int, Prepared]], most: int) -> Iterator[list[tuple[int, Prepared]]]:
        """Batches of one length that fit, the longest first; requests that share readings stay together where they can."""

        def order(pair: tuple[int, Prepared]) -> tuple[object, ...]:
            item = pair[1]
            return (-item.prefill_tokens, item.request.boundary, item.request.prompt, pair[0])

        batch: list[tuple[int, Prepared]] = []
        keys: set[object] = set()
        used = 0
        for pair in sorted(requests, key=order):
            item = pair[1]
            mine = {reading.key for reading in readings_of(item).values()}
            row, prompt = self.row_bytes(item), self.prompt_bytes(item.prefill_tokens)
            cost = row + len(mine - keys) * prompt
            other = batch and (
                batch[0][1].prefill_tokens != item.prefill_tokens
                or batch[0][1].request.decodes_last != item.request.decodes_last
            )
            if batch and (other or used + cost > self.limit or len(batch) >= most):
                yield batch
                batch, keys, used, cost = [], set(), 0, row + len(mine) * prompt
            batch.append(pair)
            keys |= mine
            used += cost
        if batch:
            yield batch


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out; CPU allocation failures are plain RuntimeErrors."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )


def default_limit(device: torch.device) -> int:
    """Half of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return int(psutil.virtual_memory().available) // 2
