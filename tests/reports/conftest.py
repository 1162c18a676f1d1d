"""One made-up run for all tests of the report, and one whose answers are hostile."""

from __future__ import annotations

from pathlib import Path

import pytest
import synthetic

from needlework.reports import report


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("runs") / "run", per_cell=2)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model that answers with markup."""
    folder = synthetic.write(tmp_path_factory.mktemp("runs") / "hostile", ("tiny-griffin",), per_cell=1, hostile=True)
    return report([folder], pictures=False)


@pytest.fixture(scope="session")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report([run], tmp_path_factory.mktemp("pages"), pictures=False)
