"""How many attention layers retrieval needs, and where: retrieval with attention or recurrent mixers of some layers off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from needlework.analysis.conditions import Condition
from needlework.analysis.evidence import KEPT
from needlework.analysis.model_trials import ModelTrials
from needlework.analysis.verdicts import BASELINE, share
from needlework.interventions.base import thirds
from needlework.stats import Estimate


@dataclass(frozen=True)
class LayerAblations:
    """The conditions of one model in which one side of some of its layers is off."""

    trials: ModelTrials

    @cached_property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The model's layers of each side."""
        known = self.trials.frame.anatomy(self.trials.model).get("layers", [])
        return {side: tuple(layer["index"] for layer in known if layer.get(side)) for side in ("attention", "recurrent")}

    def off(self, side: str) -> dict[tuple[int, ...], Condition]:
        """Return the conditions with retrieval trials by the layers that are off; of several sites, the first that was run."""
        found: dict[tuple[int, ...], Condition] = {}
        for c in self.trials.conditions_of("layers", side=side):
            if set(c.layers) <= set(self.layers[side]) and len(self.trials.retrieval(c.text)):
                found.setdefault(c.layers, c)
        return found

    def third(self, side: str, layers: tuple[int, ...]) -> str:
        """Return which third of the side's layers these are: early, middle, late, or "" for another set."""
        return next((name for name, third in thirds(self.layers[side]).items() if third == layers), "")

    def kept(self) -> dict[tuple[int, ...], Estimate]:
        """Return the retained share of retrieval by the attention layers that are left, with none of them, too."""
        every = self.layers["attention"]
        left = {tuple(x for x in every if x not in layers): c.text for layers, c in self.off("attention").items()}
        if left and (all_off := self.trials.heads_off()) and len(self.trials.retrieval(all_off.text)):
            left[()] = all_off.text
        shares = {layers: self.trials.retained(text).raw for layers, text in left.items()}
        return {layers: share for layers, share in shares.items() if share.n}

    def fewest(self) -> tuple[int, ...] | None:
        """Return the smallest set of attention layers that suffices: at least 95 % of retrieval is left at the lower bound.

        Returns:
            The set, of equally small ones the one that keeps most; None if no set that was tried suffices.
        """
        kept = self.kept()
        enough = [layers for layers, left in kept.items() if left.low >= KEPT]
        return min(enough, key=lambda layers: (len(layers), -kept[layers].low)) if enough else None

    def headline(self) -> str:
        """Say how many attention layers suffice for retrieval; "" if it was not tried, or cannot be tested."""
        if not self.kept() or self.trials.accuracy(self.trials.retrieval("none")).low < BASELINE:
            return ""
        every, fewest = len(self.layers["attention"]), self.fewest()
        if fewest is None:
            return "no smaller set of attention layers that was tried suffices for retrieval"
        return f"{len(fewest)} of {every} attention layers {_suffice(fewest)} for retrieval"

    def sentence(self) -> str:
        """Say how many attention layers retrieval needs, and which, with n and intervals; "" if too little was run.

        Layers are named whose loss the others do not make up for: the upper bound of what is left without them is below 95 %.
        Nothing is corrected for the number of sets.
        """
        kept, every = self.kept(), self.layers["attention"]
        if not kept:
            return ""
        baseline = self.trials.accuracy(self.trials.retrieval("none"))
        if baseline.low < BASELINE:
            return f"how many attention layers retrieval needs is not testable: untouched, it finds {share(baseline)}"
        if (fewest := self.fewest()) is not None:
            tried, sets = sum(len(layers) == len(fewest) for layers in kept), math.comb(len(every), len(fewest))
            found = f"{len(fewest)} of {len(every)} attention layers ({_named(fewest)}) {_suffice(fewest)} for retrieval: of what"
            found += f" the untouched model finds, {share(kept[fewest])} is left ({tried} of {sets} such sets tried)"
        else:
            best = max(kept, key=lambda layers: kept[layers].low)
            found = f"none of {len(kept)} smaller sets of its {len(every)} attention layers suffices for retrieval: at best,"
            found += f" with {_named(best)}, {share(kept[best])} is left"
        lost = [
            f"without layer {layer}, {share(left)} is left"
            for layer in every
            if (left := kept.get(tuple(x for x in every if x != layer))) is not None and left.high < KEPT
        ]
        return "; ".join([found, *lost])


def _named(layers: tuple[int, ...]) -> str:
    return f"layer{'s' * (len(layers) != 1)} {', '.join(map(str, layers))}" if layers else "none"


def _suffice(layers: tuple[int, ...]) -> str:
    return "suffices" if len(layers) == 1 else "suffice"
