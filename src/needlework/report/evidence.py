"""The numbers that verdicts need, for one model of a frame."""

from __future__ import annotations

import math

import numpy as np

from needlework import stats
from needlework.report.conditions import Condition
from needlework.report.frame import Frame
from needlework.report.model_trials import ModelTrials, by_boundary
from needlework.stats import NOTHING, Estimate
from needlework.verdicts import Evidence, Kept, Verdict, judge

NAMED = ("niah", "niah_choice")  # tasks that are called as their kind need no mention


def helped_by_reading_twice(frame: Frame) -> str:
    """The first model whose retrieval, with nothing done to it, surely rises when the prompt is read twice."""
    for model in frame.models:
        trials = by_boundary(frame, model)[0]
        plain, twice = (trials.accuracy(trials.retrieval("none", layout=layout)) for layout in ("plain", "jrt"))
        if plain.n and twice.n and stats.difference(twice, plain).low > 0:
            shares = [f"{stats.percent(e.value)}, n = {e.n:,}" for e in (plain, twice)]
            return f"{model} ({shares[0]}, to {shares[1]})"
    return ""


def collect(trials: ModelTrials, reading_twice_helps: str) -> Evidence:
    """Everything that was measured of one model under one boundary."""
    few, off, recurrent = trials.few_heads(), trials.heads_off(), trials.recurrent_off()
    layouts = {name: trials.silenced(name) for name in ("jrt", "question_first")}
    exposed = trials.text_by_place(((c.prefill, c.decode), c) for c in trials.conditions_of("expose"))
    limits = [c.text for c in trials.conditions_of("limit", sinks=0, decode="")]
    swaps = [c.text for c in trials.conditions_of("swap") if c.half != "both"]
    texts_of_claim = {
        "segregation": _texts(off),
        "few_heads": _texts(few),
        "exposure": [exposed[place] for place in (("keep", "omit"), ("omit", "keep")) if place in exposed],
        "context": limits,
        "double_dissociation": _texts(off, recurrent),
        "memory": swaps,
    }
    layers = trials.frame.anatomy(trials.model).get("layers", [])
    return Evidence(
        model=trials.model,
        note=trials.note,
        baseline=trials.accuracy(trials.retrieval("none")),
        baselines={claim: e for claim, texts in texts_of_claim.items() if (e := trials.baseline(texts)).n},
        tasks={claim: names for claim, texts in texts_of_claim.items() if (names := _task_names(trials, claim, texts))},
        silenced=trials.silenced("plain"),
        few=_retained_if_any(trials, few.text if few else None),
        few_label=f"{trials.kept_share(few)} per layer, by {few.way}" if few else "",
        few_knowledge=[
            Kept(form, pairs.raw, pairs.corrected)
            for form in ("cloze", "letter")
            if few and len((pairs := trials.retained_knowledge(few.text, form)).after)
        ],
        layouts={name: silenced for name, silenced in layouts.items() if silenced.exact.n},
        reading_twice_helps=reading_twice_helps,
        omit_decode=trials.accuracy(trials.retrieval(exposed.get(("keep", "omit"), "-"))),
        omit_prefill=_retained_if_any(trials, exposed.get(("omit", "keep"))),
        context=trials.limits(),
        context_both=trials.limits(both=True),
        interaction=trials.interaction(),
        dissociation=_four_shares(trials),
        follows_kv=trials.follows_kv(in_window=True),
        follows_kv_outside=trials.follows_kv(in_window=False),
        has_attention=not layers or any(layer.get("attention") for layer in layers),
        has_recurrence=not layers or any(layer.get("recurrent") for layer in layers),
    )


def _texts(*conditions: Condition | None) -> list[str]:
    return [condition.text for condition in conditions if condition is not None]


def _task_names(trials: ModelTrials, claim: str, texts: list[str]) -> str:
    """Which needle tasks a verdict speaks of, unless their name is that of their kind."""
    modes = ("generate", "choices") if claim == "segregation" else ("generate",)
    names = list(dict.fromkeys(name for mode in modes for name, _ in trials.needle_tasks(texts, mode)))
    return "" if set(names) <= set(NAMED) else ", ".join(names)


def _retained_if_any(trials: ModelTrials, text: str | None) -> Estimate:
    return trials.retained(text).raw if text and len(trials.retrieval(text)) else NOTHING


def _four_shares(trials: ModelTrials) -> str:
    """What is left of each ability without each side, in words."""
    sides = {name: trials.sides(name) for name in ("retrieval", "knowledge")}
    sentences = []
    for off, label in (("attention_off", "attention"), ("recurrent_off", "the recurrent side")):
        shares = []
        for name, side in sides.items():
            if side is not None:
                room = float(np.mean(side.base)) - side.chance
                share = (float(np.mean(getattr(side, off))) - side.chance) / room if room > 0 else math.nan
                shares.append(f"{stats.percent(share)} of {name} (n = {len(side.base):,})")
        sentences.append(f"Without {label}, {' and '.join(shares)} remain.")
    return " ".join(sentences)


def verdicts(frame: Frame) -> list[Verdict]:
    """Every claim for every model, judged where the last prompt token belongs to decode; else where it was run."""
    helps = helped_by_reading_twice(frame)
    chosen = []
    for model in frame.models:
        judged = [judge(collect(trials, helps)) for trials in by_boundary(frame, model)]
        by_claim = zip(*judged, strict=True)
        chosen += [next((v for v in verdicts_of_claim if v.estimate.n), verdicts_of_claim[0]) for verdicts_of_claim in by_claim]
    return chosen
