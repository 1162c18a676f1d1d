"""The seams in transformers: continued prefill, training, and no trace afterwards."""

from __future__ import annotations

import copy
import importlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from needlework.model import families
from needlework.model.families import FAMILIES, family, fast_kernels
from tiny import ARCHITECTURES, build

SPLITS = [(21,), (12, 9), (1, 20), (5, 2, 14), (20, 1), (3, 3, 15)]
MENDED = {"recurrent_gemma", "jamba", "zamba", "mamba", "falcon_mamba"}
QUICK = {"llama", "bamba", "lfm2", "qwen3_next", "minimax", *MENDED}  # of the table of families; the others are slow


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(seed))


def new_cache(model: Any) -> Any:
    """A cache that knows RecurrentGemma's layers, so that its length is right."""
    config = copy.copy(model.config)
    if config.model_type == "recurrent_gemma" and getattr(config, "layer_types", None) is None:  # before transformers 5.23
        kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
        config.layer_types = [kinds[kind] for kind in config.layers_block_type]
    if config.model_type == "minimax":
        return importlib.import_module("transformers.models.minimax.modeling_minimax").MiniMaxCache()
    return DynamicCache(config=config)


def feed(model: Any, ids: Tensor, cache: Any, start: int) -> Tensor:
    positions = torch.arange(start, start + ids.shape[1]).expand(ids.shape[0], -1)
    options: dict[str, Any] = {"position_ids": positions}
    if "mamba" in model.config.model_type:
        options = {"cache_params": cache}
    else:
        options["past_key_values"] = cache
    logits: Tensor = model(ids, use_cache=True, **options).logits
    return logits


def fed(model: Any, ids: Tensor, *split: int, cache: Any = None) -> Tensor:
    """Logits of all tokens, fed in chunks."""
    cache, out, at = new_cache(model) if cache is None else cache, [], 0
    for size in split:
        out.append(feed(model, ids[:, at : at + size], cache, at))
        at += size
    assert at == ids.shape[1]
    return torch.cat(out, 1)


def whole(model: Any, ids: Tensor) -> Tensor:
    """Stock, one shot, no cache."""
    logits: Tensor = model(ids, use_cache=False).logits
    return logits


def in_fp64(model: Any) -> Any:
    twin = copy.deepcopy(model).double()
    twin.config._experts_implementation = "eager"  # the grouped matmul of experts has no fp64
    return twin


@torch.no_grad()
def assert_same(model: Any, ids: Tensor, found: Tensor) -> None:
    """`found` equals stock's logits in one shot within 1e-5, or as well as stock's own rounding allows.

    These weights amplify rounding: some models are themselves 2e-5 away from what they compute in fp64. A chunk that
    loses its state is off by about 1.
    """
    stock = whole(model, ids)
    rounding = float((stock - whole(in_fp64(model), ids)).abs().max())
    worst = float((found - stock).abs().max())
    assert worst <= max(1e-5, 4 * rounding), f"off by {worst:.1e}, stock's own rounding is {rounding:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "+".join(map(str, split)))
@pytest.mark.parametrize("name", sorted(MENDED))
@torch.no_grad()
def test_a_prefill_in_chunks_is_the_prefill_in_one_shot(name: str, split: tuple[int, ...]) -> None:
    """RecurrentGemma's window is 8 here, so most chunks end or start beyond it."""
    model, ids = build(name), tokens(2, 21)
    with fast_kernels(model):
        found = fed(model, ids, *split)
    assert_same(model, ids, found)


@pytest.mark.parametrize("name", sorted(MENDED))
@torch.no_grad()
def test_decoding_goes_on_from_a_chunked_prefill(name: str) -> None:
    model, ids = build(name), tokens(3, 30)
    with fast_kernels(model):
        found = fed(model, ids, 7, 13, *[1] * 6, 4)
    assert_same(model, ids, found)


@pytest.mark.parametrize("name", sorted(MENDED))
@torch.no_grad()
def test_stock_code_can_take_over_the_memory_and_give_it_back(name: str) -> None:
    """The state stays where stock code keeps it, in the form it has there."""
    model, ids = build(name), tokens(2, 24)
    cache = new_cache(model)
    with fast_kernels(model):
        first = torch.cat([feed(model, ids[:, :6], cache, 0), feed(model, ids[:, 6:11], cache, 6)], 1)
    second = torch.cat([feed(model, ids[:, i : i + 1], cache, i) for i in range(11, 14)], 1)
    with fast_kernels(model):
        third = feed(model, ids[:, 14:], cache, 14)
    assert_same(model, ids, torch.cat([first, second, third], 1))


@torch.no_grad()
def test_recurrent_gemma_keeps_the_state_that_stock_keeps() -> None:
    model, ids = build("recurrent_gemma"), tokens(2, 9)

    def states() -> list[Tensor]:
        blocks = [layer.temporal_block for layer in model.model.layers if hasattr(layer.temporal_block, "rg_lru")]
        return [state for block in blocks for state in (block.conv1d_state, block.rg_lru.recurrent_states)]

    fed(model, ids, 9)
    stock = states()
    with fast_kernels(model):
        fed(model, ids, 4, 5)
    for found, expected in zip(states(), stock, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("first_chunk", [1, 2, 10])
@torch.no_grad()
def test_recurrent_gemma_forgets_the_last_prompt_at_position_0(first_chunk: int) -> None:
    model, ids = build("recurrent_gemma"), tokens(2, 20)
    with fast_kernels(model):
        fed(model, tokens(2, 15, seed=9), 15)
        found = fed(model, ids, first_chunk, 20 - first_chunk)
    assert_same(model, ids, found)


@torch.no_grad()
def test_recurrent_gemma_rows_may_start_at_different_times() -> None:
    """One row goes on while the other starts anew, in the same chunk of the first layer."""
    model, old, new = build("recurrent_gemma"), tokens(1, 12), tokens(1, 6, seed=2)
    block = model.model.layers[0].temporal_block
    with fast_kernels(model):
        fed(model, old[:, :6].repeat(2, 1), 6)
        positions = torch.stack([torch.arange(6, 12), torch.arange(6)])
        model(torch.cat([old[:, 6:], new]), position_ids=positions, use_cache=True, past_key_values=new_cache(model))
        mixed = [block.conv1d_state, block.rg_lru.recurrent_states]
        alone = []
        for ids in (old, new):
            fed(model, ids, ids.shape[1])
            alone.append([block.conv1d_state, block.rg_lru.recurrent_states])
    for i, state in enumerate(mixed):
        assert torch.allclose(state, torch.cat([states[i] for states in alone]), atol=1e-6)


@torch.no_grad()
def test_recurrent_gemma_without_a_cache_keeps_no_state() -> None:
    model, ids = build("recurrent_gemma"), tokens(2, 14)
    with fast_kernels(model):
        fed(model, tokens(2, 5, seed=3), 5)
        found = whole(model, ids)
    for layer in model.model.layers:
        if hasattr(layer.temporal_block, "rg_lru"):
            assert layer.temporal_block.conv1d_state is None
            assert layer.temporal_block.rg_lru.recurrent_states is None
    assert_same(model, ids, found)


@pytest.mark.parametrize("name", ["jamba", "zamba"])
@torch.no_grad()
def test_left_padding_is_as_stock_has_it(name: str) -> None:
    model, ids = build(name), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    with fast_kernels(model):
        found = model(ids, attention_mask=mask, use_cache=False).logits
    assert torch.allclose(found[mask.bool()], expected[mask.bool()], atol=5e-5)


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = whole(model, ids)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", sorted(MENDED))
def test_gradients_of_training_are_those_of_stock(name: str) -> None:
    """Up to 2e-5 of the largest entry (fp32 rounding differs between CPUs), or to what stock's own rounding allows."""
    model, ids = build(name).train(), tokens(2, 18)
    exact, expected = gradients(in_fp64(model), ids), gradients(model, ids)
    with fast_kernels(model):
        found = gradients(model, ids)
    assert found.keys() == expected.keys()
    for parameter, grad in expected.items():
        rounding = float((grad - exact[parameter]).abs().max())
        worst = float((found[parameter] - grad).abs().max())
        assert worst <= max(2e-5 * float(grad.abs().max()), 4 * rounding), parameter


@pytest.mark.parametrize("name", sorted(MENDED))
@torch.no_grad()
def test_bf16_is_as_close_as_bf16_gets(name: str) -> None:
    model, ids = build(name), tokens(2, 20)
    exact = whole(model, ids)
    half = model.bfloat16()
    stock = whole(half, ids)
    with fast_kernels(half):
        found = fed(half, ids, 12, 8)
    assert found.dtype == stock.dtype
    error = (found.float() - exact).abs().mean()
    assert float(error) <= 1.5 * float((stock.float() - exact).abs().mean())


def test_packed_sequences_are_refused_as_stock_refuses_them() -> None:
    model = build("mamba")
    modeling = importlib.import_module("transformers.models.mamba.modeling_mamba")
    with fast_kernels(model), pytest.raises(ValueError, match="packed sequences"):
        modeling.causal_conv1d_fn(torch.zeros(1, 4, 5), torch.zeros(4, 4), seq_idx=torch.zeros(1, 5, dtype=torch.int32))


# --- no trace ---------------------------------------------------------------------------------------------------------


def code(name: str) -> dict[str, Any]:
    """Everything in the modeling code that a replacement could touch."""
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    found = dict(vars(modeling))
    for key, value in list(found.items()):
        if isinstance(value, type) and issubclass(value, nn.Module):
            found |= {f"{key}.{attribute}": held for attribute, held in vars(value).items()}
    return found


def assert_same_code(name: str, before: dict[str, Any]) -> None:
    after = code(name)
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key]] == []


@pytest.mark.parametrize("name", sorted(MENDED))
def test_nothing_is_left_replaced(name: str) -> None:
    model, before = build(name), code(name)
    with fast_kernels(model):
        changed = [key for key, value in code(name).items() if before.get(key) is not value]
        assert changed, "nothing was replaced at all"
    assert_same_code(name, before)
    with pytest.raises(RuntimeError, match="in the middle"), fast_kernels(model):
        raise RuntimeError("in the middle")
    assert_same_code(name, before)


@pytest.mark.parametrize("name", ["recurrent_gemma", "jamba"])
@torch.no_grad()
def test_scopes_nest(name: str) -> None:
    model, ids, before = build(name), tokens(1, 12), code(name)
    with fast_kernels(model):
        replaced = code(name)
        with fast_kernels(build(name)):
            assert_same_code(name, replaced)
        assert_same_code(name, replaced)
        found = fed(model, ids, 5, 7)
    assert_same_code(name, before)
    assert_same(model, ids, found)


def test_scopes_of_two_threads_may_overlap() -> None:
    model, before = build("jamba"), code("jamba")
    opened, close = threading.Event(), threading.Event()

    def other() -> None:
        with fast_kernels(model):
            opened.set()
            close.wait(10)

    thread = threading.Thread(target=other)
    with fast_kernels(model):
        thread.start()
        assert opened.wait(10)
        replaced = code("jamba")
    assert_same_code("jamba", replaced)  # the other thread still needs it
    close.set()
    thread.join()
    assert_same_code("jamba", before)


def test_a_replacement_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = build("jamba"), code("jamba")
    modeling = importlib.import_module("transformers.models.jamba.modeling_jamba")
    broken = [(modeling, "mamba_selective_scan", None), (modeling, "no_such_function", None)]
    monkeypatch.setattr(families, "_replacements", lambda model_type: broken)
    with pytest.raises(KeyError, match="no_such_function"), fast_kernels(model):
        pass
    monkeypatch.undo()
    assert_same_code("jamba", before)
    with fast_kernels(model):
        assert modeling.mamba_selective_scan is not before["mamba_selective_scan"]
    assert_same_code("jamba", before)


@torch.no_grad()
def test_other_families_run_as_they_are() -> None:
    model, ids, before = build("llama"), tokens(1, 8), code("llama")
    expected = whole(model, ids)
    with fast_kernels(model):
        assert_same_code("llama", before)
        assert torch.equal(whole(model, ids), expected)


# --- which families continue a prefill --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES])
@torch.no_grad()
def test_the_table_says_what_stock_code_does(name: str) -> None:
    """Where the table says yes, chunks equal one shot; where it says no, they do not, so no speed is given away."""
    model, ids = build(name), tokens(2, 21)
    expected = whole(model, ids)
    try:
        equal = float((fed(model, ids, 12, 9) - expected).abs().max()) <= 1e-3  # a lost state: 0.3 and more
    except (RuntimeError, IndexError, ValueError):
        equal = False
    facts = family(model.config.model_type)
    assert facts.continues_prefill(fast=False) == equal
    assert facts.continues_prefill(fast=True) == (equal or name in MENDED)


def test_unknown_families_are_fed_token_by_token() -> None:
    assert not family("no_such_family").continues_prefill(fast=True)
    assert not family("no_such_family").continues_prefill(fast=False)
    assert {name for name, facts in FAMILIES.items() if facts.mended_mixer} == MENDED


@pytest.mark.parametrize("names", ["before 5.23", "since 5.23"])
def test_recurrent_gemma_has_its_cache_whatever_its_layers_are_called(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import RecurrentGemmaConfig

    kinds = {"before 5.23": ("recurrent", "attention"), "since 5.23": ("linear_attention", "sliding_attention")}[names]
    called = property(lambda config: [kinds[0], kinds[0], kinds[1]] * 2)
    windows = {"sliding_window": "attention_window_size"}
    mapped = windows if names == "before 5.23" else {**windows, "layer_types": "layers_block_type"}
    monkeypatch.setattr(RecurrentGemmaConfig, "layers_block_type", called)
    monkeypatch.setattr(RecurrentGemmaConfig, "attribute_map", mapped)
    cache = family("recurrent_gemma").make_cache(RecurrentGemmaConfig(num_hidden_layers=6, attention_window_size=8))
    kept = ["LinearAttentionLayer", "LinearAttentionLayer", "DynamicSlidingWindowLayer"]
    assert [type(layer).__name__ for layer in cache.layers] == kept * 2
    assert cache.layers[2].sliding_window == 8
