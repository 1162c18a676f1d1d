"""The numbers that verdicts need, for one model of a frame."""

from __future__ import annotations

import math

import numpy as np

from needlework import stats
from needlework.report.bench import Bench, benches
from needlework.report.conditions import Condition
from needlework.report.frame import Frame
from needlework.stats import NOTHING, Estimate
from needlework.verdicts import Evidence, Kept, Verdict, judge

NAMED = ("niah", "niah_choice")  # tasks that are called as their kind need no mention


def helped_by_reading_twice(frame: Frame) -> str:
    """The first model whose retrieval, with nothing done to it, surely rises when the prompt is read twice."""
    for model in frame.models:
        bench = benches(frame, model)[0]
        plain, twice = (bench.accuracy(bench.retrieval("none", layout=layout)) for layout in ("plain", "jrt"))
        if plain.n and twice.n and stats.difference(twice, plain).low > 0:
            shares = [f"{stats.percent(e.value)}, n = {e.n:,}" for e in (plain, twice)]
            return f"{model} ({shares[0]}, to {shares[1]})"
    return ""


def collect(bench: Bench, reading_twice_helps: str) -> Evidence:
    """Everything that was measured of one model under one boundary."""
    some, off, recurrent = bench.few(), bench.silent(), bench.recurrent_off()
    layouts = {name: bench.silenced(name) for name in ("jrt", "question_first")}
    exposed = bench.placed(((c.prefill, c.decode), c) for c in bench.of_kind("expose"))
    limits = [c.text for c in bench.of_kind("limit", sinks=0, decode="")]
    swaps = [c.text for c in bench.of_kind("swap") if c.half != "both"]
    behind = {
        "segregation": _texts(off),
        "few_heads": _texts(some),
        "exposure": [exposed[place] for place in (("keep", "omit"), ("omit", "keep")) if place in exposed],
        "context": limits,
        "double_dissociation": _texts(off, recurrent),
        "memory": swaps,
    }
    layers = bench.frame.anatomy(bench.model).get("layers", [])
    return Evidence(
        model=bench.model,
        note=bench.note,
        baseline=bench.accuracy(bench.retrieval("none")),
        baselines={claim: e for claim, texts in behind.items() if (e := bench.baseline(texts)).n},
        tasks={claim: names for claim, texts in behind.items() if (names := _task_names(bench, claim, texts))},
        silenced=bench.silenced("plain"),
        few=_retained_if_any(bench, some.text if some else None),
        few_label=f"{bench.share(some)} per layer, by {some.way}" if some else "",
        few_knowledge=[
            Kept(form, p.raw, p.corrected)
            for form in ("cloze", "letter")
            if some
            for p in [bench.retained_knowledge(some.text, form)]
            if len(p.after)
        ],
        layouts={name: silenced for name, silenced in layouts.items() if silenced.exact.n},
        reading_twice_helps=reading_twice_helps,
        omit_decode=bench.accuracy(bench.retrieval(exposed.get(("keep", "omit"), "-"))),
        omit_prefill=_retained_if_any(bench, exposed.get(("omit", "keep"))),
        context=bench.limits(),
        context_both=bench.limits(both=True),
        interaction=bench.interaction(),
        dissociation=_four_shares(bench),
        follows_kv=bench.follows_kv(in_window=True),
        follows_kv_outside=bench.follows_kv(in_window=False),
        has_attention=not layers or any(layer.get("attention") for layer in layers),
        has_recurrence=not layers or any(layer.get("recurrent") for layer in layers),
    )


def _texts(*conditions: Condition | None) -> list[str]:
    return [condition.text for condition in conditions if condition is not None]


def _task_names(bench: Bench, claim: str, texts: list[str]) -> str:
    """Which needle tasks a verdict speaks of, unless their name is that of their kind."""
    modes = ("generate", "choices") if claim == "segregation" else ("generate",)
    names = list(dict.fromkeys(name for mode in modes for name, _ in bench.tasks(texts, mode)))
    return "" if set(names) <= set(NAMED) else ", ".join(names)


def _retained_if_any(bench: Bench, text: str | None) -> Estimate:
    return bench.retained(text).raw if text and len(bench.retrieval(text)) else NOTHING


def _four_shares(bench: Bench) -> str:
    sides = {name: bench.sides(name) for name in ("retrieval", "knowledge")}
    told = []
    for off, label in (("attention_off", "attention"), ("recurrent_off", "the recurrent side")):
        shares = []
        for name, side in sides.items():
            if side is not None:
                room = float(np.mean(side.base)) - side.chance
                share = (float(np.mean(getattr(side, off))) - side.chance) / room if room > 0 else math.nan
                shares.append(f"{stats.percent(share)} of {name} (n = {len(side.base):,})")
        told.append(f"Without {label}, {' and '.join(shares)} remain.")
    return " ".join(told)


def verdicts(frame: Frame) -> list[Verdict]:
    """Every claim for every model, judged where the last prompt token belongs to decode; else where it was run."""
    helps = helped_by_reading_twice(frame)
    chosen = []
    for model in frame.models:
        ways = [judge(collect(bench, helps)) for bench in benches(frame, model)]
        chosen += [next((v for v in each if v.estimate.n), each[0]) for each in zip(*ways, strict=True)]
    return chosen
