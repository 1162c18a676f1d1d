"""Prune a model (`nw.prune`): choose heads, remove them, verify, measure and write a smaller checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.errors import NeedleworkError, short_repr
from needlework.files import new_directory
from needlework.heads.methods import find_methods
from needlework.heads.samples import draw_samples, named_tasks
from needlework.heads.survey import ProgressSteps, origin, rank_by
from needlework.interventions.base import NONE
from needlework.interventions.ranking import Ranking, as_heads
from needlework.model.files import read_config
from needlework.model.session import no_bar_for
from needlework.pruning import card
from needlework.pruning.cutting import Others, Pruned, compare_logits, prune_subject, refuse_quantised
from needlework.pruning.figures import compare, costs, require_tokenizer_to_measure

if TYPE_CHECKING:
    from needlework.subject import Subject

Keep = int | float | str | Path | Ranking | Sequence[tuple[int, int]]
METHOD = "needle_mass"  # the cheapest method: one run without intervention
RANKING_SAMPLES, RANKING_SEED = 100, 1  # the card is measured with another seed (figures.py)
_NUMBER = r"\d+(?:\.\d+)?"
_SAY_HOW_MANY = "say how many of them stay, e.g. heads.json:10"
_HOW = "give a number of heads (10), a share of them (0.33), or a ranking, with or without a number: heads.json, heads.json:10"


@dataclass(frozen=True)
class Choice:
    """The heads to keep, and the ranking that they are taken from."""

    heads: tuple[Head, ...]  # best first
    ranking: Ranking

    @property
    def said_by(self) -> str:
        ranking = self.ranking
        parts = (
            f"ranking by {ranking.method}" if ranking.method else "heads that were named",
            f"of {ranking.model.name}" if ranking.model.name else "",
            f"on {ranking.samples:,} samples of {ranking.task}" if ranking.samples else "",
            f"seed {ranking.seed}" if ranking.seed is not None else "",
        )
        return ", ".join(part for part in parts if part)


def choose(subject: Subject, keep: Keep, progress: bool = False) -> Choice:
    """Return the heads to keep; without a ranking, heads are ranked by their attention on needles.

    Raises:
        NeedleworkError: The model does not have these heads, or none or all of its heads would be kept.
    """
    ranking, count = _read(keep)
    every = subject.anatomy.heads
    if not every:
        raise NeedleworkError(f"{subject.anatomy.architecture} has no attention heads that could be pruned")
    named = not isinstance(keep, (Ranking, int, float)) and not _is_file(keep)
    if ranking is not None:
        if named and (unknown := [head for head in ranking.order if head not in set(every)]):
            raise NeedleworkError(
                f"{subject.anatomy.architecture} has no heads {' '.join(f'{head.layer}.{head.index}' for head in unknown[:5])},"
                " which are to stay; `needlework inspect` shows those that there are"
            )
        _check(ranking, subject.anatomy, subject.body.weights if ranking.model.weights else "")
    elif count is not None:
        _count(count, len(every))  # fail before heads are ranked
        ranking = by_needle_mass(subject, progress)
    assert ranking is not None
    if count is None and len(ranking.order) == len(every):
        raise NeedleworkError(f"all {len(every)} heads are {'named: name fewer' if named else f'ranked: {_SAY_HOW_MANY}'}")
    number = len(ranking.order) if count is None else _count(count, len(every))
    if number > len(ranking.order):
        raise NeedleworkError(f"{number} heads are to stay, and the ranking file has {len(ranking.order)}")
    return Choice(ranking.top(number), ranking)


def _read(keep: Keep) -> tuple[Ranking | None, int | float | None]:
    if isinstance(keep, Ranking):
        return keep, None
    if isinstance(keep, bool) or keep is None:
        raise NeedleworkError(f"keep={keep!r} says no heads; {_HOW}")
    if isinstance(keep, (int, float)):
        return None, keep
    if not isinstance(keep, (str, Path)):
        return Ranking(order=as_heads(keep)), None
    text = str(keep).strip()
    if re.fullmatch(_NUMBER, text):
        return None, _number(text)
    if not _is_file(text):
        return Ranking.parse(text), None
    file, mark, number = text.rpartition(":")
    if mark and re.fullmatch(_NUMBER, number) and not Path(text).exists():
        return Ranking.load(file), _number(number)
    if not Path(text).is_file():
        raise NeedleworkError(f"--keep {short_repr(text)} is no file and no number; {_HOW}")
    return Ranking.load(text), None


def _is_file(keep: Keep) -> bool:
    """Return whether `keep` is text or a path, but not a list of heads such as "2.0 2.5"."""
    return isinstance(keep, (str, Path)) and not re.fullmatch(r"\d+\.\d+(\s+\d+\.\d+)+", str(keep).strip())


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _count(count: int | float, heads: int) -> int:
    """Return a number or a share as a number of heads; raise if that is none or all of them."""
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


def _check(ranking: Ranking, anatomy: Anatomy, weights: str) -> None:
    """Check a ranking, which may be of a subset of the heads, against the model."""
    if not ranking.order:
        _count(0, len(anatomy.heads))
    missing = tuple(head for head in anatomy.heads if head not in set(ranking.order))
    ranking.model_copy(update={"order": (*ranking.order, *missing)}).check(anatomy, weights)


def by_needle_mass(subject: Subject, progress: bool = False) -> Ranking:
    """Rank heads by their attention on the needle while the model answers without intervention."""
    samples = draw_samples(subject, named_tasks("niah", subject), RANKING_SAMPLES, RANKING_SEED)
    (method,) = find_methods([METHOD])
    with ProgressSteps(1, progress) as steps, steps.step("ranking heads") as tell:
        return rank_by(subject, method, samples, RANKING_SEED, tell, origin(subject))[0]


RECORD = "pruning.json"


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


def read_back(pruned: Pruned, folder: Path, others: Others) -> Subject:
    """Load the written model and return it; raise if its logits differ from those of the model in memory."""
    from needlework.subject import load

    memory = pruned.subject
    how: dict[str, Any] = {"window": memory.anatomy.window_rule, "kernels": memory.body.kernels}
    read = load(folder, device=str(memory.body.device), dtype=memory.model.dtype, **how)
    difference = compare_logits(read, memory, NONE, others)
    if not difference <= 1e-5:
        raise NeedleworkError(f"what was written to {folder} differs from the model in memory by {difference:.1e} of a logit")
    return read


def weight_file_bytes(folder: Path) -> int:
    """Return the total size of the .safetensors files of a directory."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def write_record(folder: Path, record: dict[str, Any], card: str) -> None:
    """Write pruning.json and the model card (README.md)."""
    (folder / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


SAMPLES = 1000


@dataclass(frozen=True)
class Result:
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
    samples: int = SAMPLES,
    progress: bool = False,
    **loading: Any,
) -> Result:
    """Write a pruned checkpoint with its model card into a new directory.

    Args:
        model: A loaded model, or a name or path to load.
        keep: Heads to keep: a number, a share (a float or text such as "0.33"), or a ranking (a `Ranking`, a file,
            "file.json:10", a list of heads).
        out: The directory to write; it must be missing or empty.
        others: "none" removes the other heads; "window=64,sinks=4" limits their cache (streaming).
        samples: Number of needle samples that both models are measured on for the card; 0 measures nothing.
        progress: Whether to show progress bars.
        loading: Options of `nw.load`, if `model` is not loaded yet.
    """
    rest, place = Others.parse(others), Path(out).absolute()
    if samples < 0:
        raise NeedleworkError(f"samples={samples} is no number of samples; 0 measures nothing")
    _refuse_before_loading(model)
    with new_directory(place) as folder:  # raises for an existing directory before anything is computed
        whole = _loaded(model, loading)
        if samples:
            require_tokenizer_to_measure(whole)
        choice = choose(whole, keep, progress)
        pruned = prune_subject(whole, choice.heads, rest)
        save(pruned, folder, _dtype(whole))
        subject = read_back(pruned, folder, rest)
        figures = compare(whole, subject, samples, progress) if samples else []
        taken = costs(whole, subject, progress=progress) if samples else {}
        record = _record(whole, choice, pruned, rest) | {"figures": figures, "costs": taken}
        record["weight_bytes"] = {"before": _weight_bytes(whole), "after": weight_file_bytes(folder)}
        write_record(folder, record, card.text(record, place.name))
    subject.body.source = place
    return Result(subject, place, record)


def _refuse_before_loading(model: Subject | str | Path) -> None:
    from needlework.subject import Subject
    from needlework.zoo import resolve

    if isinstance(model, Subject):
        return refuse_quantised(model.body.source, model.model.config.to_dict())
    place = Path(resolve(model))
    return refuse_quantised(place, read_config(place) if (place / "config.json").is_file() else {})


def _loaded(model: Subject | str | Path, loading: dict[str, Any]) -> Subject:
    from needlework.subject import Subject, load

    if isinstance(model, Subject):
        if loading:
            raise NeedleworkError(f"{', '.join(loading)}: the model is loaded already")
        return model
    return load(model, **loading)


def _dtype(subject: Subject) -> torch.dtype:
    """Return the dtype of the original weight files, so that weights loaded as float32 are not written in a larger dtype."""
    from needlework.model.load import own_dtype, torch_dtype

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
        return weight_file_bytes(source)
    return sum(x.numel() * x.element_size() for x in subject.model.parameters())


def _record(whole: Subject, choice: Choice, pruned: Pruned, others: Others) -> dict[str, Any]:
    """Return the JSON record of a pruning: model, heads by layer, parameters and the ranking used."""
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
