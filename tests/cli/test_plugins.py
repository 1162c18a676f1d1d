"""`--plugin file.py`: what a file registers works in plans and commands; what is wrong with it is told with its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import needlework as nw
from needlework import plugins
from needlework.cli import app
from needlework.errors import NeedleworkError
from needlework.interventions import base
from needlework.results import Store
from needlework.tasks import TASKS

runner = CliRunner()
PLUGIN = '''\
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import needlework as nw
from needlework.interventions.acts import ChangeOutputs
from needlework.tasks import Item, Mode, Task, Tokenizer, task


@nw.register
class HalveHeads(nw.Part):
    """Halve the outputs of all heads."""

    side = "attention"

    def lower(self, context):
        for layer in self.where(context.anatomy):
            yield ChangeOutputs(layer, lambda outputs, place: outputs * 0.5)


@task
class Parrot(Task):
    """Say a word again."""

    kind = "parrot"
    mode: ClassVar[Mode] = "generate"
    words: tuple[str, ...] = ("king", "boat")

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        for word in self.words:
            ids = tuple(tokenizer(f"the {word} . the")["input_ids"])
            yield Item(id=word, cluster=word, prompt=ids, prompt_text=word, target=word)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return {"correct": float(item.target in answer.text)}
'''
PLAN = """
models: [tiny-griffin]
experiments:
  own:
    tasks: [{kind: parrot, words: [king, boat, river], max_new_tokens: 2}]
    interventions: [none, "halve_heads(phase={'prefill', 'both'})"]
"""
TEXT = "the secret code of loran is 4 7 1 . question : what is the secret code of loran ? answer :"

ASK = ["ask", "tiny-griffin-small", TEXT, "--intervene", "halve_heads()", "--max-new-tokens", "1"]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A good plug-in, and all that is registered forgotten afterwards."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    monkeypatch.setattr(plugins, "DEFINED", dict(plugins.DEFINED))
    before = dict(TASKS)
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    yield file
    TASKS.clear()
    TASKS.update(before)


@pytest.mark.slow
def test_a_plan_with_an_intervention_and_a_task_of_ones_own_runs(plugin: Path, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(PLAN)
    without = runner.invoke(app, ["run", str(plan), "--out", str(out)])
    assert without.exit_code == 2
    assert "unknown task kind 'parrot'" in " ".join(without.output.split())
    described = runner.invoke(app, ["plan", str(plan), "--plugin", str(plugin), "--json"])
    assert json.loads(described.stdout)["totals"][0]["trials"] == 9
    done = runner.invoke(app, ["run", str(plan), "--out", str(out), "--plugin", str(plugin), "--plugin", str(plugin)])
    assert done.exit_code == 0, done.output
    store = Store(out)
    rows = list(store.rows())
    store.close()
    assert {row.intervention for row in rows} == {"none", "halve_heads()", "halve_heads(phase='prefill')"}
    assert len(rows) == 9
    assert not any(row.error for row in rows)


def test_ask_knows_an_intervention_of_ones_own(plugin: Path) -> None:
    words = ["ask", "tiny-griffin", TEXT, "--intervene", "halve_heads()", "--plugin", str(plugin), "--json"]
    shown = runner.invoke(app, [*words, "--max-new-tokens", "1"])
    assert shown.exit_code == 0, shown.output
    (answer,) = json.loads(shown.stdout)
    assert "heads_changed" in json.dumps(answer["receipt"])
    assert nw.parse("halve_heads()").parts


def test_ask_exits_with_1_if_an_answer_failed(plugin: Path) -> None:
    plugin.write_text(PLUGIN.replace("outputs * 0.5", "outputs * float('nan')"))
    shown = runner.invoke(app, [*ASK, "--plugin", str(plugin), "--json"])
    assert shown.exit_code == 1
    (answer,) = json.loads(shown.stdout)
    assert answer["finish"] == "failed"
    assert "not finite" in answer["error"]


def test_eval_knows_an_intervention_of_ones_own(plugin: Path, tmp_path: Path) -> None:
    words = ["eval", "no-such-model", "--tasks", "mini-mmlu", "--intervene", "halve_heads()", "--out", str(tmp_path / "out")]
    assert "unknown intervention" in runner.invoke(app, words).output
    assert "no-such-model" in runner.invoke(app, [*words, "--plugin", str(plugin)]).output


def test_what_a_file_registers_is_named_also_the_second_time(plugin: Path) -> None:
    assert plugins.load(plugin) == plugins.load(plugin) == ["intervention halve_heads", "task parrot"]


def test_a_file_that_registers_nothing_is_warned_about(plugin: Path) -> None:
    plugin.write_text("import needlework.tasks\n")
    shown = runner.invoke(app, ["ask", "tiny-griffin", "x", "--intervene", "nonsense", "--plugin", str(plugin)])
    assert "mine.py registers nothing; its classes need @needlework.register" in " ".join(shown.stderr.split())
    assert "registers nothing" not in shown.stdout
    plugin.write_text(PLUGIN)
    again = runner.invoke(app, ["ask", "tiny-griffin", "x", "--intervene", "nonsense", "--plugin", str(plugin)])
    assert "registers nothing" not in again.stderr


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("        return {", "        return {{", 36, "SyntaxError"),
        ("import needlework as nw", "import no_such_module", 6, "No module named 'no_such_module'"),
        ('    kind = "parrot"', '    kind = "niah"', 22, "task kind 'niah' is already taken by needlework.tasks.niah.Niah"),
        ("class HalveHeads", "class KeepHeads", 11, "'keep_heads' is already taken by needlework.interventions"),
        ('"""Say a word again."""', "_ = 1 / 0", 24, "ZeroDivisionError"),
        ("import needlework as nw", "raise SystemExit(3)", 6, "SystemExit"),
    ],
)
def test_a_fault_is_told_with_its_line_and_exits_with_2(plugin: Path, before: str, after: str, line: int, words: str) -> None:
    assert before in PLUGIN
    plugin.write_text(PLUGIN.replace(before, after, 1))
    shown = runner.invoke(app, ["run", "02", "--out", "never", "--plugin", str(plugin)])
    assert shown.exit_code == 2
    assert f"{plugin}:{line}: the plug-in fails: " in shown.output
    assert words in shown.output
    assert "Traceback" not in shown.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "before"),
    [
        (ASK, "        for layer in self.where(context.anatomy):"),
        (["plan", "plan.yaml"], "        for layer in self.where(context.anatomy):"),
        (["plan", "plan.yaml"], "        for word in self.words:"),
        (["run", "plan.yaml", "--out", "out"], "            ids = tuple("),
    ],
)
def test_a_fault_in_what_a_plug_in_registered_is_told_with_its_line(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], before: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN.replace("tiny-griffin", "tiny-griffin-small"))
    indent = " " * (len(before) - len(before.lstrip()))
    assert PLUGIN.count(before) == 1
    line = PLUGIN[: PLUGIN.index(before)].count("\n") + 1
    plugin.write_text(PLUGIN.replace(before, f"{indent}raise RuntimeError('boom')\n{before}"))
    shown = runner.invoke(app, [*words, "--plugin", str(plugin)])
    assert shown.exit_code == 2
    assert f"{plugin}:{line}: the plug-in fails: RuntimeError: boom" in shown.output
    assert "Traceback" not in shown.output


def test_a_fault_that_cannot_be_printed_is_told(plugin: Path) -> None:
    plugin.write_text("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd\n")
    with pytest.raises(NeedleworkError, match=r"mine.py:3: the plug-in fails: Odd"):
        plugins.load(plugin)


def test_a_fault_of_ours_keeps_its_traceback(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(nw, "load", broken)
    shown = runner.invoke(app, [*ASK, "--plugin", str(plugin)])
    assert isinstance(shown.exception, RuntimeError)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    for wrong in (tmp_path / "none.py", tmp_path):
        with pytest.raises(NeedleworkError, match="give a Python file"):
            plugins.load(wrong)


def test_a_report_knows_interventions_of_ones_own(plugin: Path, tmp_path: Path) -> None:
    """Without the file their trials are only listed by their text; with it they are read as what they are."""
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(PLAN)
    runner.invoke(app, ["run", str(plan), "--out", str(out), "--plugin", str(plugin)])
    shown = runner.invoke(app, ["report", str(out), "--plugin", str(plugin)])
    assert shown.exit_code == 0, shown.output
    assert (out / "report.html").exists()
    missing = runner.invoke(app, ["report", str(out), "--plugin", str(tmp_path / "nothing.py")])
    assert missing.exit_code == 2
