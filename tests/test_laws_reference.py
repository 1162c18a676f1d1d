"""Logits and receipts equal what an independent brute-force reference computes and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import brute_force
import cases
import needlework as nw
from needlework.requests import Request, sample_key

NEEDLE = (3, 4, 5)
SOME: dict[str, nw.Intervention] = {
    **{f"keep {k} by {by}": nw.KeepHeads(k=k, by=by) for by in ("entropy", "l2", "norm", "random") for k in (1, 3)},
    "keep a fraction at random": nw.KeepHeads(fraction=0.5, by="random", seed=7, phase="prefill"),
    "keep in decode": nw.KeepHeads(k=1, phase="decode"),
    **{mode: nw.ExposeTokens(mode=mode) for mode in ("keep", "omit", "only", "null", "balanced")},
    **{f"{mode} scaled": nw.ExposeTokens(mode=mode, renormalize=True) for mode in ("omit", "only", "null", "balanced")},
    "omit, then balanced": nw.ExposeTokens(mode="omit", phase="prefill") + nw.ExposeTokens(mode="balanced", phase="decode"),
    "limit": nw.LimitContext(tokens=3),
    "limit and sinks": nw.LimitContext(tokens=4, sinks=2),
    "limit in decode": nw.LimitContext(tokens=2, sinks=1, phase="decode"),
    "all at once": nw.LimitContext(tokens=6, sinks=1) + nw.ExposeTokens(mode="omit", renormalize=True) + nw.KeepHeads(k=2),
    "scores come before exposure": nw.ExposeTokens(mode="only") + nw.KeepHeads(k=2, by="norm"),
    "attention off in prefill": nw.AblateAttention(phase="prefill"),
}
CHOSEN = ("llama", "gemma3", "jamba", "recurrent_gemma", "falcon_h1", "qwen3_next", "hrm_text")
QUICK = ("llama", "jamba", "recurrent_gemma")
IDS = torch.tensor([cases.PROMPT + cases.MORE])
SPLIT = len(cases.PROMPT)


def _cells() -> list[Any]:
    more = tuple(name for name in cases.WITH_HEADS if name not in CHOSEN)
    few = ("keep 1 by entropy", "balanced", "all at once")
    cells = [(name, which) for name in CHOSEN for which in SOME] + [(name, which) for name in more for which in few]
    return [pytest.param(*cell, marks=() if cell[0] in QUICK else pytest.mark.slow) for cell in cells]


@pytest.mark.parametrize("name, which", _cells())
def test_logits_and_receipts(name: str, which: str, record_property: Callable[[str, Any], None]) -> None:
    subject, intervention = cases.subject(name), SOME[which]
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


def test_paper_balanced_sums_over_queries() -> None:
    """`compat="paper"` is the authors' code: mass summed over all queries of a block, written into every query row."""
    subject = cases.subject("llama")
    right = nw.ExposeTokens(mode="balanced")
    paper = nw.ExposeTokens(mode="balanced", compat="paper")
    assert cases.apart(*(subject.logits(IDS, x, spans=cases.SPANS) for x in (right, paper))) > 0.1
