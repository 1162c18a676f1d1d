"""Read and write rankings in formats of other tools: head scores of Wu et al. and of LOCOS, and DuoAttention's TSV of gates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from needlework.anatomy import Anatomy, Head
from needlework.errors import NeedleworkError, short_repr
from needlework.files import atomic_write, read_text
from needlework.interventions.ranking import FORMAT, MOST_BYTES, Origin, Ranking, read_json

FILES: dict[str, str] = {"wu": "{name}.wu.json", "duo": "{name}.full_attention_heads.tsv", "locos": "{name}.locos.json"}
_WU = 'a JSON object such as {"16-19": [0.93, 0.95]}, layer and head before lists of scores'
_DUO = "numbers between tabs, a line for each layer (or each attention layer) and a column for each key-value head"


def read(path: Path | str, anatomy: Anatomy) -> Ranking:
    """Read a ranking file and check it against the model: needlework's own JSON, Wu et al.'s, LOCOS's, or DuoAttention's .tsv."""
    if Path(path).suffix == ".tsv":
        return _read_duo(path, anatomy)
    content = read_json(path)
    if isinstance(content, dict) and "format" in content:
        ranking = Ranking.from_dict(content, str(path))
    elif isinstance(content, dict) and isinstance(content.get("scores"), dict):
        ranking = _read_locos(path, content)
    else:
        ranking = _read_wu(path, content)
    ranking.check(anatomy)
    return ranking


def _read_locos(path: Path | str, content: dict[str, Any]) -> Ranking:
    """Return a ranking from a file of the LOCOS repository: Wu et al.'s scores under "scores", beside "meta"."""
    meta = content.get("meta")
    named = {key: value for key, value in meta.items() if type(value) in (str, int)} if isinstance(meta, dict) else {}
    seed = named.get("seed")
    about = {"model": Origin(name=str(named.get("model", ""))), "task": str(named.get("dataset", ""))}
    return _read_wu(path, content["scores"]).model_copy(
        update={"method": f"locos:{Path(path).stem}", "seed": seed if isinstance(seed, int) else None, **about}
    )


def _read_wu(path: Path | str, content: Any) -> Ranking:
    """Return a ranking by the mean of each head's list of scores, as Wu et al. compute it."""
    if not isinstance(content, dict) or not content:
        raise NeedleworkError(f"{path}: is neither a {FORMAT} nor {_WU}")
    scores: dict[Head, float] = {}
    for name, given in content.items():
        parts = name.split("-")
        values = given if isinstance(given, list) else [given]
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
            raise NeedleworkError(f"{path}: {short_repr(name)} is no head; {_WU}")
        if not values or not all(type(value) in (int, float) and abs(value) < 1e300 for value in values):
            raise NeedleworkError(f"{path}: head {name} has no scores, or one that is no number ({short_repr(given)}); {_WU}")
        head = Head(int(parts[0]), int(parts[1]))
        if head in scores:
            raise NeedleworkError(f"{path}: head {name} occurs twice")
        scores[head] = math.fsum(values) / len(values)
    samples = max(len(given) if isinstance(given, list) else 1 for given in content.values())
    return Ranking.by_scores(scores, method=f"wu:{Path(path).stem}", samples=samples)


def _read_duo(path: Path | str, anatomy: Anatomy) -> Ranking:
    """Return a ranking in which every query head has the gate of its key-value head.

    The file has a row for every layer (those without attention are skipped) or for the attention layers only.
    """
    text = read_text(path, f"give {_DUO}", most=MOST_BYTES)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip() and not line.startswith("#")]
    parts = list(anatomy.attention_parts())
    if len(lines) == len(anatomy.layers):
        lines = [lines[layer] for layer, _ in parts]
    if len(lines) != len(parts):
        raise NeedleworkError(
            f"{path}: has {len(lines)} lines, and {anatomy.architecture} has {len(anatomy.layers)} layers, of which"
            f" {[index for index, _ in parts]} have attention; {_DUO}"
        )
    scores: dict[Head, float] = {}
    for (number, line), (layer, part) in zip(lines, parts, strict=True):
        words = line.split()
        if len(words) != part.kv_heads:
            raise NeedleworkError(f"{path}:{number}: {len(words)} numbers, and layer {layer} has {part.kv_heads} key-value heads")
        try:
            gates = [float(word) for word in words]
        except ValueError:
            raise NeedleworkError(f"{path}:{number}: {short_repr(line)} holds what is no number; {_DUO}") from None
        if not all(map(math.isfinite, gates)):
            raise NeedleworkError(f"{path}:{number}: {short_repr(line)} holds a number that is not finite")
        scores |= {Head(layer, q): gates[q * part.kv_heads // part.query_heads] for q in range(part.query_heads)}
    return Ranking.by_scores(scores, method=f"duo:{Path(path).stem}", model=Origin(architecture=anatomy.architecture))


def write(ranking: Ranking, path: Path | str, kind: str, anatomy: Anatomy) -> None:
    """Write a ranking in the format of another tool ("wu", "locos" or "duo").

    DuoAttention has one gate for each key-value head: here the score of its best query head, scaled so that the lowest score
    of the model is 0 and the highest is 1. kvpress indexes the matrix by layer over all layers: rows of layers without
    attention are 1, so that none of their heads is chosen to stream.
    """
    if kind not in FILES:
        raise NeedleworkError(f"there is no format {kind!r} to export to; choose from {', '.join(FILES)}")
    ranking.check(anatomy)
    scores = ranking.scores or {head: float(-i) for i, head in enumerate(ranking.order)}
    if kind != "duo":
        lists = {f"{head.layer}-{head.index}": [scores[head]] for head in sorted(scores)}
        with atomic_write(Path(path)) as file:
            about = {"method": ranking.method, "dataset": ranking.task, "model": ranking.model.name, "seed": ranking.seed}
            json.dump(lists if kind == "wu" else locos_file(lists, ranking.samples, **about), file)
        return
    low, high = min(scores.values()), max(scores.values())
    widths = {part.kv_heads for _, part in anatomy.attention_parts()}
    if len(widths) > 1:
        raise NeedleworkError(
            f"DuoAttention's matrix has one number of key-value heads for all layers, and {anatomy.architecture} has"
            f" {', '.join(map(str, sorted(widths)))}; export to wu instead"
        )
    gates = [[1.0] * max(widths) for _ in anatomy.layers]  # [layers][kv heads]
    for layer, part in anatomy.attention_parts():
        size = part.query_heads // part.kv_heads
        best = [max(scores[Head(layer, kv * size + i)] for i in range(size)) for kv in range(part.kv_heads)]
        gates[layer] = [(value - low) / (high - low) if high > low else 1.0 for value in best]
    with atomic_write(Path(path)) as file:
        file.writelines("\t".join(f"{gate:.9g}" for gate in row) + "\n" for row in gates)


def locos_file(scores: dict[str, list[float]], samples: int, **meta: Any) -> dict[str, Any]:
    """Return what the LOCOS repository writes and reads, for scores by "layer-head"."""
    return {"meta": {**meta, "num_trials_passed": samples, "num_trials_total": samples}, "scores": scores, "trial_ids": []}
