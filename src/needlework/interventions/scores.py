"""The table of head scores: what `KeepHeads` ranks heads by. Free of torch: scores call methods of their arguments.

Every score is [rows, heads, queries], and the heads with the highest are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, Literal, TypeVar, get_args

from needlework.errors import NeedleworkError

Needs = Literal["probabilities", "outputs"]
RANDOM = "random"  # not in the table: `model/edits.py` draws heads by a hash of sample, layer, position and head
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class HeadScore:
    """`function(p)` or `function(p, log_p)` of attention probabilities and their logarithms, [rows, heads, queries, keys],
    or `function(outputs)` of head outputs, [rows, heads, queries, dim].

    Where a key is hidden, p is exactly 0. `log_p` belongs to the function, which may write over it; the others are to be read.
    """

    name: str
    needs: Needs
    function: Callable[..., Any]

    @cached_property
    def takes_log_p(self) -> bool:
        return self.needs == "probabilities" and len(signature(self.function).parameters) > 1


def _negative_entropy(p: Any, log_p: Any) -> Any:
    return log_p.mul_(p).sum(-1)


HEAD_SCORES = {
    score.name: score
    for score in (
        HeadScore("entropy", "probabilities", _negative_entropy),
        HeadScore("l2", "probabilities", lambda p: p.norm(dim=-1)),
        HeadScore("norm", "outputs", lambda outputs: outputs.float().norm(dim=-1)),
    )
}
_TAKEN = frozenset({*HEAD_SCORES, RANDOM, "ranking"})


def known_scores() -> tuple[str, ...]:
    """Everything that `KeepHeads(by=...)` knows by name, the built-in ones first."""
    return *HEAD_SCORES, RANDOM


def scores_attention(name: str) -> bool:
    """Whether a score is one of attention probabilities."""
    return name in HEAD_SCORES and HEAD_SCORES[name].needs == "probabilities"


def head_score(needs: Needs = "probabilities") -> Callable[[F], F]:
    """Function decorator: makes a score of one's own known to `KeepHeads` by the function's name, for `parse` and plans.

    Results are stored under that name: a function that computes something else deserves another one.
    """
    if needs not in get_args(Needs):
        raise NeedleworkError(f"head_score: needs={needs!r} is not known; write @nw.head_score('probabilities') or ('outputs')")

    def register(function: F) -> F:
        name = function.__name__
        if name in _TAKEN or not name.isidentifier():
            raise NeedleworkError(f"head_score: {name!r} is no name for a score of one's own; call the function otherwise")
        HEAD_SCORES[name] = HeadScore(name, needs, function)
        return function

    return register
