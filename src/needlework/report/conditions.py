"""What an intervention's text means to a report: which experiment's axis it lies on, and where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from needlework.errors import NeedleworkError
from needlework.interventions import (
    AblateAttention,
    AblateRecurrent,
    ExposeTokens,
    Intervention,
    KeepHeads,
    LimitContext,
    Part,
    SwapMemory,
    parse,
)
from needlework.interventions.ranking import Ranking

Kind = Literal["none", "heads", "recurrent", "both_off", "expose", "limit", "swap", "other"]
EXPOSURES = ("keep", "omit", "only", "null", "balanced")


@dataclass(frozen=True)
class Condition:
    """One intervention, placed. Fields that do not belong to its kind keep their defaults."""

    text: str
    kind: Kind
    phase: str = "both"  # prefill | decode | both
    k: int | None = None  # heads kept per layer; 0 also for ablate_attention
    fraction: float | None = None
    by: str = ""  # entropy | l2 | norm | random | ranking | "" for ablate_attention
    site: str = ""
    prefill: str = ""  # exposure mode, or limit in tokens
    decode: str = ""
    half: str = ""  # which half of the memory came from the twin

    def kept(self, heads: int) -> int | None:
        """Heads kept of `heads`, or None where that is no question."""
        if self.kind == "none":
            return heads
        if self.kind != "heads" or heads == 0:
            return None
        if self.fraction is not None:
            return 0 if self.fraction == 0 else max(1, int(self.fraction * heads + 0.5))
        return self.k

    @property
    def attention_off(self) -> bool:
        return self.kind == "heads" and (self.k == 0 or self.fraction == 0)


def few(heads: int) -> int:
    """The paper's 15 % of the heads, rounded as `keep_heads(fraction=0.15)` rounds."""
    return max(1, int(0.15 * heads + 0.5))


@lru_cache(maxsize=100_000)
def place(text: str) -> Condition:
    """The condition that an intervention's text stands for; one that no figure knows is kept as "other"."""
    try:
        parts = parse(text).parts
    except NeedleworkError:  # of a plug-in that is not installed here: its trials are still listed by their text
        return Condition(text, "other")
    if not parts:
        return Condition(text, "none")
    for reader in (_heads, _off, _exposure, _limit, _swap):
        found = reader(text, parts)
        if found is not None:
            return found
    return Condition(text, "other")


def _heads(text: str, parts: tuple[Part, ...]) -> Condition | None:
    part: Intervention = parts[0]
    if len(parts) != 1 or not isinstance(part, (KeepHeads, AblateAttention)) or part.layers is not None:
        return None
    if isinstance(part, AblateAttention):
        return Condition(text, "heads", part.phase, k=0, site=part.site)
    if part.scope == "model":
        return None
    by = "ranking" if isinstance(part.by, Ranking) else part.by
    return Condition(text, "heads", part.phase, k=part.k, fraction=part.fraction, by=by)


def _off(text: str, parts: tuple[Part, ...]) -> Condition | None:
    recurrent = [p for p in parts if isinstance(p, AblateRecurrent)]
    silenced = [p for p in parts if isinstance(p, AblateAttention) or (isinstance(p, KeepHeads) and p.k == 0)]
    if len(recurrent) != 1 or len(recurrent) + len(silenced) != len(parts) or any(p.layers is not None for p in parts):
        return None
    if not silenced:
        return Condition(text, "recurrent", recurrent[0].phase, site=recurrent[0].site)
    if len(silenced) > 1 or silenced[0].phase != recurrent[0].phase:
        return None
    return Condition(text, "both_off", recurrent[0].phase, site=recurrent[0].site)


def _exposure(text: str, parts: tuple[Part, ...]) -> Condition | None:
    modes = {"prefill": "keep", "decode": "keep"}
    for part in parts:
        plain = isinstance(part, ExposeTokens) and part.span == "needle" and part.layers is None
        if not isinstance(part, ExposeTokens) or not plain or part.renormalize or part.compat != "right":
            return None
        for phase in ("prefill", "decode"):
            if part.phase in (phase, "both"):
                modes[phase] = part.mode
    return Condition(text, "expose", prefill=modes["prefill"], decode=modes["decode"])


def _limit(text: str, parts: tuple[Part, ...]) -> Condition | None:
    limits = {"prefill": "", "decode": ""}
    for part in parts:
        if not isinstance(part, LimitContext) or part.layers is not None:
            return None
        for phase in ("prefill", "decode"):
            if part.phase in (phase, "both"):
                limits[phase] = str(part.tokens)
    return Condition(text, "limit", prefill=limits["prefill"], decode=limits["decode"])


def _swap(text: str, parts: tuple[Part, ...]) -> Condition | None:
    if not all(isinstance(part, SwapMemory) for part in parts):
        return None
    halves = sorted(part.half for part in parts if isinstance(part, SwapMemory))
    return Condition(text, "swap", half="both" if len(halves) > 1 else halves[0])
