"""Every weight comes from the files: what they do not give would be random, and is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cases
import needlework as nw
from gguf_files import write_gguf

Edit = Callable[[dict[str, Tensor]], None]


def _saved(name: str, folder: Path, edit: Edit) -> Path:
    """A checkpoint whose weights were tampered with."""
    cases.build(name).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _refused(source: Path) -> str:
    with pytest.raises(nw.NeedleworkError) as error:
        nw.load(source)
    return str(error.value)


def _without(part: str) -> Edit:
    def edit(weights: dict[str, Tensor]) -> None:
        for key in [key for key in weights if part in key]:
            del weights[key]

    return edit


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.ALL)
def test_every_architecture_comes_back_as_it_was_saved(name: str, tmp_path: Path) -> None:
    """Tied weights, fused experts, buffers and renamed tensors are no gaps."""
    model = cases.build(name)
    model.save_pretrained(tmp_path)
    saved, loaded = model.state_dict(), nw.load(tmp_path).model.state_dict()
    assert saved.keys() == loaded.keys()
    assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == []


@pytest.mark.parametrize("name", ["recurrent_gemma", "jamba", "llama", "mamba"])
def test_a_layer_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    said = _refused(_saved(name, tmp_path, _without(".layers.2.")))
    count = sum(".layers.2." in key for key in cases.subject(name).model.state_dict())
    assert f"{count} missing (" in said
    assert ".layers.2." in said
    assert "nothing was run" in said


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    jamba, griffin = tmp_path / "jamba", tmp_path / "griffin"
    cases.build("jamba").save_pretrained(jamba)
    cases.build("recurrent_gemma").save_pretrained(griffin)
    (griffin / "model.safetensors").write_bytes((jamba / "model.safetensors").read_bytes())
    said = _refused(griffin)
    assert "RecurrentGemmaForCausalLM" in said
    assert "missing (" in said
    assert "not of this model (" in said
    assert "feed_forward" in said


def test_one_tensor_too_many_is_named(tmp_path: Path) -> None:
    said = _refused(_saved("llama", tmp_path, lambda weights: weights.update(extra=torch.zeros(2))))
    assert "1 not of this model (extra)" in said


def test_shapes_are_shown(tmp_path: Path) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    said = _refused(_saved("llama", tmp_path, lambda weights: weights.update({key: torch.zeros(7, 5)})))
    assert f"1 of another shape ({key} is [7, 5] and must be [64, 32])" in said


def test_tied_weights_must_be_there_once(tmp_path: Path) -> None:
    assert "lm_head.weight" in nw.load(_saved("recurrent_gemma", tmp_path / "one", _without("lm_head"))).model.state_dict()
    said = _refused(_saved("recurrent_gemma", tmp_path / "none", _without("embed_tokens")))
    assert "model.embed_tokens.weight" in said


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("model.layers.1.feed_forward.experts.0.down_proj.weight", None),
        ("model.layers.1.feed_forward.experts.0.gate_proj.weight", None),
        ("model.layers.1.feed_forward.experts.2.down_proj.weight", torch.zeros(3, 3)),
    ],
)
def test_experts_that_do_not_fit_together_are_named(key: str, new: Tensor | None, tmp_path: Path) -> None:
    """They are put together while they are loaded, so the tensor that cannot be made has a name of its own."""

    def edit(weights: dict[str, Tensor]) -> None:
        del weights[key]
        weights.update({} if new is None else {key: new})

    said = _refused(_saved("jamba", tmp_path, edit))
    assert "model.layers.1.feed_forward.experts." in said
    assert "LOAD REPORT" not in said
    assert "3" in said.split("experts.")[1]  # of four experts


def test_a_gguf_file_with_a_gap_is_refused(tmp_path: Path) -> None:
    model = cases.build("llama", rms_norm_eps=1e-6)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, leave_out="blk.2.ffn_up")
    assert "1 missing (model.layers.2.mlp.up_proj.weight)" in _refused(file)


def test_a_report_of_transformers_is_not_shown_beside_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import transformers

    folder = _saved("llama", tmp_path, _without(".layers.2."))
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    try:
        capfd.readouterr()
        _refused(folder)
        assert "LOAD REPORT" not in capfd.readouterr().err
    finally:
        transformers.logging.set_verbosity(before)
