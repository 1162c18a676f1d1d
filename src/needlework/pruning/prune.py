"""`nw.prune(model, keep, out)`: choose heads, cut, try, measure and write a checkpoint that is really smaller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from needlework.errors import NeedleworkError
from needlework.pruning import card
from needlework.pruning.checkpoint import bytes_of, new_directory, read_back, save, write_record
from needlework.pruning.cutting import Others, Pruned, prune_subject
from needlework.pruning.figures import compare, costs, demanded
from needlework.pruning.selection import Choice, Keep, choose

if TYPE_CHECKING:
    from needlework.subject import Subject

SAMPLES = 1000


@dataclass(frozen=True)
class Result:
    """What pruning gave: the smaller model, where it lies, and what its card is made from."""

    subject: Subject
    directory: Path
    record: dict[str, Any]


def prune(
    model: Subject | str | Path,
    keep: Keep,
    out: str | Path,
    *,
    others: str = "none",
    samples: int = SAMPLES,
    progress: bool = False,
    **loading: Any,
) -> Result:
    """Write a model without all heads but the kept ones, or with the others streaming, into a new directory.

    `keep` is a number of heads, a share of them, or a ranking (a `Ranking`, a file, `file:10`, a list of heads). `others` is
    "none" or "window=64,sinks=4". `samples` needles are asked of both models for the card; 0 measures nothing.
    """
    rest, place = Others.parse(others), Path(out).absolute()
    if samples < 0:
        raise NeedleworkError(f"samples={samples} is no number of samples; 0 measures nothing")
    with new_directory(place) as folder:  # refuses one that is there before anything is computed
        whole = _loaded(model, loading)
        if samples:
            demanded(whole)
        choice = choose(whole, keep, progress)
        pruned = prune_subject(whole, choice.heads, rest)
        save(pruned, folder, _dtype(whole))
        subject = read_back(pruned, folder, rest)
        figures = compare(whole, subject, samples, progress) if samples else []
        taken = costs(whole, subject, progress=progress) if samples else {}
        record = _record(whole, choice, pruned, rest) | {"figures": figures, "costs": taken}
        record["weight_bytes"] = {"before": _weight_bytes(whole), "after": bytes_of(folder)}
        write_record(folder, record, card.text(record, place.name))
    subject.body.source = place
    return Result(subject, place, record)


def _loaded(model: Subject | str | Path, loading: dict[str, Any]) -> Subject:
    from needlework.subject import Subject, load

    if isinstance(model, Subject):
        if loading:
            raise NeedleworkError(f"{', '.join(loading)}: the model is loaded already")
        return model
    return load(model, **loading)


def _dtype(subject: Subject) -> torch.dtype:
    """The type that the weights had on the disk: what was loaded as float32 is not written larger than it was."""
    from needlework.model.load import torch_dtype
    from needlework.subject import own_dtype

    own: torch.dtype = subject.model.dtype
    if subject.body.source is None:
        return own
    try:
        return torch_dtype(own_dtype(subject.body.source))
    except NeedleworkError:
        return own


def _weight_bytes(subject: Subject) -> int:
    source = subject.body.source
    if source is not None:
        return bytes_of(source)
    return sum(x.numel() * x.element_size() for x in subject.model.parameters())


def _record(whole: Subject, choice: Choice, pruned: Pruned, others: Others) -> dict[str, Any]:
    """What was done and why, ready for JSON."""
    from needlework import __version__

    before, after = whole.anatomy, pruned.subject.anatomy
    layers = {
        str(layer.index): {
            "kept": sorted(head.index for head in choice.heads if head.layer == layer.index),
            "before": _numbers(before, layer.index),
            "after": _numbers(after, layer.index),
            "streaming_kv_heads": list(pruned.streams.kv_heads.get(layer.index, ())) if pruned.streams else [],
        }
        for layer in before.attention_layers
    }
    ranking = choice.ranking.to_dict()
    return {
        "format": "needlework pruning",
        "version": 1,
        "needlework": __version__,
        "model": whole.body.source.name if whole.body.source else before.architecture,
        "architecture": before.architecture,
        "weights": whole.body.weights,
        "others": str(others),
        "equals": str(pruned.equals),
        "loads_with": "AutoModelForCausalLM" if pruned.stock else "needlework",
        "heads": {"before": len(before.heads), "kept": len(choice.heads), "zero": pruned.zero_heads, "after": len(after.heads)},
        "parameters": {"before": before.parameters, "after": after.parameters},
        "layers": layers,
        "ranking": {key: ranking[key] for key in ("method", "task", "samples", "seed", "model", "evidence", "heads")},
        "said_by": choice.said_by,
    }


def _numbers(anatomy: Any, layer: int) -> list[int]:
    part = anatomy.layers[layer].attention
    return [0, 0] if part is None else [part.query_heads, part.kv_heads]
