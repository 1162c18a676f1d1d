"""What goes out of a store is what is in it; and what a plan is said to run is what it runs."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import fields
from pathlib import Path

import fakes
import psutil
import pytest

from needlework.errors import NeedleworkError
from needlework.experiments import run
from needlework.experiments.describe import describe
from needlework.experiments.export import export
from needlework.experiments.plan import load
from needlework.store import Observation, Store, Trial


@pytest.fixture
def finished(plan_file: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    assert run.run_plan(plan_file, out, source=fakes.FakeModels(), make_task=fakes.make_task, progress=False) == 0
    return out


def test_csv_holds_every_trial_and_score(finished: Path) -> None:
    trials, seen = export(finished, "csv")
    with trials.open(newline="") as file:
        rows = list(csv.DictReader(file))
    stored = {(t.experiment, t.task, t.id): t for t in Store(finished).trials()}
    assert len(rows) == len(stored) == 146
    for row in rows:
        trial = stored[row["experiment"], row["task"], row["id"]]
        assert float(row["score_correct"]) == trial.scores["correct"]
        assert json.loads(row["spans"]) == trial.spans
        assert row["output"] == trial.output
    with seen.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4


def test_json_reads_back_as_the_store(finished: Path) -> None:
    (path,) = export(finished, "json")
    content = json.loads(path.read_text())
    store = Store(finished)
    assert [Trial(**row) for row in content["trials"]] == list(store.trials("1 ORDER BY experiment, model, task, id"))
    assert [Observation(**row) for row in content["observations"]] == store.observations()
    assert content["schema_version"] == 2
    assert content["meta"]["plan"]["name"] == "test"


def test_lm_eval_files(finished: Path) -> None:
    paths = export(finished, "lm-eval")
    found = [json.loads(p.read_text()) for p in paths if p.name == "results.json"]
    plain = next(r for r in found if r["config"]["model_args"]["intervention"] == "none")
    trials = {t.id: t for t in Store(finished).trials("intervention = 'none' AND task = 'fake'")}
    assert plain["n-samples"]["fake"] == {"original": 12, "effective": 12}, "a trial of two experiments counts once"
    assert plain["results"]["fake"]["acc,none"] == pytest.approx(sum(t.scores["correct"] for t in trials.values()) / 12)
    assert "acc_stderr,none" in plain["results"]["fake"]
    samples = next(p for p in paths if p.name == "samples_fake.jsonl")
    line = json.loads(samples.read_text().splitlines()[0])
    assert {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "acc"} <= line.keys()


def test_parquet(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NeedleworkError, match=r"needlework\[parquet\]"):
        export(finished, "parquet")
    monkeypatch.undo()
    parquet = pytest.importorskip("pyarrow.parquet")
    trials, seen = export(finished, "parquet")
    assert parquet.read_table(trials).num_rows == 146
    assert parquet.read_table(seen).num_rows == 4


def test_wrong_exports_are_told(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(NeedleworkError, match="did you mean 'csv'"):
        export(finished, "csw")
    with pytest.raises(NeedleworkError, match="holds no run"):
        export(tmp_path / "nowhere", "csv")
    assert not (tmp_path / "nowhere").exists()


def test_every_column_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    for cls in (Trial, Observation):
        for column in fields(cls):
            assert f"`{column.name}`" in text, f"docs/store.md does not tell of {cls.__name__}.{column.name}"
    assert "store version 2" in text.lower()


def test_no_more_memory_is_told_than_the_engine_takes(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> int:
        return describe(load(plan_file, make_task=fakes.make_task), fakes.FakeModels()).memory_bytes

    free = told()
    monkeypatch.setattr("needlework.experiments.describe.default_limit", lambda device: 7)
    weights = told() - 7
    assert 0 <= weights < free - 7


def test_the_description_is_what_runs(plan_file: Path, finished: Path) -> None:
    told = describe(load(plan_file, make_task=fakes.make_task), fakes.FakeModels())
    assert told.trials == len(Store(finished).done())
    # prompts: 6 x 2 seeds to generate; prefill: nothing (none, decode only, k=H) or k=0..3 in both; 4 x 2 to score
    parts = {part.experiment: part.prefills for part in told.parts}
    assert parts == {"sweep": 12 * 5, "choice": 4 * 2, "look": 6}
    assert told.prefills == 12 * 5 + 4 * 2
    assert "in all 146 trials, 68 prefills" in told.text()
    assert told.seconds > 0
    assert 0 < told.memory_bytes < psutil.virtual_memory().total
