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
from needlework.report.conditions import Condition
from needlework.report.evidence import verdicts
from needlework.report.frame import Frame, Ints
from needlework.report.model_trials import ModelTrials, by_model_and_boundary
from needlework.report.reader import load
from needlework.report.spec import HeaderAndRows
from needlework.stats import Estimate, percent
from needlework.verdicts import RULES, Verdict

LETTERS = {"attention": "A", "recurrent": "R", "hybrid": "H", "other": "-"}
SYMBOLS = {"supported": "●", "not supported": "○", "inconclusive": "◐", "not testable": "–"}
STYLES = {"supported": "bold green", "not supported": "bold red", "inconclusive": "yellow", "not testable": "dim"}


def models(frame: Frame) -> HeaderAndRows:
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
    for trials in by_model_and_boundary(frame):
        for i, (label, text) in enumerate(c for c in _conditions(trials) if "decode only" not in c[0]):
            known = [trials.knowledge(text, form) for form in ("cloze", "letter")]
            cells = [trials.retrieval(text), *([trials.retrieval(text, "choices"), *known] if trials.judged else [])]
            if any(map(len, cells)):
                shown = [_short(trials.accuracy(rows)) for rows in cells]
                table.add_row(Text(trials.model if i == 0 else ""), trials.titled(label), *shown, end_section=False)
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


def _claims(frame: Frame, judged: Sequence[Verdict]) -> Table:
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
        words = {v.model: v.word for v in judged if v.claim == rule.claim}
        cells = [Text(f"{SYMBOLS[words[m]]} {words[m]}", STYLES[words[m]]) if m in words else Text("") for m in frame.models]
        table.add_row(rule.title, *cells)
    return table
