"""The random control: a hash of what it should hang on, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import needlework as nw
from needlework.interventions import acts
from needlework.model import edits
from needlework.requests import Request

NUMBERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_tensors_mix_as_python_does(numbers: list[int]) -> None:
    mixed = edits.mix(torch.tensor(numbers)).tolist()
    assert [x % 2**64 for x in mixed] == [acts.mix(x % 2**64) for x in numbers]


@settings(deadline=None)
@given(st.integers(0, 2**31), NUMBERS, st.integers(0, 100), st.integers(0, 10_000))
def test_scores_are_the_hash_of_their_place(seed: int, sample: int, layer: int, position: int) -> None:
    column = torch.tensor([0])
    keep = edits.Keep(column, column, torch.tensor([seed]), torch.tensor([sample]), frozenset({"random"}))
    found = edits.hash_scores(keep, layer, torch.tensor([[position, position + 1]]), 3)
    for q in (0, 1):
        numbers = [acts.draw(seed, sample, layer, position + q, head) for head in range(3)]
        assert found[0, q].tolist() == [(x - 2**64 if x >= 2**63 else x) >> 40 for x in numbers]


@pytest.mark.parametrize(
    "fraction, heads, kept",
    [
        (0.15, 32, 5),
        (0.15, 16, 2),
        (0.15, 10, 2),
        (0.01, 8, 1),
        (0.0, 8, 0),
        (1.0, 8, 8),
        (0.5, 5, 3),
        (0.25, 4, 1),
    ],
)
def test_a_fraction_of_heads(fraction: float, heads: int, kept: int) -> None:
    assert nw.KeepHeads(fraction=fraction).count(heads) == kept


@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma"])
@pytest.mark.parametrize("draw", ["token", "trial"])
def test_the_choice_hangs_on_no_batch(name: str, draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in any batch, in any order, in small blocks, in one forward or token by token."""
    subject = cases.subject(name)
    act = nw.KeepHeads(k=2, by="random", seed=5, draw=draw)  # type: ignore[arg-type]
    alone = subject.generate([cases.PROMPT], act, max_new_tokens=4)[0]
    others = [nw.NONE, act, nw.KeepHeads(k=1, by="random", seed=6), nw.KeepHeads(k=2)]
    batch = subject.generate([cases.TWIN, cases.PROMPT, cases.PROMPT, cases.PROMPT], interventions=others, max_new_tokens=4)
    assert batch[1].tokens == alone.tokens
    assert batch[1].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    monkeypatch.setattr("needlework.model.attention.CPU_BLOCK_BYTES", 600)
    monkeypatch.setattr("needlework.model.attention.FEWEST_QUERIES", 1)
    assert subject.generate([cases.PROMPT], act, max_new_tokens=4)[0].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    # `sample` names the trial: with it, one forward and token by token make one choice.
    whole, stepwise = (
        subject.answer([Request(cases.PROMPT[:n], act, sample=11, forced=(*cases.PROMPT[n:], 3))])[0].logprobs[-1]
        for n in (11, 4)
    )
    assert whole == pytest.approx(stepwise, abs=1e-4)


@pytest.mark.parametrize("draw", ["token", "trial"])
def test_seeds_and_samples_differ(draw: str) -> None:
    subject = cases.subject("llama")
    found = set()
    for seed in range(5):
        act = nw.KeepHeads(k=2, by="random", seed=seed, draw=draw)  # type: ignore[arg-type]
        for sample in (1, 2):
            answer = subject.answer([Request(cases.PROMPT, act, sample=sample, max_new_tokens=1)])[0]
            found.add(round(answer.logprobs[0], 4))
    assert len(found) >= 9  # two equal ones in ten would be odd, one choice for all a fault


def test_every_head_has_its_turn() -> None:
    """Over many positions each of 8 heads is among the 2 best about a quarter of the time."""
    column = torch.tensor([0])
    keep = edits.Keep(column, column, torch.tensor([3]), torch.tensor([99]), frozenset({"random"}))
    best = edits.hash_scores(keep, 5, torch.arange(8000)[None], 8).topk(2, -1).indices
    share = torch.bincount(best.flatten(), minlength=8) / 8000
    assert bool(((share - 0.25).abs() < 0.02).all())
