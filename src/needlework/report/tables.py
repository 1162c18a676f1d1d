"""Tables: what the models are, all scores beside each other, and the summary for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from needlework.report import tasks
from needlework.report.conditions import Condition
from needlework.report.evidence import verdicts
from needlework.report.frame import Frame, Ints
from needlework.report.model_trials import ModelTrials, by_model_and_boundary
from needlework.report.reader import load
from needlework.report.spec import HeaderAndRows
from needlework.stats import Estimate, percent
from needlework.terminal import Sheet
from needlework.verdicts import RULES, Verdict, Word

HARD_SPACE = "\u00a0"
LETTERS = {"attention": "A", "recurrent": "R", "hybrid": "H", "other": "-"}
SYMBOLS: dict[Word, str] = {"supported": "●", "not supported": "○", "inconclusive": "◐", "not testable": "–"}
STYLES: dict[Word, str] = {
    "supported": "bold green",
    "not supported": "bold red",
    "inconclusive": "yellow",
    "not testable": "dim",
}


def models(frame: Frame) -> HeaderAndRows:
    """What each model is made of."""
    header = ["model", "layers", "heads per layer", "window", "parameters", "trials", "doctor"]
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
                checkup(frame.models[model].get("checkup")),
            ]
        )
    return header, rows


def checkup(found: Mapping[str, Any] | None) -> str:
    """What the doctor found of a model, when, and by which version, in a few words."""
    if found is None:
        return "not asked"
    failed = [check["law"] for check in found["checks"] if check["outcome"] == "fail"]
    held = sum(check["outcome"] == "pass" for check in found["checks"])
    result = f"FAILED: {', '.join(failed)}" if failed else f"{held} laws hold"
    return f"{result} ({'quick, ' if found['quick'] else ''}{found['at'][:10]}, needlework {found['versions']['needlework']})"


def _conditions(trials: ModelTrials) -> list[tuple[str, str]]:
    few, off, recurrent = trials.few_heads(), trials.heads_off(), trials.recurrent_off()
    few_decode, off_decode = trials.few_heads("decode"), trials.heads_off("decode")
    named: list[tuple[str, Condition | None]] = [
        (trials.kept_share(few) if few else "", few),
        (f"{trials.kept_share(few_decode)}, decode only" if few_decode else "", few_decode),
        ("no heads", off),
        ("no heads, decode only", off_decode),
        (f"no recurrent {recurrent.site}" if recurrent else "", recurrent),
    ]
    return [("untouched", "none"), *((label, c.text) for label, c in named if c is not None)]


def unplaced(trials: ModelTrials) -> list[tuple[str, str]]:
    """Interventions that lie on no figure's axis, by their texts."""
    return [(c.text, c.text) for c in trials.conditions if c.kind in ("other", "attention_block")]


def scores(frame: Frame, conditions: Callable[[ModelTrials], list[tuple[str, str]]] = _conditions) -> HeaderAndRows:
    """Exact, graded and forced choice, in and out of the window apart."""
    header = ["model", "condition", "exact, in window", "exact, out of window", "graded (0-5)", "forced choice", "chance"]
    rows = []
    for trials in by_model_and_boundary(frame):
        for label, text in conditions(trials):
            inside, outside = trials.retrieval(text), trials.retrieval(text, in_window=False)
            choices = trials.retrieval(text, "choices") if trials.judged else inside[:0]
            if len(inside) + len(outside) + len(choices) == 0:
                continue
            chance = f"{percent(frame.chance(choices))} ({trials.needle_pick(text, 'choices').against})"
            rows.append(
                [
                    trials.model,
                    trials.titled(label),
                    _text(trials.accuracy(inside)),
                    _text(trials.accuracy(outside)),
                    _graded(frame, inside),
                    _text(trials.accuracy(choices)),
                    chance if len(choices) else "–",
                ]
            )
    return header, rows


def knowledge(frame: Frame) -> HeaderAndRows:
    """What is left of knowledge, raw and corrected for chance, asked in every form."""
    header = ["model", "asked as", "condition", "right", "retained, raw", "retained, chance-corrected"]
    rows = []
    for trials in by_model_and_boundary(frame):
        for form in trials.forms():
            kinds = trials.knowledge_kinds(form)
            for which, (kind, mode) in enumerate(kinds):
                asked = form if form and len(kinds) == 1 else f"{form} ({kind})" if form else kind
                for label, text in _conditions(trials) if trials.judged or mode == "generate" else ():
                    right = trials.accuracy(trials.knowledge(text, form, which))
                    if right.n:
                        pairs = trials.retained_knowledge(text, form, which=which)
                        shares = [_text(pairs.raw), _text(pairs.corrected)]
                        rows.append([trials.model, asked, trials.titled(label), _text(right), *shares])
    return header, rows


def contrasts(frame: Frame) -> HeaderAndRows:
    """The double dissociation in numbers: differences of retained shares, and their sum."""
    header = [
        "model",
        "retrieval: without recurrence less without attention",
        "knowledge: without attention less without recurrence",
        "interaction (the sum)",
        "crossed",
    ]
    rows = []
    for trials in by_model_and_boundary(frame):
        interaction = trials.interaction()
        if interaction is not None:
            gaps = [interaction.retrieval_gap, interaction.knowledge_gap, interaction.contrast]
            rows.append([trials.name, *(gap.text("") for gap in gaps), "yes" if interaction.crossed else "no"])
    return header, rows


def _text(estimate: Estimate) -> str:
    return estimate.text() if estimate.n else "–"


def _graded(frame: Frame, rows: Ints) -> str:
    values = frame.values("graded", rows)
    values = values[~np.isnan(values)]
    return f"{values.mean():.2f}, n = {len(values):,}" if len(values) else "–"


def summary(directories: Sequence[Path]) -> RenderableType:
    """The main numbers of one or more runs, for the terminal."""
    frame = load([Path(d) for d in directories])
    remarks = [Text(words, "yellow") for words in frame.warnings] + [Text(words) for words in frame.notes]
    return Stack(_numbers(frame), _claims(frame, verdicts(frame)), *_other_tasks(frame), *remarks)


def _numbers(frame: Frame) -> Table:
    """Models as blocks: eighty columns have no room for a column of names."""
    columns = ("condition", "retrieval", "forced choice", "cloze", "letter")
    table = Sheet(columns, "Retrieval and knowledge", words=columns[:1])
    table.caption = "in-window needles, exact match; 95 % intervals in brackets, n trials"
    table.caption_justify = "left"
    for trials in by_model_and_boundary(frame):
        labels, rows = [], []
        for label, text in (c for c in _conditions(trials) if "decode only" not in c[0]):
            known = [trials.knowledge(text, form) for form in ("cloze", "letter")]
            cells = [trials.retrieval(text), *([trials.retrieval(text, "choices"), *known] if trials.judged else [])]
            if any(map(len, cells)):
                rows.append([_short(trials.accuracy(numbers)) for numbers in cells])
                labels.append(trials.titled(label))
        if rows:
            table.add_row(Text(trials.model, "bold"))
            for label, shown in zip(labels, rows, strict=True):
                table.add_row(Text(label), *shown)
            table.add_section()
    return table


def _short(e: Estimate) -> str:
    """On two lines: a terminal has eighty columns."""
    text = f"{percent(e.value)} n={e.n:,}\n[{percent(e.low, '')}, {percent(e.high, '')}]" if e.n else "–"
    return text.replace(" ", HARD_SPACE)


def _other_tasks(frame: Frame) -> list[Table]:
    header, rows = tasks.others(frame)
    table = Sheet(header, "Other tasks: of no known ability, judged by no rule", words=header)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return [table] if rows else []


def _claims(frame: Frame, judged: Sequence[Verdict]) -> Table:
    """Each claim with its verdicts, and the models that got each."""
    failed = f", {frame.failed:,} of them failed" if frame.failed else ""
    columns = ("claim", "verdict", "models")
    table = Sheet(columns, "Claims of the paper", words=columns)
    table.caption = f"{frame.trials:,} trials{failed}; a verdict speaks of one checkpoint"
    table.caption_justify = "left"
    for rule in RULES:
        models: dict[Word, list[str]] = {word: [] for word in SYMBOLS}
        for verdict in judged:
            if verdict.claim == rule.claim:
                models[verdict.word].append(verdict.model)
        title = rule.title
        for word, names in models.items():
            if names:
                table.add_row(
                    title, Text(f"{SYMBOLS[word]} {word}".replace(" ", HARD_SPACE), STYLES[word]), Text(", ".join(names))
                )
                title = ""
        table.add_section()
    return table
