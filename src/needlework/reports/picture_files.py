"""Save figures as PNG and SVG files: render the report's SVG drawings by matplotlib with the page's style sheet.

Figures are drawn once, as SVG (`svg.py`). Here CSS classes, variables and mixed colours are resolved, so that the files
work outside of browsers. Only the SVG elements that `svg.py` uses are supported.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from needlework.files import atomic_path
from needlework.plots import light_colors, style_sheet
from needlework.reports import svg
from needlework.reports.panels import Figure

PIXELS_PER_INCH = 96
TEXT_SCALE = 0.68  # points per pixel: below the exact 0.75 because matplotlib's font is wider than browsers' fonts
STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.fontsize": 6.5,
    "legend.framealpha": 0.75,
    "legend.edgecolor": "none",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may contain dollar signs
    "svg.hashsalt": "needlework",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
Style = dict[str, str]


def save_figures(figures: Sequence[Figure], folder: Path, overview: svg.Overview) -> None:
    """Write PNG and SVG files of the overview and of each figure."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"finding": svg.draw_overview(overview)} if overview.blocks else {}
    drawings |= {figure.id: svg.draw_figure(figure) for figure in figures}
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # names in other scripts: a box is drawn
        for name, drawing in drawings.items():
            save_plot(render_svg(drawing), folder / name)


def save_plot(plot: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG and as SVG."""
    if plot.get_layout_engine() is not None:
        plot.draw_without_rendering()
        plot.set_layout_engine("none")  # compute the layout once, not per file
    for ending, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
        with atomic_path(path.with_suffix(f".{ending}")) as half:
            plot.savefig(half, format=ending, **options)


def render_svg(drawing: str) -> Any:
    """Render an SVG drawing as a matplotlib figure of the same size."""
    from matplotlib.figure import Figure as Plot

    root = ElementTree.fromstring(drawing)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    plot = Plot(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH))
    axes = plot.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for order, (element, x, y, style) in enumerate(_shapes(root, 0.0, 0.0, {})):
        _draw_shape(axes, element, x, y, style, order)
    return plot


def _shapes(element: Element, x: float, y: float, inherited: Style) -> Iterator[tuple[Element, float, float, Style]]:
    """Yield (element, x, y, style) of the visible elements in drawing order; x and y are the origin of its coordinates."""
    style = {**inherited, **_style_of(element)}
    tag = element.tag.rpartition("}")[2]
    if tag in ("svg", "g"):
        x, y = x + float(element.get("x", 0)), y + float(element.get("y", 0))
        passed_on = {name: value for name, value in style.items() if name.startswith("--") or name == "group-opacity"}
        for child in element:
            yield from _shapes(child, x, y, passed_on)
    elif tag != "title" and style.get("fill") != "transparent":
        yield element, x, y, style


def _draw_shape(axes: Any, element: Element, x: float, y: float, style: Style, order: int) -> None:
    from matplotlib.patches import Circle, Polygon, Rectangle

    tag = element.tag.rpartition("}")[2]
    at = {name: float(value) for name, value in element.attrib.items() if re.fullmatch(r"-?[\d.]+", value)}
    fill, stroke = (_color(style.get(name, "none"), style) for name in ("fill", "stroke"))
    alpha = float(style.get("opacity", 1)) * float(style.get("group-opacity", 1))
    width = _pixels(style.get("stroke-width", "1"))
    line: dict[str, Any] = {"linewidth": 0.75 * width, "alpha": alpha, "zorder": order}
    if "stroke-dasharray" in style:
        line["linestyle"] = (0, [float(part) / width for part in style["stroke-dasharray"].split()])
    outline = {"facecolor": fill, "edgecolor": stroke, **line}
    if tag == "text":
        _draw_text(axes, element, x + at["x"], y + at["y"], style, alpha, order)
    elif tag == "line":
        axes.plot([x + at["x1"], x + at["x2"]], [y + at["y1"], y + at["y2"]], color=stroke, solid_capstyle="round", **line)
    elif tag == "rect":
        axes.add_patch(Rectangle((x + at["x"], y + at["y"]), at["width"], at["height"], **outline))
    elif tag == "circle":
        axes.add_patch(Circle((x + at["cx"], y + at["cy"]), at["r"], **outline))
    elif tag == "path":  # the edge of the attention window: "M0 0v5M5 5h5"
        for left, top, way, length in re.findall(r"M([\d.]+) ([\d.]+)([vh])([\d.]+)", element.attrib["d"]):
            right, bottom = (float(left) + float(length) * (way == "h"), float(top) + float(length) * (way == "v"))
            axes.plot([x + float(left), x + right], [y + float(top), y + bottom], color=stroke, **line)
    else:
        points = [(x + float(a), y + float(b)) for a, b in (pair.split(",") for pair in element.attrib["points"].split())]
        axes.add_patch(Polygon(points, closed=tag == "polygon", fill=tag == "polygon", **outline))


def _draw_text(axes: Any, element: Element, x: float, y: float, style: Style, alpha: float, order: int) -> None:
    turned = re.match(r"rotate\((-?\d+)", element.get("transform", ""))
    axes.text(
        x,
        y,
        element.text or "",
        ha={"start": "left", "middle": "center", "end": "right"}[element.get("text-anchor", "start")],
        rotation=-float(turned[1]) if turned else 0,
        rotation_mode="anchor",
        color=_color(style["fill"], style),
        fontsize=_pixels(style["font-size"]) * TEXT_SCALE,
        fontweight="bold" if "font-weight" in style else "normal",
        alpha=alpha,
        zorder=order,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6} if "paint-order" in style else None,
    )


def _pixels(text: str) -> float:
    return float(text.removesuffix("px"))


def _style_of(element: Element) -> Style:
    """Return an element's style: the rules that match it, more specific ones last, then its own style attribute."""
    tag, classes = element.tag.rpartition("}")[2], set(element.get("class", "").split())
    found: Style = {}
    for rule_tag, rule_classes, style in _style_rules():
        if rule_tag in ("", tag) and rule_classes <= classes:
            found |= style
    if element.get("opacity"):
        found["group-opacity"] = element.attrib["opacity"]
    return found | _declarations(element.get("style", ""))


@cache
def _style_rules() -> list[tuple[str, set[str], Style]]:
    """Return the style sheet's rules for shapes as (tag, classes, style), the most specific last."""
    rules = []
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", style_sheet()):
        for selector in selectors.split(","):
            if found := re.fullmatch(r"\s*(?:svg (text)?((?:\.[\w-]+)*)|(\.s\d))\s*", selector.rpartition("*/")[2]):
                classes = set((found[2] or found[3] or "").split(".")) - {""}
                rules.append((found[1] or "", classes, _declarations(body)))
    return sorted(rules, key=lambda rule: len(rule[1]))


def _declarations(body: str) -> Style:
    pairs = (part.partition(":") for part in body.split(";") if ":" in part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _color(text: str, style: Style) -> Any:
    """Resolve a colour of the style sheet: a name, a variable or a mix of two."""
    from matplotlib.colors import to_rgb

    if mixed := re.fullmatch(r"color-mix\(in oklab, (.+) var\(--v\), (.+)\)", text):
        share = float(style["--v"].removesuffix("%")) / 100
        parts = zip(to_rgb(_color(mixed[1], style)), to_rgb(_color(mixed[2], style)), strict=True)
        return tuple(share * a + (1 - share) * b for a, b in parts)
    if variable := re.fullmatch(r"var\(--([\w-]+)\)", text):
        name = variable[1]
        return _color(style[f"--{name}"], style) if f"--{name}" in style else light_colors()[name]
    return text
