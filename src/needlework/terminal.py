"""Terminal output: text without control characters, and progress bars.

Answers, names and errors come from models and files, so they are untrusted text.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from textwrap import fill
from threading import Event, RLock, Thread
from typing import ClassVar, Self

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


def wrap(text: str, width: int) -> str:
    """Return printable text with its lines wrapped at words; longer words, such as paths, stay whole."""
    lines = plain(text).split("\n")
    return "\n".join(fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines)


class Throughput:
    """The remaining time of a job, from the measured throughput of each kind of its work.

    A kind has a throughput of its own because what is known before a job starts is how long each kind would take on another
    machine, and errors of these estimates differ: compilation tells little about answers. A kind that has not begun is expected
    to be as fast as all others together; its own throughput counts more and more while it runs. While work of a kind is under
    way that tells nothing of its progress, such as the compilation of a kernel, it is taken to go on at the speed so far.
    """

    EARLY = 0.05  # share of a kind's work after which its own throughput counts as much as that of all kinds
    HALF_LIFE = 60.0  # seconds after which a measured throughput counts half, and at least half of the time of its kind

    def __init__(self, work: Mapping[str, float], assumed: float | None = None) -> None:
        """Start with the work of each kind, in any unit; `assumed` is the seconds that a unit is expected to take, if known."""
        self.work, self.assumed = dict(work), assumed
        self.done = dict.fromkeys(work, 0.0)
        self.seconds = dict.fromkeys(work, 0.0)
        self._recent = dict.fromkeys(work, (0.0, 0.0))  # seconds and work
        self._last: float | None = None
        self._silent = 0.0  # seconds since there was progress
        self._kind = ""  # of these

    def update(self, now: float, kind: str, done: float) -> None:
        """Note that `done` work of a kind is done now, and that the time since the last update went into this kind."""
        seconds = 0.0 if self._last is None else now - self._last
        gained = done - self.done[kind]
        self._silent = seconds + (self._silent if kind == self._kind else 0.0)
        if gained > 0:
            kept = 0.5 ** (self._silent / max(self.HALF_LIFE, self.seconds[kind] / 2))
            before = self._recent[kind]
            self._recent[kind] = (kept * before[0] + self._silent, kept * before[1] + gained)
            self._silent = 0.0
        self._last, self._kind = now, kind
        self.done[kind] = done
        self.seconds[kind] += seconds

    def left(self) -> float | None:
        """Return the remaining seconds; None while no throughput is known."""
        began = [kind for kind, done in self.done.items() if done > 0]
        seconds, work = sum(self.seconds[kind] for kind in began), sum(self.done[kind] for kind in began)
        seconds -= self._silent if self._kind in began else 0.0
        if work <= 0:
            return None
        if self.assumed is not None:  # counts as much as having measured a tenth of all work
            prior = sum(self.work.values()) / 10
            seconds, work = seconds + prior * self.assumed, work + prior
        if rest := self._rest(self._kind):
            silent = min(self._silent * work / seconds, rest) if seconds > 0 else 0.0
            seconds, work = seconds + self._silent, work + silent
        return sum(self._seconds_left(kind, seconds / work) for kind in self.work)

    def _rest(self, kind: str) -> float:
        return max(0.0, self.work[kind] - self.done[kind])

    def _seconds_left(self, kind: str, usual: float) -> float:
        """Return the remaining seconds of one kind; `usual` is the seconds per work of all kinds."""
        prior = self.EARLY * self.work[kind]
        spent, done = self._recent[kind]
        if (rest := self._rest(kind)) <= 0:
            return 0.0
        each = (spent + prior * usual) / (done + prior)
        if kind != self._kind:
            return rest * each
        silent = min(self._silent / each, rest)
        each = (spent + self._silent + prior * usual) / (done + silent + prior)
        return (rest - silent) * each


PLAIN_SECONDS = 30.0  # between two lines of progress if the output is not a terminal
_MEASURED_SECONDS = 1.0  # between two measurements of throughput then
WORK = ""  # the kind of work of a bar that has one kind
COMPILING = "compiling"
_said_compiling = Event()


@contextmanager
def compiling(kernel: str, seconds: float) -> Iterator[None]:
    """Show in the open progress bars that a kernel is compiled, which takes about this long; say it once if there is none."""
    with ExitStack() as stack:
        bars = [bar for bar in Bar.active if bar.shown]
        if not bars and not _said_compiling.is_set():
            _said_compiling.set()
            say(f"compiling kernels for this processor ({kernel}, about {seconds:.0f} s), once: later commands find them")
        for bar in bars:
            stack.enter_context(bar.interrupted(f"compiling {kernel}", COMPILING, seconds))
        yield


class Bar:
    """A progress bar with an estimate of the remaining time.

    A terminal shows one line that is redrawn; other outputs get a plain line every half minute, without control characters. The
    displayed count (`total`) and the work that takes time (`work`) are separate, since items may differ in cost. Work is in
    any unit, or, if there are several kinds of it, in the seconds that it is expected to take.
    """

    active: ClassVar[list[Bar]] = []  # the bars that are open in this process

    def __init__(self, total: int, unit: str, *, work: float | Mapping[str, float] | None = None, shown: bool = True) -> None:
        self.total, self.unit, self.shown = total, unit, shown
        several = isinstance(work, Mapping)
        kinds = work if isinstance(work, Mapping) else {WORK: float(total) if work is None else work}
        self.throughput = Throughput(kinds, 1.0 if several else None)
        self.work = sum(kinds.values())
        self.count, self.name = 0, ""
        self.counted_now, self.began = 0, time.monotonic()  # excludes work of earlier processes, which would distort the speed
        self._done = dict.fromkeys(kinds, 0.0)  # work of each kind that was done by this process and counted
        self._kind = next(iter(kinds), WORK)
        self._underway: Callable[[], float] = float
        self._already = 0.0
        self._lock = RLock()
        self._over = Event()
        self._view: AbstractContextManager[object] = nullcontext()
        self._ticker: Thread | None = None

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        self.throughput.update(self.began, self._kind, 0.0)
        self.active.append(self)
        console = Console(stderr=True)
        if self.shown and (console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)):
            to_terminal = sys.stdout.isatty()  # rich would print what goes into a file above the bar
            self._view = Live(console=console, get_renderable=self._line, refresh_per_second=4, redirect_stdout=to_terminal)
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
        self.active.remove(self)

    def found(self, count: int, work: float | None = None, kind: str | None = None) -> None:
        """Count work that an earlier process did: it is no part of what remains, and of no throughput."""
        found = count if work is None else work
        self.count += count
        self._already += found
        self.throughput.work[self._kind if kind is None else kind] -= found

    def show(self, name: str, underway: Callable[[], float] = float, kind: str | None = None) -> None:
        """Name the current work, and its kind; `underway` returns how much of it is done but not yet counted."""
        with self._lock:
            self._measure()
            self.name, self._underway = plain(name), underway
            self._kind = self._kind if kind is None else kind

    def advance(self, count: int = 1, work: float | None = None) -> None:
        with self._lock:
            self.count += count
            self.counted_now += count
            self._done[self._kind] += count if work is None else work

    def rest(self, kind: str, most: float) -> float:
        """Return how much work of a kind is not done yet, but not more than `most`."""
        return min(most, self.throughput.work[kind] - self._done[kind])

    def expect(self, kind: str, work: float) -> None:
        """Set how much work of a kind remains, after some that was expected turned out not to be needed."""
        with self._lock:
            rest = self.throughput.work[kind] - self._done[kind]
            self.throughput.work[kind] += work - rest
            self.work += work - rest

    @contextmanager
    def interrupted(self, name: str, kind: str, work: float) -> Iterator[None]:
        """Show work that interrupts the current one for a while; time is measured by kind if the bar has this kind of work."""
        with self._lock:
            before = self.name, self._underway, self._kind
            kind = kind if kind in self._done else self._kind
            self.show(f"{self.name}: {name}" if self.name else name, kind=kind)
        try:
            yield
        finally:
            with self._lock:
                if kind != before[2]:
                    self.advance(0, self.rest(kind, work))
                self.show(*before)

    @property
    def advanced(self) -> float:
        """The work that was done by this process and counted."""
        return sum(self._done.values())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def share(self) -> float:
        """The share of all work that is done."""
        return min(1.0, (self._already + self.advanced + self._underway()) / self.work) if self.work else 1.0

    def left(self) -> float | None:
        """Return the remaining seconds at the measured throughput; None while it is unknown."""
        with self._lock:
            self._measure()
            return self.throughput.left()

    def text(self) -> str:
        """Return the line without a bar."""
        return f"{self.name}: {', '.join(self._counts_and_times())}"

    def _measure(self) -> None:
        self.throughput.update(time.monotonic(), self._kind, self._done[self._kind] + self._underway())

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
        said = time.monotonic()
        while not self._over.wait(min(_MEASURED_SECONDS, PLAIN_SECONDS)):
            self.left()
            if time.monotonic() - said >= PLAIN_SECONDS:
                said = time.monotonic()
                say(self.text())


def clock(seconds: float) -> str:
    """Format seconds as "4:05" or "1:02:09"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
