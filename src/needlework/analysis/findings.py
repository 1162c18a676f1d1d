"""Evidence on one model, and one function per claim that turns it into a Finding: outcome, reason, sentence and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from needlework.analysis import power
from needlework.stats import NOTHING, Estimate, Interaction, percent

Word = Literal["supported", "not supported", "inconclusive", "not testable", "not run", "does not apply"]
Bound = Literal["at most", "below", "at least", "chance", ""]


@dataclass(frozen=True)
class Point:
    """One number in a verdict's small figure: a share from 0 to 1 and its threshold, if any."""

    label: str
    estimate: Estimate
    line: float | None = None  # threshold
    bound: Bound = ""  # side of the threshold that the claim expects; "chance": the line is the chance level
    judged: bool = True  # False: shown for comparison, not used by the rule


@dataclass(frozen=True)
class Verdict:
    """The outcome of one claim for one model."""

    claim: str
    title: str
    model: str
    word: Word
    sentence: str
    estimate: Estimate  # the deciding number
    number: int = 0  # number of the rule
    why: str = ""  # reason for the outcome, starting with the rule's number
    points: tuple[Point, ...] = ()  # numbers of the small figure; empty if nothing was judged


@dataclass(frozen=True)
class Clause:
    """One condition of a rule with its outcome and a text that explains it."""

    word: Word
    text: str


@dataclass(frozen=True)
class Finding:
    """The outcome of a rule before the check that the unmodified model retrieves well enough (`verdicts._tested`)."""

    word: Word
    why: str
    sentence: str
    estimate: Estimate = NOTHING
    points: tuple[Point, ...] = ()


def side(estimate: Estimate, line: float, bound: Bound) -> Word:
    """Compare an interval to a threshold: supported if all of it is on the claim's side, inconclusive if it straddles."""
    if estimate.n == 0 or estimate.value != estimate.value:
        return "inconclusive"
    low, high = estimate.low, estimate.high
    if bound == "at least":
        return "supported" if low >= line else "not supported" if high < line else "inconclusive"
    if bound == "below":
        return "supported" if high < line else "not supported" if low >= line else "inconclusive"
    return "supported" if high <= line else "not supported" if low > line else "inconclusive"


def held(estimate: Estimate, line: float, bound: Bound, what: str) -> Clause:
    """Compare an estimate to a threshold and say so: `no heads find 0 % [0, 1.2; n = 315], at most 5 % allowed`."""
    allowed = "needed" if bound == "at least" else "allowed"
    return Clause(side(estimate, line, bound), f"{what} {share(estimate)}, {bound} {percent(line)} {allowed}")


def share(e: Estimate) -> str:
    """Format a share with its interval: `98.5 % [91.2, 100; n = 68]`."""
    if e.value != e.value:
        return f"no known share ({e.why or 'not measured'}; n = {e.n:,})"
    return f"{percent(e.value)} {_bounds(e)}"


def share_of(e: Estimate, what: str) -> str:
    """Format a share of something with its interval: `98.5 % of the needles [91.2, 100; n = 68]`."""
    if e.why and e.value != e.value:
        return f"no known share of {what} ({e.why}; n = {e.n:,})"
    return f"{percent(e.value)} of {what} {_bounds(e)}"


def _bounds(e: Estimate) -> str:
    """Format an interval, or the reason why there is none: `[91.2, 100; n = 68]`."""
    bounds = e.why or f"{percent(e.low, '')}, {percent(e.high, '')}"
    return f"[{bounds}; n = {e.n:,}]"


def worst(clauses: Sequence[Clause]) -> Word:
    """Return the outcome of all conditions together: that of the least favourable one."""
    order: tuple[Word, ...] = ("not supported", "inconclusive", "supported")
    return min((clause.word for clause in clauses), key=order.index)


def because(clauses: Sequence[Clause]) -> str:
    """Return the texts of the deciding conditions: those with the overall outcome."""
    return "; ".join(clause.text for clause in clauses if clause.word == worst(clauses))


def points(*given: Point) -> tuple[Point, ...]:
    """Return the points that have a value."""
    return tuple(point for point in given if point.estimate.n and point.estimate.value == point.estimate.value)


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
        kept = self.suffices
        asked = kept or max(self.points, default=0)
        words = f"{kept} of {heads} suffice" if kept else f"no number up to {asked} of {heads} was seen to suffice"
        sink = self.sinks.get(asked, math.nan)
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


LOST = 0.05  # retrieval counts as lost if the upper bound of its accuracy is at most this
MORE_THAN_CHANCE = 0.05  # information is left if the lower bound of (forced choice - chance) is above this
NEAR_CHANCE = 0.10  # no information is left if the upper bound of (forced choice - chance) is at most this
HALF = 0.5
LAYOUTS = {"jrt": "reading twice", "question_first": "the question first"}
NOT_RUN = Finding("not run", "not run", "This was not run.")


def _lost(silenced: Silenced, where: str) -> tuple[list[Clause], str]:
    """Return the conditions for lost retrieval, and a sentence: no exact answers, and forced choice at chance."""
    clauses = [held(silenced.exact, LOST, "at most", f"{where} it finds")]
    sentence = f"{where[:1].upper()}{where[1:]}, it finds {share_of(silenced.exact, 'the needles')}"
    least = power.none_of(LOST)
    if silenced.exact.n < least:
        sentence += f" (0 of n bounds it below {percent(LOST)} only from n = {least})"
    if silenced.choice.n == 0:
        clauses.append(Clause("inconclusive", f"{where} no forced choice was run"))
        return clauses, sentence + "; forced choice was not run, so lost information is not shown"
    sentence += f"; forced choice is right {share_of(silenced.choice, 'the time')}, chance {percent(silenced.chance)}"
    if silenced.above_chance.high < 0:
        sentence += " (wholly below chance, which would be information, too)"
    return [*clauses, _no_information(silenced, where)], sentence


def _no_information(silenced: Silenced, where: str) -> Clause:
    """Check that forced choice is not above chance (one-sided)."""
    e = silenced.above_chance
    bounds = f"[{percent(e.low, '')}, {percent(e.high, '')}; n = {e.n:,}]"
    text = f"{where} forced choice is {percent(e.value, '')} points from chance {bounds}"
    if e.low > MORE_THAN_CHANCE:
        return Clause("not supported", f"{text}, a lower bound of at most {percent(MORE_THAN_CHANCE, '')} allowed")
    word = side(e, NEAR_CHANCE, "at most")
    # Not above MORE_THAN_CHANCE: a wide interval alone does not show that information is left, so never "not supported".
    return Clause("supported" if word == "supported" else "inconclusive", f"{text}, at most {percent(NEAR_CHANCE, '')} allowed")


def _silenced_points(silenced: Silenced, where: str) -> tuple[Point, ...]:
    return points(
        Point(where, silenced.exact, LOST, "at most"),
        Point(f"{where}, forced choice", silenced.choice, silenced.chance, "chance"),
    )


def segregation(e: Evidence) -> Finding:
    """Judge whether retrieval is lost with all heads zeroed."""
    if e.silenced.exact.n == 0:
        return NOT_RUN
    clauses, sentence = _lost(e.silenced, "without heads")
    untouched = Point("untouched", e.baselines.get("segregation", e.baseline), judged=False)
    shown = (*points(untouched), *_silenced_points(e.silenced, "no heads"))
    return Finding(worst(clauses), because(clauses), sentence + ".", e.silenced.exact, shown)


def few(e: Evidence) -> Finding:
    """Judge whether about 15 % of the heads retain retrieval."""
    if e.few.n == 0:
        return NOT_RUN
    first, kept = e.curves[0], f"{e.few_kept} of {e.heads} heads"
    label = f"{kept} ({percent(e.few_kept / e.heads)})" if e.heads else kept
    sentence = f"With {label} per layer, {first.label}, it keeps {share_of(e.few, 'its retrieval')}"
    knowledge = [
        f"{share_of(k.raw, f'its knowledge asked as {k.form}')} (corrected for chance {percent(k.corrected.value)})"
        for k in e.few_knowledge
    ]
    sentence += f"; {', '.join(knowledge)}." if knowledge else "; knowledge was not asked under it."
    sentence += "".join(f" {curve.sentence(e.heads)}" for curve in e.curves)
    clause = held(e.few, KEPT, "at least", f"{label} keep")
    shown = points(
        *(Point(f"{kept} {curve.label}", curve.at(e.few_kept), KEPT, "at least", curve is first) for curve in e.curves)
    )
    return Finding(clause.word, clause.text, sentence, e.few, shown)


def no_rescue(e: Evidence) -> Finding:
    """Judge whether retrieval stays lost with other prompt layouts; needs a model that repeating the prompt does help."""
    if not e.layouts:
        return NOT_RUN
    clauses: list[Clause] = []
    sentences: list[str] = []
    shown: list[Point] = []
    for layout, silenced in e.layouts.items():
        name = LAYOUTS.get(layout, layout)
        asked, sentence = _lost(silenced, f"with {name} and without heads")
        untouched = e.layouts_untouched.get(layout)
        clauses += asked
        sentences.append(sentence + (f"; untouched, it finds {share_of(untouched, 'them')}." if untouched else "."))
        shown += _silenced_points(silenced, f"{name}, no heads")
    first = next(iter(e.layouts.values())).exact
    for name in (name for layout, name in LAYOUTS.items() if layout not in e.layouts):
        clauses.append(Clause("inconclusive", f"{name} was not run"))
        sentences.append(f"Not run: {name}.")
    if e.reading_twice_helps:
        sentences.append(f"Reading twice does help {e.reading_twice_helps}, so the prompt can work.")
    else:
        clauses.append(Clause("inconclusive", "reading twice helps no model here by more than 10 points"))
        sentences.append("Reading twice helped no model here, so that it fails without heads says little.")
    return Finding(worst(clauses), because(clauses), " ".join(sentences), first, tuple(shown))


def exposure(e: Evidence) -> Finding:
    """Judge whether retrieval is lost with the needle masked in decode."""
    if e.omit_decode.n == 0:
        return NOT_RUN
    sentence = f"With the needle hidden from attention while answering, it finds {share_of(e.omit_decode, 'the needles')}"
    if e.omit_prefill.n:
        sentence += f"; hidden only while reading, it keeps {share_of(e.omit_prefill, 'its retrieval')}"
    clause = held(e.omit_decode, LOST, "at most", "with the needle hidden while answering it finds")
    shown = points(
        Point("needle hidden while answering", e.omit_decode, LOST, "at most"),
        Point("needle hidden while reading", e.omit_prefill, judged=False),
    )
    return Finding(clause.word, clause.text, sentence + ".", e.omit_decode, shown)


def context(e: Evidence) -> Finding:
    """Judge whether retrieval survives without context in one phase (prefill or decode), but not without it in both."""
    c = e.context
    parts: list[tuple[str, Estimate, float, Bound]] = [
        ("heads off while reading", c.reading, KEPT, "at least"),
        ("only the needle in sight while answering", c.answering, KEPT, "at least"),
        ("both at once", c.together, HALF, "below"),
    ]
    run = [part for part in parts if part[1].n]
    if not run:
        return replace(NOT_RUN, sentence=_limits(e)) if c.limits else NOT_RUN
    clauses = [held(share_, line, bound, f"{name} it keeps") for name, share_, line, bound in run]
    clauses += [Clause("inconclusive", f"{name} was not run") for name, share_, *_ in parts if not share_.n]
    sentence = "; ".join(f"with {name}, it keeps {share_of(share_, 'its retrieval')}" for name, share_, *_ in run)
    missing = [name for name, share_, *_ in parts if not share_.n]
    sentence = f"{sentence[:1].upper()}{sentence[1:]}." + (f" Not run: {', '.join(missing)}." if missing else "")
    shown = points(*(Point(name, share_, line, bound) for name, share_, line, bound in run))
    decided = c.together if c.together.n else run[0][1]
    return Finding(worst(clauses), because(clauses), f"{sentence} {_limits(e)}".rstrip(), decided, shown)


def _limits(e: Evidence) -> str:
    """Return a sentence on the smallest context limit that reaches 95 % accuracy (point estimate, not lower bound)."""
    limits = e.context.limits
    if not limits:
        return ""
    enough = next(((n, found) for n, found in limits if found.value >= KEPT), None)
    if enough is None:
        n, best = max(limits, key=lambda pair: pair[1].value)
        found = share_of(best, "the needles")
        return f"No limit tried reaches {percent(KEPT)}: at best, with {n} tokens in sight, it finds {found}."
    tokens, least = limits[0]
    sentence = (
        f"{enough[0]} tokens in sight while reading are the fewest that suffice: it finds {share_of(enough[1], 'the needles')}"
    )
    sentence += f"; with {tokens} tokens {share_of(least, 'them')}." if enough[0] != tokens else ". Fewer were not tried."
    if few := next((n for n, found in e.context.limits_both if found.value >= KEPT), None):
        sentence += f" Limited while answering, too, {few} tokens are needed."
    return sentence


def dissociation(e: Evidence) -> Finding:
    """Judge the interaction of ablated side (attention, recurrent) and ability (retrieval, knowledge)."""
    if e.interaction is None:
        return NOT_RUN
    contrast = e.interaction.contrast
    word: Word = "supported" if contrast.low > 0 else "not supported" if contrast.high < 0 else "inconclusive"
    left = ", ".join(f"{label} {share(found)}" for label, found in e.dissociation)
    sentence = f"What is left, corrected for chance: {left}. The interaction is {contrast.text('')}."
    if word == "supported":
        one_sided = " It is one-sided: not both effects point their own way, so this is no crossed dissociation."
        sentence += " Both effects point their own way." if e.interaction.crossed else one_sided
    why = f"the interaction is {contrast.text('')}, above 0 needed"
    return Finding(word, why, sentence, contrast, points(*(Point(label, found) for label, found in e.dissociation)))


def memory(e: Evidence) -> Finding:
    """Judge whether answers follow the KV cache when it disagrees with the recurrent state."""
    if e.follows_kv.n == 0:
        return NOT_RUN
    sentence = f"When the two halves of its memory disagree, {share_of(e.follows_kv, 'the answers')} follow the KV cache."
    if e.follows_kv_outside.n:
        out = share_of(e.follows_kv_outside, "those answers")
        sentence += f" Needles out of the window do not count here: {out} follow it."
    clause = held(e.follows_kv, HALF, "at least", "answers follow the KV cache in")
    shown = points(Point("follow the KV cache", e.follows_kv, HALF, "at least"))
    return Finding(clause.word, clause.text, sentence, e.follows_kv, shown)
