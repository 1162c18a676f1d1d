"""What goes out of a store is what is in it; and what a plan is said to run is what it runs."""

from __future__ import annotations

import csv
import json
import resource
import sqlite3
import sys
from contextlib import closing
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any

import fakes
import psutil
import pytest

from needlework.errors import NeedleworkError
from needlework.experiments.estimate import describe
from needlework.experiments.plan import load
from needlework.files import file_name
from needlework.results import Observation, Row, Store
from needlework.results.export import export


@pytest.fixture
def finished(plan_file: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    assert fakes.run_fakes(plan_file, out).sound
    return out


def test_csv_holds_every_trial_and_score(finished: Path) -> None:
    trials, seen = export(finished, "csv")
    with trials.open(newline="") as file:
        rows = list(csv.DictReader(file))
    stored = {(t.experiment, t.task, t.id): t for t in Store(finished).rows()}
    assert len(rows) == len(stored) == 146
    for row in rows:
        trial = stored[row["experiment"], row["task"], row["id"]]
        assert float(row["score_correct"]) == trial.scores["correct"]
        assert json.loads(row["spans"]) == trial.spans
        assert row["output"] == trial.output
    with seen.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4


def test_cells_of_csv_are_no_formulas(finished: Path) -> None:
    """A spreadsheet runs what begins with = + - or @; model answers may. Columns of numbers stay numbers."""
    outputs = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "plain - text", "5"]
    store = Store(finished)
    rows = [replace(row, output=text) for row, text in zip(store.rows("1 ORDER BY id"), outputs, strict=False)]
    store.add([replace(rows[0], logprobs=(-1.5,), scores={"correct": -1.0}), *rows[1:]])
    store.close()
    trials, _ = export(finished, "csv")
    with trials.open(newline="") as file:
        found = {row["id"]: row for row in csv.DictReader(file)}
    shown = [found[row.id]["output"] for row in rows]
    assert shown == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\t=1", "plain - text", "5"]
    assert not any(cell.startswith(("=", "+", "@")) for row in found.values() for cell in row.values())
    assert float(found[rows[0].id]["score_correct"]) == -1.0


def test_json_reads_back_as_the_store(finished: Path) -> None:
    (path,) = export(finished, "json")
    content = json.loads(path.read_text())
    store = Store(finished)
    assert [Row(**row) for row in content["trials"]] == list(store.rows("1 ORDER BY experiment, model, task, id"))
    assert [Observation(**row) for row in content["observations"]] == store.observations()
    assert content["schema_version"] == 2
    assert content["meta"]["plan"]["name"] == "test"


def test_lm_eval_files(finished: Path) -> None:
    paths = export(finished, "lm-eval")
    found = [json.loads(p.read_text()) for p in paths if p.name == "results.json"]
    plain = next(r for r in found if r["config"]["model_args"]["intervention"] == "none")
    trials = {t.id: t for t in Store(finished).rows("intervention = 'none' AND task = 'fake'")}
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


@pytest.mark.slow
@pytest.mark.parametrize("to", ["csv", "json", "parquet", "lm-eval"])
def test_an_export_that_cannot_be_written_leaves_what_was_there(finished: Path, to: str) -> None:
    """Files may not grow beyond a size here, so that writing breaks off in the middle, as on a full disk."""
    pytest.importorskip("pyarrow")

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (finished / "export").rglob("*") if path.is_file()}

    export(finished, to)
    before = content()
    store = Store(finished)
    store.db.execute("UPDATE trials SET output = hex(randomblob(15000))")
    store.close()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(NeedleworkError, match="cannot write the export"):
            export(finished, to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after = content()
    assert after.keys() == before.keys(), "no half file is left"
    assert after == before
    export(finished, to)
    assert content() != before


def test_a_parquet_file_of_observations_is_whole_or_not_there(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")

    def half(table: Any, path: Path) -> None:
        Path(path).write_bytes(b"PAR1 and no more")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", half)
    with pytest.raises(NeedleworkError, match="No space left"):
        export(finished, "parquet")
    assert [path.name for path in (finished / "export").iterdir()] == ["trials.parquet"]


NAMES = ["..", ".", "../x", "x", "a/b", "a_b", "a b", "/etc/passwd", "", "~", ".hidden", "none", "x" * 300, "日本"]


def test_names_stay_in_their_folder_and_apart(finished: Path) -> None:
    made = [file_name(name) for name in NAMES]
    assert len(set(made)) == len(NAMES)
    for name in made:
        assert Path(name).name == name
        assert name not in ("", ".", "..")
        assert len(name.encode()) < 200
    assert file_name("tiny-griffin_2.0") == "tiny-griffin_2.0", "a name that is one stays"
    store = Store(finished)
    row = next(store.rows())
    store.add([replace(row, model=name, task=name, scores={"correct": float(i)}) for i, name in enumerate(NAMES)])
    store.close()
    top = finished / "elsewhere"
    before = {path for path in finished.parent.rglob("*") if top not in path.parents}
    paths = export(finished, "lm-eval", top)
    assert all((top / "lm-eval").resolve() in path.resolve().parents for path in paths)
    assert {path for path in finished.parent.rglob("*") if top not in path.parents} - before == {top}
    results = [json.loads(path.read_text()) for path in paths if path.name == "results.json"]
    exact = {r["config"]["model_args"]["pretrained"]: r["results"] for r in results}
    assert [exact[name][name]["acc,none"] for name in NAMES] == list(range(len(NAMES)))
    assert len(paths) == len({path.resolve() for path in paths})


def test_lm_eval_files_pool_no_unlike_trials(plan_file: Path, tmp_path: Path) -> None:
    """Two experiments with a task of one name: other options or another boundary are other results."""
    more = "  {name}:\n    tasks: [{{kind: fake, samples: 6{options}}}]\n    interventions: none\n{also}"
    text = fakes.PLAN + more.format(name="even", options=", scorer: even", also="")
    plan_file.write_text(text + more.format(name="early", options="", also="    boundary: prefill\n"))
    out = tmp_path / "out"
    assert fakes.run_fakes(plan_file, out).sound
    results = [json.loads(p.read_text()) for p in export(out, "lm-eval") if p.name == "results.json"]
    plain = next(r for r in results if r["config"]["model_args"]["intervention"] == "none")
    counts = {task: n["original"] for task, n in plain["n-samples"].items()}
    assert counts == {"fake_choice": 4, "look.fake": 6, "sweep.fake": 12, "even.fake": 6, "early.fake": 6}
    rows = {t.experiment: [] for t in Store(out).rows()}
    for t in Store(out).rows("intervention = 'none' AND task = 'fake'"):
        rows[t.experiment].append(t.scores["correct"])
    for name in ("even", "early", "look", "sweep"):
        assert plain["results"][f"{name}.fake"]["acc,none"] == pytest.approx(sum(rows[name]) / len(rows[name]))


def test_what_the_plan_no_longer_asks_for_is_exported_but_in_no_mean(plan_file: Path, finished: Path) -> None:
    plan_file.write_text(fakes.PLAN.replace("samples: 6", "samples: 4"))
    assert fakes.run_fakes(plan_file, finished).sound
    with export(finished, "csv")[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 146
    assert {asked: sum(row["asked"] == asked for row in rows) for asked in "01"} == {"0": 46, "1": 100}
    results = [json.loads(p.read_text()) for p in export(finished, "lm-eval") if p.name == "results.json"]
    plain = next(r for r in results if r["config"]["model_args"]["intervention"] == "none")
    assert plain["n-samples"]["fake"]["original"] == 8


def test_wrong_exports_are_told(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(NeedleworkError, match="did you mean 'csv'"):
        export(finished, "csw")
    with pytest.raises(NeedleworkError, match="holds no run"):
        export(tmp_path / "nowhere", "csv")
    assert not (tmp_path / "nowhere").exists()


def test_every_column_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    for cls in (Row, Observation):
        for column in fields(cls):
            assert f"`{column.name}`" in text, f"docs/store.md does not tell of {cls.__name__}.{column.name}"
    assert "store version 2" in text.lower()


def test_no_more_memory_is_told_than_the_engine_takes(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> int:
        return describe(load(plan_file, make_task=fakes.make_task), fakes.FakeModels()).memory_bytes

    free = told()
    monkeypatch.setattr("needlework.experiments.estimate.default_limit", lambda device: 7)
    weights = told() - 7
    assert 0 <= weights < free - 7


def test_the_description_is_what_runs(plan_file: Path, finished: Path) -> None:
    told = describe(load(plan_file, make_task=fakes.make_task), fakes.FakeModels())
    assert sum(one.trials for one in told.totals) == len(Store(finished).done())
    # prompts: 6 x 2 seeds to generate; prefill: nothing (none, decode only, k=H) or k=0..3 in both; 4 x 2 to score
    parts = {part.experiment: part.prefills for part in told.parts}
    assert parts == {"sweep": 12 * 5, "choice": 4 * 2, "look": 6}
    assert sum(one.prefills for one in told.totals) == 12 * 5 + 4 * 2
    assert "in all 146 trials, 68 prefills" in str(told.output()[-1])
    assert told.seconds > 0
    assert 0 < told.memory_bytes < psutil.virtual_memory().total


@pytest.mark.slow
@pytest.mark.parametrize(
    "column", [f for f in fields(Row) if (f.default, f.default_factory) != (MISSING, MISSING)], ids=lambda f: f.name
)
def test_an_older_store_gets_a_missing_column_with_its_default(finished: Path, column: Field[Any]) -> None:
    with closing(sqlite3.connect(finished / "run.sqlite")) as db:
        db.execute(f"ALTER TABLE trials DROP COLUMN {column.name}")
    default = column.default if column.default is not MISSING else column.default_factory()  # type: ignore[misc]
    with closing(Store(finished)) as store:
        read = [getattr(row, column.name) for row in store.rows()]
    assert read
    assert {json.dumps(value) for value in read} == {json.dumps(default)}
