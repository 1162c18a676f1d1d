"""Observed hidden states are those of plain forward hooks on the stock model, and the last layer's lens gives its own logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cases
import needlework as nw
from needlework.observation import HiddenState

TOKENS, SPLIT = cases.PROMPT + cases.MORE, len(cases.PROMPT)
STACKS = tuple(name for name in cases.ALL if name != "hrm_text")  # it runs its layers several times
Zeroed = tuple[tuple[int, int], ...]  # (layer, head)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


@functools.cache
def stock(name: str, tokens: tuple[int, ...], zeroed: Zeroed = ()) -> tuple[Tensor, Tensor, tuple[Tensor, ...] | None]:
    """One forward of the stock model under plain hooks that zero heads.

    Returns what enters the first layer and what each layer gives [layers + 1, tokens, ...], the logits [tokens, vocabulary], and
    `hidden_states` of transformers, if there are any.
    """
    model, anatomy = cases.build(name), cases.subject(name).anatomy
    part = next(part for layer in anatomy.layers for part in (layer.attention, layer.recurrent) if part is not None)
    at = next(layer.index for layer in anatomy.layers if part in (layer.attention, layer.recurrent))
    layers: Any = model.get_submodule(part.path.partition(f".{at}.")[0])
    found: list[Tensor] = []
    with ExitStack() as stack:
        enter = lambda m, args, named: found.append((args[0] if args else named["hidden_states"])[0])  # noqa: E731
        stack.callback(layers[0].register_forward_pre_hook(enter, with_kwargs=True).remove)
        for layer in layers:
            stack.callback(layer.register_forward_hook(lambda m, a, output: found.append(first(output)[0])).remove)
        for layer, head in zeroed:
            stack.callback(without_head(model, anatomy.attention(layer), head))
        with torch.no_grad():
            out = model(input_ids=torch.tensor([tokens]), output_hidden_states=not zeroed, use_cache=False)
    return torch.stack(found), out.logits[0].float(), out.hidden_states


def without_head(model: nn.Module, part: Any, head: int) -> Callable[[], None]:
    projection = cases.output_projection(model.get_submodule(part.path), part.query_heads * part.value_dim)

    def zero(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        heads = args[0].clone()
        heads[..., head * part.value_dim : (head + 1) * part.value_dim] = 0
        return (heads,)

    return projection.register_forward_pre_hook(zero).remove


def relative(a: Tensor, b: Tensor) -> float:
    return cases.apart(a, b) / float(b.abs().max())


def assert_stock(name: str, seen: Sequence[HiddenState], of: dict[int, tuple[Any, ...]], zeroed: Zeroed = ()) -> None:
    """Each state is that of the stock model on the tokens of its sample, whatever else is in the batch."""
    for state in seen:
        expected = stock(name, of[state.sample], zeroed)[0][:, state.position]
        for mine, theirs in zip(state.layers, expected, strict=True):
            assert relative(mine, theirs) < cases.between_routes(name)


@cases.each(STACKS)
def test_hidden_states_of_prefill_and_decode_are_those_of_plain_hooks(name: str) -> None:
    subject = cases.subject(name)
    with nw.observe(subject, hidden=True) as seen:
        subject.logits([TOKENS], prompt_tokens=SPLIT)
    assert [state.position for state in seen.hidden] == list(range(len(TOKENS)))
    assert [state.phase for state in seen.hidden] == ["prefill"] * (SPLIT - 1) + ["decode"] * (len(TOKENS) - SPLIT + 1)
    assert_stock(name, seen.hidden, {nw.sample_key(cases.PROMPT): TOKENS})
    streams, _, named = stock(name, TOKENS)
    assert named is not None
    after = name in cases.NO_HEADS  # theirs are then those after each layer; all of theirs end with the final norm
    for own, theirs in zip(streams[after:-1], named, strict=False):
        assert relative(own, theirs[0]) < 1e-5


def some_heads(name: str) -> Zeroed:
    """A head of each attention layer whose heads are the input of the output projection."""
    return tuple((layer, 1) for layer, part in cases.subject(name).anatomy.attention_parts() if not part.output_gate)


@pytest.mark.slow
@cases.each(STACKS)
@pytest.mark.parametrize("act", ["none", "heads"])
def test_the_lens_after_the_last_layer_gives_the_models_own_logits(name: str, act: str) -> None:
    """All prompts in one batch, of several lengths, in prefill and decode; heads are zeroed by plain hooks in the stock model."""
    subject, zeroed = cases.subject(name), some_heads(name) if act == "heads" else ()
    if act == "heads" and not zeroed:
        return
    intervention = nw.AblateHeads(heads=list(zeroed)) if zeroed else nw.NONE
    prompts = [cases.PROMPT, cases.TWIN, cases.PROMPT[:7]]
    targets = [5, 40, 99]
    lens = nw.logit_lens(subject, prompts, intervention, targets=targets, at="all", max_new_tokens=3)
    answers = subject.generate(prompts, intervention, max_new_tokens=3)
    assert len(lens.prompts) == sum(len(prompt) + len(answer.tokens) - 1 for prompt, answer in zip(prompts, answers, strict=True))
    for s, (i, position) in enumerate(zip(lens.prompts, lens.positions, strict=True)):
        logits = stock(name, (*prompts[i], *answers[i].tokens[:-1]), zeroed)[1][position]
        log_p = logits.log_softmax(-1)
        assert lens.log_p[s, -1] == pytest.approx(log_p[targets].numpy(), abs=10 * cases.between_routes(name))
        clear = (logits[:, None] - logits[targets]).abs().sort(0).values[1] > 10 * cases.between_routes(name)
        ranks = 1 + (logits[:, None] > logits[targets]).sum(0)
        assert (lens.rank[s, -1] == ranks.numpy())[clear.numpy()].all()
    assert np.abs(lens.log_p[:, -1] - lens.log_p[:, 0]).max() > 0.1


@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma", "granitemoehybrid", "falcon_h1", "mamba"])
def test_the_lens_after_every_layer_is_norm_unembedding_and_what_the_model_does_to_logits(name: str) -> None:
    subject, model = cases.subject(name), cases.build(name)
    lens = nw.logit_lens(subject, [cases.PROMPT], targets=[5, 40], at="last")
    inner: Any = model.get_submodule(model.base_model_prefix)
    norm = next(m for n in ("norm", "final_norm", "final_layernorm", "norm_f") if (m := getattr(inner, n, None)) is not None)
    with torch.no_grad():
        logits = model.lm_head(norm(stock(name, cases.PROMPT)[0][:, -1]))
    if name == "recurrent_gemma":
        logits = model.config.logits_soft_cap * torch.tanh(logits / model.config.logits_soft_cap)
    logits = (
        logits * {"granitemoehybrid": 1 / model.config.logits_scaling}.get(name, 1.0) if name == "granitemoehybrid" else logits
    )
    logits = logits * model.config.lm_head_multiplier if name == "falcon_h1" else logits
    assert lens.log_p[0] == pytest.approx(logits.float().log_softmax(-1)[:, [5, 40]].numpy(), abs=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "recurrent_gemma"])
def test_chunks_prefixes_and_layers_that_requests_could_share_hide_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts with one beginning, in chunks, each under two interventions that begin above the first layer."""
    monkeypatch.setattr("needlework.engine.budget._FORWARD_FLOPS", {"cpu": 0.0})  # prefixes would be shared
    monkeypatch.setattr("needlework.model.hooked_model.CHUNK_TOKENS", 8)
    subject = nw.wrap(cases.build(name))
    layer = subject.anatomy.attention_layers[-1].index
    prompts = [cases.PROMPT + cases.MORE, (*cases.PROMPT, 28, 66, 5, 20), cases.PROMPT[:7]]
    acts = ["none", f"ablate_heads([[{layer}, 1]])"]
    for act in acts:
        with nw.observe(subject, hidden=True) as seen:
            subject.generate(prompts, act, max_new_tokens=2)
        zeroed = ((layer, 1),) if act != "none" else ()
        read = {nw.sample_key(prompt): prompt for prompt in prompts}
        assert_stock(name, [state for state in seen.hidden if state.position < len(read[state.sample])], read, zeroed)
        places = {(state.sample, state.position) for state in seen.hidden}
        assert places == {(key, i) for key, prompt in read.items() for i in range(len(prompt) + 1)}
    both = [nw.Request(prompts[0], act, 1, sample=i) for i, act in enumerate(acts)]
    with nw.observe(subject, hidden=True, positions=["last", "prefill"]) as seen:
        subject.answer(both)
    for i, zeroed in enumerate(((), ((layer, 1),))):
        mine = [state for state in seen.hidden if state.sample == i]
        assert len(mine) == len(prompts[0])
        assert_stock(name, mine, {i: prompts[0]}, zeroed)


def test_the_twin_of_a_swap_is_observed_as_a_prompt_of_its_own() -> None:
    subject = cases.subject("jamba")
    with nw.observe(subject, hidden=True, patterns=True) as seen:
        subject.generate([cases.PROMPT], nw.SwapMemory(half="kv"), max_new_tokens=2, twins=[{"twin": cases.TWIN}])
    read = {nw.sample_key(prompt): prompt for prompt in (cases.PROMPT, cases.TWIN)}
    prefilled = [state for state in seen.hidden if state.phase == "prefill"]
    assert len(prefilled) == 2 * (SPLIT - 1)
    assert_stock("jamba", prefilled, read)
    assert {pattern.sample for pattern in seen.patterns} == set(read)


@cases.each(cases.WITH_MIXER)
def test_what_layers_add_is_measured_from_plain_hooks(name: str) -> None:
    subject = cases.subject(name)
    with nw.observe(subject, hidden=True) as seen:
        subject.logits([cases.PROMPT])
    streams, modules = stock(name, cases.PROMPT)[0], outputs_of_modules(name)
    size = streams.flatten(2).norm(dim=-1)
    for row in seen.layers():
        added = (streams[row.layer + 1] - streams[row.layer]).flatten(1).norm(dim=-1) / size[row.layer]
        assert (row.tokens, row.added) == (SPLIT, pytest.approx(float(added.mean()), rel=1e-3))
        for site in ("attention", "recurrent"):
            given, value = modules.get((row.layer, site)), getattr(row, site)
            assert (given is None) == (value is None)
            if given is not None:
                expected = float((given.flatten(1).norm(dim=-1) / size[row.layer]).mean())
                assert value == pytest.approx(expected, rel=cases.between_routes(name) * 100)
    assert [row.layer for row in seen.layers()] == [layer.index for layer in subject.anatomy.layers]
    assert seen.layers("decode") == []


def outputs_of_modules(name: str) -> dict[tuple[int, str], Tensor]:
    model, found = cases.build(name), dict[tuple[int, str], Tensor]()
    for layer in cases.subject(name).anatomy.layers:
        for site in ("attention", "recurrent"):
            if (part := getattr(layer, site)) is not None:

                def keep(module: nn.Module, args: Any, output: Any, at: tuple[int, str] = (layer.index, site)) -> None:
                    found[at] = first(output)[0]

                model.get_submodule(part.path).register_forward_hook(keep)
    with torch.no_grad():
        model(input_ids=torch.tensor([cases.PROMPT]), use_cache=False)
    return found


def test_a_model_whose_layers_are_no_stack_is_refused() -> None:
    subject = cases.subject("hrm_text")
    with pytest.raises(nw.NeedleworkError, match="HrmTextForCausalLM are no plain stack"), nw.observe(subject, hidden=True):
        pass
    with pytest.raises(nw.NeedleworkError, match="no plain stack"):
        nw.logit_lens(subject, [cases.PROMPT])
