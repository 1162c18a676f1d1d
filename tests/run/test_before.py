"""A store that was written before trials and rows had their names goes on, asks nothing again, and has the numbers it had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from needlework.experiments.models import DiskModels, LoadedModel, ModelInfo
from needlework.experiments.run import run
from needlework.report import tables
from needlework.report.evidence import verdicts
from needlework.report.reader import load
from needlework.store import Store

BEFORE = Path(__file__).parent / "version2"


class Unloaded(DiskModels):
    """Models that are looked at and never loaded: whatever is asked of one is an error."""

    def load(self, info: ModelInfo) -> LoadedModel:
        pytest.fail(f"{info.name} was asked again")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copy(BEFORE / "run.sqlite", tmp_path)
    return tmp_path


def numbers(folder: Path) -> dict[str, list[list[str]]]:
    frame = load([folder])
    judged = [[verdict.claim, verdict.word, verdict.sentence] for verdict in verdicts(frame)]
    return {"verdicts": judged, "scores": tables.scores(frame)[1], "knowledge": tables.knowledge(frame)[1]}


def test_it_is_reported_with_the_numbers_it_had(old: Path) -> None:
    assert numbers(old) == json.loads((BEFORE / "expected.json").read_text())


def test_it_goes_on_without_asking_anything_again(old: Path) -> None:
    store = Store(old)
    before = list(store.rows("1 ORDER BY experiment, task, id"))
    store.close()
    assert run(BEFORE / "plan.yaml", old, source=Unloaded(), progress=False).sound
    store = Store(old)
    assert list(store.rows("1 ORDER BY experiment, task, id")) == before
    store.close()
    assert numbers(old) == json.loads((BEFORE / "expected.json").read_text())
