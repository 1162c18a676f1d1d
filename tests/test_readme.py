"""What README and docs tell people to copy runs as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import needlework
from needlework.cli import EXAMPLES, app
from needlework.experiments.plan import find

ROOT = Path(__file__).parents[1]


def blocks(file: str, language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{file} has no block in {language}"
    return found


def block(file: str, language: str) -> str:
    """All blocks in a language, one after the other: the later ones go on from the first."""
    return "".join(blocks(file, language))


def test_the_study_of_the_docs_is_one(tmp_path: Path) -> None:
    from needlework.training import study

    file = tmp_path / "study.yaml"
    file.write_text(blocks("docs/zoo.md", "yaml")[1])
    assert len(study.list_models(study.find_study(file))) == 12


@pytest.mark.slow
def test_the_example_of_the_readme_prints_what_stands_below_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEEDLEWORK_CACHE", str(tmp_path))
    exec(compile(block("README.md", "python"), "README.md", "exec"), {})
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = next(found for found in text.split("```")[1::2] if "->" in found and found.startswith("\n"))
    assert said == [line.rstrip() for line in shown.strip().splitlines()]


def test_the_python_of_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, object] = {}
    exec(compile(block("docs/tutorial.md", "python"), "tutorial.md", "exec"), found)
    said = capsys.readouterr().out.splitlines()
    assert {"none -> 4 7 1", "keep_heads(k=2) -> 4 7 1", "4 7 1"} <= set(said), "untouched, the needle is found"
    assert "attention: 2 layers" in " ".join(said)
    first, second = found["scores"][0].totals  # type: ignore[index]
    assert first > second, "the right value is the likelier one"


def test_the_python_of_the_how_to_pages_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("docs/howto-study.md", "python"), "howto-study.md", "exec"), {})
    assert "needle_mass" in capsys.readouterr().out


@pytest.mark.slow
def test_the_recipe_of_the_docs_trains_from_the_command_line(tmp_path: Path) -> None:
    recipe, out = tmp_path / "my-hybrid.yaml", tmp_path / "out"
    recipe.write_text(blocks("docs/zoo.md", "yaml")[0])
    shown = CliRunner().invoke(app, ["train", str(recipe), "--out", str(out), "--steps", "3"])
    assert shown.exit_code == 0, shown.output
    assert "my-hybrid: 3 steps, card in" in " ".join(shown.output.split())
    assert "step 3" in shown.output, "the figures that are followed are printed"
    assert {"model.safetensors", "README.md", "curve.png"} <= {file.name for file in out.iterdir()}
    again = CliRunner().invoke(app, ["train", str(recipe), "--out", str(out), "--steps", "3"])
    assert again.exit_code == 2
    assert "holds a finished model" in " ".join(again.output.split())


def test_plans_that_are_named_to_people_are_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no plans/ folder here, as in an installation
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join([*EXAMPLES, *(page.read_text(encoding="utf-8") for page in pages)])
    plans = set(re.findall(r"needlework (?:run|plan) ([\w./-]+)", text)) - {"my-plan.yaml"}
    assert {"01", "02", "head-sparsification", "smollm2"} <= plans
    for name in plans:
        assert (ROOT / name).is_file() or find(name).is_file()  # of the repository, or of every installation


def test_the_citation_is_of_this_version_and_names_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == project["version"] == needlework.__version__
    assert citation["license"] == project["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The needlework authors"}]
    (paper,) = citation["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:2510.19861"
    assert [author["family-names"] for author in paper["authors"]] == ["Michalak", "Abreu"]


def test_the_readme_begins_with_what_it_is_and_how_to_start() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    first = lines[:35]
    assert any("pip install needlework" in line for line in first)
    assert "import needlework as nw" in first
    assert not any(line.startswith("|") for line in first), "no table before them"
    assert len(lines) <= 120, "one screen and a half, and two tables"
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert "docs/finding.png" in pictures
    for target in [*pictures, *re.findall(r"\]\((?!http)([^)#]+)", text)]:
        assert (ROOT / target).exists(), target
