"""A plan that was edited: nothing of the old one is counted as the new one's, and no answer is asked for twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from test_rescore import SMALL, ToyModels
from test_run import go, table

from needlework.experiments import run
from needlework.experiments.models import Observed
from needlework.results import LM_EVAL, Store

pytestmark = pytest.mark.usefixtures("small_chunks")


def asked(out: Path) -> list[Any]:
    """What a report counts."""
    return [row for row in table(out) if getattr(row, "asked", 1)]


def unasked(out: Path) -> list[Any]:
    return [row for row in table(out) if not getattr(row, "asked", 1)]


def test_other_options_that_only_change_scores_change_all_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(against: str) -> Path:
        task = {"kind": "niah_choice", **SMALL["niah_choice"], "samples": 6, "against": against}
        content = {"models": ["alpha"], "experiments": {"choice": {"tasks": [task], "interventions": ["none"]}}}
        (tmp_path / "plan.yaml").write_text(json.dumps(content))
        return tmp_path / "plan.yaml"

    for against, out in (("all", "out"), ("context", "fresh")):
        assert run.run(plan(against), tmp_path / out, source=ToyModels(), progress=False).sound
    before = table(tmp_path / "out")
    models = ToyModels()
    capsys.readouterr()
    assert run.run(plan("context"), tmp_path / "out", source=models, progress=False).sound
    assert "18 rows were scored anew" in capsys.readouterr().err
    assert models.loaded == [], "the answers were there"
    assert table(tmp_path / "out") == table(tmp_path / "fresh")
    assert [row.scores["correct"] for row in before] != [row.scores["correct"] for row in table(tmp_path / "out")]
    assert run.run(plan("context"), tmp_path / "out", source=ToyModels(), progress=False).sound
    assert "scored anew" not in capsys.readouterr().err


def test_samples_that_the_plan_no_longer_asks_for_are_kept_but_not_counted(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "out", fakes.PLAN.replace("{kind: fake, samples: 6}", "{kind: fake, samples: 6, length: 20}")
    go(plan_file, out)
    first = table(out)
    plan_file.write_text(other)
    capsys.readouterr()
    go(plan_file, out)
    assert "138 rows in" in capsys.readouterr().err
    go(plan_file, tmp_path / "fresh")
    assert asked(out) == table(tmp_path / "fresh")
    assert [replace(row, asked=1) for row in unasked(out)] == [r for r in first if getattr(r, "kind", "") == "fake"]
    plan_file.write_text(fakes.PLAN)
    models = go(plan_file, out)
    assert models.actor.asked == [], "old answers are answers again"
    assert asked(out) == first


def test_an_experiment_that_is_gone_counts_no_more(plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "out")
    plan_file.write_text(fakes.PLAN[: fakes.PLAN.index("  choice:")])
    assert go(plan_file, tmp_path / "out").loaded == []
    assert {row.experiment for row in asked(tmp_path / "out")} == {"sweep"}
    assert len(unasked(tmp_path / "out")) == 8 + 6
    go(plan_file, tmp_path / "fresh")
    assert asked(tmp_path / "out") == table(tmp_path / "fresh")


def test_an_answer_is_scored_by_each_experiment_in_its_own_way(plan_file: Path, tmp_path: Path) -> None:
    """At once, and when the second one comes later and takes the first one's answers."""
    added = fakes.PLAN + "  other:\n    tasks: [{kind: fake, samples: 6, scorer: even}]\n    interventions: none\n"
    go(plan_file, tmp_path / "out")
    plan_file.write_text(added)
    assert go(plan_file, tmp_path / "out").loaded == []
    go(plan_file, tmp_path / "whole")
    assert table(tmp_path / "out") == table(tmp_path / "whole")
    scores: dict[str, dict[str, float]] = {}
    for row in Store(tmp_path / "out").rows("intervention = 'none' AND task = 'fake' AND seed = 0"):
        scores.setdefault(row.experiment, {})[row.id] = row.scores["correct"]
    assert {i: 1 - score for i, score in scores["look"].items()} == scores["other"]
    assert len(scores["other"]) == 6


def test_a_name_for_another_task_takes_the_answers_of_any_name(plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "out")
    plan_file.write_text(fakes.PLAN.replace("{kind: fake, samples: 6}", "{kind: fake, name: renamed, samples: 6}"))
    models = go(plan_file, tmp_path / "out")
    assert models.actor.asked == []
    go(plan_file, tmp_path / "fresh")
    assert asked(tmp_path / "out") == table(tmp_path / "fresh")


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        ("interventions: none\n", "interventions: none\n    limit: 3\n"),
        ("{kind: fake, samples: 6}", "{kind: fake, samples: 6, length: 20}"),
        ("interventions: none\n", "interventions: none\n    seeds: [1]\n"),
        ("interventions: none\n", "interventions: none\n    boundary: prefill\n"),
    ],
)
def test_recordings_of_other_samples_are_made_again(plan_file: Path, tmp_path: Path, edit: tuple[str, str]) -> None:
    class Telling(fakes.FakeActor):
        def watch(self, requests: Any, span: str) -> Observed:
            mass = fakes._number(sorted(request.prompt for request in requests), requests[0].boundary)
            return Observed([fakes.FakeSeen(0, head, mass, 1.0, 0.0) for head in range(4)])

    def observations(out: Path) -> list[Any]:
        go(plan_file, out, fakes.FakeModels(Telling()))
        return Store(out).observations()

    start = fakes.PLAN.index("  look:")
    before = observations(tmp_path / "out")
    plan_file.write_text(fakes.PLAN[:start] + fakes.PLAN[start:].replace(*edit))
    after = observations(tmp_path / "out")
    assert after == observations(tmp_path / "fresh")
    assert len(after) == 4
    assert after != before
    plan_file.write_text(fakes.PLAN.replace("    observe: true\n", ""))
    assert observations(tmp_path / "out") == []


def test_rows_of_lm_eval_are_none_of_a_plans_business(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(plan_file, out)
    store = Store(out)
    row = next(store.rows())
    theirs = replace(row, experiment="ability", task="mini", kind=LM_EVAL, scoring="", scores={"acc": 1.0}, finish="failed")
    store.add([theirs])
    store.close()
    go(plan_file, out, retry_failed=True)
    assert next(Store(out).rows("experiment = 'ability'")) == theirs
