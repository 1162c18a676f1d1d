"""Write the report: one self-contained HTML file with its conclusions in plain words, and its figures as PNG and SVG files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.console import Console

from needlework.analysis.evidence import NO_CONTEXT
from needlework.analysis.frame import Frame
from needlework.analysis.layers import LayerAblations
from needlework.analysis.model_trials import by_boundary
from needlework.analysis.reader import load
from needlework.analysis.verdicts import RULES, RULES_NOTE, Verdict, share, verdicts
from needlework.errors import NeedleworkError
from needlework.files import atomic_write
from needlework.reports import comparison, picture_files, svg, tables
from needlework.reports.browser import Browser
from needlework.reports.figures import FIGURES, make_figure
from needlework.reports.panels import Figure, merge_checkpoints
from needlework.reports.svg import UNJUDGED, overview
from needlework.tables import Table

FILE_NAME = "report.html"
PLAYGROUND = "play.html"  # an exported playground beside the report, which links to it
PAPER = "https://arxiv.org/abs/2510.19861"
FIRST_PANELS = 2  # of a figure and models that are compared; the others are folded
MOST_MODELS = 4  # that have sentences of their own
MOST_OWN = 2  # interventions outside all figures of the claims that a sentence names


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        path: The file report.html.
        headline: Its first line.
        conclusions: (model, what was found) in sentences.
        verdicts: The verdict on each claim for each model.
        differences: Paired differences of a comparison as JSON values; None without one.
    """

    path: Path
    headline: str
    conclusions: Sequence[tuple[str, str]]
    verdicts: Sequence[Verdict]
    differences: list[dict[str, Any]] | None

    def text(self) -> str:
        """Return headline and conclusions in lines."""
        return "\n".join([f"{self.headline}.", *(f"{model}: {words}" for model, words in self.conclusions)])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {
            "report": str(self.path),
            "headline": self.headline,
            "conclusions": [{"model": model, "found": words} for model, words in self.conclusions],
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            **({} if self.differences is None else {"differences": self.differences}),
        }


def report(
    directories: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    against: str | Path | None = None,
    *,
    pictures: bool = True,
) -> Path:
    """Write report.html and figures/*.png, *.svg for one or more runs; return the path of report.html.

    Args:
        directories: Directories of runs.
        out: Output directory; the first run's directory by default.
        against: Directory of one of the runs, or a model's name: the other models are compared with it, sample by sample.
        pictures: Whether to write figures as files, too.
    """
    return write_report(directories, out, against, pictures=pictures).path


def write_report(
    directories: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    against: str | Path | None = None,
    *,
    pictures: bool = True,
) -> WrittenReport:
    """Write a report as `report` does, and return what it concludes, too."""
    runs = [Path(run) for run in ([directories] if isinstance(directories, (str, Path)) else directories)]
    frame = load(runs)
    if against is not None:
        comparison.pair_models(frame, against)
    browser = Browser(frame)
    figures = [merge_checkpoints(frame, browser, make_figure(name, frame, browser)) for name in FIGURES]
    judged = verdicts(frame)
    for warning in frame.warnings:
        Console(stderr=True, soft_wrap=True).print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    folder = runs[0] if out is None else Path(out)
    path = folder / FILE_NAME
    playground = PLAYGROUND if (folder / PLAYGROUND).is_file() else ""
    found = comparison.findings(frame) if against is not None else conclusions(frame, judged)
    first_line = headline(frame, judged) if against is None else comparison.headline(frame)
    text = page(frame, figures, judged, browser, playground, first_line, found, compared=against is not None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text)
        if pictures:
            drawn = [figure for figure in figures if figure.panels]
            picture_files.save_figures(drawn, folder / "figures", overview(frame, judged))
    except OSError as error:
        raise NeedleworkError(
            f"cannot write the report into {folder}: {error.strerror or error}; files of before are as they were. Make room,"
            " or choose another directory with --out"
        ) from None
    differences = None if against is None else comparison.records(frame)
    return WrittenReport(path, first_line, found, judged, differences)


def page(
    frame: Frame,
    figures: Sequence[Figure],
    judged: Sequence[Verdict],
    browser: Browser,
    playground: str,
    first_line: str,
    found: Sequence[tuple[str, str]],
    compared: bool = False,
) -> str:
    """Return the HTML: conclusion, overview and sentences of the verdicts, figures, tables of all scores, the rules.

    Args:
        playground: Relative address of an exported playground to link to; empty without one.
        first_line: The headline.
        found: (model, what was found) in sentences.
        compared: Whether models are compared with a base model.
    """
    shown = [figure for figure in figures if figure.panels]
    abouts = [(f"{name}: " if len(frame.plans) > 1 and name else "") + about for name, about in frame.plans if about]
    models = f"{len(frame.models)} model" + "s" * (len(frame.models) != 1)
    retrieves = "lower bound of the untouched model's retrieval, in the claim's own tasks, at least 80 %"
    rules = [[str(r.number), r.title, r.rule, f"needlework run {r.plan}"] for r in RULES]
    return render_template(
        "report.html",
        frame=frame,
        plan_names=[name for name, _ in frame.plans if name],
        headline=first_line,
        conclusions=found,
        compared=compared,
        changes=comparison.change_tables(frame, judged) if compared else [],
        differences=comparison.claim_tables(frame, judged) if compared else [],
        best_heads=comparison.head_tables(frame) if compared else [],
        about=[*abouts, f"{frame.trials:,} trials of {models}."],
        paper=PAPER,
        playground=playground,
        links={figure.id: FIGURES[figure.id].link for figure in shown},
        overview=overview(frame, judged),
        figures=shown,
        opened="layers" if first_line == layers_headline(frame) else "" if not shown else shown[0].id,
        contrasts=tables.contrasts(frame),
        models=tables.models(frame),
        scores=tables.scores(frame),
        other_scores=tables.scores(frame, lambda trials: trials.unplaced),
        knowledge=tables.knowledge(frame),
        other_tasks=tables.other_tasks(frame),
        rules=Table(["rule", "claim", "supported when", "its trials"], [["", "Testable at all", retrieves, ""], *rules]),
        rules_note=RULES_NOTE,
        trials=browser.collect(set().union(*(panel.keys() for figure in shown for panel in figure.panels))),
    )


def headline(frame: Frame, judged: Sequence[Verdict]) -> str:
    """Return the outcome of the first claim that was judged, over all models to which it applies.

    If that is open, and layers were ablated, it is how many of them suffice for retrieval.
    """
    for rule in RULES:
        of_claim = [v for v in judged if v.claim == rule.claim and v.word not in UNJUDGED]
        if not of_claim:
            continue
        claim, count = rule.title[:1].lower() + rule.title[1:], len(of_claim)
        supported, against, weak = (
            sum(verdict.word == word for verdict in of_claim) for word in ("supported", "not supported", "not testable")
        )
        where = f"In {of_claim[0].model}" if count == 1 else "In both models" if count == 2 else f"In all {count} models"
        if supported == count:
            return f"{where}, {claim}"
        if supported:
            return f"{rule.title} in {supported} of {count} models"
        if against:
            return f"{where if against == count else f'In {against} of {count} models'}, {rule.otherwise}"
        if weak == count:
            return f"{where}, retrieval is too weak to test the claims"
        return layers_headline(frame) or f"{where}, it is open whether {claim}"
    return layers_headline(frame) or f"What interventions do to {', '.join(list(frame.models)[:MOST_MODELS])}"


def layers_headline(frame: Frame) -> str:
    """Return how many attention layers suffice for retrieval in each model; "" if it was not tried."""
    found = [(model, LayerAblations(by_boundary(frame, model)[0]).headline()) for model in frame.models]
    said = [f"In {model}, {words}" for model, words in found if words][:MOST_MODELS]
    return "; ".join([*said[:1], *(words.replace("In", "in", 1).removesuffix(" for retrieval") for words in said[1:])])


def conclusions(frame: Frame, judged: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Return (model, what was found): the numbers that decided the first two claims, and those of own interventions."""
    found = []
    for model in frame.models:
        of_model = [v for v in judged if v.model == model and v.word not in UNJUDGED]
        testable = [v for v in of_model if v.word != "not testable"]
        said = ["no claim can be tested: " + v.why.partition(": ")[2] for v in of_model[:1] if not testable]
        for verdict in testable[:2]:  # its first clause, without an aside; ends inside brackets and numbers do not count
            clause = re.match(r"(?:[^;.\[]|\.\d|\[[^\]]*\])*", verdict.sentence)
            said.append(re.sub(r"(?<=\]) \(.*", "", clause[0].strip() if clause else verdict.sentence))
        trials = by_boundary(frame, model)[0]
        without_context = trials.text_of(NO_CONTEXT)  # on no figure's axis, but a part of a claim
        unplaced = [(label, text) for label, text in trials.unplaced if text != without_context]
        own = [(label, trials.accuracy(trials.retrieval(text))) for label, text in unplaced]
        said += [sentence] if (sentence := LayerAblations(trials).sentence()) else []
        said += [f"under {label}, it finds {share(e, 'the needles')}" for label, e in own if e.n][:MOST_OWN]
        if said:
            supported = sum(verdict.word == "supported" for verdict in of_model)
            tally = f" {supported} of {len(of_model)} claims are supported." if testable and len(of_model) > 1 else ""
            found.append((model, "; ".join(text[:1].lower() + text[1:] for text in said) + "." + tally))
    return found[:MOST_MODELS]


def render_template(name: str, **values: Any) -> str:
    """Render a template of templates/; values are escaped unless they are Markup."""
    text = _environment().get_template(name).render(**values)
    return text.lstrip().encode("utf-8", "replace").decode()


@cache
def _environment() -> Environment:
    loader = PackageLoader("needlework.reports")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"script_json": script_json, "keep_units": _keep_units}
    environment.globals |= {
        "draw_panel": svg.draw_panel,
        "draw_strips": svg.draw_strips,
        "UNJUDGED": UNJUDGED,
        "FIRST_PANELS": FIRST_PANELS,
    }
    return environment


def script_json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element: it cannot close the element or break a line of JavaScript."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text.encode("utf-8", "replace").decode())


def _keep_units(sentence: str) -> Markup:
    """Put non-breaking spaces into "20.6 %" and "n = 68"."""
    return Markup(escape(sentence).replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0"))
