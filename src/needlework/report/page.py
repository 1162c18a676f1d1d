"""The report: one HTML file that needs nothing but itself, and picture files of its figures beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console

from needlework.errors import NeedleworkError
from needlework.files import whole
from needlework.report import captions, charts, curves, effects, maps, tables, tasks
from needlework.report.browser import Browser
from needlework.report.evidence import verdicts
from needlework.report.frame import Frame
from needlework.report.reader import load
from needlework.report.spec import Figure, Grid, Lines, Panel, keys, table
from needlework.report.svg import WIDTH, draw
from needlework.verdicts import RULES, Rule, Verdict

FILE_NAME = "report.html"
SMALL, LARGE = 260, 420
OTHERS = "Tasks that declare no ability (retrieval, knowledge or perplexity): shown as they are, and judged by no rule."
GRADED = (
    "Needles of all tasks of one kind, plain layout. The graded mean (0 to 5) is no success rate. Out of window: the needle is"
    " beyond the reach of attention; graded and forced choice are in the window. Chance, in brackets: a choice among the values"
    " in the context, those absent from it, or all."
)
FIGURES: dict[str, Callable[[Frame, Browser], Figure]] = {
    "heads": curves.heads,
    "needles": maps.needles,
    "exposure": maps.exposure,
    "dissociation": effects.dissociation,
    "memory": effects.swap,
    "head-map": maps.head_map,
    "context": curves.context,
    "layouts": effects.layouts,
    "tasks": tasks.tasks,
}


def build(dirs: Sequence[Path], out: Path | None = None, pictures: bool = True) -> Path:
    """Write report.html (into `out`, or the first directory) and figures/*.png, *.svg; several runs stand side by side."""
    frame = load([Path(directory) for directory in dirs])
    browser = Browser(frame)
    figures = [make(frame, browser) for make in FIGURES.values()]
    for warning in frame.warnings:
        Console(stderr=True, soft_wrap=True).print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    folder = Path(out) if out is not None else Path(dirs[0])
    path = folder / FILE_NAME
    text = page(frame, figures, browser)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole(path) as file:
            file.write(text)
        if pictures:
            charts.save([figure for figure in figures if figure.panels], folder / "figures")
    except OSError as error:
        raise NeedleworkError(
            f"cannot write the report into {folder}: {error.strerror or error}; files of before are as they were. Make room,"
            " or choose another directory with --out"
        ) from None
    return path


def page(frame: Frame, figures: Sequence[Figure], browser: Browser) -> str:
    shown = [figure for figure in figures if figure.panels]
    body = [_remarks(frame), _findings(frame, verdicts(frame)), _models(frame)]
    tails = {"dissociation": _contrasts(frame)}
    body += [_figure(i, figure, tails.get(figure.id, "")) for i, figure in enumerate(shown, 1)]
    body += [_missing([figure for figure in figures if not figure.panels]), _method()]
    sections = [("findings", "Findings"), ("models", "Models and scores")]
    links = [*sections, *((f.id, f.title) for f in shown), ("method", "Method")]
    nav = "<ul>" + "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in links) + "</ul>"
    names = list(frame.models)
    count = f"{len(names)} model" + "s" * (len(names) != 1)
    parts = {
        "title": escape(f"needlework: {', '.join(names)}"),
        "heading": escape(_heading(names)),
        "lede": escape(f"{frame.trials:,} trials of {count}, with parts silenced while it answers."),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
        "nav": nav,
        "body": "\n".join(part for part in body if part),
        "data": script_json(browser.collect({key for figure in shown for panel in figure.panels for key in keys(panel)})),
    }
    return filled(_asset("page.html"), parts)


def filled(template: str, parts: dict[str, str]) -> str:
    """The template with its holes filled once: nothing inside a part is read as a hole."""
    pieces = template.split("{{")
    text = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        text += [parts[name], rest]
    return "".join(text)


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or a line of the script."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode()


def _asset(name: str) -> str:
    return (files("needlework.report") / name).read_text(encoding="utf-8")


def _heading(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"What does the retrieving in {names[0]}?"
    return "Which attention does the retrieving, and what is the rest for?"


def _chip(word: str) -> str:
    return f'<span class="chip {word.replace(" ", "-")}">{escape(word)}</span>'


def _remarks(frame: Frame) -> str:
    """What a reader must know first: versions that do not fit, and what was left out."""
    warnings = "".join(f'<p class="warning">{escape(words)}</p>' for words in frame.warnings)
    notes = f'<p class="caption">{escape(" ".join(frame.notes))}</p>' if frame.notes else ""
    return f'<section id="remarks">{warnings}{notes}</section>' if warnings or notes else ""


def _findings(frame: Frame, judged: Sequence[Verdict]) -> str:
    rows = []
    for rule in RULES:
        words = {v.model: v.word for v in judged if v.claim == rule.claim}
        cells = "".join(f"<td>{_chip(words[model])}</td>" for model in frame.models)
        rows.append(f'<tr><th scope="row"><a href="#claim-{rule.claim}">{escape(rule.title)}</a></th>{cells}</tr>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ["claim", *frame.models])
    overview = _scroll("Verdicts", f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
    claims = "".join(_claim(rule, [v for v in judged if v.claim == rule.claim]) for rule in RULES)
    return (
        '<section id="findings"><h2>Findings</h2><p class="caption">The paper\'s claims, judged for each model by rules that'
        " were fixed before any run. A verdict speaks of one checkpoint. Brackets hold 95 % intervals.</p>"
        f'{overview}<div class="claims">{claims}</div></section>'
    )


def _claim(rule: Rule, judged: Sequence[Verdict]) -> str:
    items = "".join(f"<li>{_chip(v.word)}<div><b>{escape(v.model)}</b><p>{_tidy(v.sentence)}</p></div></li>" for v in judged)
    return (
        f'<article class="claim" id="claim-{rule.claim}"><div><h3>{escape(rule.title)}</h3>'
        f'<p class="says">{escape(rule.says)}</p></div><ul>{items}</ul></article>'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", wrap: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    kind = ' class="wrap"' if wrap else ""
    lines = [(row[0], "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row[1:])) for row in rows]
    body = "".join(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>' for first, cells in lines)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    table_ = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _scroll(caption or header[0] or "table", table_)


def _scroll(label: str, inside: str) -> str:
    """A wide table scrolls by itself, with the keyboard too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{inside}</div>'


def _tidy(sentence: str) -> str:
    """No line breaks inside "20.6 %" and "n = 68"."""
    return escape(sentence).replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0")


def _contrasts(frame: Frame) -> str:
    header, rows = tables.contrasts(frame)
    return "<h3>The interaction</h3>" + _table(header, rows) if rows else ""


def _models(frame: Frame) -> str:
    titled = [
        ("Retrieval: every score beside the others", tables.scores(frame), GRADED),
        ("Retrieval under interventions that no figure shows", tables.scores(frame, tables.unplaced), ""),
        ("Knowledge: what is left of the baseline", tables.knowledge(frame), ""),
        ("Other tasks", tasks.others(frame), OTHERS),
    ]
    parts = ['<section id="models"><h2>Models and scores</h2>', _table(*tables.models(frame))]
    for title, (header, rows), caption in titled:
        if rows:
            parts += [f"<h3>{title}</h3>", _table(header, rows), f'<p class="caption">{caption}</p>' if caption else ""]
    return "".join(parts) + "</section>"


def _figure(number: int, figure: Figure, extra: str = "") -> str:
    parts = [
        f'<section id="{figure.id}"><p class="fig">Figure {number}</p><h2>{escape(figure.title)}</h2>'
        f'<p class="caption">{escape(figure.caption)}</p>'
    ]
    if any(isinstance(panel, Grid) for panel in figure.panels):
        top = max(panel.top for panel in figure.panels if isinstance(panel, Grid))
        parts.append(f'<p class="scale" aria-hidden="true">0 %<span></span>{"100 %" if top == 1 else "most"}</p>')
    groups = figure.by_group()
    if all(len(panels) == 1 for panels in groups):
        parts.append(_panels(figure.panels))
    else:
        parts += [f"<h3>{escape(panels[0].group)}</h3>{_panels(panels, apart=True)}" for panels in groups]
    body = "".join(_table(*table(panel), caption=f"{panel.group}: {panel.title}") for panel in figure.panels)
    parts.append(f"{extra}<details><summary>The numbers as tables</summary>{body}</details></section>")
    return "".join(parts)


def _panels(panels: Sequence[Panel], apart: bool = False) -> str:
    """Curves of one model two by two, its heat maps small, everything else as it fits."""
    kind = "small" if apart and isinstance(panels[0], Grid) else "two" if apart else ""
    width = {"small": SMALL, "two": LARGE, "": WIDTH}[kind]
    return f'<div class="panels {kind}">' + "".join(_panel(panel, width) for panel in panels) + "</div>"


def _panel(panel: Panel, width: int) -> str:
    legend = ""
    if isinstance(panel, Lines):
        dash = ' class="dashed"'
        items = "".join(f'<li class="s{s.color}"><i{dash * s.dashed}></i>{escape(s.label)}</li>' for s in panel.series)
        legend = f'<p class="y">{escape(panel.y_label)}</p><ul class="legend">{items}</ul>'
    return f'<figure class="panel"><h4>{escape(panel.title)}</h4>{legend}{draw(panel, width)}</figure>'


def _missing(absent: Sequence[Figure]) -> str:
    lines = [
        f'<p class="missing" id="{figure.id}">{escape(figure.title)}: no trials here. <code>'
        f"{escape(captions.command_for(figure.id))}</code> gives them.</p>"
        for figure in absent
    ]
    return f'<section id="missing"><h2>Not run</h2>{"".join(lines)}</section>' if lines else ""


def _method() -> str:
    rows = [[rule.title, rule.rule] for rule in RULES]
    testable = ["Testable at all", "lower bound of the untouched model's retrieval, in the claim's own tasks, at least 80 %"]
    words = (
        "Retrieval is judged by needles in a haystack inside the window, by all tasks of that kind with the plain layout; each"
        " trial counts once. A verdict takes the boundary decode (the last prompt token belongs to the answer) where that was"
        " run; numbers of the boundary prefill stand apart and say so. "
        "Single shares carry Wilson intervals. Retained shares compare the same samples with and without the intervention;"
        " their intervals resample whole clusters (samples that share a haystack), seeded, and are never narrower than"
        " Wilson's for the pairs that changed. Not supported means that the whole interval lies on the other side; what lies"
        " across the line is inconclusive. 0 of n needs n of 73 at least for an upper bound of 5 %."
    )
    rules = _table(["claim", "supported when"], [testable, *rows], wrap=True)
    return f'<section id="method"><h2>Method</h2><p>{escape(words)}</p>{rules}</section>'
