"""Files of a model directory: read are safetensors and model classes only, and exactly what is read makes the hash."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import cases
import needlework as nw
from needlework import zoo
from needlework.cli import app
from needlework.experiments.models import weights_hash
from needlework.model.files import weight_files
from needlework.model.load import blueprint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Llama in three shards."""
    cases.build("llama").save_pretrained(tmp_path / "model", max_shard_size="50KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= 3
    return tmp_path / "model"


def _rename_first_shard(directory: Path, new: str, copy: bool = True) -> None:
    index = json.loads((directory / INDEX).read_text())
    old = sorted(set(index["weight_map"].values()))[0]
    if copy and not Path(new).is_absolute():
        (directory / new).parent.mkdir(exist_ok=True)
        torch.save(load_file(directory / old), directory / new)
    index["weight_map"] = {key: new if file == old else file for key, file in index["weight_map"].items()}
    (directory / INDEX).write_text(json.dumps(index))


def _refused(directory: Path, says: str) -> None:
    """By loading and by whoever asks for the hash."""
    for ask in (nw.load, weights_hash):
        with pytest.raises(nw.NeedleworkError) as error:
            ask(directory)
        assert says in str(error.value)


def test_shards_load_and_make_the_hash(directory: Path) -> None:
    assert cases.apart(nw.load(directory).logits([cases.PROMPT]), cases.subject("llama").logits([cases.PROMPT])) < 1e-5
    before = weights_hash(directory)
    save_file({"x": torch.zeros(3)}, directory / "consolidated.safetensors")
    assert weights_hash(directory) == before, "a file that is not loaded does not count"
    shard = sorted(directory.glob("model-*.safetensors"))[0]
    weights = load_file(shard)
    weights[next(iter(weights))][0] += 1
    save_file(weights, shard, metadata={"format": "pt"})
    assert weights_hash(directory) != before


def test_of_the_zoo_every_safetensors_counts() -> None:
    """As it always did: trial ids hang on it."""
    for entry in zoo.catalog():
        assert weight_files(zoo.path(entry)) == sorted(zoo.path(entry).glob("*.safetensors"))


@pytest.mark.parametrize(
    "name", ["model-00001.bin", "../outside.safetensors", "/etc/outside.safetensors", "sub/x.safetensors", "..\\x.safetensors"]
)
def test_an_index_names_safetensors_of_its_own_directory_only(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpickle(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    _rename_first_shard(directory, name)
    monkeypatch.setattr(torch, "load", unpickle)
    _refused(directory, repr(name))


def test_an_index_that_names_nothing_that_is_there(directory: Path) -> None:
    _rename_first_shard(directory, "lost.safetensors", copy=False)
    _refused(directory, "lost.safetensors, which is not there")
    for text in ("{", "[]", '{"weight_map": 5}', '{"metadata": {}}'):
        (directory / INDEX).write_text(text)
        _refused(directory, "no readable weight_map")


def test_a_tensor_in_two_files_is_named(directory: Path) -> None:
    """transformers takes it from either, whatever the index says."""
    first, second, *_ = sorted(directory.glob("model-*.safetensors"))
    weights, others = load_file(first), load_file(second)
    name = next(iter(weights))
    save_file({**others, name: torch.zeros_like(weights[name])}, second, metadata={"format": "pt"})
    with pytest.raises(nw.NeedleworkError, match=rf"'{name}' is in {second.name}, and should be in {first.name} alone"):
        nw.load(directory)


def test_a_configuration_names_weights_of_its_own_directory_only(tmp_path: Path) -> None:
    cases.build("llama").save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for name in ("../other.safetensors", "adapter_model.bin", "../model.safetensors.index.json", ["x"]):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
        _refused(tmp_path / "model", repr(name))
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "other.safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    assert len(weights_hash(tmp_path / "model")) == 32
    nw.load(tmp_path / "model")


def test_what_would_be_loaded_instead_or_on_top_is_refused(tmp_path: Path) -> None:
    cases.build("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    _refused(tmp_path, "holds an adapter")
    (tmp_path / "adapter_config.json").unlink()
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "shard-00000-model-00001-of-00001.safetensors")
    _refused(tmp_path, "distributed checkpoint")


def test_a_model_of_the_hub_is_held_to_the_same(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a hub cache, without a network."""
    home = tmp_path / "hub" / "models--some--model"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("a" * 40)
    for constant in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(huggingface_hub.constants, constant, str(tmp_path / "hub"))
    snapshot = home / "snapshots" / ("a" * 40)
    shutil.copytree(directory, snapshot)
    assert nw.load("some/model").anatomy.architecture == "LlamaForCausalLM"
    _rename_first_shard(snapshot, "model-00001.bin")
    with pytest.raises(nw.NeedleworkError, match=r"names 'model-00001\.bin' as weights"):
        nw.load("some/model")


@pytest.mark.parametrize("name", ["pipeline", "Impostor", "AutoTokenizer", "BertModel", "__doc__", 5])
def test_only_a_model_class_of_this_configuration_is_called(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoModelForCausalLM does not know glm5_next, so that what its configuration names is looked up."""
    cases.build("glm5_next").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    calls: list[Any] = []

    class Impostor:
        config_class = transformers.Glm5NextConfig
        from_pretrained = __init__ = calls.append

    now = importlib.import_module("transformers")  # it may have replaced itself since this file was imported
    monkeypatch.setattr(now, "pipeline", lambda *args, **_: calls.append(args))
    monkeypatch.setattr(now, "Impostor", Impostor, raising=False)
    for ask in (nw.load, blueprint):
        with pytest.raises(nw.NeedleworkError, match=r"architectures names none|cannot be read"):
            ask(tmp_path)
    assert not calls


# --- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["nothing", "tokenizer_config.json"])
def mute(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A zoo model whose vocabulary was not copied: transformers makes up a tokenizer of five tokens."""
    for name in ("config.json", "generation_config.json", "model.safetensors", request.param):
        if name != "nothing":
            shutil.copy(zoo.path("tiny-griffin-small") / name, tmp_path)
    return tmp_path


def test_a_model_without_a_tokenizer_loads_and_takes_tokens(mute: Path) -> None:
    subject = nw.load(mute)
    assert subject.tokenizer is None
    assert subject.generate([[5, 6, 7]], max_new_tokens=2)[0].error == ""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "plan", "ask", "eval"])
def test_text_for_a_model_without_a_tokenizer_is_refused(
    mute: Path, command: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    task = {"kind": "niah", "lengths": [64], "depths": [50], "samples": 1, "world": "english"}
    plan = {"name": "p", "models": [str(mute)], "experiments": {"e": {"tasks": [task], "interventions": ["none"]}}}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    out = ["--out", str(folder / "out")]
    words = {
        "run": ["run", str(folder / "plan.yaml"), *out],
        "plan": ["plan", str(folder / "plan.yaml")],
        "ask": ["ask", str(mute), "hello"],
        "eval": ["eval", str(mute), "--tasks", "mini-mmlu", "--intervene", "none", *out],
    }
    shown = CliRunner().invoke(app, words[command])
    assert shown.exit_code == 2, shown.output
    assert "without a tokenizer" in " ".join(shown.output.split())
    assert not (folder / "out").exists()
