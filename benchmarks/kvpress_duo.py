"""Try the pattern and the press that are exported for a hybrid with kvpress itself: does it let the right heads stream?

kvpress is no dependency: run this where it is installed, with `src` and `tests` importable.
`PYTHONPATH=src:tests python benchmarks/kvpress_duo.py`. Tried with kvpress 0.5.5, installed with `pip install --no-deps`: it
declares transformers below 5.3. `kvpress_smollm2.py` compares a pretrained model, with the transformers that it declares.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from kvpress import DuoAttentionPress
from kvpress.presses import duo_attention_press

import needlework as nw
from needlework.heads import foreign
from needlework.interventions.ranking import Ranking
from tiny import build

TOKENS, SINKS, RECENT = 24, 2, 4
STREAMING = 2  # key-value heads


def pattern_files(text: str) -> Any:
    """Serve what kvpress downloads: the configuration and the matrix."""

    def get(url: str) -> Any:
        return SimpleNamespace(text=text, json=lambda: {"sink_size": SINKS, "recent_size": RECENT})

    return mock.patch.object(duo_attention_press.requests, "get", get)


def with_pattern(model: Any, text: str, ratio: float) -> Any:
    """kvpress's press with a pattern file of ours."""
    model.config.name_or_path = next(iter(duo_attention_press.PATTERNS_DICT))
    duo_attention_press.cache.clear()
    press = DuoAttentionPress(head_compression_ratio=ratio)
    with pattern_files(text):
        press.post_init_from_model(model)
    return press


def streamed(model: Any, layers: dict[int, Any], press: Any) -> set[tuple[int, int]]:
    """(layer, key-value head) of which kvpress masks keys in a prefill."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Call kvpress's hook with the argument that newer versions of transformers no longer pass."""
        return press.forward_hook(module, args, {"cache_position": torch.arange(TOKENS), **kwargs}, output)

    # kvpress's own context manager asks every layer for self_attn, which recurrent layers do not have.
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in layers.values()]
    with torch.no_grad():
        model(torch.arange(3, 3 + TOKENS)[None], use_cache=True)
    for handle in handles:
        handle.remove()
    masked = {layer: module.masked_key_indices for layer, module in layers.items()}
    assert all(set(keys.tolist()) <= set(range(SINKS, TOKENS - RECENT)) for _, _, keys in masked.values())
    return {(layer, head) for layer, (_, heads, _) in masked.items() for head in set(heads.tolist())}


def main() -> None:
    model = build("lfm2")
    subject = nw.wrap(build("lfm2"))
    anatomy = subject.anatomy
    parts = dict(anatomy.attention_parts())
    assert len(parts) < len(anatomy.layers), "the model must be a hybrid"
    scores = {head: float((7 * i) % 11) for i, head in enumerate(anatomy.heads)}
    groups: dict[tuple[int, int], float] = {}
    for head, score in scores.items():
        part = parts[head.layer]
        place = (head.layer, head.index * part.kv_heads // part.query_heads)
        groups[place] = max(score, groups.get(place, score))
    with tempfile.TemporaryDirectory() as folder:
        foreign.write(Ranking.by_scores(scores), Path(folder) / "x.tsv", "duo", anatomy)
        text = (Path(folder) / "x.tsv").read_text()
    lines = text.splitlines()
    ratio = STREAMING / (len(lines) * len(lines[0].split()))
    layers = {layer: model.model.layers[layer].self_attn for layer in parts}
    found = streamed(model, layers, with_pattern(model, text, ratio))
    lowest = set(sorted(groups, key=lambda place: groups[place])[:STREAMING])
    print(f"transformers {transformers.__version__}: kvpress streams {sorted(found)}, the lowest ranked are {sorted(lowest)}")
    assert found == lowest

    most = nw.budget(subject, context=100)
    planned = nw.budget(
        subject, context=100, memory=most.total - 3000, ranking=Ranking.by_scores(scores), window=RECENT, sinks=SINKS
    )
    with tempfile.TemporaryDirectory() as folder:
        press = runpy.run_path(str(planned.save(Path(folder), ["kvpress"])[0]))["press"]
    press.post_init_from_model(model)
    found, expected = streamed(model, layers, press), {(layer.index, kv) for layer in planned.layers for kv in layer.streaming}
    print(f"the press of nw.budget: kvpress streams {sorted(found)}, planned are {sorted(expected)}")
    assert found == expected != set()


if __name__ == "__main__":
    main()
