"""Every hybrid family in the layouts of its public checkpoints loads as stock transformers loads it, and the laws hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from typer.testing import CliRunner

import cases
import needlework as nw
from needlework.checks.doctor import doctor
from needlework.cli import app
from needlework.model.load import blueprint
from published import LAYOUTS, PUBLISHED, REFUSED, Layout, add_tensors, write, write_refused

_SLOW = pytest.mark.slow
_FAST = ("jamba", "qwen3_5", "nemotron_h")
_CELLS = [pytest.param(name, layout, marks=() if name in _FAST else _SLOW) for name in PUBLISHED for layout in LAYOUTS]
IDS = cases.tokens(2, 12)


def _stock(folder: Path, model: Any) -> Any:
    """The model as stock transformers loads it: AutoModelForCausalLM, or the class of a model that it does not know."""
    known = type(model.config) in transformers.AutoModelForCausalLM._model_mapping
    loader = transformers.AutoModelForCausalLM if known else type(model)
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits
    return logits


def _stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names


def _kinds(anatomy: nw.Anatomy) -> list[tuple[str, int, int]]:
    return [(layer.kind, len(layer.heads), len(layer.groups)) for layer in anatomy.layers]


@pytest.mark.slow
@pytest.mark.parametrize("name, layout", _CELLS)
def test_layout(name: str, layout: Layout, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    record_property("layout", (name, layout))
    written = write(name, layout, tmp_path)
    published = PUBLISHED[name]
    assert set(published.names) <= _stored_names(tmp_path)
    subject, stock = nw.load(tmp_path), _stock(tmp_path, written)
    assert type(subject.model) is type(stock)
    assert cases.apart(subject.logits(IDS), _logits(stock)) < 1e-4
    assert cases.apart(subject.logits(IDS), _logits(written)) < 1e-4
    assert _kinds(subject.anatomy) == _kinds(cases.subject(published.text or name).anatomy)
    own = nw.load(tmp_path, dtype="auto")
    assert own.model.dtype == torch.bfloat16
    assert blueprint(tmp_path).anatomy.layers == own.anatomy.layers
    assert subject.anatomy.left_out == _left_out(name, layout, stock, tmp_path)
    if layout == "published":
        checkup = doctor(subject, quick=True)
        assert checkup.sound, checkup.failed


def _left_out(name: str, layout: Layout, stock: Any, folder: Path) -> str:
    """What the loaded model does not have of the checkpoint: parts of its configuration, and tensors by their prefix."""
    published = PUBLISHED[name]
    text_only = bool(published.config_class) and type(stock).__name__.endswith("ForCausalLM")
    visual = [key for key in _stored_names(folder) if text_only and key.startswith("model.visual.")]
    more = published.extra if layout == "published" else ()
    prefixes = ["model.visual"] * bool(visual) + ["mtp"] * bool(more)
    tensors = [f"{len(visual) + len(more)} tensors ({', '.join(prefixes)})"] if prefixes else []
    return ", ".join((["vision_config"] if text_only else []) + tensors)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_family(name: str, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    """Sinks and capped scores are not in SDPA, so that even answers without an intervention were wrong, without an error."""
    record_property("layout", (name, "published"))
    record_property("verdict", "refused")
    reason = write_refused(name, tmp_path)
    with pytest.raises(nw.NeedleworkError, match=f"is not supported: {reason}"):
        nw.load(tmp_path)
    with pytest.raises(nw.NeedleworkError, match=f"is not supported: {reason}"):
        blueprint(tmp_path)


def test_the_matrix_has_these_counts() -> None:
    hybrids = {name for name in cases.WITH_HEADS if name not in ("llama", "qwen3", "gemma3")}
    assert hybrids <= set(PUBLISHED)
    new = len({"lfm3", "lfm3_vl"} & set(PUBLISHED))  # families that an older transformers lacks
    assert (len(PUBLISHED), len(LAYOUTS), len(_CELLS)) == (25 + new, 3, 75 + 3 * new)
    assert len(REFUSED) == 6 + len({"inkling2"} & set(REFUSED))


def test_a_tensor_of_no_part_is_still_refused(tmp_path: Path) -> None:
    """Only tensors that the class says it ignores are left out."""
    write("qwen3_5", "published", tmp_path)
    add_tensors(tmp_path, ("model.language_model.layers.0.unheard.weight",))
    with pytest.raises(nw.NeedleworkError, match=r"1 not of this model .*unheard"):
        nw.load(tmp_path)


@pytest.mark.slow
def test_commands_on_a_composite_checkpoint(tmp_path: Path) -> None:
    write("qwen3_5", "published", tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "not loaded: vision_config" in result.output
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "all 12 laws hold" in result.output
