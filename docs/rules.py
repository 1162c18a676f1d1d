"""Writes the table of verdicts of docs/method.md from the rules themselves; with a run, both versions' verdicts side by side.

python docs/rules.py
python docs/rules.py runs/demo-full
"""

from __future__ import annotations

import sys
from pathlib import Path

from needlework.analysis.reader import load
from needlework.analysis.verdicts import BASELINE, RULES, RULES_NOTE, RULES_VERSION, verdicts
from needlework.stats import percent
from needlework.tables import Table

PAGE = Path(__file__).resolve().parent / "method.md"
BEGIN, END = "<!-- rules -->\n", "<!-- end of rules -->"
# What the rules of version 1 said of needlework 0.2's models, from the shipped plans in their fast form (seed 0).
VERSION_1 = {
    "tiny-griffin": {
        "segregation": "inconclusive",
        "few_heads": "not supported",
        "no_rescue": "inconclusive",
        "exposure": "inconclusive",
        "context": "not supported",
        "double_dissociation": "not supported",
        "memory": "supported",
    },
    "tiny-jamba": {
        "segregation": "inconclusive",
        "few_heads": "not supported",
        "no_rescue": "inconclusive",
        "exposure": "supported",
        "context": "not supported",
        "double_dissociation": "supported",
        "memory": "supported",
    },
}


def page() -> str:
    """The page with its table as it must be."""
    testable = f"untouched retrieval, of the very tasks that the claim is judged by: lower bound at least {percent(BASELINE)}"
    table = Table(["rule", "claim", "supported when", "samples"], [["", "testable at all", testable, ""]])
    for rule in RULES:
        title = f"{rule.title}: {rule.says[:1].lower()}{rule.says[1:].rstrip('.')}"
        table.add_row(str(rule.number), title, rule.rule, rule.needs.text())
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{RULES_NOTE}\n\n{table.to_markdown()}\n{END}{after}"


def side_by_side(run: Path) -> str:
    """A table for docs/log.md: each claim and model, by version 1 and by the rules of today, and why the latter."""
    judged = {(verdict.claim, verdict.model): verdict for verdict in verdicts(load([run]))}
    table = Table(["claim", "model", "version 1", f"version {RULES_VERSION}", "why"])
    for rule in RULES:
        for (claim, model), verdict in judged.items():
            if claim == rule.claim and verdict.word != "does not apply":
                before = VERSION_1.get(model, {}).get(claim, "not judged")
                table.add_row(rule.title, model, before, verdict.word, verdict.why)
    return table.to_markdown()


if __name__ == "__main__":
    if sys.argv[1:]:
        print(side_by_side(Path(sys.argv[1])))
    else:
        PAGE.write_text(page(), encoding="utf-8")
