"""Finding the layer that broke a trial, by running the trial again and looking at every layer's output."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from needlework.engine.decode import Track
from needlework.model.body import Body
from needlework.receipts import Tally


def first_bad_layer(body: Body, track: Track) -> str:
    """Path of the first layer whose output is not finite, or where it first went wrong otherwise. Needs an open session."""
    bad: list[str] = []

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and not bool(hidden.isfinite().all()) and not bad:
                bad.append(path)

        return hook

    parents = {path.rpartition(".")[0] for path, m in body.model.named_modules() if isinstance(m, nn.Module)}
    lists = [path for path, m in body.model.named_modules() if isinstance(m, nn.ModuleList) and path in parents]
    with ExitStack() as stack:
        for path, module in body.model.named_modules():
            if path.rpartition(".")[0] in lists or isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(watch(path)).remove)
        _replay(body, track)
    return bad[0] if bad else "none of them (the output head)"


def _replay(body: Body, track: Track) -> None:
    item = track.prepared
    ids = torch.tensor([[*item.request.prompt, *track.tokens]], device=body.device)
    slot, memory, tally = torch.zeros(1, dtype=torch.int64, device=body.device), body.new_memory(1), Tally(1)
    split = item.prefill_tokens
    if split:
        rows = body.compile([item.acts["prefill"]], [item.sample], "prefill", slot)
        body.feed(ids[:, :split], memory, "prefill", rows, tally)
    rows = body.compile([item.acts["decode"]], [item.sample], "decode", slot)
    for t in range(split, ids.shape[1]):
        body.feed(ids[:, t : t + 1], memory, "decode", rows, tally)
