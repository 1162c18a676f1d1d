"""What a dry run says: where models fit, how many units can be asked at once, and hours that follow from stated speeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from needlework.cli import app
from needlework.cli.options import show
from needlework.experiments import progress
from needlework.experiments.estimate import ModelPlacement, Placement
from needlework.experiments.models import ModelInfo, PublicModels
from needlework.experiments.plan import Model
from needlework.experiments.schema import Loading

PLAN = """
models: [recurrentgemma-2b, jamba-mini-1.6]
experiments:
  cell:
    tasks: [{kind: niah, lengths: [250], depths: [0, 100], reserve_tokens: 200, max_new_tokens: 40}]
    interventions: [none, "keep_heads(k={1, 2}, phase='decode')"]
"""


def look(name: str) -> ModelInfo:
    return PublicModels().inspect(Model("here", name, name, Loading(dtype="bfloat16")))


def test_a_decode_step_reads_all_weights_once_however_many_rows_there_are() -> None:
    speed = progress.Speed(flops=100.0, bytes=10.0, step_seconds=1.0)
    assert speed.reading(200.0) == 2.0
    assert speed.step(50.0, 300.0) == 1.0 + 5.0 + 3.0
    twice = speed.times(2)
    assert twice.step(50.0, 300.0) == 0.5 * speed.step(50.0, 300.0)
    assert twice.reading(200.0) == 1.0


@pytest.mark.slow
def test_weights_that_a_token_goes_through_are_those_that_were_published() -> None:
    """Jamba: 12 of 52 billion (its model card). RecurrentGemma-2B: 2.7 billion, of which 0.7 are the embedding."""
    jamba, gemma = look("jamba-mini-1.6").costs, look("recurrentgemma-2b").costs
    assert jamba is not None
    assert gemma is not None
    assert jamba.weights == pytest.approx(2 * 52e9, rel=0.02)
    assert jamba.per_token + jamba.head == pytest.approx(12e9, rel=0.03)
    assert gemma.per_token + gemma.head == pytest.approx(2.7e9, rel=0.02)
    assert gemma.head == 256_000 * 2560
    info = look("jamba-mini-1.6")
    one, many = progress.step_bytes(info, 1), progress.step_bytes(info, 500)
    assert one == pytest.approx(2 * (jamba.per_token + 2 * jamba.head), rel=0.01)  # 2 of 16 experts
    assert many == pytest.approx(jamba.weights, rel=1e-6)  # all of them


@pytest.mark.slow
def test_a_dry_run_places_models_of_which_there_is_only_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    words = ["run", str(tmp_path / "plan.yaml"), "--dtype", "bfloat16", "--device", "cuda", "--ray", "--dry-run"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    small, large = json.loads(done.stdout)["places"]
    assert (small["questions"], large["questions"]) == (6, 6)
    assert (small["gpus_per_worker"], large["gpus_per_worker"]) == (1, 2)
    assert large["laptop_hours"] is None, "103 GB fit into no laptop"
    assert small["gpu_hours"] < small["laptop_hours"]
    assert large["gpus8_hours"] == pytest.approx(large["gpu_hours"] / 2), "there are four workers, but two units"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"], "nothing was written"
    text = CliRunner().invoke(app, words).output
    assert "recurrentgemma-2b" in text
    assert "not measured" in " ".join(text.split())


def test_the_table_fits_a_terminal_and_small_times_are_told_in_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ModelPlacement("recurrentgemma-2b", 6, 2, 5_400_000_000, 1, 2, 0.0001, 0.005, 0.3, 0.00001)
    large = ModelPlacement("jamba-mini-1.6-of-52-billion", 3_500, 3_500, 103_100_000_000, 2, 64, None, None, 1234.5, 12.0)
    monkeypatch.setenv("COLUMNS", "80")
    show(Placement("grid", "Ray cluster 10.0.0.1:6379, 16 threads a worker", (small, large)).output())
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80, text
    _, _, *times = text.partition("time ")[2].splitlines()
    assert times[0].split()[1:] == ["below", "1", "s", "18", "s", "18.0", "min", "below", "1", "s"]
    assert times[1].split()[1:] == ["no", "room", "no", "room", "1,234.5", "h", "12.0", "h"]
    assert "0.0 min" not in text


def test_a_run_that_is_not_dry_wants_a_directory(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    done = CliRunner().invoke(app, ["run", str(tmp_path / "plan.yaml")])
    assert done.exit_code == 2
    assert "give --out DIR" in done.output
