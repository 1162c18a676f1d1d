"""The numbers that the rules read (Evidence), computed for one model under one boundary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from needlework import stats
from needlework.analysis.conditions import RANKING, Condition, ranking_name, without_first
from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import ModelTrials, by_boundary
from needlework.interventions import parse
from needlework.interventions.acts import RANDOM
from needlework.stats import NOTHING, Estimate, Interaction, percent

NO_CONTEXT = parse("ablate_attention(phase='prefill') + expose_tokens('only', phase='decode')")
ENTROPY = "entropy"
NAMED = {"niah", "niah_choice"}  # default task names, which verdicts do not mention
HELPS = 0.10  # repeating the prompt helps a model if the lower bound of its gain in retrieval is above this
KEPT = 0.95  # retrieval counts as retained if the lower bound of its retained share is at least this


@dataclass(frozen=True)
class Silenced:
    """Retrieval with all attention heads zeroed at every position."""

    exact: Estimate = NOTHING  # generated answers
    choice: Estimate = NOTHING  # forced choice
    chance: float = 0.0  # of the forced choice

    @property
    def above_chance(self) -> Estimate:
        """Forced choice minus chance; an interval wholly below 0 would be information, too."""
        c = self.choice
        return replace(c, value=c.value - self.chance, low=c.low - self.chance, high=c.high - self.chance)


@dataclass(frozen=True)
class Kept:
    """Retained share of knowledge under an intervention, raw and chance-corrected."""

    form: str  # cloze | letter
    raw: Estimate
    corrected: Estimate


@dataclass(frozen=True)
class Curve:
    """Paired retained share of retrieval by number of heads kept per layer, for one way to select heads."""

    label: str  # "by entropy", "at random"
    points: Mapping[int, Estimate] = field(default_factory=dict)  # heads kept -> retained share, fewest heads first
    sinks: Mapping[int, float] = field(default_factory=dict)  # heads kept -> share of their attention on the first token

    def at(self, kept: int) -> Estimate:
        return self.points.get(kept, NOTHING)

    @property
    def suffices(self) -> int | None:
        """Smallest number of heads tried whose retained share has a lower bound of at least 95 %; None if there is none."""
        return next((kept for kept, share in sorted(self.points.items()) if share.low >= KEPT), None)

    def sentence(self, heads: int) -> str:
        """Describe the curve: `By entropy 4 of 16 suffice (they give the first token 12 % of their attention).`"""
        kept, most = self.suffices, max(self.points, default=0)
        words = f"{kept} of {heads} suffice" if kept else f"no number up to {most} of {heads} was seen to suffice"
        sink = self.sinks.get(kept or most, math.nan)
        aside = f" (they give the first token {percent(sink)} of their attention)" if sink == sink else ""
        return f"{self.label[:1].upper()}{self.label[1:]} {words}{aside}."


@dataclass(frozen=True)
class Context:
    """Retrieval when attention lacks the context in one phase or in both: paired retained shares, and accuracy by limit."""

    reading: Estimate = NOTHING  # heads zeroed in prefill
    answering: Estimate = NOTHING  # only the needle visible in decode
    together: Estimate = NOTHING  # both
    limits: Sequence[tuple[int, Estimate]] = ()  # (tokens visible in prefill, accuracy)
    limits_both: Sequence[tuple[int, Estimate]] = ()  # (tokens visible in prefill and decode, accuracy)


@dataclass(frozen=True)
class Evidence:
    """The numbers on one model that the rules read. What was not measured is NOTHING, None or empty."""

    model: str
    note: str = ""  # the boundary, if it is not decode; added to every verdict
    baseline: Estimate = NOTHING  # retrieval without intervention, on all tasks
    baselines: Mapping[str, Estimate] = field(default_factory=dict)  # claim -> baseline on the tasks of this claim
    tasks: Mapping[str, str] = field(default_factory=dict)  # claim -> names of its tasks, if not the default names
    silenced: Silenced = Silenced()
    heads: int = 0  # per layer
    few_kept: int = 0  # heads kept per layer: of the numbers tried, the one nearest to 15 %
    curves: Sequence[Curve] = ()  # the first one is judged
    few_knowledge: Sequence[Kept] = ()  # with `few_kept` heads
    layouts: Mapping[str, Silenced] = field(default_factory=dict)  # jrt, question_first: with all heads zeroed
    layouts_untouched: Mapping[str, Estimate] = field(default_factory=dict)  # the same without intervention
    reading_twice_helps: str = ""  # a model that repeating the prompt helps (positive control); "": none
    omit_decode: Estimate = NOTHING  # accuracy with the needle masked in decode
    omit_prefill: Estimate = NOTHING  # paired retained share with the needle masked in prefill
    context: Context = Context()
    interaction: Interaction | None = None
    dissociation: Sequence[tuple[str, Estimate]] = ()  # (name, retained share): two abilities x two ablated sides
    follows_kv: Estimate = NOTHING  # share of answers that agree with the KV cache, needles inside the window
    follows_kv_outside: Estimate = NOTHING  # the same, needles outside the window
    has_attention: bool = True
    has_recurrence: bool = True

    @property
    def few(self) -> Estimate:
        """Retained share of retrieval with `few_kept` heads, on the curve that is judged."""
        return self.curves[0].at(self.few_kept) if self.curves else NOTHING


def helped_by_reading_twice(frame: Frame) -> str:
    """Return the first model whose baseline retrieval improves when the prompt is repeated, with the gain; "" if none."""
    for model in frame.models:
        gain = by_boundary(frame, model)[0].reading_twice()
        if gain.n and gain.low > HELPS:
            bounds = f"[{percent(gain.low, '')}, {percent(gain.high, '')}; n = {gain.n:,}]"
            return f"{model} (by {percent(gain.value, '')} points {bounds})"
    return ""


def collect(trials: ModelTrials, reading_twice_helps: str) -> Evidence:
    """Compute all evidence on one model under one boundary; `reading_twice_helps` is that of `helped_by_reading_twice`."""

    def silenced(layout: str) -> Silenced:
        if off is None:
            return Silenced()
        choices = trials.retrieval(off.text, "choices", layout)
        exact = trials.accuracy(trials.retrieval(off.text, layout=layout))
        return Silenced(exact, trials.accuracy(choices), trials.frame.chance(choices))

    def retained(text: str | None) -> Estimate:
        return trials.retained(text).raw if text and len(trials.retrieval(text)) else NOTHING

    few, off, recurrent = trials.few_heads(), trials.heads_off(), trials.recurrent_off()
    layouts = ("jrt", "question_first")
    exposed = trials.text_by_place(((c.prefill, c.decode), c) for c in trials.conditions_of("expose"))
    reading = trials.heads_off("prefill")
    without_context = {
        "reading": reading.text if reading else None,
        "answering": exposed.get(("keep", "only")),
        "together": trials.text_of(NO_CONTEXT),
    }
    texts_of_claim = {
        "segregation": [off.text] if off else [],
        "few_heads": [few.text] if few else [],
        "exposure": [exposed[place] for place in (("keep", "omit"), ("omit", "keep")) if place in exposed],
        "context": [text for text in without_context.values() if text],
        "double_dissociation": [condition.text for condition in (off, recurrent) if condition],
        "memory": [c.text for c in trials.conditions_of("swap") if c.half != "both"],
    }
    names_of_claim = {}
    for claim, texts in texts_of_claim.items():
        modes = ("generate", "choices") if claim == "segregation" else ("generate",)
        names = list(dict.fromkeys(name for mode in modes for name, _ in trials.needle_tasks(texts, mode)))
        if not set(names) <= NAMED:
            names_of_claim[claim] = ", ".join(names)
    shares = []
    sides = {name: trials.sides(name) for name in ("retrieval", "knowledge")}
    for ablated, label in (("attention_off", "attention"), ("recurrent_off", "recurrent side")):
        for name, side in sides.items():
            if side is not None:
                left = stats.retained(getattr(side, ablated), side.base, side.clusters, side.chance)
                shares.append((f"{name} without {label}", left))
    layers = trials.frame.anatomy(trials.model).get("layers", [])
    return Evidence(
        model=trials.model,
        note=trials.note,
        baseline=trials.accuracy(trials.retrieval("none")),
        baselines={claim: e for claim, texts in texts_of_claim.items() if (e := trials.baseline(texts)).n},
        tasks=names_of_claim,
        silenced=silenced("plain"),
        heads=trials.heads,
        few_kept=(few.kept(trials.heads) or 0) if few else 0,
        curves=_curves(trials, few) if few else [],
        few_knowledge=[
            Kept(form, pairs.raw, pairs.corrected)
            for form in ("cloze", "letter")
            if few and len((pairs := trials.retained_knowledge(few.text, form)).after)
        ],
        layouts={name: found for name in layouts if (found := silenced(name)).exact.n},
        layouts_untouched={name: e for name in layouts if (e := trials.accuracy(trials.retrieval("none", layout=name))).n},
        reading_twice_helps=reading_twice_helps,
        omit_decode=trials.accuracy(trials.retrieval(exposed.get(("keep", "omit"), "-"))),
        omit_prefill=retained(exposed.get(("omit", "keep"))),
        context=Context(
            **{name: retained(text) for name, text in without_context.items()},
            limits=trials.limits(),
            limits_both=trials.limits(both=True),
        ),
        interaction=trials.interaction(),
        dissociation=shares,
        follows_kv=trials.follows_kv(in_window=True),
        follows_kv_outside=trials.follows_kv(in_window=False),
        has_attention=not layers or any(layer.get("attention") for layer in layers),
        has_recurrence=not layers or any(layer.get("recurrent") for layer in layers),
    )


def _curves(trials: ModelTrials, few: Condition) -> list[Curve]:
    """Return retained retrieval by number of heads kept: first the way that is judged, then those compared with it."""
    rankings = dict.fromkeys(c.by for c in trials.conditions_of("heads", phase="both", way=RANKING))
    judged = (few.way, few.by if few.way == RANKING else "")
    ways = [judged, (few.way + without_first(1), ""), *((RANKING, ranking) for ranking in rankings), (RANDOM, "")]
    curves = []
    for way, ranking in dict.fromkeys(ways):
        points = trials.retained_by_heads(way, ranking)
        label = "at random" if way == RANDOM else f"by {way}"
        if way == RANKING:
            name = ranking_name(ranking)
            label = f"by {name} on other samples" if name else "by a ranking"
        seen = [sinks for sinks in trials.frame.sinks.get(trials.model, ()) if way != RANKING or sinks.content in ranking]
        known = {kept: seen[0].share(way, kept) for kept in points} if seen and way in (ENTROPY, RANKING, RANDOM) else {}
        if points:
            curves.append(Curve(label, points, known))
    return curves
