"""The short demo: each claim is told once, in one plain sentence, when the experiment that decides it is done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic

from needlework.analysis.reader import load
from needlework.analysis.verdicts import RULES, verdicts
from needlework.cli import demo
from needlework.experiments.plan import get


def test_the_steps_add_one_experiment_each_and_every_claim_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = synthetic.write(tmp_path / "run", ("tiny-jamba", "tiny-griffin"), per_cell=1)
    asked: list[tuple[list[str], str]] = []
    reports: list[int] = []

    def fake_run(plan: Any, out: Path, *, doctor: str, **_: Any) -> Any:
        asked.append(([experiment.name for experiment in plan.experiments], doctor))
        return SimpleNamespace(report=lambda: reports.append(len(asked)) or out / "report.html", sound=True)

    monkeypatch.setattr(demo, "run", fake_run)
    demo.run_demo("demo", out)
    names = [experiment.name for experiment in get("demo").experiments]
    assert [step for step, _ in asked] == [names[: i + 1] for i in range(len(names))]
    # the models are examined once a claim is told
    assert [doctor for _, doctor in asked] == ["off", *["quick"] * (len(names) - 1)], (
        "the models are examined once claims are told"
    )
    assert reports == [1, len(names)], "after the first decided claim, and at the end"
    said = capsys.readouterr().out
    for rule in RULES:
        assert said.count(f"{rule.title}: ") <= 1
    assert "Attention does the retrieving: " in said
    assert "needlework ask smollm2-135m" in said


def test_a_claim_is_one_sentence_with_the_number_of_every_model(
    tmp_path: Path,
) -> None:
    frame = load([synthetic.write(tmp_path / "run", ("tiny-jamba", "tiny-griffin"), per_cell=1)])
    told = {claim[0].claim: " ".join(demo.claim_text(frame, claim).split()) for claim in demo.decided(verdicts(frame), set())}
    assert told.keys() >= {"segregation", "few_heads", "exposure", "memory"}
    for claim, text in told.items():
        assert text.endswith("."), claim
        assert "tiny-jamba" in text
        assert "; n = " in text, "the number of samples, behind the interval"
    assert "with as many random heads" in told["few_heads"]
    table = demo.demo_table(frame)
    assert list(table.columns)[:3] == ["model", "untouched", "no heads"]
    assert [row[0] for row in table.texts()] == list(frame.models)


def test_every_rule_has_a_sentence() -> None:
    assert demo.SENTENCES.keys() == {rule.claim for rule in RULES}
