"""`recurrent_side`: every figure against the model asked directly, rankings from other samples, and words that follow a rule."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cases
import needlework as nw
from needlework.heads.output import save_recurrent
from needlework.heads.recurrent import Ability, Outcome, RecurrentSide, recurrent_side
from needlework.tasks.base import Item

SHARES = (0.05, 0.2)
DRAWS = 3


def _items(subject: nw.Subject, count: int, seed: int) -> list[Item]:
    """Prompts whose right answer is what the model says by itself, but for every fourth; two prompts make a cluster."""
    prompts = [tuple(row) for row in cases.tokens(count, 9, seed=seed).tolist()]
    answers = subject.generate(prompts, max_new_tokens=2)
    right = [answer.tokens if i % 4 else (5, 6) for i, answer in enumerate(answers)]
    return [
        Item(f"s{seed}/{i}", f"c{i // 2}", prompt, "", "", options=(target, (7, 8)), answer=0)
        for i, (prompt, target) in enumerate(zip(prompts, right, strict=True))
    ]


@pytest.fixture(scope="module")
def asked() -> tuple[nw.Subject, list[Item], RecurrentSide, list[float]]:
    subject = cases.subject("recurrent_gemma")
    items, told = _items(subject, 12, 1), []
    side = recurrent_side(
        subject, items, beside={"other": _items(subject, 4, 2)}, seed=3, draws=DRAWS, shares=SHARES, progress=told.append
    )
    return subject, items, side, told


def _direct(subject: nw.Subject, item: Item, act: Any) -> tuple[float, float]:
    """Log-likelihood of the right answer, and whether it is the first choice, from the logits of one forward."""
    target = item.options[0]
    logs = subject.logits([[*item.prompt, *target]], act)[0].double().log_softmax(-1)
    places = range(len(item.prompt) - 1, len(item.prompt) + len(target) - 1)
    each = [float(logs[place, token]) for place, token in zip(places, target, strict=True)]
    return sum(each), float(all(int(logs[p].argmax()) == token for p, token in zip(places, target, strict=True)))


def test_each_condition_is_the_model_asked_directly(asked: Any) -> None:
    subject, items, side, _ = asked
    for done, act in (
        ("none", nw.NONE),
        ("0.3", nw.AblateRecurrentGroups(groups=((0, 3),))),
        ("4.1", nw.AblateRecurrentGroups(groups=((4, 1),))),
        ("conv", nw.AblateRecurrent(site="conv")),
        ("state@3", nw.AblateRecurrent(site="state", layers=(3,))),
        ("memory", nw.AblateRecurrent()),
        ("random 0.2 1", nw.parse(side.interventions["random 0.2 1"])),
    ):
        assert nw.parse(side.interventions[done]) == act
        outcome = side.retrieval.outcomes[done]
        for i in (0, 5):
            log_p, said = _direct(subject, items[i], act)
            assert outcome.log_p[i] == pytest.approx(log_p, abs=1e-4)
            assert outcome.right[i] == said


def test_a_frame_and_a_plot_show_the_losses(asked: Any) -> None:
    _, _, side, _ = asked
    frame = side.frame()
    assert list(frame[["layer", "group"]].itertuples(index=False, name=None)) == [tuple(group) for group in side.ranking]
    assert frame["loss"][0] == side.retrieval.losses([side.ranking[0]]).mean()
    assert side.plot()._repr_png_().startswith(b"\x89PNG")
    assert f"segregated: {side.segregated[0]}" in side._repr_html_()


def test_every_group_and_every_cut_is_tried(asked: Any) -> None:
    _, _, side, _ = asked
    layers = (0, 1, 3, 4)
    expected = {"none", *(f"{layer}.{i}" for layer in layers for i in range(4))}
    expected |= {f"{site}{at}" for site in ("conv", "state", "memory") for at in ("", *(f"@{layer}" for layer in layers))}
    expected |= {
        f"{kind} {share}{draw}"
        for share in SHARES
        for kind, draws in (("top", [""]), ("random", [" 0", " 1", " 2"]))
        for draw in draws
    }
    for ability in side.abilities:
        assert set(ability.outcomes) == expected
        assert all(len(outcome.right) == len(ability.clusters) for outcome in ability.outcomes.values())


def test_top_groups_are_ranked_by_other_samples(asked: Any) -> None:
    """Every sample is asked under the top groups of those samples that are not of its half, and not of its cluster."""
    subject, items, side, _ = asked
    drops = side.retrieval.losses(side.groups)
    halves = {}
    for half in ("first half", "second half"):
        act: Any = nw.parse(side.interventions[f"top 0.2, ranked by {half}"])
        assert len(act.groups) == 3  # 0.2 of 16
        halves[half] = act
    assert halves["first half"] != halves["second half"], "this test cannot tell the halves apart"
    first = [i for i in range(12) if _is(subject, items[i], halves["second half"], side.retrieval.outcomes["top 0.2"].log_p[i])]
    second = [i for i in range(12) if _is(subject, items[i], halves["first half"], side.retrieval.outcomes["top 0.2"].log_p[i])]
    assert sorted(first + second) == list(range(12))
    assert not {items[i].cluster for i in first} & {items[i].cluster for i in second}
    for half, ranked_by in (("first half", first), ("second half", second)):
        best = np.argsort(-drops[ranked_by].mean(0), kind="stable")[:3]
        assert set(halves[half].groups) == {side.groups[i] for i in best}


def _is(subject: nw.Subject, item: Item, act: Any, log_p: float) -> bool:
    return abs(_direct(subject, item, act)[0] - log_p) < 1e-4


def test_random_sets_are_as_large_and_drawn_anew(asked: Any) -> None:
    _, _, side, _ = asked
    for share, count in side.sizes.items():
        sets = [nw.parse(side.interventions[done]).groups for done in side.random(share)]  # type: ignore[attr-defined]
        assert [len(groups) for groups in sets] == [count] * DRAWS
        assert len(set(sets)) > 1
    assert dict(side.sizes) == {0.05: 1, 0.2: 3}


def test_progress_goes_from_nothing_to_all(asked: Any) -> None:
    _, _, side, told = asked
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    conditions = len([done for done in side.interventions if not done.startswith("top")])
    assert len(told) == 16 * conditions + 16 * len(SHARES)


@pytest.mark.slow
def test_it_can_be_read_by_people_and_programs(asked: Any, tmp_path: Path) -> None:
    _, _, side, _ = asked
    text = side.text()
    for words in (
        "convolution cut, layer 3",
        "top 3 groups (20 %)",
        "3 groups at random, 3 draws",
        "other: nats lost",
        "segregated: ",
    ):
        assert words in text
    content = json.loads(json.dumps(side.to_dict()))
    figures = content["abilities"]["retrieval"]["conditions"]["conv"]["said"]
    assert figures["n"] == 12
    assert figures["low"] <= figures["value"] <= figures["high"]
    share = re.search(r"convolution cut, all layers +([\d.]+) %", text)
    assert share
    assert float(share[1]) == pytest.approx(100 * figures["value"], abs=0.06)
    assert np.array(content["abilities"]["retrieval"]["drops"]).shape == (12, 16)
    written = save_recurrent(side, tmp_path / "side", "a model")
    assert [path.name for path in written] == ["recurrent.json", "recurrent.png", "recurrent.svg"]
    assert written[1].read_bytes()[1:4] == b"PNG"


def _side(asked: RecurrentSide, **said: float) -> RecurrentSide:
    """The same with other right answers: so large a share of 400 samples in each condition, all of them untouched."""
    outcomes = {}
    for done in asked.retrieval.outcomes:
        share = said.get(done.split("@")[0].split()[0], 1.0)
        outcomes[done] = Outcome(np.zeros(400), (np.arange(400) < round(400 * share)).astype(float))
    return replace(asked, abilities=(Ability("retrieval", tuple(map(str, range(400))), outcomes),))


@pytest.mark.parametrize(
    "said, word",
    [
        ({}, "yes"),
        ({"top": 0.5}, "no"),
        ({"top": 0.5, "random": 0.5}, "open"),  # any groups would do: that is damage, not a place of retrieval
        ({"state": 0.2}, "open"),
        ({"conv": 0.9}, "open"),
        ({"top": 0.96}, "open"),  # not certain
        ({"top": 0.2, "state": 0.2}, "no"),
        ({"none": 0.5, "top": 0.2}, "not testable"),
    ],
)
def test_segregated_is_said_only_where_no_few_groups_and_no_memory_are_needed(asked: Any, said: Any, word: str) -> None:
    side = _side(asked[2], **said)
    assert side.segregated[0] == word
    assert replace(side, attention_heads=0).segregated[0] == "does not apply"


def test_models_without_groups_and_too_few_samples_are_refused() -> None:
    with pytest.raises(nw.NeedleworkError, match="no separate recurrent layers"):
        recurrent_side(cases.subject("llama"), [])
    with pytest.raises(nw.NeedleworkError, match="recurs over depth"):
        recurrent_side(cases.subject("hrm_text"), [])
    subject = cases.subject("mamba")
    with pytest.raises(nw.NeedleworkError, match="at least two samples"):
        recurrent_side(subject, [])
    one_cluster = [replace(item, cluster="c") for item in _items(subject, 2, 1)]
    with pytest.raises(nw.NeedleworkError, match="one cluster"):
        recurrent_side(subject, one_cluster, draws=1, shares=(0.1,))


def test_a_cut_that_a_model_refuses_is_left_out_with_its_reason() -> None:
    subject = cases.subject("lfm2")
    side = recurrent_side(subject, _items(subject, 4, 1), draws=1, shares=(0.1,))
    assert set(side.refused) == {"state"}
    assert "no recurrent state" in side.refused["state"]
    assert "conv" in side.retrieval.outcomes
    assert "state cut" not in side.text()
    assert torch.isfinite(torch.tensor(side.retrieval.losses(side.groups))).all()
