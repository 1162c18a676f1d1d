"""Differentiable gates on attention heads: 1 leaves a head unchanged, 0 zeroes it.

Prompt and answer are computed in one forward without a cache, with the same attention function and kernels as all other runs.
Shorter rows are padded on the right, which causal models do not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from needlework.errors import NeedleworkError
from needlework.model.attention import Forward, current
from needlework.model.edits import LayerEdits
from needlework.model.hooked_model import HookedModel
from needlework.model.probe import run_model
from needlework.receipts import Tally


@dataclass
class _Gated(LayerEdits):
    """Edits that multiply each head's output by its gate."""

    gates: Tensor | None = None  # [rows or 1, heads]

    def edit_outputs(
        self, forward: Forward, layer: int, out: Tensor, queries: slice, scores: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        assert self.gates is not None
        forward.tally.add(layer, forward.phase, "heads_changed", forward.slots, out.shape[1])
        return out * self.gates[:, None, :, None].to(out.dtype)


@contextmanager
def differentiable(body: HookedModel) -> Iterator[None]:
    """Open a session in which gates get gradients and weights do not."""
    if body.streams:
        raise NeedleworkError(
            "gates are differentiated without a cache, and the heads of this model stream by theirs: rank the model that it was"
            " pruned from, or choose another method, such as leave_one_out"
        )
    with body.session(gradients=True), ExitStack() as stack:
        for parameter in body.model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        yield


def answer_log_p(body: HookedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], gates: Tensor) -> Tensor:
    """Return the log-likelihood of each answer given its prompt, [rows]. Needs an open `differentiable` session.

    Args:
        texts: pairs of prompt and answer as token ids.
        gates: [rows or 1, heads], in the order of `anatomy.heads`.
    """
    rows = [(*prompt, *answer[:-1]) for prompt, answer in texts]
    longest = max(map(len, rows))
    body.check_length(longest)
    ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=body.device)
    logits = _logits(body, ids, gates).log_softmax(-1)
    sums = []
    for i, (prompt, answer) in enumerate(texts):
        says = logits[i, len(prompt) - 1 : len(prompt) - 1 + len(answer)]
        sums.append(says.gather(1, torch.tensor(answer, device=body.device)[:, None]).sum())
    return torch.stack(sums)


def _logits(body: HookedModel, ids: Tensor, gates: Tensor) -> Tensor:
    """Return the logits [rows, tokens, vocabulary] of one forward with gates, in fp32."""
    positions = torch.arange(ids.shape[1], device=body.device).expand(ids.shape[0], -1)
    slots = torch.arange(ids.shape[0], device=body.device)
    widths = [part.query_heads for _, part in body.anatomy.attention_parts()]
    layers = (layer for layer, _ in body.anatomy.attention_parts())
    edits: dict[int, LayerEdits] = {
        layer: _Gated(gates=part) for layer, part in zip(layers, torch.split(gates, widths, dim=1), strict=True)
    }
    tally = Tally(ids.shape[0])
    forward = Forward("prefill", positions, slots, tally, body.attention, edits, fast=body.kernels == "fast")
    with body.new_memory(ids.shape[0]).mounted(), current(forward):
        logits: Tensor = run_model(body.model, ids, positions, None).logits
    return logits.float()
