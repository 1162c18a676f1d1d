"""Rankings that a plan names: what heads can be ranked by, and the order that a recording gives. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from needlework.anatomy import Head
from needlework.interventions import Ranking

if TYPE_CHECKING:
    from needlework.experiments.models import Seen

# What a head did while the untouched model answered -> how good it is. More ways to rank have their place here.
METHODS: dict[str, Callable[[Seen], float]] = {
    "needle_mass": lambda head: head.needle_mass,  # attention on the needle
    "copy_score": lambda head: head.copy_score,  # looks at the very token that is being copied
    "entropy": lambda head: -head.entropy,
}


def record(by: str, heads: Sequence[Seen], samples: int) -> dict[str, Any]:
    """What a store keeps of a ranking: the order, and beside it how much each head looked at the first token."""
    best_first = sorted(heads, key=lambda head: (-METHODS[by](head), head.layer, head.head))
    order = Ranking(order=tuple(Head(head.layer, head.head) for head in best_first))
    sinks: dict[str, list[float]] = {}
    by_entropy: dict[str, list[float]] = {}
    for head in sorted(heads, key=lambda head: (head.layer, head.head)):
        sinks.setdefault(str(head.layer), []).append(head.sink_mass)
        by_entropy.setdefault(str(head.layer), []).append(head.sink_mass_of_best)
    words = order.text().removeprefix("ranking('").removesuffix("')")
    return {"by": by, "samples": samples, "order": words, "sinks": sinks, "sinks_by_entropy": by_entropy}
