"""Classify interventions for reports: parse an intervention's text into a Condition with a kind and its parameters.

A text gets a kind only if the condition's fields describe it completely: the intervention rebuilt from them must equal the
parsed one. Anything with further options (some layers only, renormalised exposure, ...) is "other", so that no figure pools
it with the plain intervention.
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
from needlework.interventions.acts import RANDOM, known_scores
from needlework.interventions.ranking import Ranking, Recorded

Kind = Literal["none", "heads", "attention_block", "recurrent", "both_off", "expose", "limit", "swap", "layers", "other"]
EXPOSURES = ("keep", "omit", "only", "null", "balanced")
PHASES = ("prefill", "decode")
FEW_HEADS = 0.15  # the share of heads that the paper finds sufficient
NEAR_FEW = 0.05  # largest distance from FEW_HEADS that counts as "about 15 %", unless no number of heads is nearer
RANKING = "ranking"


@dataclass(frozen=True)
class Condition:
    """An intervention's kind and parameters; fields that its kind does not use keep their defaults."""

    text: str
    kind: Kind
    phase: str = "both"  # prefill | decode | both
    k: int | None = None  # heads kept per layer; 0 also for ablate_attention
    fraction: float | None = None  # share of heads kept per layer, instead of k
    by: str = ""  # head score | random | text of a ranking or recorded ranking | "" for ablate_attention
    seed: int = 0  # random heads only
    draw: str = ""  # random heads only: drawn per token | trial
    site: str = ""  # recurrent ablations: memory | block
    prefill: str = ""  # exposure mode, or context limit in tokens
    decode: str = ""  # likewise
    sinks: int = 0  # first tokens that a limit leaves visible, or that a head score ignores
    side: str = ""  # of layers that are off: attention | recurrent
    layers: tuple[int, ...] = ()  # of which attention, or the recurrent mixer, is off in both phases
    half: str = ""  # part of the cache swapped with the twin's: kv | recurrent | both

    def kept(self, heads: int) -> int | None:
        """Return the number of heads kept of `heads` per layer; None for conditions that do not select heads."""
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
        """How heads are selected: a score's name, "ranking", "random" (per token), "random, trial" or "" (no heads kept)."""
        if self.by.startswith((f"{RANKING}(", "recorded(")):
            return RANKING
        by = f"{RANDOM}, trial" if self.draw == "trial" else self.by
        return by + without_first(self.sinks) if self.kind == "heads" else by


def without_first(tokens: int) -> str:
    """Return the suffix that names a head score which ignores the first tokens; "" if it ignores none."""
    return f" without the first {'token' if tokens == 1 else f'{tokens} tokens'}" if tokens else ""


def few_heads_rank(kept: int, heads: int) -> tuple[float, int] | None:
    """Return a sort key for how near `kept` is to 15 % of the heads (smallest is nearest), None if it is not about 15 %.

    Of two equally near numbers (1 and 2 of 10) the larger sorts first. A number more than five points off counts only if no
    other number of heads is nearer.
    """
    off = round(abs(kept / heads - FEW_HEADS), 9)
    return (off, -kept) if off <= NEAR_FEW or kept == heads_of_share(FEW_HEADS, heads) else None


def ways() -> list[str]:
    """Return the non-random ways to select heads in the order that claims prefer: known scores, then rankings."""
    return [*(name for name in known_scores() if name != RANDOM), RANKING]


def same(text: str, wanted: Intervention) -> bool:
    """Return whether a text denotes an equivalent intervention, whatever its spelling."""
    try:
        return normal(parse(text)) == normal(wanted)
    except NeedleworkError:
        return False


def place(text: str) -> Condition:
    """Parse an intervention's text into a Condition; its kind is "other" if no figure shows it."""
    try:
        return _place(text)
    except NeedleworkError:  # e.g. of a plug-in that is not loaded: its trials are still listed by their text
        return Condition(text, "other")


@lru_cache(maxsize=100_000)
def _place(text: str) -> Condition:
    intervention = parse(text)
    if not intervention.parts:
        return Condition(text, "none")
    condition = _classified(text, intervention.parts)
    if condition is not None and normal(rebuilt(condition)) == normal(intervention):
        return condition
    return Condition(text, "other")


def _classified(text: str, parts: tuple[Part, ...]) -> Condition | None:
    """Return the condition that the parts may be; what its fields do not describe is not checked here."""
    first: Intervention = parts[0]
    if len(parts) == 1 and isinstance(first, (AblateAttention, AblateRecurrent)) and first.layers and first.phase == "both":
        return Condition(text, "layers", site=first.site, side=first.side, layers=first.layers)
    recurrent = next((part for part in parts if isinstance(part, AblateRecurrent)), None)
    if isinstance(first, AblateAttention) and recurrent is None:
        return Condition(text, "attention_block" if first.site == "block" else "heads", first.phase, k=0)
    if isinstance(first, KeepHeads) and recurrent is None:
        by = first.by if isinstance(first.by, str) else first.by.text()
        placed = Condition(text, "heads", first.phase, k=first.k, fraction=first.fraction, by=by, sinks=first.sinks)
        return replace(placed, seed=first.seed, draw=first.draw) if by == RANDOM else placed
    if recurrent is not None:  # alone or together with another part
        return Condition(text, "recurrent" if len(parts) == 1 else "both_off", recurrent.phase, site=recurrent.site)
    if halves := [part.half for part in parts if isinstance(part, SwapMemory)]:
        return Condition(text, "swap", half="both" if len(halves) > 1 else halves[0])
    exposed = all(isinstance(part, ExposeTokens) for part in parts)
    placed = Condition(text, "expose", prefill="keep", decode="keep") if exposed else Condition(text, "limit")
    for part in parts:
        if isinstance(part, LimitContext) and not exposed:
            placed = replace(placed, sinks=part.sinks)
        elif not isinstance(part, ExposeTokens) or not exposed:
            return None
        value = part.mode if isinstance(part, ExposeTokens) else str(part.tokens)
        placed = replace(placed, **_any(**{phase: value for phase in PHASES if part.phase in (phase, "both")}))
    return placed


def rebuilt(condition: Condition) -> Intervention:
    """Build the intervention that a condition's fields describe."""
    c = condition
    when: dict[str, Any] = {"phase": c.phase}
    if c.kind == "heads":
        by = _ranking(c.by) if c.way == RANKING else c.by
        chosen = _any(k=c.k, fraction=c.fraction, by=by, seed=c.seed, draw=c.draw or "token", sinks=c.sinks)
        return KeepHeads(**when, **chosen) if c.by else AblateAttention(**when)
    if c.kind == "attention_block":
        return AblateAttention(**when, site="block")
    if c.kind in ("recurrent", "both_off"):
        recurrent = AblateRecurrent(**when, **_any(site=c.site))
        return recurrent + AblateAttention(**when) if c.kind == "both_off" else recurrent
    if c.kind == "layers":
        off = AblateAttention if c.side == "attention" else AblateRecurrent
        return off(**_any(site=c.site, layers=c.layers))
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
    """Return keyword arguments untyped: the intervention validates them at run time."""
    return fields


def _ranking(text: str) -> Ranking | Recorded:
    by: Ranking | Recorded = getattr(parse(f"keep_heads(k=1, by={text})").parts[0], "by")  # noqa: B009
    return by


def ranking_name(text: str) -> str:
    """Return the name of a recorded ranking (`needle mass`), "" for a plain list of heads."""
    by = _ranking(text)
    return by.name.replace("_", " ") if isinstance(by, Recorded) else ""


def normal(intervention: Intervention) -> frozenset[str]:
    """Return a canonical form that is equal for equivalent interventions: parts split by phase, without no-ops."""
    parts: set[str] = set()
    for part in intervention.parts:
        if isinstance(part, ExposeTokens) and part.mode == "keep":
            continue  # a no-op
        if isinstance(part, KeepHeads) and part.scope == "layer" and 0 in (part.k, part.fraction):
            part = AblateAttention(phase=part.phase, layers=part.layers)  # no heads kept, so the score is irrelevant
        phases = PHASES if part.phase == "both" else (part.phase,)
        parts |= {str(part.model_copy(update={"phase": phase})) for phase in phases}
    return frozenset(parts)
