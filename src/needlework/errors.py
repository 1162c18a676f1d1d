"""The kinds of failure a person can meet; every message says how to fix it."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MOST_SHOWN = 120  # characters of a value in a message
WHOLE = 2**63  # whole numbers lie below it, on both sides of 0: what stores and tensors can hold


class NeedleworkError(ValueError):
    """Bad input: something the caller can change. The command line prints it and exits with code 2."""


class ZooError(NeedleworkError):
    """A recipe, a zoo model or a checkpoint that cannot be used."""


class TrialError(RuntimeError):
    """One trial failed while it ran (NaN logits, an intervention that did nothing); other trials go on."""


def shown(value: Any, most: int = MOST_SHOWN) -> str:
    """A value as it stands in a message: its middle is left out where it is long."""
    text = repr(value[: 2 * most] + value[-most:] if isinstance(value, str) and len(value) > 4 * most else value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 3 :]}"


def check_plain(value: Any) -> None:
    """Refuse what no file, store or tensor can hold: whole numbers beyond 64 bits, halves of characters."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NeedleworkError(f"{shown(value)} holds half a character (a lone surrogate); write whole ones") from None
    elif isinstance(value, int) and not -WHOLE <= value < WHOLE:
        raise NeedleworkError("a whole number has more than 64 bits; choose a smaller one")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            check_plain(item)
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            check_plain(item)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The known name that was meant, or all of them."""
    names = sorted(known)
    near = get_close_matches(word[:MOST_SHOWN], names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
