"""Prune a model (`nw.prune`): choose heads, cut a copy, verify its logits, measure it and write a smaller checkpoint."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.errors import NeedleworkError, TrialError, short_repr
from needlework.files import new_directory
from needlework.heads.methods import find_methods
from needlework.heads.samples import draw_samples, named_tasks
from needlework.heads.survey import ProgressSteps, origin, rank_by
from needlework.interventions.base import NONE, Intervention
from needlework.interventions.builtin import LimitContext, OnlyHeads
from needlework.interventions.ranking import Ranking, as_heads
from needlework.model.files import read_config
from needlework.model.load import hook_model, no_bar_for, own_dtype, torch_dtype, without_weights
from needlework.model.pruned import ENTRY, Cut, Streams, cut_model, entry_of, whole_groups
from needlework.pruning.card import compare, costs, render_card
from needlework.pruning.llama_cpp import not_llama_cpp
from needlework.subject import Subject, load
from needlework.zoo import resolve

Keep = int | float | str | Path | Ranking | Sequence[tuple[int, int]]
METHOD = "needle_mass"  # the cheapest method: one run without intervention
RANKING_SAMPLES, RANKING_SEED = 100, 1  # the card is measured with another seed (card.py)
_NUMBER = r"\d+(?:\.\d+)?"
_HOW = "give a number of heads (10), a share of them (0.33), or a ranking, with or without a number: heads.json, heads.json:10"
_CHECKED, _DECODED, _MOST_CHECKED = 24, 6, 600  # tokens compared: at least, of these decoded, at most added by a window


@dataclass(frozen=True)
class Choice:
    """The heads to keep, and the ranking that they are taken from."""

    heads: tuple[Head, ...]  # best first
    ranking: Ranking
    uniform: bool = False  # whether every layer keeps equally many, in whole groups

    @property
    def source(self) -> str:
        ranking = self.ranking
        parts = (
            f"ranking by {ranking.method}" if ranking.method else "heads that were named",
            f"of {ranking.model.name}" if ranking.model.name else "",
            f"on {ranking.samples:,} samples of {ranking.task}" if ranking.samples else "",
            f"seed {ranking.seed}" if ranking.seed is not None else "",
            "equally many of every layer, in whole groups" if self.uniform else "",
        )
        return ", ".join(part for part in parts if part)


def choose(subject: Subject, keep: Keep, progress: bool = False, uniform: bool = False) -> Choice:
    """Return the heads to keep; without a ranking, heads are ranked by their attention on needles.

    Raises:
        NeedleworkError: The model does not have these heads, none or all of its heads would be kept, or equal numbers in every
            layer (`uniform`) do not make it one that stock transformers loads.
    """
    ranking, count, named = _read_keep(keep)
    anatomy, every = subject.anatomy, subject.anatomy.heads
    if not every:
        raise NeedleworkError(f"{anatomy.architecture} has no attention heads that could be pruned")
    if uniform and (named or count is None):
        raise NeedleworkError("--uniform fills every layer from a ranking of all heads: give a number, a share, or heads.json:10")
    if uniform:
        _check_stock(subject, _count(count, len(every)))
    if ranking is None:
        _count(count, len(every))  # fail before heads are ranked
        samples = draw_samples(subject, named_tasks("niah", subject), RANKING_SAMPLES, RANKING_SEED)
        (method,) = find_methods([METHOD])
        with ProgressSteps(1, progress) as steps, steps.step("ranking heads") as tell:
            ranking, _ = rank_by(subject, method, samples, RANKING_SEED, tell, origin(subject))
    else:
        if named and (unknown := [head for head in ranking.order if head not in every]):
            raise NeedleworkError(
                f"{anatomy.architecture} has no heads {' '.join(f'{head.layer}.{head.index}' for head in unknown[:5])},"
                " which are to stay; `needlework inspect` shows those that there are"
            )
        if not ranking.order:
            _count(0, len(every))
        missing = [head for head in every if head not in ranking.order]  # a ranking may be of a subset of the heads
        whole = ranking.model_copy(update={"order": (*ranking.order, *missing)})
        whole.check(anatomy, subject.body.weights if ranking.model.weights else "")
    if count is None and len(ranking.order) == len(every):
        how = "named: name fewer" if named else "ranked: say how many of them stay, e.g. heads.json:10"
        raise NeedleworkError(f"all {len(every)} heads are {how}")
    number = len(ranking.order) if count is None else _count(count, len(every))
    if number > len(ranking.order):
        raise NeedleworkError(f"{number} heads are to stay, and the ranking file has {len(ranking.order)}")
    if uniform:
        ranking.check(anatomy)
        return Choice(uniform_heads(ranking.order, anatomy, number), ranking, uniform=True)
    return Choice(ranking.top(number), ranking)


def uniform_heads(order: Sequence[Head], anatomy: Anatomy, number: int) -> tuple[Head, ...]:
    """Return an equal share of every attention layer, in whole groups and with at least this number of heads, best first.

    A group of query heads that share a kv head has the place of its best head; a layer's only group may be split.
    """
    parts = dict(anatomy.attention_parts())
    units: dict[int, dict[int, list[Head]]] = {layer: {} for layer in parts}
    for head in order:
        part = parts[head.layer]
        unit = head.index * part.kv_heads // part.query_heads if part.kv_heads > 1 else head.index
        units[head.layer].setdefault(unit, []).append(head)
    kept = {
        head
        for of_layer in units.values()
        for unit in list(of_layer.values())[: -(-number * len(of_layer) // len(order))]
        for head in unit
    }
    return tuple(head for head in order if head in kept)


def _check_stock(subject: Subject, number: int) -> None:
    """Raise unless stock transformers loads the model with equal numbers of heads in every layer."""
    heads = subject.anatomy.heads
    kept = uniform_heads(heads, subject.anatomy, number)
    if len(kept) == len(heads):
        raise NeedleworkError(f"{number} heads in equal numbers and whole groups are all {len(heads)} heads; keep fewer")
    if reason := _remove_heads(subject, kept).not_stock:
        raise NeedleworkError(
            f"stock transformers has no words for {subject.anatomy.architecture} with fewer heads: {reason}. Leave out --uniform:"
            " needlework.load loads the result"
        )


def _read_keep(keep: Keep) -> tuple[Ranking | None, int | float | None, bool]:
    """Return the ranking, the number or share of heads to keep, and whether heads are named one by one."""
    if isinstance(keep, Ranking):
        return keep, None, False
    if isinstance(keep, bool) or keep is None:
        raise NeedleworkError(f"keep={keep!r} says no heads; {_HOW}")
    if isinstance(keep, (int, float)):
        return None, keep, False
    if not isinstance(keep, (str, Path)):
        return Ranking(order=as_heads(keep)), None, True
    text = str(keep).strip()
    if re.fullmatch(r"\d+\.\d+(\s+\d+\.\d+)+", text):
        return Ranking.parse(text), None, True
    file, mark, number = text.rpartition(":")
    if re.fullmatch(_NUMBER, number) and not (mark and Path(text).exists()):
        return Ranking.load(file) if mark else None, float(number) if "." in number else int(number), False
    if not Path(text).is_file():
        raise NeedleworkError(f"--keep {short_repr(text)} is no file and no number; {_HOW}")
    return Ranking.load(text), None, False


def _count(count: int | float | None, heads: int) -> int:
    """Return a number or a share as a number of heads; raise if that is none or all of them."""
    assert count is not None
    if isinstance(count, float) and not 0 <= count <= 1:
        raise NeedleworkError(f"a share of {count:g} of the heads; shares lie between 0 and 1, numbers of heads are whole")
    number = count if isinstance(count, int) else heads_of_share(count, heads)
    if number <= 0:
        raise NeedleworkError(
            "no head would stay, and nothing could retrieve any more: `needlework ask MODEL PROMPT --intervene"
            " 'ablate_attention()'` measures that without a new model; keep at least one head"
        )
    if number > heads:
        raise NeedleworkError(f"{number} heads are to stay, and the model has {heads}")
    if number == heads:
        raise NeedleworkError(f"all {heads} heads would stay: nothing is to be cut; keep fewer")
    return number


def parse_others(text: str) -> Streams | None:
    """Return how the other heads stream (`window=64,sinks=4`), or None if they are removed (`none`); raise for other texts."""
    if text.strip() == "none":
        return None
    match = re.fullmatch(r"\s*window=(\d{1,9})(?:\s*,\s*sinks=(\d{1,9}))?\s*", text)
    if match is None or int(match[1]) < 1:
        raise NeedleworkError(f"--others {short_repr(text)} is not known; choose none, or e.g. window=64,sinks=4")
    return Streams(int(match[1]), int(match[2] or 0), {})


@dataclass(frozen=True)
class Pruned:
    """A pruned model, and the intervention under which the original model computes the same."""

    subject: Subject
    equals: Intervention
    cuts: tuple[Cut, ...]  # one for each attention layer; empty if heads stream
    streams: Streams | None
    not_stock: str  # why the configuration of transformers cannot describe it; empty: it loads without needlework

    @property
    def zero_heads(self) -> int:
        """Number of all-zero heads that pad groups, so that all kv heads of a layer have equally many query heads."""
        return sum(head < 0 for cut in self.cuts for head in cut.query)


def prune_subject(subject: Subject, kept: Collection[Head], others: Streams | None = None) -> Pruned:
    """Return a pruned copy of a model that keeps only these heads, sharing unchanged weights; the model is not changed.

    `others` says how the other heads stream (its kv heads are ignored); None removes them. Raises if the model cannot be pruned,
    or if the copy's logits differ from those of the model under `Pruned.equals`.
    """
    pruned = _stream_heads(subject, kept, others) if others else _remove_heads(subject, kept)
    difference = compare_logits(pruned.subject, subject, pruned.equals, others)
    # In half precision, a token may go to another expert.
    if not difference <= (1e-3 if subject.model.dtype == torch.float32 else 0.1):
        raise NeedleworkError(
            f"the smaller model differs from the whole one under {short_repr(str(pruned.equals))} by {difference:.1e} of its"
            f" largest logit: {subject.anatomy.architecture} does something with heads that needlework does not know. Nothing"
            " was made"
        )
    return pruned


def _refuse_quantised(source: Path | None, config: Mapping[str, Any]) -> None:
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


def _remove_heads(subject: Subject, kept: Collection[Head]) -> Pruned:
    parts = subject.anatomy.attention_parts()
    cuts = tuple(Cut.keeping([head.index for head in kept if head.layer == layer], part) for layer, part in parts)
    model = _copy_model(subject.model, [cut.path for cut in cuts])
    sliding = {cut.path: bool(getattr(model.get_submodule(cut.path), "is_sliding", False)) for cut in cuts}
    cut_model(model, cuts)
    reason = _write_stock_config(model, cuts, sliding)
    if reason:
        setattr(model.config, ENTRY, {"layers": entry_of(cuts)})
    return Pruned(_wrap_like(subject, model), OnlyHeads(heads=tuple(kept)), cuts, None, reason)


def _stream_heads(subject: Subject, kept: Collection[Head], others: Streams) -> Pruned:
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
    streams = replace(others, kv_heads=layers)
    setattr(model.config, ENTRY, {"streaming": streams.to_dict()})
    equals = LimitContext(tokens=streams.window, sinks=streams.sinks, heads=tuple(limited))
    return Pruned(_wrap_like(subject, model), equals, (), streams, "it has no streaming heads: all heads see all keys there")


def _copy_model(model: Any, apart: Collection[str]) -> Any:
    """Return a copy of a model that has its own tensors in these modules and shares all others."""
    own = {id(x) for path in apart for x in model.get_submodule(path).parameters()}
    shared = [x for x in (*model.parameters(), *model.buffers()) if id(x) not in own]
    return copy.deepcopy(model, {id(x): x for x in shared})


def _wrap_like(subject: Subject, model: Any) -> Subject:
    body = hook_model(model, subject.anatomy.window_rule, subject.body.kernels)  # type: ignore[arg-type]
    return Subject(body, subject.tokenizer)


def _write_stock_config(model: Any, cuts: tuple[Cut, ...], sliding: dict[str, bool]) -> str:
    """Write the new numbers of heads into the model's configuration if that can describe the pruned model; return why not.

    It can if all layers (of the same kind, full or sliding) have equal numbers, and a model built from it has the same shapes.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    counts: dict[str, set[tuple[int, int]]] = {}
    for cut in cuts:
        prefix = "swa_" if sliding[cut.path] and hasattr(text, "swa_num_attention_heads") else ""
        counts.setdefault(prefix, set()).add(cut.counts)
    if any(len(some) > 1 or (0, 0) in some for some in counts.values()):
        return "layers have different numbers of heads"
    changed = {} if getattr(text, "head_dim", None) is not None else {"head_dim": cuts[0].dims[0]}
    for prefix, ((query, kv),) in counts.items():
        changed[f"{prefix}num_attention_heads"] = query
        if hasattr(text, f"{prefix}num_key_value_heads"):
            changed[f"{prefix}num_key_value_heads"] = kv
    for name, number in changed.items():
        setattr(text, name, number)
    words = ", ".join(f"{name} = {number}" for name, number in changed.items())
    try:
        shapes = {name: x.shape for name, x in without_weights(config).state_dict().items()}
    except Exception as error:  # model classes raise anything for numbers that they do not support
        return f"no model of it can be built with {words} ({short_repr(str(error))})"
    own = {name: x.shape for name, x in model.state_dict().items()}
    if wrong := sorted(name for name in {*own, *shapes} if own.get(name) != shapes.get(name)):
        return f"{words} would also change {wrong[0]}"
    for name, number in changed.items():
        setattr(model.config.get_text_config(decoder=True), name, number)
    return ""


def compare_logits(smaller: Subject, whole: Subject, equals: Intervention, streams: Streams | None) -> float:
    """Return the difference of the logits of two models over prefill and decode, relative to the largest logit.

    It is the largest difference over tokens in float32, the median over tokens of the largest one otherwise.
    """
    tokens = _CHECKED + (min(_MOST_CHECKED, streams.window + streams.sinks) if streams else 0)
    tokens = min(tokens, whole.anatomy.max_tokens or tokens)
    ids = torch.arange(2 * tokens).reshape(2, tokens) * 7 % whole.anatomy.vocabulary
    try:
        theirs, ours = (x.logits(ids, act, prompt_tokens=tokens - _DECODED) for x, act in ((whole, equals), (smaller, "none")))
    except TrialError as error:
        raise NeedleworkError(f"the smaller model cannot be run: {error}") from None
    each = (theirs - ours).abs().amax(-1) / theirs.abs().max().clamp_min(1e-6)
    return float(each.max() if whole.model.dtype == torch.float32 else each.median())


def save(pruned: Pruned, folder: Path, dtype: torch.dtype) -> None:
    """Write weights in this dtype, configuration and tokenizer."""
    model = pruned.subject.model
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in model.state_dict().items()}
    with no_bar_for(sum(x.numel() * dtype.itemsize for x in tensors.values())):
        model.save_pretrained(folder, state_dict=tensors)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    if pruned.subject.anatomy.window_rule == "deepmind":  # it adds one key in memory; files have transformers' number
        config["attention_window_size"] -= 1
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if pruned.subject.tokenizer is not None:
        pruned.subject.tokenizer.save_pretrained(folder)


def read_back(pruned: Pruned, folder: Path) -> Subject:
    """Load the written model and return it; raise if its logits differ from those of the model in memory."""
    memory = pruned.subject
    how: dict[str, Any] = {"window": memory.anatomy.window_rule, "kernels": memory.body.kernels}
    read = load(folder, device=str(memory.body.device), dtype=memory.model.dtype, **how)
    difference = compare_logits(read, memory, NONE, pruned.streams)
    if not difference <= 1e-5:
        raise NeedleworkError(f"what was written to {folder} differs from the model in memory by {difference:.1e} of a logit")
    return read


@dataclass(frozen=True)
class PruningResult:
    """Result of pruning: the pruned model, its directory and the record behind its card."""

    subject: Subject
    directory: Path
    record: dict[str, Any]


def prune(
    model: Subject | str | Path,
    keep: Keep,
    out: str | Path,
    *,
    others: str = "none",
    uniform: bool = False,
    samples: int = 1000,
    progress: bool = False,
    **loading: Any,
) -> PruningResult:
    """Write a pruned checkpoint with its model card into a new directory.

    Args:
        model: A loaded model, or a name or path to load.
        keep: Heads to keep: a number, a share (a float or text such as "0.33"), or a ranking (a `Ranking`, a file,
            "file.json:10", a list of heads).
        out: The directory to write; it must be missing or empty.
        others: "none" removes the other heads; "window=64,sinks=4" limits their cache (streaming).
        uniform: Whether every layer keeps equally many heads in whole groups, at least as many as `keep` says, so that stock
            transformers loads the result; refused for families whose configuration cannot say it.
        samples: Number of needle samples that both models are measured on for the card; 0 measures nothing.
        progress: Whether to show progress bars.
        loading: Options of `nw.load`, if `model` is not loaded yet.
    """
    streams, place = parse_others(others), Path(out).absolute()
    if uniform and streams:
        raise NeedleworkError("--uniform is for heads that leave the weights: stock transformers has no streaming heads")
    if samples < 0:
        raise NeedleworkError(f"samples={samples} is no number of samples; 0 measures nothing")
    if not isinstance(model, Subject):
        source = Path(resolve(model))
        _refuse_quantised(source, read_config(source) if (source / "config.json").is_file() else {})
    elif loading:
        raise NeedleworkError(f"{', '.join(loading)}: the model is loaded already")
    else:
        _refuse_quantised(model.body.source, model.model.config.to_dict())
    with new_directory(place) as folder:  # raises for an existing directory before anything is computed
        whole = model if isinstance(model, Subject) else load(model, **loading)
        if samples and whole.tokenizer is None:
            raise NeedleworkError(
                "the model has no tokenizer, so that nothing can be asked of it: give a ranking file and samples=0 (--samples 0)"
            )
        choice = choose(whole, keep, progress, uniform)
        pruned = prune_subject(whole, choice.heads, streams)
        save(pruned, folder, _file_dtype(whole))
        subject = read_back(pruned, folder)
        record = _record(whole, choice, pruned)
        record["figures"] = compare(whole, subject, samples, progress) if samples else []
        record["costs"] = costs(whole, subject, progress=progress) if samples else {}
        record["weight_bytes"] = {"before": _weight_bytes(whole, whole.body.source), "after": _weight_bytes(subject, folder)}
        (folder / "pruning.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(render_card(record, place.name), encoding="utf-8")
    subject.body.source = place
    return PruningResult(subject, place, record)


def _file_dtype(subject: Subject) -> torch.dtype:
    """Return the dtype of the original weight files, so that weights loaded as float32 are not written in a larger dtype."""
    with suppress(NeedleworkError):
        if subject.body.source is not None:
            return torch_dtype(own_dtype(subject.body.source))
    own: torch.dtype = subject.model.dtype
    return own


def _weight_bytes(subject: Subject, folder: Path | None) -> int:
    """Return the total size of the .safetensors files of a directory, or of the tensors if there is none."""
    if folder is None:
        return sum(x.numel() * x.element_size() for x in subject.model.parameters())
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _record(whole: Subject, choice: Choice, pruned: Pruned) -> dict[str, Any]:
    """Return the JSON record of a pruning: model, heads by layer, parameters and the ranking used."""
    from needlework import __version__

    before, after, streams = whole.anatomy, pruned.subject.anatomy, pruned.streams
    numbers = [{i: [part.query_heads, part.kv_heads] for i, part in anatomy.attention_parts()} for anatomy in (before, after)]
    layers = {
        str(layer): {
            "kept": sorted(head.index for head in choice.heads if head.layer == layer),
            "before": heads,
            "after": numbers[1].get(layer, [0, 0]),
            "streaming_kv_heads": list(streams.kv_heads.get(layer, ())) if streams else [],
        }
        for layer, heads in numbers[0].items()
    }
    ranking = choice.ranking.to_dict()
    return {
        "format": "needlework pruning",
        "version": 1,
        "needlework": __version__,
        "model": whole.body.source.name if whole.body.source else before.architecture,
        "architecture": before.architecture,
        "weights": whole.body.weights,
        "others": f"window={streams.window},sinks={streams.sinks}" if streams else "none",
        "equals": str(pruned.equals),
        "loads_with": "needlework" if pruned.not_stock else "AutoModelForCausalLM",
        "not_stock": pruned.not_stock,
        "not_llama_cpp": not_llama_cpp(pruned.subject),
        "heads": {"before": len(before.heads), "kept": len(choice.heads), "zero": pruned.zero_heads, "after": len(after.heads)},
        "parameters": {"before": before.parameters, "after": after.parameters},
        "layers": layers,
        "ranking": {key: ranking[key] for key in ("method", "task", "samples", "seed", "model", "evidence", "heads")},
        "said_by": choice.source,
    }
