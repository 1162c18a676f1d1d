"""README's table of `make docs`: made of the report's numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import synthetic

from needlework.store import Row, Store

FILE = Path(__file__).parents[2] / "docs" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_figures", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_takes_what_the_plan_asks_for_by_the_kind_of_task(figures: ModuleType, tmp_path: Path) -> None:
    run = synthetic.write(tmp_path / "run", ("tiny-jamba",), per_cell=1)
    before = figures.demo_table(run)
    store = Store(run)
    wanted = "task IN ('niah', 'niah_choice') AND intervention IN ('none', 'keep_heads(k=2)', 'ablate_attention()')"
    rows = [row for row in store.rows() if row.task == "niah" and row.intervention == "none"]
    assert "| tiny-jamba | untouched | 100 % [83.9, 100] |" in before[2]
    assert len(before) == 2 + 4
    store.db.execute(f"UPDATE trials SET task = 'my-' || task WHERE {wanted}")  # a name is the plan's own affair
    store.add([Row(**{**vars(row), "id": f"old {row.id}", "scores": {"correct": 0.0}, "asked": 0}) for row in rows])
    store.close()
    assert figures.demo_table(run) == before


def test_a_table_is_written_over_the_one_that_begins_alike(figures: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("before\n\n| a | b |\n|---|---|\n| old | 1 |\n| old | 2 |\n\nafter\n")
    figures.replace(file, figures.table(["a", "c"], [["new", ""]]))
    assert file.read_text() == "before\n\n| a | c |\n|---|---|\n| new | |\n\nafter\n"


def test_the_tables_that_are_written_stand_where_they_are_looked_for(figures: ModuleType) -> None:
    heads = [(figures.README, figures.table(["model", "condition", *figures.ABILITIES], []))]
    heads += [(figures.LOG, made(figures.cards())) for made in (figures.figures_table, figures.effects_table)]
    for file, lines in heads:
        assert lines[0] in file.read_text(encoding="utf-8").splitlines()
