"""Inputs and outputs of the engine: Request, Prepared and Answer, in token ids and plain values. Does not import torch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError, short_repr
from needlework.interventions import acts as kinds
from needlework.interventions.acts import Act, Half, LoweringContext, Phase, Span, SwapHalf
from needlework.interventions.base import NONE, Intervention, as_intervention
from needlework.receipts import NOTHING_TO_HIDE, Receipt

if TYPE_CHECKING:
    import pandas

MOST_TOKENS = 2**22  # of one prompt or answer; larger numbers are taken for typing errors
Finish = Literal["stop", "length", "scored", "failed"]


@dataclass(frozen=True)
class Request:
    """One prompt under one intervention, to generate from or, with `options`, to score continuations of.

    Attributes:
        prompt: Token ids.
        intervention: The intervention, or its text.
        max_new_tokens: Maximum length of the answer.
        stop: Token ids that end the answer.
        spans: Named token ranges of the prompt, for interventions that refer to them.
        twins: Named prompts of the same length, for `swap_memory`.
        boundary: The phase that processes the last prompt token.
        sample: Seed of random choices; by default a hash of the prompt.
        forced: Token ids to decode instead of the model's own choice.
        options: Continuations to score; nothing is decoded, every position is prefill.
    """

    prompt: tuple[int, ...]
    intervention: Intervention = NONE
    max_new_tokens: int = 40
    stop: frozenset[int] = frozenset()
    spans: Mapping[str, Span] = field(default_factory=dict)
    twins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    boundary: Phase = "decode"
    sample: int | None = None
    forced: tuple[int, ...] = ()
    options: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):
            raise NeedleworkError(f"a request holds token ids, not text: Request(subject.encode({self.prompt!r}), ...)")
        object.__setattr__(self, "prompt", _tokens(self.prompt, "the prompt"))
        object.__setattr__(self, "forced", _tokens(self.forced, "forced"))
        for field_name in ("spans", "twins"):
            if not isinstance(getattr(self, field_name), Mapping):
                raise NeedleworkError(f"{field_name} is a mapping from names, not {short_repr(getattr(self, field_name))}")
        object.__setattr__(self, "options", tuple(_tokens(option, "an option") for option in _listed(self.options, "options")))
        object.__setattr__(self, "intervention", as_intervention(self.intervention))

    @property
    def key(self) -> int:
        """The key of the sample: it seeds random choices, and observers and `ChangeOutputs` functions receive it."""
        return sample_key(self.prompt) if self.sample is None else self.sample

    @property
    def decodes_last(self) -> bool:
        """Whether the last prompt token is processed in the decode phase."""
        return self.boundary == "decode" and not self.options

    @property
    def steps(self) -> int:
        """The maximum number of tokens after the prompt."""
        return max(map(len, self.options), default=0) or len(self.forced) or self.max_new_tokens


@dataclass(frozen=True)
class Answer:
    """The result of a request: generated tokens, or log-likelihoods of its options.

    Attributes:
        tokens: Generated token ids.
        logprobs: Log-probability of each generated token.
        margins: Best logit minus second best, at each step.
        receipt: Counts of what the intervention did.
        finish: Why the answer ended: "stop" (a stop token), "length", "scored" (options) or "failed".
        error: Why the request failed; empty if it did not.
        text: The decoded tokens, if the subject has a tokenizer.
        option_logprobs: Log-probabilities [options][tokens] of the options' tokens.
        greedy: For each option, whether all its tokens are the model's argmax.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    receipt: Receipt = field(default_factory=Receipt)
    finish: Finish = "scored"
    error: str = ""
    text: str = ""
    option_logprobs: tuple[tuple[float, ...], ...] = ()
    greedy: tuple[bool, ...] = ()

    @property
    def totals(self) -> tuple[float, ...]:
        """The log-likelihood of each option."""
        return tuple(map(sum, self.option_logprobs))

    @property
    def best(self) -> int:
        """The index of the most likely option; ties go to the first."""
        return max(range(len(self.totals)), key=self.totals.__getitem__)

    def frame(self) -> pandas.DataFrame:
        """Return one row per option if options were scored, otherwise one row per generated token."""
        import pandas

        if self.option_logprobs:
            counts = [len(option) for option in self.option_logprobs]
            return pandas.DataFrame({"tokens": counts, "logprob": self.totals, "greedy": self.greedy}).rename_axis("option")
        tokens = {"token": self.tokens, "logprob": self.logprobs, "margin": self.margins}
        return pandas.DataFrame(tokens).rename_axis("step")

    def _repr_html_(self) -> str:
        from needlework.tables import Table

        said = f"best option: {self.best}" if self.option_logprobs else self.error or self.text
        table = Table.from_frame(self.frame().reset_index(), f"{said!r} ({self.finish})", most=20)
        return table.to_html() + self.receipt._repr_html_()

    def __add__(self, other: Answer) -> Answer:
        """Concatenate the options of two answers, for a sample that needs several requests."""
        error = self.error or other.error
        both = self.receipt + other.receipt
        shared = set(self.receipt.notes) & set(other.receipt.notes)  # a note applies to the whole only if it applies to both
        return replace(
            self,
            receipt=replace(both, notes=tuple(note for note in self.receipt.notes if note in shared)),
            finish="failed" if error else self.finish,
            error=error,
            option_logprobs=self.option_logprobs + other.option_logprobs,
            greedy=self.greedy + other.greedy,
        )


def failed_answer(error: Exception) -> Answer:
    """Return the answer of a request that failed with an exception."""
    return Answer(finish="failed", error=f"{type(error).__name__}: {error}")


class Swap(NamedTuple):
    """A part of the cache that is taken from a twin: one half, of one layer or of all (layer -1).

    With `positions`, the keys and values of these tokens in one layer.
    """

    half: Half
    layer: int = -1
    positions: tuple[int, ...] = ()

    @property
    def counted(self) -> str:
        """The name of its count in the receipt of a layer."""
        return f"{self.half}_swapped"

    def acted(self, receipt: Receipt) -> bool:
        """Return whether the receipt says that it was swapped; single tokens may have left a layer's window, which is a note."""
        if self.positions:
            return True
        return self.half in receipt.swapped if self.layer < 0 else bool(receipt.total(self.counted, "prefill", self.layer))


@dataclass(frozen=True)
class Prepared:
    """A request with its interventions lowered to acts."""

    request: Request
    sample: int
    acts: Mapping[Phase, tuple[Act, ...]]
    twins: Mapping[Swap, tuple[int, ...]]  # part of the cache -> prompt that it is taken from
    apart: bool = False  # shares no prefill with other samples, so that an observer sees each of them

    @property
    def prefill_tokens(self) -> int:
        return len(self.request.prompt) - self.request.decodes_last

    @property
    def tokens_read(self) -> int:
        """The maximum number of positions; the last token of an option is predicted, never fed."""
        return len(self.request.prompt) + self.request.steps - bool(self.request.options)

    @property
    def group(self) -> tuple[object, ...]:
        """The key of the prefill: requests with equal keys share it."""
        of_sample = self.apart or any(act.of_sample for act in self.acts["prefill"])
        tokens = self.request.prompt[: self.prefill_tokens]
        return (tokens, self.acts["prefill"], self.sample if of_sample else None)

    @property
    def one_piece(self) -> bool:
        """Whether the whole prefill must be one forward: the paper's `balanced` sums over all of its queries."""
        return any(isinstance(act, kinds.ExposeColumns) and act.paper and act.mode == "balanced" for act in self.acts["prefill"])

    def failure(self, receipt: Receipt) -> str:
        """Return why the intervention failed to act as it should have, according to the receipt; empty if it did not."""
        for phase, acts in self.acts.items():
            for act in acts:
                if not receipt.total(act.count, None if act.once else phase, act.layer):
                    return f"{type(act).__name__} in layer {act.layer} should have acted in {phase}, but {act.count} is 0"
        left = next((swap for swap in self.twins if not swap.acted(receipt)), None)
        where = f" of layer {left.layer}" if left and left.layer >= 0 else ""
        return f"the {left.half} half of the memory{where} was not swapped" if left else ""

    def notes(self, receipt: Receipt) -> tuple[str, ...]:
        """Return warnings: where an intervention had nothing to act on, which is not a failure."""
        notes = []
        hidden: Counter[tuple[int, int]] = Counter()  # summed by limit: with a long answer, it may act in decode only
        blocked: list[int] = []
        for phase, act in ((phase, act) for phase, acts in self.acts.items() for act in acts):
            if isinstance(act, kinds.ExposeColumns) and not receipt.total("columns_exposed", phase, act.layer):
                notes.append(f"layer {act.layer}, {phase}: the exposed span was outside what any query could see")
            if isinstance(act, kinds.LimitKeys):
                hidden[act.tokens, act.sinks] += receipt.total("keys_hidden", phase, act.layer)
            if isinstance(act, kinds.BlockEdges):
                blocked.append(receipt.total("edges_blocked", phase, act.layer))
        if blocked and not any(blocked):
            notes.append(f"{NOTHING_TO_HIDE}: no query that block_attention names could see the keys that it blocks")
        for swap in self.twins:
            if swap.positions and not receipt.total(swap.counted, "prefill", swap.layer):
                notes.append(f"{NOTHING_TO_HIDE}: the swapped tokens had left the window of layer {swap.layer}")
        for (tokens, sinks), keys in hidden.items():
            if not keys:
                notes.append(f"{NOTHING_TO_HIDE}: no query had keys beyond the last {tokens} and the first {sinks}")
        return tuple(notes)


def stop_tokens(
    eos: int | Iterable[int] | None,
    stops: Iterable[int | str] = (),
    encode: Callable[[str], Sequence[int]] | None = None,
) -> frozenset[int]:
    """Return the token ids that end an answer.

    Args:
        eos: `eos_token_id` of the model's configuration: one id, several or none.
        stops: Further token ids, or texts of one token.
        encode: Tokenizes a text; needed if `stops` has texts.
    """
    ends = set()
    for end in eos if isinstance(eos, (list, tuple, set, frozenset)) else () if eos is None else (eos,):
        if type(end) is not int:
            raise NeedleworkError(
                f"eos_token_id: {short_repr(end)} is no token id; correct generation_config.json or config.json"
            )
        ends.add(end)
    for stop in stops:
        if isinstance(stop, str):
            if encode is None:
                raise NeedleworkError(f"stop {stop!r}: without a tokenizer, a stop must be a token id")
            ids = encode(stop)
            if len(ids) != 1:
                raise NeedleworkError(f"stop {stop!r} is {len(ids)} tokens; a stop must be one token")
            stop = ids[0]
        ends.add(index(stop))
    return frozenset(ends)


def sample_key(prompt: Sequence[int]) -> int:
    """Return a 64-bit hash of the prompt's token ids."""
    return int.from_bytes(hashlib.sha256(repr(tuple(prompt)).encode()).digest()[:8], "big")


def prepare(request: Request, anatomy: Anatomy, apart: bool = False) -> Prepared:
    """Validate a request and lower its intervention to acts on this prompt, before any compute.

    Raises:
        NeedleworkError: The request is invalid, or its intervention cannot act on this model or prompt.
    """
    _check_values(request, anatomy)
    request.intervention.check(anatomy)
    sample = request.key
    context = LoweringContext(anatomy, len(request.prompt), request.spans, sample)
    lowered = {
        phase: request.intervention.lower_for_phase(context, phase) if read else []
        for phase, read in check_phases(request).items()
    }
    twins = {_swap(swap, request): _twin(swap, request, anatomy) for swap in lowered["prefill"] if isinstance(swap, SwapHalf)}
    prepared = Prepared(request, sample, _in_own_phase(lowered, request), twins, apart)
    if request.options and prepared.one_piece:
        raise NeedleworkError(
            f"{request.intervention}: the paper's balanced sums over a whole prefill, but options are read apart;"
            " use compat='right', or logits(), which reads everything at once"
        )
    return prepared


def _listed(given: object, what: str) -> Iterable[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise NeedleworkError(f"{what} is a list, not {short_repr(given)}")
    return given


def _tokens(given: object, what: str) -> tuple[int, ...]:
    """Return token ids as a tuple of ints."""
    if type(given) is tuple and all(type(token) is int for token in given):
        return given
    try:
        return tuple(map(index, _listed(given, what)))
    except TypeError:
        raise NeedleworkError(f"{what}: {short_repr(given)} holds what is no token id; token ids are whole numbers") from None


def check_tokens(tokens: Sequence[int], anatomy: Anatomy, what: str = "the prompt") -> None:
    """Raise if there are no tokens, or token ids outside the vocabulary."""
    if not len(tokens):
        raise NeedleworkError(f"{what} is empty; give at least one token")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < anatomy.vocabulary:
            raise NeedleworkError(f"{what}: token id {token} is outside the vocabulary of {anatomy.vocabulary}")


def _check_values(request: Request, anatomy: Anatomy) -> None:
    """Raise for invalid values that would otherwise be misinterpreted without an error."""
    check_tokens(request.prompt, anatomy)
    if request.forced:
        check_tokens(request.forced, anatomy, "forced")
    for option in request.options:
        check_tokens(option, anatomy, "an option")
    wanted = request.max_new_tokens
    if not isinstance(wanted, Integral) or not (wanted >= 1 or request.forced) or wanted > MOST_TOKENS:
        raise NeedleworkError(
            f"max_new_tokens={short_repr(wanted)} must be a whole number, at least 1 and at most {MOST_TOKENS:,}"
        )
    if request.boundary not in get_args(Phase):
        raise NeedleworkError(
            f"boundary={request.boundary!r} is not known; choose 'decode' or 'prefill': who reads the last prompt token"
        )
    count = len(request.prompt)
    for name, part in ((n, part) for n, ranges in request.spans.items() for part in _listed(ranges, f"span {n!r}")):
        whole = isinstance(part, Sequence) and len(part) == 2 and all(isinstance(edge, Integral) for edge in part)
        if not (whole and 0 <= part[0] < part[1] <= count):
            raise NeedleworkError(
                f"span {name!r}: {short_repr(part)} lies outside the prompt of {count} tokens or is no range; give"
                f" (start, end) pairs with 0 <= start < end <= {count}, e.g. {{{name!r}: [(0, {count})]}}"
            )


def _in_own_phase(lowered: dict[Phase, list[Act]], request: Request) -> dict[Phase, tuple[Act, ...]]:
    """Return the acts by phase; a ClearState belongs to the phase that processes the token at its position."""
    first_decoded = len(request.prompt) - request.decodes_last
    last = len(request.prompt) + request.steps - 1
    acts: dict[Phase, list[Act]] = {phase: [] for phase in lowered}
    for phase, act in ((phase, act) for phase, acts in lowered.items() for act in acts if not isinstance(act, SwapHalf)):
        own: Phase = phase
        if isinstance(act, kinds.ClearState):
            own = "decode" if act.position >= first_decoded else "prefill"
            if act.position >= last:
                why = f"no token is read there (at most {last - 1})"
            elif request.options and own == "decode":
                why = f"options begin there; choose a position in the prompt (at most {first_decoded - 1})"
            else:
                why = "" if act in lowered[own] else f"that token is read in {own}; use that phase or 'both'"
            if why:
                raise NeedleworkError(f"reset_state at {act.position}: {why}")
        if own == phase:
            acts[phase].append(act)
    return {phase: tuple(kept) for phase, kept in acts.items()}


def _swap(swap: SwapHalf, request: Request) -> Swap:
    """Return the part of the cache that is swapped; raise if none of its tokens is in memory then."""
    read = len(request.prompt) - request.decodes_last
    held = tuple(position for position in swap.positions if position < read)
    if swap.positions and not held:
        raise NeedleworkError(
            f"swap_memory: memory is swapped after {read} tokens of the prompt, before those at {list(swap.positions)} are read;"
            " name earlier tokens"
        )
    return Swap(swap.half, swap.layer, held)


def _twin(swap: SwapHalf, request: Request, anatomy: Anatomy) -> tuple[int, ...]:
    """Return the token ids of a swap's twin; raise unless it has the prompt's length and differs in the prefill."""
    twin = swap.twin if isinstance(swap.twin, tuple) else request.twins.get(swap.twin)
    if twin is None:
        known = ", ".join(sorted(request.twins)) or "none"
        raise NeedleworkError(f"swap_memory: the request has no twin {swap.twin!r} (it has: {known}); pass twins={{...}}")
    twin = _tokens(twin, "swap_memory: the twin")
    if len(twin) != len(request.prompt):
        raise NeedleworkError(
            f"swap_memory: the twin has {len(twin)} tokens and the prompt {len(request.prompt)}; they must be of one length"
        )
    check_tokens(twin, anatomy, "swap_memory: the twin")
    read = len(request.prompt) - request.decodes_last
    if twin[:read] == request.prompt[:read]:
        raise NeedleworkError(f"swap_memory: in the {read} tokens that prefill reads, the twin is the prompt: give another")
    return twin


def check_phases(request: Request) -> dict[Phase, bool]:
    """Return whether each phase processes any token; raise if an intervention acts only in a phase without tokens."""
    read: dict[Phase, bool] = {
        "prefill": len(request.prompt) > request.decodes_last,
        "decode": not request.options and (request.boundary == "decode" or request.steps > 1),
    }
    why = {
        "prefill": f"a prompt of {len(request.prompt)} token has no prefill token with boundary='decode'",
        "decode": "scoring has no decode phase, and with boundary='prefill' and one new token nothing is decoded: use"
        " phase='prefill' or phase='both'",
    }
    for part in request.intervention.parts:
        if part.side == "memory" and not all(read.values()):
            raise NeedleworkError(f"{part}: memory is swapped between prefill and decode, but one of them reads no token")
        if part.phase != "both" and not read[part.phase]:
            raise NeedleworkError(f"{part} acts in {part.phase} only, but {why[part.phase]}")
    return read
