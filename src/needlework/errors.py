"""The kinds of failure a person can meet; every message says how to fix it."""

from collections.abc import Iterable
from difflib import get_close_matches


class NeedleworkError(ValueError):
    """Bad input: something the caller can change. The command line prints it and exits with code 2."""


class ZooError(NeedleworkError):
    """A recipe, a zoo model or a checkpoint that cannot be used."""


class TrialError(RuntimeError):
    """One trial failed while it ran (NaN logits, an intervention that did nothing); other trials go on."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The known name that was meant, or all of them."""
    names = sorted(known)
    near = get_close_matches(word, names, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
