"""Activation patching: which part of a model, on a clean prompt, restores the clean answer on a corrupt one.

The clean prompt is read once and recorded. The corrupt prompt is then read once for every site, with the outputs of this site
(or its part of the memory) replaced by the recorded ones; all of these are rows of the engine's batches, which share the layers
below the site. `method="gradient"` estimates the same table from one forward and one backward pass (attribution patching).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from needlework.anatomy import Head
from needlework.errors import NeedleworkError, did_you_mean
from needlework.heads.evaluation import spearman
from needlework.heads.samples import answer_tokens
from needlework.interventions import acts
from needlework.interventions.acts import Act, LoweringContext, PatchOutputs, Phase, Span, TokenMap
from needlework.interventions.base import Intervention, Part, combine
from needlework.interventions.builtin import SwapMemory
from needlework.measure import Progress, no_progress, run_requests
from needlework.model.hooked_model import answer_log_p, differentiable
from needlework.model.outputs import Recording, Where
from needlework.requests import Request, check_tokens
from needlework.stats import Estimate, bootstrap_ratio, number
from needlework.subject import Prompt, Subject
from needlework.tasks.base import Item

if TYPE_CHECKING:
    import pandas

    from needlework.model.attention import Forward

PatchSite = Literal["heads", "attention", "mixers", "layers", "kv", "recurrent"]
PatchMethod = Literal["exact", "gradient"]
PatchMetric = Literal["log_p", "logit"]
SITES: tuple[str, ...] = get_args(PatchSite)
HALVES = ("kv", "recurrent")
WORDS = ("all", "prefill", "decode", "each")  # of `at`; every other word is the name of a span
PROMPT = "prompt"  # `at` of the memory: all of it, after the prompt
_LEAST_GAP = 0.1  # nats between clean and corrupt prompts; with less there is nothing to restore
_ROWS_AT_ONCE = 512  # sites times pairs that are asked in one run


@dataclass(frozen=True)
class PatchRow:
    """What one site restores.

    Attributes:
        site: One of `sites` of `nw.patch`.
        layer: The model's own layer index.
        head: Index of the head; None for other sites.
        at: Where it was patched: "all", "prefill", "decode", a span's name, or a position.
        share: The restored share of the difference between clean and corrupt: 0 restores nothing, 1 restores all of it.
    """

    site: str
    layer: int
    head: int | None
    at: str
    share: Estimate

    @property
    def name(self) -> str:
        head = "" if self.head is None else f".{self.head}"
        return f"{self.site} {self.layer}{head}"


@dataclass(frozen=True)
class Patching:
    """What each site of a model restores of the clean answer, when it is patched into the corrupt prompt.

    Attributes:
        model: The model's architecture.
        method: "exact" or "gradient".
        metric: "log_p" or "logit".
        pairs: Number of pairs of prompts.
        clean: Mean of the metric on the clean prompts.
        corrupt: Mean of the metric on the corrupt prompts.
        rows: One for each site and place.
    """

    model: str
    method: str
    metric: str
    pairs: int
    clean: float
    corrupt: float
    rows: tuple[PatchRow, ...]

    def frame(self) -> pandas.DataFrame:
        """Return one row per site and place, with the restored share and its interval."""
        import pandas

        columns = ["site", "layer", "head", "at", "share", "low", "high", "n"]
        rows = [(x.site, x.layer, x.head, x.at, x.share.value, x.share.low, x.share.high, x.share.n) for x in self.rows]
        return pandas.DataFrame(rows, columns=columns).astype({"head": "Int64"})

    def best(self, count: int = 5) -> list[PatchRow]:
        """Return the rows that restore most."""
        return sorted(self.rows, key=lambda row: -row.share.value)[:count]

    def agreement(self, other: Patching) -> float:
        """Return Spearman's rank correlation of the shares of two methods or models, over the rows that both have."""
        mine, theirs = ({(x.site, x.layer, x.head, x.at): x.share.value for x in one.rows} for one in (self, other))
        both = [key for key in mine if key in theirs]
        if len(both) < 2:
            raise NeedleworkError("these two tables have no sites in common to compare; patch the same sites at the same places")
        return spearman(np.array([mine[key] for key in both]), np.array([theirs[key] for key in both]))

    def plot(self, ax: Any = None, *, site: str | None = None) -> Any:
        """Draw the shares of one site (by default the first) as a heat map, and return the matplotlib axes.

        The map has layers by heads, or layers by places.
        """
        from needlework.plots import draw_head_map, head_axes

        sites = list(dict.fromkeys(row.site for row in self.rows))
        if site is not None and site not in sites:
            raise NeedleworkError(f"{site!r} was not patched; {did_you_mean(site, sites)}")
        rows = [row for row in self.rows if row.site == (site or sites[0])]
        places = list(dict.fromkeys(row.at for row in rows))
        heads = rows[0].head is not None
        if heads and len(places) > 1:
            raise NeedleworkError(
                f"heads were patched at {', '.join(places)}: give patch() one place (at=...) for a map of heads"
            )
        values = {Head(x.layer, places.index(x.at) if x.head is None else x.head): x.share.value for x in rows}
        ax = head_axes(ax, values)
        draw_head_map(ax, values)
        if not heads:
            step = max(1, len(places) // 24)
            shown = range(0, len(places), step)
            ax.set_xticks(shown, [places[i] for i in shown], rotation=90 if max(map(len, places)) * len(shown) > 40 else 0)
            ax.set_xlabel("patched at")
        ax.set_title(f"{rows[0].site}: restored share" + (f" at {places[0]}" if heads else ""))
        return ax

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        rows = [{"site": x.site, "layer": x.layer, "head": x.head, "at": x.at, **x.share.to_dict()} for x in self.rows]
        facts = {name: getattr(self, name) for name in ("model", "method", "metric", "pairs", "clean", "corrupt")}
        return {**facts, "rows": rows}

    def __str__(self) -> str:
        pairs = f"{self.pairs} pair" + "s" * (self.pairs > 1)
        return (
            f"{self.model}, {pairs}, {self.method}: restored share of the {self.metric} difference"
            f" ({number(self.corrupt)} corrupt, {number(self.clean)} clean)"
        )

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from needlework.tables import Table

        frame = self.frame().sort_values("share", ascending=False, kind="stable").astype({"head": object})
        return Table.from_frame(frame.where(frame.notna(), None), str(self)).to_html()


@dataclass(frozen=True)
class Pair:
    """A clean and a corrupt prompt, with the tokens of both answers and the spans of both prompts."""

    clean: tuple[int, ...]
    corrupt: tuple[int, ...]
    answers: tuple[tuple[int, ...], tuple[int, ...]]  # of the clean prompt, and of the corrupt one
    spans: Mapping[str, Span] = field(default_factory=dict)  # of the corrupt prompt
    clean_spans: Mapping[str, Span] = field(default_factory=dict)
    cluster: str = ""

    def tokens(self, at: str | int) -> TokenMap:
        """Return the positions of the corrupt prompt (and of an answer) that are patched, with those of the clean prompt.

        Raises:
            NeedleworkError: The prompts have no such place, or it is not the same in both.
        """
        count, longest = len(self.corrupt), max(map(len, self.answers))
        if at == "decode":
            steps = range(-1, longest - 1)  # the last prompt token, and the answer without its last one
            return TokenMap(tuple(count + i for i in steps), tuple(len(self.clean) + i for i in steps))
        if isinstance(at, int) or at in WORDS:
            if len(self.clean) != count:
                raise NeedleworkError(
                    f"patch: the clean prompt has {len(self.clean)} tokens and the corrupt one {count}, so at={at!r} is not the"
                    " same place in both: give prompts of one length, at='decode', or the name of a span that both have"
                )
            if isinstance(at, int):
                if not -count <= at < count:
                    raise NeedleworkError(f"patch: at={at} lies outside the prompt of {count} tokens")
                own: tuple[int, ...] = (at % count,)
            else:
                own = tuple(range(count - 1 if at == "prefill" else count + longest - 1))
            return TokenMap(own, own)
        found = []
        for spans, what in ((self.spans, "corrupt"), (self.clean_spans, "clean")):
            if at not in spans:
                known = did_you_mean(at, [*WORDS, *spans])
                raise NeedleworkError(f"patch: the {what} prompt has no span {at!r}; {known}, or give spans={{{at!r}: ...}}")
            found.append(tuple(position for start, end in spans[at] for position in range(start, end)))
        if len(found[0]) != len(found[1]):
            raise NeedleworkError(
                f"patch: the span {at!r} has {len(found[1])} tokens in the clean prompt and {len(found[0])} in the corrupt one;"
                " they must be of one length"
            )
        order = sorted(range(len(found[0])), key=found[0].__getitem__)
        return TokenMap(tuple(found[0][i] for i in order), tuple(found[1][i] for i in order))


class CarryActs(Part):
    """An intervention that stands for given acts. It has no text form, because acts may hold tensors."""

    name = "carry_acts"
    members: tuple[Any, ...]

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        return self.members  # type: ignore[no-any-return]

    def text(self) -> str:
        counts = dict.fromkeys(f"{type(act).__name__} in layer {act.layer}" for act in self.members)
        return f"{self.name}({', '.join(counts)}, phase={self.phase!r})"


@dataclass(frozen=True)
class _Target:
    """A site, and where it is patched."""

    site: str
    layer: int
    head: int | None
    at: str | int


def patch(
    subject: Subject,
    clean: Prompt | Item | Sequence[Prompt | Item],
    corrupt: Prompt | Item | Sequence[Prompt | Item] | None = None,
    sites: str | Sequence[str] | None = None,
    *,
    at: str | int | Sequence[str | int] = "all",
    answers: Any = None,
    layers: Sequence[int] | None = None,
    spans: Mapping[str, Span] | None = None,
    clean_spans: Mapping[str, Span] | None = None,
    metric: PatchMetric = "log_p",
    method: PatchMethod = "exact",
    progress: Progress = no_progress,
) -> Patching:
    """Patch what sites give on the clean prompt into the corrupt prompt, and return what each restores of the clean answer.

    Args:
        clean: A text, token ids or an Item, or a list of them: several pairs give intervals.
        corrupt: The prompt with another answer, for each clean one; by default the twin of each Item.
        sites: "heads", "attention" or "mixers" (outputs of these modules), "layers" (the residual stream after each layer), "kv"
            or "recurrent" (a layer's half of the memory after the prompt, or the keys and values of some of its tokens). By
            default "attention" and "mixers".
        at: Where outputs are patched: "all", "prefill", "decode" (the last prompt token and the answer), a position of the prompt
            (negative: from its end), the name of a span, "each" token on its own, or a list of these.
        answers: (clean answer, corrupt answer) as texts or token ids, or a list with a pair of them for each pair of prompts. By
            default the targets of Items, and for other prompts the token that the model gives to each.
        layers: Layers to patch; by default all that have the site.
        spans: Named token ranges of the prompts, for all pairs; Items have their own.
        clean_spans: Those of the clean prompts, where they differ.
        metric: "log_p": log-probability of the clean answer minus that of the corrupt one; "logit": difference of the logits of
            the first tokens in which they differ.
        method: "exact", or "gradient": (clean - corrupt) x gradient of the metric on the corrupt prompt, for outputs only.
        progress: Called with the share that is done.
    """
    if sites is None:
        anatomy = subject.anatomy
        sites = ["attention"] * bool(anatomy.attention_layers) + ["mixers"] * bool(anatomy.recurrent_layers)
    _check_words(sites, metric, method)
    pairs = _pairs(subject, clean, corrupt, answers, spans, clean_spans, metric)
    targets = _targets(subject, [sites] if isinstance(sites, str) else list(sites), at, layers, pairs)
    measure = _exact if method == "exact" else _gradient
    values = measure(subject, pairs, targets, progress)  # [pairs, 2 + targets]: the metric on clean, corrupt, patched prompts
    whole, none = values[:, 0], values[:, 1]
    if (whole - none).mean() < _LEAST_GAP:
        raise NeedleworkError(
            f"patch: the clean prompts favour the clean answer by {number(whole.mean())} and the corrupt ones by"
            f" {number(none.mean())} nats, so that there is nothing to restore; give prompts that the model tells apart,"
            " or answers="
        )
    clusters = [pair.cluster for pair in pairs]
    rows = tuple(
        PatchRow(
            target.site,
            target.layer,
            target.head,
            PROMPT if target.site in HALVES and target.at == "all" else str(target.at),
            bootstrap_ratio(patched - none, whole - none, clusters),
        )
        for target, patched in zip(targets, values[:, 2:].T, strict=True)
    )
    name = subject.anatomy.architecture
    return Patching(name, method, metric, len(pairs), float(whole.mean()), float(none.mean()), rows)


def _check_words(sites: Any, metric: str, method: str) -> None:
    listed = [sites] if isinstance(sites, str) else list(sites)
    for name, given, known in (
        ("sites", listed, SITES),
        ("metric", [metric], get_args(PatchMetric)),
        ("method", [method], get_args(PatchMethod)),
    ):
        for word in given:
            if word not in known:
                raise NeedleworkError(f"patch: {name}={word!r} is not known; {did_you_mean(str(word), known)}")
    if not listed:
        raise NeedleworkError(f"patch: give at least one site: {', '.join(SITES)}")
    if method == "gradient" and (memory := [site for site in listed if site in HALVES]):
        raise NeedleworkError(
            f"patch: method='gradient' estimates outputs, and {', '.join(memory)} is memory: use method='exact'"
        )


# --- Pairs of prompts, and what is patched ---


def _is_one(given: Any) -> bool:
    """Return whether this is one prompt and not a list of them."""
    return isinstance(given, (str, Item)) or (len(given) > 0 and all(isinstance(token, int) for token in given))


def _pairs(subject: Subject, clean: Any, corrupt: Any, answers: Any, spans: Any, clean_spans: Any, metric: str) -> list[Pair]:
    """Return the pairs with their prompts and answers in tokens."""
    several = not _is_one(clean)
    first = list(clean) if several else [clean]
    second = [None] * len(first) if corrupt is None else list(corrupt) if several else [corrupt]
    given = [None] * len(first) if answers is None else list(answers) if several else [answers]
    if not first or not len(first) == len(second) == len(given):
        raise NeedleworkError(
            f"patch: {len(first)} clean prompts, {len(second)} corrupt ones and {len(given)} pairs of answers; give one of"
            " each for each pair"
        )
    pairs = []
    for i, (one, other, said) in enumerate(zip(first, second, given, strict=True)):
        one, other = _as_item(subject, one, spans, i), _twin(subject, one, other, spans, i)
        one = replace(one, spans={**one.spans, **(clean_spans or {})})
        tokens = _answers(subject, one, other, said)
        if metric == "logit":
            same = next((i for i, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b), min(map(len, tokens)) - 1)
            tokens = (tokens[0][: same + 1], tokens[1][: same + 1])
        if tokens[0] == tokens[1]:
            raise NeedleworkError(
                f"patch: clean and corrupt prompt have the same answer {list(tokens[0])}, so that nothing can be told apart; give"
                " answers=(clean answer, corrupt answer)"
            )
        for prompt, what in ((one.prompt, "clean"), (other.prompt, "corrupt")):
            check_tokens(prompt, subject.anatomy, f"patch: the {what} prompt")
        pairs.append(Pair(one.prompt, other.prompt, tokens, other.spans, one.spans, one.cluster))
    return pairs


def _as_item(subject: Subject, given: Any, spans: Mapping[str, Span] | None, place: int) -> Item:
    if isinstance(given, Item):
        return given
    tokens = subject.encode(given)
    return Item(f"pair {place}", f"pair {place}", tokens, given if isinstance(given, str) else "", "", spans or {})


def _twin(subject: Subject, clean: Any, corrupt: Any, spans: Mapping[str, Span] | None, place: int) -> Item:
    """Return the corrupt prompt as an item; by default the clean item's twin."""
    if corrupt is not None:
        return _as_item(subject, corrupt, spans, place)
    if not isinstance(clean, Item) or not clean.twins:
        raise NeedleworkError(
            "patch: give a corrupt prompt, with another answer, for each clean one; only Items with a twin (twins: true in the"
            " task) bring their own"
        )
    twin = next(iter(clean.twins.values()))
    text = "" if subject.tokenizer is None else subject.tokenizer.decode(twin)
    return replace(clean, prompt=twin, prompt_text=text, target=clean.twin_target, options=(), answer=None, twins={})


def _answers(subject: Subject, clean: Item, corrupt: Item, given: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of the clean and the corrupt answer."""
    if given is not None:
        if isinstance(given, str) or len(given) != 2:
            raise NeedleworkError(
                f"patch: answers={given!r} must be a pair (clean answer, corrupt answer) for each pair of prompts"
            )
        first, second = (subject.encode(one, continuation=True) for one in given)
    elif clean.target and corrupt.target:
        first, second = (answer_tokens(subject, replace(one, options=(), answer=None)) for one in (clean, corrupt))
    else:
        said = run_requests(subject, [Request(one.prompt, max_new_tokens=1) for one in (clean, corrupt)])
        first, second = (one.tokens for one in said)
    for tokens in (first, second):
        check_tokens(tokens, subject.anatomy, "patch: an answer")
    return first, second


def _targets(
    subject: Subject, sites: Sequence[str], at: Any, layers: Sequence[int] | None, pairs: Sequence[Pair]
) -> list[_Target]:
    """Return everything that is patched, in the order of the table."""
    anatomy, places = subject.anatomy, _places(at, pairs)
    sides = {"layers": anatomy.layers, "mixers": anatomy.recurrent_layers, "recurrent": anatomy.recurrent_layers}
    known = {site: [layer.index for layer in sides.get(site, anatomy.attention_layers)] for site in sites}
    targets = []
    for site in sites:
        chosen = known[site] if layers is None else list(layers)
        if wrong := sorted(set(chosen) - set(known[site])):
            raise NeedleworkError(f"patch: layers {wrong} of {anatomy.architecture} have no {site}; choose from {known[site]}")
        if not chosen:
            raise NeedleworkError(f"patch: {anatomy.architecture} has no {site}: choose other sites of {', '.join(SITES)}")
        if site in HALVES:
            of_memory = _memory_places(site, at, places, pairs)
            targets += [_Target(site, layer, None, place) for place in of_memory for layer in chosen]
            continue
        if site != "heads":
            for layer in chosen:
                subject.body.module_at((site, layer))  # type: ignore[arg-type]
        heads = {layer: [head.index for head in anatomy.layers[layer].heads] if site == "heads" else [None] for layer in chosen}
        targets += [_Target(site, layer, head, place) for place in places for layer in chosen for head in heads[layer]]
    return targets


def _memory_places(site: str, at: Any, places: Sequence[str | int], pairs: Sequence[Pair]) -> list[str | int]:
    """Return where a half of the memory is patched: all of it, after the prompt, or the keys and values of some tokens."""
    if site == "recurrent" and places != ["all"]:
        raise NeedleworkError(
            "patch: a recurrent state is one for all tokens, and is patched as it is after the prompt: leave `at` out, or patch"
            " mixers"
        )
    if "decode" in places:
        raise NeedleworkError(f"patch: {site} is patched after the prompt: leave `at` out, or name tokens of the prompt")
    for pair in pairs:
        pair.tokens("prefill")  # raises for prompts of unlike length
        for place in places:
            tokens = pair.tokens(place)
            if tokens.own != tokens.source:
                raise NeedleworkError(
                    f"patch: keys depend on their position, and the span {place!r} begins elsewhere in the clean prompt; give"
                    " prompts that have it in the same place"
                )
    last = len(pairs[0].corrupt) - 1 if at == "each" else None  # is read after memory is swapped
    return list(dict.fromkeys("all" if place == "prefill" else place for place in places if place != last))


def _places(at: Any, pairs: Sequence[Pair]) -> list[str | int]:
    """Return the places that `at` names; "each" is every position of the prompt."""
    places: list[str | int] = []
    for place in [at] if isinstance(at, (str, int)) else list(at):
        if place == "each":
            counts = {len(pair.corrupt) for pair in pairs}
            if len(counts) > 1:
                raise NeedleworkError("patch: at='each' needs prompts of one length in all pairs; name spans instead")
            places += range(counts.pop())
        else:
            places.append(place)
    if not places:
        raise NeedleworkError(f"patch: at={at!r} names no place; choose from {', '.join(WORDS)}, positions and names of spans")
    for place in dict.fromkeys(places):
        for pair in pairs:
            pair.tokens(place)  # raises for places that the prompts do not share
    return list(dict.fromkeys(places))


# --- Exact patching ---


def _exact(subject: Subject, pairs: Sequence[Pair], targets: Sequence[_Target], progress: Progress) -> np.ndarray:
    """Return the metric [pairs, 2 + targets]: on the clean prompt, on the corrupt one, and with each target patched."""
    at_once = max(1, _ROWS_AT_ONCE // (2 * len(targets)))
    values = []
    for start in range(0, len(pairs), at_once):
        some = pairs[start : start + at_once]
        recorders = [_Recorder(pair, targets) for pair in some]
        first = [request for recorder in recorders for request in recorder.record()]
        recorded = _metrics(subject, first, no_progress).reshape(len(some), 2)
        asked = [request for recorder in recorders for target in targets for request in recorder.patched(target)]
        part = partial(_part, progress, start / len(pairs), len(some) / len(pairs))
        values.append(np.concatenate([recorded, _metrics(subject, asked, part).reshape(len(some), len(targets))], 1))
    return np.concatenate(values)


def _part(progress: Progress, before: float, share: float, done: float) -> None:
    progress(before + share * done)


def _metrics(subject: Subject, requests: Sequence[Request], progress: Progress) -> np.ndarray:
    """Return log P of the first answer minus that of the second one, for pairs of requests."""
    log_p = np.array([sum(answer.logprobs) for answer in run_requests(subject, requests, progress=progress)])
    return np.asarray(log_p[::2] - log_p[1::2])


class _Recorder:
    """Records the clean prompt of a pair, and makes the requests that patch the corrupt one.

    A request answers the corrupt prompt with one of the two answers. The prompt is recorded once, its last token and the answer
    once for each answer.
    """

    def __init__(self, pair: Pair, targets: Sequence[_Target]) -> None:
        self.pair = pair
        self.prompt, self.of_answer = Recording(), (Recording(), Recording())
        self._places: dict[str | int, tuple[TokenMap | None, ...]] = {}
        outputs = [x for x in targets if x.site not in HALVES]
        # What is recorded in prefill and in decode: sites with a place there.
        self._where = [
            list(dict.fromkeys((x.site, x.layer) for x in outputs if any(self._by_phase(x.at)[phase])))
            for phase in (slice(1), slice(1, None))
        ]

    def record(self) -> list[Request]:
        """Return the requests that record the clean prompt with both answers, and those of the corrupt prompt."""
        clean = []
        for recording, answer in zip(self.of_answer, self.pair.answers, strict=True):
            parts: list[Part] = []
            phases: tuple[tuple[Phase, Recording], ...] = (("prefill", self.prompt), ("decode", recording))
            for (phase, into), where in zip(phases, self._where, strict=True):
                members = tuple(acts.RecordOutputs(layer, site, into) for site, layer in where)  # type: ignore[arg-type]
                parts += [CarryActs(members=members, phase=phase)] if members else []
            clean.append(self._request(self.pair.clean, combine(parts), answer))
        return clean + [self._request(self.pair.corrupt, combine(()), answer) for answer in self.pair.answers]

    def patched(self, target: _Target) -> list[Request]:
        """Return the requests of the corrupt prompt with both answers, under a patch."""
        if target.site in HALVES:
            half: Any = target.site
            at = None if target.at == "all" else self.pair.tokens(target.at).own
            swap = SwapMemory(half=half, layers=(target.layer,), from_=self.pair.clean, at=at)  # type: ignore[call-arg]
            return [self._request(self.pair.corrupt, swap, answer) for answer in self.pair.answers]
        read, *fed = self._by_phase(target.at)
        heads = None if target.head is None else frozenset({target.head})
        patch_of = partial(PatchOutputs, target.layer, target.site, heads=heads)  # type: ignore[arg-type]
        before = [CarryActs(members=(patch_of(source=self.prompt, tokens=read),), phase="prefill")] if read else []
        requests = []
        for recording, tokens, answer in zip(self.of_answer, fed, self.pair.answers, strict=True):
            later = [CarryActs(members=(patch_of(source=recording, tokens=tokens),), phase="decode")] if tokens else []
            requests.append(self._request(self.pair.corrupt, combine(before + later), answer))
        return requests

    def _by_phase(self, at: str | int) -> tuple[TokenMap | None, ...]:
        """Return the tokens of a place that are read in prefill, and those that each answer reads in decode."""
        if at not in self._places:
            tokens, first = self.pair.tokens(at), len(self.pair.corrupt) - 1
            both = list(zip(tokens.own, tokens.source, strict=True))
            ranges = [(0, first), *((first, first + len(answer)) for answer in self.pair.answers)]
            some = [[pair for pair in both if start <= pair[0] < end] for start, end in ranges]
            self._places[at] = tuple(TokenMap(*zip(*pairs, strict=True)) if pairs else None for pairs in some)
        return self._places[at]

    @staticmethod
    def _request(prompt: tuple[int, ...], intervention: Intervention, answer: tuple[int, ...]) -> Request:
        return Request(prompt, intervention, max_new_tokens=len(answer), forced=answer)


# --- Attribution patching ---


class _NoGradientsError(Exception):
    """Raised if a model computes a site's outputs without gradients."""


class _Slopes:
    """Keeps the outputs of one site of a layer, call by call, and variables that have been added to them, for their gradients."""

    def __init__(self, differentiates: bool) -> None:
        self.differentiates = differentiates
        self.outputs: list[Tensor] = []  # [rows, tokens, ...]
        self.added: list[Tensor] = []

    def apply(self, forward: Forward, layer: int, outputs: Tensor, positions: Tensor) -> Tensor:
        self.outputs.append(outputs.detach().clone())
        if not self.differentiates:
            return outputs
        if not torch.is_grad_enabled():
            raise _NoGradientsError
        self.added.append(torch.zeros_like(outputs, requires_grad=True))
        return outputs + self.added[-1]


def _gradient(subject: Subject, pairs: Sequence[Pair], targets: Sequence[_Target], progress: Progress) -> np.ndarray:
    """Return the metric [pairs, 2 + targets] as `_exact` does, with a first-order estimate for every target."""
    values = []
    with differentiable(subject.body):
        for i, pair in enumerate(pairs):
            values.append(_attributed(subject, pair, targets))
            progress((i + 1) / len(pairs))
    return np.array(values)


def _attributed(subject: Subject, pair: Pair, targets: Sequence[_Target]) -> list[float]:
    """Return the metric on the clean and the corrupt prompt, and its estimate with each target patched."""
    wanted: dict[Where, None] = dict.fromkeys((x.site, x.layer) for x in targets)  # type: ignore[misc]
    clean, corrupt = ({where: _Slopes(differentiates) for where in wanted} for differentiates in (False, True))
    with torch.no_grad():
        of_clean = answer_log_p(subject.body, [(pair.clean, answer) for answer in pair.answers], outputs=clean)
    try:
        of_corrupt = answer_log_p(subject.body, [(pair.corrupt, answer) for answer in pair.answers], outputs=corrupt)
    except _NoGradientsError:
        raise NeedleworkError(
            f"patch: {subject.anatomy.architecture} computes parts of itself without gradients: use method='exact'"
        ) from None
    added = [variable for slopes in corrupt.values() for variable in slopes.added]
    gradients = iter(torch.autograd.grad(of_corrupt[0] - of_corrupt[1], added, allow_unused=True))
    # First-order effect of replacing the corrupt output of each row by the clean one, by token and, for heads, by head.
    effects: dict[Where, list[tuple[Tensor, Tensor, Tensor]]] = {
        where: [
            (before, after, torch.zeros_like(after) if slope is None else slope)
            for before, after, slope in zip(clean[where].outputs, corrupt[where].outputs, gradients, strict=False)
        ]
        for where in wanted
    }
    whole, none = (float(log_p[0] - log_p[1]) for log_p in (of_clean, of_corrupt.detach()))
    maps = {at: pair.tokens(at) for at in dict.fromkeys(target.at for target in targets)}
    values = [whole, none]
    for target in targets:
        total = 0.0
        for row, answer in enumerate(pair.answers):
            last = len(pair.corrupt) + len(answer) - 1
            some = [x for x in zip(maps[target.at].own, maps[target.at].source, strict=True) if x[0] < last]
            own, source = (list(positions) for positions in zip(*some, strict=True))
            for before, after, slope in effects[target.site, target.layer]:  # type: ignore[index]
                effect = (before[row, source] - after[row, own]) * slope[row, own]
                total += float((effect if target.head is None else effect[:, target.head]).double().sum())
        values.append(none + total)
    return values
