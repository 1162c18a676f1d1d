"""What can go wrong with zoo models, told with the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from needlework.errors import NeedleworkError


class ZooError(NeedleworkError):
    """A recipe, a directory or a checkpoint that cannot be used; the message says what to do."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
