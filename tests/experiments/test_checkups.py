"""A run records what the doctor found of its models: once, by which version, and the report shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest

import needlework as nw
from needlework.analysis.reader import load
from needlework.checks import Check, Checkup
from needlework.experiments import provenance
from needlework.reports.page import report
from needlework.reports.tables import models
from needlework.results import Store

GOOD = Check("causal", "changing later tokens changes nothing before them", "pass", "they do not", 0.0, 1e-3)
FOUND = Checkup("FakeForCausalLM", (GOOD,), {"needlework": "0.9"}, "2026-01-02T03:04:05+00:00")
ILL = replace(FOUND, checks=(GOOD, replace(GOOD, law="window", outcome="fail", why="layer 3 shows more than 8 keys")))


class Examined(fakes.FakeActor):
    """A fake model that a doctor can look at."""

    found = FOUND
    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.asked_quick: list[bool] = []

    def checkup(self, quick: bool) -> Checkup:
        self.asked_quick.append(quick)
        return replace(self.found, quick=quick)

    def versions(self) -> dict[str, str]:
        return {"needlework": "0.9", "device": self.device}


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Examined:
    monkeypatch.setattr(provenance, "_EXAMINED", {})
    return Examined()


def run(plan: Path, out: Path, actor: Examined, **options: Any) -> nw.Result:
    return fakes.run_fakes(plan, out, fakes.FakeModels(actor), **options)


def test_a_run_records_the_checkup_with_model_version_and_time(plan_file: Path, tmp_path: Path, actor: Examined) -> None:
    result = run(plan_file, tmp_path / "out", actor)
    assert actor.asked_quick == [True]
    found = result.checkups()["alpha"]
    assert found.checks == FOUND.checks
    assert found.at == FOUND.at
    assert found.versions["needlework"] == "0.9"
    assert found.identity["weights"] == "w" * 32 + "alpha"
    assert found.identity["device"] == "cpu"


def test_a_model_is_examined_once_until_something_changes(plan_file: Path, tmp_path: Path, actor: Examined) -> None:
    plan = fakes.PLAN
    run(plan_file, tmp_path / "out", actor)
    for number, options in enumerate(({}, {"doctor": "full"}, {"doctor": "full"}, {"doctor": "quick"}, {"doctor": "off"})):
        plan_file.write_text(plan.replace("samples: 6", f"samples: {7 + number}"))  # there is more to ask
        run(plan_file, tmp_path / "out", actor, **options)
    assert actor.asked_quick == [True, False]  # a full one also does where a quick one is asked for
    provenance._EXAMINED.clear()
    actor.device = "cuda"
    plan_file.write_text(plan.replace("samples: 6", "samples: 12"))
    run(plan_file, tmp_path / "out", actor)
    assert actor.asked_quick == [True, False, True]


def test_one_process_examines_a_model_once_for_all_runs(plan_file: Path, tmp_path: Path, actor: Examined) -> None:
    for name in ("a", "b"):
        assert run(plan_file, tmp_path / name, actor).checkups()["alpha"].sound
    assert actor.asked_quick == [True]


def test_off_is_off_and_words_that_are_none_are_refused(plan_file: Path, tmp_path: Path, actor: Examined) -> None:
    result = run(plan_file, tmp_path / "out", actor, doctor="off")
    assert result.checkups() == {}
    assert actor.asked_quick == []
    with pytest.raises(nw.NeedleworkError, match="choose from quick, full, off"):
        run(plan_file, tmp_path / "new", actor, doctor="thorough")
    assert not (tmp_path / "new").exists()


def test_a_law_that_fails_is_said_and_stands_in_the_report(
    plan_file: Path, tmp_path: Path, actor: Examined, capsys: pytest.CaptureFixture[str]
) -> None:
    actor.found = ILL
    out = tmp_path / "out"
    result = run(plan_file, out, actor)
    assert "layer 3 shows more than 8 keys" in capsys.readouterr().err
    assert len(list(Store(out).rows())) == 146  # it goes on
    assert not result.checkups()["alpha"].sound
    frame = load([out])
    assert any("alpha: the doctor found that laws fail (window)" in warning for warning in frame.warnings)
    shown = models(frame)
    header, rows = shown.columns, shown.rows
    assert rows[0][header.index("doctor")] == "FAILED: window (quick, 2026-01-02, needlework 0.9)"
    page = report([out], tmp_path / "report", pictures=False).read_text()
    assert "FAILED: window (quick, 2026-01-02, needlework 0.9)" in page


def test_the_report_shows_a_sound_checkup_and_one_that_is_missing(plan_file: Path, tmp_path: Path, actor: Examined) -> None:
    run(plan_file, tmp_path / "with", actor)
    run(plan_file, tmp_path / "without", actor, doctor="off")
    for name, words in (("with", "1 laws hold (quick, 2026-01-02, needlework 0.9)"), ("without", "not asked")):
        shown = models(load([tmp_path / name]))
        header, rows = shown.columns, shown.rows
        assert rows[0][header.index("doctor")] == words


@pytest.mark.slow
def test_a_real_model_is_examined(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "models: [tiny-griffin]\nexperiments:\n  one: {tasks: [{kind: niah, lengths: [64], depths: [50]}], interventions: none}\n"
    )
    found = nw.run(plan, tmp_path / "out", progress=False).checkups()["tiny-griffin"]
    assert found.sound
    assert found.quick
    assert found["spans"].outcome == "pass"
    assert found.versions["dtype"] == "float32"
