"""What an intervention's text means to a report: which experiment's axis it lies on, and where.

A condition is placed only if its fields say everything: building the intervention again from them must give the same one.
What has a field more than that (other layers, a renormalised exposure, another seed of a score that needs none) is "other".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from needlework.anatomy import heads_of_share
from needlework.errors import NeedleworkError
from needlework.interventions import (
    NONE,
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
from needlework.interventions.ranking import Ranking, Recorded
from needlework.interventions.scores import RANDOM, known_scores

Kind = Literal["none", "heads", "attention_block", "recurrent", "both_off", "expose", "limit", "swap", "other"]
EXPOSURES = ("keep", "omit", "only", "null", "balanced")
PHASES = ("prefill", "decode")
FEW_HEADS = 0.15  # the share of heads that the paper finds sufficient
RANKING = "ranking"


@dataclass(frozen=True)
class Condition:
    """One intervention, placed. Fields that do not belong to its kind keep their defaults."""

    text: str
    kind: Kind
    phase: str = "both"  # prefill | decode | both
    k: int | None = None  # heads kept per layer; 0 also for ablate_attention
    fraction: float | None = None
    by: str = ""  # name of a head score | random | the text of a ranking or of a recorded one | "" for ablate_attention
    seed: int = 0  # of random heads
    draw: str = ""  # of random heads: token | trial
    site: str = ""  # of the recurrent side: memory | block
    prefill: str = ""  # exposure mode, or limit in tokens
    decode: str = ""
    sinks: int = 0  # first tokens that stay in sight under a limit, or are left out of a head's score
    half: str = ""  # which half of the memory came from the twin

    def kept(self, heads: int) -> int | None:
        """Heads kept of `heads`, or None where that is no question."""
        if self.kind == "none":
            return heads
        if self.kind != "heads" or heads == 0:
            return None
        return self.k if self.fraction is None else heads_of_share(self.fraction, heads)

    @property
    def attention_off(self) -> bool:
        return self.kind == "heads" and (self.k == 0 or self.fraction == 0)

    @property
    def way(self) -> str:
        """How heads are chosen: a score's name, "ranking", "random" (anew for each token), "random, trial" or "" (none)."""
        if self.by.startswith((f"{RANKING}(", "recorded(")):
            return RANKING
        by = f"{RANDOM}, trial" if self.draw == "trial" else self.by
        return by + without_first(self.sinks) if self.kind == "heads" else by


def without_first(tokens: int) -> str:
    """What is said of a way of choosing heads whose score leaves out the first tokens."""
    return f" without the first {'token' if tokens == 1 else f'{tokens} tokens'}" if tokens else ""


def ways() -> list[str]:
    """How heads are chosen on purpose, in the order in which claims prefer them: by every known score, or by a ranking."""
    return [*(name for name in known_scores() if name != RANDOM), RANKING]


def same(text: str, wanted: Intervention) -> bool:
    """Whether a text stands for this intervention, however it is spelt."""
    try:
        return normal(parse(text)) == normal(wanted)
    except NeedleworkError:
        return False


def place(text: str) -> Condition:
    """The condition that an intervention's text stands for; one that no figure knows is kept as "other"."""
    try:
        return _place(text)
    except NeedleworkError:  # of a plug-in that is not known here (yet): its trials are still listed by their text
        return Condition(text, "other")


@lru_cache(maxsize=100_000)
def _place(text: str) -> Condition:
    intervention = parse(text)
    if not intervention.parts:
        return Condition(text, "none")
    for reader in (_heads, _off, _exposure, _limit, _swap):
        condition = reader(text, intervention.parts)
        if condition is not None and normal(rebuilt(condition)) == normal(intervention):
            return condition
    return Condition(text, "other")


def rebuilt(condition: Condition) -> Intervention:
    """The intervention that the fields of a placed condition describe."""
    c = condition
    when: dict[str, Any] = {"phase": c.phase}
    if c.kind == "heads":
        return KeepHeads(**when, **_choice(c)) if c.by else AblateAttention(**when)
    if c.kind == "attention_block":
        return AblateAttention(**when, site="block")
    if c.kind in ("recurrent", "both_off"):
        recurrent = AblateRecurrent(**when, **_any(site=c.site))
        return recurrent + AblateAttention(**when) if c.kind == "both_off" else recurrent
    parts: list[Intervention] = []
    if c.kind == "swap":
        parts += [SwapMemory(**_any(half=half)) for half in (("kv", "recurrent") if c.half == "both" else (c.half,))]
    for phase, value in zip(PHASES, (c.prefill, c.decode), strict=True):
        if c.kind == "expose":
            parts.append(ExposeTokens(**_any(phase=phase, mode=value)))
        elif c.kind == "limit" and value:
            parts.append(LimitContext(**_any(phase=phase, tokens=int(value), sinks=c.sinks)))
    return sum(parts, NONE)


def _any(**fields: Any) -> dict[str, Any]:
    """Fields that the intervention itself checks."""
    return fields


def _choice(c: Condition) -> dict[str, Any]:
    by = _ranking(c.by) if c.way == RANKING else c.by
    return {"k": c.k, "fraction": c.fraction, "by": by, "seed": c.seed, "draw": c.draw or "token", "sinks": c.sinks}


def _ranking(text: str) -> Ranking | Recorded:
    by: Ranking | Recorded = getattr(parse(f"keep_heads(k=1, by={text})").parts[0], "by")  # noqa: B009
    return by


def ranking_name(text: str) -> str:
    """What a static ranking goes by: `needle mass` for one that was recorded under this name; "" for a mere list of heads."""
    by = _ranking(text)
    return by.name.replace("_", " ") if isinstance(by, Recorded) else ""


def normal(intervention: Intervention) -> frozenset[str]:
    """One spelling for interventions that do the same: phase by phase, without parts that change nothing."""
    parts: set[str] = set()
    for part in intervention.parts:
        if isinstance(part, ExposeTokens) and part.mode == "keep":
            continue  # attention as it was
        if isinstance(part, KeepHeads) and part.scope == "layer" and 0 in (part.k, part.fraction):
            part = AblateAttention(phase=part.phase, layers=part.layers)  # none is kept, however they would be chosen
        phases = PHASES if part.phase == "both" else (part.phase,)
        parts |= {str(part.model_copy(update={"phase": phase})) for phase in phases}
    return frozenset(parts)


def _heads(text: str, parts: tuple[Part, ...]) -> Condition | None:
    part: Intervention = parts[0]
    if isinstance(part, AblateAttention):
        return Condition(text, "attention_block" if part.site == "block" else "heads", part.phase, k=0)
    if not isinstance(part, KeepHeads):
        return None
    placed = Condition(text, "heads", part.phase, k=part.k, fraction=part.fraction, sinks=part.sinks)
    if part.by == RANDOM:
        return replace(placed, by=RANDOM, seed=part.seed, draw=part.draw)
    return replace(placed, by=part.by if isinstance(part.by, str) else part.by.text())


def _off(text: str, parts: tuple[Part, ...]) -> Condition | None:
    recurrent = next((part for part in parts if isinstance(part, AblateRecurrent)), None)
    if recurrent is None:
        return None
    return Condition(text, "recurrent" if len(parts) == 1 else "both_off", recurrent.phase, site=recurrent.site)


def _exposure(text: str, parts: tuple[Part, ...]) -> Condition | None:
    placed = Condition(text, "expose", prefill="keep", decode="keep")
    for part in parts:
        if not isinstance(part, ExposeTokens):
            return None
        placed = replace(placed, **_in_phases(part, part.mode))
    return placed


def _limit(text: str, parts: tuple[Part, ...]) -> Condition | None:
    placed = Condition(text, "limit")
    for part in parts:
        if not isinstance(part, LimitContext):
            return None
        placed = replace(placed, sinks=part.sinks, **_in_phases(part, str(part.tokens)))
    return placed


def _in_phases(part: Part, value: str) -> dict[str, Any]:
    return {phase: value for phase in PHASES if part.phase in (phase, "both")}


def _swap(text: str, parts: tuple[Part, ...]) -> Condition | None:
    halves = [part.half for part in parts if isinstance(part, SwapMemory)]
    return Condition(text, "swap", half="both" if len(halves) > 1 else halves[0]) if halves else None
