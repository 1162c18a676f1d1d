"""Streaming heads: what they see is what `limit_context` shows these heads, and their cache is really that small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kept import NO_STREAMS, STREAMING, pruned

import needlework as nw
from cases import PROMPT, SPANS, apart, each, intervention, subject, tokens
from needlework.heads.contribution import ContributionObserver
from needlework.model.hooked_model import differentiable
from needlework.pruning.prune import Pruned, parse_others, prune_subject
from needlework.receipts import Tally

CLOSE = 1e-4


def close(name: str) -> float:
    """Two ways of decoding: in Qwen's delta rule rounding grows (`cases.between_routes`)."""
    return {"qwen3_next": 5e-4, "qwen3_5": 5e-4, "qwen3_5_moe": 5e-4, "zamba2": 5e-2, "nemotron_h": 5e-2}.get(name, CLOSE)


@each(STREAMING)
def test_streaming_is_limit_context_on_these_heads(name: str) -> None:
    whole = subject(name)
    smaller, _ = pruned(whole, "first layer empty", "window=4,sinks=2")
    ids = tokens(2, 24)
    theirs = whole.logits(ids, smaller.equals, prompt_tokens=18)
    assert apart(smaller.subject.logits(ids, prompt_tokens=18), theirs) <= close(name)
    assert apart(theirs, whole.logits(ids, prompt_tokens=18)) > 0.1


@pytest.mark.parametrize("others", ["window=4,sinks=2", "window=3,sinks=5", "window=1"])
def test_the_buffer_fills_token_by_token(others: str) -> None:
    whole = subject("llama")
    smaller, _ = pruned(whole, "first layer empty", others)
    ids = tokens(2, 14)
    assert apart(smaller.subject.logits(ids, prompt_tokens=1), whole.logits(ids, smaller.equals, prompt_tokens=1)) <= CLOSE


@each(tuple(NO_STREAMS))
def test_what_cannot_stream_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(nw.NeedleworkError, match=NO_STREAMS[name]):
        pruned(subject(name), "first layer empty", "window=4,sinks=2")


def _memory(smaller: Pruned, length: int) -> int:
    body = smaller.subject.body
    memory = body.new_memory(1)
    with body.session():
        rows = body.compile([[]], [0], "prefill", torch.zeros(1, dtype=torch.int64))
        body.feed(tokens(1, length), memory, "prefill", rows, Tally(1))
        for _ in range(3):
            body.feed(tokens(1, 1), memory, "decode", rows, Tally(1))
    return memory.nbytes("kv")


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_the_cache_is_really_that_small(name: str) -> None:
    smaller, _ = pruned(subject(name), "first layer empty", "window=4,sinks=2")
    per_token = smaller.subject.anatomy.kv_bytes_per_token
    assert 0 < per_token < subject(name).anatomy.kv_bytes_per_token
    assert _memory(smaller, 200) - _memory(smaller, 100) == 100 * per_token
    assert smaller.streams is not None
    streaming = sum(len(heads) for heads in smaller.streams.kv_heads.values())
    buffer = streaming * (2 + 3) * 2 * 8 * 4  # sinks and window but one; keys and values of 8 floats
    numbers = len(smaller.streams.kv_heads) * (2 + 3 + 1) * 8  # their positions, and the next one
    assert _memory(smaller, 100) == 103 * per_token + buffer + numbers


@each(("llama", "recurrent_gemma", "gemma3", "zamba"))
@pytest.mark.parametrize("window", ["window=4,sinks=2", pytest.param("window=1", marks=pytest.mark.slow)])
def test_forks_with_interventions_are_those_of_the_whole_model(name: str, window: str) -> None:
    """Rows of several prompts and lengths that share keys, each with something else done to it."""
    whole = subject(name)
    smaller, _ = pruned(whole, "first layer empty", window)
    acts = [nw.NONE, nw.KeepHeads(k=2), nw.AblateHeads(heads=((whole.anatomy.heads[0]),)), nw.KeepHeads(k=1, by="norm")]
    acts += [nw.ExposeTokens(mode="omit", renormalize=True), nw.ExposeTokens(mode="balanced")]
    asked = [(prompt, act) for prompt in ((*PROMPT, *PROMPT), PROMPT[:7]) for act in acts]
    prompts, spans = [prompt for prompt, _ in asked], [SPANS] * len(asked)
    ours = smaller.subject.generate(prompts, interventions=[act for _, act in asked], max_new_tokens=3, spans=spans)
    limited = [act + smaller.equals for _, act in asked]
    theirs = whole.generate(prompts, interventions=limited, max_new_tokens=3, spans=spans)
    assert [a.error for a in ours] == [""] * len(asked)
    assert [a.tokens for a in ours] == [a.tokens for a in theirs]


def test_memory_can_be_swapped_and_watched() -> None:
    whole = subject("jamba")
    smaller, _ = pruned(whole, "first layer empty", "window=4,sinks=1")
    swap, twin = nw.SwapMemory(half="kv"), [{"twin": (*PROMPT[:4], 80, 55, *PROMPT[6:])}]
    answers = [
        x.generate([PROMPT], swap + act, twins=twin, max_new_tokens=4)[0]
        for x, act in ((smaller.subject, nw.NONE), (whole, smaller.equals))
    ]
    assert answers[0].tokens == answers[1].tokens
    seen = []
    for x, act in ((smaller.subject, nw.NONE), (whole, smaller.equals)):
        with nw.observe(x) as watch:
            x.generate([PROMPT], act, max_new_tokens=4, spans=[SPANS])
        seen.append([(row.needle_mass, row.entropy, row.copy_score) for row in watch.table()])
    assert torch.allclose(torch.tensor(seen[0]), torch.tensor(seen[1]), atol=1e-5)


def test_limit_context_of_single_heads() -> None:
    whole = subject("llama")
    heads = whole.anatomy.heads
    all_heads, every = nw.LimitContext(tokens=4, sinks=1), nw.LimitContext(tokens=4, sinks=1, heads=heads)
    ids = tokens(1, 20)
    assert apart(whole.logits(ids, all_heads), whole.logits(ids, every)) < 1e-5
    one = nw.LimitContext(tokens=4, heads=[(1, 2)])
    assert str(one) == "limit_context(tokens=4, heads=[[1, 2]])"
    assert nw.parse(str(one)) == one
    assert str(all_heads) == "limit_context(tokens=4, sinks=1)"  # as it was
    unlimited = whole.logits(ids)
    assert apart(whole.logits(ids, one), unlimited) > 1e-3
    silent = nw.AblateHeads(heads=[(1, 2)])  # what a silenced head sees matters to no one
    assert torch.equal(whole.logits(ids, silent + one), whole.logits(ids, silent)) or (
        apart(whole.logits(ids, silent + one), whole.logits(ids, silent)) < 1e-5
    )
    for wrong in ([(1, 9)], [(9, 0)]):
        with pytest.raises(nw.NeedleworkError, match=r"no such heads|no attention layers"):
            whole.logits(ids, nw.LimitContext(tokens=4, heads=wrong))
    assert intervention("short context", whole.anatomy) == nw.LimitContext(tokens=4, sinks=1)


def test_a_whole_window_hides_nothing() -> None:
    whole = subject("llama")
    smaller, _ = pruned(whole, "first layer empty", "window=64,sinks=4")
    ids = tokens(2, 30)
    assert apart(smaller.subject.logits(ids, prompt_tokens=20), whole.logits(ids, prompt_tokens=20)) <= 1e-5


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma"])
def test_what_is_counted_is_no_matter_of_company(name: str) -> None:
    """A row that limits single heads gives its batch one view for each head; other rows count pairs of tokens all the same."""
    whole = subject(name)
    layer = whole.anatomy.attention_layers[0].index
    needle = {"needle": ((3, 6),)}
    single = nw.LimitContext(tokens=3, heads=[(layer, 1)])
    for act in (nw.LimitContext(tokens=3, layers=[layer]), nw.ExposeTokens("omit", layers=[layer]), single):
        ask = [nw.Request(PROMPT, one, 2, spans=needle) for one in (act, single + nw.AblateHeads(heads=[(layer, 0)]))]
        (alone,) = whole.answer(ask[:1])
        together = whole.answer(ask)[0]
        assert alone.receipt == together.receipt
        assert alone.tokens == together.tokens


def test_what_full_heads_write_is_the_same_beside_streaming_ones() -> None:
    """In the first layer, heads that see everything get the LOCOS contrast that they have in the whole model."""
    whole = subject("llama")
    smaller = prune_subject(whole, (nw.Head(0, 3),), parse_others("window=4,sinks=1"))
    found = []
    for one in (whole, smaller.subject):
        observer = ContributionObserver(one, 1)
        with observer.hooked():
            list(one.engine.run([nw.Request(PROMPT, spans={"needle": ((3, 6),)}, forced=(5, 9), sample=0)]))
        found.append(observer.sums[0, "contrast"][0].numpy())
    part = whole.anatomy.attention(0)
    group = part.query_heads // part.kv_heads
    full = [head for head in range(part.query_heads) if head // group == 3 // group]
    assert len(full) < part.query_heads
    assert found[0][full] == pytest.approx(found[1][full], abs=1e-5)
    assert np.abs(found[0][full]).min() > 1e-4
    assert not np.allclose(found[0], found[1], atol=1e-4)
    with pytest.raises(nw.NeedleworkError, match="stream by theirs"), differentiable(smaller.subject.body):
        pass
