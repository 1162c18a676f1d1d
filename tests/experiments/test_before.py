"""A store that was written before trials and rows had their names goes on, asks nothing again, and has the numbers it had."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from needlework.analysis.reader import load
from needlework.analysis.verdicts import verdicts
from needlework.experiments.models import DiskModels, LoadedModel, ModelInfo
from needlework.experiments.plan import Model
from needlework.experiments.run import run
from needlework.reports import tables
from needlework.results import Store

BEFORE = Path(__file__).parent / "version2"
WEIGHTS = "26cf30cb0b6e909c19b83f2890d68a89"  # of the tiny-griffin that the store was made with
HEADS = 16  # that it had in each attention layer


class Unloaded(DiskModels):
    """Models that are looked at and never loaded: whatever is asked of one is an error."""

    def inspect(self, model: Model) -> ModelInfo:
        """The model of today, under the weights that the store was made with: no answer is asked of it."""
        info = super().inspect(model)
        layers = [
            replace(layer, attention=replace(layer.attention, query_heads=HEADS)) if layer.attention else layer
            for layer in info.anatomy.layers
        ]
        return replace(info, weights=WEIGHTS, anatomy=replace(info.anatomy, layers=tuple(layers)))

    def load(self, info: ModelInfo) -> LoadedModel:
        pytest.fail(f"{info.name} was asked again")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copy(BEFORE / "run.sqlite", tmp_path)
    return tmp_path


def numbers(folder: Path) -> dict[str, list[list[str]]]:
    frame = load([folder])
    judged = [[verdict.claim, verdict.word, verdict.sentence] for verdict in verdicts(frame)]
    return {"verdicts": judged, "scores": tables.scores(frame).rows, "knowledge": tables.knowledge(frame).rows}


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
