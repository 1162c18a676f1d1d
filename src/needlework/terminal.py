"""What a terminal is shown: text that it does not obey, tables that cut no name, and how far a long piece of work is.

Answers, names and errors come from models and files, so they may hold anything.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Event, Thread

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
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


PLAIN_SECONDS = 30.0  # between two lines of progress where there is no terminal
_REMEMBERED_SECONDS = 60.0  # what speed is measured over, at least


class Bar:
    """How far a long piece of work is, and how long the rest will take at the speed that was measured.

    In a terminal one line that is drawn again; elsewhere a plain line every half minute, without control characters. What
    is counted (`total`) and what takes time (`work`, in any unit) are told apart: things may be unlike.
    """

    def __init__(self, total: int, unit: str, *, work: float | None = None, shown: bool = True) -> None:
        self.total, self.unit, self.shown = total, unit, shown
        self.work = float(total) if work is None else work
        self.count, self.name = 0, ""
        self.counted_now, self.began = 0, time.monotonic()  # what was done before this process is none of its speed
        self.advanced = 0.0  # work that was done now and counted
        self._underway: Callable[[], float] = float
        self._samples = deque([(self.began, 0.0)])  # (time, work done since the bar began)
        self._already = 0.0
        self._over = Event()
        self._view: AbstractContextManager[object] = nullcontext()
        self._ticker: Thread | None = None

    def __enter__(self) -> Bar:
        self.began = time.monotonic()
        self._samples = deque([(self.began, 0.0)])
        console = Console(stderr=True)
        if self.shown and (console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)):
            self._view = Live(console=console, get_renderable=self._line, refresh_per_second=4)
        elif self.shown:
            self._ticker = Thread(target=self._tick, daemon=True)
            self._ticker.start()
        self._view.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._ticker is not None:
            self._ticker.join()
        self._view.__exit__(None, None, None)

    def found(self, count: int, work: float | None = None) -> None:
        """So much was done before."""
        self.count += count
        self._already += count if work is None else work

    def show(self, name: str, underway: Callable[[], float] = float) -> None:
        """What is worked on from now on, and a function that says how much of the work is done but not yet counted."""
        self.name, self._underway = plain(name), underway

    def advance(self, count: int = 1, work: float | None = None) -> None:
        self.count += count
        self.counted_now += count
        self.advanced += count if work is None else work

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def share(self) -> float:
        """Of the whole work, what is done."""
        return min(1.0, (self._already + self._now()) / self.work) if self.work else 1.0

    def left(self) -> float | None:
        """Seconds that the rest will take at the speed of the last minute; nothing before there is a speed."""
        now, done = time.monotonic(), self._now()
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[1][0] > _REMEMBERED_SECONDS and self._samples[1][1] < done:
            self._samples.popleft()
        began, before = self._samples[0]
        if done <= before:
            return None
        return (now - began) / (done - before) * max(0.0, self.work - self._already - done)

    def text(self) -> str:
        """The line without a bar."""
        return f"{self.name}: {self._counts()}, {self._times()}"

    def _now(self) -> float:
        return self.advanced + self._underway()

    def _counts(self) -> str:
        return f"{self.count:,}/{self.total:,} {self.unit}"

    def _times(self) -> str:
        left = self.left()
        return clock(self.seconds) + ("" if left is None else f", {clock(left)} left")

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(overflow="fold")
        line.add_column(ratio=1, min_width=8)
        for _ in ("counts", "times"):
            line.add_column(no_wrap=True)
        bar = ProgressBar(total=1.0, completed=self.share)
        line.add_row(Text(self.name), bar, Text(self._counts()), Text(self._times()))
        return line

    def _tick(self) -> None:
        while not self._over.wait(PLAIN_SECONDS):
            say(self.text())


def clock(seconds: float) -> str:
    """ "4:05", "1:02:09"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
