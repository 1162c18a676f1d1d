"""What a survey of heads says, as tables for a terminal of 80 columns and for one page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from needlework.errors import NeedleworkError, did_you_mean
from needlework.files import file_name, whole
from needlework.heads import foreign, pictures
from needlework.heads.agreement import Agreement
from needlework.heads.judging import RANDOM
from needlework.heads.methods import table
from needlework.heads.survey import Survey
from needlework.stats import number, percent
from needlework.terminal import Sheet

BEST_HEADS = 10
_STYLE = "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}" + (
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.15rem .7rem;text-align:left;border-bottom:1px solid #ddd}"
    "figure{margin:1.5rem 0}svg{max-width:100%;height:auto}caption{text-align:left;font-weight:600}"
)


class Grid(NamedTuple):
    """A table as plain words."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str]  # columns that are no numbers

    def sheet(self) -> Sheet:
        sheet = Sheet(self.columns, self.title, self.words)
        for row in self.rows:
            sheet.add_row(*row)
        return sheet

    def html(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in self.rows)
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table>"


def grids(survey: Survey) -> list[Grid]:
    """Rankings and their judgement, the best heads, agreement, static against dynamic."""
    found = [_rankings(survey), _best_heads(survey)]
    if len(survey.rankings) > 1:
        found.append(_agreement(survey))
    if survey.dynamic:
        found.append(_dynamic(survey))
    return found


def legend(survey: Survey) -> str:
    """What the columns mean, and what they were measured on."""
    made = survey.settings
    judged = f", judged on {made.held_out} others of each of two more seeds" if survey.curves else ""
    return (
        f"Ranked on {made.samples} samples of {', '.join(survey.tasks)}, seed {made.seed}{judged}. Area: under retrieval against"
        " heads kept. Halves, other seed: rank correlation, and overlap of the best heads, of two rankings by one method."
        " Heads of equal score stand in the order of the model."
    )


def _rankings(survey: Survey) -> Grid:
    floor = survey.curves.get(RANDOM)
    rows = []
    for name in sorted(survey.rankings, key=lambda name: -survey.curves[name].area.value if survey.curves else 0.0):
        curve, retest = survey.curves.get(name), survey.retests.get(name)
        area = _bounds(curve.area.value, curve.area.low, curve.area.high) if curve else "–"
        fewest = str(curve.smallest(survey.settings.keep)) if curve else "–"
        agreed = (retest.halves, retest.other_seed) if retest else (None, None)
        rows.append((name, area, fewest, *map(_agreed, agreed)))
    if floor:
        fewest = str(floor.smallest(survey.settings.keep))
        rows.append((RANDOM, _bounds(floor.area.value, floor.area.low, floor.area.high), fewest, "–", "–"))
    keep = f"k for {100 * survey.settings.keep:g} %"
    title = f"{survey.model.name}: {len(survey.anatomy.heads)} heads; untouched retrieval {survey.baseline.text()}"
    return Grid(title, ("method", "area % [95 %]", keep, "halves", "other seed"), rows, ("method",))


def _bounds(value: float, low: float, high: float) -> str:
    return f"{percent(value, '')} [{percent(low, '')},\u00a0{percent(high, '')}]".replace(" ", "\u00a0")


def _agreed(found: Agreement | None) -> str:
    return f"{found.spearman:.2f},\u00a0{100 * found.overlap:.0f}%" if found else "–"


def _best_heads(survey: Survey) -> Grid:
    ranking = survey.rankings[survey.best]
    intervals = ranking.evidence.get("intervals", {})
    rows = []
    for place, head in enumerate(ranking.order[:BEST_HEADS], 1):
        name = f"{head.layer}.{head.index}"
        score = number(ranking.scores[head]) if ranking.scores else "–"
        spread = f"[{number(intervals[name][0])}, {number(intervals[name][1])}]" if name in intervals else "–"
        rows.append((str(place), name, score, spread))
    return Grid(f"best heads by {survey.best}", ("place", "layer.head", "score", "95 %"), rows, ())


def _agreement(survey: Survey) -> Grid:
    """A corner of the matrix: rank correlation above, overlap of the best below."""
    names, found = list(survey.rankings), survey.agreements
    rows = []
    for i, a in enumerate(names):
        above, below = ([found[a][b] for b in some] for some in (names[i + 1 :], names[:i]))
        shares = [f"{100 * one.overlap:.0f}%" for one in below]
        rows.append((f"{i + 1} {a}", *shares, "·", *(f"{one.spearman:.2f}" for one in above)))
    first = found[names[0]][names[1]]
    title = f"agreement: rank correlation above,\noverlap of the best {first.k} below (by chance {100 * first.by_chance:.0f}%)"
    return Grid(title, ("method", *(str(i + 1) for i in range(len(names)))), rows, ("method",))


def _dynamic(survey: Survey) -> Grid:
    assert survey.dynamic is not None
    rows = []
    for way in survey.dynamic.ways:
        e = way.retrieval
        rows.append((way.name, way.heads, _bounds(e.value, e.low, e.high), percent(way.retained.value)))
    title = f"{100 * survey.dynamic.share:g} % of the heads of each layer (n = {survey.dynamic.ways[0].retrieval.n})"
    return Grid(title, ("heads chosen", "kept", "retrieval % [95 %]", "retained"), rows, ("heads chosen", "kept"))


def methods() -> Grid:
    """The table of methods."""
    rows = [(m.name, m.kind, m.about) for m in table().values()]
    return Grid("ways to rank heads", ("method", "looks at", "measures"), rows, ("method", "looks at", "measures"))


def check_out(out: Path | None, exports: Sequence[str] = ()) -> None:
    """Nothing that is there is written over; what cannot be written is told before anything is measured."""
    if exports and out is None:
        raise NeedleworkError(f"--export {exports[0]} writes files: give --out DIR")
    for kind in exports:
        if kind not in foreign.FILES:
            raise NeedleworkError(f"there is no format {kind!r} to export to; {did_you_mean(kind, foreign.FILES)}")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NeedleworkError(f"{out} exists and is not empty; nothing in it was touched: choose another --out, or remove it")


def save(survey: Survey, out: Path, exports: Sequence[str] = ()) -> list[Path]:
    """Everything that was found, into a directory that is new or empty."""
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, ranking in survey.rankings.items():
        path = out / f"ranking-{file_name(name)}.json"
        ranking.save(path)
        written.append(path)
        for kind in exports:
            path = out / foreign.FILES[kind].format(name=file_name(name))
            foreign.write(ranking, path, kind, survey.anatomy)
            written.append(path)
    with whole(out / "heads.json") as file:
        json.dump(survey.to_dict(), file, indent=1, allow_nan=False)
    written += [out / "heads.json", *pictures.save(survey, out)]
    with whole(out / "heads.html") as file:
        file.write(_page(survey, out))
    return [*written, out / "heads.html"]


def _page(survey: Survey, out: Path) -> str:
    """One file with all tables and pictures in it."""
    parts = [f"<h1>Heads of {escape(survey.model.name)}</h1>"]
    if survey.smallest:
        parts.append(f"<p>{escape(survey.smallest.text())}.</p>")
    parts += [f"<p>{escape(legend(survey))}</p>", *(grid.html() for grid in grids(survey))]
    for name in pictures.NAMES:
        if (out / f"{name}.svg").exists():
            svg = (out / f"{name}.svg").read_text(encoding="utf-8")
            parts.append(f"<figure>{svg[svg.index('<svg') :]}</figure>")
    title = f"<title>Heads of {escape(survey.model.name)}</title>"
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{title}<style>{_STYLE}</style></head>'
    return f"{head}<body>{''.join(parts)}</body></html>\n"
