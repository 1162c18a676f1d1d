from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "results"))
sys.path.insert(0, str(Path(__file__).parent))

import fakes


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(fakes.PLAN)
    return path


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs submit batches of at most 16 trials."""
    monkeypatch.setattr("needlework.experiments.trials.CHUNK_TRIALS", 16)
