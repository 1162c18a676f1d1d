"""Parts of plots that several classes draw. matplotlib is imported when something is drawn; pyplot and its state are not used."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from needlework.anatomy import Head


@cache
def style_sheet() -> str:
    """Return the style sheet of reports, which also has the colours of plots."""
    return (files("needlework") / "reports" / "templates" / "page.css").read_text(encoding="utf-8")


@cache
def light_colors() -> dict[str, str]:
    """Return the colours of the light theme by name, e.g. `c1` for the first curve."""
    return dict(re.findall(r"--([\w-]+): (#\w+)", style_sheet().partition("}")[0]))


@cache
def _axes_class() -> Any:
    from matplotlib.axes import Axes

    class NotebookAxes(Axes):  # type: ignore[misc]
        """Axes that a notebook shows as a picture; figures without pyplot are not shown otherwise."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            figure: Any = self.figure
            figure.savefig(picture, format="png", dpi=100, bbox_inches="tight")
            return picture.getvalue()

    return NotebookAxes


def new_axes(ax: Any = None, width: float = 6.0, height: float = 3.0) -> Any:
    """Return the given axes, or those of a new figure of this size in inches."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    ax = Figure(figsize=(width, height), layout="constrained").add_subplot(axes_class=_axes_class())
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def head_axes(ax: Any, values: Mapping[Head, float]) -> Any:
    """Return the given axes, or new ones that fit a heat map of these heads."""
    layers, across = len({layer for layer, _ in values}), 1 + max((index for _, index in values), default=0)
    return new_axes(ax, max(4.0, 0.25 * across + 1.5), max(1.6, 0.25 * layers + 1.0))


def draw_head_map(ax: Any, values: Mapping[Head, float], marked: Collection[Head] = (), places: bool = False) -> Any:
    """Draw a heat map of layers by heads with a colour bar, which is returned.

    Args:
        ax: Axes to draw into.
        values: By (layer, head).
        marked: Heads with a dot.
        places: Whether values are minus the heads' places in a ranking, 0 for the best; the colour bar shows places.
    """
    from matplotlib.colors import LinearSegmentedColormap

    layers = sorted({layer for layer, _ in values})
    row_of = {layer: row for row, layer in enumerate(layers)}
    grid = np.full((len(layers), 1 + max(index for _, index in values)), np.nan)
    for (layer, index), value in values.items():
        grid[row_of[layer], index] = value
    heat = LinearSegmentedColormap.from_list("heat", [light_colors()[f"heat-{name}"] for name in ("lo", "mid", "hi")])
    image = ax.imshow(grid, cmap=heat, aspect="auto", interpolation="nearest")
    ends = sorted({float(np.nanmin(grid)), float(np.nanmax(grid))})
    bar = ax.figure.colorbar(image, ax=ax, ticks=ends, fraction=0.08, pad=0.03, aspect=12)
    bar.ax.set_yticklabels([f"{1 - end:.0f}" if places else f"{end:.2g}" for end in ends])
    bar.ax.tick_params(labelsize="x-small", length=1.5)
    bar.set_label("place" if places else "", fontsize="x-small")
    for layer, index in marked:
        ax.plot(
            index,
            row_of[layer],
            "o",
            markersize=2.6,
            color=light_colors()["focus"],
            markeredgecolor="white",
            markeredgewidth=0.3,
        )
    step = max(1, len(layers) // 10)
    ax.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers][::step])
    ax.xaxis.get_major_locator().set_params(integer=True)  # heads have integer indices
    ax.set(xlabel="head", ylabel="layer")
    return bar
