"""Tables: what the models are, all scores beside each other, and the summary for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from needlework.report import effects, tasks
from needlework.report.conditions import Condition
from needlework.report.evidence import verdicts
from needlework.report.frame import Frame, Ints
from needlework.report.model_trials import ModelTrials, by_model_and_boundary
from needlework.report.names import shown
from needlework.report.overview import UNJUDGED
from needlework.report.reader import load
from needlework.report.spec import HeaderAndRows
from needlework.stats import Estimate, percent
from needlework.terminal import Sheet
from needlework.verdicts import Verdict, Word

HARD_SPACE = "\u00a0"
LETTERS = {"attention": "A", "recurrent": "R", "hybrid": "H", "other": "-"}
SYMBOLS: dict[Word, str] = {
    "supported": "●",
    "not supported": "○",
    "inconclusive": "◐",
    "not testable": "⊘",
    "not run": "·",
    "does not apply": "–",
}
STYLES: dict[Word, str] = {
    "supported": "bold green",
    "not supported": "bold red",
    "inconclusive": "yellow",
    "not testable": "dim",
    "not run": "dim",
    "does not apply": "dim",
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
    return [(shown(c.text, 200), c.text) for c in trials.conditions if c.kind in ("other", "attention_block")]


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
    return Stack(_numbers(frame), _claims(frame, verdicts(frame)), *_hops(frame), *_other_tasks(frame), *remarks)


class _Aligned(Sheet):
    """One of several tables whose columns stand below each other's."""

    def __init__(self, columns: Sequence[str], words: Sequence[str], together: list[_Aligned]) -> None:
        super().__init__(columns, words=words)
        self.show_header = not together  # the first of them is the heading of all
        self.together = together
        together.append(self)

    def _widths(self) -> tuple[list[int], list[int]]:
        both = [Sheet._widths(one) for one in self.together]
        least, most = ([max(widths) for widths in zip(*kind, strict=True)] for kind in zip(*both, strict=True))
        return least, most


def _numbers(frame: Frame) -> RenderableType:
    """Models as blocks, each under its name: eighty columns have no room for a column of names."""
    columns = ("condition", "retrieval", "forced choice", "cloze", "letter")
    together: list[_Aligned] = []
    shown: list[RenderableType] = [Text("Retrieval and knowledge", "italic"), _Aligned(columns, columns[:1], together)]
    for trials in by_model_and_boundary(frame):
        rows = []
        for label, text in (c for c in _conditions(trials) if "decode only" not in c[0]):
            known = [trials.knowledge(text, form) for form in ("cloze", "letter")]
            cells = [trials.retrieval(text), *([trials.retrieval(text, "choices"), *known] if trials.judged else [])]
            if any(map(len, cells)):
                rows.append([trials.titled(label), *(_short(trials.accuracy(numbers)) for numbers in cells)])
        if rows:
            table = _Aligned(columns, columns[:1], together)
            for row in rows:
                table.add_row(*map(Text, row))
            shown += [Text(trials.model, "bold", overflow="fold"), table, Text("")]
    return Stack(*shown, Text("in-window needles, exact match; 95 % intervals in brackets, n trials\n", "dim"))


def _short(e: Estimate) -> str:
    """On two lines: a terminal has eighty columns."""
    text = f"{percent(e.value)} n={e.n:,}\n[{percent(e.low, '')}, {percent(e.high, '')}]" if e.n else "–"
    return text.replace(" ", HARD_SPACE)


def _hops(frame: Frame) -> list[Table]:
    """What stands one hop away and what stands further, with heads off in one phase or the other."""
    asked = [trials for trials in by_model_and_boundary(frame) if trials.hops]
    hops = sorted({hop for trials in asked for hop in trials.hops})
    table = Sheet(
        ["model", "condition", *map(effects.in_words, hops)], "Heads off in one phase or the other", words=["condition"]
    )
    for trials in asked:
        for label, text in effects.phases(trials):
            found = [trials.accuracy(trials.in_hops(hop, text)) for hop in hops]
            if any(share.n for share in found):
                table.add_row(*map(Text, [trials.model, trials.titled(label), *map(_short, found)]))
    return [table] if asked else []


def _other_tasks(frame: Frame) -> list[Table]:
    header, rows = tasks.others(frame)
    table = Sheet(header, "Other tasks: of no known ability, judged by no rule", words=header)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return [table] if rows else []


def _claims(frame: Frame, judged: Sequence[Verdict]) -> RenderableType:
    """Models as blocks: each verdict with its claim, and below it why it fell so. What was not judged takes a line together."""
    failed = f", {frame.failed:,} of them failed" if frame.failed else ""
    shown: list[RenderableType] = [Text("Claims of the paper", "italic")]
    for model in frame.models:
        shown.append(Text(model, "bold", overflow="fold"))
        of_model = [verdict for verdict in judged if verdict.model == model]
        for verdict in of_model:
            if verdict.word not in UNJUDGED:
                said = Text(f"{SYMBOLS[verdict.word]} {verdict.word:<14}".replace(" ", HARD_SPACE), STYLES[verdict.word])
                shown += [said + Text(verdict.title), Padding(Text(verdict.why, "dim"), (0, 0, 0, 2))]
        unjudged: dict[tuple[Word, str], list[str]] = {}
        for verdict in of_model:
            if verdict.word in UNJUDGED:
                unjudged.setdefault((verdict.word, verdict.why.partition(": ")[2]), []).append(verdict.title)
        for (word, why), titles in unjudged.items():
            reason = f" ({why})" if why != word else ""
            which = "every claim" if len(titles) == len(of_model) else "; ".join(titles)
            shown.append(Text(f"{SYMBOLS[word]} {word}{reason}: {which}", STYLES[word]))
        shown.append(Text(""))
    return Stack(*shown, Text(f"{frame.trials:,} trials{failed}; a verdict speaks of one checkpoint", "dim"))
