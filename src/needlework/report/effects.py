"""Figures of estimates: the two sides silenced, the two memories swapped, the prompt laid out in other ways."""

from __future__ import annotations

import numpy as np

from needlework import stats
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.conditions import Condition
from needlework.report.evidence import Bench
from needlework.report.frame import Frame
from needlework.report.spec import Dot, Dots, Figure

LAYOUTS = {"plain": "plain", "jrt": "read twice", "question_first": "question first"}


def dissociation(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for model in frame.models:
        bench = Bench(frame, model)
        both = bench.of_kind("both_off", phase="both")
        off = [("attention off", bench.silent()), ("recurrent memory off", _site(bench, "memory"))]
        off += [("recurrent block off", _site(bench, "block")), ("both off", both[0] if both else None)]
        dots = []
        for label, condition in off:
            if condition is not None:
                dots += _abilities(bench, browser, label, condition.text)
        if any("recurrent" in dot.label for dot in dots) and len(bench.retrieval("none")):
            panels.append(Dots(model, model, "share of the baseline that is left", dots, (1.0, "baseline")))
    return figure("dissociation", panels)


def _site(bench: Bench, site: str) -> Condition | None:
    return next(iter(bench.of_kind("recurrent", phase="both", site=site)), None)


def _abilities(bench: Bench, browser: Browser, label: str, text: str) -> list[Dot]:
    dots = []
    rows = bench.retrieval(text)
    if len(rows):
        key = browser.add(f"{bench.model} · {label} · retrieval", rows)
        dots.append(Dot(f"{label}: retrieval", 1, bench.retained(text).raw, key))
    for form, color in (("cloze", 4), ("letter", 5)):
        rows = bench.knowledge(text, form)
        if len(rows):
            key = browser.add(f"{bench.model} · {label} · knowledge, {form}", rows)
            dots.append(Dot(f"{label}: {form}", color, bench.retained_knowledge(text, form).corrected, key))
    return [dot for dot in dots if dot.y.value == dot.y.value]


def swap(frame: Frame, browser: Browser) -> Figure:
    panels = []
    names = {"kv": "KV cache from the twin", "recurrent": "recurrent state from the twin", "both": "both from the twin"}
    for model in frame.models:
        bench = Bench(frame, model)
        dots = []
        for half, label in names.items():
            texts = [c.text for c in bench.of_kind("swap") if c.half == half]
            rows = frame.rows(model=model, text=texts) if texts else np.zeros(0, dtype=np.int64)
            if len(rows):
                key = browser.add(f"{model} · {label}", rows)
                own, twin = (stats.accuracy(frame.values(name, rows)) for name in ("correct", "follows_twin"))
                dots += [Dot(f"{label}: own answer", 4, own, key), Dot(f"{label}: twin's answer", 6, twin, key)]
        if dots:
            panels.append(Dots(model, model, "share of answers", [dot for dot in dots if dot.y.n]))
    return figure("memory", panels)


def layouts(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for model in frame.models:
        bench = Bench(frame, model)
        off = bench.silent()
        dots = []
        for layout, name in LAYOUTS.items():
            for label, text, color in [("untouched", "none", 1), *([("no heads", off.text, 6)] if off else [])]:
                rows = bench.retrieval(text, layout=layout)
                if len(rows):
                    key = browser.add(f"{model} · {name} · {label}", rows)
                    dots.append(Dot(f"{name}: {label}", color, bench.accuracy(rows), key))
        if sum("plain" not in dot.label for dot in dots):
            panels.append(Dots(model, model, "needles found, exact", dots))
    return figure("layouts", panels)
