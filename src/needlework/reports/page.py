"""Write the report: one self-contained HTML file, and its figures as PNG and SVG files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.console import Console

from needlework.analysis.frame import Frame
from needlework.analysis.reader import load
from needlework.analysis.verdicts import RULES, RULES_NOTE, Verdict, verdicts
from needlework.errors import NeedleworkError
from needlework.files import atomic_write
from needlework.reports import comparison, picture_files, svg, tables
from needlework.reports.browser import Browser
from needlework.reports.conclusion import conclusions, headline
from needlework.reports.figures import FIGURES, make_figure
from needlework.reports.panels import Figure, merge_checkpoints
from needlework.reports.svg import PLAN_OF_CLAIM, UNJUDGED, Overview, overview, run_command
from needlework.tables import Table

FILE_NAME = "report.html"
PLAYGROUND = "play.html"  # an exported playground beside the report, which links to it
PAPER = "https://arxiv.org/abs/2510.19861"
OTHER_TASKS = "Tasks that declare no ability (retrieval, knowledge or perplexity): shown as they are, and judged by no rule."
SCORES = (
    "Needles of all tasks of one kind, plain layout. The graded mean (0 to 5) is no success rate. Out of window: the needle is"
    " beyond the reach of attention; graded and forced choice are in the window. Chance, in brackets: a choice among the values"
    " in the context, those absent from it, or all."
)
LABELS_WIDTH, COLUMN_WIDTHS = 276, (164, 240)  # overview, in pixels: labels; minimum and maximum of a model's column
PAPER_WIDTH = 660  # pixels between the margins of a printed page


def build(dirs: Sequence[Path], out: Path | None = None, pictures: bool = True, against: str | Path | None = None) -> Path:
    """Write report.html and figures/*.png, *.svg for one or more runs; return the path of report.html.

    Args:
        dirs: Directories of runs.
        out: Output directory; the first run's directory by default.
        pictures: Whether to write figures as files, too.
        against: Directory of one of the runs, or a model: the others are compared with it.
    """
    frame = load([Path(directory) for directory in dirs])
    if against is not None:
        comparison.pair_models(frame, against)
    browser = Browser(frame)
    figures = [merge_checkpoints(frame, browser, make_figure(name, frame, browser)) for name in FIGURES]
    judged = verdicts(frame)
    for warning in frame.warnings:
        Console(stderr=True, soft_wrap=True).print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    folder = Path(out) if out is not None else Path(dirs[0])
    path = folder / FILE_NAME
    playground = PLAYGROUND if (folder / PLAYGROUND).is_file() else ""
    text = page(frame, figures, judged, browser, playground, compared=against is not None)
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
    return path


def page(
    frame: Frame,
    figures: Sequence[Figure],
    judged: Sequence[Verdict],
    browser: Browser,
    playground: str = "",
    compared: bool = False,
) -> str:
    """Return the HTML: conclusion, overview and sentences of the verdicts, figures, tables of all scores, the rules.

    Args:
        playground: Relative address of an exported playground to link to.
        compared: Whether models are compared with a base model.
    """
    shown = [figure for figure in figures if figure.panels]
    names = {figure.id: FIGURES[figure.id].link for figure in shown}
    abouts = [(f"{name}: " if len(frame.plans) > 1 and name else "") + about for name, about in frame.plans if about]
    models = f"{len(frame.models)} model" + "s" * (len(frame.models) != 1)
    testable = [
        "",
        "Testable at all",
        "lower bound of the untouched model's retrieval, in the claim's own tasks, at least 80 %",
        "",
    ]
    rules = [[str(r.number), r.title, r.rule, f"needlework run {PLAN_OF_CLAIM[r.claim]}"] for r in RULES]
    return render_template(
        "report.html",
        frame=frame,
        plan_names=[name for name, _ in frame.plans if name],
        headline=headline(frame, judged),
        conclusions=comparison.findings(frame) if compared else conclusions(frame, judged),
        comparisons=[*comparison.claim_tables(frame, judged), *comparison.head_tables(frame)] if compared else [],
        about=[*abouts, f"{frame.trials:,} trials of {models}."],
        paper=PAPER,
        playground=playground,
        links={
            "findings": "Findings",
            **({"comparison": "Comparison"} if compared else {}),
            **names,
            "models": "Scores",
            "method": "Method",
        },
        overview=overview(frame, judged),
        figures=shown,
        contrasts=tables.contrasts(frame),
        models=tables.models(frame),
        scores=[
            ("Retrieval: every score beside the others", tables.scores(frame), SCORES),
            ("Retrieval under other interventions", tables.scores(frame, lambda trials: trials.unplaced), ""),
            ("Knowledge: what is left of the baseline", tables.knowledge(frame), ""),
            ("Other tasks", tables.other_tasks(frame), OTHER_TASKS),
        ],
        rules=Table(["rule", "claim", "supported when", "its trials"], [testable, *rules]),
        rules_note=RULES_NOTE,
        trials=browser.collect(set().union(*(panel.keys() for figure in shown for panel in figure.panels))),
    )


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
        "overview_style": _overview_style,
        "run_command": run_command,
        "UNJUDGED": UNJUDGED,
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


def _overview_style(overview: Overview) -> str:
    least, most = (LABELS_WIDTH + column * len(overview.models) for column in COLUMN_WIDTHS)
    return f"min-width:{least}px;max-width:{most}px;--paper-fit:{min(1.0, PAPER_WIDTH / least):.2f}"
