"""How models are loaded: keys of a plan, options of every command that loads one, arguments in Python; one mechanism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import needlework as nw
from needlework import zoo
from needlework.cli import app
from needlework.experiments.models import DiskModels
from needlework.experiments.plan import Model, load
from needlework.experiments.schema import Dtype, Kernels, Loading, Window
from needlework.model import hooked_model
from needlework.model import load as loader
from needlework.results import Store

OPTIONS = ["device", "dtype", "window", "kernels", "threads"]
GIVEN = ["--device", "cpu", "--dtype", "bfloat16", "--window", "deepmind", "--kernels", "stock", "--threads", "2"]
PLAN = """
models: [{source: tiny-griffin, dtype: float16, kernels: fast}, {source: tiny-griffin, name: again}]
experiments:
  a: {tasks: [{kind: niah, lengths: [64], depths: [0]}], interventions: none}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was loaded, and with how many threads."""
    loaded: list[tuple[Any, ...]] = []
    stock = nw.Subject.__init__

    def noting(self: nw.Subject, *args: Any) -> None:
        stock(self, *args)
        rule, dtype = self.anatomy.window_rule, self.model.dtype
        loaded.append((str(self.body.device), dtype, rule, self.body.kernels, torch.get_num_threads()))

    monkeypatch.setattr(nw.Subject, "__init__", noting)
    return loaded


AS_GIVEN = ("cpu", torch.bfloat16, "deepmind", "stock", 2)


def invoke(*words: str) -> Any:
    before = torch.get_num_threads()
    shown = CliRunner().invoke(app, [*words])
    assert torch.get_num_threads() == before, "threads are the command's own"
    return shown


@pytest.mark.parametrize("name", ["ask", "plan", "run", "eval", "demo"])
def test_every_command_that_loads_a_model_has_the_options(name: str) -> None:
    names = [param.name for param in get_command(app).commands[name].params]  # type: ignore[attr-defined]
    assert names[-5:] == OPTIONS
    assert "loading" not in names
    assert "of a plan: all of them, whatever it says" in CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output


def test_ask_loads_as_it_is_told(subjects: list[tuple[Any, ...]]) -> None:
    assert invoke("ask", "tiny-griffin", "the king", "--max-new-tokens", "1", *GIVEN).exit_code == 0
    assert subjects == [AS_GIVEN]


@pytest.mark.slow
def test_run_loads_all_models_of_a_plan_as_it_is_told(plan: Path, tmp_path: Path, subjects: list[tuple[Any, ...]]) -> None:
    assert invoke("run", str(plan), "--out", str(tmp_path / "out"), *GIVEN).exit_code == 0
    assert subjects == [AS_GIVEN] * 2
    store = Store(tmp_path / "out")
    (versions,) = store.versions().values()
    models = store.meta("models")
    store.close()
    assert (versions["device"], versions["dtype"], versions["kernels"]) == ("cpu", "bfloat16", "stock")
    assert {(m["dtype"], m["window_rule"]) for m in models.values()} == {("bfloat16", "deepmind")}


def test_python_says_the_same(plan: Path, tmp_path: Path, subjects: list[tuple[Any, ...]]) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "window": "deepmind", "kernels": "stock", "device": "cpu"}
    nw.run(load(plan, models=["tiny-griffin"]), tmp_path / "out", progress=False, **how)
    assert [loaded[:4] for loaded in subjects] == [AS_GIVEN[:4]]


def test_a_plan_says_how_its_models_are_loaded(plan: Path) -> None:
    path = plan.with_name("other.yaml")
    path.write_text(
        PLAN.replace("dtype: float16, kernels: fast", "dtype: float16, kernels: stock, device: cuda, window: deepmind")
    )
    one, other = load(path).models.values()
    assert one.loading == Loading(dtype="float16", kernels="stock", device="cuda", window="deepmind")
    assert other.loading == Loading()
    assert load(path).loading(device="cpu").models["tiny-griffin"].loading == one.loading.replace(device="cpu")


def test_what_plan_shows_is_of_the_models_as_they_would_be_loaded(plan: Path) -> None:
    def weights(*more: str) -> int:
        shown = invoke("plan", str(plan), "--json", "--model", "tiny-griffin", *more)
        return int(json.loads(shown.output)["totals"][0]["memory_bytes"])

    parameters = nw.load("tiny-griffin").anatomy.parameters
    assert weights() - weights("--dtype", "bfloat16") >= 2 * parameters


def test_auto_is_what_the_checkpoint_names(tmp_path: Path) -> None:
    """A trial's id holds the type, so that auto and the type by its name are one."""
    assert DiskModels().inspect(Model("x:1", "a", "tiny-griffin", Loading(dtype="auto"))).identity()["dtype"] == "float32"
    for file in zoo.path("tiny-griffin").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    info = DiskModels().inspect(Model("x:1", "a", str(tmp_path), Loading(dtype="auto")))
    assert info.identity() == DiskModels().inspect(Model("x:1", "a", str(tmp_path), Loading(dtype="bfloat16"))).identity()
    assert info.model.loading.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("--dtype", "float31", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("--window", "google", "'transformers' or 'deepmind'"),
        ("--kernels", "quick", "'fast' or 'stock'"),
        ("--device", "abacus", "device 'abacus'"),
        ("--device", "", "device=''"),
        ("--threads", "0", "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(option: str, value: str, part: str, plan: Path) -> None:
    shown = invoke("run", str(plan), "--out", str(plan.parent / "out"), option, value)
    assert shown.exit_code == 2
    assert part in " ".join(shown.output.split())
    assert not (plan.parent / "out").exists()


def test_a_plan_may_say_what_can_be_loaded_and_nothing_else() -> None:
    assert set(get_args(Dtype)) == {"auto", *loader.DTYPES}
    assert get_args(Window) == get_args(loader.Window)
    assert get_args(Kernels) == get_args(hooked_model.Kernels)
