"""What README and docs tell people to copy runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from needlework.cli import app

ROOT = Path(__file__).parents[1]


def block(file: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{file} has no block in {language}"
    return found[1]


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, object] = {}
    exec(compile(block("README.md", "python"), "README.md", "exec"), found)
    said = capsys.readouterr().out.splitlines()
    assert "4 7 1" in said, "untouched, the needle is found"
    assert "attention: 2 layers" in " ".join(said)
    first, second = found["scores"][0].option_logprobs  # type: ignore[index]
    assert sum(first) > sum(second), "the right value is the likelier one"


def test_the_recipe_of_the_docs_trains_from_the_command_line(tmp_path: Path) -> None:
    recipe, out = tmp_path / "my-hybrid.yaml", tmp_path / "out"
    recipe.write_text(block("docs/zoo.md", "yaml"))
    shown = CliRunner().invoke(app, ["train", str(recipe), "--out", str(out), "--steps", "3"])
    assert shown.exit_code == 0, shown.output
    assert "my-hybrid: 3 steps, card in" in " ".join(shown.output.split())
    assert "step 3" in shown.output, "the figures that are followed are printed"
    assert {"model.safetensors", "README.md", "curve.png"} <= {file.name for file in out.iterdir()}
    again = CliRunner().invoke(app, ["train", str(recipe), "--out", str(out), "--steps", "3"])
    assert again.exit_code == 2
    assert "holds a finished model" in " ".join(again.output.split())
