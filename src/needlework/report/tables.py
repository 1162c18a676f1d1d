"""Tables: what the models are, all scores beside each other, and the summary for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from needlework.report import tasks
from needlework.report.bench import Bench, every_bench
from needlework.report.conditions import Condition
from needlework.report.evidence import verdicts
from needlework.report.frame import Frame, Ints
from needlework.report.reader import load
from needlework.stats import Estimate, percent
from needlework.verdicts import RULES, Verdict

LETTERS = {"attention": "A", "recurrent": "R", "hybrid": "H", "other": "-"}
SYMBOLS = {"supported": "●", "not supported": "○", "inconclusive": "◐", "not testable": "–"}
STYLES = {"supported": "bold green", "not supported": "bold red", "inconclusive": "yellow", "not testable": "dim"}


def models(frame: Frame) -> tuple[list[str], list[list[str]]]:
    """What each model is made of."""
    header = ["model", "layers", "heads per layer", "window", "parameters", "trials"]
    rows = []
    for model in frame.models:
        anatomy = frame.anatomy(model)
        kinds = "".join(LETTERS.get(layer.get("kind", "other"), "-") for layer in anatomy.get("layers", []))
        parameters = anatomy.get("parameters")
        rows.append(
            [
                model,
                kinds or "–",
                str(frame.heads(model) or "–"),
                str(frame.window(model) or "none"),
                f"{parameters:,}" if parameters else "–",
                f"{frame.count(model):,}",
            ]
        )
    return header, rows


def _conditions(bench: Bench) -> list[tuple[str, str]]:
    few, off, recurrent = bench.few(), bench.silent(), bench.recurrent_off()
    few_decode, off_decode = bench.few("decode"), bench.silent("decode")
    named: list[tuple[str, Condition | None]] = [
        (bench.share(few) if few else "", few),
        (f"{bench.share(few_decode)}, decode only" if few_decode else "", few_decode),
        ("no heads", off),
        ("no heads, decode only", off_decode),
        (f"no recurrent {recurrent.site}" if recurrent else "", recurrent),
    ]
    return [("untouched", "none"), *((label, c.text) for label, c in named if c is not None)]


def unplaced(bench: Bench) -> list[tuple[str, str]]:
    """Interventions that lie on no figure's axis, by their texts."""
    return [(c.text, c.text) for c in bench.conditions if c.kind in ("other", "attention_block")]


def scores(frame: Frame, conditions: Callable[[Bench], list[tuple[str, str]]] = _conditions) -> tuple[list[str], list[list[str]]]:
    """Exact, graded and forced choice, in and out of the window apart."""
    header = ["model", "condition", "exact, in window", "exact, out of window", "graded (0-5)", "forced choice", "chance"]
    rows = []
    for bench in every_bench(frame):
        for label, text in conditions(bench):
            inside, outside = bench.retrieval(text), bench.retrieval(text, in_window=False)
            choices = bench.retrieval(text, "choices") if bench.first else inside[:0]
            if len(inside) + len(outside) + len(choices) == 0:
                continue
            chance = f"{percent(frame.chance(choices))} ({bench.needles(text, 'choices').against})"
            rows.append(
                [
                    bench.model,
                    bench.titled(label),
                    _told(bench.accuracy(inside)),
                    _told(bench.accuracy(outside)),
                    _graded(frame, inside),
                    _told(bench.accuracy(choices)),
                    chance if len(choices) else "–",
                ]
            )
    return header, rows


def knowledge(frame: Frame) -> tuple[list[str], list[list[str]]]:
    """What is left of knowledge, raw and corrected for chance, asked in every form."""
    header = ["model", "asked as", "condition", "right", "retained, raw", "retained, chance-corrected"]
    rows = []
    for bench in every_bench(frame):
        for form in bench.forms():
            kinds = bench.knowledge_kinds(form)
            for which, (kind, mode) in enumerate(kinds):
                asked = form if form and len(kinds) == 1 else f"{form} ({kind})" if form else kind
                for label, text in _conditions(bench) if bench.first or mode == "generate" else ():
                    right = bench.accuracy(bench.knowledge(text, form, which))
                    if right.n:
                        pairs = bench.retained_knowledge(text, form, which=which)
                        shares = [_told(pairs.raw), _told(pairs.corrected)]
                        rows.append([bench.model, asked, bench.titled(label), _told(right), *shares])
    return header, rows


def contrasts(frame: Frame) -> tuple[list[str], list[list[str]]]:
    """The double dissociation in numbers: differences of retained shares, and their sum."""
    header = [
        "model",
        "retrieval: without recurrence less without attention",
        "knowledge: without attention less without recurrence",
        "interaction (the sum)",
        "crossed",
    ]
    rows = []
    for bench in every_bench(frame):
        found = bench.interaction()
        if found is not None:
            gaps = [found.retrieval_gap, found.knowledge_gap, found.contrast]
            rows.append([bench.name, *(gap.text("") for gap in gaps), "yes" if found.crossed else "no"])
    return header, rows


def _told(estimate: Estimate) -> str:
    return estimate.text() if estimate.n else "–"


def _graded(frame: Frame, rows: Ints) -> str:
    values = frame.values("graded", rows)
    values = values[~np.isnan(values)]
    return f"{values.mean():.2f}, n = {len(values):,}" if len(values) else "–"


def summary(directories: Sequence[Path]) -> RenderableType:
    """The main numbers of one or more runs, for the terminal."""
    frame = load([Path(d) for d in directories])
    said = [Text(words, "yellow") for words in frame.warnings] + [Text(words) for words in frame.notes]
    return Stack(_numbers(frame), _claims(frame, verdicts(frame)), *_other_tasks(frame), *said)


def _numbers(frame: Frame) -> Table:
    table = Table(
        title="Retrieval and knowledge",
        title_justify="left",
        caption_justify="left",
        caption="in-window needles, exact match; 95 % intervals in brackets, n trials",
    )
    table.add_column("model")
    table.add_column("condition")
    for name in ("retrieval", "forced choice", "cloze", "letter"):
        table.add_column(name, justify="right")
    for bench in every_bench(frame):
        for i, (label, text) in enumerate(c for c in _conditions(bench) if "decode only" not in c[0]):
            known = [bench.knowledge(text, form) for form in ("cloze", "letter")]
            cells = [bench.retrieval(text), *([bench.retrieval(text, "choices"), *known] if bench.first else [])]
            if any(map(len, cells)):
                shown = [_short(bench.accuracy(rows)) for rows in cells]
                table.add_row(Text(bench.model if i == 0 else ""), bench.titled(label), *shown, end_section=False)
        table.add_section()
    return table


def _short(e: Estimate) -> str:
    """On two lines: a terminal has eighty columns."""
    return f"{percent(e.value)} [{percent(e.low, '')}, {percent(e.high, '')}]\nn = {e.n:,}" if e.n else "–"


def _other_tasks(frame: Frame) -> list[Table]:
    header, rows = tasks.others(frame)
    table = Table(title="Other tasks: of no known ability, judged by no rule", title_justify="left")
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return [table] if rows else []


def _claims(frame: Frame, found: Sequence[Verdict]) -> Table:
    failed = f", {frame.failed:,} of them failed" if frame.failed else ""
    table = Table(
        title="Claims of the paper",
        title_justify="left",
        caption_justify="left",
        caption=f"{frame.trials:,} trials{failed}; a verdict speaks of one checkpoint",
    )
    table.add_column("claim")
    for model in frame.models:
        table.add_column(Text(model))
    for rule in RULES:
        words = {v.model: v.word for v in found if v.claim == rule.claim}
        cells = [Text(f"{SYMBOLS[words[m]]} {words[m]}", STYLES[words[m]]) if m in words else Text("") for m in frame.models]
        table.add_row(rule.title, *cells)
    return table
