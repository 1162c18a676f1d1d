"""The numbers that verdicts and figures need, for one model of a frame."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needlework import stats
from needlework.report.conditions import Condition, few, place
from needlework.report.frame import Frame, Ints
from needlework.stats import NOTHING, Estimate, Interaction
from needlework.verdicts import Evidence, Kept, Silenced, Verdict, judge

Floats = NDArray[np.float64]
BY = ("entropy", "l2", "norm", "ranking")  # which way of choosing heads a claim is judged by, best known first
SITES = ("memory", "block")


@dataclass(frozen=True)
class Pairs:
    """The same samples with and without an intervention."""

    after: Floats
    before: Floats
    clusters: Ints
    chance: float

    @property
    def raw(self) -> Estimate:
        return stats.retained(self.after, self.before, self.clusters)

    @property
    def corrected(self) -> Estimate:
        return stats.retained(self.after, self.before, self.clusters, self.chance)


@dataclass(frozen=True)
class Bench:
    """Questions that are asked of one model's trials."""

    frame: Frame
    model: str

    @property
    def heads(self) -> int:
        """Heads per layer; where the store does not say, the most that were kept in any trial."""
        known = self.frame.heads(self.model)
        return known or max((c.k or 0 for c in self.conditions if c.kind == "heads"), default=0)

    @cached_property
    def conditions(self) -> list[Condition]:
        return [place(text) for text in self.frame.texts(model=self.model)]

    def of_kind(self, kind: str, **wanted: Any) -> list[Condition]:
        found = [c for c in self.conditions if c.kind == kind]
        return [c for c in found if all(getattr(c, key) == value for key, value in wanted.items())]

    def tasks(self, mode: str) -> list[str]:
        """Retrieval is judged by the needle in a haystack; by every retrieval task where there is none."""
        names = self.frame.distinct("task", model=self.model, family="retrieval", mode=mode)
        return [name for name in names if name.startswith("niah")] or names

    def retrieval(self, text: str, mode: str = "generate", layout: str = "plain", in_window: bool = True) -> Ints:
        wanted = {"model": self.model, "family": "retrieval", "mode": mode, "task": self.tasks(mode)}
        return self.frame.rows(**wanted, text=text, layout=layout, in_window=in_window)

    def knowledge(self, text: str, form: str) -> Ints:
        """Trials that choose among options; those that generate only where nothing else was asked."""
        modes = self.frame.distinct("mode", model=self.model, family="knowledge", form=form)
        mode = "choices" if "choices" in modes else "generate"
        return self.frame.rows(model=self.model, family="knowledge", text=text, form=form, mode=mode)

    def forms(self) -> list[str]:
        found = self.frame.distinct("form", model=self.model, family="knowledge")
        return [form for form in ("cloze", "letter", "lookup") if form in found]

    def accuracy(self, rows: Ints, score: str = "correct") -> Estimate:
        return stats.accuracy(self.frame.values(score, rows))

    def pairs(self, rows: Ints, base: Ints, score: str = "correct") -> Pairs:
        """Trials of `rows` beside the base's answer to the same sample; those without one are left out."""
        known = np.full(int(self.frame.sample.max(initial=0)) + 1, np.nan)
        known[self.frame.sample[base]] = self.frame.values(score, base)
        before, after = known[self.frame.sample[rows]], self.frame.values(score, rows)
        both = ~(np.isnan(before) | np.isnan(after))
        return Pairs(after[both], before[both], self.frame.cluster[rows][both], self.frame.chance(rows[both]))

    def retained(self, text: str) -> Pairs:
        return self.pairs(self.retrieval(text), self.retrieval("none"))

    def retained_knowledge(self, text: str, form: str, score: str = "correct") -> Pairs:
        pairs = self.pairs(self.knowledge(text, form), self.knowledge("none", form), score)
        return replace(pairs, chance=0.0) if score == "top1" else pairs

    def silent(self, phase: str = "both") -> Condition | None:
        """The condition that silences all heads; of two that do the same, the one with more trials."""
        found = [c for c in self.of_kind("heads", phase=phase) if c.attention_off and c.site != "block"]
        return max(found, key=lambda c: len(self.retrieval(c.text)) + len(self.retrieval(c.text, "choices")), default=None)

    def few(self, phase: str = "both") -> Condition | None:
        wanted = few(self.heads) if self.heads else 0
        found = [c for c in self.of_kind("heads", phase=phase) if c.by in BY and c.kept(self.heads) == wanted and wanted]
        return min(found, key=lambda c: (BY.index(c.by), c.fraction is None), default=None)

    def silenced(self, layout: str) -> Silenced:
        off = self.silent()
        if off is None:
            return Silenced()
        choices = self.retrieval(off.text, "choices", layout)
        exact = self.accuracy(self.retrieval(off.text, layout=layout))
        return Silenced(exact, self.accuracy(choices), self.frame.chance(choices))

    def recurrent_off(self) -> Condition | None:
        found = [c for c in self.of_kind("recurrent", phase="both") if c.site in SITES]
        return min(found, key=lambda c: SITES.index(c.site), default=None)

    def sides(self, family: str) -> stats.Side | None:
        """One ability under none, attention off and recurrence off, on the samples that saw all three."""
        attention, recurrent = self.silent(), self.recurrent_off()
        if attention is None or recurrent is None:
            return None
        form = (self.forms() or [""])[0]
        texts = ("none", attention.text, recurrent.text)
        rows = [self.retrieval(t) if family == "retrieval" else self.knowledge(t, form) for t in texts]
        common = np.intersect1d(self.frame.sample[rows[1]], self.frame.sample[rows[2]])
        keep = [r[np.isin(self.frame.sample[r], common)] for r in rows[1:]]
        keep = [r[np.argsort(self.frame.sample[r], kind="stable")] for r in keep]
        first, second = self.pairs(keep[0], rows[0]), self.pairs(keep[1], rows[0])
        if len(first.after) == 0 or len(first.after) != len(second.after):
            return None
        return stats.Side(first.before, first.after, second.after, first.clusters, first.chance)

    def interaction(self) -> Interaction | None:
        retrieval, knowledge = self.sides("retrieval"), self.sides("knowledge")
        if retrieval is None or knowledge is None or np.mean(knowledge.base) <= knowledge.chance:
            return None
        return stats.interaction(retrieval, knowledge) if np.mean(retrieval.base) > 0 else None

    def follows_kv(self, half: str) -> Estimate:
        """The share of answers that follow the half of the memory that is the KV cache, whichever half was swapped."""
        texts = [c.text for c in self.of_kind("swap") if c.half == half]
        rows = self.frame.rows(model=self.model, text=texts) if texts else np.zeros(0, dtype=np.int64)
        return stats.accuracy(self.frame.values("correct" if half == "recurrent" else "follows_twin", rows))

    def limits(self, both: bool = False) -> list[tuple[int, Estimate]]:
        """Retrieval against the context in sight of prefill (of decode, too, if `both`), fewest tokens first."""
        found = [c for c in self.of_kind("limit") if c.prefill and c.decode == (c.prefill if both else "")]
        points = [(int(c.prefill), self.accuracy(self.retrieval(c.text))) for c in found]
        return sorted((point for point in points if point[1].n), key=lambda point: point[0])


def helped_by_reading_twice(frame: Frame) -> str:
    """The first model whose retrieval, with nothing done to it, surely rises when the prompt is read twice."""
    for model in frame.models:
        bench = Bench(frame, model)
        plain, twice = (bench.accuracy(bench.retrieval("none", layout=layout)) for layout in ("plain", "jrt"))
        if plain.n and twice.n and stats.difference(twice, plain).low > 0:
            return f"{model} ({stats.percent(plain.value)} to {stats.percent(twice.value)})"
    return ""


def collect(frame: Frame, model: str, reading_twice_helps: str) -> Evidence:
    bench = Bench(frame, model)
    some = bench.few()
    layouts = {name: bench.silenced(name) for name in ("jrt", "question_first")}
    exposed = {(c.prefill, c.decode): c.text for c in bench.of_kind("expose")}
    follows = [bench.follows_kv(half) for half in ("kv", "recurrent")]
    hits, n = sum(e.value * e.n for e in follows if e.n), sum(e.n for e in follows)
    anatomy = frame.anatomy(model)
    layers = anatomy.get("layers", [])
    return Evidence(
        model=model,
        baseline=bench.accuracy(bench.retrieval("none")),
        silenced=bench.silenced("plain"),
        few=bench.retained(some.text).raw if some and len(bench.retrieval(some.text)) else NOTHING,
        few_label=few_label(bench, some),
        few_knowledge=[Kept(form, p.raw, p.corrected) for form in ("cloze", "letter") if some
                       for p in [bench.retained_knowledge(some.text, form)] if len(p.after)],
        layouts={name: found for name, found in layouts.items() if found.exact.n},
        reading_twice_helps=reading_twice_helps,
        omit_decode=bench.accuracy(bench.retrieval(exposed.get(("keep", "omit"), "-"))),
        omit_prefill=_retained_if_any(bench, exposed.get(("omit", "keep"))),
        context=bench.limits(),
        context_both=bench.limits(both=True),
        interaction=bench.interaction(),
        dissociation=_four_shares(bench),
        follows_kv=stats.wilson(hits, n),
        has_attention=not layers or any(layer.get("attention") for layer in layers),
        has_recurrence=not layers or any(layer.get("recurrent") for layer in layers),
    )  # fmt: skip


def few_label(bench: Bench, some: Condition | None) -> str:
    if some is None:
        return ""
    kept = some.kept(bench.heads) or 0
    return f"{kept} of {bench.heads} heads per layer ({stats.percent(kept / bench.heads)}, by {some.by})"


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
                shares.append(f"{stats.percent(share)} of {name}")
        told.append(f"Without {label}, {' and '.join(shares)} remain.")
    return " ".join(told)


def verdicts(frame: Frame) -> list[Verdict]:
    """Every claim for every model."""
    helps = helped_by_reading_twice(frame)
    return [verdict for model in frame.models for verdict in judge(collect(frame, model, helps))]
