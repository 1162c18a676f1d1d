"""Hypothesis strategies that several tests share: values of every intervention."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import needlework as nw

PHASES = st.sampled_from(["prefill", "decode", "both"])
LAYERS = st.none() | st.lists(st.integers(0, 60), min_size=1, max_size=4)
COMMON = {"phase": PHASES, "layers": LAYERS}
HEADS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=5)
POSITIONS = st.lists(st.integers(0, 5000), min_size=1, max_size=5).map(tuple)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
RANKINGS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=6, unique=True).map(
    lambda pairs: nw.Ranking(order=pairs)
)


def _values(cls: type[nw.Part], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[nw.Part]:
    return st.builds(lambda **given: cls(**given), **fields)


HOW_MANY = st.one_of(
    st.fixed_dictionaries({"k": st.integers(0, 64)}), st.fixed_dictionaries({"fraction": st.floats(0, 1, allow_nan=False)})
)
KEEP = st.builds(
    lambda many, **rest: nw.KeepHeads(**many, **rest),
    HOW_MANY,
    seed=st.integers(0, 2**40),
    by=st.sampled_from(["entropy", "l2", "norm", "random"]) | RANKINGS,
    draw=st.sampled_from(["token", "trial"]),
    **COMMON,
)
KEEP_MODEL = st.builds(lambda many, by: nw.KeepHeads(**many, by=by, scope="model"), HOW_MANY, RANKINGS)
KEEP_WITHOUT_SINKS = st.builds(
    lambda many, **rest: nw.KeepHeads(**many, **rest),
    HOW_MANY,
    by=st.sampled_from(["entropy", "l2"]),
    sinks=st.integers(0, 9),
    **COMMON,
)
MEANS = st.builds(lambda heads: nw.AblateHeads(heads=heads, value="mean", means="0123abcd"), HEADS)
PARTS: list[st.SearchStrategy[nw.Part]] = [
    KEEP,
    KEEP_MODEL,
    KEEP_WITHOUT_SINKS,
    MEANS,
    _values(nw.AblateHeads, heads=HEADS, **COMMON),
    _values(nw.OnlyHeads, heads=HEADS, **COMMON),
    _values(nw.AblateAttention, site=st.sampled_from(["heads", "block"]), **COMMON),
    _values(
        nw.ExposeTokens,
        mode=st.sampled_from(["keep", "omit", "only", "null", "balanced"]),
        span=NAMES | POSITIONS,
        renormalize=st.booleans(),
        compat=st.sampled_from(["right", "paper"]),
        **COMMON,
    ),
    _values(nw.LimitContext, tokens=st.integers(1, 10**6), sinks=st.integers(0, 100), **COMMON),
    _values(nw.BlockAttention, from_=st.none() | NAMES | POSITIONS, to=NAMES | POSITIONS, heads=st.none() | HEADS, phase=PHASES),
    _values(nw.AblateRecurrent, site=st.sampled_from(["memory", "block", "conv", "state"]), **COMMON),
    _values(nw.BlockRecurrent, from_=st.none() | NAMES | POSITIONS, to=NAMES | POSITIONS, site=st.just("conv")),
    _values(nw.BlockRecurrent, to=NAMES | POSITIONS, groups=st.none() | HEADS),
    _values(nw.AblateRecurrentGroups, groups=HEADS, **COMMON),
    _values(nw.ResetState, at=st.integers(1, 10**6) | NAMES, **COMMON),
    _values(nw.SwapMemory, half=st.sampled_from(["kv", "recurrent"]), from_=NAMES | POSITIONS),
]
