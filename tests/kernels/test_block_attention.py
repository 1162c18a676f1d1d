"""Attention in which rows keep their most certain heads: the formula in plain Python, and the laws of the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import SEEDS, Threads
from torch import Tensor

from needlework.kernels.block_attention import TransposedKeyValues, attend, supports, transpose_keys_values

NEAR_TIE = 1e-5


def inputs(
    rows: int, kv_heads: int, group: int, queries: int, dim: int, far: int, near: int
) -> tuple[Tensor, TransposedKeyValues]:
    """Queries and keys; several rows read one prompt."""
    prompts = (rows + 1) // 2
    shared = transpose_keys_values(torch.randn(prompts, kv_heads, far, dim), torch.randn(prompts, kv_heads, far, dim + 4))
    own = transpose_keys_values(torch.randn(rows, kv_heads, near, dim), torch.randn(rows, kv_heads, near, dim + 4))
    prompt = torch.randint(prompts, (rows,))
    return torch.randn(rows, kv_heads * group, queries, dim), TransposedKeyValues(*shared, prompt, *own)


def formula(query: list[float], keys: list[list[float]], values: list[list[float]], seen: list[bool], counted: list[bool]):  # type: ignore[no-untyped-def]
    """One head of one query in double precision: what it says, and minus its entropy over the keys that count."""
    products = [math.fsum(q * k for q, k in zip(query, key, strict=True)) for key in keys]

    def softmax(which: list[bool]) -> list[float]:
        top = max(s for s, on in zip(products, which, strict=True) if on)
        weights = [math.exp(s - top) if on else 0.0 for s, on in zip(products, which, strict=True)]
        return [w / math.fsum(weights) for w in weights]

    said = [0.0] * len(values[0])
    if any(seen):
        p = softmax(seen)
        said = [math.fsum(w * value[d] for w, value in zip(p, values, strict=True)) for d in range(len(said))]
    both = [a and b for a, b in zip(seen, counted, strict=True)]
    return said, math.fsum(w * math.log(w) for w in softmax(both) if w > 0) if any(both) else 0.0


@settings(max_examples=60, deadline=None)
@given(st.data(), SEEDS, st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 2, 3, 4, 5]), st.integers(1, 6))
def test_equals_the_formula(data: st.DataObject, seed: int, rows: int, kv_heads: int, group: int, queries: int) -> None:
    torch.manual_seed(seed)
    far, near = data.draw(st.sampled_from([(0, 3), (17, 0), (9, 5), (40, 1), (1, 0)]))
    query, lines = inputs(rows, kv_heads, group, queries, data.draw(st.sampled_from([4, 8, 12])), far, near)
    heads, keys = kv_heads * group, far + near
    holes = data.draw(st.sampled_from(["none", "causal", "any", "one mask for all"]))
    visible = {
        "none": None,
        "causal": (torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries).expand(rows, -1, -1),
        "any": torch.rand(rows, queries, keys) < 0.5,
        "one mask for all": torch.rand(1, queries, keys) < 0.3,
    }[holes]
    left_out = torch.rand(rows, keys) < 0.4 if data.draw(st.booleans()) else None
    keep = torch.randint(heads + 1, (rows,)) if data.draw(st.booleans()) else None
    zeroed_heads = torch.rand(rows, heads) < 0.3 if data.draw(st.booleans()) else None
    out, off, negative_entropy = attend(query, lines, visible, keep, left_out, zeroed_heads)
    for r in range(rows):
        prompt, k = int(lines.prompt[r]), heads if keep is None else int(keep[r])
        all_keys = torch.cat([lines.far_keys[prompt], lines.near_keys[r]], 2).transpose(1, 2).tolist()
        all_values = torch.cat([lines.far_values[prompt], lines.near_values[r]], 2).transpose(1, 2).tolist()
        for t in range(queries):
            seen = [True] * keys if visible is None else visible[min(r, len(visible) - 1), t].tolist()
            counted = [True] * keys if left_out is None else (~left_out[r]).tolist()
            told = [
                formula(query[r, h, t].tolist(), all_keys[h // group], all_values[h // group], seen, counted)
                for h in range(heads)
            ]
            order = sorted(range(heads), key=lambda h: -told[h][1])
            if k:
                assert torch.allclose(negative_entropy[r, t], torch.tensor([c for _, c in told]), atol=1e-5)
            if 0 < k < heads and told[order[k - 1]][1] - told[order[k]][1] < NEAR_TIE:
                continue  # which of the two is kept is a matter of rounding, and of the tests below
            gone = {h for h in range(heads) if h not in order[:k] or (zeroed_heads is not None and zeroed_heads[r, h])}
            assert off[r, t].tolist() == [h in gone for h in range(heads)]
            right = torch.tensor([[0.0] * out.shape[3] if h in gone else said for h, (said, _) in enumerate(told)])
            assert torch.allclose(out[r, t], right, atol=2e-5)


@pytest.mark.parametrize("group", [1, 4, 6])
@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_ties_go_to_the_lower_head(group: int, k: int) -> None:
    """Heads that ask the same, and a token that sees one key alone: entropies are equal to the last bit."""
    query, lines = inputs(2, 6 // group if group != 4 else 1, group, 5, 8, 33, 0)
    heads = query.shape[1]
    same = query[:, :1].expand_as(query).contiguous()
    alike = TransposedKeyValues(*(x if x.dim() == 1 else x[:, :1].expand_as(x).contiguous() for x in lines))
    for asked, read, visible in ((same, alike, None), (query, lines, torch.arange(33).expand(1, 5, 33) == 7)):
        _, off, negative_entropy = attend(asked, read, visible, torch.full((2,), k))
        assert torch.equal(negative_entropy, negative_entropy[..., :1].expand_as(negative_entropy))
        assert torch.equal(off, (torch.arange(heads) >= k).expand_as(off))


def test_a_row_does_not_depend_on_its_batch_nor_on_threads(threads: Threads) -> None:
    query, lines = inputs(5, 2, 3, 7, 16, 70, 9)
    visible, keep = torch.rand(5, 7, 79) < 0.7, torch.arange(5)
    threads(1)
    alone = []
    for i in range(5):
        own = TransposedKeyValues(
            lines.far_keys, lines.far_values, lines.prompt[i : i + 1], lines.near_keys[i : i + 1], lines.near_values[i : i + 1]
        )
        alone.append(attend(query[i : i + 1], own, visible[i : i + 1], keep[i : i + 1]))
    for count in (1, 2, 3):
        threads(count)
        for whole, parts in zip(attend(query, lines, visible, keep), zip(*alone, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(parts))


def test_what_is_hidden_has_no_effect_at_all() -> None:
    """Not even a key that is not a number, or a value without measure."""
    query, lines = inputs(2, 1, 4, 3, 8, 20, 4)
    visible = torch.rand(2, 3, 24) < 0.6
    visible[:, :, [5, 22]] = False
    before = attend(query, lines, visible, torch.tensor([2, 3]))
    lines.far_keys[..., 5], lines.near_keys[..., 2] = math.nan, math.inf
    lines.far_values[..., 5], lines.near_values[..., 2] = 1e38, -1e38
    for ours, theirs in zip(before, attend(query, lines, visible, torch.tensor([2, 3])), strict=True):
        assert torch.equal(ours, theirs)


def test_nan_is_not_hidden_and_ranked_as_torch_ranks_it() -> None:
    query, lines = inputs(2, 2, 2, 2, 8, 20, 0)
    query[0, 3] = math.nan
    out, off, negative_entropy = attend(query, lines, None, torch.tensor([2, 2]))
    order = negative_entropy.argsort(dim=-1, descending=True, stable=True)
    assert order[0, :, 0].tolist() == [3, 3]
    assert torch.equal(off.logical_not().nonzero()[:, 2].view(2, 2, 2), order[..., :2].sort(-1).values)
    assert bool(out[0, :, 3].isnan().all())
    assert bool(out[1].isfinite().all())


def test_very_sharp_and_very_flat_attention() -> None:
    """Scores of thousands, and keys that are all alike."""
    query, lines = torch.zeros(1, 4, 1, 4), inputs(1, 1, 4, 1, 4, 50, 0)[1]
    query[0, 1], query[0, 2], query[0, 3] = 1.0, 300.0, -4000.0
    out, _, negative_entropy = attend(query, lines)
    scores = query[0, :, 0].double() @ lines.far_keys[0, 0].double()
    p = scores.softmax(-1)
    assert torch.allclose(out[0, 0].double(), p @ lines.far_values[0, 0].double().T, atol=1e-5)
    assert torch.allclose(negative_entropy[0, 0].double(), torch.special.xlogy(p, p).sum(-1), atol=1e-5)
    assert float(negative_entropy[0, 0, 0]) == pytest.approx(-math.log(50))


def test_what_the_kernel_does_not_cover() -> None:
    query = torch.randn(1, 2, 3, 8)
    assert supports(query, 16)
    assert not supports(query, 6)
    assert not supports(query[..., :6], 8)
    assert not supports(query.bfloat16(), 8)
    assert not supports(query.to("meta"), 8)
    assert not supports(query.requires_grad_(), 8)


def test_wrong_arguments_are_refused_before_the_kernel() -> None:
    query, lines = inputs(2, 1, 4, 3, 8, 10, 2)
    for wrong in ({"visible": torch.ones(2, 3, 11, dtype=torch.bool)}, {"visible": torch.ones(3, 3, 12, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="visible has shape"):
            attend(query, lines, **wrong)
    with pytest.raises(ValueError, match="left_out has shape"):
        attend(query, lines, left_out=torch.ones(2, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match="keep has shape"):
        attend(query, lines, keep=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="zeroed_heads has shape"):
        attend(query, lines, zeroed_heads=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="near_keys has shape"):
        attend(query[:1], lines._replace(prompt=lines.prompt[:1]))
