"""What each rule finds in the evidence of one model: a word, why it fell so, a sentence, and the numbers of a small figure."""

from __future__ import annotations

from dataclasses import replace

from needlework.stats import Estimate, percent
from needlework.verdicts import samples
from needlework.verdicts.evidence import KEPT, Evidence, Silenced
from needlework.verdicts.words import Bound, Clause, Finding, Point, Word, because, held, points, share, share_of, side, worst

LOST = 0.05  # upper bound of what may be left
MORE_THAN_CHANCE = 0.05  # lower bound of forced choice minus chance: above it, information is left
NEAR_CHANCE = 0.10  # upper bound of forced choice minus chance: up to it, none is
HALF = 0.5
LAYOUTS = {"jrt": "reading twice", "question_first": "the question first"}
NOT_RUN = Finding("not run", "not run", "This was not run.")


def _lost(silenced: Silenced, where: str) -> tuple[list[Clause], str]:
    """Retrieval is gone: nothing exact is left, and the right value is no likelier than the others."""
    clauses = [held(silenced.exact, LOST, "at most", f"{where} it finds")]
    sentence = f"{where[:1].upper()}{where[1:]}, it finds {share_of(silenced.exact, 'the needles')}"
    least = samples.none_of(LOST)
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
    """One-sided: forced choice must not be better than chance."""
    e = silenced.above_chance
    bounds = f"[{percent(e.low, '')}, {percent(e.high, '')}; n = {e.n:,}]"
    text = f"{where} forced choice is {percent(e.value, '')} points from chance {bounds}"
    if e.low > MORE_THAN_CHANCE:
        return Clause("not supported", f"{text}, a lower bound of at most {percent(MORE_THAN_CHANCE, '')} allowed")
    word = side(e, NEAR_CHANCE, "at most")
    # A lower bound up to five points is no proof of information, however wide the interval is.
    return Clause("supported" if word == "supported" else "inconclusive", f"{text}, at most {percent(NEAR_CHANCE, '')} allowed")


def _silenced_points(silenced: Silenced, where: str) -> tuple[Point, ...]:
    return points(
        Point(where, silenced.exact, LOST, "at most"),
        Point(f"{where}, forced choice", silenced.choice, silenced.chance, "chance"),
    )


def segregation(e: Evidence) -> Finding:
    if e.silenced.exact.n == 0:
        return NOT_RUN
    clauses, sentence = _lost(e.silenced, "without heads")
    untouched = Point("untouched", e.baselines.get("segregation", e.baseline), judged=False)
    shown = (*points(untouched), *_silenced_points(e.silenced, "no heads"))
    return Finding(worst(clauses), because(clauses), sentence + ".", e.silenced.exact, shown)


def few(e: Evidence) -> Finding:
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
    """The graded version: how many tokens in sight are enough."""
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
    if e.follows_kv.n == 0:
        return NOT_RUN
    sentence = f"When the two halves of its memory disagree, {share_of(e.follows_kv, 'the answers')} follow the KV cache."
    if e.follows_kv_outside.n:
        out = share_of(e.follows_kv_outside, "those answers")
        sentence += f" Needles out of the window do not count here: {out} follow it."
    clause = held(e.follows_kv, HALF, "at least", "answers follow the KV cache in")
    shown = points(Point("follow the KV cache", e.follows_kv, HALF, "at least"))
    return Finding(clause.word, clause.text, sentence, e.follows_kv, shown)
