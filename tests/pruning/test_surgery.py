"""Heads that left the weights: a cut model computes what the whole one does while these heads say nothing."""

from __future__ import annotations

import pytest
import torch
from kept import PRUNED, REFUSED, pruned, stock_logits, stock_without

import needlework as nw
from cases import PROMPT, WITH_HEADS, apart, each, subject, tokens
from needlework.anatomy import AttentionPart
from needlework.model.pruned import ZERO, Cut
from needlework.receipts import Tally

CLOSE = 1e-4


@pytest.mark.slow
@each(PRUNED)
@pytest.mark.parametrize("which", ["uneven", "first layer empty"])
def test_a_cut_model_is_the_whole_one_with_heads_silenced(name: str, which: str) -> None:
    whole = subject(name)
    smaller, heads = pruned(whole, which)
    ids = tokens(2, 22)
    others = tuple(head for head in whole.anatomy.heads if head not in heads)
    theirs = whole.logits(ids, nw.AblateHeads(heads=others), prompt_tokens=15)
    assert apart(smaller.subject.logits(ids, prompt_tokens=15), theirs) <= CLOSE  # prefill and decode
    assert apart(theirs, whole.logits(ids, prompt_tokens=15)) > 0.1  # else it would prove nothing
    assert apart(stock_logits(smaller.subject.model, ids), stock_logits(stock_without(name, heads), ids)) <= CLOSE
    assert smaller.subject.anatomy.parameters < whole.anatomy.parameters


@each(tuple(REFUSED))
def test_what_cannot_be_cut_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(nw.NeedleworkError, match=REFUSED[name]):
        pruned(subject(name), "uneven")


def test_every_architecture_is_pruned_or_refused() -> None:
    assert {*PRUNED, *REFUSED} == set(WITH_HEADS)


def _acts(first: nw.Head) -> list[nw.Intervention]:
    keep = nw.KeepHeads(k=1, phase="decode")
    return [nw.NONE, nw.AblateHeads(heads=(first,)), keep, nw.LimitContext(tokens=5), nw.KeepHeads(k=1, by="norm")]


@pytest.mark.slow
@each(("jamba", "recurrent_gemma", "llama", "falcon_h1", "kimi_linear", "minimax", "inkling", "hrm_text"))
def test_forks_of_a_cut_model_answer_as_they_do_alone(name: str) -> None:
    """Several interventions of prompts of several lengths in one batch: rows share keys, layers without heads count tokens."""
    smaller, _ = pruned(subject(name), "first layer empty")
    model = smaller.subject
    acts = _acts(model.anatomy.heads[0])
    prompts = [PROMPT, PROMPT[:7], (5, 6, *PROMPT)]
    asked = [(prompt, act) for prompt in prompts for act in acts]
    together = model.generate([p for p, _ in asked], interventions=[a for _, a in asked], max_new_tokens=4)
    for (prompt, act), answer in zip(asked, together, strict=True):
        alone = model.logits([[*prompt, *answer.tokens[:-1]]], act, prompt_tokens=len(prompt))[0, len(prompt) - 1 :]
        chosen = alone.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert answer.error == ""
        assert float((alone.amax(-1) - chosen).max()) <= 1e-3  # greedy, up to rounding


@each(("jamba", "recurrent_gemma", "llama"))
def test_forks_of_the_whole_model_with_heads_silenced_say_the_same(name: str) -> None:
    whole = subject(name)
    smaller, heads = pruned(whole, "first layer empty")
    prompts = [PROMPT, PROMPT[:7]] * 2
    ours = smaller.subject.generate(prompts, max_new_tokens=6)
    theirs = whole.generate(prompts, nw.OnlyHeads(heads=heads), max_new_tokens=6)
    assert [a.tokens for a in ours] == [a.tokens for a in theirs]


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_transformers_generates_with_a_layer_that_has_no_heads(name: str) -> None:
    """Its own cache asks the first attention layer how many tokens there are: that layer has no keys to count."""
    smaller, heads = pruned(subject(name), "first layer empty")
    ids = torch.tensor([PROMPT])
    said = [
        model.generate(ids, max_new_tokens=8, do_sample=False) for model in (smaller.subject.model, stock_without(name, heads))
    ]
    assert said[0].tolist() == said[1].tolist()


def test_the_anatomy_shows_what_is_left() -> None:
    whole = subject("jamba")
    smaller, _ = pruned(whole, "uneven")
    parts = [(part.query_heads, part.kv_heads) for _, part in smaller.subject.anatomy.attention_parts()]
    assert parts == [(4, 2), (1, 1)]  # 0, 1 and 3 are in two groups: the second is filled with a head of zeros
    assert smaller.zero_heads == 1
    assert smaller.subject.anatomy.kv_bytes_per_token == whole.anatomy.kv_bytes_per_token * 3 // 4
    empty, _ = pruned(whole, "first layer empty")
    assert [layer.kind for layer in empty.subject.anatomy.layers] == [
        *["recurrent"] * 2,
        "other",
        *["recurrent"] * 2,
        "attention",
    ]
    memory = empty.subject.body.new_memory(1)
    with empty.subject.body.session():
        body = empty.subject.body
        rows = body.compile([[]], [0], "prefill", torch.zeros(1, dtype=torch.int64))
        body.feed(tokens(1, 10), memory, "prefill", rows, Tally(1))
    assert memory.nbytes("kv") == 10 * empty.subject.anatomy.kv_bytes_per_token == 10 * 64


def test_heads_are_arranged_for_the_smallest_cache() -> None:
    part = AttentionPart("a", 8, 2, 4, 4, None, False, False, 0, 0)
    assert Cut.keeping([5, 0, 1], part).query == (0, 1, 5, ZERO)
    assert Cut.keeping([5, 6], part).counts == (2, 1)
    assert Cut.keeping([], part).counts == (0, 0)
    assert Cut.keeping(range(8), part).query == tuple(range(8))


def test_the_whole_model_is_left_as_it_was() -> None:
    whole = subject("llama")
    ids, before = tokens(1, 9), {name: x.clone() for name, x in whole.model.state_dict().items()}
    answer = whole.logits(ids)
    smaller, _ = pruned(whole, "uneven")
    assert torch.equal(whole.logits(ids), answer)
    assert all(torch.equal(x, before[name]) for name, x in whole.model.state_dict().items())
    shared = {x.data_ptr() for x in whole.model.parameters()} & {x.data_ptr() for x in smaller.subject.model.parameters()}
    assert shared  # what was not cut is not held twice


def test_a_difference_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose heads needlework got wrong gives no model."""
    arrange = Cut.keeping.__func__  # type: ignore[attr-defined]

    def wrong(cls: type[Cut], kept: list[int], part: AttentionPart) -> Cut:
        return arrange(cls, [(head + 1) % part.query_heads for head in kept], part)

    monkeypatch.setattr(Cut, "keeping", classmethod(wrong))
    with pytest.raises(nw.NeedleworkError, match="differs from the whole one"):
        pruned(subject("llama"), "uneven")
