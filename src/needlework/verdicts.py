"""The paper's claims, and when the evidence of one model supports them: one table (`RULES`), one function (`judge`).

The rules were fixed before any run. Supported: the whole interval lies on the claim's side of the line. Not supported: it
lies on the other side. Inconclusive: it holds the line, or something that the rule needs was not measured. Not testable: the
untouched model does not retrieve well enough to lose anything, or the experiment was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from needlework.stats import NOTHING, Estimate, Interaction, percent

Word = Literal["supported", "not supported", "inconclusive", "not testable"]

BASELINE = 0.80  # lower bound of the untouched model's retrieval
LOST = 0.05  # upper bound of what may be left
NEAR_CHANCE = 0.05
KEPT = 0.95
ENOUGH = 73  # 0 of n has an upper Wilson bound of 5 % from here on


@dataclass(frozen=True)
class Silenced:
    """Retrieval with all attention heads silenced at every position."""

    exact: Estimate = NOTHING
    choice: Estimate = NOTHING  # forced choice
    chance: float = 0.0


@dataclass(frozen=True)
class Kept:
    """Knowledge under an intervention: what is left of the baseline, raw and corrected for chance."""

    form: str  # cloze | letter
    raw: Estimate
    corrected: Estimate


@dataclass(frozen=True)
class Evidence:
    """The numbers of one model that the rules read. What was not measured stays NOTHING, None or empty."""

    model: str
    note: str = ""  # said with every verdict: under which boundary, if it is not the usual one
    baseline: Estimate = NOTHING
    baselines: Mapping[str, Estimate] = field(default_factory=dict)  # by claim: of the very tasks that it is judged by
    tasks: Mapping[str, str] = field(default_factory=dict)  # by claim: the names of these tasks, where they need mention
    silenced: Silenced = Silenced()
    few: Estimate = NOTHING  # paired retained share of retrieval with 15 % of the heads at every position
    few_label: str = ""
    few_knowledge: Sequence[Kept] = ()
    layouts: Mapping[str, Silenced] = field(default_factory=dict)  # jrt, question_first: attention silenced
    reading_twice_helps: str = ""  # a model that reading twice does help; empty: none was seen
    omit_decode: Estimate = NOTHING
    omit_prefill: Estimate = NOTHING  # paired retained share
    context: Sequence[tuple[int, Estimate]] = ()  # tokens of context in prefill, retrieval
    context_both: Sequence[tuple[int, Estimate]] = ()  # the same with decode limited, too
    interaction: Interaction | None = None
    dissociation: str = ""  # the four shares, in words
    follows_kv: Estimate = NOTHING  # needles inside the window
    follows_kv_outside: Estimate = NOTHING
    has_attention: bool = True
    has_recurrence: bool = True


@dataclass(frozen=True)
class Verdict:
    claim: str
    title: str
    model: str
    word: Word
    sentence: str
    estimate: Estimate  # the number that decided, with n and interval


@dataclass(frozen=True)
class Rule:
    claim: str
    title: str
    says: str  # the claim
    rule: str  # when it counts as supported
    of: Callable[[Evidence], tuple[Word, str, Estimate]]


def side(estimate: Estimate, line: float, below: bool) -> Word:
    """Where the interval lies: wholly on the claim's side, wholly on the other, or across the line."""
    if estimate.n == 0 or estimate.value != estimate.value:
        return "inconclusive"
    if below:
        return "supported" if estimate.high <= line else "not supported" if estimate.low > line else "inconclusive"
    return "supported" if estimate.low >= line else "not supported" if estimate.high < line else "inconclusive"


def _of(e: Estimate, what: str) -> str:
    """`98.5 % of the needles [91.2, 100; n = 68]`"""
    if e.why:
        return f"no known share of {what} ({e.why}; n = {e.n:,})"
    return f"{percent(e.value)} of {what} [{percent(e.low, '')}, {percent(e.high, '')}; n = {e.n:,}]"


def _worse(words: Sequence[Word]) -> Word:
    order: tuple[Word, ...] = ("not testable", "not supported", "inconclusive", "supported")
    return min(words, key=order.index)


def _lost(silenced: Silenced, where: str) -> tuple[Word, str]:
    """Retrieval is gone: nothing exact is left, and the right value is no likelier than the others."""
    words = [side(silenced.exact, LOST, below=True)]
    sentence = f"{where}, it finds {_of(silenced.exact, 'the needles')}"
    if silenced.exact.n < ENOUGH:
        sentence += f" (0 of n bounds it below 5 % only from n = {ENOUGH})"
    if silenced.choice.n == 0:
        return _worse([*words, "inconclusive"]), sentence + "; forced choice was not run, so lost information is not shown"
    sentence += f"; forced choice is right {_of(silenced.choice, 'the time')}, chance {percent(silenced.chance)}"
    near = abs(silenced.choice.value - silenced.chance) <= NEAR_CHANCE
    apart = silenced.choice.low > silenced.chance + NEAR_CHANCE or silenced.choice.high < silenced.chance - NEAR_CHANCE
    words.append("supported" if near else "not supported" if apart else "inconclusive")
    return _worse(words), sentence


def _segregation(e: Evidence) -> tuple[Word, str, Estimate]:
    if e.silenced.exact.n == 0:
        return _not_run(e, e.has_attention, "attention heads")
    word, sentence = _lost(e.silenced, "With every attention head silenced")
    return word, sentence + ".", e.silenced.exact


def _few(e: Evidence) -> tuple[Word, str, Estimate]:
    if e.few.n == 0:
        return _not_run(e, e.has_attention, "attention heads")
    sentence = f"With {e.few_label}, it keeps {_of(e.few, 'its retrieval')}"
    kept = [
        f"{_of(k.raw, f'its knowledge asked as {k.form}')} (corrected for chance {percent(k.corrected.value)})"
        for k in e.few_knowledge
    ]
    sentence += f"; {', '.join(kept)}" if kept else "; knowledge was not asked under it"
    return side(e.few, KEPT, below=False), sentence + ".", e.few


def _no_rescue(e: Evidence) -> tuple[Word, str, Estimate]:
    if not e.layouts:
        return _not_run(e, e.has_attention, "attention heads")
    names = {"jrt": "Reading twice", "question_first": "With the question first"}
    parts = [_lost(silenced, f"{names.get(layout, layout)} and without heads") for layout, silenced in e.layouts.items()]
    word = _worse([word for word, _ in parts])
    sentence = ". ".join(part for _, part in parts) + "."
    first = next(iter(e.layouts.values())).exact
    if missing := [names[layout].lower() for layout in names if layout not in e.layouts]:
        word, sentence = _worse([word, "inconclusive"]), sentence + f" Not run: {', '.join(missing)}."
    if e.reading_twice_helps:
        return word, sentence + f" Reading twice does help {e.reading_twice_helps}, so the prompt can work.", first
    if word == "supported":
        word = "inconclusive"
    return word, sentence + " Reading twice helped no model here, so that it fails without heads says little.", first


def _exposure(e: Evidence) -> tuple[Word, str, Estimate]:
    if e.omit_decode.n == 0:
        return _not_run(e, e.has_attention, "attention heads")
    sentence = f"With the needle hidden from attention while answering, it finds {_of(e.omit_decode, 'the needles')}"
    if e.omit_prefill.n:
        sentence += f"; hidden only while reading, it keeps {_of(e.omit_prefill, 'its retrieval')}"
    return side(e.omit_decode, LOST, below=True), sentence + ".", e.omit_decode


def _context(e: Evidence) -> tuple[Word, str, Estimate]:
    if not e.context:
        return _not_run(e, e.has_attention, "attention heads")
    tokens, least = e.context[0]
    enough = next(((n, share) for n, share in e.context if share.value >= KEPT), None)
    if enough is None:
        n, best = max(e.context, key=lambda pair: pair[1].value)
        sentence = f"No limit tried reaches 95 %: at best, with {n} tokens in sight, it finds {_of(best, 'the needles')}."
        return "inconclusive", sentence, best
    sentence = f"{enough[0]} tokens in sight while reading are the fewest that suffice: it finds {_of(enough[1], 'the needles')}"
    sentence += f"; with {tokens} tokens {_of(least, 'them')}." if enough[0] != tokens else ". Fewer were not tried."
    if few := next((n for n, share in e.context_both if share.value >= KEPT), None):
        sentence += f" Limited while answering, too, {few} tokens are needed."
    word: Word = "not supported" if least.low >= KEPT else "supported" if least.high < KEPT else "inconclusive"
    return word, sentence, enough[1]


def _dissociation(e: Evidence) -> tuple[Word, str, Estimate]:
    if e.interaction is None:
        return _not_run(e, e.has_attention and e.has_recurrence, "attention and recurrent layers")
    contrast = e.interaction.contrast
    word: Word = "supported" if contrast.low > 0 else "not supported" if contrast.high < 0 else "inconclusive"
    sentence = f"{e.dissociation} The interaction is {contrast.text('')}."
    if word == "supported":
        one_sided = " It is one-sided: not both effects point their own way, so this is no crossed dissociation."
        sentence += " Both effects point their own way." if e.interaction.crossed else one_sided
    return word, sentence, contrast


def _memory(e: Evidence) -> tuple[Word, str, Estimate]:
    if e.follows_kv.n == 0:
        return _not_run(e, e.has_attention and e.has_recurrence, "both kinds of memory")
    sentence = f"When the two halves of its memory disagree, {_of(e.follows_kv, 'the answers')} follow the KV cache."
    if e.follows_kv_outside.n:
        sentence += f" Needles out of the window do not count here: {_of(e.follows_kv_outside, 'those answers')} follow it."
    return side(e.follows_kv, 0.5, below=False), sentence, e.follows_kv


def _not_run(e: Evidence, possible: bool, parts: str) -> tuple[Word, str, Estimate]:
    return "not testable", "This was not run." if possible else f"This model does not have {parts}.", NOTHING


RULES: tuple[Rule, ...] = (
    Rule(
        "segregation",
        "Attention does the retrieving",
        "Without attention heads retrieval is lost.",
        "upper bound of retrieval at k = 0 at most 5 %, and forced choice within 5 points of chance",
        _segregation,
    ),
    Rule(
        "few_heads",
        "Few heads suffice",
        "About 15 % of the heads keep retrieval near perfect.",
        "lower bound of the paired retained share at 15 % of the heads at least 95 %; knowledge is given beside it",
        _few,
    ),
    Rule(
        "no_rescue",
        "Prompting does not rescue it",
        "Reading twice, or the question first, does not bring retrieval back.",
        "the rule of segregation under both layouts; inconclusive if reading twice helps no model that saw such documents",
        _no_rescue,
    ),
    Rule(
        "exposure",
        "The needle must be in sight",
        "Attention must see the needle while answering.",
        "needle omitted in decode: upper bound at most 5 %; omitted in prefill only: retained share is given beside it",
        _exposure,
    ),
    Rule(
        "context",
        "Enough context",
        "Retrieval needs enough context during prefill, even with the needle in sight.",
        "some limit reaches 95 %, and at the smallest limit tried the upper bound is below 95 %",
        _context,
    ),
    Rule(
        "double_dissociation",
        "Two systems",
        "Attention serves retrieval, the recurrent side serves knowledge.",
        "interaction of (attention off, recurrent off) x (retrieval, knowledge): the interval lies above 0",
        _dissociation,
    ),
    Rule(
        "memory",
        "The KV cache holds the needle",
        "Answers follow the KV half of the memory.",
        "lower bound of the share that follows the KV half at least 50 %",
        _memory,
    ),
)


def _asides(evidence: Evidence, claim: str) -> list[str]:
    """What the numbers of a verdict stand on, where that is not what everybody expects."""
    names = evidence.tasks.get(claim, "")
    return [f"Tasks: {names}."] * bool(names) + [f"{evidence.note.capitalize()}."] * bool(evidence.note)


def judge(evidence: Evidence) -> list[Verdict]:
    """One verdict per rule for one model."""
    verdicts = []
    for rule in RULES:
        word, sentence, estimate = rule.of(evidence)
        baseline = evidence.baselines.get(rule.claim, evidence.baseline)
        if estimate.n and side(baseline, BASELINE, below=False) != "supported":
            word = "not testable"
            sentence += f" But untouched it finds {_of(baseline, 'the needles')}: the lower bound must be 80 %."
        if estimate.n:
            sentence += "".join(f" ({aside})" for aside in _asides(evidence, rule.claim))
        verdicts.append(Verdict(rule.claim, rule.title, evidence.model, word, sentence, estimate))
    return verdicts
