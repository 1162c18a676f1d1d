"""Patched head and layer outputs against nnsight, which reaches into the shipped models by other means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import needlework as nw
from needlework.measure import make_samples
from needlework.tasks.base import make_task

NAMES = ("tiny-griffin", "tiny-jamba", "llama")
PROMPTS = ((17, 45, 9, 80, 55, 41, 8, 64, 51, 90, 13, 37), (17, 45, 9, 71, 30, 22, 8, 64, 51, 90, 13, 37))  # of the llama


def _subject(name: str) -> nw.Subject:
    if name != "llama":
        return nw.load(name, kernels="stock")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return nw.wrap(LlamaForCausalLM(config).eval(), kernels="stock")


class Witness:
    """A copy of the stock model with nnsight around it: outputs of one site are saved on one prompt and set on another one."""

    def __init__(self, subject: nw.Subject) -> None:
        from nnsight import NNsight

        self.anatomy, self.model = subject.anatomy, subject.model
        self.traced = NNsight(subject.model)

    def _module(self, path: str) -> Any:
        module = self.traced
        for part in path.split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        return module

    @torch.inference_mode()
    def layer(self, layer: int, clean: Tensor, corrupt: Tensor, positions: Sequence[int]) -> Tensor:
        module = self.traced.model.layers[layer]
        with self.traced.trace(input_ids=clean):
            saved = module.output.save()
        assert isinstance(saved, Tensor)
        with self.traced.trace(input_ids=corrupt):
            edited = module.output.clone()
            edited[:, positions] = saved[:, positions]
            module.output = edited
            logits = self.traced.lm_head.output.save()
        return self._capped(logits)

    @torch.inference_mode()
    def head(self, layer: int, head: int, clean: Tensor, corrupt: Tensor, positions: Sequence[int]) -> Tensor:
        part = self.anatomy.attention(layer)
        channels = slice(head * part.value_dim, (head + 1) * part.value_dim)
        module = self._module(f"{part.path}.o_proj")
        with self.traced.trace(input_ids=clean):
            saved = module.input.save()
        with self.traced.trace(input_ids=corrupt):
            edited = module.input.clone()
            edited[:, positions, channels] = saved[:, positions, channels]
            module.input = edited
            logits = self.traced.lm_head.output.save()
        return self._capped(logits)

    def _capped(self, logits: Tensor) -> Tensor:
        """The model's own last step: RecurrentGemma caps its logits."""
        cap = getattr(self.model.config, "logits_soft_cap", None)
        return logits[0, -1] if cap is None else cap * torch.tanh(logits[0, -1] / cap)


@pytest.mark.parametrize("name", NAMES)
def test_patched_heads_and_layers(witness: Callable[[str], None], name: str) -> None:
    witness("nnsight")
    subject, theirs = _subject(name), Witness(_subject(name))
    clean, corrupt = PROMPTS
    if name != "llama":
        task = make_task({"kind": "niah", "lengths": (64,), "depths": (0,), "samples": 1})
        item = make_samples(subject, task, 0)[0].item
        clean, corrupt = item.prompt, item.twins["twin"]
    ids = [torch.tensor([prompt]) for prompt in (clean, corrupt)]
    differ = [i for i, (a, b) in enumerate(zip(clean, corrupt, strict=True)) if a != b]
    logits = subject.logits([clean, corrupt])[:, -1]
    gap = logits[0] - logits[1]
    a, b = int(gap.argmax()), int(gap.argmin())
    after = {"span": range(differ[0], differ[-1] + 1), "all": range(len(clean)), str(len(clean) - 1): [len(clean) - 1]}
    spans = {"span": ((differ[0], differ[-1] + 1),)}
    heads = [head for head in subject.anatomy.heads if head.index == 3]
    table = nw.patch(
        subject, clean, corrupt, ["heads", "layers"], at=["span", "all", len(clean) - 1], answers=((a,), (b,)), spans=spans
    )
    moved, compared = 0.0, 0
    for row in table.rows:
        where = list(after[row.at])
        if row.site == "layers":
            expected = theirs.layer(row.layer, *ids, where)
        elif (row.layer, row.head) in heads:
            assert row.head is not None
            expected = theirs.head(row.layer, row.head, *ids, where)
        else:
            continue
        value = table.corrupt + row.share.value * (table.clean - table.corrupt)
        assert value == pytest.approx(float(expected[a] - expected[b]), abs=1e-4), row
        moved, compared = max(moved, abs(value - table.corrupt)), compared + 1
    assert moved > 0.5
    assert compared == 3 * (len(heads) + len(subject.anatomy.layers))
