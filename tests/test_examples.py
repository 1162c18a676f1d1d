"""The notebooks of examples/ run, and their stored outputs are what they give now."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+\.\d+(e-?\d+)?")


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def texts(notebook: Any) -> list[str]:
    """Return the text of all outputs without addresses and times; fractions with two digits, as the last ones differ."""
    found = []
    for output in outputs(notebook):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        text = re.sub(r"0x[0-9a-f]+|[\d.]+ s(econds)?\b|20\d\d-\d\d-\d\d[T\d:.+Z]*", "", text)
        text = "" if text.startswith("Checkup(") else text  # its numbers are rounding errors and seconds
        found.append(NUMBER.sub(lambda number: f"{float(number[0]):.2g}", text))
    return found


def test_each_notebook_has_a_title_and_is_on_the_page_of_examples() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    assert re.findall(r"`([\w-]+\.ipynb)`", page) == [path.name for path in NOTEBOOKS]
    for path in NOTEBOOKS:
        first = nbformat.read(path, as_version=4).cells[0]
        assert first.cell_type == "markdown"
        assert first.source.startswith("# ")
        assert path.name in page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_of_a_whole_run_without_errors_or_paths(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert outputs(notebook)
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
    assert not re.search(r"/(work|home|root|tmp|usr)/", path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_gives_what_is_stored(path: Path) -> None:
    found = runpy.run_path(str(EXAMPLES / "run.py"))["run"](path)
    assert texts(found) == texts(nbformat.read(path, as_version=4)), "run `make examples`"
