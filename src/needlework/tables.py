"""Tables of text with named columns, for terminals, HTML pages, Markdown and JSON.

Cells come from models and files, so they are untrusted; every format shows them as plain text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from needlework.terminal import plain

if TYPE_CHECKING:
    import pandas

_GAP = 2  # characters between columns
Cell = str | Text  # the style of a Text is shown in the terminal only


@dataclass
class Table:
    """A table whose words are never truncated. A terminal that is too narrow for all columns shows some below the others.

    Attributes:
        left: Columns that are aligned to the left, all others to the right; None aligns all to the left.
        show_header: Whether a terminal shows the column names.
        aligned_with: Tables with the same columns; in a terminal their columns have the same widths as this table's.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]] = ()
    caption: str = ""
    left: Collection[str] | None = None
    show_header: bool = True
    aligned_with: Sequence[Table] = field(default=(), repr=False)

    def add_row(self, *cells: Cell) -> None:
        self.rows = [*self.rows, cells]

    def texts(self) -> list[list[str]]:
        """Return the rows as plain text."""
        return [[str(cell) for cell in row] for row in self.rows]

    def records(self) -> list[dict[str, str]]:
        """Return the rows as dicts for JSON."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.texts()]

    def to_markdown(self) -> str:
        lines = []
        for row in (self.columns, *self.texts()):
            cells = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
            lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
        marks = "|".join("---" if self._is_left(name) else "---:" for name in self.columns)
        return "\n".join([lines[0], f"|{marks}|", *lines[1:]])

    @classmethod
    def from_frame(cls, frame: pandas.DataFrame, caption: str = "", most: int = 100) -> Table:
        """Return the first `most` rows of a data frame; missing values are empty cells."""
        words = [str(name) for name, kind in frame.dtypes.items() if kind.kind not in "iuf"]
        rows = [[_cell(value) for value in row] for row in frame.head(most).itertuples(index=False, name=None)]
        if len(frame) > most:
            caption += f"; rows 1 to {most} of {len(frame):,}"
        return cls([str(name) for name in frame.columns], rows, caption.removeprefix("; "), words)

    def to_html(self) -> str:
        """Return the table as HTML, with escaped text."""

        def cell(tag: str, name: str, text: str) -> str:
            side = "left" if self._is_left(name) else "right"
            return f'<{tag} style="text-align: {side}">{escape(plain(text))}</{tag}>'

        caption = f'<caption style="text-align: left">{escape(plain(self.caption))}</caption>' if self.caption else ""
        head = "".join(cell("th", name, name) for name in self.columns)
        body = ("".join(cell("td", *pair) for pair in zip(self.columns, row, strict=True)) for row in self.texts())
        return (
            f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>" + "".join(f"<tr>{r}</tr>" for r in body) + "</tbody></table>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_text(self, width: int = 10_000) -> str:
        """Return the table as a terminal of this width shows it, without colours; wider if a word does not fit."""
        shown = to_text(self, max(width, sum(self._widths()[0]) + self._gaps))
        return "\n".join(line.rstrip() for line in shown.splitlines())

    def _is_left(self, name: str) -> bool:
        return self.left is None or name in self.left

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        least, most = self._widths()
        narrowest = least[:1] + ([max(least[1:]) + _GAP] if least[1:] else [])
        return Measurement(sum(narrowest), sum(most) + self._gaps)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least, most = self._widths()
        parts = self._parts(least, options.max_width)
        if self.aligned_with and len(parts) > 1 and not self.rows:
            return  # a header alone: where columns are parted, every aligned table shows its own
        for number, part in enumerate(parts):
            widths = _fill([least[i] for i in part], [most[i] for i in part], options.max_width)
            table = RichTable(
                title=Text(plain(self.caption)) if self.caption and not number else Text(" ") if number else None,
                title_justify="left",
                box=box.SIMPLE_HEAD,
                show_header=self.show_header or len(parts) > 1,
                show_edge=False,
                pad_edge=False,
                padding=(0, 1, 0, 0),
            )
            for i, width in zip(part, widths, strict=True):
                name = self.columns[i]
                table.add_column(Text(plain(name)), justify="left" if self._is_left(name) else "right", width=width)
            for row in self.rows:
                table.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in (row[i] for i in part)))
            yield table

    def _parts(self, least: Sequence[int], width: int) -> list[list[int]]:
        """Return the columns to show side by side: all, or the first one with as many of the others as fit, several times."""
        if sum(least) + self._gaps <= width:
            return [list(range(len(least)))]
        parts = [[0]]
        for i in range(1, len(least)):
            used = [*parts[-1], i]
            if len(used) > 2 and sum(least[j] for j in used) + _GAP * (len(used) - 1) > width:
                parts.append([0])
            parts[-1].append(i)
        return parts

    @property
    def _gaps(self) -> int:
        return _GAP * (len(self.columns) - 1)

    def _widths(self) -> tuple[list[int], list[int]]:
        """Return the width of every column's longest word, and of its longest line."""
        rows = [row for table in (self, *self.aligned_with) for row in (table.columns, *table.texts())]
        least, most = [], []
        for column in zip(*rows, strict=True):
            texts = [plain(text) for text in column]
            least.append(max(len(word) for text in texts for word in re.split("[ \\n]+", text)))  # no-break spaces do not split
            most.append(max(len(line) for text in texts for line in text.splitlines() or [""]))
        return least, most


def _fill(least: Sequence[int], most: Sequence[int], width: int) -> list[int]:
    """Return column widths between `least` and `most` that fill a line: free space goes to the column that lacks most."""
    widths = list(least)
    for _ in range(width - _GAP * (len(widths) - 1) - sum(widths)):
        neediest = max(range(len(widths)), key=lambda i: most[i] - widths[i])
        widths[neediest] += most[neediest] > widths[neediest]
    return widths


def to_text(shown: RenderableType, width: int) -> str:
    """Return what a terminal of this width shows, without colours."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def _cell(value: Any) -> str:
    """Format a value of a data frame: four significant digits, nothing for a missing value."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)
