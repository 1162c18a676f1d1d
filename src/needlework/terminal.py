"""What a terminal is shown: text that it does not obey, and tables that cut no name.

Answers, names and errors come from models and files, so they may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# Controls other than tab and newline, what turns the direction of writing, and halves of characters that cannot be printed.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """The text with control characters spelled out (`\\x1b`), so that a terminal does nothing but show it."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def say(text: str, *, stderr: bool = True, style: str | None = None) -> None:
    """Print a line as it is, without markup and without breaking it."""
    Console(stderr=stderr).print(plain(text), style=style, markup=False, highlight=False, soft_wrap=True)


class Sheet(Table):
    """A table that cuts no name: a column is at least as wide as its longest word, and lines run over in a narrow terminal."""

    def __init__(self, columns: Sequence[str], title: str = "", words: Sequence[str] = ()) -> None:
        """Columns of numbers stand to the right, those in `words` to the left."""
        super().__init__(
            title=Text(title) if title else None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for name in columns:
            self.add_column(name, justify="left" if name in words else "right")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        least, most = self._widths()
        return Measurement(sum(least) + self._gaps, sum(most) + self._gaps)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths, most = self._widths()
        for _ in range(options.max_width - self._gaps - sum(widths)):  # room that is left goes where most is missing
            neediest = max(range(len(widths)), key=lambda i: most[i] - widths[i])
            widths[neediest] += most[neediest] > widths[neediest]
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        return super().__rich_console__(console, options)

    @property
    def _gaps(self) -> int:
        return 2 * (len(self.columns) - 1)

    def _widths(self) -> tuple[list[int], list[int]]:
        """Of every column: its longest word, and its longest cell."""
        texts = [[str(text) for text in (column.header, *column.cells)] for column in self.columns]
        words = [[word for text in column for word in re.split("[ \\n]+", text)] for column in texts]  # hard spaces do not part
        lines = [[line for text in column for line in text.splitlines()] for column in texts]
        return [max(map(len, column), default=0) for column in words], [max(map(len, column), default=0) for column in lines]
