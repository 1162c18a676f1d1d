"""How many samples a plan gives the rules, against what they need to decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from needlework.experiments import rows
from needlework.experiments.plan import Plan
from needlework.experiments.provenance import experiments
from needlework.experiments.trials import Work
from needlework.report.evidence import verdicts
from needlework.report.reader import planned
from needlework.requests import Answer
from needlework.verdicts import RULES, Rule, Verdict
from needlework.verdicts.samples import CHANCE, POWER

_UNASKED = Answer(finish="failed")


@dataclass(frozen=True)
class Samples:
    """What one rule reads of one model in a plan."""

    rule: int  # its number
    claim: str
    title: str
    model: str
    word: str  # not run | does not apply | "" if it is judged
    needed: int  # 0: not computed
    given: int  # of the condition with the fewest

    @property
    def text(self) -> str:
        return f"{self.model} {self.word or f'{self.given:,}'}"

    @property
    def few(self) -> bool:
        return not self.word and self.given < self.needed

    @property
    def warning(self) -> str:
        return (
            f"warning: rule {self.rule} ({self.title}) reads {self.given:,} samples of {self.model} and needs"
            f" {self.needed:,} to decide in {POWER:.0%} of all cases in which its claim is true; raise samples or limit"
        )


def samples(plan: Plan, works: Sequence[Work]) -> list[Samples]:
    """For each rule and model, from the same selection of trials that a verdict is judged by."""
    planned_rows = (
        replace(rows.to_row(trial, _UNASKED, work.model.name, 0.0, ""), finish="stop") for work in works for trial in work.trials
    )
    models = {work.model.name: {"anatomy": work.model.anatomy.to_dict()} for work in works}
    frame = planned(planned_rows, models, experiments(plan))
    judged = {(verdict.claim, verdict.model): verdict for verdict in verdicts(frame)}
    return [_samples(rule, judged[rule.claim, model]) for rule in RULES for model in frame.models]


def _samples(rule: Rule, verdict: Verdict) -> Samples:
    word = verdict.word if verdict.word in ("not run", "does not apply") else ""
    given = [point.estimate.n for point in verdict.points if point.judged]
    chance = next((point.line for point in verdict.points if point.bound == "chance" and point.line), CHANCE)
    return Samples(rule.number, rule.claim, rule.title, verdict.model, word, rule.needs(chance), min(given, default=0))


def text(found: Sequence[Samples]) -> list[str]:
    """One line a rule, and warnings below."""
    lines = []
    for rule in RULES:
        of_rule = [one for one in found if one.rule == rule.number]
        if judged := [one for one in of_rule if not one.word]:
            most = max(one.needed for one in judged)
            needs = f"needs {most:,} samples" if most else "needs a number of samples that is not computed"
            lines.append(f"rule {rule.number}, {rule.title}: {needs}; {', '.join(one.text for one in of_rule)}")
    return lines + [one.warning for one in found if one.few]
