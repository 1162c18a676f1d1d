"""The slow way to look at heads: stock transformers, one forward for each sample and head, plain hooks, no code of ours.

`Stock` runs a tiny model with an attention function of a few lines, which writes down what it did and lets a test change what a
head says before the model's own gate and projection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import cases
from needlework.tasks.base import Item
from tiny import build

Change = Callable[[Tensor], Tensor]  # what heads say [heads, tokens, dim], before and after


@dataclass
class Call:
    """One call of the attention function."""

    p: Tensor  # [heads, tokens, tokens]
    value: Tensor  # [heads, tokens, dim]
    said: Tensor  # [heads, tokens, dim]
    visible: Tensor  # [tokens, tokens]


@dataclass
class Spy:
    calls: dict[nn.Module, Call] = field(default_factory=dict)
    changes: dict[nn.Module, Change] = field(default_factory=dict)


_SPY: ContextVar[Spy | None] = ContextVar("stock_heads_spy", default=None)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **kwargs: Any) -> Any:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if kwargs.get("position_bias") is not None:
        scores = scores + kwargs["position_bias"]
    mask = mask[:, :1, :, : key.shape[2]]
    p = (scores + mask).softmax(-1, dtype=torch.float32).to(query.dtype)
    out = p @ value
    spy = _SPY.get()
    assert spy is not None
    if module in spy.changes:
        out = spy.changes[module](out[0])[None]
    spy.calls[module] = Call(p[0], value[0], out[0], mask[0, 0] > -1)
    return out.transpose(1, 2).contiguous(), p


AttentionInterface.register("stock_heads", _attention)
AttentionMaskInterface.register("stock_heads", eager_mask)


class Stock:
    """A tiny model as transformers has it, and where its heads are."""

    def __init__(self, name: str) -> None:
        self.model, self.anatomy = build(name), cases.subject(name).anatomy
        self.modules = {layer: self.model.get_submodule(part.path) for layer, part in self.anatomy.attention_parts()}

    def projection(self, layer: int) -> nn.Linear:
        part = self.anatomy.attention(layer)
        return cases.output_projection(self.modules[layer], part.query_heads * part.value_dim)

    def logits(self, ids: Sequence[int], spy: Spy | None = None) -> Tensor:
        known = self.model.forward.__code__.co_varnames
        positions = {"position_ids": torch.arange(len(ids))[None]} if "position_ids" in known else {}
        before = self.model.config._attn_implementation
        token = _SPY.set(spy)
        try:
            if spy is not None:
                self.model.set_attn_implementation("stock_heads")
            with torch.no_grad():
                return self.model(input_ids=torch.tensor([ids]), use_cache=False, **positions).logits[0]
        finally:
            self.model.set_attn_implementation(before)
            _SPY.reset(token)

    def log_p(self, prompt: Sequence[int], answer: Sequence[int], spy: Spy | None = None) -> float:
        """Log-likelihood of an answer, token by token."""
        logits = self.logits([*prompt, *answer[:-1]], spy).log_softmax(-1)
        return sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))

    @contextmanager
    def scaled(self, gates: dict[tuple[int, int], float]) -> Iterator[None]:
        """Heads (layer, index) are multiplied by a number where they enter the output projection."""
        handles = []
        for layer in {layer for layer, _ in gates}:
            width = self.anatomy.attention(layer).value_dim

            def scale(module: nn.Module, args: tuple[Any, ...], layer: int = layer, width: int = width) -> tuple[Any, ...]:
                x = args[0].clone()
                for (at, head), gate in gates.items():
                    if at == layer:
                        x[..., head * width : (head + 1) * width] *= gate
                return (x, *args[1:])

            handles.append(self.projection(layer).register_forward_pre_hook(scale))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@functools.cache
def stock(name: str) -> Stock:
    return Stock(name)


@functools.cache
def samples(name: str, count: int = 2, tokens: int = 3) -> tuple[Item, ...]:
    """Prompts of different lengths with a needle and a twin; the right answer is what the model says by itself."""
    subject = cases.subject(name)
    items = []
    for i in range(count):
        prompt, twin = ((*cases.tokens(i, seed=5 + i).tolist(), *text) for text in (cases.PROMPT, cases.TWIN))
        answer = subject.generate([prompt], max_new_tokens=tokens)[0].tokens
        spans = {"needle": ((3 + i, 6 + i),)}
        items.append(Item(f"{name}/{i}", str(i), prompt, "", "", spans, (answer,), 0, {"twin": twin}))
    return tuple(items)


def score(method: str, name: str, items: Sequence[Item] | None = None, **options: Any) -> Any:
    """A method on a tiny model."""
    from needlework.heads import causal, contribution  # noqa: F401  (they enter the table)
    from needlework.heads.methods import METHODS

    seen: list[float] = []
    seed = options.pop("seed", 0)
    scores = METHODS[method].score(cases.subject(name), items or samples(name), seed=seed, progress=seen.append, **options)
    assert seen == sorted(seen), "progress goes up"
    assert seen[-1] == 1.0, "and ends at 1"
    return scores
