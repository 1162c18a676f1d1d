"""A smaller model in memory: a copy that shares all weights but those of the attention that was cut, held against the whole."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from needlework.anatomy import Head
from needlework.errors import NeedleworkError, TrialError, shown
from needlework.interventions.attention import LimitContext, OnlyHeads
from needlework.interventions.base import Intervention
from needlework.model.load import make_body, without_weights
from needlework.model.streaming import ENTRY, Streams, whole_groups
from needlework.model.surgery import Cut, cut_model, entry_of

if TYPE_CHECKING:
    from needlework.subject import Subject

_CHECKED, _DECODED, _MOST_CHECKED = 24, 6, 600  # tokens on which a smaller model is held against the whole one


@dataclass(frozen=True)
class Others:
    """What becomes of the heads that are not kept: nothing stays of them, or sinks and a window of keys."""

    window: int | None = None
    sinks: int = 0

    @classmethod
    def parse(cls, text: str) -> Others:
        """`none`, or `window=64,sinks=4`."""
        if text.strip() == "none":
            return cls()
        match = re.fullmatch(r"\s*window=(\d{1,9})(?:\s*,\s*sinks=(\d{1,9}))?\s*", text)
        if match is None or int(match[1]) < 1:
            raise NeedleworkError(f"--others {shown(text)} is not known; choose none, or e.g. window=64,sinks=4")
        return cls(int(match[1]), int(match[2] or 0))

    def __str__(self) -> str:
        return "none" if self.window is None else f"window={self.window},sinks={self.sinks}"


NONE_STAYS = Others()


@dataclass(frozen=True)
class Pruned:
    """A smaller model, and what the whole one must be told to compute the same."""

    subject: Subject
    equals: Intervention
    cuts: tuple[Cut, ...]  # of every attention layer; none where heads stream
    streams: Streams | None
    stock: bool  # its configuration says all of it in transformers' own words

    @property
    def zero_heads(self) -> int:
        """Heads of zeros that fill groups."""
        return sum(head < 0 for cut in self.cuts for head in cut.query)


def prune_subject(subject: Subject, kept: Collection[Head], others: Others = NONE_STAYS) -> Pruned:
    """A copy of a model in which only these heads retrieve; the model itself stays as it is. It is tried before it is given."""
    _refuse_quantised(subject)
    make = _without if others.window is None else _streaming
    pruned = make(subject, frozenset(kept), others)
    difference = held_against(pruned.subject, subject, pruned.equals, others)
    if not difference <= _tolerance(subject):
        raise NeedleworkError(
            f"the smaller model differs from the whole one under {shown(str(pruned.equals))} by {difference:.1e} of its largest"
            f" logit: {subject.anatomy.architecture} does something with heads that needlework does not know. Nothing was made"
        )
    return pruned


def _refuse_quantised(subject: Subject) -> None:
    source = subject.body.source
    if source is not None and source.suffix == ".gguf":
        raise NeedleworkError(
            f"{source.name} is a GGUF file: its weights grow when they are loaded, and a pruned copy would be larger than the"
            " file. Prune the checkpoint that it was made from, and convert that"
        )
    if getattr(subject.model.config, "quantization_config", None) is not None:
        raise NeedleworkError("the model is quantised: prune the checkpoint that it was made from, and quantise that")
    if getattr(subject.model.config, ENTRY, None) is not None:
        raise NeedleworkError("heads were taken out of this model before: prune the whole one, with the heads that shall stay")


def _without(subject: Subject, kept: frozenset[Head], others: Others) -> Pruned:
    parts = dict(subject.anatomy.attention_parts())
    cuts = tuple(Cut.keeping([head.index for head in kept if head.layer == layer], part) for layer, part in parts.items())
    model = _copied(subject.model, [cut.path for cut in cuts])
    sliding = {cut.path: bool(getattr(model.get_submodule(cut.path), "is_sliding", False)) for cut in cuts}
    cut_model(model, cuts)
    stock = _say_it_in_stock_words(model, cuts, sliding)
    if not stock:
        setattr(model.config, ENTRY, {"layers": entry_of(cuts)})
    return Pruned(_wrapped(subject, model), OnlyHeads(heads=tuple(kept)), cuts, None, stock)


def _streaming(subject: Subject, kept: frozenset[Head], others: Others) -> Pruned:
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
    model = _copied(subject.model, [])
    streams = Streams(others.window, others.sinks, layers)
    setattr(model.config, ENTRY, {"streaming": streams.to_dict()})
    equals = LimitContext(tokens=others.window, sinks=others.sinks, heads=tuple(limited))
    return Pruned(_wrapped(subject, model), equals, (), streams, False)


def _copied(model: Any, apart: Collection[str]) -> Any:
    """A copy with tensors of its own in these modules; all others are the model's."""
    own = {id(x) for path in apart for x in model.get_submodule(path).parameters()}
    shared = [x for x in (*model.parameters(), *model.buffers()) if id(x) not in own]
    return copy.deepcopy(model, {id(x): x for x in shared})


def _wrapped(subject: Subject, model: Any) -> Subject:
    from needlework.subject import Subject as Made

    body = make_body(model, subject.anatomy.window_rule, subject.body.kernels)  # type: ignore[arg-type]
    return Made(body, subject.tokenizer)


def _say_it_in_stock_words(model: Any, cuts: tuple[Cut, ...], sliding: dict[str, bool]) -> bool:
    """Where every layer has the same numbers of heads, the configuration can name them, if the family has words for that."""
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
    except Exception:  # whatever the family makes of such numbers: it has no words for this model
        return False
    if shapes != {name: x.shape for name, x in model.state_dict().items()}:
        return False
    _set(model.config.get_text_config(decoder=True), words)
    return True


def _set(config: Any, words: dict[str, int]) -> None:
    for word, number in words.items():
        setattr(config, word, number)


def held_against(smaller: Subject, whole: Subject, equals: Intervention, others: Others) -> float:
    """The largest difference of logits, prefilled and decoded, by the largest logit."""
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
