"""What heads write: LOCOS against its formula in plain loops on stock models, gradients of gates against finite differences."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from stock_heads import Call, Spy, Stock, samples, score, stock
from torch import Tensor

import cases
from needlework.heads.contribution import ContributionObserver
from needlework.model.hooked_model import answer_log_p, differentiable
from needlework.requests import Request
from needlework.tasks.base import Item

FAMILIES = [
    "jamba",
    "recurrent_gemma",
    "llama",
    "qwen3_next",
]  # grouped heads; window and output bias; plain; output gate
STEP = 1e-3  # small: a mixture of experts may jump


def _gate(model: Stock, layer: int, ids: list[int], call: Call) -> Tensor:
    """[heads, tokens, dim]: 1, or what Qwen3-Next multiplies heads by: the sigmoid of the second half of its query projection."""
    module = model.modules[layer]
    if type(module).__name__ != "Qwen3NextAttention":
        return torch.ones_like(call.said)
    kept: list[Tensor] = []
    with cases.hook(module.q_proj.register_forward_hook, lambda m, args, out: kept.append(out[0])):  # type: ignore[union-attr, operator]
        model.logits(ids)
    heads, _, dim = call.said.shape
    by_head = kept[0].view(len(ids), heads, 2 * dim)
    return by_head[..., dim:].sigmoid().transpose(0, 1)


def _locos(model: Stock, item: Item) -> list[float]:
    """The formula, a head, a step and a key at a time."""
    (answer,) = item.options
    ids, spy = [*item.prompt, *answer[:-1]], Spy()
    model.logits(ids, spy)
    unembedding = model.model.get_output_embeddings().weight.detach()
    needle = set(range(*item.spans["needle"][0]))
    scores = []
    for layer, head in model.anatomy.heads:
        call = spy.calls[model.modules[layer]]
        gate, dim = _gate(model, layer, ids, call), call.value.shape[2]
        columns = model.projection(layer).weight.detach()[:, head * dim : (head + 1) * dim]
        contrasts = []
        for step, token in enumerate(answer):
            t = len(item.prompt) - 1 + step
            phi = {
                j: float(call.p[head, t, j] * unembedding[token] @ (columns @ (gate[head, t] * call.value[head, j])))
                for j in range(t + 1)
                if call.visible[t, j]
            }
            inside = [value for j, value in phi.items() if j in needle]
            outside = [value for j, value in phi.items() if j not in needle]
            contrasts.append(sum(inside) - len(inside) / len(outside) * sum(outside))
        scores.append(sum(contrasts) / len(contrasts))
    return scores


@pytest.mark.parametrize("name", FAMILIES)
def test_locos_is_its_formula(name: str) -> None:
    found = score("locos", name).each
    expected = np.array([_locos(stock(name), item) for item in samples(name)])
    assert np.abs(found - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())
    assert np.abs(expected).max() > 0.05  # it says something


def test_a_needle_beyond_the_window_has_no_part() -> None:
    """RecurrentGemma shows 8 keys: no answer can look at tokens 0 and 1 of a prompt of 13."""
    item = samples("recurrent_gemma")[1]
    far = Item(item.id, "0", item.prompt, "", "", {"needle": ((0, 2),)}, item.options, 0)
    assert np.abs(score("locos", "recurrent_gemma", [far]).values).max() == 0
    assert np.abs(score("locos", "jamba", [samples("jamba")[1]]).values).min() > 0


@cases.each(cases.WITH_HEADS)
def test_what_all_heads_write_is_what_the_projection_gives(name: str) -> None:
    """In every architecture, whatever stands between attention and projection: summed over heads, towards each token said."""
    subject, item = cases.subject(name), samples(name, 1)[0]
    given: dict[int, list[Tensor]] = {layer.index: [] for layer in subject.anatomy.attention_layers}
    observer = ContributionObserver(subject, 1)
    with observer.hooked(), ExitStack() as stack:
        for layer, part in subject.anatomy.attention_parts():
            projection = cases.output_projection(subject.model.get_submodule(part.path), part.query_heads * part.value_dim)

            def keep(module: Any, args: Any, out: Tensor, layer: int = layer) -> None:
                if args[0].shape[-2] == 1:  # a decode step
                    given[layer].append((out - (0 if module.bias is None else module.bias)).flatten())

            stack.enter_context(cases.hook(projection.register_forward_hook, keep))
        list(subject.engine.run([Request(item.prompt, spans=item.spans, forced=item.options[0], sample=0)]))
    unembedding = subject.model.get_output_embeddings().weight.detach()
    for layer, outs in given.items():
        calls = len(outs) // len(item.options[0])  # of a layer in one forward
        whole = sum(float(unembedding[item.options[0][i // calls]] @ out) for i, out in enumerate(outs))
        assert float(observer.sums[layer, "written"].sum()) == pytest.approx(whole, abs=2e-4 * max(1, abs(whole)))
        assert float(observer.sums[layer, "written"].abs().min()) > 0


@pytest.mark.slow
@cases.each(cases.WITH_HEADS)
def test_a_gradient_is_the_slope_of_a_gate(name: str) -> None:
    """Central differences on the stock model: each head scaled up and down a little where it enters the output projection."""
    found, model = score("gradient", name).each, stock(name)
    for i, item in enumerate(samples(name)):
        slopes = []
        for head in model.anatomy.heads:
            ends = []
            for gate in (1 + STEP, 1 - STEP):
                with model.scaled({tuple(head): gate}):
                    ends.append(model.log_p(item.prompt, item.options[0]))
            slopes.append((ends[0] - ends[1]) / (2 * STEP))
        assert np.abs(found[i] - slopes).max() < 0.03 * max(0.1, np.abs(slopes).max())
        assert np.abs(slopes).max() > 0.01


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma", "qwen3_next"])
def test_padding_at_the_end_changes_nothing(name: str) -> None:
    """A short text beside a long one says what it says alone, and so do its gradients."""
    body, items = cases.subject(name).body, samples(name, 4)
    texts = [(item.prompt, item.options[0]) for item in (items[0], items[3])]

    def slopes(some: list[Any]) -> tuple[Tensor, Tensor]:
        gates = torch.ones(len(some), len(body.anatomy.heads), requires_grad=True)
        with differentiable(body):
            log_p = answer_log_p(body, some, gates)
            return log_p.detach(), torch.autograd.grad(log_p.sum(), gates)[0]

    together, alone = slopes(texts), [slopes([text]) for text in texts]
    for row, one in enumerate(alone):
        assert together[0][row] == pytest.approx(float(one[0]), abs=1e-4)
        assert cases.apart(together[1][row], one[1][0]) < 1e-4


def test_weights_get_no_gradients_and_stay_trainable() -> None:
    model = cases.subject("jamba").model
    score("gradient", "jamba")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
