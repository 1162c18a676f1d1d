"""Acts: what an intervention does in one layer and one phase to one prompt.

An intervention says what a person means. It is lowered (translated) to acts, which `model/attention.py` and `model/mixers.py`
carry out. A new intervention only has to say which acts it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.interventions.scores import RANDOM

Phase = Literal["prefill", "decode"]
Half = Literal["kv", "recurrent"]
Span = tuple[tuple[int, int], ...]  # half-open token ranges; several if the thing occurs more than once


@dataclass(frozen=True)
class Scene:
    """One prompt as an intervention sees it when it is lowered."""

    anatomy: Anatomy
    prompt_tokens: int
    spans: Mapping[str, Span] = field(default_factory=dict)
    sample: int = 0  # key of the sample, for random choices that batching and resuming cannot change

    def positions(self, span: str | tuple[int, ...]) -> tuple[int, ...]:
        """Token positions of a named span, or the given positions; an error if they are not in the prompt."""
        if isinstance(span, str):
            ranges = self.spans.get(span)
            if not ranges:
                known = ", ".join(sorted(self.spans)) or "none"
                raise NeedleworkError(f"the prompt has no span {span!r} (it has: {known}); pass spans={{{span!r}: ...}}")
            positions = tuple(p for start, end in ranges for p in range(start, end))
        else:
            positions = span
        outside = [p for p in positions if not 0 <= p < self.prompt_tokens]
        if outside or not positions:
            raise NeedleworkError(
                f"span {span!r} covers positions {outside or 'nothing'} outside the prompt of {self.prompt_tokens} tokens"
            )
        return positions


@dataclass(frozen=True)
class Act:
    """Base of all acts. `layer` is the model's own index; -1 for acts on the whole memory."""

    count: ClassVar[str]  # in the receipt; where it stays 0 the act did nothing, and its trial fails
    layer: int

    @property
    def of_sample(self) -> bool:
        """Whether it does something else to each sample: then samples that begin alike cannot share one prefill."""
        return False


@dataclass(frozen=True)
class KeepBest(Act):
    """Keep the k best heads of each token by a score of its attention; zero the outputs of the others."""

    count = "heads_zeroed"
    k: int
    by: str  # a name of `scores.known_scores()`
    seed: int = 0
    sinks: int = 0  # first tokens that are left out of the score

    @property
    def of_sample(self) -> bool:
        return self.by == RANDOM


@dataclass(frozen=True)
class SilenceHeads(Act):
    """Replace the outputs of these heads by zero, or by calibrated means (named by their hash)."""

    count = "heads_zeroed"
    heads: frozenset[int]
    means: str = ""


@dataclass(frozen=True)
class Place:
    """Where the outputs come from that a `ChangeOutputs` is given."""

    layer: int
    phase: Phase
    positions: Any  # tensor [queries], counted from the beginning of the prompt
    sample: int  # `sample_key(prompt)`, or what the request names


@dataclass(frozen=True)
class ChangeOutputs(Act):
    """For whatever no other act does: `function(outputs, place)` reads or replaces what the heads of one row say.

    `outputs` [queries, heads, dim] may be written to; what the function returns, of the same shape, goes on. A prompt
    comes in one block of queries or in several, a decoded token in one of its own.
    """

    count = "heads_changed"
    function: Callable[[Any, Place], Any]

    @property
    def of_sample(self) -> bool:
        return True


@dataclass(frozen=True)
class DropAttention(Act):
    """The whole attention module contributes nothing, its output bias included."""

    count = "blocks_dropped"


@dataclass(frozen=True)
class LimitKeys(Act):
    """A query sees only the last `tokens` keys (itself included) and the first `sinks`; of these heads, or of all."""

    count = "positions"  # hiding no key of a short prompt is no failure; a note says so
    tokens: int
    sinks: int
    heads: frozenset[int] | None = None


@dataclass(frozen=True)
class ExposeColumns(Act):
    """Rewrite attention probabilities on and off the given key positions."""

    count = "positions"  # a span outside the window is no failure; a note says so
    mode: Literal["omit", "only", "null", "balanced"]
    positions: tuple[int, ...]
    renormalize: bool
    paper: bool


@dataclass(frozen=True)
class CutMemory(Act):
    """The mixer sees each token alone: nothing is carried from token to token."""

    count = "states_cut"


@dataclass(frozen=True)
class CutConvolution(Act):
    """The mixer's short convolution sees each token alone; its recurrent state goes on."""

    count = "convolutions_cut"


@dataclass(frozen=True)
class CutState(Act):
    """The mixer's recurrent state is empty before every token; its short convolution goes on."""

    count = "carries_cut"


@dataclass(frozen=True)
class SilenceGroups(Act):
    """These groups of a mixer's channels are zero where its output projection reads them."""

    count = "groups_zeroed"
    groups: frozenset[int]


@dataclass(frozen=True)
class DropRecurrent(Act):
    """The mixer contributes nothing."""

    count = "blocks_dropped"


@dataclass(frozen=True)
class ClearState(Act):
    """The mixer's memory is emptied just before the token at `position` is read."""

    count = "states_cleared"
    position: int


@dataclass(frozen=True)
class SwapHalf(Act):
    """After prefill, one half of the memory comes from the twin prompt of this name, or of these token ids."""

    count = "swapped"  # kept apart from the layers' counts
    half: Half
    twin: str | tuple[int, ...]


_MASK = (1 << 64) - 1
# Odd constants of splitmix64; `model/edits.py` repeats this mix on tensors, a test holds them equal.
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(state: int) -> int:
    """One round of splitmix64: a 64-bit hash step with no state but its argument."""
    state = (state + GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * MIX1) & _MASK
    state = ((state ^ (state >> 27)) * MIX2) & _MASK
    return state ^ (state >> 31)


def draw(*keys: int) -> int:
    """A hash of integers, the same on every machine and in every batch."""
    state = 0
    for key in keys:
        state = mix(state ^ (key & _MASK))
    return state
