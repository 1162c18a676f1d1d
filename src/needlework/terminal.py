"""What a terminal is shown. Answers, names and errors come from models and files, so they may hold anything."""

from __future__ import annotations

import re

# Controls other than tab and newline, what turns the direction of writing, and halves of characters that cannot be printed.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """The text with control characters spelled out (`\\x1b`), so that a terminal does nothing but show it."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def say(text: str, *, stderr: bool = True, style: str | None = None) -> None:
    """Print a line as it is, without markup and without breaking it."""
    from rich.console import Console

    Console(stderr=stderr).print(plain(text), style=style, markup=False, highlight=False, soft_wrap=True)
