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
from needlework.report import captions, charts, checkpoints, curves, effects, maps, overview_page, sections, tasks
from needlework.report.browser import Browser
from needlework.report.evidence import verdicts
from needlework.report.frame import Frame
from needlework.report.overview import overview
from needlework.report.reader import load
from needlework.report.spec import Figure, keys
from needlework.verdicts import Verdict

FILE_NAME = "report.html"
FIGURES: dict[str, Callable[[Frame, Browser], Figure]] = {
    "heads": curves.heads,
    "needles": maps.needles,
    "exposure": maps.exposure,
    "dissociation": effects.dissociation,
    "memory": effects.swap,
    "head-map": maps.head_map,
    "context": curves.context,
    "hops": effects.hops,
    "layouts": effects.layouts,
    "tasks": tasks.tasks,
}


def build(dirs: Sequence[Path], out: Path | None = None, pictures: bool = True) -> Path:
    """Write report.html (into `out`, or the first directory) and figures/*.png, *.svg; several runs stand side by side."""
    frame = load([Path(directory) for directory in dirs])
    browser = Browser(frame)
    figures = [checkpoints.shared(frame, browser, make(frame, browser)) for make in FIGURES.values()]
    judged = verdicts(frame)
    for warning in frame.warnings:
        Console(stderr=True, soft_wrap=True).print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    folder = Path(out) if out is not None else Path(dirs[0])
    path = folder / FILE_NAME
    text = page(frame, figures, judged, browser)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole(path) as file:
            file.write(text)
        if pictures:
            charts.save([figure for figure in figures if figure.panels], folder / "figures", overview(frame, judged))
    except OSError as error:
        raise NeedleworkError(
            f"cannot write the report into {folder}: {error.strerror or error}; files of before are as they were. Make room,"
            " or choose another directory with --out"
        ) from None
    return path


def page(frame: Frame, figures: Sequence[Figure], judged: Sequence[Verdict], browser: Browser) -> str:
    """What was found, as a picture and then in sentences; the figures; all scores as tables; the method."""
    shown = [figure for figure in figures if figure.panels]
    body = [overview_page.findings(overview(frame, judged)), _remarks(frame)]
    tails = {"dissociation": sections.contrasts(frame)}
    body += [sections.figure(i, figure, tails.get(figure.id, "")) for i, figure in enumerate(shown, 1)]
    body += [sections.models(frame), sections.method()]
    links = {"findings": "Findings", **{f.id: captions.LINKS[f.id] for f in shown}, "models": "Scores", "method": "Method"}
    nav = "<ul>" + "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in links.items()) + "</ul>"
    names = list(frame.models)
    parts = {
        "title": escape(f"needlework: {', '.join(names)}"),
        "kicker": escape(" · ".join(["needlework report", *(name for name, _ in frame.plans if name)])),
        "heading": escape(_heading(names)),
        "lede": _lede(frame),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
        "nav": nav,
        "body": "\n".join(part for part in body if part),
        "data": script_json(browser.collect({key for figure in shown for panel in figure.panels for key in keys(panel)})),
    }
    return filled(_asset("page.html"), parts).encode("utf-8", "replace").decode()


def _lede(frame: Frame) -> str:
    """What the plans are about, in their own words, and how much was asked."""
    abouts = [(f"{name}: " if len(frame.plans) > 1 and name else "") + about for name, about in frame.plans if about]
    count = f"{len(frame.models)} model" + "s" * (len(frame.models) != 1)
    asked = f"{frame.trials:,} trials of {count}, with parts silenced while it answers."
    return "".join(f'<p class="lede">{escape(text)}</p>' for text in [*abouts, asked])


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


def _remarks(frame: Frame) -> str:
    """What a reader must know: versions that do not fit, and what was left out."""
    warnings = "".join(f'<p class="warning">{escape(words)}</p>' for words in frame.warnings)
    notes = f'<p class="caption">{escape(" ".join(frame.notes))}</p>' if frame.notes else ""
    return f'<section id="remarks">{warnings}{notes}</section>' if warnings or notes else ""
