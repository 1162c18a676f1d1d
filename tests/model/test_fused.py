"""Answers that the compiled kernel has a part in are those that tensor maths gives, step by step; and it has its part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import cases
import needlework as nw
from needlework.engine import budget as budget_module
from needlework.engine import shared_layers as layers_module
from needlework.interventions.acts import Act, BlockEdges, ChangeOutputs, ExposeColumns, KeepBest, LimitKeys, SilenceHeads
from needlework.model import attention
from needlework.model.attention import Forward, QueryBlock, fuses
from needlework.model.memory import OwnKeys
from needlework.receipts import Tally
from needlework.requests import Answer, Request

PROMPTS = [tuple(row) for row in cases.tokens(2, 21, seed=11).tolist()] + [tuple(cases.tokens(1, 26, seed=12)[0].tolist())]
NAMES = ("llama", "gemma3", "jamba", "recurrent_gemma", "qwen3_next")


def fused_acts(subject: nw.Subject) -> list[nw.Intervention]:
    """What the kernel takes, alone and together, in both phases and in one."""
    first = subject.anatomy.attention_layers[0].index
    heads = subject.anatomy.attention(first).query_heads
    some = [nw.NONE, *(nw.KeepHeads(k=k) for k in range(heads + 1))]
    some += [nw.KeepHeads(k=1, sinks=2), nw.KeepHeads(k=1, phase="prefill"), nw.KeepHeads(k=1, phase="decode")]
    some += [nw.LimitContext(4), nw.LimitContext(5, sinks=1), nw.LimitContext(6) + nw.KeepHeads(k=2, sinks=1)]
    return [
        *some,
        nw.KeepHeads(k=2) + nw.AblateHeads(heads=[(first, 0)]),
        nw.BlockAttention(to=(1, 2, 5)) + nw.LimitContext(9) + nw.KeepHeads(k=2),
        nw.LimitContext(7) + nw.AblateHeads(heads=[(first, 1)]),
    ]


def answers(subject: nw.Subject, acts: list[nw.Intervention], patch: pytest.MonkeyPatch, fused: bool) -> tuple[list[Answer], int]:
    """With the kernel or without it; and how many blocks it computed."""
    stock, calls = attention.fused_block, []

    def counted(*args: object) -> torch.Tensor:
        calls.append(1)
        return stock(*args)  # type: ignore[arg-type]

    with patch.context() as here:
        here.setattr(attention, "fused_block", counted)
        if not fused:
            here.setattr(attention, "fuses", lambda *args: False)
        return subject.answer([Request(prompt, act, 4) for prompt in PROMPTS for act in acts]), len(calls)


@cases.each(NAMES)
def test_answers_and_receipts_are_those_of_tensor_maths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject(name)
    acts = fused_acts(subject)
    ours, blocks = answers(subject, acts, monkeypatch, True)
    theirs, none = answers(subject, acts, monkeypatch, False)
    assert blocks > 0
    assert none == 0
    for one, other in zip(ours, theirs, strict=True):
        assert (one.tokens, one.receipt, one.error) == (other.tokens, other.receipt, "")
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4)


OTHERS = {
    "another score": KeepBest(0, 1, "l2"),
    "a score of outputs": KeepBest(0, 1, "norm"),
    "chance": KeepBest(0, 1, "random"),
    "a limit of some heads": LimitKeys(0, 4, 0, frozenset({1})),
    "edges of some heads": BlockEdges(0, (), 5, (1, 2), frozenset({1})),
    "columns": ExposeColumns(0, "omit", (3, 4), False, False),
    "a function of outputs": ChangeOutputs(0, lambda out, place: out),
}


def forward_under(acts: list[Act], **fields: object) -> Forward:
    body, slots = cases.subject("llama").body, torch.zeros(1, dtype=torch.int64)
    edits = body.compile([acts], [0], "prefill", slots).attention
    return Forward("prefill", torch.arange(20)[None], slots, Tally(1), {}, edits, **{"fast": True, **fields})  # type: ignore[arg-type]


def test_the_rest_goes_the_old_way() -> None:
    """Other scores, rewritten columns, a mask for each head, watchers, other kinds of numbers: tensor maths, as ever."""
    query, keys = torch.randn(1, 4, 20, 8), OwnKeys(torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8))
    entropy: list[Act] = [KeepBest(0, 1, "entropy", sinks=1), LimitKeys(0, 4, 0), SilenceHeads(0, frozenset({1}))]
    for nothing_else in ([], entropy):
        assert fuses(forward_under(nothing_else), 0, query, keys, {"scaling": 0.5})
    for name, act in OTHERS.items():
        assert not fuses(forward_under([act]), 0, query, keys, {}), name
    for fields in ({"fast": False}, {"observer": SimpleNamespace(attention=True)}):
        assert not fuses(forward_under(entropy, **fields), 0, query, keys, {})
    assert not fuses(forward_under(entropy), 0, query.bfloat16(), keys, {})
    assert not fuses(forward_under(entropy), 0, query, keys, {"position_bias": torch.zeros(1, 4, 20, 20)})
    assert not fuses(forward_under(entropy), 0, query[:, :, -1:], keys, {})  # one token against keys that nobody else reads


@pytest.mark.parametrize("act", [nw.KeepHeads(k=1), nw.KeepHeads(k=3, sinks=1), nw.AblateHeads(heads=[(3, 1), (2, 0)])], ids=str)
def test_a_topmost_layer_computes_one_query_and_counts_all(act: nw.Intervention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of readings that share depth, under our own maths, too."""
    subject = cases.subject("llama")
    top = subject.anatomy.attention_layers[-1].index
    monkeypatch.setattr(budget_module, "_FORWARD_FLOPS", {"cpu": 0.0})
    monkeypatch.setattr(layers_module, "_PROOF_COST", 0)
    seen: list[tuple[int, int]] = []
    stock = attention.fused_block

    def watched(forward: Forward, layer: int, block: QueryBlock, query: torch.Tensor) -> torch.Tensor:
        seen.append((layer, query.shape[2]))
        return stock(forward, layer, block, query)

    asked = [nw.NONE, act, act + nw.LimitContext(30, layers=[2]), nw.LimitContext(9, layers=[1])]
    requests = [Request(PROMPTS[2], one, 3) for one in asked]
    alone = [subject.answer([request])[0] for request in requests]
    subject.answer(requests)  # the entry points are proven
    monkeypatch.setattr(attention, "fused_block", watched)
    for ours, theirs in zip(subject.answer(requests), alone, strict=True):
        assert (ours.tokens, ours.receipt) == (theirs.tokens, theirs.receipt)
    assert (top, 1) in seen
