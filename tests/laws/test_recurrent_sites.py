"""Convolution and state cut apart, against the stock model read token by token with one of the two emptied by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
import needlework as nw
from needlework.model import mixers

IDS = cases.tokens(2, 11, seed=7)
CONV, STATE = nw.AblateRecurrent(site="conv"), nw.AblateRecurrent(site="state")
CUTS = {"conv": CONV, "state": STATE}
WITH_BOTH = tuple(name for name in cases.WITH_MIXER if name not in (*cases.NO_CONVOLUTION, *cases.NO_STATE))


def _emptied(subject: nw.Subject, cache: Any, site: str, layers: set[int]) -> None:
    """Zero one kind of memory of these layers, wherever the stock model keeps it."""
    for layer, part in subject.anatomy.recurrent_parts():
        module: Any = subject.model.get_submodule(part.path)
        if layer not in layers:
            continue
        if part.mixer == "RecurrentGemmaRecurrentBlock":
            if module.conv1d_state is None:
                module.conv1d_state = torch.zeros(IDS.shape[0], 32, 3)
                module.rg_lru.recurrent_states = torch.zeros(IDS.shape[0], 32)
            (module.conv1d_state if site == "conv" else module.rg_lru.recurrent_states).zero_()
        else:
            states = cache.layers[layer].conv_states if site == "conv" else cache.layers[layer].recurrent_states
            for state in states.values():
                if state is not None:
                    state.zero_()


def _by_hand(subject: nw.Subject, site: str, when: Callable[[int], bool], layers: set[int] | None = None) -> Tensor:
    """Stock code alone: one token at a time, and before the tokens that `when` names one kind of memory is emptied."""
    model, anatomy = subject.model, subject.anatomy
    cache = subject.body.family.make_cache(model.config)
    name = "cache_params" if anatomy.model_type in ("mamba", "mamba2", "falcon_mamba") else "past_key_values"
    rows = []
    every = {layer for layer, _ in anatomy.recurrent_parts()}
    try:
        for t in range(IDS.shape[1]):
            if when(t):
                _emptied(subject, cache, site, every if layers is None else layers)
            with torch.no_grad():
                here = {"position_ids": torch.full((IDS.shape[0], 1), t)} if name == "past_key_values" else {}
                rows.append(model(input_ids=IDS[:, t : t + 1], use_cache=True, **{name: cache}, **here).logits)
    finally:
        for module in model.modules():
            if hasattr(module, "conv1d_state"):
                module.conv1d_state = module.rg_lru.recurrent_states = None
    return torch.cat(rows, 1)


@pytest.mark.parametrize("site", CUTS)
@cases.each(WITH_BOTH)
def test_a_cut_is_a_stock_model_whose_window_or_state_is_emptied_before_every_token(name: str, site: str) -> None:
    subject = cases.subject(name)
    cut = subject.logits(IDS, CUTS[site])
    assert cases.apart(cut, _by_hand(subject, site, lambda t: True)) < cases.between_routes(name)
    assert cases.apart(cut, subject.logits(IDS)) > 1e-2


@pytest.mark.parametrize("site", CUTS)
@cases.each(("jamba", "recurrent_gemma", "mamba2"))
def test_one_layer_is_cut_and_the_others_go_on(name: str, site: Any) -> None:
    subject = cases.subject(name)
    layer = subject.anatomy.recurrent_layers[1].index
    cut = subject.logits(IDS, nw.AblateRecurrent(site=site, layers=(layer,)))
    assert cases.apart(cut, _by_hand(subject, site, lambda t: True, {layer})) < 1e-4


@pytest.mark.parametrize("site", CUTS)
@cases.each(("mamba", "mamba2", "recurrent_gemma", "qwen3_next"))
def test_a_cut_in_one_phase_leaves_the_other_whole(name: str, site: Any) -> None:
    """Cut in prefill, decode begins with nothing of that kind; cut in decode, the prompt has been read as ever."""
    subject, prompt = cases.subject(name), 6
    for phase, when in (("prefill", lambda t: t < prompt), ("decode", lambda t: t >= prompt - 1)):
        cut = subject.logits(IDS, nw.AblateRecurrent(site=site, phase=phase), prompt_tokens=prompt)  # type: ignore[arg-type]
        assert cases.apart(cut, _by_hand(subject, site, when)) < cases.between_routes(name)


@cases.each(WITH_BOTH)
def test_both_cuts_together_are_a_cut_memory(name: str) -> None:
    subject = cases.subject(name)
    both = CONV + STATE
    assert nw.parse(str(both)) == both
    assert torch.equal(subject.logits(IDS, both), subject.logits(IDS, nw.AblateRecurrent()))


@cases.each((*cases.NO_CONVOLUTION, *cases.NO_STATE))
def test_the_only_kind_of_memory_is_all_of_it(name: str) -> None:
    subject = cases.subject(name)
    only = STATE if name in cases.NO_CONVOLUTION else CONV
    assert cases.apart(subject.logits(IDS, only), subject.logits(IDS, nw.AblateRecurrent())) < 1e-4


@pytest.mark.slow
@cases.each(("jamba", "recurrent_gemma", "mamba2"))
@pytest.mark.parametrize("kernels", ["fast", "stock"])
def test_rows_keep_to_themselves_on_both_kernels(name: str, kernels: str) -> None:
    """Four kinds of rows in one batch, read in prefill and decoded: each as if it were alone."""
    subject = cases.subject(name, kernels)
    some = [nw.NONE, CONV, STATE, nw.AblateRecurrent(), CONV + STATE, nw.ResetState(at=5), STATE]
    prompts = [cases.PROMPT] * (len(some) - 1) + [cases.TWIN]
    together = subject.generate(prompts, interventions=some, max_new_tokens=4)
    for prompt, act, answer in zip(prompts, some, together, strict=True):
        alone = subject.generate([prompt], act, max_new_tokens=4)[0]
        assert alone.tokens == answer.tokens
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
        assert alone.receipt == answer.receipt


@cases.each(("jamba", "recurrent_gemma", "mamba2", "kimi_linear"))
def test_a_window_reaches_over_the_pieces_that_tokens_are_read_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject(name)
    whole = subject.logits(IDS, STATE)
    monkeypatch.setattr(mixers, "_TOKENS_AT_ONCE", 4)  # two tokens of two rows
    assert cases.apart(subject.logits(IDS, STATE), whole) < 1e-5


@cases.each(("jamba", "recurrent_gemma", "qwen3_next"))
def test_receipts_count_each_kind_of_cut(name: str) -> None:
    subject = cases.subject(name)
    layers = [layer for layer, _ in subject.anatomy.recurrent_parts()]
    conv, state, both = subject.generate([cases.PROMPT] * 3, interventions=[CONV, STATE, CONV + STATE], max_new_tokens=3)
    for answer, counts in ((conv, {"convolutions_cut"}), (state, {"carries_cut"}), (both, {"convolutions_cut", "carries_cut"})):
        for what in ("states_cut", "convolutions_cut", "carries_cut"):
            for layer in layers:
                wanted = len(cases.PROMPT) - 1 + len(answer.tokens) if what in counts else 0
                assert answer.receipt.total(what, layer=layer) == wanted


def test_cuts_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(nw.NeedleworkError, match="meet in one phase"):
        _ = CONV + nw.AblateRecurrent()
    with pytest.raises(nw.NeedleworkError, match="meet in one phase"):
        _ = CONV + CONV


def test_a_failure_in_the_middle_leaves_the_convolution_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("jamba")
    mixer: Any = subject.model.get_submodule("model.layers.0.mamba")
    weight, kept = mixer.conv1d.weight, mixer.conv1d.weight.clone()
    stock, calls = type(mixer).forward, []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(float(self.conv1d.weight[..., :-1].abs().max()))
        if calls[-1] == 0.0:
            raise RuntimeError("in the middle")
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(type(mixer), "forward", failing)
    with pytest.raises(RuntimeError, match="in the middle"):
        subject.logits(IDS, CONV)
    assert mixer.conv1d.weight is weight
    assert torch.equal(weight, kept)
