"""Training: killed and resumed gives the same bits, nothing of another training is overwritten, results load."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import needlework as nw
from needlework import terminal
from needlework.cli import app
from needlework.errors import ZooError
from needlework.model.families import fast_kernels
from needlework.training import card, recipes
from needlework.training import train as training
from needlework.training.train import fixed_threads, learning_rate, train, train_step
from needlework.zoo import RECORD

pytestmark = pytest.mark.slow  # whole trainings, however small

TINY: dict[str, Any] = {
    "name": "tiny-test",
    "about": "A model for tests.",
    "architecture": "RecurrentGemmaForCausalLM",
    "config": {
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_window_size": 64,
        "attention_dropout": 0.1,  # its masks must be the same after a kill, too
    },
    "stages": [
        {"until": 0.5, "lengths": [64], "rows": {"dense": 1}},
        {"until": 1.0, "lengths": [64, 128], "rows": {"dense": 1, "short": 1}},
    ],
    "batch_tokens": 128,
    "steps": 40,
    "optimiser": {"lr": 0.003, "matrix_lr": 0.005, "warmup_steps": 5},
}
QUICK: dict[str, Any] = {"progress": False, "checkpoint_steps": 4, "card_samples": 4}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    return file


@pytest.fixture(scope="module")
def trained(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "model"
    train(recipe_file, out, **QUICK)
    return out


def weights_of(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def everything_in(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir()}


@pytest.mark.serial
def test_killed_and_resumed_gives_the_same_bits(recipe_file: Path, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    code = (
        "import sys; from needlework.training.train import train; "
        "train(sys.argv[1], sys.argv[2], progress=False, checkpoint_steps=4, card_samples=4)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(recipe_file), str(out)])
    give_up = time.monotonic() + 60
    while not (out / training.CHECKPOINT).exists() and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the training ended before it could be killed"
    assert not (out / RECORD).exists()
    train(recipe_file, out, **QUICK)
    assert weights_of(out) == weights_of(trained)
    assert (out / RECORD).exists()
    assert not (out / training.CHECKPOINT).exists()


def test_seed_and_steps_decide_the_weights(recipe_file: Path, trained: Path, tmp_path: Path) -> None:
    train(recipe_file, tmp_path / "again", **QUICK)
    assert weights_of(tmp_path / "again") == weights_of(trained)
    for i, change in enumerate(({"seed": 1}, {"steps": 39})):
        train(recipe_file, tmp_path / str(i), **change, **QUICK)
        assert weights_of(tmp_path / str(i)) != weights_of(trained)


@pytest.mark.parametrize("matrices", [{}, {"matrix_lr": 0.01}])
def test_the_loss_falls(matrices: dict[str, float]) -> None:
    settings = {"lr": 0.01, "warmup_steps": 5, **matrices}
    recipe = recipes.validate_recipe({**TINY, "steps": 200, "optimiser": settings}, "tiny")
    model = training.build_model(recipe)
    optimisers = training.build_optimisers(recipe.optimiser, model)
    losses = [train_step(recipe, model, optimisers, step) for step in range(40)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_what_was_made_loads_by_plain_transformers(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert type(model).__name__ == TINY["architecture"]
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert model.config.bos_token_id == tokenizer.bos_token_id
    ids = tokenizer("the king sees", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] >= ids.shape[1] + 1


def test_the_card_says_how_it_was_made(trained: Path, recipe_file: Path) -> None:
    recipe = recipes.find_recipe(recipe_file)
    card = (trained / "README.md").read_text()
    record = json.loads((trained / RECORD).read_text())
    assert recipe.hash() in card
    assert record["recipe_hash"] == recipe.hash()
    assert recipes.find_recipe(trained / "recipe.yaml") == recipe
    assert record["threads"] == 1
    assert (record["seed"], record["steps"]) == (recipe.seed, recipe.steps)
    for what, value in (("seed", recipe.seed), ("steps", recipe.steps), ("wall time", f"{record['train_minutes']} minutes")):
        assert f"| {what} | {value} |" in card
    for name, figure in record["figures"].items():
        assert name in card
        assert figure["n"] == 4
        assert 0 <= figure["low"] <= figure["value"] <= figure["high"] <= 1
    assert (trained / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_model_is_not_overwritten(recipe_file: Path, trained: Path) -> None:
    before = everything_in(trained)
    with pytest.raises(ZooError, match="finished model"):
        train(recipe_file, trained, **QUICK)
    assert everything_in(trained) == before


def test_a_checkpoint_of_another_recipe_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    out = tmp_path / "model"
    save = training.save_checkpoint

    def save_and_stop(*args: Any) -> None:
        save(*args)
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "save_checkpoint", save_and_stop)
        with pytest.raises(Stop):
            train(recipe_file, out, **QUICK)
    before = everything_in(out)
    assert training.CHECKPOINT in before
    with pytest.raises(ZooError, match=r"another training .*'tiny-test'"):
        train(recipe_file, out, seed=5, **QUICK)
    assert everything_in(out) == before


def test_foreign_files_and_unwritable_places_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(ZooError, match=r"other files .thesis.txt"):
        train(recipe_file, tmp_path / "full", **QUICK)
    assert everything_in(tmp_path / "full") == {"thesis.txt": b"years of work"}
    (tmp_path / "file").write_text("")
    with pytest.raises(ZooError, match="cannot write into"):
        train(recipe_file, tmp_path / "file" / "model", **QUICK)
    with pytest.raises(ZooError, match="unknown recipe"):
        train("tiny-unicorn", tmp_path / "x", **QUICK)
    assert not (tmp_path / "x").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ZooError, match="cannot write into"):
        train(recipe_file, tmp_path / "locked", **QUICK)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("RobertaForCausalLM", {**SMALL, "intermediate_size": 16, "max_position_embeddings": 300}, "sees words that come later"),
        ("OPTForCausalLM", {**SMALL, "ffn_dim": 16, "max_position_embeddings": 128}, "not measured afterwards.*256 tokens"),
    ],
)
def test_what_could_not_be_measured_is_not_trained(
    architecture: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    recipe = recipes.validate_recipe({**TINY, "architecture": architecture, "config": config}, "test")
    with pytest.raises(ZooError, match=message):
        train(recipe, tmp_path / "out", **QUICK)
    assert not list((tmp_path / "out").iterdir())


def test_a_rehearsal_leaves_the_model_as_it_was(recipe_file: Path) -> None:
    recipe = recipes.find_recipe(recipe_file)
    model = training.build_model(recipe).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    training.run_preflight(recipe, model)
    assert model.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_training_that_diverges_stops_and_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    recipe = recipes.validate_recipe({**TINY, "optimiser": {"lr": 1e30, "warmup_steps": 1, "clip": 1e30}}, "test")
    with pytest.raises(ZooError, match=r"not finite at step \d+.*Lower optimiser.lr"):
        train(recipe, tmp_path / "out", **{**QUICK, "checkpoint_steps": 1})
    kept = torch.load(tmp_path / "out" / training.CHECKPOINT, weights_only=True)
    assert kept["progress"]["step"] >= 1


def test_two_trainings_into_one_directory_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    with training.claim_directory(tmp_path), pytest.raises(ZooError, match="another training is writing"):
        train(recipe_file, tmp_path, **QUICK)


def test_a_damaged_checkpoint_is_named(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / training.CHECKPOINT).write_bytes(b"half a file")
    with pytest.raises(ZooError, match="not a readable checkpoint"):
        train(recipe_file, tmp_path, **QUICK)
    assert (tmp_path / training.CHECKPOINT).read_bytes() == b"half a file"


def test_a_checkpoint_that_is_none_is_named(recipe_file: Path, tmp_path: Path) -> None:
    import torch

    torch.save([1, 2], tmp_path / training.CHECKPOINT)
    with pytest.raises(ZooError, match="not a checkpoint of a training"):
        train(recipe_file, tmp_path, **QUICK)


def test_an_effect_that_could_not_be_measured_is_not_zero(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needlework.engine.engine import Engine

    run = Engine.run

    def fail_first(self: Engine, requests: Any, **options: Any) -> Any:
        for i, answer in run(self, requests, **options):
            yield i, replace(answer, finish="failed", error="logits are not finite") if i == 0 else answer

    assert card.measure_effects(trained, 128, per_depth=1)["none"]["niah"].n == 5
    monkeypatch.setattr(Engine, "run", fail_first)
    with pytest.raises(nw.NeedleworkError, match=r"niah/.*: logits are not finite"):
        card.measure_effects(trained, 128, per_depth=1)


def test_without_a_card_nothing_is_measured_and_the_record_says_so(
    recipe_file: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bare"
    monkeypatch.setattr(training, "run_preflight", lambda *given: None)  # it measures, too, before the first step
    monkeypatch.setattr(card, "measure_effects", lambda *given, **options: pytest.fail("measured"))
    monkeypatch.setattr("needlework.training.train.CHECKPOINT_STEPS", 4)
    shown = CliRunner().invoke(app, ["train", str(recipe_file), "--out", str(out), "--no-card"])
    assert shown.exit_code == 0, shown.output
    assert "not measured" in shown.output
    assert weights_of(out) == weights_of(trained)
    record = json.loads((out / "figures.json").read_text())
    assert (record["measured"], record["figures"], record["effects"]) == (False, {}, {})
    assert "No card was measured" in (out / "README.md").read_text()
    assert nw.load(out).generate(["the king"], max_new_tokens=2)[0].tokens
    monkeypatch.undo()
    card.renew_card(out, samples=4)
    record = json.loads((out / "figures.json").read_text())
    assert record["measured"]
    assert record["figures"].keys() == json.loads((trained / "figures.json").read_text())["figures"].keys()
    assert "No card was measured" not in (out / "README.md").read_text()


def test_a_bar_is_shown_while_the_card_is_measured(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(terminal, "PLAIN_SECONDS", 0.01)
    measured = card.measure_figures(AutoModelForCausalLM.from_pretrained(trained), 128, 2, progress=True)
    card.measure_effects(trained, 128, per_depth=1, per_subject=1, progress=True)
    said = capsys.readouterr().err
    assert f"/{len(measured)} figures" in said
    assert re.search(r"card: \w+: \d+/\d+ figures, 0:\d\d", said)
    assert " trials" in said
    assert "\x1b" not in said
    model = AutoModelForCausalLM.from_pretrained(trained)
    capsys.readouterr()  # what transformers tells while it loads
    card.measure_figures(model, 128, 2)
    assert capsys.readouterr().err == ""


def test_a_card_can_be_measured_again(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "model")
    card.renew_card(tmp_path / "model", samples=QUICK["card_samples"])
    before, same = (json.loads((folder / RECORD).read_text()) for folder in (trained, tmp_path / "model"))
    assert same == before
    card.renew_card(tmp_path / "model", samples=50)
    after = json.loads((tmp_path / "model" / RECORD).read_text())
    assert {f["n"] for f in after["figures"].values()} == {50}
    assert {f["n"] for some in after["effects"].values() for f in some.values()} == {180, 10}
    assert "(n = 10)" in (tmp_path / "model" / "README.md").read_text()


def test_an_effect_stands_under_its_own_task_in_whatever_order_trials_are_answered(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card once had facts in the column of needles: the engine had answered the shorter prompts first."""
    from needlework.engine.engine import Engine

    in_order, run = card.measure_effects(trained, 128, per_depth=1, per_subject=1), Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, requests, **options: reversed(list(run(self, requests, **options))))
    again = card.measure_effects(trained, 128, per_depth=1, per_subject=1)
    assert [list(by_task) for by_task in (*in_order.values(), *again.values())] == [["niah", "cloze"]] * (2 * len(in_order))
    assert again == in_order


def test_needles_of_a_card_are_of_a_kind_that_the_model_was_trained_on(trained: Path) -> None:
    def relation(*relations: str) -> str:
        stages = [{**stage, "relations": list(relations)} for stage in TINY["stages"]]
        return card.relation_of(recipes.validate_recipe({**TINY, "stages": stages}, "test"))

    assert relation("gift", "code") == "code"
    assert relation("gift", "hideout") == "gift"
    assert card.relation_of(recipes.validate_recipe(TINY, "test")) == "code"


def test_a_card_tells_the_phases_apart_where_links_were_trained(trained: Path, tmp_path: Path) -> None:
    stages = [{**stage, "rows": {"hops": 1}, "relations": ["gift"]} for stage in TINY["stages"]]
    assert "phases" not in card.measure_interventions(trained, recipes.validate_recipe(TINY, "test"), 5)
    found = card.measure_interventions(trained, recipes.validate_recipe({**TINY, "stages": stages}, "test"), 5)["phases"]
    assert list(found) == list(card.PHASES)
    assert {task: figure.n for task, figure in found["none"].items()} == {"one_hop": 5, "two_hops": 5}
    record = json.loads((trained / RECORD).read_text())
    assert "while reading" not in card.card_text(record)
    told = card.card_text({**record, "phases": card.to_record(found)})
    assert "no attention heads while reading | `ablate_attention(phase='prefill')`" in told
    assert "\n\n## What attention is for while reading" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-jamba", "tiny-mamba", "tiny-granite", "tiny-transformer"])
def test_every_family_trains_to_the_same_bits(name: str) -> None:
    import torch

    recipe = recipes.find_recipe(name).changed(steps=3)
    made = []
    for _ in range(2):
        model = training.build_model(recipe)
        optimisers = training.build_optimisers(recipe.optimiser, model)
        with fixed_threads(1), fast_kernels(model):
            for step in range(3):
                train_step(recipe, model, optimisers, step)
        made.append(model.state_dict())
    fresh = training.build_model(recipe).state_dict()
    assert all(torch.equal(weight, made[1][key]) for key, weight in made[0].items())
    assert not all(torch.equal(weight, fresh[key]) for key, weight in made[0].items())


def test_the_learning_rate_warms_up_and_comes_down() -> None:
    recipe = recipes.validate_recipe(TINY, "tiny")
    rates = [learning_rate(recipe, step, 0.003) for step in range(40)]
    assert rates[0] < rates[2] < rates[4]
    assert max(rates) <= 0.003
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.05 * 0.003 <= rates[-1] < 0.06 * 0.003


def test_a_second_cycle_goes_on_from_the_weights_of_the_first_recipe(trained: Path) -> None:
    """A recipe made longer by a cycle is the shorter one up to there, and then needs nothing but its weights."""
    import torch
    from safetensors.torch import load_file

    stages = [{**stage, "until": until} for stage, until in zip(TINY["stages"], (0.4, 1.0), strict=True)]
    cycles = {"cycles": [{"until": 0.8}, {"until": 1.0, "peak": 0.5}]}
    once = recipes.validate_recipe(TINY, "tiny")
    twice = recipes.validate_recipe({**TINY, "steps": 50, "stages": stages, "optimiser": {**TINY["optimiser"], **cycles}}, "tiny")
    first, second = ([learning_rate(recipe, step, 0.003) for step in range(recipe.steps)] for recipe in (once, twice))
    assert second[:40] == first
    assert second[40] < second[42] < second[44] <= 0.0015
    assert second[45:] == sorted(second[45:], reverse=True)
    assert once.hash() != twice.hash()

    def run(model: Any, steps: range) -> Any:
        optimisers = training.build_optimisers(twice.optimiser, model)
        with fixed_threads(1), fast_kernels(model):
            for step in steps:
                train_step(twice, model, optimisers, step)
        return model

    whole = run(training.build_model(twice).train(), range(42)).state_dict()
    resumed = training.build_model(twice).train()
    resumed.load_state_dict(load_file(trained / "model.safetensors"), strict=False)
    again = run(resumed, range(40, 42)).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in whole.items())


def test_muon_steps_are_orthogonal_and_torch_agrees() -> None:
    """All singular values of a step are near one size, and torch.optim.Muon (in bfloat16) goes the same way."""
    import torch

    torch.manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        start, gradient = torch.randn(shape), torch.randn(shape)
        ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
        muon = training.Muon([ours], lr=0.01, weight_decay=0.1)
        stock = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            before = ours.detach().clone()
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
            muon.step()
            stock.step()
            gradient = torch.randn(shape)
        step = (ours.detach() - before * (1 - 0.01 * 0.1)) / (0.01 * 0.2 * 40**0.5)
        sizes = torch.linalg.svdvals(step)
        assert sizes.min() > 0.5
        assert sizes.max() < 1.3
        moved, wanted = ours.detach() - start, theirs.detach() - start
        assert (moved - wanted).norm() < 0.03 * wanted.norm()
