"""Readings that share depth are readings: equal to reading from the first layer on, wherever a model can be entered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import needlework as nw
from needlework.engine import budget as budget_module
from needlework.engine import shared_layers as layers_module
from needlework.engine.budget import Costs, group
from needlework.engine.prefill import Padding, Prefiller
from needlework.engine.shared_layers import EntryPoint, SharedLayers
from needlework.requests import Answer, Request, prepare

PROMPTS = [tuple(row) for row in cases.tokens(2, 13, seed=5).tolist()]
NO_STACK = {"hrm_text"}  # two stacks that run in turns
HEADS_UNKNOWN = {"zaya", "inkling"}  # convolutions inside attention have a memory of their own
WHOLE_TOP = {"zamba", "zamba2", "zaya", "inkling", "glm5_next", "qwen4_exp"}  # its last layer mixes tokens after attention


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts this short would not be worth a forward; and two rows at a time, so that batches are cut and put together."""
    monkeypatch.setattr(budget_module, "_FORWARD_FLOPS", {"cpu": 0.0})
    monkeypatch.setattr(layers_module, "_PROOF_COST", 0)
    monkeypatch.setattr(budget_module, "FORWARD_TOKENS", {"cpu": 30})


def acts(subject: nw.Subject) -> list[nw.Intervention]:
    """Nothing; something in every layer; and acts in several layers at once."""
    attention = [layer.index for layer in subject.anatomy.attention_layers]
    recurrent = [layer.index for layer in subject.anatomy.recurrent_layers]
    each: list[nw.Intervention] = [nw.NONE]
    each += [nw.AblateHeads(heads=[(layer, 1)], phase="prefill") for layer in attention]
    each += [nw.AblateAttention(site="block", layers=[layer]) for layer in attention]
    each += [nw.AblateRecurrent(site="block", layers=[layer]) for layer in recurrent]
    each += [nw.AblateRecurrent(layers=[layer], phase="prefill") for layer in recurrent]  # its state shows in decode alone
    if attention:
        last = attention[-1]
        each += [nw.KeepHeads(k=1, layers=[last]), nw.KeepHeads(k=2, by="norm", layers=[last]), nw.LimitContext(3, layers=[last])]
        each += [nw.KeepHeads(k=1, by="random", layers=[last]), nw.OnlyHeads(heads=[(layer, 0) for layer in attention])]
        each += [nw.AblateHeads(heads=[(attention[0], 0)]) + nw.KeepHeads(k=1, by="norm", layers=[last], phase="prefill")]
        each += [nw.KeepHeads(k=2), nw.KeepHeads(k=1, sinks=1), nw.KeepHeads(k=1) + nw.AblateHeads(heads=[(attention[0], 0)])]
    if recurrent:
        each += [nw.ResetState(at=4, layers=[recurrent[-1]])]
    if attention and recurrent:
        each += [nw.AblateHeads(heads=[(attention[-1], 0)]) + nw.AblateRecurrent(layers=recurrent[-1:])]
    return each


def assert_same(fast: Answer, slow: Answer) -> None:
    assert (fast.tokens, fast.receipt, fast.error) == (slow.tokens, slow.receipt, "")
    assert torch.allclose(torch.tensor(fast.logprobs), torch.tensor(slow.logprobs), atol=1e-4)
    assert torch.allclose(torch.tensor(fast.margins), torch.tensor(slow.margins), atol=1e-4)


@pytest.mark.slow
@cases.each(cases.ALL)
def test_answers_are_those_of_each_request_by_itself(name: str) -> None:
    """Alone, a request shares nothing. Receipts and all tokens are equal, so that the memory they go on from is, too."""
    subject = cases.subject(name)
    requests = [Request(prompt, act, 3) for prompt in PROMPTS for act in acts(subject)]
    together = subject.answer(requests)
    reader = subject.engine.prefiller
    assert (reader.tokens_computed < reader.tokens_requested) == (name not in NO_STACK)
    for answer, request in zip(together, requests, strict=True):
        assert_same(answer, subject.answer([request])[0])


@pytest.mark.slow
@cases.each(cases.ALL)
def test_logits_are_those_of_reading_as_a_whole(name: str) -> None:
    subject = cases.subject(name)
    deep, whole = both_ways(subject, [Request(p, act, 2, boundary="prefill") for p in PROMPTS for act in acts(subject)])
    assert bool(deep) == (name not in NO_STACK)
    for i, logits in deep.items():
        assert cases.apart(logits, whole[i]) < 1e-4


def both_ways(subject: nw.Subject, requests: list[Request]) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Logits after the prompt of each request that shares depth, and of every one read by itself as a whole."""
    readings, places = group([prepare(request, subject.anatomy) for request in requests])
    assert [place[None] for place in places] == list(range(len(requests)))
    with subject.body.session():
        depth = SharedLayers(subject.body)
        reader = Prefiller(subject.body, depth, Padding(subject.body), 0)
        chosen = {i: readings[i] for i in depth.worthwhile(readings)}
        deep = {i: read.logits[row] for some, read in depth.run(chosen, True) for row, i in enumerate(some)} if chosen else {}
        return deep, [reader.run([one]).logits[0] for one in readings]


def by_hooks(model: Any, projection: nn.Linear, dim: int, head: int) -> Tensor:
    """Stock transformers: the columns of one head are zero where the output projection takes them."""

    def silence(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads = args[0].clone()
        heads[..., head * dim : (head + 1) * dim] = 0
        return (heads, *args[1:])

    with cases.hook(projection.register_forward_pre_hook, silence), torch.no_grad():
        return model(input_ids=torch.tensor(PROMPTS)).logits[:, -1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "recurrent_gemma", "falcon_h1"])
def test_silenced_heads_are_those_of_a_plain_hook(name: str) -> None:
    """Every head of every layer, against the stock model."""
    subject = cases.subject(name)
    heads = subject.anatomy.heads
    asked = [Request(p, nw.AblateHeads(heads=[head], phase="prefill"), 1, boundary="prefill") for head in heads for p in PROMPTS]
    deep, _ = both_ways(subject, asked)
    assert len(deep) == len(asked)
    for h, head in enumerate(heads):
        part = subject.anatomy.attention(head.layer)
        projection = cases.output_projection(subject.model.get_submodule(part.path), part.query_heads * part.value_dim)
        stock = by_hooks(subject.model, projection, part.value_dim, head.index)
        assert cases.apart(torch.stack([deep[2 * h], deep[2 * h + 1]]), stock) < 1e-4


@pytest.mark.slow
@cases.each(cases.ALL)
def test_which_models_can_be_entered_where(name: str) -> None:
    """Found by running them; pinned here, so that a family that loses its entry points is seen."""
    subject = cases.subject(name)
    depth = SharedLayers(subject.body)
    attention = {layer.index for layer in subject.anatomy.attention_layers}
    layers = sorted(attention | {layer.index for layer in subject.anatomy.recurrent_layers})
    with subject.body.session():
        plain = [layer for layer in layers if depth.proven(EntryPoint(layer, False, False))]
        after_heads = {layer for layer in attention if depth.proven(EntryPoint(layer, True, False))}
        last_only = [layer for layer in layers if depth.proven(EntryPoint(layer, False, True))]
    assert plain == ([] if name in NO_STACK else layers)
    assert after_heads == (set() if name in NO_STACK | HEADS_UNKNOWN else attention)
    assert last_only == ([] if name in NO_STACK | WHOLE_TOP else layers)


def test_layers_below_are_computed_once_and_the_top_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal answers would come from sharing nothing, too: look at what really runs."""
    subject = cases.subject("llama")
    layers = subject.model.model.layers
    last = len(layers) - 1
    asked = [
        Request(p, nw.AblateHeads(heads=[(2, h)], phase="prefill"), 1, boundary="prefill") for p in PROMPTS for h in range(4)
    ]
    subject.answer(asked)  # the entry points are proven
    total: dict[tuple[int, str], int] = {}
    watched = {(i, "queries"): layer.self_attn.q_proj for i, layer in enumerate(layers)}
    watched |= {(i, "feed-forward"): layer.mlp.gate_proj for i, layer in enumerate(layers)}

    def counting(key: tuple[int, str], forward: Any) -> Any:
        def count(hidden: Tensor) -> Tensor:
            total[key] = total.get(key, 0) + hidden.shape[0] * hidden.shape[1]
            return forward(hidden)

        return count

    for key, module in watched.items():
        monkeypatch.setitem(vars(module), "forward", counting(key, module.forward))
    subject.answer(asked)
    prompts, tokens = len(PROMPTS), len(PROMPTS[0])
    assert total[0, "queries"] == total[1, "feed-forward"] == prompts * tokens  # one recording
    assert total[2, "queries"] == prompts * tokens  # the heads of layer 2 have spoken already
    assert total[2, "feed-forward"] == (prompts + len(asked)) * tokens
    assert total[last, "feed-forward"] == prompts * tokens + len(asked)  # one token a row


@pytest.mark.parametrize("by", ["entropy", "l2", "norm", "random"])
def test_heads_are_scored_once_however_many_are_kept(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer that is acted on has no queries but those of the recording, and its choice is that of every row alone."""
    subject = cases.subject("llama")
    asked = [Request(p, nw.KeepHeads(k=k, by=by, layers=[2, 3]), 2) for p in PROMPTS for k in range(4)]
    asked += [Request(p, nw.KeepHeads(k=1, by="entropy", sinks=2, layers=[2]), 2) for p in PROMPTS]  # by another score
    alone = [subject.answer([request])[0] for request in asked]
    subject.answer(asked)  # the entry points are proven
    total = []
    projection = subject.model.model.layers[2].self_attn.q_proj

    def counting(hidden: Tensor) -> Tensor:
        total.append(hidden.shape[0] * hidden.shape[1])
        return type(projection).forward(projection, hidden)

    monkeypatch.setitem(vars(projection), "forward", counting)
    for fast, slow in zip(subject.answer(asked), alone, strict=True):
        assert_same(fast, slow)
    prompts, tokens = len(PROMPTS), len(PROMPTS[0]) - 1
    decoded = 2 * len(asked)
    assert sum(total) == prompts * tokens * 2 + decoded  # one recording, and the rarer score


class Past(nn.Module):
    """A feed-forward map that says something to another layer, past those between."""

    def __init__(self, own: nn.Module, said: list[Tensor], listens: bool) -> None:
        super().__init__()
        self.own, self.said, self.listens = own, said, listens

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.own(hidden)
        if self.listens:
            return out + self.said[-1].flip(1)
        self.said.append(out)
        return out


def test_a_layer_that_hears_from_another_one_is_not_entered() -> None:
    """A model that carries something past its layers: the proof fails, and answers come the old way, still right."""
    model, said = cases.build("llama"), []
    for layer, listens in ((0, False), (2, True)):
        model.model.layers[layer].mlp = Past(model.model.layers[layer].mlp, said, listens)
    subject = nw.wrap(model)
    requests = [Request(p, nw.AblateHeads(heads=[(2, h)]), 3) for p in PROMPTS for h in range(4)]
    for fast, request in zip(subject.answer(requests), requests, strict=True):
        assert_same(fast, subject.answer([request])[0])
    with subject.body.session():
        assert not subject.engine.shared_layers.proven(EntryPoint(2, True))
        assert not subject.engine.shared_layers.proven(EntryPoint(2, False, False))
        assert subject.engine.shared_layers.proven(EntryPoint(0, True, False))  # there, nothing is skipped that says something


def test_an_entry_point_that_leads_elsewhere_is_refused_by_its_numbers() -> None:
    """Beside the last attention of FalconH1 a mixer must see all tokens; given the last one alone, it runs without an error."""
    subject = cases.subject("falcon_h1")
    depth, top = SharedLayers(subject.body), len(subject.anatomy.layers) - 1
    with subject.body.session():
        assert depth.proven(EntryPoint(top, True, False))
        assert not depth.proven(EntryPoint(top, True, True))


def test_hooks_of_others_act_once_on_every_row() -> None:
    """They may come after the proof: a model that has any is read as a whole."""
    subject = nw.wrap(cases.build("llama"))
    requests = [Request(p, nw.AblateHeads(heads=[(2, h)]), 2) for p in PROMPTS for h in range(4)]
    subject.answer(requests)
    assert subject.engine.prefiller.tokens_computed < subject.engine.prefiller.tokens_requested
    with cases.hook(subject.model.model.layers[1].register_forward_hook, lambda module, args, output: 1.5 * output):
        for fast, request in zip(subject.answer(requests), requests, strict=True):
            assert_same(fast, subject.answer([request])[0])


def test_observers_see_every_row_in_every_layer() -> None:
    subject = cases.subject("llama")
    requests = [Request(p, act, 1, boundary="prefill") for p in PROMPTS for act in acts(subject)]
    with nw.observe(subject) as watch:
        subject.answer(requests)
    assert {row.queries for row in watch.table("prefill")} == {len(requests) * len(PROMPTS[0])}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma"])
def test_prompts_that_begin_alike_share_the_better_way(name: str) -> None:
    """Stems where many prompts have one, depth where one prompt has many requests; both at once change nothing."""
    subject = cases.subject(name)
    last = subject.anatomy.attention_layers[-1].index
    begin = cases.tokens(1, 20, seed=8)[0].tolist()
    prompts = [(*begin[:n], 7, 8, 9 + n) for n in (6, 12, 12, 18)] + [(*begin, 5, 5)]
    some = [nw.NONE, *(nw.AblateHeads(heads=[(last, h)]) for h in range(3)), nw.KeepHeads(k=1)]
    requests = [Request(prompt, act, 3) for prompt in dict.fromkeys(prompts) for act in some]
    for fast, request in zip(subject.answer(requests), requests, strict=True):
        assert_same(fast, subject.answer([request])[0])


def test_nothing_is_left_on_a_model_that_was_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = nw.wrap(cases.build("llama"))
    requests = [Request(PROMPTS[0], nw.AblateHeads(heads=[(2, h)]), 1, boundary="prefill") for h in range(4)]
    before = {path: sorted(vars(module)) for path, module in subject.model.named_modules()}
    subject.answer(requests)
    calls: list[int] = []

    stock = subject.model.model.norm.forward

    def fail(hidden: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:  # the first is the recording
            raise ZeroDivisionError
        return stock(hidden)

    with monkeypatch.context() as patch:
        patch.setitem(vars(subject.model.model.norm), "forward", fail)
        with pytest.raises(ZeroDivisionError):
            subject.answer(requests)
    assert {path: sorted(vars(module)) for path, module in subject.model.named_modules()} == before


def test_a_prompt_that_is_recorded_is_paid_for() -> None:
    """One prompt more, whose activations outweigh all that is recorded, of as many layers as there are readings."""
    subject = cases.subject("llama")
    costs = Costs.of(subject.body)
    items = [prepare(Request(PROMPTS[0], nw.AblateHeads(heads=[(layer, 0)])), subject.anatomy) for layer in range(4)]
    alone = sum(costs.batch([item]) for item in items)
    assert costs.batch(items) == alone + costs.prompt(items[0].prefill_tokens)
    tokens = items[0].prefill_tokens
    with subject.body.session():
        recording = subject.engine.shared_layers._record(
            torch.tensor([PROMPTS[0][:tokens]]), [EntryPoint(layer, True) for layer in range(4)]
        )
    kept = [*recording.outputs.values(), *(one.heads for one in recording.heads.values())]
    assert len(kept) == 7  # nothing lies below layer 0
    assert sum(x.numel() * x.element_size() for x in kept) <= len(items) * tokens * costs.activations_per_token


@pytest.mark.parametrize("name", ["jamba", "zamba", "zamba2", "falcon_h1"])
def test_a_topmost_layer_of_attention_and_mixer_is_computed_for_all_tokens(name: str) -> None:
    """There the mixer may read what attention says of every token; in half precision no proof would see the difference."""
    subject = cases.subject(name)
    depth = SharedLayers(subject.body)
    last = subject.anatomy.attention_layers[-1].index
    item = prepare(Request(cases.PROMPT, nw.AblateHeads(heads=[(last, 0)])), subject.anatomy)
    assert any(entry.last_only for entry in depth._entry_points(item)) == (name == "jamba")
    assert depth._entry_points(item)
