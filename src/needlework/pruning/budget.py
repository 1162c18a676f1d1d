"""Plan the memory of a served model (`nw.budget`): weights, KV cache, recurrent states, and the heads that fit in full."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.anatomy import Anatomy, Head, LayerKind
from needlework.errors import NeedleworkError
from needlework.files import atomic_write
from needlework.heads import foreign
from needlework.interventions.base import NONE
from needlework.interventions.builtin import LimitContext
from needlework.interventions.ranking import Ranking
from needlework.model.files import weights_hash
from needlework.stats import Estimate, accuracy, retained
from needlework.tables import Table

if TYPE_CHECKING:
    from needlework.subject import Subject

FORMS = ("duo", "kvpress", "locos", "vllm")
SEED = 2000  # of the samples that retrieval is measured on; heads are ranked and cards are measured on others
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True)
class LayerBudget:
    """One layer's memory for one request.

    Attributes:
        index: The model's own layer index.
        kind: "attention", "recurrent", "hybrid" or "other".
        query_heads: Number of query heads; each kv head serves equally many.
        full: Indices of the kv heads that keep all keys (of the layer's window).
        streaming: Indices of the kv heads that keep a window of keys and the first keys.
        kv_bytes: Keys and values in the cache.
        state_bytes: Recurrent states, of any number of tokens.
    """

    index: int
    kind: LayerKind
    query_heads: int
    full: tuple[int, ...]
    streaming: tuple[int, ...]
    kv_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class ServingBudget:
    """The memory of a model that serves several requests at a time.

    Attributes:
        model: The model's name.
        context: Tokens of each request.
        batch: Number of requests at a time.
        memory: The limit in bytes; None: no limit was given.
        weight_bytes: Weights, which all requests share.
        layers: The memory of each layer for one request.
        window: Number of last keys that a streaming head keeps.
        sinks: Number of first keys that a streaming head keeps.
        ranked_by: What the heads are ordered by; empty without a ranking.
        untouched: Needles found by the whole model; None if it was not measured.
        streaming: Needles found with these heads streaming; None if it was not measured.
        kept: Share of retrieval that is left with these heads streaming; None if it was not measured.
        measured_on: The samples that it was measured on; empty if it was not measured.
    """

    model: str
    context: int
    batch: int
    memory: int | None
    weight_bytes: int
    layers: tuple[LayerBudget, ...]
    window: int
    sinks: int
    ranked_by: str = ""
    untouched: Estimate | None = None
    streaming: Estimate | None = None
    kept: Estimate | None = None
    measured_on: str = ""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache of one request."""
        return sum(layer.kv_bytes for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one request."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def total(self) -> int:
        """Bytes in all: weights, and the memory of all requests."""
        return self.weight_bytes + self.batch * (self.kv_bytes + self.state_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and totals as JSON values."""
        measured = {"untouched": self.untouched, "streaming": self.streaming, "kept": self.kept}
        estimates = {name: None if one is None else one.to_dict() for name, one in measured.items()}
        totals = {"kv_bytes": self.kv_bytes, "state_bytes": self.state_bytes, "total": self.total}
        return {**asdict(self), **estimates, **totals}

    def frame(self) -> Any:
        """Return one row per layer (pandas), with the fields of `LayerBudget`."""
        import pandas

        return pandas.DataFrame([asdict(layer) for layer in self.layers])

    def table(self) -> Table:
        """Return the bytes per request and in all."""

        def row(name: str, each: int) -> tuple[str, str, str]:
            return name, size(each), size(self.batch * each)

        rows = [("weights", "", size(self.weight_bytes)), row("KV cache", self.kv_bytes)]
        rows += [row("recurrent states", self.state_bytes), ("in all", "", size(self.total))]
        caption = f"{self.model}, {self.batch} x {self.context:,} tokens"
        return Table(("memory", "per request", "in all"), rows, caption, left=("memory",))

    def text(self) -> str:
        """Return whether it fits, which heads stream, and what retrieval is left, in sentences."""
        heads = sum(len(layer.full) + len(layer.streaming) for layer in self.layers)
        full = sum(len(layer.full) for layer in self.layers)
        lines = []
        if self.memory is not None:
            fits = f"fits into {size(self.memory)}" if self.total <= self.memory else f"does not fit into {size(self.memory)}"
            lines.append(
                f"It {fits} with {full} of {heads} kv heads in full"
                + f" (best first by {self.ranked_by})" * bool(self.ranked_by)
                + "."
            )
        if full < heads:
            streaming = " ".join(f"{layer.index}.{head}" for layer in self.layers for head in layer.streaming)
            lines.append(f"Streaming kv heads (the last {self.window:,} keys and the first {self.sinks}): {streaming}.")
            if self.kept is None or self.untouched is None or self.streaming is None:
                lines.append("What retrieval is left was not measured: --samples 300 measures it.")
            else:
                lines.append(
                    f"Needles found: {self.untouched.text()} untouched, {self.streaming.text()} with these heads streaming:"
                    f" {self.kept.text()} of retrieval is left ({self.measured_on})."
                )
        elif self.memory is not None and self.total > self.memory:
            lines.append("Give --ranking FILE (`needlework heads` writes it) to see which heads can stream.")
        return "\n".join(lines)

    def save(self, folder: Path, forms: Sequence[str]) -> list[Path]:
        """Write which heads stream in forms that other programs read, and return the files.

        "duo" writes DuoAttention's pattern, "kvpress" a press, "locos" scores of query heads (1 in full, 0 streaming) and "vllm"
        the layers whose cache is not to be quantised, as `kv_cache_dtype_skip_layers`.

        Raises:
            NeedleworkError: The form is unknown, or cannot describe layers with different numbers of kv heads.
        """
        texts: dict[str, str] = {}
        widths = {len(layer.full) + len(layer.streaming) for layer in self.layers} - {0}
        for form in forms:
            if form not in FORMS:
                raise NeedleworkError(f"there is no form {form!r}; choose from {', '.join(FORMS)}")
            if form == "vllm":
                whole = [str(layer.index) for layer in self.layers if layer.full]
                texts["vllm.json"] = json.dumps({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": whole}, indent=1)
                continue
            if form == "locos":
                scores: dict[str, list[float]] = {}
                for layer in (layer for layer in self.layers if layer.query_heads):
                    group = layer.query_heads // len(layer.full + layer.streaming)
                    kept = [float(query // group in layer.full) for query in range(layer.query_heads)]
                    scores |= {f"{layer.index}-{query}": [score] for query, score in enumerate(kept)}
                about = {"method": "needlework budget", "model": self.model}
                texts["locos.json"] = json.dumps(foreign.locos_file(scores, 0, **about))
                continue
            if len(widths) > 1:
                raise NeedleworkError(f"{form} has one number of kv heads for all layers, and {self.model} has {sorted(widths)}")
            width = max(widths, default=0)
            pattern = [[int(head not in layer.streaming) for head in range(width)] for layer in self.layers]
            if form == "duo":
                texts["full_attention_heads.tsv"] = "\n".join("\t".join(map(str, row)) for row in pattern)
                texts["config.json"] = json.dumps({"sink_size": self.sinks, "recent_size": self.window})
            else:
                texts["press.py"] = _PRESS.format(model=self.model, sinks=self.sinks, window=self.window, pattern=pattern)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with atomic_write(folder / name) as file:
                file.write(text + "\n")
        return [folder / name for name in texts]


_PRESS = '''"""Which heads of {model} keep all keys, for kvpress (tried with 0.5.5):  from press import press"""

import torch
from kvpress import DuoAttentionPress

FULL = {pattern}  # [layers][kv heads]: 1 keeps all keys; layers without attention have no kv heads and are 1


class Press(DuoAttentionPress):
    def post_init_from_model(self, model):
        self.sink_size, self.recent_size = {sinks}, {window}
        self.streaming_mask = ~torch.tensor(FULL, dtype=torch.bool, device=model.device)


press = Press(head_compression_ratio=1 - sum(map(sum, FULL)) / sum(map(len, FULL)))
'''


def size(count: int) -> str:
    """Format bytes with three digits ("12.5 MiB")."""
    unit, scale = next(((unit, scale) for unit, scale in _UNITS if count >= scale), ("B", 1))
    return f"{count / scale:,.3g} {unit}" if count < 1000 * scale else f"{count / scale:,.0f} {unit}"


def budget(
    model: str | Path | Subject,
    *,
    context: int,
    batch: int = 1,
    memory: int | None = None,
    ranking: Ranking | str | Path | None = None,
    window: int = 256,
    sinks: int = 4,
    samples: int = 0,
    **loading: Any,
) -> ServingBudget:
    """Compute the memory that a model takes when it is served, and which heads can keep all keys within a limit.

    If all heads in full exceed the limit, kv heads keep all keys in the order of the ranking (a kv head has the place of its
    best query head) as long as they fit; the others stream: they keep a window of keys and the first keys. Weights are only
    loaded if retrieval is measured.

    Args:
        model: A name or path, whose weights and cache have the dtype of the checkpoint, or a loaded model.
        context: Tokens of each request, prompt and answer.
        batch: Number of requests at a time.
        memory: The limit in bytes for weights, KV cache and recurrent states.
        ranking: Order of the query heads, best first.
        window: Number of last keys that a streaming head keeps.
        sinks: Number of first keys that a streaming head keeps.
        samples: Number of needle samples that retrieval is measured on, with these heads streaming; 0: it is not measured.
        loading: Options of `nw.load`, for measuring.

    Raises:
        NeedleworkError: Even with all heads streaming it does not fit; the message says what would.
    """
    from needlework.model.load import blueprint
    from needlework.subject import Subject, load
    from needlework.zoo import resolve

    if min(context, batch, window) < 1 or sinks < 0 or samples < 0:
        raise NeedleworkError("context, batch and window are at least 1, sinks and samples at least 0")
    if isinstance(model, Subject):
        body, name = model.body, model.anatomy.architecture if model.body.source is None else model.body.source.name
    else:
        body, name = blueprint(resolve(model)), Path(model).name
    anatomy = body.anatomy
    if anatomy.max_tokens and context > anatomy.max_tokens:
        raise NeedleworkError(f"{name} has positions for {anatomy.max_tokens:,} tokens, and context is {context:,}")
    weights = anatomy.parameters * int(next(body.model.parameters()).element_size())
    if isinstance(ranking, (str, Path)):
        ranking = foreign.read(ranking, anatomy)
    if ranking is not None:
        ranking.check(anatomy, _hash_of(model) if ranking.model.weights else "")

    def plan(full: set[Head]) -> ServingBudget:
        layers = []
        for layer in anatomy.layers:
            heads, kv_bytes = range(layer.attention.kv_heads if layer.attention else 0), 0
            kept = tuple(head for head in heads if (layer.index, head) in full)
            if (part := layer.attention) is not None:
                tokens = min(context, part.window or context)
                short = min(tokens, window + sinks)
                kv_bytes = part.kv_bytes_per_token * (len(kept) * tokens + (len(heads) - len(kept)) * short) // len(heads)
            state = sum(side.state_bytes for side in (layer.attention, layer.recurrent) if side)
            rest = tuple(head for head in heads if head not in kept)
            query_heads = part.query_heads if part else 0
            layers.append(LayerBudget(layer.index, layer.kind, query_heads, kept, rest, kv_bytes, state))
        by = "" if ranking is None else (ranking.method or "the given order")
        return ServingBudget(name, context, batch, memory, weights, tuple(layers), window, sinks, by)

    order = [Head(i, kv) for i, part in anatomy.attention_parts() for kv in range(part.kv_heads)]
    found = plan(set(order))
    if memory is not None and found.total > memory:
        least = plan(set()) if body.shareable else found
        if least.total > memory:
            raise NeedleworkError(_too_little(least, memory))
        if ranking is None:
            return found
        place = {head: i for i, head in reversed(list(enumerate(_kv_order(ranking, anatomy))))}
        order.sort(key=place.__getitem__)
        kept = next(k for k in range(len(order) - 1, -1, -1) if plan(set(order[:k])).total <= memory)
        found = plan(set(order[:kept]))
    streaming = [(layer.index, head) for layer in found.layers for head in layer.streaming]
    if not samples or not streaming:
        return found
    subject = model if isinstance(model, Subject) else load(model, **loading)
    group = {i: part.query_heads // part.kv_heads for i, part in anatomy.attention_parts()}
    limited = tuple(Head(i, kv * group[i] + j) for i, kv in streaming for j in range(group[i]))
    return _measure(found, subject, LimitContext(tokens=window, sinks=sinks, heads=limited), samples)


def _hash_of(model: str | Path | Subject) -> str:
    """Return the hash of a model's weights, which a ranking may be signed with; empty if its weights are not here."""
    from needlework.subject import Subject
    from needlework.zoo import resolve

    if isinstance(model, Subject):
        return model.body.weights
    place = Path(resolve(model))
    return weights_hash(place) if place.is_file() or any(place.glob("*.safetensors")) else ""


def _kv_order(ranking: Ranking, anatomy: Anatomy) -> list[Head]:
    """Return the kv head of each query head, in the order of the ranking; a kv head occurs once for each of its query heads."""
    parts = dict(anatomy.attention_parts())
    return [Head(h.layer, h.index * parts[h.layer].kv_heads // parts[h.layer].query_heads) for h in ranking.order]


def _too_little(least: ServingBudget, memory: int) -> str:
    """Return the message for a limit that is exceeded with all heads streaming, with what would fit."""
    streams = any(layer.streaming for layer in least.layers)
    how = "even with all heads streaming" if streams else "and no head can stream: keys are not cached head by head"
    each = least.kv_bytes + least.state_bytes
    requests = (memory - least.weight_bytes) // each if each else 0
    if requests >= 1:
        would = f"{requests} request{'s' * (requests > 1)} at a time would fit"
    else:
        would = f"one request would fit into {size(least.weight_bytes + each)}"
    return (
        f"{size(memory)} is too little for {least.model}: weights take {size(least.weight_bytes)}, and {least.batch} x"
        f" {least.context:,} tokens take {size(least.total - least.weight_bytes)}{', ' * (not streams) or ' '}{how}; {would}, and"
        f" {size(least.total)} would do for all"
    )


def _measure(found: ServingBudget, subject: Subject, act: LimitContext, samples: int) -> ServingBudget:
    from needlework.measure import make_samples, measure
    from needlework.pruning.card import needle_task

    task = needle_task(subject, samples)
    drawn = make_samples(subject, task, SEED)
    longest = max(len(sample.item.prompt) for sample in drawn)
    if longest <= act.tokens + act.sinks:
        raise NeedleworkError(
            f"retrieval is measured on prompts of {longest} tokens, which a window of {act.tokens:,} hides nothing of: give a"
            f" window below {longest - act.sinks} (--stream), or samples=0"
        )
    before, after = measure(subject, drawn, [NONE, act]).values("correct")
    clusters = np.unique([sample.item.cluster for sample in drawn], return_inverse=True)[1]
    kept = retained(after, before, clusters, task.chance)
    where = f"{task.kind}, prompts of up to {longest:,} tokens, seed {SEED}"
    return replace(found, untouched=accuracy(before), streaming=accuracy(after), kept=kept, measured_on=where)
