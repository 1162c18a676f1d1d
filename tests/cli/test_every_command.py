"""What every command must have: JSON and nothing else on stdout, plug-ins, output that fits a narrow terminal, colours off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import needlework as nw
from needlework.cli import app
from needlework.lmeval.evaluate import Line, Summary
from needlework.stats import NOTHING

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
WITHOUT_JSON = {"play": "serves a page", "lm-eval": "is lm-eval's own command line"}
WITHOUT_PLUGIN = {  # these know no interventions, tasks or scores
    *("inspect", "doctor", "budget", "gguf", "zoo", "train", "explain", "plans", "compare", "export", "demo"),
    "lm-eval",
}
MODEL = "tiny-griffin-small"
PLAN = f"""
models: [{MODEL}]
experiments:
  a:
    tasks: [{{kind: niah, lengths: [64], depths: [50], samples: 2}}]
    interventions: [none, "ablate_attention()"]
"""
CALLS = {  # one quick call of every command, in a directory with plan.yaml and the runs made of it
    "inspect": f"{MODEL}",
    "ask": f"{MODEL} the --max-new-tokens 1 --intervene none --intervene ablate_attention()",
    "doctor": f"{MODEL} --tokens 64",
    "heads": f"{MODEL} --by entropy --samples 2 --no-judge --no-dynamic --no-retest --out heads",
    "prune": f"{MODEL} --keep 2 --samples 0 --out pruned",
    "budget": "jamba-v0.1 --context 131072 --batch 8 --memory 160GB",
    "gguf": "tiny-transformer --out m.gguf",
    "zoo": "",
    "train": f"{MODEL} --steps 1 --no-card --out trained",
    "study": "concentration --out study",
    "explain": "keep_heads(k=2)",
    "plans": "",
    "plan": "plan.yaml",
    "run": "plan.yaml --out run",
    "compare": "run again",
    "rescore": "run",
    "export": "run --to csv",
    "report": "run other --against run --out report",
    "demo": "--out run",
    "eval": f"{MODEL} --tasks mini-mmlu --out eval",
}


def options_of(name: str) -> set[str]:
    return {option for parameter in COMMANDS[name].params for option in parameter.opts}


def test_every_command_that_reports_has_json() -> None:
    assert {name for name in COMMANDS if "--json" not in options_of(name)} == set(WITHOUT_JSON)
    assert set(CALLS) == set(COMMANDS) - set(WITHOUT_JSON), "a new command needs a call here"


def test_every_command_that_knows_interventions_or_tasks_has_plug_ins() -> None:
    assert {name for name in COMMANDS if "--plugin" not in options_of(name)} == WITHOUT_PLUGIN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a plan, a run, the same run again, and a run of another model."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "plan.yaml").write_text(PLAN)
    for name, model in (("run", MODEL), ("again", MODEL), ("other", "tiny-griffin")):
        nw.run(folder / "plan.yaml", folder / name, models=[model], doctor="off", progress=False)
    return folder


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command in the directory. What takes minutes or needs lm-eval is replaced, and prints as it does."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "60")
    result = nw.Result(folder / "run", True)

    def chatty(answer: Any) -> Callable[..., Any]:
        def work(*_: Any, **__: Any) -> Any:
            print("this is for people")
            return answer

        return work

    monkeypatch.setattr("needlework.cli.demo.run_demo", chatty(result))
    monkeypatch.setattr("needlework.training.study.study", chatty(SimpleNamespace(run=result, models=[], text="| study |")))
    monkeypatch.setattr("needlework.training.train.train", chatty({"name": "trained", "steps": 1, "loss": float("nan")}))
    monkeypatch.setattr("needlework.training.study.study_numbers", lambda models: {"total": len(models)})
    line = Line("mini-mmlu", "keep_heads(k=2, phase='prefill', by='entropy')", NOTHING, NOTHING, NOTHING)
    monkeypatch.setattr("needlework.lmeval.evaluate.evaluate", chatty(Summary([line], {}, [folder / "results.json"], 0, [])))
    runner = CliRunner()

    def run(name: str, *more: str) -> Any:
        words = ["keep_heads(k=2)"] if name == "explain" else CALLS[name].split()
        for out in ("heads", "pruned", "m.gguf"):
            if out in words:
                words[words.index(out)] = f"{out}-{len(list(folder.iterdir()))}"
        shown = runner.invoke(app, [name, *words, *more])
        assert shown.exit_code == 0, shown.output
        return shown

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_json_is_all_that_stdout_holds(name: str, call: Callable[..., Any]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(call(name, "--json").stdout, parse_constant=refuse)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_lines_fit_a_narrow_terminal(name: str, call: Callable[..., Any]) -> None:
    """Only a word that is longer, such as a path, may make a line longer."""
    for line in call(name).stdout.splitlines():
        assert len(line.rstrip()) <= 60 or (len(line.split()) <= 2), line
        assert "…" not in line, line


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_narrow_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lm-eval":
        return
    monkeypatch.setenv("COLUMNS", "60")
    shown = CliRunner().invoke(app, [name, "--help"]).output
    assert max(len(line) for line in shown.splitlines() if "Example:" not in line) <= 60
    assert "…" not in shown
    words = re.findall(r"[\w-]+", re.sub(r"[\s│]+", " ", shown))
    assert not [option for option in options_of(name) if option.startswith("--") and option.strip("-") not in " ".join(words)]


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["1", None])
def test_no_color_is_respected(colours: str | None, tmp_path: Path) -> None:
    call = [sys.executable, "-m", "needlework", "ask", "tiny-griffin", "x", "--intervene", "nonsense"]
    environment = {
        "FORCE_COLOR": "1",
        "PATH": "",
        "HOME": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
        "TERM": "xterm-256color",
    }
    environment |= {"NO_COLOR": colours} if colours else {}
    shown = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", shown.stderr)) == (colours is None)
