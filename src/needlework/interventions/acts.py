"""Acts: the primitive operations that interventions are lowered to, each in one layer, one phase and one prompt.

Users write interventions. An intervention is lowered (translated) to acts, which `model/attention.py` and `model/mixers.py`
execute. A new intervention only has to define which acts it lowers to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar, get_args

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError

Phase = Literal["prefill", "decode"]
Half = Literal["kv", "recurrent"]
Span = tuple[tuple[int, int], ...]  # half-open token ranges; several if the text occurs more than once
Needs = Literal["probabilities", "outputs"]
Site = Literal["heads", "attention", "mixers", "layers"]  # what has outputs that can be recorded and patched
RANDOM = "random"  # not in the table: `model/edits.py` draws heads by a hash of sample, layer, position and head
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class LoweringContext:
    """What an intervention needs to know of the model and one prompt to be lowered."""

    anatomy: Anatomy
    prompt_tokens: int
    spans: Mapping[str, Span] = field(default_factory=dict)
    sample: int = 0  # key of the sample; seeds random choices, so that they do not depend on batching or resuming

    def positions(self, span: str | tuple[int, ...]) -> tuple[int, ...]:
        """Return the token positions of a named span, or the given positions; raise if any lies outside the prompt."""
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
    """Base class of acts. `layer` is the model's own layer index; -1 for acts on the whole cache."""

    count: ClassVar[str]  # name of its count in the receipt; a trial fails if the count stays 0
    once: ClassVar[bool] = False  # whether the count may stay 0 in one of the phases that it acts in
    of_sample: ClassVar[bool] = False  # whether its effect depends on the sample: samples with one prefix share no prefill
    layer: int


@dataclass(frozen=True)
class KeepBest(Act):
    """Keep the k highest-scoring heads of each token; zero the outputs of the others."""

    count = "heads_zeroed"
    k: int
    by: str  # a name of `known_scores()`
    seed: int = 0
    sinks: int = 0  # number of first tokens left out of the score

    @property
    def of_sample(self) -> bool:  # type: ignore[override]
        return self.by == RANDOM


@dataclass(frozen=True)
class SilenceHeads(Act):
    """Replace the outputs of these heads by zero, or by calibrated means (named by their hash)."""

    count = "heads_zeroed"
    heads: frozenset[int]
    means: str = ""


@dataclass(frozen=True)
class Place:
    """The layer, phase, positions and sample of the head outputs given to a `ChangeOutputs` function."""

    layer: int
    phase: Phase
    positions: Any  # tensor [queries], counted from the first token of the prompt
    sample: int  # `sample_key(prompt)`, or the request's own `sample`


@dataclass(frozen=True)
class ChangeOutputs(Act):
    """Apply a user-defined function to the head outputs of one row: `function(outputs, place)`.

    `outputs` [queries, heads, dim] may be modified in place; the return value, of the same shape, replaces it. The function is
    called once per block of queries: one or several for a prompt, one for each decoded token.

    Attributes:
        layer: The model's own layer index.
        function: Called with `outputs` and `place` (layer, phase, positions, sample).
    """

    count, of_sample = "heads_changed", True
    site: ClassVar[Site] = "heads"
    function: Callable[[Any, Place], Any]


@dataclass(frozen=True)
class RecordOutputs(Act):
    """Record what a site of a layer gives at every token.

    Attributes:
        layer: The model's own layer index.
        site: Heads, the attention module, the recurrent mixer, or the whole layer (the residual stream after it).
        into: A `model.outputs.Recording`.
    """

    count, of_sample = "outputs_recorded", True
    site: Site
    into: Any


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Positions of a prompt, in order, and those of another prompt whose outputs replace theirs."""

    own: tuple[int, ...]
    source: tuple[int, ...]


@dataclass(frozen=True)
class PatchOutputs(Act):
    """Replace what a site of a layer gives at some tokens by what was recorded on another prompt.

    Attributes:
        layer: The model's own layer index.
        site: Heads (before the output projection), the attention module, the recurrent mixer, or the whole layer.
        source: A `model.outputs.Recording`.
        tokens: Which positions are replaced, by those of which.
        heads: Only of these heads; None: all.
    """

    of_sample = True
    site: Site
    source: Any
    tokens: TokenMap
    heads: frozenset[int] | None = None

    @property
    def count(self) -> str:  # type: ignore[override]
        return f"{self.site}_patched"


@dataclass(frozen=True)
class DropOutputs(Act):
    """Zero the output of the whole attention module, its output bias included, or of the mixer."""

    count = "blocks_dropped"
    site: Site


@dataclass(frozen=True)
class LimitKeys(Act):
    """Mask all keys but the last `tokens` (the query's own included) and the first `sinks`, in these heads or in all."""

    count = "positions"  # masking no key of a short prompt is not a failure, but adds a note
    tokens: int
    sinks: int
    heads: frozenset[int] | None = None


@dataclass(frozen=True)
class BlockEdges(Act):
    """Mask keys for some queries, in these heads or in all; a query's own key stays visible."""

    count = "positions"  # blocking no edge (outside a window) is not a failure, but adds a note
    queries: tuple[int, ...]
    first: int | None  # queries from this position on are meant, too
    keys: tuple[int, ...]
    heads: frozenset[int] | None = None


@dataclass(frozen=True)
class ExposeColumns(Act):
    """Change attention probabilities on or off the given key positions."""

    count = "positions"  # a span outside the window is not a failure, but adds a note
    mode: Literal["omit", "only", "null", "balanced"]
    positions: tuple[int, ...]
    renormalize: bool
    paper: bool


CUTS = {"memory": "states_cut", "conv": "convolutions_cut", "state": "carries_cut"}  # what is cut -> name of its count


@dataclass(frozen=True)
class CutMemory(Act):
    """Cut a mixer's memory between tokens: all of it, its short convolution alone, or its recurrent state alone."""

    site: Literal["memory", "conv", "state"]

    @property
    def count(self) -> str:  # type: ignore[override]
        return CUTS[self.site]


@dataclass(frozen=True)
class BlockSources(Act):
    """Keep what the tokens at these positions write into a mixer's state from all later tokens; gates are unchanged."""

    count = "writes_blocked"
    once = True
    sources: tuple[int, ...]
    groups: frozenset[int] | None = None  # of the mixer's channels; None: all


@dataclass(frozen=True)
class BlockTaps(Act):
    """Take the tokens at these positions out of what a mixer's short convolution adds up for later tokens."""

    count = "taps_blocked"
    once = True
    sources: tuple[int, ...]
    queries: tuple[int, ...] | None = None  # positions of the later tokens; None: all


@dataclass(frozen=True)
class SilenceGroups(Act):
    """Zero groups of a mixer's channels at the input of its output projection."""

    count = "groups_zeroed"
    groups: frozenset[int]


@dataclass(frozen=True)
class ClearState(Act):
    """Clear the mixer's recurrent memory just before the token at `position` is processed."""

    count = "states_cleared"
    position: int


@dataclass(frozen=True)
class SwapHalf(Act):
    """After prefill, take one half of the cache (kv or recurrent) from a twin prompt, given by name or token ids.

    `layer` is -1 for the half of all layers. With `positions`, only the keys and values of these tokens are taken.
    """

    count = "swapped"  # `Receipt.swapped`, apart from the counts per layer
    half: Half
    twin: str | tuple[int, ...]
    positions: tuple[int, ...] = ()


_MASK = (1 << 64) - 1
# Odd constants of splitmix64. `model/edits.py` has the same hash for tensors; a test compares the two.
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(state: int) -> int:
    """Return one round of splitmix64, a 64-bit hash."""
    state = (state + GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * MIX1) & _MASK
    state = ((state ^ (state >> 27)) * MIX2) & _MASK
    return state ^ (state >> 31)


def draw(*keys: int) -> int:
    """Return a 64-bit hash of integers; the same on every machine and in every batch."""
    state = 0
    for key in keys:
        state = mix(state ^ (key & _MASK))
    return state


# --- Head scores that `KeepHeads` can rank heads by: functions that return [rows, heads, queries], the highest are kept ---


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


HEAD_SCORES = {
    score.name: score
    for score in (
        HeadScore("entropy", "probabilities", lambda p, log_p: log_p.mul_(p).sum(-1)),  # negative: the lowest is kept
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
