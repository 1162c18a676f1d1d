"""The overview on the page: a table of small figures in SVG, its numbers as text for those who do not see them."""

from __future__ import annotations

from html import escape

from needlework.report.overview import UNJUDGED, Block, Overview, Strip, command, free, outcome, zone
from needlework.stats import whole_percent
from needlework.verdicts import Point, Verdict

LINE = 19  # height of a line of a small figure, in its own units and in the style sheet's pixels
LABELS, COLUMN = 276, (164, 240)  # pixels: width of the labels; least and most of a model's column
PAPER = 660  # pixels between the margins of a printed page
LEFT, RIGHT, WIDTH = 6, 106, 148  # 0 %, 100 %, and the room for the number behind


def chip(verdict: Verdict, link: bool = False) -> str:
    """The verdict's word, each with a look of its own."""
    kind = verdict.word.replace(" ", "-")
    start = f'<a href="#claim-{verdict.claim}"' if link else "<span"
    return f'{start} class="chip {kind}" title="{escape(verdict.why)}">{escape(verdict.word)}</{"a" if link else "span"}>'


def findings(overview: Overview) -> str:
    """The picture, and below it what it says in sentences."""
    claims = "".join(map(_claim, overview.blocks))
    return (
        '<section id="findings"><h2>What was found</h2><p class="caption">The paper\'s claims, judged for each model by numbered'
        " rules. A verdict speaks of one checkpoint.</p>"
        f'{picture(overview)}<h3>In sentences</h3><div class="claims">{claims}</div></section>'
    )


def _claim(block: Block) -> str:
    """The verdicts of one claim with their reasons; of models that were not asked there is nothing to say."""
    said = [v for v in block.verdicts.values() if v.word not in UNJUDGED]
    items = "".join(
        f'<li>{chip(v)}<div><b>{escape(v.model)}</b><p class="why">{_tidy(v.why)}</p><p>{_tidy(v.sentence)}</p></div></li>'
        for v in said
    )
    rule = block.rule
    return (
        f'<article class="claim" id="claim-{rule.claim}"><div><h3><i>{rule.number}</i> {escape(rule.title)}</h3>'
        f'<p class="says">{escape(rule.says)}</p></div><ul>{items}</ul></article>'
    )


def _tidy(sentence: str) -> str:
    """No line breaks inside "20.6 %" and "n = 68"."""
    return escape(sentence).replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0")


def picture(overview: Overview) -> str:
    """The table, and what its signs mean."""
    heads = "".join(
        f'<th scope="col"><b>{escape(model)}</b><small>{escape(kind)}</small></th>' for model, kind in overview.models.items()
    )
    body = "".join(_block(block, overview, first=i == 0) for i, block in enumerate(overview.blocks))
    least, most = (LABELS + column * len(overview.models) for column in COLUMN)
    style = f"min-width:{least}px;max-width:{most}px;--paper-fit:{min(1.0, PAPER / least):.2f}"
    table = (
        f'<table class="overview" style="{style}"><colgroup><col></colgroup>'
        f'<thead><tr><th scope="col"><span class="hidden">claim</span></th>{heads}</tr></thead><tbody>{body}</tbody></table>'
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Verdicts with their numbers">{table}</div>'
        f"{_key()}{_not_run(overview)}"
    )


def _block(block: Block, overview: Overview, first: bool) -> str:
    rule = block.rule
    labels = "".join(f"<li>{escape(strip.label)}</li>" for strip in block.strips)
    head = (
        f'<th scope="row"><a href="#claim-{rule.claim}"><i>{rule.number}</i> {escape(rule.title)}</a>'
        f'<ul class="lines" aria-hidden="true">{labels}</ul></th>'
    )
    cells = []
    for model in overview.models:
        if not overview.outside(model):
            cells.append(_cell(block, model))
        elif first:  # once for all claims
            cells.append(_cell(block, model, len(overview.blocks)))
    return f"<tr>{head}{''.join(cells)}</tr>"


def _cell(block: Block, model: str, rows: int = 1) -> str:
    verdict = block.verdicts[model]
    span = f' rowspan="{rows}"' if rows > 1 else ""
    start = f'<td class="{verdict.word.replace(" ", "-")}"{span}><b class="who">{escape(model)}</b>'
    if not verdict.points:
        why = verdict.why.partition(": ")[2]
        return f"{start}{chip(verdict)}{f'<small>{escape(why)}</small>' if why != verdict.word else ''}</td>"
    numbers = "".join(
        f"<li>{escape(strip.points[model].label)}<span> {escape(strip.points[model].estimate.text())}</span></li>"
        if model in strip.points
        else "<li></li>"
        for strip in block.strips
    )
    return (
        f'{start}<p class="word">{chip(verdict, link=True)}<small>n = {verdict.estimate.n:,}</small></p>'
        f'<div class="drawn"><ul class="lines">{numbers}</ul>{_strips(block, model)}</div></td>'
    )


def _x(share: float) -> float:
    return LEFT + min(1.06, max(-0.05, share)) * (RIGHT - LEFT)


def _strips(block: Block, model: str) -> str:
    body = [_line(strip, model, LINE * i) for i, strip in enumerate(block.strips)]
    height = LINE * len(block.strips)
    label = f"{model}: {block.rule.title}, {block.verdicts[model].word}"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _line(strip: Strip, model: str, top: int) -> str:
    point = strip.points.get(model)
    middle = top + LINE / 2
    parts = [f'<line x1="{_x(0):.1f}" x2="{_x(1):.1f}" y1="{middle}" y2="{middle}" class="rule"/>']
    if point is None:
        return ""
    if span := zone(point):
        a, b = _x(span[0] if span[0] else -0.05), _x(span[1] if span[1] < 1 else 1.05)
        parts.append(f'<rect class="zone" x="{a:.1f}" y="{top + 1.5}" width="{b - a:.1f}" height="{LINE - 3}" rx="2"/>')
    if point.line is not None:
        kind = "chance" if point.bound == "chance" else "limit"
        at = _x(point.line)
        parts.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{top + 1.5}" y2="{top + LINE - 1.5}"/>')
    return "".join(parts) + _mark(point, middle) + _number(strip.note(model), point, middle)


def _mark(point: Point, middle: float) -> str:
    e = point.estimate
    title = f"{point.label}: {e.text()}"
    return (
        f'<g class="{outcome(point)}"><title>{escape(title)}</title>'
        f'<line class="bar" x1="{_x(e.low):.1f}" x2="{_x(e.high):.1f}" y1="{middle}" y2="{middle}"/>'
        f'<circle class="dot" cx="{_x(e.value):.1f}" cy="{middle}" r="3.4"/></g>'
    )


def _number(note: str, point: Point, middle: float) -> str:
    e = point.estimate
    text = f'<text x="{WIDTH}" y="{middle + 3.6:.1f}" text-anchor="end" class="share">{whole_percent(e.value)} %</text>'
    if not note:
        return text
    return (
        text + f'<text x="{_x(free(point)):.1f}" y="{middle + 2.8:.1f}" text-anchor="middle" class="kept">{escape(note)}</text>'
    )


def _key() -> str:
    """What the signs mean, once, as a line below the table."""
    signs = [
        ('<rect class="zone" x="0" y="2" width="26" height="12" rx="2"/>', "where the claim has it"),
        ('<line class="limit" x1="13" x2="13" y1="1" y2="15"/>', "the rule's line"),
        ('<line class="chance" x1="13" x2="13" y1="1" y2="15"/>', "chance"),
        (
            '<g class="plain"><line class="bar" x1="2" x2="24" y1="8" y2="8"/><circle class="dot" cx="13" cy="8" r="3.4"/></g>',
            "share with its 95 % interval, from 0 to 100 %; n: trials of the number that decided",
        ),
    ]
    items = "".join(
        f'<li><svg viewBox="0 0 26 16" aria-label="{words}" role="img">{sign}</svg>{words}</li>' for sign, words in signs
    )
    return f'<ul class="key">{items}</ul>'


def _not_run(overview: Overview) -> str:
    if not overview.not_run:
        return ""
    named = "; ".join(f"{escape(rule.title)} (<code>{escape(command(rule))}</code>)" for rule in overview.not_run)
    return f'<p class="caption">Claims without trials here: {named}.</p>'
