"""Judge the paper's claims on the evidence of one model: a table of rules (`RULES`) and one function (`judge`).

Supported: the whole 95 % interval is on the claim's side of the threshold. Not supported: all of it is on the other side.
Inconclusive: it contains the threshold, or something that the rule needs was not measured. Three outcomes mean that nothing
was judged: *not run*, *does not apply* (the model has no such layers) and *not testable* (the unmodified model does not
retrieve well enough to lose anything).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from needlework.analysis import findings, power
from needlework.analysis.findings import (
    HALF,
    KEPT,
    LOST,
    MORE_THAN_CHANCE,
    NEAR_CHANCE,
    Evidence,
    Finding,
    Verdict,
    held,
    share_of,
)
from needlework.stats import Estimate, percent
from needlework.tables import Table

RULES_VERSION = 2
BASELINE = 0.80  # claims are testable if the lower bound of baseline retrieval is at least this
FIVE, TEN = percent(MORE_THAN_CHANCE, ""), percent(NEAR_CHANCE, "")


@dataclass(frozen=True)
class Rule:
    """A claim of the paper and the function that judges it."""

    number: int
    claim: str  # identifier
    title: str
    says: str  # the claim
    rule: str  # when it counts as supported
    needs: power.Needs  # number of samples needed to decide
    of: Callable[[Evidence], Finding]
    parts: tuple[str, ...] = ("attention",)  # kinds of layers without which the claim does not apply


RULES: tuple[Rule, ...] = (
    Rule(
        1,
        "segregation",
        "Attention does the retrieving",
        "Without attention heads retrieval is lost.",
        f"with no heads, upper bound of retrieval at most {percent(LOST)}; and forced choice is not above chance: not"
        f" supported if the lower bound of (choice - chance) is above {FIVE} points, else supported if its upper bound is at most"
        f" {TEN} points, else inconclusive. An interval wholly below chance is said beside it",
        power.at_chance(NEAR_CHANCE),
        findings.segregation,
    ),
    Rule(
        2,
        "few_heads",
        "Few heads suffice",
        "About 15 % of the heads keep retrieval near perfect.",
        "at the number of heads tried whose share is nearest to 15 % (said as k of H): lower bound of the paired retained share"
        f" of retrieval at least {percent(KEPT)}. Beside it: the fewest heads that reach this by entropy, by a static ranking"
        " and at random, the attention that they give the first token, and what is left of knowledge",
        power.whole(KEPT),
        findings.few,
    ),
    Rule(
        3,
        "no_rescue",
        "Prompting does not rescue it",
        "Reading twice, or the question first, does not bring retrieval back.",
        "rule 1 under both layouts; inconclusive unless reading twice helps some model on the same task: lower bound of (twice -"
        " once), paired, above 10 points",
        power.at_chance(NEAR_CHANCE, times=2),
        findings.no_rescue,
    ),
    Rule(
        4,
        "exposure",
        "The needle must be in sight",
        "Attention must see the needle while answering.",
        f"needle omitted in decode: upper bound of retrieval at most {percent(LOST)}. Beside it: the retained share with"
        " the needle omitted in prefill only",
        power.nothing_left(LOST),
        findings.exposure,
    ),
    Rule(
        5,
        "context",
        "Enough context",
        "Attention needs the context while reading or while answering; without it in both, the needle alone is not enough.",
        "`ablate_attention(phase='prefill') + expose_tokens('only', phase='decode')`: upper bound of the paired retained share"
        f" below {percent(HALF)}; each of the two alone: lower bound at least {percent(KEPT)}. Beside it the graded version:"
        f" the fewest tokens of `limit_context` with retrieval of {percent(KEPT)}",
        power.whole(KEPT, times=2),
        findings.context,
    ),
    Rule(
        6,
        "double_dissociation",
        "Two systems",
        "Attention serves retrieval, the recurrent side serves knowledge.",
        "interaction of (attention off, recurrent off) x (retrieval, knowledge), on chance-corrected retained shares: the"
        " interval lies above 0",
        power.not_computed(),
        findings.dissociation,
        ("attention", "recurrent"),
    ),
    Rule(
        7,
        "memory",
        "The KV cache holds the needle",
        "Answers follow the KV half of the memory.",
        f"lower bound of the share that follows the KV half at least {percent(HALF)}, needles inside the window",
        power.most(HALF),
        findings.memory,
        ("attention", "recurrent"),
    ),
)
RULES_NOTE = (
    f"Version {RULES_VERSION} of the rules. It was written after results of version 1 had been seen, so it is judged on fresh"
    f" seeds. {len(RULES)} claims are judged at once of each model, each by its own 95 % intervals; nothing is corrected for"
    " their number."
)


def _asides(evidence: Evidence, claim: str) -> str:
    """Return remarks on a verdict's tasks and boundary where they are not the default."""
    names = evidence.tasks.get(claim, "")
    asides = [f"Tasks: {names}."] * bool(names) + [f"{evidence.note.capitalize()}."] * bool(evidence.note)
    return "".join(f" ({aside})" for aside in asides)


def _missing(evidence: Evidence, rule: Rule) -> str:
    """Return the kinds of layers that a claim needs and the model lacks."""
    has = {"attention": evidence.has_attention, "recurrent": evidence.has_recurrence}
    return " and ".join(f"{part} layers" for part in rule.parts if not has[part])


def _tested(rule: Rule, finding: Finding, baseline: Estimate) -> Finding:
    """Return the finding, changed to "not testable" or "not run" if baseline retrieval is too low or missing."""
    if finding.word == "not run":
        return finding
    if baseline.n == 0:
        return replace(finding, word="not run", why="the untouched model was not asked", sentence=finding.sentence + UNASKED)
    clause = held(baseline, BASELINE, "at least", "untouched it finds")
    if clause.word == "supported":
        return finding
    weak = f" But untouched it finds {share_of(baseline, 'the needles')}: the lower bound must be {percent(BASELINE)}."
    why = clause.text
    if clause.word == "inconclusive":  # the baseline's interval contains the threshold: more samples may help
        chances = [point.line for point in finding.points if point.bound == "chance" and point.line]
        needed = rule.needs(*chances[:1])
        few = "too few samples " + (f"({baseline.n:,} of {needed:,})" if needed else f"({baseline.n:,})")
        if baseline.n < (needed or math.inf):
            why, weak = f"{few}: {why}", f"{weak[:-1]}, and there are {few}."
    return replace(finding, word="not testable", why=why, sentence=finding.sentence + weak)


UNASKED = " But the untouched model was not asked, so nothing can be said to be lost."


def judge(evidence: Evidence) -> list[Verdict]:
    """Return one verdict per rule for one model."""
    verdicts = []
    for rule in RULES:
        if missing := _missing(evidence, rule):
            found = Finding("does not apply", f"the model has no {missing}", f"This model has no {missing}.")
        else:
            found = _tested(rule, rule.of(evidence), evidence.baselines.get(rule.claim, evidence.baseline))
        sentence = found.sentence + (_asides(evidence, rule.claim) if found.estimate.n else "")
        why = f"rule {rule.number}: {found.why}"
        about = (rule.claim, rule.title, evidence.model, found.word, sentence, found.estimate)
        verdicts.append(Verdict(*about, rule.number, why, found.points))
    return verdicts


def markdown() -> str:
    """Return the table of rules in docs/method.md."""
    testable = f"untouched retrieval, of the very tasks that the claim is judged by: lower bound at least {percent(BASELINE)}"
    table = Table(["rule", "claim", "supported when", "samples"], [["", "testable at all", testable, ""]])
    for rule in RULES:
        title = f"{rule.title}: {rule.says[:1].lower()}{rule.says[1:].rstrip('.')}"
        table.add_row(str(rule.number), title, rule.rule, rule.needs.text())
    return f"{RULES_NOTE}\n\n{table.to_markdown()}\n"
