"""README's table of `make docs`: made of the report's numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import synthetic

from needlework.analysis.model_trials import by_boundary
from needlework.analysis.reader import load
from needlework.results import Row, Store

FILE = Path(__file__).parents[2] / "docs" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_figures", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_readme_takes_what_the_plan_asks_for_by_the_kind_of_task(figures: ModuleType, tmp_path: Path) -> None:
    run = synthetic.write(tmp_path / "run", ("tiny-jamba", "tiny-mamba"), per_cell=1)
    before = figures.demo_table(load([run]))
    store = Store(run)
    read = (
        "intervention IN ('none', 'keep_heads(k=1)', 'ablate_attention()') OR intervention LIKE 'keep_heads(k=1, by=''random''%'"
    )
    wanted = f"task IN ('niah', 'niah_choice') AND ({read})"
    rows = [row for row in store.rows() if row.task == "niah" and row.intervention == "none"]
    assert before[2].startswith("| tiny-jamba | 100 % [83.9, 100] | 0 % [0, 16.1] |")
    assert ", chance 25 % |" in before[2]
    assert ", 1 of 8 |" in before[2]
    assert before[3].startswith("| tiny-mamba | ")
    trials = by_boundary(load([run]), "tiny-jamba")[0]
    random = trials.retained_by_heads("random")[1]
    assert before[2].split(" | ")[5] == figures.cell(random), "few heads have as many random ones beside them"
    assert 0 < random.value < 1
    assert len(before) == 2 + 2
    store.db.execute(f"UPDATE trials SET task = 'my-' || task WHERE {wanted}")  # a name is the plan's own affair
    store.add([Row(**{**vars(row), "id": f"old {row.id}", "scores": {"correct": 0.0}, "asked": 0}) for row in rows])
    store.close()
    assert figures.demo_table(load([run])) == before


def test_a_place_is_filled_and_what_is_around_it_stays(figures: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- demo -->\nold\nolder\n<!-- end of demo -->\nafter\n")
    figures.fill(file, "demo", ["new"])
    assert file.read_text() == "before\n<!-- demo -->\nnew\n<!-- end of demo -->\nafter\n"
    with pytest.raises(SystemExit, match="has no place <!-- study -->"):
        figures.fill(file, "study", ["new"])


def test_a_chosen_model_is_called_an_illustration_with_how_many_show_the_effect(figures: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    assert figures.study(file) == figures.ILLUSTRATION
    file.write_text('{"shown": 5, "total": 12}')
    said = figures.study(file)
    assert "Models selected for an effect are not evidence for it." in said
    assert "Of the 12 models" in said
    assert "5 show it and 7 do not." in said


def test_a_table_is_written_over_the_one_that_begins_alike(figures: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("before\n\n| a | b |\n|---|---|\n| old | 1 |\n| old | 2 |\n\nafter\n")
    figures.replace(file, figures.table(["a", "c"], [["new", ""]]))
    assert file.read_text() == "before\n\n| a | c |\n|---|---|\n| new | |\n\nafter\n"


def test_the_tables_that_are_written_stand_where_they_are_looked_for(figures: ModuleType) -> None:
    for made in (figures.figures_table, figures.effects_table):
        assert made(figures.cards())[0] in figures.LOG.read_text(encoding="utf-8").splitlines()
    readme = figures.README.read_text(encoding="utf-8")
    assert figures.table(figures.NEEDLES, [])[0] in readme.splitlines()
    assert all(f"<!-- {mark} -->" in readme for mark in ("demo", "end of demo", "study", "end of study"))
    assert figures.study() in readme, "make docs"
