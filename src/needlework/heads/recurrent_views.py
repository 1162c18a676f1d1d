"""What `recurrent_side` found, for people: a table as text, and a picture of layers by groups with the cuts beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.console import Group as Lines
from rich.text import Text

from needlework.errors import NeedleworkError
from needlework.files import whole
from needlework.heads.recurrent_values import RecurrentSide, each_group
from needlework.stats import Estimate, number, percent
from needlework.terminal import Sheet

SAID = {"conv": "convolution cut", "state": "state cut", "memory": "both cut"}
MOST_GROUPS = 8  # that a table names
FAINT = 0.003  # nats: colours are even below it and logarithmic above


def table(side: RecurrentSide) -> Lines:
    """What is left of each ability under each condition, and the groups that retrieval misses most."""
    columns = ["what is done", *(f"{ability.name}: right" for ability in side.abilities)]
    columns += [f"{ability.name}: nats lost" for ability in side.abilities]
    rows = Sheet(columns, words=("what is done",))

    def add(label: str, *done: str) -> None:
        said = [_share(ability.said(*done)) for ability in side.abilities]
        rows.add_row(label, *said, *(_nats(ability.drop(*done)) for ability in side.abilities))

    add("nothing", "none")
    for site in side.sites:
        add(f"{SAID[site]}, all layers", site)
    for site in side.sites:
        for layer in side.layers:
            add(f"{SAID[site]}, layer {layer}", f"{site}@{layer}")
    for share, count in side.sizes.items():
        add(f"top {count} groups ({percent(share)})", f"top {share}")
        add(f"{count} groups at random, {side.draws} draws", *side.random(share))
    kinds = "/".join(side.kinds)
    best = Sheet(
        ("group", "nats that retrieval loses without it"), f"\ngroups ({kinds}) that retrieval misses most", words=("group",)
    )
    for group, drop in list(each_group(side))[:MOST_GROUPS]:
        best.add_row(f"layer {group.layer}, {group.index}", _nats(drop))
    word, why = side.segregated
    samples = ", ".join(f"{ability.name} {len(ability.clusters)}" for ability in side.abilities)
    notes = (
        f"\nsamples: {samples}; 95 % intervals over samples; top groups are ranked by other samples\nsegregated: {word} ({why})"
    )
    return Lines(rows, best, Text(notes))


def text(side: RecurrentSide) -> str:
    console = Console(width=160, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(table(side))
    return captured.get()


def save(side: RecurrentSide, out: Path, title: str = "") -> list[Path]:
    """What was found as JSON and as pictures, into a directory."""
    out.mkdir(parents=True, exist_ok=True)
    with whole(out / "recurrent.json") as file:
        json.dump(side.to_dict(), file, indent=1, allow_nan=False)
    drawn = [out / "recurrent.png", out / "recurrent.svg"]
    for path in drawn:
        picture(side, path, title)
    return [out / "recurrent.json", *drawn]


def picture(side: RecurrentSide, path: Path, title: str = "") -> None:
    """Layers by groups, coloured by what retrieval loses without each; beside it the cuts, and top groups against random ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix not in (".png", ".svg", ".pdf"):
        raise NeedleworkError(f"{path}: a picture is a .png, .svg or .pdf file")
    canvas = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(canvas)
    left, middle, right = canvas.subplots(1, 3, width_ratios=(1.5, 1, 1.1))
    _map(side, left, canvas)
    _bars(
        middle,
        [("untouched", ("none",)), *((SAID[site], (site,)) for site in side.sites)],
        side,
        "memory cut in all layers",
    )
    conditions: list[tuple[str, tuple[str, ...]]] = [("untouched", ("none",))]
    for share, count in side.sizes.items():
        conditions += [(f"top {count}", (f"top {share}",)), (f"random {count}", tuple(side.random(share)))]
    _bars(right, conditions, side, f"groups silenced, of {len(side.groups)}")
    if len(side.abilities) > 1:
        canvas.legend(
            *middle.get_legend_handles_labels(), loc="outside upper right", ncols=len(side.abilities), fontsize=8, frameon=False
        )
    canvas.suptitle(f"{title} recurrent side".strip(), fontsize=10)
    canvas.savefig(path, dpi=150)


def _map(side: RecurrentSide, ax: Any, canvas: Any) -> None:
    import numpy as np
    from matplotlib.colors import SymLogNorm

    widest = 1 + max(group.index for group in side.groups)
    cells = np.full((len(side.layers), widest), np.nan)
    for group, drop in each_group(side):
        cells[side.layers.index(group.layer), group.index] = drop.value
    most = max(10 * FAINT, float(np.nanmax(np.abs(cells))))
    scale = SymLogNorm(FAINT, vmin=-most, vmax=most)  # one group may matter a hundred times as much as the next
    image = ax.imshow(cells, cmap="RdBu_r", norm=scale, aspect="auto")
    ax.set_yticks(range(len(side.layers)), [f"layer {layer}" for layer in side.layers], fontsize=8)
    ax.set_xlabel(f"group ({'/'.join(side.kinds)})", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_title("nats that retrieval loses without a group", fontsize=8)
    canvas.colorbar(image, ax=ax, shrink=0.85).ax.tick_params(labelsize=7)


def _bars(ax: Any, conditions: list[tuple[str, tuple[str, ...]]], side: RecurrentSide, title: str) -> None:
    height = 0.8 / len(side.abilities)
    for a, ability in enumerate(side.abilities):
        for i, (_, done) in enumerate(conditions):
            estimate = ability.said(*done)
            spread = [[100 * (estimate.value - estimate.low)], [100 * (estimate.high - estimate.value)]]
            label = ability.name if i == 0 else None
            at = i + (a - (len(side.abilities) - 1) / 2) * height
            ax.barh(at, 100 * estimate.value, height, color=f"C{a}", xerr=spread, error_kw={"linewidth": 0.8}, label=label)
    ax.set_yticks(range(len(conditions)), [label for label, _ in conditions], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 105)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("right answers, %", fontsize=8)
    ax.set_title(title, fontsize=8)


def _share(estimate: Estimate) -> str:
    return f"{percent(estimate.value)} [{percent(estimate.low, '')}, {percent(estimate.high, '')}]"


def _nats(estimate: Estimate) -> str:
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"
