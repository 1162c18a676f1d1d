"""Head scores that `KeepHeads` can rank heads by. Does not import torch: scores only call methods of their arguments.

Every score function returns [rows, heads, queries]; the heads with the highest scores are kept.
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
    """A named score function of heads.

    The function is `function(p)` or `function(p, log_p)` of attention probabilities and their logarithms [rows, heads, queries,
    keys], or `function(outputs)` of head outputs [rows, heads, queries, dim]. p is exactly 0 where a key is masked. The function
    may overwrite `log_p`, but not `p` or `outputs`.
    """

    name: str
    needs: Needs
    function: Callable[..., Any]

    @property
    def built_in(self) -> bool:
        return self.name in _TAKEN

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
    """Return the names that `KeepHeads(by=...)` accepts."""
    return *HEAD_SCORES, RANDOM


def scores_attention(name: str) -> bool:
    """Return whether a score is computed from attention probabilities."""
    return name in HEAD_SCORES and HEAD_SCORES[name].needs == "probabilities"


def head_score(needs: Needs = "probabilities") -> Callable[[F], F]:
    """Return a decorator that registers a score function under its own name, for `KeepHeads`, `parse` and plans.

    Results are stored under that name, so rename a function when it computes something else.
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
