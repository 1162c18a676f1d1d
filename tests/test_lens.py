"""`nw.logit_lens` and `nw.observe(hidden=True)`: what they accept, refuse and return. Values: laws/test_hidden_states.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cases
import needlework as nw
from needlework.measure import make_samples
from needlework.tasks.base import make_task
from test_notebook_views import has_picture

PROMPTS = [cases.PROMPT, cases.TWIN, cases.PROMPT[:7]]


def lens(**named: Any) -> nw.LogitLens:
    return nw.logit_lens(cases.subject("jamba"), **{"prompts": PROMPTS, "targets": [5, 40], **named})


def test_states_are_kept_at_the_places_that_are_named() -> None:
    subject, expected = (
        cases.subject("jamba"),
        {"last": [11], "decode": [11, 12], "prefill": list(range(11)), "needle": [3, 4, 5]},
    )
    for places, positions in [*([[name], found] for name, found in expected.items()), ([2, "last"], [2, 11]), (None, range(13))]:
        with nw.observe(subject, hidden=True, positions=places) as seen:  # type: ignore[arg-type]
            subject.generate([cases.PROMPT], max_new_tokens=2, spans=[cases.SPANS])
        assert [state.position for state in seen.hidden] == list(positions)
        assert all(state.layers.shape == (7, 32) for state in seen.hidden)
    with nw.observe(subject, patterns=True, heads=[(2, 0)], positions=["last"]) as seen:
        subject.generate(PROMPTS, max_new_tokens=2)
    assert sorted(pattern.position for pattern in seen.patterns) == [6, 11, 11]
    assert seen.hidden == seen.layers() == []


def test_a_model_without_heads_is_observed() -> None:
    subject = cases.subject("mamba")
    with nw.observe(subject, hidden=True, positions=["last"]) as seen:
        subject.generate([cases.PROMPT], max_new_tokens=1)
    assert len(seen.hidden) == 1
    assert [(row.attention, row.recurrent is None) for row in seen.layers("prefill")] == [(None, False)] * 4


def test_frame_and_table() -> None:
    found = lens(at=["last", 2])
    frame = found.frame()
    assert len(frame) == 6 * 7 * 2
    row = frame.query("prompt == 2 and position == 6 and layer == 5 and target == '40'").iloc[0]
    logits = cases.subject("jamba").logits([PROMPTS[2]])[0, -1]
    assert row["p"] == pytest.approx(float(logits.softmax(-1)[40]), abs=1e-5)
    assert row["rank"] == 1 + int((logits > logits[40]).sum())
    assert (row["token"], row["phase"], row["top"]) == ("8", "decode", str(int(logits.argmax())))
    mean = found.table().query("layer == 5 and target == '40'").iloc[0]
    assert mean["p"] == pytest.approx(frame.query("layer == 5 and target == '40'")["p"].mean())
    assert mean["low"] < mean["p"] < mean["high"]
    assert mean["n"] == 6
    assert found._repr_html_().count("<tr>") == 1 + 7 * 2


def test_equal_prompts_each_have_their_own_target() -> None:
    found = lens(prompts=[PROMPTS[0], PROMPTS[0], PROMPTS[1]], targets={"said": [5, 40, 7]})
    assert found.tokens.tolist() == [[5], [40], [7]]
    both = lens(prompts=[PROMPTS[0]])
    assert np.abs(found.log_p[:2, :, 0].T - both.log_p[0]).max() < 1e-5


def test_a_line_for_each_target_and_a_map_of_the_tokens_of_one_prompt() -> None:
    ax = lens().plot()
    assert has_picture(ax)
    assert [line.get_label() for line in ax.get_lines()] == ["5", "40"]
    assert ax.get_lines()[0].get_xdata().tolist() == list(range(-1, 6))
    ranks = lens().plot(of="rank", target="40")
    assert [line.get_label() for line in ranks.get_lines()] == ["40"]
    found = lens(prompts=cases.PROMPT, at="all")
    grid = found.plot(target="40").images[0].get_array()
    assert grid.shape == (7, 12)
    assert grid[3, 4] == pytest.approx(math.exp(found.log_p[4, 3, 1]))
    with pytest.raises(nw.NeedleworkError, match="has no 'ranks'; did you mean 'rank'"):
        found.plot(of="ranks")  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match="'4' is no target of this lens; did you mean '40'"):
        found.plot(target="4")


def test_without_targets_they_are_answers_of_items_or_what_the_untouched_model_says() -> None:
    """And attention is where the answer comes from: without it, no later layer of tiny-jamba has it."""
    subject = nw.load("tiny-jamba")
    task = make_task({"kind": "niah", "lengths": (64,), "depths": (0, 50), "samples": 2})
    items = [sample.item for sample in make_samples(subject, task, 0)]
    whole, without = (nw.logit_lens(subject, items, act) for act in ("none", "ablate_attention(site='block')"))
    assert whole.tokens[:, 0].tolist() == [subject.encode(x.target, continuation=True)[0] for x in items]
    assert (whole.rank[:, -1] == 1).all()
    assert np.exp(whole.log_p[:, 3, 0]).min() > 0.9 > 0.2 > np.exp(whole.log_p[:, 2, 0]).max()  # after layers 2 and 1
    assert np.exp(without.log_p[:, 1:, 0]).max() < 0.5
    texts = nw.logit_lens(subject, [x.prompt_text for x in items], "ablate_attention(site='block')")
    assert texts.tokens.tolist() == whole.tokens.tolist()
    assert texts.log_p == pytest.approx(without.log_p, abs=1e-4)


@pytest.mark.parametrize(
    "named, says",
    [
        ({"prompts": []}, "give at least one prompt"),
        ({"spans": [{}]}, "3 prompts and 1 mappings of spans"),
        ({"at": "nedle", "spans": [cases.SPANS] * 3}, "no span 'nedle' to keep states of; did you mean 'needle'"),
        ({"at": "needle"}, "no span 'needle'"),
        ({"at": []}, "names no token; choose positions, names of spans, last, prefill, decode"),
        ({"at": [-1]}, "must count from 0"),
        ({"at": 40}, "at=40 names no token that is read"),
        ({"targets": []}, "must be a list of texts or token ids with at least one"),
        ({"targets": 5}, "must be a list of texts or token ids"),
        ({"targets": [500]}, "target '500': token id 500 is outside the vocabulary"),
        ({"targets": {"a": [5]}}, r"targets\['a'\] must be a list with one token for each of 3 prompts"),
        ({"targets": ["4719"]}, "without a tokenizer"),
    ],
)
def test_what_has_no_lens_is_refused(named: dict[str, Any], says: str) -> None:
    with pytest.raises(nw.NeedleworkError, match=says):
        lens(**named)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"hidden": True, "positions": "last"}, r"must be a list: \['last'\]"),
        ({"hidden": True, "positions": []}, "names no token"),
        ({"hidden": True, "positions": [-1]}, "must count from 0"),
        ({"positions": ["last"]}, "they go with patterns=True or hidden=True"),
    ],
)
def test_places_that_no_token_can_have_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(nw.NeedleworkError, match=says), nw.observe(cases.subject("llama"), **options):
        pass
