"""Judge the paper's claims on the evidence of one model: a table of rules (`RULES`), and one function for each.

Supported: the whole 95 % interval is on the claim's side of the threshold. Not supported: all of it is on the other side.
Inconclusive: it contains the threshold, or something that the rule needs was not measured. Three outcomes mean that nothing
was judged: *not run*, *does not apply* (the model has no such layers) and *not testable* (the unmodified model does not
retrieve well enough to lose anything).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from needlework.analysis import power
from needlework.analysis.evidence import KEPT, Evidence, Silenced, collect, helped_by_reading_twice
from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import by_boundary
from needlework.files import package_yaml
from needlework.stats import NOTHING, Estimate, percent

RULES_VERSION = 2
BASELINE = 0.80  # claims are testable if the lower bound of baseline retrieval is at least this
LOST = 0.05  # retrieval counts as lost if the upper bound of its accuracy is at most this
MORE_THAN_CHANCE = 0.05  # information is left if the lower bound of (forced choice - chance) is above this
NEAR_CHANCE = 0.10  # no information is left if the upper bound of (forced choice - chance) is at most this
HALF = 0.5
LAYOUTS = {"jrt": "reading twice", "question_first": "the question first"}
Word = Literal["supported", "not supported", "inconclusive", "not testable", "not run", "does not apply"]
Bound = Literal["at most", "below", "at least", "chance", ""]


@dataclass(frozen=True)
class VerdictPoint:
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
    points: tuple[VerdictPoint, ...] = ()  # numbers of the small figure; empty if nothing was judged
    reason: str = ""  # unless supported, in a few words: the part that failed, was not run or has too few samples

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome, its deciding number and its reason as JSON values."""
        names = ("number", "claim", "title", "model", "word", "sentence", "reason", "why")
        return {**{name: getattr(self, name) for name in names}, "estimate": self.estimate.to_dict()}


@dataclass(frozen=True)
class Clause:
    """One condition of a rule with its outcome and a text that explains it."""

    word: Word
    text: str
    reason: str = ""  # the same in a few words, without numbers; the text by default
    n: int = 0  # samples, if more of them may change the outcome


@dataclass(frozen=True)
class Finding:
    """The outcome of a rule before the check that the unmodified model retrieves well enough (`_tested`)."""

    word: Word
    why: str
    sentence: str
    estimate: Estimate = NOTHING
    points: tuple[VerdictPoint, ...] = ()
    decisive: tuple[Clause, ...] = ()  # the conditions that gave the outcome

    def reason(self, needed: int) -> str:
        """Return why the claim is not supported, in a few words: parts that failed or were not run, or too few samples."""
        if self.word == "supported":
            return ""
        few = [c for c in self.decisive if c.word == "inconclusive" and 0 < c.n < needed]
        told = [f"too few samples ({min(c.n for c in few):,} of {needed:,})"] if few else []
        return "; ".join([*told, *(clause.reason or clause.text for clause in self.decisive if clause not in few)])


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
    allowed, word = "needed" if bound == "at least" else "allowed", side(estimate, line, bound)
    reason = f"{what} {'less' if bound == 'at least' else 'more'} than {percent(line)}"
    if word == "inconclusive":
        reason = f"{what} a share whose interval contains {percent(line)}" if not estimate.why else f"{what} {estimate.why}"
    return Clause(word, f"{what} {share(estimate)}, {bound} {percent(line)} {allowed}", reason, estimate.n)


def share(e: Estimate, what: str = "") -> str:
    """Format a share (of something) with its interval: `98.5 % of the needles [91.2, 100; n = 68]`."""
    of = f" of {what}" if what else ""
    if e.value != e.value:
        return f"no known share{of} ({e.why or 'not measured'}; n = {e.n:,})"
    interval = e.why or f"{percent(e.low, '')}, {percent(e.high, '')}"
    return f"{percent(e.value)}{of} [{interval}; n = {e.n:,}]"


def conclude(clauses: Sequence[Clause], sentence: str, estimate: Estimate, *points: VerdictPoint) -> Finding:
    """Return the outcome of all conditions together, that of the least favourable ones, and the points that have a value."""
    order: tuple[Word, ...] = ("not supported", "inconclusive", "supported")
    word = min((clause.word for clause in clauses), key=order.index)
    decisive = tuple(clause for clause in clauses if clause.word == word)
    shown = tuple(point for point in points if point.estimate.n and point.estimate.value == point.estimate.value)
    return Finding(word, "; ".join(clause.text for clause in decisive), sentence, estimate, shown, decisive)


NOT_RUN = Finding("not run", "not run", "This was not run.")


def _lost(silenced: Silenced, where: str) -> tuple[list[Clause], str]:
    """Return the conditions for lost retrieval, and a sentence: no exact answers, and forced choice at chance."""
    clauses = [held(silenced.exact, LOST, "at most", f"{where} it finds")]
    sentence = f"{where[:1].upper()}{where[1:]}, it finds {share(silenced.exact, 'the needles')}"
    least = power.none_of(LOST)
    if silenced.exact.n < least:
        sentence += f" (0 of n bounds it below {percent(LOST)} only from n = {least})"
    if silenced.choice.n == 0:
        clauses.append(Clause("inconclusive", f"{where} no forced choice was run"))
        return clauses, sentence + "; forced choice was not run, so lost information is not shown"
    sentence += f"; forced choice is right {share(silenced.choice, 'the time')}, chance {percent(silenced.chance)}"
    if silenced.above_chance.high < 0:
        sentence += " (wholly below chance, which would be information, too)"
    e = silenced.above_chance
    bounds = f"[{percent(e.low, '')}, {percent(e.high, '')}; n = {e.n:,}]"
    text = f"{where} forced choice is {percent(e.value, '')} points from chance {bounds}"
    if e.low > MORE_THAN_CHANCE:
        above = f"{where} forced choice is above chance"
        lost = Clause("not supported", f"{text}, a lower bound of at most {percent(MORE_THAN_CHANCE, '')} allowed", above)
    else:  # a wide interval alone does not show that information is left, so this is never "not supported"
        word: Word = "supported" if side(e, NEAR_CHANCE, "at most") == "supported" else "inconclusive"
        near = f"{where} forced choice may be above chance"
        lost = Clause(word, f"{text}, at most {percent(NEAR_CHANCE, '')} allowed", near, e.n)
    return [*clauses, lost], sentence


def _silenced_points(silenced: Silenced, where: str) -> tuple[VerdictPoint, ...]:
    choice = VerdictPoint(f"{where}, forced choice", silenced.choice, silenced.chance, "chance")
    return VerdictPoint(where, silenced.exact, LOST, "at most"), choice


def judge_segregation(e: Evidence) -> Finding:
    """Judge whether retrieval is lost with all heads zeroed."""
    if e.silenced.exact.n == 0:
        return NOT_RUN
    clauses, sentence = _lost(e.silenced, "without heads")
    untouched = VerdictPoint("untouched", e.baselines.get("segregation", e.baseline), judged=False)
    return conclude(clauses, sentence + ".", e.silenced.exact, untouched, *_silenced_points(e.silenced, "no heads"))


def judge_few(e: Evidence) -> Finding:
    """Judge whether about 15 % of the heads retain retrieval."""
    if e.few.n == 0:
        return NOT_RUN
    first, kept = e.curves[0], f"{e.few_kept} of {e.heads} heads"
    label = f"{kept} ({percent(e.few_kept / e.heads)})" if e.heads else kept
    sentence = f"With {label} per layer, {first.label}, it keeps {share(e.few, 'its retrieval')}"
    knowledge = [
        f"{share(k.raw, f'its knowledge asked as {k.form}')} (corrected for chance {percent(k.corrected.value)})"
        for k in e.few_knowledge
    ]
    sentence += f"; {', '.join(knowledge)}." if knowledge else "; knowledge was not asked under it."
    sentence += "".join(f" {curve.sentence(e.heads)}" for curve in e.curves)
    clause = held(e.few, KEPT, "at least", f"{label} keep")
    shown = (VerdictPoint(f"{kept} {c.label}", c.at(e.few_kept), KEPT, "at least", c is first) for c in e.curves)
    return conclude([clause], sentence, e.few, *shown)


def judge_no_rescue(e: Evidence) -> Finding:
    """Judge whether retrieval stays lost with other prompt layouts; needs a model that repeating the prompt does help."""
    if not e.layouts:
        return NOT_RUN
    clauses: list[Clause] = []
    sentences: list[str] = []
    shown: list[VerdictPoint] = []
    for layout, silenced in e.layouts.items():
        name = LAYOUTS.get(layout, layout)
        asked, sentence = _lost(silenced, f"with {name} and without heads")
        untouched = e.layouts_untouched.get(layout)
        clauses += asked
        sentences.append(sentence + (f"; untouched, it finds {share(untouched, 'them')}." if untouched else "."))
        shown += _silenced_points(silenced, f"{name.removeprefix('the ')}, no heads")
    first = next(iter(e.layouts.values())).exact
    for name in (name for layout, name in LAYOUTS.items() if layout not in e.layouts):
        clauses.append(Clause("inconclusive", f"{name} was not run"))
        sentences.append(f"Not run: {name}.")
    if e.reading_twice_helps:
        sentences.append(f"Reading twice does help {e.reading_twice_helps}, so the prompt can work.")
    else:
        clauses.append(Clause("inconclusive", "reading twice helps no model here by more than 10 points"))
        sentences.append("Reading twice helped no model here, so that it fails without heads says little.")
    return conclude(clauses, " ".join(sentences), first, *shown)


def judge_exposure(e: Evidence) -> Finding:
    """Judge whether retrieval is lost with the needle masked in decode."""
    if e.omit_decode.n == 0:
        return NOT_RUN
    sentence = f"With the needle hidden from attention while answering, it finds {share(e.omit_decode, 'the needles')}"
    if e.omit_prefill.n:
        sentence += f"; hidden only while reading, it keeps {share(e.omit_prefill, 'its retrieval')}"
    clause = held(e.omit_decode, LOST, "at most", "with the needle hidden while answering it finds")
    answering = VerdictPoint("needle hidden while answering", e.omit_decode, LOST, "at most")
    reading = VerdictPoint("needle hidden while reading", e.omit_prefill, judged=False)
    return conclude([clause], sentence + ".", e.omit_decode, answering, reading)


def judge_context(e: Evidence) -> Finding:
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
    clauses = [held(found, line, bound, f"{name} it keeps") for name, found, line, bound in run]
    missing = [name for name, found, *_ in parts if not found.n]
    clauses += [Clause("inconclusive", f"{name} was not run") for name in missing]
    sentence = "; ".join(f"with {name}, it keeps {share(found, 'its retrieval')}" for name, found, *_ in run)
    sentence = f"{sentence[:1].upper()}{sentence[1:]}." + (f" Not run: {', '.join(missing)}." if missing else "")
    shown = (VerdictPoint(*part) for part in run)
    decided = c.together if c.together.n else run[0][1]
    return conclude(clauses, f"{sentence} {_limits(e)}".rstrip(), decided, *shown)


def _limits(e: Evidence) -> str:
    """Return a sentence on the smallest context limit that reaches 95 % accuracy (point estimate, not lower bound)."""
    limits = e.context.limits
    if not limits:
        return ""
    enough = next(((n, found) for n, found in limits if found.value >= KEPT), None)
    if enough is None:
        n, best = max(limits, key=lambda pair: pair[1].value)
        found = share(best, "the needles")
        return f"No limit tried reaches {percent(KEPT)}: at best, with {n} tokens in sight, it finds {found}."
    tokens, least = limits[0]
    sentence = (
        f"{enough[0]} tokens in sight while reading are the fewest that suffice: it finds {share(enough[1], 'the needles')}"
    )
    sentence += f"; with {tokens} tokens {share(least, 'them')}." if enough[0] != tokens else ". Fewer were not tried."
    if few := next((n for n, found in e.context.limits_both if found.value >= KEPT), None):
        sentence += f" Limited while answering, too, {few} tokens are needed."
    return sentence


def judge_dissociation(e: Evidence) -> Finding:
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
    reason = "the interaction is below 0" if word == "not supported" else "the interval of the interaction contains 0"
    return conclude(
        [Clause(word, why, reason)], sentence, contrast, *(VerdictPoint(label, found) for label, found in e.dissociation)
    )


def judge_memory(e: Evidence) -> Finding:
    """Judge whether answers follow the KV cache when it disagrees with the recurrent state."""
    if e.follows_kv.n == 0:
        return NOT_RUN
    sentence = f"When the two halves of its memory disagree, {share(e.follows_kv, 'the answers')} follow the KV cache."
    if e.follows_kv_outside.n:
        out = share(e.follows_kv_outside, "those answers")
        sentence += f" Needles out of the window do not count here: {out} follow it."
    clause = held(e.follows_kv, HALF, "at least", "answers follow the KV cache in")
    return conclude([clause], sentence, e.follows_kv, VerdictPoint("follow the KV cache", e.follows_kv, HALF, "at least"))


@dataclass(frozen=True)
class Rule:
    """A claim of the paper and the function that judges it."""

    number: int
    claim: str  # identifier
    title: str
    says: str  # the claim
    rule: str  # when it counts as supported
    plan: str  # the shipped plan that runs its trials
    otherwise: str  # what is the case if it is not supported
    needs: power.Needs  # number of samples needed to decide
    of: Callable[[Evidence], Finding]
    parts: tuple[str, ...]  # kinds of layers without which the claim does not apply


_TEXTS: Mapping[str, Mapping[str, str]] = package_yaml(__file__, "claims.yaml")
_THRESHOLDS = {
    "lost": percent(LOST),
    "kept": percent(KEPT),
    "half": percent(HALF),
    "more_than_chance": percent(MORE_THAN_CHANCE, ""),
    "near_chance": percent(NEAR_CHANCE, ""),
}
_BOTH = ("attention", "recurrent")


def _rule(claim: str, needs: power.Needs, of: Callable[[Evidence], Finding], parts: tuple[str, ...] = ("attention",)) -> Rule:
    texts = {name: text.format(**_THRESHOLDS) for name, text in _TEXTS[claim].items()}
    return Rule(list(_TEXTS).index(claim) + 1, claim, **texts, needs=needs, of=of, parts=parts)


RULES = (
    _rule("segregation", power.at_chance(NEAR_CHANCE), judge_segregation),
    _rule("few_heads", power.whole(KEPT), judge_few),
    _rule("no_rescue", power.at_chance(NEAR_CHANCE, times=2), judge_no_rescue),
    _rule("exposure", power.Needs("truth is 0 %", lambda _: power.none_of(LOST)), judge_exposure),
    _rule("context", power.whole(KEPT, times=2), judge_context),
    _rule(
        "double_dissociation",
        power.Needs("not computed: it depends on four shares", lambda _: 0),
        judge_dissociation,
        _BOTH,
    ),
    _rule("memory", power.most(HALF), judge_memory, _BOTH),
)
RULES_NOTE = (
    f"Version {RULES_VERSION} of the rules. It was written after results of version 1 had been seen, so it is judged on fresh"
    f" seeds. {len(RULES)} claims are judged at once of each model, each by its own 95 % intervals; nothing is corrected for"
    " their number."
)


def _tested(rule: Rule, finding: Finding, baseline: Estimate) -> Finding:
    """Return the finding, changed to "not testable" or "not run" if baseline retrieval is too low or missing."""
    if finding.word == "not run":
        return finding
    unasked = " But the untouched model was not asked, so nothing can be said to be lost."
    if baseline.n == 0:
        return replace(finding, word="not run", why="the untouched model was not asked", sentence=finding.sentence + unasked)
    clause = held(baseline, BASELINE, "at least", "untouched it finds")
    if clause.word == "supported":
        return finding
    weak = f" But untouched it finds {share(baseline, 'the needles')}: the lower bound must be {percent(BASELINE)}."
    why = clause.text
    if clause.word == "inconclusive":  # the baseline's interval contains the threshold: more samples may help
        needed = _needed(rule, finding)
        few = "too few samples " + (f"({baseline.n:,} of {needed:,})" if needed else f"({baseline.n:,})")
        if baseline.n < (needed or math.inf):
            why, weak = f"{few}: {why}", f"{weak[:-1]}, and there are {few}."
    return replace(finding, word="not testable", why=why, sentence=finding.sentence + weak, decisive=(clause,))


def _needed(rule: Rule, finding: Finding) -> int:
    """Return the number of samples that a rule needs, at the chance level of the forced choice that was run."""
    return rule.needs(*[point.line for point in finding.points if point.bound == "chance" and point.line][:1])


def judge(evidence: Evidence) -> list[Verdict]:
    """Return one verdict per rule for one model."""
    has = {"attention": evidence.has_attention, "recurrent": evidence.has_recurrence}
    judged = []
    for rule in RULES:
        if missing := " and ".join(f"{part} layers" for part in rule.parts if not has[part]):
            found = Finding("does not apply", f"the model has no {missing}", f"This model has no {missing}.")
        else:
            found = _tested(rule, rule.of(evidence), evidence.baselines.get(rule.claim, evidence.baseline))
        sentence = found.sentence
        if found.estimate.n:  # the tasks and the boundary, where they are not the default
            asides = (f"Tasks: {names}" if (names := evidence.tasks.get(rule.claim)) else "", evidence.note.capitalize())
            sentence += "".join(f" ({aside}.)" for aside in asides if aside)
        about = (rule.claim, rule.title, evidence.model, found.word, sentence, found.estimate)
        judged.append(
            Verdict(*about, rule.number, f"rule {rule.number}: {found.why}", found.points, found.reason(_needed(rule, found)))
        )
    return judged


def verdicts(frame: Frame) -> list[Verdict]:
    """Judge every claim for every model, on the first boundary (decode before prefill) that has trials for it."""
    helps = helped_by_reading_twice(frame)
    chosen = []
    for model in frame.models:
        by_claim = zip(*(judge(collect(trials, helps)) for trials in by_boundary(frame, model)), strict=True)
        chosen += [next((v for v in of_claim if v.estimate.n), of_claim[0]) for of_claim in by_claim]
    return chosen
