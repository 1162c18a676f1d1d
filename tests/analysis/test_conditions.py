"""A condition is placed only if its fields say everything about its intervention."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
import needlework as nw
from needlework.analysis.conditions import Condition, normal, place, rebuilt
from needlework.errors import NeedleworkError
from strategies import PARTS

FREE = {  # of each placed kind: the fields that may be anything
    "heads": "phase k fraction by seed draw sinks",
    "attention_block": "phase k",
    "recurrent": "phase site",
    "both_off": "phase site",
    "expose": "prefill decode",
    "limit": "prefill decode sinks",
    "swap": "half",
    "layers": "site side layers",
    "none": "",
    "other": "",
}


def check(intervention: nw.Intervention) -> Condition:
    condition = place(str(intervention))
    if condition.kind != "other":
        assert normal(rebuilt(condition)) == normal(intervention)
        assert place(str(rebuilt(condition))) == replace(condition, text=str(rebuilt(condition)))
    kept = {name: getattr(condition, name) for name in ("text", "kind", *FREE[condition.kind].split())}
    assert condition == Condition(**kept)  # fields that do not belong to the kind keep their defaults
    return condition


@pytest.mark.parametrize("which", cases.INTERVENTIONS)
def test_conditions_of_the_matrix_say_all_or_are_other(which: str) -> None:
    check(cases.intervention(which, cases.subject("recurrent_gemma").anatomy))


@given(st.lists(st.one_of(*PARTS), min_size=1, max_size=3))
def test_conditions_say_all_or_are_other(parts: list[nw.Part]) -> None:
    try:
        whole = sum(parts, nw.NONE)
    except NeedleworkError:  # two of a kind meet
        return
    check(whole)


def small() -> list[nw.Intervention]:
    """Every part with few values of each field, and sums of those that one figure could take for each other."""
    made: list[nw.Intervention] = []
    for phase, layers in product(("prefill", "decode", "both"), (None, (2,))):
        common: dict[str, Any] = {"phase": phase, "layers": layers}
        made += [nw.LimitContext(tokens=n, sinks=m, **common) for n in (1, 2) for m in (0, 1)]
        made += [nw.AblateAttention(site=site, **common) for site in ("heads", "block")]
        made += [nw.AblateRecurrent(site=site, **common) for site in ("memory", "block")]
        exposures = product(("keep", "omit", "null"), ("needle", "other"), (False, True), ("right", "paper"))
        made += [nw.ExposeTokens(mode=m, span=s, renormalize=r, compat=c, **common) for m, s, r, c in exposures]
        ways = ("entropy", "l2", "random", nw.Ranking(order=[(2, 0), (2, 1)]), nw.Ranking(order=[(2, 1), (2, 0)]))
        kept = product(({"k": 0}, {"k": 1}, {"fraction": 0.5}), ways, (0, 1), ("token", "trial"))
        made += [nw.KeepHeads(by=by, seed=seed, draw=draw, **many, **common) for many, by, seed, draw in kept]
    made += [nw.SwapMemory(half=half, from_=twin) for half in ("kv", "recurrent") for twin in ("twin", "other")]
    left_out = ("layers", "'other'", "paper", "ranking", "l2", "k=1", "fraction", "seed")  # tried alone, for the time's sake
    pairs = combinations([part for part in made if not any(word in str(part) for word in left_out)], 2)
    return made + [nw.parse(f"{a} + {b}") for a, b in pairs if not a.clashes(b)]  # type: ignore[attr-defined]


def test_two_interventions_in_one_place_do_the_same() -> None:
    """Placed alike, they differ in spelling only: nothing of what they do was left out of the fields."""
    places: dict[Condition, set[frozenset[str]]] = {}
    for whole in small():
        condition = check(whole)
        if condition.kind != "other":
            places.setdefault(replace(condition, text=""), set()).add(normal(whole))
    assert {condition.kind for condition in places} == set(FREE) - {"none", "other"}
    assert [condition for condition, meanings in places.items() if len(meanings) > 1] == []


@pytest.mark.parametrize(
    "one,other",
    [
        (
            "expose_tokens(mode='omit')",
            "expose_tokens(mode='omit', phase='decode') + expose_tokens(mode='omit', phase='prefill')",
        ),
        (
            "expose_tokens(mode='omit', phase='decode')",
            "expose_tokens(mode='omit', phase='decode') + expose_tokens(mode='keep', phase='prefill')",
        ),
        ("limit_context(tokens=8)", "limit_context(tokens=8, phase='decode') + limit_context(tokens=8, phase='prefill')"),
    ],
)
def test_spellings_of_one_thing_share_a_place(one: str, other: str) -> None:
    assert replace(place(one), text="") == replace(place(other), text="")
    assert place(one).kind != "other"
