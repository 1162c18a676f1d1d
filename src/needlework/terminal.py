"""Terminal output: text without control characters, and progress bars.

Answers, names and errors come from models and files, so they are untrusted text.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from threading import Event, Thread
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Control characters other than tab and newline, bidirectional controls, line separators and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST_NAME = 64
_NAME_END = 12  # characters kept at the end of a shortened name: they often distinguish checkpoints ("...-step-1000")


def plain(text: str) -> str:
    """Return the text with control characters escaped (`\\x1b`), so that a terminal does not interpret them."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


@lru_cache(maxsize=10_000)
def display_name(text: str, longest: int = LONGEST_NAME) -> str:
    """Return a printable text of at most `longest` characters; a changed text gets a hash, so that names stay distinct."""
    printable = " ".join(plain(text).split())
    mark = f"[{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}]"
    whole = text if printable == text else f"{printable} {mark}".strip()
    if len(whole) <= longest:
        return whole
    return f"{printable[: longest - _NAME_END - len(mark) - 6]} … {mark} … {printable[-_NAME_END:]}"


def say(text: str, *, stderr: bool = True, style: str | None = None) -> None:
    """Print a line without markup, highlighting or wrapping."""
    Console(stderr=stderr).print(plain(text), style=style, markup=False, highlight=False, soft_wrap=True)


PLAIN_SECONDS = 30.0  # between two lines of progress if the output is not a terminal
_REMEMBERED_SECONDS = 60.0  # minimum period that the speed is measured over


class Bar:
    """A progress bar with an estimate of the remaining time.

    A terminal shows one line that is redrawn; other outputs get a plain line every half minute, without control characters. The
    displayed count (`total`) and the work that takes time (`work`, in any unit) are separate, since items may differ in cost.
    """

    def __init__(self, total: int, unit: str, *, work: float | None = None, shown: bool = True) -> None:
        self.total, self.unit, self.shown = total, unit, shown
        self.work = float(total) if work is None else work
        self.count, self.name = 0, ""
        self.counted_now, self.began = 0, time.monotonic()  # excludes work of earlier processes, which would distort the speed
        self.advanced = 0.0  # work that was done by this process and counted
        self._underway: Callable[[], float] = float
        self._samples = deque([(self.began, 0.0)])  # (time, work done since the bar began)
        self._already = 0.0
        self._over = Event()
        self._view: AbstractContextManager[object] = nullcontext()
        self._ticker: Thread | None = None

    def __enter__(self) -> Self:
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
        """Count work that an earlier process did."""
        self.count += count
        self._already += count if work is None else work

    def show(self, name: str, underway: Callable[[], float] = float) -> None:
        """Set the name of the current work, and a function that returns how much work is done but not yet counted."""
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
        """The share of all work that is done."""
        return min(1.0, (self._already + self._now()) / self.work) if self.work else 1.0

    def left(self) -> float | None:
        """Return the remaining seconds at the speed of the last minute; None while the speed is unknown."""
        now, done = time.monotonic(), self._now()
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[1][0] > _REMEMBERED_SECONDS and self._samples[1][1] < done:
            self._samples.popleft()
        began, before = self._samples[0]
        if done <= before:
            return None
        return (now - began) / (done - before) * max(0.0, self.work - self._already - done)

    def text(self) -> str:
        """Return the line without a bar."""
        return f"{self.name}: {', '.join(self._counts_and_times())}"

    def _now(self) -> float:
        return self.advanced + self._underway()

    def _counts_and_times(self) -> tuple[str, str]:
        left = self.left()
        times = clock(self.seconds) + ("" if left is None else f", {clock(left)} left")
        return f"{self.count:,}/{self.total:,} {self.unit}", times

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(overflow="fold")
        line.add_column(ratio=1, min_width=8)
        parts = self._counts_and_times()
        for _ in parts:
            line.add_column(no_wrap=True)
        line.add_row(Text(self.name), ProgressBar(total=1.0, completed=self.share), *map(Text, parts))
        return line

    def _tick(self) -> None:
        while not self._over.wait(PLAIN_SECONDS):
            say(self.text())


def clock(seconds: float) -> str:
    """Format seconds as "4:05" or "1:02:09"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
