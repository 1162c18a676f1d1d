"""The short demo: each claim is told once, in one plain sentence, when the experiment that decides it is done."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic

from needlework.analysis.reader import load
from needlework.analysis.verdicts import RULES, verdicts
from needlework.cli import demo
from needlework.experiments.models import CachedModels
from needlework.experiments.plan import get
from needlework.reports.page import report as write_report


@pytest.mark.slow
def test_the_steps_add_one_experiment_each_and_every_claim_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = synthetic.write(tmp_path / "run", ("tiny-jamba", "tiny-griffin"), per_cell=1)
    asked: list[tuple[list[str], str]] = []
    reports: list[int] = []

    def fake_run(plan: Any, out: Path, *, doctor: str, **_: Any) -> Any:
        asked.append(([experiment.name for experiment in plan.experiments], doctor))
        return SimpleNamespace(report=lambda: reports.append(len(asked)) or out / "report.html", sound=True)

    @contextmanager
    def no_tracker(plan: Any, out: Path, source: Any) -> Iterator[Any]:
        yield SimpleNamespace(phase=lambda *_, **__: nullcontext())

    played: list[Path] = []
    monkeypatch.setattr(demo, "run", fake_run)
    monkeypatch.setattr(demo, "_tracker", no_tracker)
    monkeypatch.setattr(demo, "write_playground", lambda subject, out: played.append(out) or out / "play.html")
    monkeypatch.setattr(CachedModels, "subject", lambda self, name: name)
    demo.run_demo("demo", out)
    names = [experiment.name for experiment in get("demo").experiments]
    assert [step for step, _ in asked] == [names[: i + 1] for i in range(len(names))]
    # the models are examined once a claim is told
    assert [doctor for _, doctor in asked] == ["off", *["quick"] * (len(names) - 1)], (
        "the models are examined once claims are told"
    )
    assert reports == [1, len(names)], "after the first decided claim, and at the end"
    assert played == [out]
    said = capsys.readouterr().out
    for rule in RULES:
        assert said.count(f"{rule.title}: ") <= 1
    assert "Attention does the retrieving: " in said
    assert "needlework ask smollm2-135m" in said


@pytest.mark.slow
def test_a_claim_is_one_sentence_with_the_number_of_every_model(
    tmp_path: Path,
) -> None:
    frame = load([synthetic.write(tmp_path / "run", ("tiny-jamba", "tiny-griffin"), per_cell=1)])
    outcomes: dict[str, str] = {}
    texts = demo.tell_decided(frame, outcomes, last=True)
    told = {claim: " ".join(text.split()) for claim, text in zip(outcomes, texts, strict=True)}
    assert told.keys() >= {"segregation", "few_heads", "exposure", "memory"}
    for claim, text in told.items():
        assert text.endswith("."), claim
        assert "tiny-jamba" in text
        assert "; n = " in text, "the number of samples, behind the interval"
    assert "with as many random heads" in told["few_heads"]
    table = demo.demo_table(frame)
    assert list(table.columns)[:3] == ["model", "untouched", "no heads"]
    assert [row[0] for row in table.texts()] == list(frame.models)


@pytest.mark.slow
def test_a_claim_is_told_when_it_is_decided_and_again_if_the_outcome_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = load([synthetic.write(tmp_path / "run", ("tiny-jamba", "tiny-griffin"), per_cell=1)])
    (jamba, griffin) = [one for one in verdicts(frame) if one.claim == "exposure"]
    now: list[Any] = []
    monkeypatch.setattr(demo, "verdicts", lambda frame: now)
    told: dict[str, str] = {}

    def titles(*words: str, last: bool = False) -> list[str]:
        now[:] = [replace(one, word=word) for one, word in zip((jamba, griffin), words, strict=True)]
        return [text.partition("\n")[0] for text in demo.tell_decided(frame, told, last)]

    assert titles("supported", "inconclusive") == [], "not decided for both models"
    assert titles("supported", "supported") == [f"{jamba.title}: supported (tiny-jamba, tiny-griffin)."]
    assert titles("supported", "supported", last=True) == []
    assert titles("supported", "inconclusive") == []
    assert titles("supported", "inconclusive", last=True) == [
        f"{jamba.title}: supported (tiny-jamba); inconclusive (tiny-griffin)."
    ]


@pytest.mark.slow
def test_report_and_playground_link_to_each_other(tmp_path: Path) -> None:
    out = synthetic.write(tmp_path / "run", ("tiny-griffin",), per_cell=1)
    played = demo.write_playground(CachedModels().subject("tiny-griffin"), out)
    report = write_report(out, pictures=False)
    assert f'href="{played.name}"' in report.read_text(encoding="utf-8")
    (data,) = re.findall(r'id="play-data">(.*?)</script>', played.read_text(encoding="utf-8"))
    assert json.loads(data)["report"] == report.name


def test_every_rule_has_a_sentence() -> None:
    assert demo.SENTENCES.keys() == {rule.claim for rule in RULES}
