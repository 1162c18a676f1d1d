"""The same plan and seed give the same store, whatever the batch size, the memory, the kills and the order; a change is named."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from test_run import _wait_for_rows
from test_run_live import start
from typer.testing import CliRunner

import needlework as nw
from needlework.cli import app
from needlework.engine import engine
from needlework.results import Store, compare, fingerprint

PLAN = """
models: [griffin]
experiments:
  sweep:
    tasks:
      - {kind: niah, lengths: [40, 56], depths: [0, 100], samples: 2, distractors: 1}
    interventions: [none, "keep_heads(k={0, 2})", ablate_recurrent(), "swap_memory(half='kv')", "keep_heads(k=2, by='random')"]
  ability:
    tasks:
      - {kind: cloze_choice, per_subject: 1}
      - {kind: perplexity, samples: 2, tokens: 32}
    interventions: [none, ablate_attention()]
"""


def small_model(folder: Path, name: str, seed: int) -> None:
    from needlework.toy import tokenizer
    from needlework.training import recipes
    from needlework.training.train import build_model

    recipe = recipes.find_recipe("tiny-griffin")
    small = {**recipe.config, "hidden_size": 32, "lru_width": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(seed)
    build_model(recipe.model_copy(update={"config": small, "seed": seed})).save_pretrained(folder / name)
    tokenizer.build().save_pretrained(folder / name)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("determinism")
    small_model(folder, "griffin", 0)
    (folder / "plan.yaml").write_text(PLAN)
    return folder / "plan.yaml"


def run(plan: Path, out: Path, **options: Any) -> nw.Result:
    return nw.run(plan, out, progress=False, tell=False, doctor="off", **options)


@pytest.fixture(scope="module")
def first(plan: Path) -> nw.Result:
    return run(plan, plan.parent / "first")


@pytest.mark.slow
def test_batches_of_any_size_give_the_same_store(
    plan: Path, first: nw.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    start_batch = engine._Run._start
    monkeypatch.setattr(
        engine._Run, "_start", lambda self, batch, *rest: read.append(len(batch)) or start_batch(self, batch, *rest)
    )
    whole = run(plan, tmp_path / "whole")
    largest, read[:] = max(read), []
    few = run(plan, tmp_path / "few", memory_bytes=2**20)
    assert max(read) < largest  # the budget was really felt
    monkeypatch.setattr(engine, "ROWS_AT_ONCE", 1)
    one = run(plan, tmp_path / "one")
    for other in (whole, few, one):
        assert other.fingerprint == first.fingerprint
        found = compare(first.directory, other.directory)
        assert found.same, found.text()
        assert found.rows == len(list(Store(first.directory).rows()))
        assert found.logprobs < 1e-4
    assert compare(first.directory, one.directory).logprobs > 0  # batches of one do round otherwise: there was something to see


@pytest.mark.slow
@pytest.mark.serial
def test_a_killed_and_resumed_run_is_the_same(plan: Path, first: nw.Result, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(plan, out)
    _wait_for_rows(out, process, 0, seconds=240)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    partly = compare(first.directory, out)
    assert partly.only[0] > 0  # the kill came in time, and what is missing is counted
    assert not partly.same
    assert not partly.differing
    assert start(plan, out).wait() == 0
    assert compare(first.directory, out).same
    assert fingerprint(out) == first.fingerprint


def test_models_in_another_order_are_the_same_run(tmp_path: Path) -> None:
    for name, order in (("a", "alpha, beta"), ("b", "beta, alpha")):
        plan = tmp_path / f"{name}.yaml"
        plan.write_text(fakes.PLAN.replace("models: [alpha]", f"models: [{order}]"))
        fakes.run_fakes(plan, tmp_path / name)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    assert compare(tmp_path / "a", tmp_path / "b").same


def test_another_seed_is_another_run(plan_file: Path, tmp_path: Path) -> None:
    fakes.run_fakes(plan_file, tmp_path / "a")
    plan_file.write_text(fakes.PLAN.replace("seeds: 0..1", "seeds: 1..2"))
    fakes.run_fakes(plan_file, tmp_path / "b")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.fingerprints[0] != found.fingerprints[1]
    assert found.only[0] > 0
    assert found.only[1] > 0
    assert not found.same


@pytest.fixture
def twins(plan_file: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one plan."""
    for name in ("a", "b"):
        fakes.run_fakes(plan_file, tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def change(directory: Path, column: str, edit: Any, where: str = "mode = 'generate'") -> str:
    """Change one row of a store behind needlework's back; its trial's id."""
    db = sqlite3.connect(directory / "run.sqlite")
    row, name, text = db.execute(f"SELECT rowid, id, {column} FROM trials WHERE {where} ORDER BY experiment, id").fetchone()
    db.execute(f"UPDATE trials SET {column} = ? WHERE rowid = ?", (json.dumps(edit(json.loads(text))), row))
    db.commit()
    db.close()
    return str(name)


@pytest.mark.parametrize(
    "column, edit, what, hashed",
    [
        ("tokens", lambda tokens: [tokens[0] + 1], "tokens", True),
        ("tokens", lambda tokens: [*tokens, 5], "tokens", True),
        ("scores", lambda scores: {**scores, "correct": 1 - scores["correct"]}, "scores", True),
        ("logprobs", lambda logs: [logs[0] + 2e-4], "log-probabilities", False),
    ],
)
def test_one_row_that_differs_is_named(twins: tuple[Path, Path], column: str, edit: Any, what: str, hashed: bool) -> None:
    name = change(twins[1], column, edit)
    found = compare(*twins)
    (different,) = found.differing
    assert (different.id, different.what) == (name, what)
    assert (found.fingerprints[0] != found.fingerprints[1]) is hashed
    assert name in found.text()
    shown = CliRunner().invoke(app, ["compare", *map(str, twins)])
    assert shown.exit_code == 1
    assert name in shown.output
    assert "1 of 146 rows in both differ" in shown.output


@pytest.mark.slow
@pytest.mark.parametrize("column", ["intervention", "target", "kind", "boundary", "ability", "cluster", "sample"])
def test_runs_whose_labels_were_swapped_are_not_the_same(twins: tuple[Path, Path], column: str) -> None:
    """Equal answers under another label make another table: everything that a report reads is compared and hashed."""
    db = sqlite3.connect(twins[1] / "run.sqlite")
    values = db.execute(f"SELECT rowid, {column} FROM trials WHERE mode = 'generate' ORDER BY {column}").fetchall()
    (first, one), (last, other) = values[0], values[-1]
    swapped = [(other, first), (one, last)] if one != other else [("other", first)]
    db.executemany(f"UPDATE trials SET {column} = ? WHERE rowid = ?", swapped)
    db.commit()
    db.close()
    found = compare(*twins)
    assert not found.same
    assert {different.what for different in found.differing} == {column}
    assert len(found.differing) == len(swapped)
    assert found.fingerprints[0] != found.fingerprints[1]


def test_what_a_report_reads_beside_the_columns_is_compared_too(twins: tuple[Path, Path]) -> None:
    change(twins[1], "facts", lambda facts: {**facts, "in_window": False})
    assert [different.what for different in compare(*twins).differing] == ["facts"]
    store = Store(twins[1])
    experiments = store.meta("experiments")
    for experiment in experiments.values():
        for task in experiment["tasks"].values():
            task["options"]["against"] = "absent"
    store.set_meta("experiments", experiments)
    store.close()
    assert {different.what for different in compare(*twins).differing} == {"facts", "options"}
    assert fingerprint(twins[0]) != fingerprint(twins[1])


def test_rounding_is_no_difference_and_a_near_tie_is_said(twins: tuple[Path, Path]) -> None:
    change(twins[1], "logprobs", lambda logs: [logs[0] + 5e-5])
    found = compare(*twins)
    assert found.same
    assert found.logprobs == pytest.approx(5e-5, rel=1e-3)
    assert not compare(*twins, tolerance=1e-5).same
    change(twins[1], "tokens", lambda tokens: [tokens[0] + 1])
    assert not compare(*twins).differing[0].near_tie
    change(twins[1], "margins", lambda margins: [1e-6])
    assert compare(*twins).differing[0].near_tie


@pytest.mark.parametrize("column, edit", [("logprobs", lambda value: [0.0, value]), ("scores", lambda value: {"correct": value})])
def test_nan_in_one_run_is_a_difference_and_in_both_is_none(twins: tuple[Path, Path], column: str, edit: Any) -> None:
    for directory, value in zip(twins, (1.0, math.nan), strict=True):
        change(directory, column, lambda _, value=value: edit(value))
    for pair in (twins, twins[::-1]):
        found = compare(*pair)
        assert [different.what for different in found.differing] == [{"logprobs": "log-probabilities"}.get(column, column)]
        assert found.logprobs == (math.inf if column == "logprobs" else 0.0)
    change(twins[0], column, lambda _: edit(math.nan))
    assert compare(*twins).same
    assert compare(*twins).logprobs == 0.0


def test_margins_of_choices_are_no_part_of_the_fingerprint_but_are_compared(twins: tuple[Path, Path]) -> None:
    """A score that is a log-probability in another form rounds differently from batch to batch."""
    for directory in twins:
        change(directory, "scores", lambda scores: {**scores, "margin": 0.25}, "mode = 'choices'")
    change(twins[1], "scores", lambda scores: {**scores, "margin": 0.25 + 5e-5}, "mode = 'choices'")
    assert compare(*twins).same
    assert fingerprint(twins[0]) == fingerprint(twins[1])
    change(twins[1], "scores", lambda scores: {**scores, "margin": 0.26}, "mode = 'choices'")
    assert [different.what for different in compare(*twins).differing] == ["scores"]


def test_the_command_says_so_when_runs_are_the_same(twins: tuple[Path, Path]) -> None:
    shown = CliRunner().invoke(app, ["compare", *map(str, twins), "--json"])
    assert shown.exit_code == 0, shown.output
    content = json.loads(shown.stdout)
    assert content["same"] is True
    assert content["fingerprints"] == [fingerprint(directory) for directory in twins]
    missing = CliRunner().invoke(app, ["compare", str(twins[0]), str(twins[0] / "nowhere")])
    assert missing.exit_code == 2


def test_rows_keep_their_tokens_when_they_are_scored_again(twins: tuple[Path, Path], plan_file: Path) -> None:
    before = {row.id: row.tokens for row in Store(twins[0]).rows("mode = 'generate'")}
    assert all(before.values())
    plan_file.write_text(fakes.PLAN.replace("{kind: fake, samples: 6}", "{kind: fake, samples: 6, scorer: even}"))
    fakes.run_fakes(plan_file, twins[0])
    assert {row.id: row.tokens for row in Store(twins[0]).rows("mode = 'generate'")} == before


def test_a_store_without_tokens_is_still_read_written_and_compared(twins: tuple[Path, Path], plan_file: Path) -> None:
    """Stores of before have no such column: it is added, and their rows have none."""
    db = sqlite3.connect(twins[1] / "run.sqlite")
    db.execute("ALTER TABLE trials DROP COLUMN tokens")
    db.execute("DELETE FROM trials WHERE experiment = 'choice'")
    db.commit()
    db.close()
    fakes.run_fakes(plan_file, twins[1])  # goes on
    store = Store(twins[1])
    assert len(list(store.rows())) == 146
    assert {tuple(row.tokens) for row in store.rows("mode = 'generate'")} == {()}
    store.close()
    found = compare(*twins)
    assert {different.what for different in found.differing} == {"tokens"}
