"""A model directory may come from anybody: whatever is wrong with it is said in words, and nothing is left behind."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import needlework as nw
from needlework import zoo
from needlework.cli import app
from needlework.experiments.models import DiskModels
from needlework.experiments.plan import Model
from needlework.model.load import blueprint, own_dtype

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name in FILES:
        shutil.copy(zoo.path("tiny-griffin-small") / name, tmp_path / "model")
    return tmp_path / "model"


def _with(directory: Path, file: str = "config.json", **changes: Any) -> None:
    content = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps({**content, **changes}))


CONFIGS = [
    *({"num_attention_heads": value} for value in (0, -1, None, "x", [1], 1.5, True)),
    *({"num_hidden_layers": value} for value in (0, -1, None, "x", 10**9)),
    *({"hidden_size": value} for value in (0, -8, "x", None, 10**12)),
    *({"vocab_size": value} for value in (0, -5, None, 10**15)),
    *({"num_key_value_heads": value} for value in (0, 3, "x")),
    *({"attention_window_size": value} for value in (0, -3, "x")),
    *({"block_types": value} for value in ([], 5)),
    {"rope_parameters": {"rope_theta": "x", "rope_type": "y"}},
    {"max_position_embeddings": "x"},
    {"model_type": "../x"},
    {"model_type": 5},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=lambda changes: json.dumps(changes)[:40])
def test_a_configuration_that_makes_no_model(changes: dict[str, Any], directory: Path) -> None:
    _with(directory, **changes)
    for ask in (nw.load, lambda place: DiskModels().inspect(Model("plan:1", "m", str(place)))):
        with pytest.raises(nw.NeedleworkError) as error:
            ask(directory)
        assert str(directory) in str(error.value)
        assert "look at the above report" not in str(error.value)


def test_layer_types_that_do_not_fit_the_weights(directory: Path) -> None:
    _with(directory, block_types=["x"])  # transformers 5.23 takes every unknown type as attention
    with pytest.raises(nw.NeedleworkError, match=re.escape(str(directory))):
        nw.load(directory)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["[]", "5", "", "null", "[" * 100_000, "\0\1\2"])
def test_a_file_that_holds_something_else(file: str, text: str, directory: Path) -> None:
    (directory / file).write_text(text)
    with pytest.raises(nw.NeedleworkError, match="model"):
        DiskModels().inspect(Model("plan:1", "m", str(directory)))


@pytest.mark.parametrize("eos", ["x", 1.5, [1, "x"], [[1]], {"a": 1}, True])
def test_an_end_that_is_no_token(eos: Any, directory: Path) -> None:
    _with(directory, "generation_config.json", eos_token_id=eos)
    with pytest.raises(nw.NeedleworkError, match=r"eos_token_id: .* is no token id"):
        DiskModels().inspect(Model("plan:1", "m", str(directory)))


@pytest.mark.parametrize(
    "head", [b"", b"junk" * 100, b"GGUF" + b"\xff" * 100, b"GGUF\x03\0\0\0" + (10**15).to_bytes(8, "little") * 2]
)
def test_a_gguf_file_with_a_bad_head(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(head)
    for words in (["inspect", str(tmp_path / "model.gguf")], ["ask", str(tmp_path / "model.gguf"), "x"]):
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 2, said.output
        assert "cannot be read" in " ".join(said.output.split())


def test_shapes_that_do_not_fit_are_named(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name] = weights[name][:, :-1].contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(nw.NeedleworkError, match=rf"1 of another shape \({name} is \[.*\] and must be"):
        nw.load(directory)


@pytest.mark.parametrize("stored", [torch.bool, torch.int8, torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_weights_of_another_type_are_named(stored: torch.dtype, directory: Path) -> None:
    """transformers would cast them."""
    weights = load_file(directory / "model.safetensors")
    name = sorted(name for name in weights if "mlp" in name)[0]
    weights[name] = weights[name].to(stored)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(nw.NeedleworkError, match=rf"{name}' is stored as \w+; weights are F64, F32, F16, BF16"):
        nw.load(directory)


@pytest.mark.parametrize("number", [3_000_000_000, 10**30])
def test_labels_without_end_are_not_made(number: int, directory: Path) -> None:
    for changes in ({"num_labels": number}, {"text_config": {"num_labels": number}}):
        _with(directory, **changes)
        for ask in (nw.load, blueprint, own_dtype, lambda place: DiskModels().inspect(Model("plan:1", "m", str(place)))):
            before = time.process_time()
            if ask is own_dtype:
                assert ask(directory) == "float32"  # loading says what is wrong
            else:
                with pytest.raises(nw.NeedleworkError, match="num_labels"):
                    ask(directory)
            assert time.process_time() - before < 5


@pytest.mark.parametrize("longest", ["x", -1, 0, True, [5]])
def test_a_longest_text_that_is_no_number(longest: Any, directory: Path) -> None:
    _with(directory, "tokenizer_config.json", model_max_length=longest)
    said = CliRunner().invoke(app, ["ask", str(directory), "the"])
    assert said.exit_code == 2, said.output
    assert "model_max_length" in said.output


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named_before_any_trial(value: float, directory: Path, tmp_path: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    name = sorted(name for name in weights if "mlp" in name)[0]
    weights[name][0] = value
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "plan.yaml").write_text("models: [x]\nexperiments: {a: {tasks: [niah], interventions: [none]}}\n")
    words = ["run", str(tmp_path / "plan.yaml"), "--fast", "--model", f"m={directory}", "--out", str(tmp_path / "out")]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2, said.output
    assert f"weights in {name} are NaN or infinite" in " ".join(said.output.split())
    assert not (tmp_path / "out").exists()


def test_large_weights_are_no_infinite_ones(directory: Path) -> None:
    """Their sum may overflow."""
    from needlework.model.load import _refuse_not_finite

    layer = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(layer.weight, 3e38)
    _refuse_not_finite(directory, layer)


def test_a_configuration_much_larger_than_its_files(directory: Path) -> None:
    """Missing weights would be made up, in memory: 4 TB of them here."""
    _with(directory, intermediate_size=2**31)
    with pytest.raises(nw.NeedleworkError, match=r"describes a model of .* parameters, and its files hold"):
        nw.load(directory)


def test_broken_weights_that_are_mended_are_taken(directory: Path, tmp_path: Path) -> None:
    whole = (directory / "model.safetensors").read_bytes()
    task = "{kind: niah, lengths: [64], depths: [50], samples: 1}"
    (tmp_path / "plan.yaml").write_text(f"models: [x]\nexperiments: {{a: {{tasks: [{task}], interventions: [none]}}}}\n")
    words = ["run", str(tmp_path / "plan.yaml"), "--model", f"m={directory}", "--out", str(tmp_path / "out")]
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    said = CliRunner().invoke(app, words)
    assert (said.exit_code, "cannot be loaded" in " ".join(said.output.split())) == (2, True), said.output
    assert not (tmp_path / "out").exists()
    (directory / "model.safetensors").write_bytes(whole)
    assert CliRunner().invoke(app, words).exit_code == 0
