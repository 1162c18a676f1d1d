"""The sections of the page below the finding: figures with their tables, scores, and the method."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from needlework.report import captions, tables, tasks
from needlework.report.frame import Frame
from needlework.report.spec import Dots, Figure, Grid, Lines, Panel, table
from needlework.report.svg import WIDTH, draw
from needlework.verdicts import RULES, RULES_NOTE

SMALL, LARGE = 260, 420
OTHERS = "Tasks that declare no ability (retrieval, knowledge or perplexity): shown as they are, and judged by no rule."
GRADED = (
    "Needles of all tasks of one kind, plain layout. The graded mean (0 to 5) is no success rate. Out of window: the needle is"
    " beyond the reach of attention; graded and forced choice are in the window. Chance, in brackets: a choice among the values"
    " in the context, those absent from it, or all."
)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", wrap: bool = False) -> str:
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


def contrasts(frame: Frame) -> str:
    header, rows = tables.contrasts(frame)
    return "<h3>The interaction</h3>" + html_table(header, rows) if rows else ""


def models(frame: Frame) -> str:
    titled = [
        ("Retrieval: every score beside the others", tables.scores(frame), GRADED),
        ("Retrieval under interventions that no figure shows", tables.scores(frame, tables.unplaced), ""),
        ("Knowledge: what is left of the baseline", tables.knowledge(frame), ""),
        ("Other tasks", tasks.others(frame), OTHERS),
    ]
    parts = ['<section id="models"><h2>Models and scores</h2>', html_table(*tables.models(frame))]
    for title, (header, rows), caption in titled:
        if rows:
            parts += [f"<h3>{title}</h3>", html_table(header, rows), f'<p class="caption">{caption}</p>' if caption else ""]
    return "".join(parts) + "</section>"


def figure(number: int, figure: Figure, extra: str = "") -> str:
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
    body = "".join(html_table(*table(panel), caption=f"{panel.group}: {panel.title}") for panel in figure.panels)
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
    elif isinstance(panel, Dots) and panel.legend:
        items = "".join(f'<li class="s{color}"><i></i>{escape(name)}</li>' for name, color in panel.legend)
        legend = f'<ul class="legend">{items}</ul>'
    return f'<figure class="panel"><h4>{escape(panel.title)}</h4>{legend}{draw(panel, width)}</figure>'


def method() -> str:
    first = ["", "Testable at all", "lower bound of the untouched model's retrieval, in the claim's own tasks, at least 80 %", ""]
    rows = [[str(r.number), r.title, r.rule, f"needlework run {captions.PLAN_OF_CLAIM[r.claim]}"] for r in RULES]
    words = [
        "Retrieval is judged by needles in a haystack inside the window, by all tasks of that kind with the plain layout; each"
        " trial counts once. A verdict takes the boundary decode (the last prompt token belongs to the answer) where that was"
        " run; numbers of the boundary prefill stand apart and say so.",
        "Single shares carry Wilson intervals. Retained shares compare the same samples with and without the intervention;"
        " their intervals resample whole clusters (samples that share a haystack), seeded, and are never narrower than"
        " Wilson's for the pairs that changed.",
        "Supported and not supported mean that the whole interval lies on one side of the rule's line; what lies across it, or"
        " lacks a part, is inconclusive. Not testable: untouched, the model does not retrieve well enough to lose anything."
        " Does not apply: it lacks the parts that the claim is about. Not run: no trials here.",
        RULES_NOTE,
    ]
    rules = html_table(["rule", "claim", "supported when", "its trials"], [first, *rows], wrap=True)
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in words)
    return f'<section id="method"><h2>Method</h2>{paragraphs}{rules}</section>'
