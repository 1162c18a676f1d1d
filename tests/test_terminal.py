"""What comes from models and files is shown, not obeyed: no control character reaches a terminal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import needlework as nw
from needlework import zoo
from needlework.cli import app
from needlework.inspection import answers_table
from needlework.receipts import Receipt
from needlework.requests import Answer
from needlework.terminal import plain, say

EVIL = "a\x1b]0;owned\x07b\x1b[2Jc\rd\x9be"


def test_controls_are_spelled_out_and_text_stays() -> None:
    assert plain(EVIL) == r"a\x1b]0;owned\x07b\x1b[2Jc\rd\x9be"
    assert plain("\u202ex\u2066\ud800") == r"\u202ex\u2066\ud800"
    assert plain(plain(EVIL)) == plain(EVIL)
    for text in ("two\nlines\tand a tab", "Ünïcödé 日本語 🙂 “quotes”", r"a \x1b that was typed"):
        assert plain(text) == text


def test_a_line_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"1 trial failed, for instance: {EVIL} [bold]x[/bold]")
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert r"\x1b[2J" in shown
    assert "[bold]x[/bold]" in shown


@pytest.mark.parametrize("field", ["text", "error"])
def test_answers(field: str) -> None:
    answer = Answer(tokens=(1,), logprobs=(-1.0,), margins=(1.0,), finish="length", receipt=Receipt(), **{field: EVIL})
    console = Console(width=200, force_terminal=False)
    with console.capture() as captured:
        console.print(answers_table([nw.NONE], [answer]))
    assert "\x1b" not in captured.get()
    assert "\r" not in captured.get()
    assert r"\x1b[2J" in captured.get()


def test_errors_and_names_of_the_command_line(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", f"./{EVIL}"])
    assert shown.exit_code == 2
    assert "\x1b" not in shown.output
    assert r"\x1b[2J" in shown.output
    shutil.copytree(zoo.path("tiny-griffin-small"), tmp_path / EVIL)
    task = {"kind": "niah", "lengths": [64], "depths": [50], "samples": 1}
    experiments = {"e": {"tasks": [task], "interventions": ["none"]}}
    plan = {"name": "p", "models": [str(tmp_path / EVIL)], "experiments": experiments}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    shown = CliRunner().invoke(app, ["plan", str(tmp_path / "plan.yaml")])
    assert shown.exit_code == 0, shown.output
    assert "\x1b" not in shown.output
    assert r"\x1b[2J" in shown.output
