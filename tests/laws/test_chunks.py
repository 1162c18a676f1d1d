"""Long prompts are read in chunks: answers, receipts and what is watched are those of one piece, memory is that of a chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cases
import needlework as nw
from needlework.engine import budget, prefill
from needlework.engine.shared_layers import SharedLayers
from needlework.model import attention, hooked_model
from needlework.model.edits import keeps_from_sdpa
from needlework.requests import Answer, Request, prepare
from tiny import build

LENGTH = 31  # no multiple of any chunk
LONG = tuple(cases.tokens(LENGTH, seed=11).tolist())
NEEDLE = slice(8, 11)  # across the first cut of both
TWIN = (*LONG[:8], 21, 22, 23, *LONG[11:])
SPANS = {"needle": ((8, 11),)}
CHUNKS = (7, 12)  # shorter and longer than the windows of the matrix
ACTS = (
    *("none", "keep by entropy", "keep without sinks", "keep by norm", "keep at random", "keep in decode"),
    *("attention off", "attention off in prefill", "attention block off", "one head off"),
    *("needle omitted", "needle only", "needle balanced", "short context", "groups off"),
    *("memory off", "convolution off", "state off", "reset after the needle", "keys swapped", "state swapped"),
)
DECODE_ONLY = ("keep in decode", "keys swapped", "state swapped")  # nothing that scoring could do


@contextmanager
def in_chunks(subject: nw.Subject, tokens: int) -> Iterator[None]:
    """Chunks of so many tokens, and masks in blocks from the first chunk that goes on."""
    before, whole = hooked_model.CHUNK_TOKENS, attention.WHOLE_MASK
    hooked_model.CHUNK_TOKENS, attention.WHOLE_MASK = tokens, 1
    try:
        yield
    finally:
        hooked_model.CHUNK_TOKENS, attention.WHOLE_MASK = before, whole


def asked(subject: nw.Subject, name: str) -> tuple[list[str], list[Request]]:
    """Every act generates, and those that can are scored with options of several lengths."""
    which = [act for act in ACTS if not cases.refusal(name, act)]
    made = {act: cases.intervention(act, subject.anatomy) for act in which}
    requests = [Request(LONG, made[act], 3, spans=SPANS, twins={"twin": TWIN}) for act in which]
    scored = [act for act in which if act not in DECODE_ONLY]
    requests += [Request(LONG, made[act], spans=SPANS, options=((5,), (6, 7, 8), (9, 10))) for act in scored]
    return [*which, *(f"{act}, scored" for act in scored)], requests


def answers(subject: nw.Subject, requests: Sequence[Request]) -> list[Answer]:
    found = dict(subject.engine.run(requests))
    return [found[i] for i in range(len(requests))]


def answers_by_path(subject: nw.Subject, requests: Sequence[Request]) -> list[Answer]:
    """Those that stock attention serves apart from those that it cannot serve: side by side, none would be left to it."""
    own = [keeps_from_sdpa(prepare(request, subject.anatomy).acts["prefill"]) for request in requests]
    parts = {
        kind: iter(answers(subject, [r for r, mine in zip(requests, own, strict=True) if mine == kind])) for kind in set(own)
    }
    return [next(parts[kind]) for kind in own]


def assert_equal(found: Answer, expected: Answer, tolerance: float, what: object) -> None:
    assert found.error == expected.error == "", what
    assert found.tokens == expected.tokens, what
    assert found.receipt == expected.receipt, what
    assert found.greedy == expected.greedy, what
    pairs = zip((*found.option_logprobs, found.logprobs), (*expected.option_logprobs, expected.logprobs), strict=True)
    for some, others in pairs:
        assert some == pytest.approx(others, abs=tolerance, rel=0), what


class Forwards:
    """Lengths of all forwards."""

    def __init__(self, subject: nw.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        forward = subject.body._forward

        def counted(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.tokens.append(ids.shape[1])
            return forward(ids, *args, **kwargs)

        monkeypatch.setattr(subject.body, "_forward", counted)


# --- equal answers ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@cases.each(cases.ALL)
def test_answers_and_receipts_are_those_of_one_piece(name: str) -> None:
    subject = cases.subject(name)
    names, requests = asked(subject, name)
    expected = answers(subject, requests)
    for size in CHUNKS:
        with in_chunks(subject, size):
            for act, found, whole in zip(names, answers_by_path(subject, requests), expected, strict=True):
                assert_equal(found, whole, cases.between_routes(name), (name, act, size))


@cases.each(cases.ALL)
def test_chunks_give_the_logits_of_stock_transformers(name: str) -> None:
    """Every position of a prompt that is read in chunks, against one plain forward of the model as it comes."""
    model, ids = build(name), torch.tensor([LONG])
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
    subject = nw.wrap(model)
    with in_chunks(subject, 7):
        found = subject.logits(ids)
    assert cases.apart(found, expected) <= max(2e-4, cases.between_routes(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jamba", "gemma3"])
def test_prompts_of_all_lengths_side_by_side(name: str) -> None:
    subject = cases.subject(name)
    prompts = [LONG, LONG[:16], (*LONG, *LONG[3:12]), LONG[:6], (*LONG[:16], 5, 6, 7), LONG[::-1]]
    acts = [nw.NONE, nw.KeepHeads(k=2), nw.AblateAttention(), nw.LimitContext(tokens=5)]
    requests = [Request(prompt, act, 3) for prompt in prompts for act in acts]
    expected = [answers(subject, [request])[0] for request in requests]
    with in_chunks(subject, 7):
        for request, found, whole in zip(requests, answers(subject, requests), expected, strict=True):
            assert_equal(found, whole, 1e-4, (len(request.prompt), request.intervention))


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_a_shared_beginning_goes_on_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject(name)
    prompts = [LONG, (*LONG[:16], *LONG[:15]), (*LONG[:16], *LONG[5:24])]
    requests = [Request(prompt, act, 2) for prompt in prompts for act in (nw.NONE, nw.KeepHeads(k=2))]
    expected = [answers(subject, [request])[0] for request in requests]
    monkeypatch.setattr(prefill, "forward_overhead", lambda body: 0.0)  # one more forward costs nothing
    monkeypatch.setattr(SharedLayers, "worthwhile", lambda self, readings, chunk: {})
    with in_chunks(subject, 7):
        for found, whole in zip(answers(subject, requests), expected, strict=True):
            assert_equal(found, whole, 1e-4, name)
    assert (
        subject.engine.prefiller.tokens_computed <= subject.engine.prefiller.tokens_requested - 4 * 16
    )  # twice by two of three readers


def test_what_is_watched_is_the_same() -> None:
    subject = cases.subject("jamba")
    seen = []
    for size in (hooked_model.CHUNK_TOKENS, 7):
        with in_chunks(subject, size), nw.observe(subject, patterns=True, positions=[3, 20, 29]) as watch:
            subject.generate([LONG], max_new_tokens=2, spans=[SPANS])
        seen.append(watch)
    for whole, part in zip(*(watch.table("prefill") + watch.table("decode") for watch in seen), strict=True):
        assert vars(part) == pytest.approx(vars(whole), abs=1e-6), whole
    found, expected = (sorted(watch.patterns, key=lambda x: (x.layer, x.head, x.position)) for watch in reversed(seen))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert (one.layer, one.head, one.phase, one.position) == (other.layer, other.head, other.phase, other.position)
        assert torch.equal(one.keys, other.keys)
        assert cases.apart(one.weights, other.weights) < 1e-6


# --- what is cut, and what is not -------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(3, 700))
def test_chunks_are_alike_and_none_is_a_lone_token(tokens: int, most: int) -> None:
    edges = [0, *sorted(hooked_model.chunk_boundaries(tokens, most)), tokens]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    assert sum(sizes) == tokens
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert tokens == 1 or min(sizes) > 1


def test_a_prompt_of_one_chunk_is_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("jamba")
    forwards = Forwards(subject, monkeypatch)
    subject.generate([LONG], max_new_tokens=1)
    assert forwards.tokens == [LENGTH - 1, 1]
    forwards.tokens.clear()
    with in_chunks(subject, LENGTH - 1):
        subject.generate([LONG], max_new_tokens=1)
    assert forwards.tokens == [LENGTH - 1, 1]
    forwards.tokens.clear()
    with in_chunks(subject, 7):
        subject.generate([LONG], max_new_tokens=1)
    assert forwards.tokens == [6, 6, 6, 6, 6, 1]


@pytest.mark.parametrize(("name", "kernels", "act"), [
    ("minimax", "fast", nw.NONE),
    ("jamba", "stock", nw.NONE),
    ("llama", "fast", nw.ExposeTokens(mode="balanced", compat="paper", phase="prefill")),
])  # fmt: skip
def test_what_cannot_go_on_is_read_in_one_piece(
    name: str, kernels: str, act: nw.Intervention, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = cases.subject(name, kernels)
    forwards = Forwards(subject, monkeypatch)
    with in_chunks(subject, 7):
        subject.generate([LONG], act, max_new_tokens=1, spans=[SPANS])
    assert max(forwards.tokens) == LENGTH - 1


# --- memory -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, keys and values of a cache apart."""

    def __init__(self, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.cached, self.bytes, self.shape = (kv_heads, dim), 0, tuple[int, ...]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            if (parts := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for made in torch.utils._pytree.tree_leaves(out):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                is_cache = made.dim() == 4 and (made.shape[1], made.shape[3]) == self.cached
                if not is_cache and made.untyped_storage().nbytes() > self.bytes:
                    self.bytes, self.shape = made.untyped_storage().nbytes(), tuple(made.shape)
        return out


MEASURED = {
    "none": nw.NONE,
    "keep": nw.KeepHeads(k=2, sinks=1),
    "limit and expose": nw.LimitContext(tokens=50) + nw.ExposeTokens(mode="balanced"),
    "ablate": nw.AblateAttention(),
}


def growth(name: str, act: nw.Intervention, chunk: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, object]:
    """How much larger the largest tensor is with four times the tokens, and its shape."""
    subject = cases.subject(name)
    part = subject.anatomy.attention_layers[0].attention
    assert part is not None
    monkeypatch.setattr(attention, "CPU_BLOCK_BYTES", 1 << 13)  # small as the model is
    monkeypatch.setattr(attention, "MANY_KEYS", 16)
    monkeypatch.setattr(attention, "CPU_MASK_PAIRS", 1 << 10)
    seen = []
    for tokens in (48, 192):
        prompt = cases.tokens(tokens, seed=3).tolist()
        with in_chunks(subject, chunk), Largest(part.kv_heads, part.key_dim) as largest:
            (answer,) = subject.generate([prompt], act, max_new_tokens=1, spans=[SPANS])
        assert answer.error == ""
        seen.append(largest)
    return seen[1].bytes / seen[0].bytes, seen[1].shape


@pytest.mark.parametrize("name", ["jamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "falcon_h1"))])
@pytest.mark.parametrize("act", ["none", "keep", *(pytest.param(x, marks=pytest.mark.slow) for x in MEASURED if len(x) > 4)])
def test_nothing_that_is_made_grows_with_the_prompt(name: str, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio, shape = growth(name, MEASURED[act], 16, monkeypatch)
    assert ratio <= 1.25, shape


def test_in_one_piece_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    assert growth("llama", nw.NONE, 1 << 20, monkeypatch)[0] > 3


def test_a_prompt_costs_its_cache_and_one_chunk() -> None:
    costs = cases.subject("jamba").engine.budget.costs
    assert costs.chunk == hooked_model.CHUNK_TOKENS
    more = costs.prompt(3 * costs.chunk) - costs.prompt(costs.chunk)
    assert more == 2 * costs.chunk * 2 * costs.kv_per_token
    assert costs.prompt(costs.chunk) - costs.prompt(1000) == (costs.chunk - 1000) * (
        2 * costs.kv_per_token + costs.activations_per_token
    )
    assert costs.prompt(3 * costs.chunk, one_piece=True) - costs.prompt(3 * costs.chunk) == 2 * costs.chunk * (
        costs.activations_per_token
    )
    assert cases.subject("minimax").engine.budget.costs.chunk == 0
    assert cases.subject("jamba", "stock").engine.budget.costs.chunk == 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> nw.Subject:
    """Chunks of 16 tokens, which may become as small as 4."""
    monkeypatch.setattr(budget, "LEAST_CHUNK", 4)
    monkeypatch.setattr(hooked_model, "CHUNK_TOKENS", 16)
    return nw.Subject(cases.subject("llama").body)


def test_a_limit_makes_chunks_smaller_before_it_refuses(small: nw.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, request = small.engine.budget.costs, Request(LONG, max_new_tokens=1)
    item = prepare(request, small.anatomy)
    enough = costs.batch([item])
    assert costs.within(enough, [item]).chunk == 16
    assert costs.within(enough - 1, [item]).chunk == 8
    least = costs.within(enough - 10 * costs.activations_per_token, [item])
    assert least.chunk == 4
    with pytest.raises(nw.NeedleworkError, match="is too little"):
        costs.within(least.batch([item]) - 1, [item])
    limited = nw.Subject(small.body, memory_bytes=least.batch([item]))
    forwards = Forwards(limited, monkeypatch)
    assert answers(limited, [request])[0].tokens == answers(small, [request])[0].tokens
    assert forwards.tokens[:2] == [3, 4]
    assert 15 in forwards.tokens


def test_out_of_memory_with_one_prompt_makes_chunks_smaller(small: nw.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = small.generate([LONG], max_new_tokens=2)[0]
    choice = small.choices([LONG], [[[5], [6, 7]]])[0]
    forward, tried = hooked_model.HookedModel._forward, []

    def scarce(self: hooked_model.HookedModel, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tried.append(ids.shape[1])
        if ids.shape[1] > 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(hooked_model.HookedModel, "_forward", scarce)
    assert_equal(small.generate([LONG], max_new_tokens=2)[0], expected, 1e-5, "generate")
    assert [max(tried[:1]), max(tried[1:2])] == [15, 7]
    assert_equal(small.choices([LONG], [[[5], [6, 7]]])[0], choice, 1e-5, "choices")

    def empty(self: hooked_model.HookedModel, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(hooked_model.HookedModel, "_forward", empty)
    with pytest.raises(MemoryError, match="does not fit"):
        small.generate([LONG], max_new_tokens=2)
