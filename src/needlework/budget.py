"""How much fits into memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psutil
import torch

from needlework.requests import Prepared
from needlework.subjects.body import Body

_ACTIVATIONS = 24  # values kept per token and hidden unit while a layer runs, seen over the families


class Budget:
    """A number of bytes, and what a prompt or a row costs. Estimates: `Engine` halves when they prove too low."""

    def __init__(self, body: Body, limit: int | None) -> None:
        self.limit = limit or _available(body.device) // 2
        self.body = body
        config = body.model.config.get_text_config(decoder=True)
        self.bytes = next(body.model.parameters()).element_size()
        self.hidden = int(config.hidden_size)

    def prompt_bytes(self, tokens: int) -> int:
        """Peak while a prompt is read, its memory included."""
        anatomy = self.body.anatomy
        return tokens * (2 * anatomy.kv_bytes_per_token + _ACTIVATIONS * self.hidden * self.bytes) + anatomy.state_bytes

    def row_bytes(self, item: Prepared) -> int:
        """What one decoding row adds."""
        anatomy = self.body.anatomy
        own_keys = item.steps if self.body.shareable else item.steps + item.prefill_tokens
        scores = 4 * sum(part.query_heads for _, part in anatomy.attention_parts()) * (item.prefill_tokens + item.steps)
        return 2 * (own_keys * anatomy.kv_bytes_per_token + anatomy.state_bytes) + 12 * anatomy.vocabulary + scores

    def batches(self, members: Sequence[int], prepared: Sequence[Prepared]) -> Iterator[list[int]]:
        """Split requests of one length into batches that fit; requests of one prompt stay together where they can."""
        batch: list[int] = []
        prompts: set[object] = set()
        used = 0
        for i in sorted(members, key=lambda i: (hash(prepared[i].group[0]), i)):
            item = prepared[i]
            readings = {item.group, *((twin, *item.group[1:]) for twin in item.twins.values())}
            cost = self.row_bytes(item) + len(readings - prompts) * self.prompt_bytes(item.prefill_tokens)
            if batch and used + cost > self.limit:
                yield batch
                batch, prompts, used = [], set(), 0
                cost = self.row_bytes(item) + len(readings) * self.prompt_bytes(item.prefill_tokens)
            batch.append(i)
            prompts |= readings
            used += cost
        if batch:
            yield batch


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
