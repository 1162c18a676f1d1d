"""Rankings that a plan names: what a store keeps of one, and the order that a recording gives. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from needlework.anatomy import Head
from needlework.interventions import Ranking

if TYPE_CHECKING:
    from needlework.heads.methods import Seen


def by_seen(of_seen: Callable[[Seen], float], heads: Sequence[Seen]) -> Ranking:
    """The order that a method gives which knows enough from sums over all answers."""
    return Ranking.by_scores({Head(head.layer, head.head): of_seen(head) for head in heads})


def record(by: str, order: Ranking, heads: Sequence[Seen], samples: int) -> dict[str, Any]:
    """What a store keeps of a ranking: the order, and beside it how much each head looked at the first token."""
    sinks: dict[str, list[float]] = {}
    by_entropy: dict[str, list[float]] = {}
    for head in sorted(heads, key=lambda head: (head.layer, head.head)):
        sinks.setdefault(str(head.layer), []).append(head.sink_mass)
        by_entropy.setdefault(str(head.layer), []).append(head.sink_mass_of_best)
    words = order.text().removeprefix("ranking('").removesuffix("')")
    return {"by": by, "samples": samples, "order": words, "sinks": sinks, "sinks_by_entropy": by_entropy}
