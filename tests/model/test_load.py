"""Loading: what comes in is the model that was saved; what cannot come in is refused with a way out, before any compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cases
import needlework as nw
from gguf_files import write_gguf
from needlework.model.load import blueprint

IDS = cases.tokens(1, 12)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    cases.build("jamba").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma", "llama", "mamba"])
def test_a_directory_without_a_tokenizer_loads(name: str, tmp_path: Path) -> None:
    model = cases.build(name)
    model.save_pretrained(tmp_path)
    subject = nw.load(tmp_path)
    assert subject.tokenizer is None
    assert cases.apart(subject.logits(IDS), cases.subject(name).logits(IDS)) < 1e-5
    assert name == "mamba" or subject.model.config._attn_implementation == "sdpa"
    assert subject.anatomy == cases.subject(name).anatomy
    with pytest.raises(nw.NeedleworkError, match="give token ids instead of text"):
        subject.generate(["hello"])


def test_the_class_that_the_configuration_names(tmp_path: Path) -> None:
    """AutoModelForCausalLM does not know glm5_next; its configuration says which class it is."""
    model = cases.build("glm5_next")
    model.config.architectures = ["Glm5NextForConditionalGeneration"]
    model.save_pretrained(tmp_path)
    subject = nw.load(tmp_path)
    assert subject.anatomy.architecture == "Glm5NextForConditionalGeneration"
    assert cases.apart(subject.logits(IDS), cases.subject("glm5_next").logits(IDS)) < 1e-5
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Unheard"]}))
    with pytest.raises(nw.NeedleworkError, match="architectures names none"):
        nw.load(tmp_path)


def test_dtypes(directory: Path) -> None:
    subject = nw.load(directory, dtype="bfloat16")
    assert subject.model.dtype == torch.bfloat16
    answer = subject.generate([cases.PROMPT], nw.KeepHeads(k=1), max_new_tokens=2)[0]
    assert answer.error == ""
    assert nw.load(directory).model.dtype == torch.float32


def test_a_gguf_file_loads(tmp_path: Path) -> None:
    model = cases.build("llama", rms_norm_eps=1e-6)
    write_gguf(tmp_path / "tiny.gguf", model)
    subject = nw.load(tmp_path / "tiny.gguf")
    assert subject.anatomy.architecture == "LlamaForCausalLM"
    assert cases.apart(subject.logits(IDS), nw.wrap(model).logits(IDS)) < 1e-4
    assert cases.apart(subject.logits(IDS, nw.KeepHeads(k=0)), nw.wrap(model).logits(IDS, nw.AblateAttention())) < 1e-4


# --- what cannot be loaded --------------------------------------------------------------------------------------------


def _refused(source: Any, says: str, **options: Any) -> None:
    with pytest.raises(nw.NeedleworkError) as error:
        nw.load(source, **options)
    assert says in str(error.value)


def test_places_where_there_is_no_model(tmp_path: Path) -> None:
    _refused(tmp_path / "nowhere", "there is no directory")
    _refused(tmp_path, "no config.json")
    (tmp_path / "notes.txt").write_text("hello")
    _refused(tmp_path / "notes.txt", "is a file; give a directory")


def test_pickled_weights_are_never_opened(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    _refused(directory, "unpickling runs code")
    (directory / "pytorch_model.bin").unlink()
    _refused(directory, "holds no *.safetensors")


def test_broken_weights(directory: Path) -> None:
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    _refused(directory, "weights cannot be loaded")
    (directory / "model.safetensors").write_bytes(b"no safetensors at all")
    _refused(directory, "weights cannot be loaded")


def test_weights_of_another_shape(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.zeros(7, 7)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _refused(directory, "weights cannot be loaded")


def test_configurations_that_cannot_be_read(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    _refused(directory, "does not know the model type")
    (directory / "config.json").write_text("{")
    _refused(directory, "cannot be read")


def test_bad_options(directory: Path) -> None:
    _refused(directory, "choose from float32, bfloat16, float16", dtype="float8")
    _refused(directory, "device 'warp'", device="warp")
    if not torch.cuda.is_available():
        _refused(directory, "no CUDA device", device="cuda")
    _refused(directory, "choose 'transformers' or 'deepmind'", window="big")
    _refused(directory, "window='deepmind' is for RecurrentGemma", window="deepmind")


def test_bad_options_are_seen_before_weights_are_read(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")
    _refused(directory, "choose from float32", dtype="float8")
    _refused(directory, "device 'warp'", device="warp")


def test_deepmind_window_is_one_key_more(tmp_path: Path) -> None:
    cases.build("recurrent_gemma").save_pretrained(tmp_path)
    stock, deepmind = nw.load(tmp_path), nw.load(tmp_path, window="deepmind")
    assert (stock.anatomy.window, stock.anatomy.window_rule) == (8, "transformers")
    assert (deepmind.anatomy.window, deepmind.anatomy.window_rule) == (9, "deepmind")
    a, b = stock.logits(IDS), deepmind.logits(IDS)
    assert cases.apart(a[:, :8], b[:, :8]) < 1e-5  # the ninth token is the first that sees nine keys
    assert cases.apart(a[:, 8:], b[:, 8:]) > 1e-3


# --- without weights --------------------------------------------------------------------------------------------------


def test_a_blueprint_is_the_anatomy_of_the_loaded_model(directory: Path) -> None:
    """The meta device has no values to look at, and still finds the same parts."""
    plan, real = blueprint(directory).anatomy, nw.load(directory).anatomy
    assert plan.layers == real.layers
    assert plan.parameters == real.parameters
    (directory / "model.safetensors").unlink()
    assert blueprint(directory).anatomy.layers == real.layers
