"""The paper's claims, and when the evidence of one model supports them: one table (`RULES`), one function (`judge`).

Supported: the whole interval lies on the claim's side of the line. Not supported: it lies on the other side. Inconclusive: it
holds the line, or something that the rule needs was not measured. Three words say that nothing was judged: *not run*, *does not
apply* (the model has no such part) and *not testable* (the untouched model does not retrieve well enough to lose anything).
"""

from needlework.verdicts.evidence import Context, Curve, Evidence, Kept, Silenced
from needlework.verdicts.rules import RULES, RULES_NOTE, RULES_VERSION, Rule, judge, markdown
from needlework.verdicts.samples import needed
from needlework.verdicts.words import Bound, Point, Verdict, Word

__all__ = [
    "RULES",
    "RULES_NOTE",
    "RULES_VERSION",
    "Bound",
    "Context",
    "Curve",
    "Evidence",
    "Kept",
    "Point",
    "Rule",
    "Silenced",
    "Verdict",
    "Word",
    "judge",
    "markdown",
    "needed",
]
