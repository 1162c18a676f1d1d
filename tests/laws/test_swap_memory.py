"""Two halves of one memory: swapped apart and together, forked, shared, joined."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import pytest
import torch

import cases
import needlework as nw
from needlework.interventions.acts import Half
from needlework.model.memory import Memory
from needlework.model.probe import run_model
from needlework.receipts import Tally, nothing_to_hide
from needlework.requests import Answer

KV, RECURRENT = nw.SwapMemory(half="kv"), nw.SwapMemory(half="recurrent")
TWINS = [{"twin": cases.TWIN}]


def _ask(subject: nw.Subject, intervention: nw.Intervention, prompt: tuple[int, ...] = cases.PROMPT) -> Answer:
    return subject.generate([prompt], intervention, twins=TWINS, max_new_tokens=5)[0]


@cases.each(cases.ALL)
def test_a_memory_swapped_whole_answers_as_the_twin(name: str) -> None:
    """The twin has the same last token: with all of its memory, the prompt's answer is the twin's."""
    if name in ("zaya", "inkling"):
        pytest.skip("their convolution states belong to no half that could be swapped")
    subject = cases.subject(name)
    halves = [half for half, lacking in ((KV, cases.NO_HEADS), (RECURRENT, cases.NO_MIXER)) if name not in lacking]
    whole = halves[0] if len(halves) == 1 else halves[0] + halves[1]
    twin, own, swapped = _ask(subject, nw.NONE, cases.TWIN), _ask(subject, nw.NONE), _ask(subject, whole)
    assert swapped.error == ""
    assert swapped.tokens == twin.tokens
    assert swapped.logprobs == pytest.approx(twin.logprobs, abs=1e-4)
    assert set(swapped.receipt.swapped) == {half.half for half in halves}  # type: ignore[attr-defined]
    assert own.logprobs != pytest.approx(twin.logprobs, abs=1e-3)  # else swapping could not be seen


@cases.each(cases.HYBRIDS)
def test_half_a_swap_is_neither_prompt_nor_twin(name: str) -> None:
    subject = cases.subject(name)
    twin, own = _ask(subject, nw.NONE, cases.TWIN), _ask(subject, nw.NONE)
    kv, recurrent = _ask(subject, KV), _ask(subject, RECURRENT)
    for half in (kv, recurrent):
        for other in (twin, own):
            assert abs(half.logprobs[0] - other.logprobs[0]) > 1e-5 or half.tokens[0] != other.tokens[0]
    # Taking the other half of the twin's point of view gives the same mixed memory.
    back = subject.generate([cases.TWIN], RECURRENT, twins=[{"twin": cases.PROMPT}], max_new_tokens=5)[0]
    assert back.tokens == kv.tokens
    assert back.logprobs == pytest.approx(kv.logprobs, abs=1e-4)


def _layers(subject: nw.Subject, half: Half) -> list[int]:
    own = subject.anatomy.attention_layers if half == "kv" else subject.anatomy.recurrent_layers
    return [layer.index for layer in own]


@cases.each(cases.ALL)
def test_all_layers_swapped_by_name_are_the_whole_half(name: str) -> None:
    """Also in one batch with the whole half, and as two swaps of disjoint layers."""
    subject = cases.subject(name)
    for half, lacking in (("kv", cases.NO_HEADS), ("recurrent", cases.NO_MIXER)):
        if name in lacking or name in ("zaya", "inkling"):  # as above: some of their states belong to no half
            continue
        layers = _layers(subject, half)
        swaps = [nw.SwapMemory(half=half, layers=some) for some in (layers, layers[:1], layers[1:]) if some]
        acts = [nw.SwapMemory(half=half), swaps[0], functools.reduce(operator.add, swaps[1:])]
        answers = subject.generate([cases.PROMPT] * 3, interventions=acts, twins=TWINS * 3, max_new_tokens=5)
        for answer in answers[1:]:
            assert answer.error == ""
            assert answer.tokens == answers[0].tokens
            assert answer.logprobs == pytest.approx(answers[0].logprobs, abs=1e-4)
            assert {at for (at, _), count in answer.receipt.counts.items() if f"{half}_swapped" in count} == set(layers)
            assert answer.receipt.swapped == ()


@cases.each(cases.WITH_HEADS)
def test_keys_of_all_tokens_by_position_are_the_whole_half(name: str) -> None:
    """And in one batch, each row has its own tokens of the twin."""
    if name in ("zaya", "inkling"):  # as above: some of their states belong to no half
        return
    subject, read = cases.subject(name), len(cases.PROMPT) - 1
    acts = [KV, nw.SwapMemory(half="kv", at=tuple(range(read))), nw.SwapMemory(half="kv", at="needle"), nw.NONE]
    named = {"twins": TWINS * 4, "spans": [cases.SPANS] * 4}
    whole, each, needle, none = subject.generate([cases.PROMPT] * 4, interventions=acts, max_new_tokens=5, **named)
    assert (each.error, each.tokens) == ("", whole.tokens)
    assert each.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    for layer in subject.anatomy.attention_layers:
        swapped = each.receipt.total("kv_swapped", "prefill", layer.index)
        assert layer.attention is not None
        assert swapped > 0 if layer.attention.window else swapped == read * len(subject.body.cache_layers("kv", layer.index))
    alone = _ask_needle(subject)
    assert needle.tokens == alone.tokens
    assert needle.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert needle.logprobs != pytest.approx(none.logprobs, abs=1e-4)
    assert needle.receipt == alone.receipt


def _ask_needle(subject: nw.Subject) -> Answer:
    act = nw.SwapMemory(half="kv", at="needle")
    return subject.generate([cases.PROMPT], act, twins=TWINS, spans=[cases.SPANS], max_new_tokens=5)[0]


def test_tokens_that_left_the_window_are_a_note() -> None:
    prompt = (*cases.PROMPT, *cases.tokens(8).tolist())
    twin = (*cases.TWIN, *prompt[len(cases.TWIN) :])
    act = nw.SwapMemory(half="kv", at="needle", from_=twin)  # type: ignore[call-arg]
    (answer,) = cases.subject("recurrent_gemma").generate([prompt], act, max_new_tokens=2, spans=[cases.SPANS])
    assert answer.error == ""
    assert answer.receipt.total("kv_swapped") == 0
    assert nothing_to_hide(answer.receipt.to_dict())


STATES = ("conv_states", "recurrent_states")  # of a layer of transformers' cache


@torch.no_grad()
def _by_hand(model: Any, half: str, layers: list[int], tokens: slice = slice(None)) -> torch.Tensor:
    """Log-probabilities after the prompt, with some layers (and tokens) of transformers' cache taken from that of the twin."""
    name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    own, twin = (model(input_ids=torch.tensor([x[:-1]]), use_cache=True)[name] for x in (cases.PROMPT, cases.TWIN))
    for layer in layers:
        for part in ("keys", "values") if half == "kv" else STATES:
            if half == "kv":
                getattr(own.layers[layer], part)[:, :, tokens] = getattr(twin.layers[layer], part)[:, :, tokens]
            elif hasattr(twin.layers[layer], part):
                setattr(own.layers[layer], part, getattr(twin.layers[layer], part))
    places = {"position_ids": torch.tensor([[len(cases.PROMPT) - 1]])} if name != "cache_params" else {}
    out = model(input_ids=torch.tensor([cases.PROMPT[-1:]]), use_cache=True, **{name: own}, **places)
    return torch.as_tensor(out.logits[0, -1]).log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("half", ["kv", "recurrent"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "falcon_h1", "qwen3_next", "bamba", "lfm2"])
def test_a_layer_is_swapped_as_in_the_cache_of_transformers(name: str, half: Half) -> None:
    if half == "recurrent" and name in cases.NO_MIXER:
        return
    subject = cases.subject(name)
    found = []
    for layers in (_layers(subject, half)[:1], _layers(subject, half)[-1:]):
        expected = _by_hand(cases.build(name), half, layers)
        answer = _ask(subject, nw.SwapMemory(half=half, layers=layers))
        assert answer.tokens[0] == int(expected.argmax())
        assert answer.logprobs[0] == pytest.approx(float(expected.max()), abs=1e-4)
        found.append(answer.logprobs[0])
    assert len(_layers(subject, half)) == 1 or abs(found[0] - found[1]) > 1e-5  # which layer it is matters


@pytest.mark.parametrize("name", ["llama", "jamba", "falcon_h1", "qwen3_next", "bamba", "lfm2"])
def test_tokens_of_a_layer_are_swapped_as_in_the_cache_of_transformers(name: str) -> None:
    subject = cases.subject(name)
    for layer in _layers(subject, "kv"):
        expected = _by_hand(cases.build(name), "kv", [layer], slice(3, 6))
        answer = _ask(subject, nw.SwapMemory(half="kv", layers=[layer], at=(3, 4, 5)))
        assert answer.tokens[0] == int(expected.argmax())
        assert answer.logprobs[0] == pytest.approx(float(expected.max()), abs=1e-4)


def test_a_twin_by_token_ids_is_the_twin_by_name() -> None:
    subject = cases.subject("jamba")
    given = subject.generate([cases.PROMPT], nw.SwapMemory(half="kv", from_=cases.TWIN), max_new_tokens=5)[0]
    assert given.tokens == _ask(subject, KV).tokens
    assert given.logprobs == pytest.approx(_ask(subject, KV).logprobs, abs=1e-5)


def test_swaps_that_cannot_be() -> None:
    jamba = cases.subject("jamba")
    with pytest.raises(nw.NeedleworkError, match="MambaForCausalLM has no kv memory"):
        _ask(cases.subject("mamba"), KV)
    with pytest.raises(nw.NeedleworkError, match="LlamaForCausalLM has no recurrent memory"):
        _ask(cases.subject("llama"), RECURRENT)
    with pytest.raises(nw.NeedleworkError, match="no twin 'other'"):
        _ask(jamba, nw.SwapMemory(half="kv", from_="other"))
    with pytest.raises(nw.NeedleworkError, match="must be of one length"):
        _ask(jamba, nw.SwapMemory(half="kv", from_=cases.TWIN[1:]))
    with pytest.raises(nw.NeedleworkError, match="a recurrent state is one for all tokens"):
        _ask(jamba, nw.SwapMemory(half="recurrent", at="needle"))
    with pytest.raises(nw.NeedleworkError, match="no span 'nedle'"):
        _ask(jamba, nw.SwapMemory(half="kv", at="nedle"))
    with pytest.raises(nw.NeedleworkError, match=r"after 11 tokens of the prompt, before those at \[11\] are read"):
        _ask(jamba, nw.SwapMemory(half="kv", at=(11,)))
    with pytest.raises(nw.NeedleworkError, match="drop phase"):
        _ask(jamba, nw.SwapMemory(half="kv", phase="both"))
    with pytest.raises(nw.NeedleworkError, match=r"layers \[0\] of JambaForCausalLM have no kv memory; choose from \[2, 5\]"):
        _ask(jamba, nw.SwapMemory(half="kv", layers=[0, 2]))
    with pytest.raises(nw.NeedleworkError, match="two swap_memory meet"):
        nw.SwapMemory(half="kv", layers=[2]) + KV
    with pytest.raises(nw.NeedleworkError, match="memory is swapped between prefill and decode"):
        jamba.choices([cases.PROMPT], [[(5,), (6,)]], nw.SwapMemory(half="kv", from_=cases.TWIN))


def _read(subject: nw.Subject, ids: torch.Tensor) -> Memory:
    memory = subject.body.new_memory(ids.shape[0])
    with torch.no_grad(), memory.mounted():
        run_model(subject.model, ids, torch.arange(ids.shape[1]).expand(ids.shape), memory)
    memory.length = ids.shape[1]
    return memory


def _next(subject: nw.Subject, memory: Memory, ids: list[int]) -> torch.Tensor:
    rows = subject.body.compile([()] * len(ids), [0] * len(ids), "decode", torch.arange(len(ids)))
    with subject.body.session():
        return subject.body.feed(torch.tensor(ids)[:, None], memory, "decode", rows, Tally(len(ids)))


@cases.each(cases.ALL)
def test_selected_and_shared_rows_go_on_as_the_originals(name: str) -> None:
    """Rows taken in another order, some twice, each continued with a token of its own; the source stays as it was."""
    subject = cases.subject(name, "stock")
    ids, order, fed = cases.tokens(2, 10, seed=4), [1, 0, 1], [7, 8, 9]
    alone = torch.cat([_next(subject, _read(subject, ids[r : r + 1]), [t]) for r, t in zip(order, fed, strict=True)])
    source = _read(subject, ids)
    before = [slot.tensor.clone() for slot in source.slots()]
    assert cases.apart(_next(subject, source.select(torch.tensor(order)), fed), alone) < 1e-4
    if subject.body.shareable:
        shared = source.share(torch.tensor(order))
        assert shared.shared
        assert cases.apart(_next(subject, shared, fed), alone) < 1e-4
    assert all(torch.equal(x, slot.tensor) for x, slot in zip(before, source.slots(), strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "recurrent_gemma"])
def test_shared_memories_of_different_lengths_join(name: str) -> None:
    subject = cases.subject(name, "stock")
    long, short = cases.tokens(1, 12, seed=5), cases.tokens(1, 5, seed=6)
    memories = [_read(subject, ids).share(torch.tensor([0])) for ids in (long, short)]
    joined = Memory.join(memories)
    assert joined.rows == 2
    positions = torch.tensor([[12], [5]])
    rows = subject.body.compile([(), ()], [0, 0], "decode", torch.arange(2))
    with subject.body.session():
        found = subject.body.feed(torch.tensor([[7], [8]]), joined, "decode", rows, Tally(2), positions)
    alone = torch.cat([_next(subject, _read(subject, ids), [t]) for ids, t in ((long, 7), (short, 8))])
    assert cases.apart(found, alone) < 1e-4


def test_bytes_of_memory_are_those_of_the_anatomy() -> None:
    subject = cases.subject("jamba")
    memory = _read(subject, cases.tokens(3, 10))
    assert memory.nbytes("kv") == 3 * 10 * subject.anatomy.kv_bytes_per_token
    assert memory.nbytes("recurrent") == 3 * subject.anatomy.state_bytes
    assert memory.nbytes() == memory.nbytes("kv") + memory.nbytes("recurrent")
    shared = memory.share(torch.tensor([0, 0, 1, 2, 2, 2]))
    assert shared.nbytes("kv") == memory.nbytes("kv")  # six rows, the keys of three
    assert shared.nbytes("recurrent") == 2 * memory.nbytes("recurrent")
