"""Logits and receipts equal what an independent brute-force reference computes and counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import brute_force
import cases
import needlework as nw
from needlework.anatomy import Anatomy
from needlework.requests import Request, sample_key

NEEDLE = (3, 4, 5)
SOME: dict[str, nw.Intervention] = {
    **{f"keep {k} by {by}": nw.KeepHeads(k=k, by=by) for by in ("entropy", "l2", "norm", "random") for k in (1, 3)},
    "keep a fraction at random": nw.KeepHeads(fraction=0.5, by="random", seed=7, phase="prefill"),
    "keep in decode": nw.KeepHeads(k=1, phase="decode"),
    **{f"keep by {by} without {n} sinks": nw.KeepHeads(k=2, by=by, sinks=n) for by in ("entropy", "l2") for n in (1, 3)},
    "sinks in sight of a limit": nw.KeepHeads(k=1, sinks=2) + nw.LimitContext(tokens=3, sinks=2),
    **{mode: nw.ExposeTokens(mode=mode) for mode in ("keep", "omit", "only", "null", "balanced")},
    **{f"{mode} scaled": nw.ExposeTokens(mode=mode, renormalize=True) for mode in ("omit", "only", "null", "balanced")},
    "omit, then balanced": nw.ExposeTokens(mode="omit", phase="prefill") + nw.ExposeTokens(mode="balanced", phase="decode"),
    "limit": nw.LimitContext(tokens=3),
    "limit and sinks": nw.LimitContext(tokens=4, sinks=2),
    "limit in decode": nw.LimitContext(tokens=2, sinks=1, phase="decode"),
    "all at once": nw.LimitContext(tokens=6, sinks=1) + nw.ExposeTokens(mode="omit", renormalize=True) + nw.KeepHeads(k=2),
    "scores come before exposure": nw.ExposeTokens(mode="only") + nw.KeepHeads(k=2, by="norm"),
    "attention off in prefill": nw.AblateAttention(phase="prefill"),
    "block all queries": nw.BlockAttention(to="needle"),
    "block the answer": nw.BlockAttention("answer", "needle"),
    "block two pairs of spans": nw.BlockAttention((6, 8), "needle") + nw.BlockAttention("answer", (0, 1, 7)),
    "block in prefill": nw.BlockAttention(to=(0, 2, 9), phase="prefill"),
    "block under a limit": nw.BlockAttention(to="needle") + nw.LimitContext(tokens=5, sinks=1) + nw.KeepHeads(k=2),
}


def _some_heads(anatomy: Anatomy) -> nw.Intervention:
    """Other spans for other heads of one layer, one head without any, beside edits that come later in the layer."""
    first, last = anatomy.attention_layers[0].index, anatomy.attention_layers[-1].index
    blocks = nw.BlockAttention(None, "needle", heads=[(first, 0), (last, 1)]) + nw.BlockAttention(
        "answer", (0, 1), heads=[(first, 0), (first, 3)]
    )
    return blocks + nw.KeepHeads(k=2) + nw.ExposeTokens(mode="omit", renormalize=True, phase="decode")


OF_MODEL = {"block some heads": _some_heads}
CHOSEN = ("llama", "gemma3", "jamba", "recurrent_gemma", "falcon_h1", "qwen3_next", "hrm_text")
QUICK = ("llama", "jamba", "recurrent_gemma")
IDS = torch.tensor([cases.PROMPT + cases.MORE])
SPLIT = len(cases.PROMPT)


def _cells() -> list[Any]:
    more = tuple(name for name in cases.WITH_HEADS if name not in CHOSEN)
    few = ("keep 1 by entropy", "balanced", "all at once", "block some heads")
    cells = [(name, which) for name in CHOSEN for which in (*SOME, *OF_MODEL)] + [(name, which) for name in more for which in few]
    return [pytest.param(*cell, marks=() if cell[0] in QUICK else pytest.mark.slow) for cell in cells]


@pytest.mark.parametrize("name, which", _cells())
def test_logits_and_receipts(name: str, which: str, record_property: Callable[[str, Any], None]) -> None:
    subject = cases.subject(name)
    intervention = OF_MODEL[which](subject.anatomy) if which in OF_MODEL else SOME[which]
    run = brute_force.Run(subject.model, intervention, SPLIT, NEEDLE, sample_key(cases.PROMPT))
    expected = run.logits(IDS)
    found = subject.logits(IDS, intervention, prompt_tokens=SPLIT, spans=cases.SPANS)
    comparable = IDS.shape[1] if run.first_near_tie is None else run.first_near_tie
    record_property("compared", (comparable, IDS.shape[1]))
    assert comparable >= 4, "near ties leave nothing to compare; choose other tokens"
    assert cases.apart(found[:, :comparable], expected[:, :comparable]) < cases.between_routes(name)
    request = Request(cases.PROMPT, intervention, spans=cases.SPANS, forced=(*cases.MORE, 3))
    receipt = subject.answer([request])[0].receipt
    counts = {key: dict(count) for key, count in run.counts.items()}
    assert {key: count for key, count in receipt.counts.items() if key in counts} == counts
    assert all(set(count) <= {"positions"} for key, count in receipt.counts.items() if key not in counts)


def test_the_reference_agrees_with_the_stock_model() -> None:
    """Without an intervention the reference is the model: what is compared above is not two equal mistakes."""
    model = cases.build("llama", "eager")
    with torch.no_grad():
        stock = model(input_ids=IDS).logits
    assert cases.apart(brute_force.Run(model, nw.NONE, SPLIT).logits(IDS), stock) < 1e-5


def test_a_query_with_nothing_left_says_nothing() -> None:
    """Before the needle, `only` leaves no key: the head's output is zero, and not uniform attention."""
    subject = cases.subject("llama")
    only = subject.logits(IDS, nw.ExposeTokens(mode="only", renormalize=True), spans=cases.SPANS)
    silent = subject.logits(IDS, nw.AblateAttention())
    assert torch.equal(only[:, :3], silent[:, :3])
    assert cases.apart(only[:, 3:], silent[:, 3:]) > 0.1


def test_a_needle_outside_the_window_is_reported() -> None:
    subject = cases.subject("recurrent_gemma")  # window 8
    prompt = tuple(int(t) for t in cases.tokens(24))
    omit = nw.ExposeTokens(mode="omit", phase="decode")
    answer = subject.generate([prompt], omit, spans=[cases.SPANS], max_new_tokens=2)[0]
    assert len(answer.receipt.notes) == 2
    assert all("outside what any query could see" in note for note in answer.receipt.notes)
    near = subject.generate([prompt], omit, spans=[{"needle": ((20, 22),)}], max_new_tokens=2)[0]
    assert near.receipt.notes == ()


# (architecture, window, tokens of the prompt): shorter than the window, just longer (decode sees a part of the needle), longer
PAPER = (("llama", None, 16), ("recurrent_gemma", 8, 16), *(("recurrent_gemma", 48, tokens) for tokens in (24, 50, 64)))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
@pytest.mark.parametrize("mode", ["keep", "omit", "only", "null", "balanced"])
@pytest.mark.parametrize("name, window, tokens", PAPER)
def test_compat_paper_is_the_authors_code(name: str, window: int | None, tokens: int, mode: Any, phase: Any) -> None:
    """Columns one token early; in prefill every row is rewritten, in decode none that sees no needle column."""
    subject = _windowed(name, window)
    ids = cases.tokens(1, tokens + 4)
    act = nw.ExposeTokens(mode=mode, phase=phase, compat="paper")
    early = tuple(position - 1 for position in NEEDLE)
    expected = brute_force.Run(subject.model, act, tokens, early).logits(ids)
    spans = {"needle": (*cases.SPANS["needle"], (9, 12))}  # of two copies the authors' code finds the first
    assert cases.apart(subject.logits(ids, act, prompt_tokens=tokens, spans=spans), expected) < 1e-4
    if mode != "keep" and (phase != "decode" or tokens < 2 + (window or 100)):
        assert cases.apart(expected, subject.logits(ids, prompt_tokens=tokens)) > 0.1, "the rule must show"


@functools.cache
def _windowed(name: str, window: int | None) -> nw.Subject:
    return nw.wrap(cases.build(name, **({"attention_window_size": window} if window else {})))


def test_the_papers_balanced_reads_a_prefill_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sums over the rows of one prefill: prompts with a common beginning do not share its reading, options are refused."""
    monkeypatch.setattr("needlework.engine.budget._FORWARD_FLOPS", {"cpu": 0.0})
    subject = cases.subject("llama")
    act = nw.ExposeTokens(mode="balanced", phase="prefill", compat="paper")
    prompts = [(*cases.PROMPT, 7, 8), (*cases.PROMPT, 9, 8)]
    together = subject.generate(prompts, act, spans=[cases.SPANS] * 2, max_new_tokens=3)
    for prompt, answer in zip(prompts, together, strict=True):
        alone = subject.generate([prompt], act, spans=[cases.SPANS], max_new_tokens=3)[0]
        assert answer.tokens == alone.tokens
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    with pytest.raises(nw.NeedleworkError, match="sums over a whole prefill"):
        subject.choices([cases.PROMPT], [[(5,)]], act, spans=[cases.SPANS])
    with pytest.raises(nw.NeedleworkError, match="one token early"):
        subject.generate([cases.PROMPT], act, spans=[{"needle": ((0, 1),)}])
