"""Does a verdict speak of one checkpoint? The words of each claim over models that differ in nothing but their seed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from needlework.training.grid import Cell
from needlework.verdicts import Verdict, Word

SILENT: tuple[Word, ...] = ("not run", "does not apply")  # they say nothing of a model


def words(cells: Sequence[Cell], judged: Sequence[Verdict]) -> dict[str, dict[str, Counter[Word]]]:
    """Claim -> levels -> how many of their seeds came to which word; claims of which nothing was run are left out."""
    levels = {cell.name: ", ".join(cell.levels.values()) for cell in cells}
    found: dict[str, dict[str, Counter[Word]]] = defaultdict(lambda: defaultdict(Counter))
    for verdict in judged:
        if verdict.model in levels and verdict.word not in SILENT:
            found[f"{verdict.number}. {verdict.title}"][levels[verdict.model]][verdict.word] += 1
    return found


def table(cells: Sequence[Cell], judged: Sequence[Verdict]) -> str:
    """A row for each claim, a column for each combination of levels, in Markdown; empty if no claim was judged."""
    found = words(cells, judged)
    if not found:
        return ""
    columns = list(dict.fromkeys(", ".join(cell.levels.values()) for cell in cells))
    lines = ["| claim | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for claim, by_levels in found.items():
        lines.append(f"| {claim} | " + " | ".join(_said(by_levels[levels]) for levels in columns) + " |")
    return "\n".join(lines)


def _said(counted: Counter[Word]) -> str:
    """`supported 2 of 3, inconclusive 1 of 3`"""
    total = counted.total()
    return ", ".join(f"{word} {count} of {total}" for word, count in counted.most_common()) or "-"
