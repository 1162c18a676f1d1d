"""`nw.run` and what it gives back: rows as a DataFrame, verdicts, the report."""

from __future__ import annotations

import csv
from pathlib import Path

import fakes
import pytest

import needlework as nw
from needlework.analysis.verdicts import RULES, Verdict
from needlework.experiments.plan import load
from needlework.results.export import export
from needlework.stats import wilson

PLAN = """
name: small
models: [tiny-griffin]
experiments:
  needles:
    tasks: [{kind: niah, lengths: [64], depths: [0, 100], samples: 2}]
    interventions: [none, ablate_attention()]
  facts:
    tasks: [{kind: cloze_choice, per_subject: 1}]
    interventions: none
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> nw.Result:
    folder = tmp_path_factory.mktemp("result")
    (folder / "plan.yaml").write_text(PLAN)
    return nw.run(folder / "plan.yaml", folder / "out", progress=False)


@pytest.mark.slow
def test_rows_are_those_of_the_csv_export_with_values_in_place_of_text(result: nw.Result, tmp_path: Path) -> None:
    rows = result.rows()
    with export(result.directory, "csv", tmp_path)[0].open() as file:
        exported = list(csv.DictReader(file))
    assert list(rows.columns) == list(exported[0])
    assert [row["id"] for row in exported] == list(rows["id"])
    needles = rows[rows.experiment == "needles"].groupby("intervention").score_correct
    assert needles.mean().to_dict() == {"none": 1.0, "ablate_attention()": 0.0}
    assert needles.size().to_dict() == {"none": 4, "ablate_attention()": 4}
    assert set(rows[rows.experiment == "needles"].facts.map(lambda facts: facts["relation"])) == {"code"}


def test_rows_that_the_plan_no_longer_asks_for_are_left_out(plan_file: Path, tmp_path: Path) -> None:
    every = fakes.run_fakes(plan_file, tmp_path / "out").rows()
    plan_file.write_text(fakes.PLAN.replace("seeds: 0..1", "seeds: 0"))
    fewer = fakes.run_fakes(plan_file, tmp_path / "out").rows()
    assert set(every.seed) == {0, 1}
    assert set(fewer.seed) == {0}
    assert len(fewer) < len(every)


def test_a_frame_has_the_mean_of_a_score_and_its_interval(result: nw.Result) -> None:
    frame = result.frame()
    needles = frame[frame["task"].str.startswith("niah")].set_index("intervention")
    assert needles["correct"].to_dict() == {"none": 1.0, "ablate_attention()": 0.0}
    assert needles["n"].tolist() == [4, 4]
    assert needles.loc["none", ["low", "high"]].tolist() == [wilson(4, 4).low, 1.0]
    rows = result.rows()
    facts = frame[frame["mode"] == "choices"]
    assert facts["correct"].item() == rows[rows.experiment == "facts"].score_correct.mean()
    assert facts["n"].item() == (rows.experiment == "facts").sum()
    graded = rows[rows.intervention == "none"].score_graded.dropna()
    assert result.frame("graded").set_index("intervention")["graded"]["none"] == graded.mean()


def test_a_plot_and_a_table_show_it(result: nw.Result) -> None:
    ax = result.plot()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert [label.partition(": ")[2] for label in labels] == ["none", "none", "ablate_attention()"]
    assert [label[:4] for label in labels] == ["cloz", "niah", "niah"]
    assert ax._repr_png_().startswith(b"\x89PNG")
    assert "<td style" in result._repr_html_()
    with pytest.raises(nw.NeedleworkError, match="no trial has the score 'nothing'"):
        result.plot(score="nothing")


@pytest.mark.slow
def test_verdicts_and_report_come_with_it(result: nw.Result, tmp_path: Path) -> None:
    verdicts = result.verdicts()
    assert [verdict.claim for verdict in verdicts] == [rule.claim for rule in RULES]
    assert all(isinstance(verdict, Verdict) and verdict.model == "tiny-griffin" for verdict in verdicts)
    assert result.report() == result.directory / "report.html" == nw.report(result.directory)
    assert result.report(tmp_path / "a") == tmp_path / "a" / "report.html"
    assert nw.report([result.directory], str(tmp_path / "b")).is_file()
    assert (tmp_path / "a" / "report.html").read_text() == (tmp_path / "b" / "report.html").read_text()


def test_the_same_call_goes_on_and_a_loaded_plan_will_do(
    result: nw.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("needlework.subject.load", lambda *_, **__: pytest.fail("loaded, though nothing is left to ask"))
    plan = result.directory.parent / "plan.yaml"
    assert nw.run(str(plan), str(result.directory), progress=False) == result == nw.Result(result.directory, True)
    assert nw.run(load(plan), result.directory, progress=False) == result
    with pytest.raises(nw.NeedleworkError, match="loaded already"):
        nw.run(load(plan), tmp_path / "out", fast=True)
    with pytest.raises(nw.NeedleworkError, match="no shipped plan is called 'head-sparsificaton'; did you mean"):
        nw.run("head-sparsificaton", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_shipped_plan_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    stop = lambda plan, _: asked.append(plan) or pytest.skip("as it should")  # noqa: E731
    monkeypatch.setattr("needlework.experiments.run.expand_all", stop)
    with pytest.raises(pytest.skip.Exception):
        nw.run("02", tmp_path / "out", models="mine=tiny-griffin", fast=True)
    (plan,) = asked
    assert (plan.path.stem, plan.fast, list(plan.models)) == ("02-head-sparsification", True, ["mine"])
