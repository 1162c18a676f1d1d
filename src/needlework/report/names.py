"""Names as a page, a picture and a terminal can show them: printable, on one line, and of a length that fits.

Names come from plans and model directories, so they may hold anything: control characters, half a character, two megabytes.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from needlework.terminal import plain

LONGEST = 64
_END = 12  # of a cut name: its last characters tell siblings apart ("...-step-1000")


@lru_cache(maxsize=10_000)
def shown(text: str, longest: int = LONGEST) -> str:
    """The text itself where it fits. Else printable and cut in the middle, with a mark of its own: two texts stay two."""
    printable = " ".join(plain(text).split())
    whole = text if printable == text else f"{printable} [{_mark(text)}]".strip()
    if len(whole) <= longest:
        return whole
    mark = f" … [{_mark(text)}] … "
    return printable[: longest - _END - len(mark)] + mark + printable[-_END:]


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:6]
