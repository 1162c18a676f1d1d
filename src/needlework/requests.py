"""What the engine is asked and what it answers. Token ids and values, no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.interventions.acts import (
    Act,
    ChangeOutputs,
    ClearState,
    CutMemory,
    DropAttention,
    DropRecurrent,
    ExposeColumns,
    KeepBest,
    Phase,
    Scene,
    SilenceHeads,
    Span,
    SwapHalf,
)
from needlework.interventions.base import NONE, Intervention
from needlework.receipts import Receipt


@dataclass(frozen=True)
class Request:
    """One prompt under one intervention."""

    prompt: tuple[int, ...]
    intervention: Intervention = NONE
    max_new_tokens: int = 40
    stop: frozenset[int] = frozenset()  # generation ends with one of these
    spans: Mapping[str, Span] = field(default_factory=dict)
    twins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    boundary: Phase = "decode"  # who owns the last prompt token
    sample: int | None = None  # key for random choices; by default a hash of the prompt
    forced: tuple[int, ...] = ()  # decode these instead of the model's own choice
    scoring: bool = False  # nothing is decoded: every position is prefill, whoever owns the boundary

    @property
    def decodes_last(self) -> bool:
        """The last prompt token is read in the decode phase."""
        return self.boundary == "decode" and not self.scoring


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each token
    margins: tuple[float, ...]  # best logit minus second best, at each step
    receipt: Receipt
    finish: Literal["stop", "length", "failed"]
    error: str = ""
    text: str = ""

    def with_text(self, text: str) -> Answer:
        return replace(self, text=text)


_COUNTED = {  # acts that must leave a count above zero, and the name of that count
    KeepBest: "heads_zeroed",
    SilenceHeads: "heads_zeroed",
    ChangeOutputs: "heads_changed",
    DropAttention: "blocks_dropped",
    DropRecurrent: "blocks_dropped",
    CutMemory: "states_cut",
    ClearState: "states_cleared",
}


@dataclass(frozen=True)
class Prepared:
    """A request with its interventions lowered to acts."""

    request: Request
    sample: int
    acts: Mapping[Phase, tuple[Act, ...]]
    swaps: tuple[SwapHalf, ...]
    twins: Mapping[str, tuple[int, ...]]  # half -> prompt that it comes from

    @property
    def prefill_tokens(self) -> int:
        return len(self.request.prompt) - self.request.decodes_last

    @property
    def steps(self) -> int:
        return len(self.request.forced) or self.request.max_new_tokens

    @property
    def group(self) -> tuple[object, ...]:
        """Requests with equal groups share one prefill."""
        random = any(isinstance(act, KeepBest) and act.by == "random" for act in self.acts["prefill"])
        tokens = self.request.prompt[: self.prefill_tokens]
        return (tokens, self.acts["prefill"], self.sample if random else None)

    @property
    def one_piece(self) -> bool:
        """The whole prefill must be one forward: the paper's `balanced` sums over all of its queries."""
        return any(isinstance(act, ExposeColumns) and act.paper and act.mode == "balanced" for act in self.acts["prefill"])

    def failure(self, receipt: Receipt) -> str:
        """Why the intervention did not do what it should have; empty if it did."""
        for phase, acts in self.acts.items():
            for act in acts:
                name = _COUNTED.get(type(act), "positions")
                if not receipt.total(name, phase, act.layer):
                    return f"{type(act).__name__} in layer {act.layer} should have acted in {phase}, but {name} is 0"
        missing = [swap.half for swap in self.swaps if swap.half not in receipt.swapped]
        return f"the {missing[0]} half of the memory was not swapped" if missing else ""

    def notes(self, receipt: Receipt) -> tuple[str, ...]:
        hidden = []
        for phase, acts in self.acts.items():
            for act in acts:
                exposing = type(act).__name__ == "ExposeColumns"
                if exposing and not receipt.total("columns_exposed", phase, act.layer):
                    hidden.append(f"layer {act.layer}, {phase}: the exposed span was outside what any query could see")
        return tuple(hidden)


def sample_key(prompt: tuple[int, ...]) -> int:
    """A number that depends on the prompt alone."""
    return int.from_bytes(hashlib.sha256(repr(prompt).encode()).digest()[:8], "big")


def prepare(request: Request, anatomy: Anatomy) -> Prepared:
    """Check everything that can be checked before any compute, and lower the intervention for this prompt."""
    if not request.prompt:
        raise NeedleworkError("the prompt is empty; give at least one token")
    wrong = [token for token in request.prompt if not 0 <= token < anatomy.vocabulary]
    if wrong:
        raise NeedleworkError(f"token id {wrong[0]} is outside the vocabulary of {anatomy.vocabulary}")
    if request.max_new_tokens < 1 and not request.forced:
        raise NeedleworkError("max_new_tokens must be at least 1")
    request.intervention.check(anatomy)
    sample = sample_key(request.prompt) if request.sample is None else request.sample
    scene = Scene(anatomy, len(request.prompt), request.spans, sample)
    read = _check_phases(request)
    lowered = {phase: request.intervention.lower(scene, phase) if read[phase] else [] for phase in read}
    swaps = tuple(act for act in lowered["prefill"] if isinstance(act, SwapHalf))
    return Prepared(
        request,
        sample,
        _in_own_phase(lowered, request),
        swaps,
        {swap.half: _twin(swap, request) for swap in swaps},
    )


def _in_own_phase(lowered: dict[Phase, list[Act]], request: Request) -> dict[Phase, tuple[Act, ...]]:
    """Acts by phase; a state is cleared in the phase that reads the token at its position."""
    first_decoded = len(request.prompt) - request.decodes_last
    last = len(request.prompt) + (len(request.forced) or request.max_new_tokens) - 1
    acts: dict[Phase, tuple[Act, ...]] = {}
    for phase, some in lowered.items():
        mine = []
        for act in some:
            if isinstance(act, ClearState):
                if act.position >= last:
                    raise NeedleworkError(f"reset_state at {act.position}: no token is read there (at most {last - 1})")
                if request.scoring and act.position >= first_decoded:
                    raise NeedleworkError(
                        f"reset_state at {act.position}: options begin there; choose a position in the prompt (at most"
                        f" {first_decoded - 1})"
                    )
                if (act.position >= first_decoded) != (phase == "decode"):
                    continue
            if not isinstance(act, SwapHalf):
                mine.append(act)
        acts[phase] = tuple(mine)
    done = {act for some in acts.values() for act in some}
    for act in (act for some in lowered.values() for act in some if isinstance(act, ClearState)):
        if act not in done:
            phase = "decode" if act.position >= first_decoded else "prefill"
            raise NeedleworkError(f"reset_state at {act.position}: that token is read in {phase}; use that phase or 'both'")
    return acts


def _twin(swap: SwapHalf, request: Request) -> tuple[int, ...]:
    twin = swap.twin if isinstance(swap.twin, tuple) else request.twins.get(swap.twin)
    if twin is None:
        known = ", ".join(sorted(request.twins)) or "none"
        raise NeedleworkError(f"swap_memory: the request has no twin {swap.twin!r} (it has: {known}); pass twins={{...}}")
    if len(twin) != len(request.prompt):
        raise NeedleworkError(
            f"swap_memory: the twin has {len(twin)} tokens and the prompt {len(request.prompt)}; they must be of one length"
        )
    return twin


def _check_phases(request: Request) -> dict[Phase, bool]:
    """Which phases read any token here; an intervention that names only an empty one is refused."""
    steps = len(request.forced) or request.max_new_tokens
    read: dict[Phase, bool] = {
        "prefill": len(request.prompt) > request.decodes_last,
        "decode": not request.scoring and (request.boundary == "decode" or steps > 1),
    }
    why = {
        "prefill": f"a prompt of {len(request.prompt)} token has no prefill token with boundary='decode'",
        "decode": "scoring has no decode phase: use phase='prefill' or phase='both'"
        if request.scoring
        else "with boundary='prefill' and one new token nothing is decoded",
    }
    for part in request.intervention.parts:
        if part.side == "memory" and not all(read.values()):
            raise NeedleworkError(f"{part}: memory is swapped between prefill and decode, but one of them reads no token")
        if part.phase != "both" and not read[part.phase]:
            raise NeedleworkError(f"{part} acts in {part.phase} only, but {why[part.phase]}")
    return read
