"""Recipes: what is wrong with one is said by name, and the hash follows all that decides the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from needlework.errors import ZooError
from needlework.training import recipes
from needlework.training import train as training

GOOD: dict[str, Any] = {
    "name": "mine",
    "architecture": "LlamaForCausalLM",
    "config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "stages": [
        {"until": 0.5, "lengths": [64], "rows": {"dense": 1}},
        {"until": 1.0, "lengths": [128], "rows": {"short": 1}},
    ],
    "batch_tokens": 192,
    "steps": 10,
    "optimiser": {"lr": 0.001},
}


def with_change(**change: Any) -> dict[str, Any]:
    return {**GOOD, **change}


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.builtin_recipes())
def test_built_in_recipes_are_sound(name: str) -> None:
    recipe = recipes.find_recipe(name)
    assert recipe.name == name
    assert recipe.about
    training.build_configuration(recipe)
    assert recipes.validate_recipe(yaml.safe_load(recipe.to_yaml()), "again") == recipe


def test_the_paper_classes_are_all_there() -> None:
    made = {recipes.find_recipe(name).architecture for name in recipes.builtin_recipes()}
    assert {"RecurrentGemmaForCausalLM", "JambaForCausalLM", "LlamaForCausalLM", "MambaForCausalLM"} < made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepps": 3}, "unknown key 'stepps': did you mean 'steps'"),
        ({"optimiser": {"lr": 1e-3, "betaz": [0.9, 0.9]}}, "optimiser.betaz.*did you mean 'betas'"),
        ({"stages": [{"until": 1.0, "length": [64], "rows": {"dense": 1}}]}, "did you mean 'lengths'"),
        ({"stages": [{"until": 1.0, "lengths": [64], "rows": {"dens": 1}}]}, "row kind 'dens': did you mean 'dense'"),
        ({"stages": [{"until": 1.0, "lengths": [64], "rows": {"dense": 0}}]}, "must not all be 0"),
        ({"stages": [{"until": 0.9, "lengths": [64], "rows": {"dense": 1}}]}, "end at 1.0"),
        ({"stages": [{"until": 1.0, "lengths": [8], "rows": {"dense": 1}}]}, "greater than or equal to 48"),
        ({"items": {"clozze": 1}}, "item kind 'clozze': did you mean 'cloze'"),
        ({"batch_tokens": 80}, "at least the longest row, 128"),
        ({"stages": [{"until": 1.0, "lengths": [127], "rows": {"dense": 1}}]}, "at least 128 tokens"),
        ({"optimiser": {"lr": 1e-3, "betas": [1.5, 0.9]}}, "optimiser.betas.0: Input should be less than 1"),
        ({"name": "a/b"}, "name"),
        ({"steps": 0}, "steps"),
        ({"seed": 20241117123456}, "seed: Input should be less than"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"optimiser": {"lr": float("inf")}}, "optimiser.lr: Input should be a finite number"),
        ({"optimiser": {}}, "optimiser.lr"),
        ({"optimiser": {"lr": 1e-3, "cycles": [{"until": 0.5}]}}, "cycles: .*must rise and end at 1.0"),
    ],
)
def test_a_bad_recipe_is_told_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        recipes.validate_recipe(with_change(**change), "mine.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "LamaForCausalLM"}, "did you mean 'LlamaForCausalLM'"),
        ({"config": {"hiden_size": 16}}, "config.hiden_size: did you mean 'hidden_size'"),
        ({"config": {"vocab_size": 16}}, "config.vocab_size is given by the toy language"),
        ({"config": {"hidden_size": "wide"}}, "LlamaForCausalLM refuses this config"),
        ({"config": {"hidden_size": 100, "num_attention_heads": 16}}, "LlamaForCausalLM refuses this config"),
    ],
)
def test_a_bad_model_is_told_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        training.build_model(recipes.validate_recipe(with_change(**change), "mine.yaml"))


def test_unknown_names_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="did you mean 'tiny-griffin'"):
        recipes.find_recipe("tiny-grifin")
    with pytest.raises(ZooError, match="cannot read"):
        recipes.find_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ZooError, match="mapping"):
        recipes.find_recipe(str(tmp_path / "list.yaml"))
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ZooError, match="not valid YAML"):
        recipes.find_recipe(tmp_path / "broken.yaml")


def test_a_number_may_be_written_as_people_write_it(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-6 for text; a class of transformers would then refuse its own kind of number."""
    text = yaml.safe_dump(with_change(config={**GOOD["config"], "rms_norm_eps": "SMALL"}))
    (tmp_path / "mine.yaml").write_text(text.replace("SMALL", "1e-6"))
    assert recipes.find_recipe(tmp_path / "mine.yaml").config["rms_norm_eps"] == 1e-6
    training.build_model(recipes.find_recipe(tmp_path / "mine.yaml"))


def test_classes_by_another_kind_of_name_are_known() -> None:
    assert training.find_model_class("GPT2LMHeadModel").__name__ == "GPT2LMHeadModel"


def test_a_recipe_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(GOOD))
    assert recipes.find_recipe(tmp_path / "mine.yaml") == recipes.validate_recipe(GOOD, "mine")


def test_a_recipe_can_take_over_the_training_of_another(tmp_path: Path) -> None:
    model = {key: GOOD[key] for key in ("name", "architecture", "config")}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**model, "trained_like": "tiny-transformer", "steps": 7}))
    mine, theirs = recipes.find_recipe(tmp_path / "mine.yaml"), recipes.find_recipe("tiny-transformer")
    assert (mine.stages, mine.items, mine.optimiser) == (theirs.stages, theirs.items, theirs.optimiser)
    assert (mine.answer_weight, mine.batch_tokens) == (theirs.answer_weight, theirs.batch_tokens)
    assert (mine.steps, mine.config, mine.initial_std) == (7, GOOD["config"], {})
    written_out = recipes.validate_recipe(yaml.safe_load(mine.to_yaml()), "again")
    assert written_out.hash() == mine.hash()  # whichever way it was said
    with pytest.raises(ZooError, match="trained_like names no built-in recipe: did you mean 'tiny-jamba'"):
        recipes.validate_recipe({**model, "trained_like": "tiny-jambo"}, "mine")


def test_the_hash_follows_what_decides_the_weights() -> None:
    recipe = recipes.validate_recipe(GOOD, "mine")
    assert recipe.hash() == "2a7a2b459b45"
    assert recipes.validate_recipe(with_change(name="other", about="text"), "mine").hash() == recipe.hash()
    others = [recipe.changed(steps=11), recipe.changed(seed=1), recipes.validate_recipe(with_change(batch_tokens=200), "x")]
    assert len({recipe.hash(), *(other.hash() for other in others)}) == 4
    assert recipe.changed() == recipe


def test_attention_is_dropped_as_the_stage_says_and_else_as_the_configuration_does() -> None:
    from needlework.training.train import train_step

    stages = [{**stage, **more} for stage, more in zip(GOOD["stages"], ({"attention_dropout": 0.5}, {}), strict=True)]
    plain, dropping = recipes.validate_recipe(GOOD, "test"), recipes.validate_recipe(with_change(stages=stages), "test")
    assert dropping.hash() != plain.hash()
    model = training.build_model(dropping)
    optimisers = training.build_optimisers(dropping.optimiser, model)
    seen = []
    for step in (0, dropping.steps - 1):
        train_step(dropping, model, optimisers, step)
        seen.append({part.attention_dropout for part in model.modules() if hasattr(part, "attention_dropout")})
    assert seen == [{0.5}, {model.config.attention_dropout}]
    with pytest.raises(ZooError, match="attention_dropout"):
        recipes.validate_recipe(with_change(stages=[{**stages[0], "attention_dropout": 1.0}, stages[1]]), "test")


def test_a_stage_says_how_many_names_there_are_and_how_many_links_say_their_value() -> None:
    def first(**more: object) -> recipes.Recipe:
        return recipes.validate_recipe(with_change(stages=[{**GOOD["stages"][0], **more}, *GOOD["stages"][1:]]), "test")

    plain, told, few = first(), first(said=1.0), first(names=8)
    assert plain.hash() == recipes.validate_recipe(GOOD, "test").hash()
    assert len({recipe.hash() for recipe in (plain, told, few)}) == 3
    assert [recipe.document_mix(recipe.stages[0]).said for recipe in (plain, told)] == [0.5, 1.0]
    assert [recipe.document_mix(recipe.stages[0]).names for recipe in (plain, few)] == [80, 8]
    assert told.document_mix(told.stages[1]) == plain.document_mix(plain.stages[1])
    for bad in ({"said": 1.1}, {"names": 3}, {"names": 81}):
        with pytest.raises(ZooError, match=next(iter(bad))):
            first(**bad)


def test_stages_follow_the_step() -> None:
    recipe = recipes.validate_recipe(GOOD, "mine")
    assert [recipe.stage_at(step).lengths[0] for step in (0, 4, 5, 9)] == [64, 64, 128, 128]
    assert recipe.longest == 128


@pytest.mark.slow
def test_parameters_start_as_large_as_the_recipe_says() -> None:
    plain, scaled = (
        recipes.validate_recipe(with_change(**change), "test") for change in ({}, {"initial_std": {"embed_tokens": 0.5}})
    )
    assert float(training.build_model(scaled).get_input_embeddings().weight.detach().std()) == pytest.approx(0.5, rel=1e-4)
    assert float(training.build_model(plain).get_input_embeddings().weight.detach().std()) < 0.1
    assert recipes.validate_recipe(with_change(initial_std={}), "test").hash() == plain.hash() != scaled.hash()
    with pytest.raises(ZooError, match="names 'embedd_tokens'"):
        training.build_model(recipes.validate_recipe(with_change(initial_std={"embedd_tokens": 0.5}), "test"))


@pytest.mark.slow
def test_vectors_start_evenly_spaced_where_the_recipe_says_so() -> None:
    granite = recipes.find_recipe("tiny-granite").model_dump()
    spaced = training.build_model(recipes.validate_recipe({**granite, "initial_range": {"dt_bias": (-3.0, 3.0)}}, "test"))
    biases = [p.tolist() for name, p in spaced.named_parameters() if name.endswith("dt_bias")]
    assert biases == [pytest.approx([-3 + 0.4 * i for i in range(16)])] * 4
    plain, ranged = (
        recipes.validate_recipe(with_change(**change), "test") for change in ({}, {"initial_range": {"norm": (1, 2)}})
    )
    assert recipes.validate_recipe(with_change(initial_range={}), "test").hash() == plain.hash() != ranged.hash()
    with pytest.raises(ZooError, match="names 'embed_tokens', and no vector"):
        training.build_model(recipes.validate_recipe(with_change(initial_range={"embed_tokens": (0, 1)}), "test"))
