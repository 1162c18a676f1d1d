"""Tables of reports: models, all scores, contrasts, and the summary for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from needlework.analysis.conditions import Condition
from needlework.analysis.frame import ALL, Frame, Ints
from needlework.analysis.model_trials import ModelTrials, by_boundary, by_model_and_boundary
from needlework.analysis.reader import load
from needlework.analysis.verdicts import BASELINE, Verdict, Word, verdicts
from needlework.reports.figures import main_conditions, task_picks
from needlework.reports.svg import UNJUDGED
from needlework.stats import Estimate, percent
from needlework.tables import Table
from needlework.terminal import display_name

HARD_SPACE = "\u00a0"
OUTCOMES: dict[Word, tuple[str, str]] = {  # symbol and style of each outcome
    "supported": ("●", "bold green"),
    "not supported": ("○", "bold red"),
    "inconclusive": ("◐", "yellow"),
    "not testable": ("⊘", "dim"),
    "not run": ("·", "dim"),
    "does not apply": ("–", "dim"),
}
LETTERS = {"attention": "A", "recurrent": "R", "hybrid": "H", "other": "-"}


def models(frame: Frame) -> Table:
    """Return a table of the models: layers, heads, window, parameters, number of trials, result of the doctor."""
    header = ["model", "layers", "heads per layer", "window", "parameters", "trials", "doctor"]
    rows = []
    counts = frame.groups["model"].iloc[frame.data["group"]].value_counts()
    for model in frame.models:
        anatomy = frame.anatomy(model)
        kinds = "".join(LETTERS.get(layer.get("kind", "other"), "-") for layer in anatomy.get("layers", []))
        parameters = anatomy.get("parameters")
        rows.append(
            [
                model,
                kinds or "–",
                str(frame.heads(model) or "–"),
                str(anatomy.get("window") or "none"),
                f"{parameters:,}" if parameters else "–",
                f"{counts.get(model, 0):,}",
                checkup(frame.models[model].get("checkup")),
            ]
        )
    return Table(header, rows)


def checkup(found: Mapping[str, Any] | None) -> str:
    """Summarize the result of `needlework doctor` on a model, with its date and version."""
    if found is None:
        return "not asked"
    failed = [check["law"] for check in found["checks"] if check["outcome"] == "fail"]
    held = sum(check["outcome"] == "pass" for check in found["checks"])
    result = f"FAILED: {', '.join(failed)}" if failed else f"{held} laws hold"
    return f"{result} ({'quick, ' if found['quick'] else ''}{found['at'][:10]}, needlework {found['versions']['needlework']})"


def _conditions(trials: ModelTrials) -> list[tuple[str, str]]:
    """Return (label, intervention) of the main conditions that were run."""
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


def scores(frame: Frame, conditions: Callable[[ModelTrials], list[tuple[str, str]]] = _conditions) -> Table:
    """Return a table of exact, graded and forced-choice scores of retrieval, by model and condition."""
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
    return Table(header, rows)


def knowledge(frame: Frame) -> Table:
    """Return a table of accuracy and retained shares (raw, chance-corrected) of knowledge, by form and condition."""
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
    return Table(header, rows)


def contrasts(frame: Frame) -> Table:
    """Return a table of the double dissociation: differences of retained shares, and the interaction (their sum)."""
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
    return Table(header, rows)


def other_tasks(frame: Frame) -> Table:
    """Return a table of tasks that declare no ability, under every intervention; no rule uses them."""
    header = ["model", "task", "intervention", "right"]
    rows = []
    for model in frame.models:
        trials = by_boundary(frame, model)[0]
        for label, pick in task_picks(frame, model, ability=""):
            for text in frame.distinct("text", **{**vars(pick), "text": ALL}):
                share = trials.accuracy(frame.rows(replace(pick, text=text)))
                rows.append([model, label, display_name(text, 200), share.text()])
    return Table(header, rows)


def _text(estimate: Estimate) -> str:
    return estimate.text() if estimate.n else "–"


def _graded(frame: Frame, rows: Ints) -> str:
    values = frame.values("graded", rows)
    values = values[~np.isnan(values)]
    return f"{values.mean():.2f}, n = {len(values):,}" if len(values) else "–"


def summary(directories: Sequence[Path]) -> RenderableType:
    """Return the main numbers of one or more runs for the terminal."""
    frame = load([Path(d) for d in directories])
    remarks = [Text(words, "yellow") for words in frame.warnings] + [Text(words) for words in frame.notes]
    others = replace(other_tasks(frame), caption="Other tasks: of no known ability, judged by no rule")
    return Stack(_numbers(frame), _claims(frame, verdicts(frame)), *_forms(frame), *[others] * bool(others.rows), *remarks)


def _numbers(frame: Frame) -> RenderableType:
    """Return one table per model, headed by its name: 80 columns leave no room for a column of names."""
    columns = ("condition", "retrieval", "forced choice", "cloze", "letter")
    together = [Table(columns, left=columns[:1])]  # the first holds only the header
    shown: list[RenderableType] = [Text("Retrieval and knowledge", "italic"), together[0]]
    for trials in by_model_and_boundary(frame):
        rows = []
        for label, text in (c for c in _conditions(trials) if "decode only" not in c[0]):
            known = [trials.knowledge(text, form) for form in ("cloze", "letter")]
            cells = [
                trials.retrieval(text),
                *([trials.retrieval(text, "choices"), *known] if trials.judged else [known[0][:0]] * 3),
            ]
            if any(map(len, cells)):
                rows.append([trials.titled(label), *(_short(trials.accuracy(numbers)) for numbers in cells)])
        if rows:
            together.append(Table(columns, rows, left=columns[:1], show_header=False))
            shown += [Text(trials.model, "bold", overflow="fold"), together[-1], Text("")]
    for table in together:
        table.aligned_with = together
    return Stack(*shown, Text("in-window needles, exact match; 95 % intervals in brackets, n trials\n", "dim"))


def _short(e: Estimate) -> str:
    """Format an estimate on two lines, to fit 80 columns."""
    text = f"{percent(e.value)} n={e.n:,}\n[{percent(e.low, '')}, {percent(e.high, '')}]" if e.n else "–"
    return text.replace(" ", HARD_SPACE)


def _forms(frame: Frame) -> list[Table]:
    """Return a table of retrieval by the form of needles (hops, association, parts) and condition; none if not run.

    Where the untouched model does not find the needles of a form, nothing can be lost: the other cells say so.
    """
    asked = [trials for trials in by_model_and_boundary(frame) if trials.needle_forms]
    forms = list(dict.fromkeys(form for trials in asked for form in trials.needle_forms))
    table = Table(["model", "condition", *forms], caption="Needles that take more than one look-up", left=["condition"])
    for trials in asked:
        weak = {form for form in forms if trials.accuracy(trials.of_form(form, "none")).low < BASELINE}
        for label, text in main_conditions(trials):
            found = [trials.accuracy(trials.of_form(form, text)) for form in forms]
            if any(share.n for share in found):
                told = zip(forms, found, strict=True)
                cells = ["not testable" if e.n and form in weak and text != "none" else _short(e) for form, e in told]
                table.add_row(trials.model, trials.titled(label), *cells)
    return [table] if asked else []


def _claims(frame: Frame, judged: Sequence[Verdict]) -> RenderableType:
    """Return each model's verdicts with reasons; claims that were not judged share a line."""
    failed = f", {frame.failed:,} of them failed" if frame.failed else ""
    shown: list[RenderableType] = [Text("Claims of the paper", "italic")]
    for model in frame.models:
        shown.append(Text(model, "bold", overflow="fold"))
        of_model = [verdict for verdict in judged if verdict.model == model]
        for verdict in of_model:
            if verdict.word not in UNJUDGED:
                said = Text(f"{OUTCOMES[verdict.word][0]} {verdict.word:<14}".replace(" ", HARD_SPACE), OUTCOMES[verdict.word][1])
                shown += [
                    said + Text(verdict.title + f": {verdict.reason}" * bool(verdict.reason)),
                    Padding(Text(verdict.why, "dim"), (0, 0, 0, 2)),
                ]
        unjudged: dict[tuple[Word, str], list[str]] = {}
        for verdict in of_model:
            if verdict.word in UNJUDGED:
                unjudged.setdefault((verdict.word, verdict.why.partition(": ")[2]), []).append(verdict.title)
        for (word, why), titles in unjudged.items():
            reason = f" ({why})" if why != word else ""
            which = "every claim" if len(titles) == len(of_model) else "; ".join(titles)
            shown.append(Text(f"{OUTCOMES[word][0]} {word}{reason}: {which}", OUTCOMES[word][1]))
        shown.append(Text(""))
    return Stack(*shown, Text(f"{frame.trials:,} trials{failed}; a verdict applies to one checkpoint", "dim"))
