"""Error classes and helpers for error messages; every message says how to fix the problem."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MOST_SHOWN = 120  # characters of a value in a message
WHOLE = 2**63  # integers must lie in [-WHOLE, WHOLE), which stores and tensors can hold


class NeedleworkError(ValueError):
    """Invalid input that the caller can change. The command line prints it and exits with code 2."""


class ZooError(NeedleworkError):
    """A recipe, a zoo model or a checkpoint that cannot be used."""


class TrialError(RuntimeError):
    """A trial that failed while it ran (NaN logits, an intervention without effect); other trials continue."""


def short_repr(value: Any, most: int = MOST_SHOWN) -> str:
    """Return `repr(value)` for a message, with the middle left out if it is longer than `most` characters."""
    text = repr(value[: 2 * most] + value[-most:] if isinstance(value, str) and len(value) > 4 * most else value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 3 :]}"


def check_plain(value: Any) -> None:
    """Raise for values that no file, store or tensor can hold: integers beyond 64 bits and lone surrogates, also nested."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NeedleworkError(f"{short_repr(value)} holds half a character (a lone surrogate); write whole ones") from None
    elif isinstance(value, int) and not -WHOLE <= value < WHOLE:
        raise NeedleworkError("a whole number has more than 64 bits; choose a smaller one")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            check_plain(item)
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            check_plain(item)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return a hint for an unknown name: the nearest known name, or all of them."""
    names = sorted(known)
    near = get_close_matches(word[:MOST_SHOWN], names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
