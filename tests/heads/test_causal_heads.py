"""Leaving out, adding in and patching, each against the naive loop: a stock model, one hook, one head, one sample at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from stock_heads import Spy, Stock, samples, score, stock
from torch import Tensor

import cases
import needlework as nw
from needlework.tasks.base import Item

FAMILIES = ["jamba", "recurrent_gemma", "qwen3_next"]  # grouped heads, an output bias, an output gate


def _near(name: str) -> float:
    """Of a log-likelihood of three tokens: the engine reads prompt and answer one after the other."""
    return max(1e-4, 6 * cases.between_routes(name) if cases.between_routes(name) > 1e-4 else 0)


def _log_p(model: Stock, item: Item, gates: dict[tuple[int, int], float]) -> float:
    with model.scaled(gates):
        return model.log_p(item.prompt, item.options[0])


@pytest.mark.slow
@cases.each(cases.WITH_HEADS)
def test_leaving_one_out_is_the_naive_loop(name: str) -> None:
    found, model = score("leave_one_out", name).each, stock(name)
    for i, item in enumerate(samples(name)):
        whole = _log_p(model, item, {})
        expected = [whole - _log_p(model, item, {(layer, head): 0.0}) for layer, head in model.anatomy.heads]
        assert np.abs(found[i] - expected).max() < _near(name)
        assert np.abs(expected).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_adding_one_in_is_the_naive_loop(name: str) -> None:
    found, model = score("add_one_in", name).each, stock(name)
    off = {tuple(head): 0.0 for head in model.anatomy.heads}
    for i, item in enumerate(samples(name)):
        nothing = _log_p(model, item, off)  # type: ignore[arg-type]
        expected = [_log_p(model, item, {**off, tuple(h): 1.0}) - nothing for h in model.anatomy.heads]  # type: ignore[dict-item]
        assert np.abs(found[i] - expected).max() < _near(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_in_decode_a_head_is_heard_until_the_answer_begins(name: str) -> None:
    """The stock forward again, but the hook spares every token before the last one of the prompt."""
    found, model = score("leave_one_out_decode", name).each, stock(name)
    for i, item in enumerate(samples(name)):
        whole, expected = model.log_p(item.prompt, item.options[0], Spy()), []
        for layer, head in model.anatomy.heads:

            def silence(said: Tensor, head: int = head, first: int = len(item.prompt) - 1) -> Tensor:
                said = said.clone()
                said[head, first:] = 0.0
                return said

            expected.append(whole - model.log_p(item.prompt, item.options[0], Spy(changes={model.modules[layer]: silence})))
        assert np.abs(found[i] - expected).max() < _near(name)
    assert np.abs(found - score("leave_one_out", name).each).max() > 0.01  # the phases differ


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_patching_is_the_naive_loop(name: str) -> None:
    """What one head said to the prompt is put into the forward of its twin, before the model's own gate and projection."""
    scores, model = score("patching", name), stock(name)
    used = [samples(name)[i] for i in scores.evidence["used"]]
    for found, item in zip(scores.each, used, strict=True):
        (answer,) = item.options
        clean = Spy()
        right = model.log_p(item.prompt, answer, clean)
        without = model.log_p(item.twins["twin"], answer, Spy())
        expected = []
        for layer, head in model.anatomy.heads:
            module = model.modules[layer]

            def patch(said: Tensor, head: int = head, lent: Tensor = clean.calls[module].said) -> Tensor:
                said = said.clone()
                said[head] = lent[head]
                return said

            patched = model.log_p(item.twins["twin"], answer, Spy(changes={module: patch}))
            expected.append((patched - without) / (right - without))
        assert np.abs(found - expected).max() < _near(name) / abs(right - without) * 3
        assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize("method", ["leave_one_out", "leave_one_out_decode"])
def test_only_samples_that_are_answered_right_are_looked_at(method: str) -> None:
    good, other = samples("jamba")
    wrong = replace(other, options=(tuple((token + 1) % 100 for token in other.options[0]),))
    scores = score(method, "jamba", [wrong, good])
    assert {"given": 2, "used": [1]}.items() <= scores.evidence.items()
    assert len(scores.each) == 1
    assert scores.each[0] == pytest.approx(score(method, "jamba", [good]).each[0], abs=1e-5)
    with pytest.raises(nw.NeedleworkError, match="answers none of the 1 samples right"):
        score(method, "jamba", [wrong])


def test_patching_needs_twins() -> None:
    lone = replace(samples("jamba")[0], twins={})
    with pytest.raises(nw.NeedleworkError, match="twin"):
        score("patching", "jamba", [lone])


def test_all_heads_share_one_reading_in_decode() -> None:
    """Whatever is done while the answer is given, the prompt is read once for all heads."""
    subject = cases.subject("jamba")
    score("leave_one_out_decode", "jamba")
    assert subject.engine.prefiller.tokens_requested == sum(len(item.prompt) - 1 for item in samples("jamba"))
