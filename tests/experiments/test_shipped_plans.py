"""The plans that come with the project are good, name zoo models, and cover what they promise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from needlework.errors import NeedleworkError
from needlework.experiments import plan as plans
from needlework.experiments.estimate import count_samples
from needlework.experiments.models import ModelInfo
from needlework.experiments.plan import Model, Plan, load
from needlework.experiments.trials import Work, expand
from needlework.interventions import base as grid
from needlework.toy import tokenizer
from needlework.training import recipes
from needlework.zoo import SMOLLM2

FOLDER = Path(__file__).parents[2] / "plans"
DEMO = FOLDER / "demo-full.yaml"
SHORT_DEMO = FOLDER / "demo.yaml"
PLANS = sorted(FOLDER.glob("*.yaml"))
NO_HEADS: Mapping[str, int] = {}
CLAIM_OF = {  # plan -> the claim that it is there for
    "01": "segregation",
    "02": "few_heads",
    "03": "no_rescue",
    "04": "exposure",
    "07": "double_dissociation",
    "09": "context",
    "10": "few_heads",
    "11": "memory",
}
LEAST = 75  # 0 of n needs n >= 73 for an upper bound of 5 %


def works(plan: Plan, heads: Mapping[str, int] = NO_HEADS) -> list[Work]:
    """Every trial of a plan, with the shapes of the zoo's recipes and the zoo's tokenizer, without weights."""
    import fakes

    found = []
    for name in plan.models:
        config = recipes.find_recipe(name).config
        pattern = {"tiny-transformer": (4, 0), "tiny-mamba": (0, 4), "tiny-lfm": (3, 3)}.get(name, (2, 4))
        shape = fakes.anatomy(*pattern, heads=heads.get(name, config.get("num_attention_heads", 0)))
        shape = type(shape)(**{**vars(shape), "max_tokens": None, "vocabulary": len(tokenizer.build())})
        found.append(expand(plan, ModelInfo(Model("zoo:1", name, name), name, "t", shape, tokenizer.build())))
    return found


def test_there_is_one_for_each_experiment() -> None:
    assert [p.name[:2] for p in PLANS if p.name[0].isdigit()] == [f"{i:02d}" for i in range(1, 15)]


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
@pytest.mark.parametrize("fast", [False, True])
def test_a_plan_is_good_and_names_zoo_models(path: Path, fast: bool) -> None:
    plan = load(path, fast=fast)
    assert set(plan.models) <= {*recipes.builtin_recipes(), SMOLLM2}
    assert plan.about
    for experiment in plan.experiments:
        for text in experiment.grids:
            assert grid.expand(text.text, {"H": 16})


@pytest.mark.slow
def test_the_demo_has_enough_samples_in_every_condition() -> None:
    for work in works(load(DEMO)):
        counts: dict[tuple[str, str, str], int] = {}
        for trial in work.trials:
            pooled = re.sub(r", seed=\d+", "", str(trial.intervention))  # random heads: all seeds of one way of drawing
            key = (trial.experiment, trial.task.name, pooled)
            counts[key] = counts.get(key, 0) + 1
        short = {key: n for key, n in counts.items() if n < LEAST}
        assert not short, (work.model.name, short)


@pytest.mark.slow
def test_the_short_demo_asks_every_claim_of_hybrids_and_a_control_with_the_samples_that_the_rules_need() -> None:
    plan = load(SHORT_DEMO)
    found = count_samples(plan, works(plan))
    assert not [one for one in found if not one.word and one.given < one.needed]
    words = {(one.claim, one.model): one.word for one in found if one.model != "tiny-mamba"}
    assert {model for _, model in words} == {"tiny-griffin", "tiny-jamba", "tiny-transformer"}
    assert {key for key, word in words.items() if word} == {
        ("double_dissociation", "tiny-transformer"),
        ("memory", "tiny-transformer"),
        ("no_rescue", "tiny-transformer"),
    }
    acts = {text.text for experiment in plan.experiments for text in experiment.grids if "few" in experiment.name}
    assert {"keep_heads(fraction=0.15)", "keep_heads(fraction=0.15, by='random', seed=0)"} <= acts
    asked = {trial.id for work in works(plan) for trial in work.trials}
    assert len(asked) < 10_500, "that is what a few minutes allow"


@pytest.mark.slow
@pytest.mark.parametrize("heads", [None, {"tiny-griffin": 10, "tiny-jamba": 32}], ids=["as they are", "10 and 32"])
def test_the_demo_gives_every_rule_the_samples_that_it_needs(heads: dict[str, int] | None) -> None:
    plan = load(DEMO)
    found = count_samples(plan, works(plan, heads or {}))
    assert {(one.claim, one.given, one.needed) for one in found if (not one.word and one.given < one.needed)} == {
        ("no_rescue", 270, 279),  # its power is 0.9 at 270, and less at some numbers above it: so 279 are asked for
        ("context", 315, 334),
    }
    judged = {(one.claim, one.model): one.word for one in found}
    assert {model for _, model in judged} == {"tiny-griffin", "tiny-jamba", "tiny-granite", "tiny-transformer", "tiny-mamba"}
    unjudged = {key: word for key, word in judged.items() if word}
    assert set(unjudged.values()) == {"does not apply"}
    assert {key for key in unjudged if key[1] != "tiny-mamba"} == {
        ("double_dissociation", "tiny-transformer"),
        ("memory", "tiny-transformer"),
    }


def test_shipped_plans_are_judged_on_seeds_of_which_no_result_was_seen() -> None:
    for path in PLANS:
        if path.stem != "smollm2":
            assert {seed for experiment in load(path).experiments for seed in experiment.seeds} == {2}, path


@pytest.mark.slow
@pytest.mark.parametrize("number", CLAIM_OF)
def test_a_plan_gives_the_rule_that_it_is_there_for_the_samples_that_it_needs(number: str) -> None:
    """A sweep holds conditions that other rules read, too; `needlework plan` warns of these."""
    (path,) = FOLDER.glob(f"{number}-*.yaml")
    plan = load(path)
    own = [one for one in count_samples(plan, works(plan)) if one.claim == CLAIM_OF[number] and one.word != "does not apply"]
    assert {one.word for one in own} == {""}
    short = {"09": (320, 334), "10": (280, 283)}.get(number)  # fewer than are asked for since power is known as a saw-tooth
    assert {(one.given, one.needed) for one in own if (not one.word and one.given < one.needed)} == ({short} if short else set())
    assert not any(one.one_haystack for one in own)


def test_the_demo_covers_all_experiments() -> None:
    plan = load(DEMO)
    numbers = {int(number) for e in plan.experiments for number in re.findall(r"\d+", e.about.split(":")[0])}
    assert numbers == set(range(1, 12))


@pytest.mark.parametrize("name", ["02", "head-sparsification", "02-head-sparsification"])
def test_a_shipped_plan_is_known_by_number_and_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plans.find(name).samefile(FOLDER / "02-head-sparsification.yaml")


def test_a_file_wins_over_a_shipped_plan_and_a_directory_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert plans.find("demo").samefile(SHORT_DEMO)
    Path("demo").rmdir()
    Path("demo").write_text("")
    assert plans.find("demo") == Path("demo")
    Path("mine.yml").write_text("")
    with pytest.raises(NeedleworkError, match=r"did you mean 'mine\.yml'\?"):
        plans.find("min.yml")
    with pytest.raises(NeedleworkError, match=r"known: 01, 01-attention-ablation, .*, memory-swap, mine\.yml"):
        plans.find("QQQ")


def test_all_shipped_plans_are_listed_and_no_two_share_a_name() -> None:
    assert [plan.path.name for plan in plans.catalog().values()] == [path.name for path in PLANS]
    numbered = [path for path in PLANS if path.name[0].isdigit()]
    assert len(plans.plan_names()) == len(PLANS) + 2 * len(numbered)
