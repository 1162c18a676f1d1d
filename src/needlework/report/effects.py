"""Figures of estimates: the two sides silenced, the two memories swapped, the prompt laid out in other ways, hops by phase."""

from __future__ import annotations

from needlework import stats
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.conditions import Condition
from needlework.report.frame import Frame
from needlework.report.model_trials import ModelTrials, by_model_and_boundary
from needlework.report.spec import FORM_COLORS, Dot, Dots, Figure

LAYOUTS = {"plain": "plain", "jrt": "read twice", "question_first": "question first"}


def dissociation(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for trials in by_model_and_boundary(frame):
        off = [("attention off", trials.heads_off()), ("recurrent memory off", _site(trials, "recurrent", "memory"))]
        off += [("recurrent block off", _site(trials, "recurrent", "block"))]
        off += [(f"attention and {name} off", _site(trials, "both_off", name)) for name in ("memory", "block")]
        dots = []
        for label, condition in off:
            if condition is not None:
                dots += _abilities(trials, browser, label, condition.text)
        if any("recurrent" in dot.label for dot in dots) and len(trials.retrieval("none")):
            title = trials.titled(trials.model)
            panels.append(Dots(trials.model, title, "share of the baseline that is left", dots, (1.0, "baseline")))
    return figure("dissociation", panels)


def _site(trials: ModelTrials, kind: str, site: str) -> Condition | None:
    """The condition with more trials, where two texts do the same."""
    conditions = trials.conditions_of(kind, phase="both", site=site)
    return max(conditions, key=lambda c: len(trials.retrieval(c.text)), default=None)


def _abilities(trials: ModelTrials, browser: Browser, label: str, text: str) -> list[Dot]:
    dots = []
    rows = trials.retrieval(text)
    if len(rows):
        key = browser.add(f"{trials.name} · {label} · retrieval", rows)
        dots.append(Dot(f"{label}: retrieval", 1, trials.retained(text).raw, key))
    for form, color in FORM_COLORS.items() if trials.judged else ():
        rows = trials.knowledge(text, form)
        if len(rows):
            key = browser.add(f"{trials.name} · {label} · knowledge, {form}", rows)
            dots.append(Dot(f"{label}: {form}", color, trials.retained_knowledge(text, form).corrected, key))
    return [dot for dot in dots if dot.y.value == dot.y.value]


def swap(frame: Frame, browser: Browser) -> Figure:
    panels = []
    names = {"kv": "KV cache from the twin", "recurrent": "recurrent state from the twin", "both": "both from the twin"}
    for trials in by_model_and_boundary(frame):
        for in_window in (True, False):
            dots = []
            for half, label in names.items():
                rows = trials.swapped(half, in_window)
                if len(rows):
                    key = browser.add(f"{trials.name} · {label}" + " · out of the window" * (not in_window), rows)
                    own, twin = (stats.accuracy(frame.values(name, rows)) for name in ("correct", "follows_twin"))
                    dots += [Dot(f"{label}: own answer", 4, own, key), Dot(f"{label}: twin's answer", 6, twin, key)]
            if dots:
                title = trials.titled("needle in the window" if in_window else "needle out of the window")
                panels.append(Dots(trials.model, title, "share of answers", [dot for dot in dots if dot.y.n]))
    return figure("memory", panels)


def layouts(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for trials in by_model_and_boundary(frame):
        off = trials.heads_off()
        dots = []
        for layout, name in LAYOUTS.items():
            for label, text, color in [("untouched", "none", 1), *([("no heads", off.text, 6)] if off else [])]:
                rows = trials.retrieval(text, layout=layout)
                if len(rows):
                    key = browser.add(f"{trials.name} · {name} · {label}", rows)
                    dots.append(Dot(f"{name}: {label}", color, trials.accuracy(rows), key))
        if sum("plain" not in dot.label for dot in dots):
            panels.append(Dots(trials.model, trials.titled(trials.model), "needles found, exact", dots))
    return figure("layouts", panels)


def hops(frame: Frame, browser: Browser) -> Figure:
    """What stands one hop away and what stands further, with all heads off in one phase or the other."""
    panels = []
    for trials in by_model_and_boundary(frame):
        dots = []
        for label, text in phases(trials):
            for hop in trials.hops:
                rows = trials.in_hops(hop, text)
                if len(rows):
                    key = browser.add(f"{trials.name} · {label} · {in_words(hop)}", rows)
                    dots.append(Dot(f"{label}: {in_words(hop)}", hop, trials.accuracy(rows), key))
        if dots:
            panels.append(Dots(trials.model, trials.titled(trials.model), "values found, exact", dots))
    return figure("hops", panels)


def phases(trials: ModelTrials) -> list[tuple[str, str]]:
    """Nothing silenced, and all heads in each phase, as far as it was run."""
    off = [("no heads while reading", "prefill"), ("no heads while answering", "decode"), ("no heads", "both")]
    return [("untouched", "none"), *((label, c.text) for label, phase in off if (c := trials.heads_off(phase)))]


def in_words(hops: int) -> str:
    return {1: "one hop", 2: "two hops", 3: "three hops"}.get(hops, f"{hops} hops")
