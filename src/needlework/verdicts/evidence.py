"""What the rules read of one model: shares with their intervals, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from needlework.stats import NOTHING, Estimate, Interaction, percent

KEPT = 0.95  # lower bound of a retained share that counts as whole


@dataclass(frozen=True)
class Silenced:
    """Retrieval with all attention heads silenced at every position."""

    exact: Estimate = NOTHING
    choice: Estimate = NOTHING  # forced choice
    chance: float = 0.0

    @property
    def above_chance(self) -> Estimate:
        """Forced choice minus chance: information that is left if it is positive, and if it is negative, too."""
        c = self.choice
        return replace(c, value=c.value - self.chance, low=c.low - self.chance, high=c.high - self.chance)


@dataclass(frozen=True)
class Kept:
    """Knowledge under an intervention: what is left of the baseline, raw and corrected for chance."""

    form: str  # cloze | letter
    raw: Estimate
    corrected: Estimate


@dataclass(frozen=True)
class Curve:
    """What is left of retrieval against heads kept per layer, chosen in one way. Paired with the untouched model."""

    label: str  # "by entropy", "at random"
    points: Mapping[int, Estimate] = field(default_factory=dict)  # by heads kept, fewest first
    sinks: Mapping[int, float] = field(default_factory=dict)  # by heads kept: their attention on the first token

    def at(self, kept: int) -> Estimate:
        return self.points.get(kept, NOTHING)

    @property
    def suffices(self) -> int | None:
        """The fewest heads of those tried that surely keep 95 % of retrieval."""
        return next((kept for kept, share in sorted(self.points.items()) if share.low >= KEPT), None)

    def sentence(self, heads: int) -> str:
        """`By entropy 4 of 16 suffice (they give the first token 12 % of their attention).`"""
        kept = self.suffices
        asked = kept or max(self.points, default=0)
        words = f"{kept} of {heads} suffice" if kept else f"no number up to {asked} of {heads} was seen to suffice"
        sink = self.sinks.get(asked, math.nan)
        aside = f" (they give the first token {percent(sink)} of their attention)" if sink == sink else ""
        return f"{self.label[:1].upper()}{self.label[1:]} {words}{aside}."


@dataclass(frozen=True)
class Context:
    """What is left of retrieval, paired, when attention lacks the context in one phase or in both."""

    reading: Estimate = NOTHING  # heads silent while reading
    answering: Estimate = NOTHING  # only the needle in sight while answering
    together: Estimate = NOTHING
    limits: Sequence[tuple[int, Estimate]] = ()  # tokens of context in sight while reading, needles found
    limits_both: Sequence[tuple[int, Estimate]] = ()  # the same while answering, too


@dataclass(frozen=True)
class Evidence:
    """The numbers of one model that the rules read. What was not measured stays NOTHING, None or empty."""

    model: str
    note: str = ""  # said with every verdict: under which boundary, if it is not the usual one
    baseline: Estimate = NOTHING
    baselines: Mapping[str, Estimate] = field(default_factory=dict)  # by claim: of the very tasks that it is judged by
    tasks: Mapping[str, str] = field(default_factory=dict)  # by claim: the names of these tasks, where they need mention
    silenced: Silenced = Silenced()
    heads: int = 0  # per layer
    few_kept: int = 0  # heads per layer: of the numbers tried, the one nearest to 15 %
    curves: Sequence[Curve] = ()  # the first one is judged
    few_knowledge: Sequence[Kept] = ()
    layouts: Mapping[str, Silenced] = field(default_factory=dict)  # jrt, question_first: attention silenced
    layouts_untouched: Mapping[str, Estimate] = field(default_factory=dict)  # the same with nothing done to the model
    reading_twice_helps: str = ""  # a model that reading twice does help; empty: none was seen
    omit_decode: Estimate = NOTHING
    omit_prefill: Estimate = NOTHING  # paired retained share
    context: Context = Context()
    interaction: Interaction | None = None
    dissociation: Sequence[tuple[str, Estimate]] = ()  # the four shares that are left, each with its name
    follows_kv: Estimate = NOTHING  # needles inside the window
    follows_kv_outside: Estimate = NOTHING
    has_attention: bool = True
    has_recurrence: bool = True

    @property
    def few(self) -> Estimate:
        """What few heads keep of retrieval, chosen as the claim prefers."""
        return self.curves[0].at(self.few_kept) if self.curves else NOTHING
