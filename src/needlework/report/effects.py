"""Figures of estimates: the two sides silenced, the two memories swapped, the prompt laid out in other ways."""

from __future__ import annotations

from needlework import stats
from needlework.report.bench import Bench, every_bench
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.conditions import Condition
from needlework.report.frame import Frame
from needlework.report.spec import Dot, Dots, Figure

LAYOUTS = {"plain": "plain", "jrt": "read twice", "question_first": "question first"}


def dissociation(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for bench in every_bench(frame):
        off = [("attention off", bench.silent()), ("recurrent memory off", _site(bench, "recurrent", "memory"))]
        off += [("recurrent block off", _site(bench, "recurrent", "block"))]
        off += [(f"attention and {name} off", _site(bench, "both_off", name)) for name in ("memory", "block")]
        dots = []
        for label, condition in off:
            if condition is not None:
                dots += _abilities(bench, browser, label, condition.text)
        if any("recurrent" in dot.label for dot in dots) and len(bench.retrieval("none")):
            title = bench.titled(bench.model)
            panels.append(Dots(bench.model, title, "share of the baseline that is left", dots, (1.0, "baseline")))
    return figure("dissociation", panels)


def _site(bench: Bench, kind: str, site: str) -> Condition | None:
    """The condition with more trials, where two texts do the same."""
    own = bench.of_kind(kind, phase="both", site=site)
    return max(own, key=lambda c: len(bench.retrieval(c.text)), default=None)


def _abilities(bench: Bench, browser: Browser, label: str, text: str) -> list[Dot]:
    dots = []
    rows = bench.retrieval(text)
    if len(rows):
        key = browser.add(f"{bench.name} · {label} · retrieval", rows)
        dots.append(Dot(f"{label}: retrieval", 1, bench.retained(text).raw, key))
    for form, color in (("cloze", 4), ("letter", 5)) if bench.first else ():
        rows = bench.knowledge(text, form)
        if len(rows):
            key = browser.add(f"{bench.name} · {label} · knowledge, {form}", rows)
            dots.append(Dot(f"{label}: {form}", color, bench.retained_knowledge(text, form).corrected, key))
    return [dot for dot in dots if dot.y.value == dot.y.value]


def swap(frame: Frame, browser: Browser) -> Figure:
    panels = []
    names = {"kv": "KV cache from the twin", "recurrent": "recurrent state from the twin", "both": "both from the twin"}
    for bench in every_bench(frame):
        for in_window in (True, False):
            dots = []
            for half, label in names.items():
                rows = bench.swapped(half, in_window)
                if len(rows):
                    key = browser.add(f"{bench.name} · {label}" + " · out of the window" * (not in_window), rows)
                    own, twin = (stats.accuracy(frame.values(name, rows)) for name in ("correct", "follows_twin"))
                    dots += [Dot(f"{label}: own answer", 4, own, key), Dot(f"{label}: twin's answer", 6, twin, key)]
            if dots:
                title = bench.titled("needle in the window" if in_window else "needle out of the window")
                panels.append(Dots(bench.model, title, "share of answers", [dot for dot in dots if dot.y.n]))
    return figure("memory", panels)


def layouts(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for bench in every_bench(frame):
        off = bench.silent()
        dots = []
        for layout, name in LAYOUTS.items():
            for label, text, color in [("untouched", "none", 1), *([("no heads", off.text, 6)] if off else [])]:
                rows = bench.retrieval(text, layout=layout)
                if len(rows):
                    key = browser.add(f"{bench.name} · {name} · {label}", rows)
                    dots.append(Dot(f"{name}: {label}", color, bench.accuracy(rows), key))
        if sum("plain" not in dot.label for dot in dots):
            panels.append(Dots(bench.model, bench.titled(bench.model), "needles found, exact", dots))
    return figure("layouts", panels)
