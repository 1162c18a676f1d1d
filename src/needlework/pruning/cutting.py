"""Build a pruned copy of a model in memory, sharing unchanged weights, and verify its logits against the original."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from needlework.anatomy import Head
from needlework.errors import NeedleworkError, TrialError, short_repr
from needlework.interventions.attention import LimitContext, OnlyHeads
from needlework.interventions.base import Intervention
from needlework.model.load import hook_model, without_weights
from needlework.model.streaming import ENTRY, Streams, whole_groups
from needlework.model.surgery import Cut, cut_model, entry_of

if TYPE_CHECKING:
    from needlework.subject import Subject

_CHECKED, _DECODED, _MOST_CHECKED = 24, 6, 600  # tokens compared: at least, of these decoded, at most added by a window


@dataclass(frozen=True)
class Others:
    """Treatment of the heads that are not kept: removed (no window), or streaming, with a cache of sinks and a window of keys."""

    window: int | None = None
    sinks: int = 0

    @classmethod
    def parse(cls, text: str) -> Others:
        """Parse `none` or `window=64,sinks=4`; raise for anything else."""
        if text.strip() == "none":
            return cls()
        match = re.fullmatch(r"\s*window=(\d{1,9})(?:\s*,\s*sinks=(\d{1,9}))?\s*", text)
        if match is None or int(match[1]) < 1:
            raise NeedleworkError(f"--others {short_repr(text)} is not known; choose none, or e.g. window=64,sinks=4")
        return cls(int(match[1]), int(match[2] or 0))

    def __str__(self) -> str:
        return "none" if self.window is None else f"window={self.window},sinks={self.sinks}"


REMOVE_OTHERS = Others()


@dataclass(frozen=True)
class Pruned:
    """A pruned model, and the intervention under which the original model computes the same."""

    subject: Subject
    equals: Intervention
    cuts: tuple[Cut, ...]  # one for each attention layer; empty if heads stream
    streams: Streams | None
    stock: bool  # whether the configuration of transformers describes it, so that it loads without needlework

    @property
    def zero_heads(self) -> int:
        """Number of all-zero heads that pad groups, so that all kv heads of a layer have equally many query heads."""
        return sum(head < 0 for cut in self.cuts for head in cut.query)


def prune_subject(subject: Subject, kept: Collection[Head], others: Others = REMOVE_OTHERS) -> Pruned:
    """Return a pruned copy of a model that keeps only these heads; the model itself is not changed.

    Raises:
        NeedleworkError: The model cannot be pruned, or the copy's logits differ from those of the model under `Pruned.equals`.
    """
    refuse_quantised(subject.body.source, subject.model.config.to_dict())
    make = _remove_heads if others.window is None else _stream_heads
    pruned = make(subject, frozenset(kept), others)
    difference = compare_logits(pruned.subject, subject, pruned.equals, others)
    if not difference <= _tolerance(subject):
        raise NeedleworkError(
            f"the smaller model differs from the whole one under {short_repr(str(pruned.equals))} by {difference:.1e} of"
            " its largest"
            f" logit: {subject.anatomy.architecture} does something with heads that needlework does not know. Nothing was made"
        )
    return pruned


def refuse_quantised(source: Path | None, config: Mapping[str, Any]) -> None:
    """Raise for GGUF, quantised and already pruned models, from file and configuration, before anything is loaded."""
    if source is not None and source.suffix == ".gguf":
        raise NeedleworkError(
            f"{source.name} is a GGUF file: its weights grow when they are loaded, and a pruned copy would be larger than the"
            " file. Prune the checkpoint that it was made from, and convert that"
        )
    if config.get("quantization_config") is not None:
        raise NeedleworkError("the model is quantised: prune the checkpoint that it was made from, and quantise that")
    if config.get(ENTRY) is not None:
        raise NeedleworkError("heads were taken out of this model before: prune the whole one, with the heads that shall stay")


def _remove_heads(subject: Subject, kept: frozenset[Head], others: Others) -> Pruned:
    parts = dict(subject.anatomy.attention_parts())
    cuts = tuple(Cut.keeping([head.index for head in kept if head.layer == layer], part) for layer, part in parts.items())
    model = _copy_model(subject.model, [cut.path for cut in cuts])
    sliding = {cut.path: bool(getattr(model.get_submodule(cut.path), "is_sliding", False)) for cut in cuts}
    cut_model(model, cuts)
    stock = _write_stock_config(model, cuts, sliding)
    if not stock:
        setattr(model.config, ENTRY, {"layers": entry_of(cuts)})
    return Pruned(_wrap_like(subject, model), OnlyHeads(heads=tuple(kept)), cuts, None, stock)


def _stream_heads(subject: Subject, kept: frozenset[Head], others: Others) -> Pruned:
    assert others.window is not None
    if not subject.body.shareable:
        raise NeedleworkError(
            f"heads cannot stream in {subject.anatomy.architecture}: it does not read its keys as they lie in the cache. Take the"
            " other heads out: --others none"
        )
    layers, limited = {}, []
    for layer, part in subject.anatomy.attention_parts():
        heads = [head.index for head in kept if head.layer == layer]
        if streaming := whole_groups(heads, part.query_heads, part.kv_heads):
            layers[layer] = streaming
            group = part.query_heads // part.kv_heads
            limited += [Head(layer, kv * group + i) for kv in streaming for i in range(group)]
    if not layers:
        raise NeedleworkError("every kv head has a query head that stays, so that none can stream; keep fewer heads")
    model = _copy_model(subject.model, [])
    streams = Streams(others.window, others.sinks, layers)
    setattr(model.config, ENTRY, {"streaming": streams.to_dict()})
    equals = LimitContext(tokens=others.window, sinks=others.sinks, heads=tuple(limited))
    return Pruned(_wrap_like(subject, model), equals, (), streams, False)


def _copy_model(model: Any, apart: Collection[str]) -> Any:
    """Return a copy of a model that has its own tensors in these modules and shares all others."""
    own = {id(x) for path in apart for x in model.get_submodule(path).parameters()}
    shared = [x for x in (*model.parameters(), *model.buffers()) if id(x) not in own]
    return copy.deepcopy(model, {id(x): x for x in shared})


def _wrap_like(subject: Subject, model: Any) -> Subject:
    from needlework.subject import Subject as Made

    body = hook_model(model, subject.anatomy.window_rule, subject.body.kernels)  # type: ignore[arg-type]
    return Made(body, subject.tokenizer)


def _write_stock_config(model: Any, cuts: tuple[Cut, ...], sliding: dict[str, bool]) -> bool:
    """Write the new numbers of heads into the model's configuration, if that can describe the pruned model.

    It can if all layers (of the same kind, full or sliding) have equal numbers, and a model built from it has the same shapes.

    Returns:
        Whether the configuration now describes the model.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    numbers: dict[str, set[tuple[int, int]]] = {}
    for cut in cuts:
        word = "swa_" if sliding[cut.path] and hasattr(text, "swa_num_attention_heads") else ""
        numbers.setdefault(word, set()).add(cut.counts)
    if any(len(counts) > 1 or (0, 0) in counts for counts in numbers.values()):
        return False
    words = {}
    for word, ((query, kv),) in numbers.items():
        words[f"{word}num_attention_heads"] = query
        if hasattr(text, f"{word}num_key_value_heads"):
            words[f"{word}num_key_value_heads"] = kv
    if getattr(text, "head_dim", None) is None:
        words["head_dim"] = cuts[0].dims[0]
    _set(text, words)
    try:
        shapes = {name: x.shape for name, x in without_weights(config).state_dict().items()}
    except Exception:  # model classes raise anything for numbers that they do not support
        return False
    if shapes != {name: x.shape for name, x in model.state_dict().items()}:
        return False
    _set(model.config.get_text_config(decoder=True), words)
    return True


def _set(config: Any, words: dict[str, int]) -> None:
    for word, number in words.items():
        setattr(config, word, number)


def compare_logits(smaller: Subject, whole: Subject, equals: Intervention, others: Others) -> float:
    """Return the difference of the logits of two models over prefill and decode, relative to the largest logit.

    It is the largest difference over tokens in float32, the median over tokens of the largest one otherwise.
    """
    tokens = _CHECKED + min(_MOST_CHECKED, (others.window or 0) + others.sinks)
    tokens = min(tokens, whole.anatomy.max_tokens or tokens)
    ids = torch.arange(2 * tokens).reshape(2, tokens) * 7 % whole.anatomy.vocabulary
    try:
        theirs, ours = (x.logits(ids, act, prompt_tokens=tokens - _DECODED) for x, act in ((whole, equals), (smaller, "none")))
    except TrialError as error:
        raise NeedleworkError(f"the smaller model cannot be run: {error}") from None
    each = (theirs - ours).abs().amax(-1) / theirs.abs().max().clamp_min(1e-6)
    return float(each.max() if whole.model.dtype == torch.float32 else each.median())


def _tolerance(subject: Subject) -> float:
    return 1e-3 if subject.model.dtype == torch.float32 else 0.1  # in half precision, a token may go to another expert
