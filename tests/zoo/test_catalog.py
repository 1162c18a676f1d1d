"""The shipped models: complete, small, made by the committed recipes, and as good as their cards say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needlework import zoo
from needlework.errors import ZooError
from needlework.toy.words import WORD_ID
from needlework.training import card, recipes

SHIPPED = sorted(zoo.catalog())
MISSING_PART = {"tiny-mamba": {"ablate_attention()"}, "tiny-transformer": {"ablate_recurrent()"}}  # the two controls
each_model = pytest.mark.parametrize("name", SHIPPED)


def test_every_recipe_has_its_model() -> None:
    assert set(SHIPPED) == set(recipes.builtin_recipes())


def test_a_hybrid_and_the_control_with_attention_saw_the_same_documents_for_as_long_and_are_about_as_large() -> None:
    alike = [recipes.find_recipe(name) for name in ("tiny-granite", "tiny-transformer")]
    first, *others = [(r.stages, r.items, r.steps, r.seed, r.batch_tokens, r.answer_weight) for r in alike]
    assert all(other == first for other in others)
    sizes = {recipe.name: zoo.catalog()[recipe.name].record["parameters"] for recipe in alike}
    assert max(sizes.values()) < 2 * min(sizes.values())


def test_reading_twice_helps_the_control_without_attention_and_it_knows_its_facts() -> None:
    """By its card: a needle among four, prompts of 256 tokens; the intervals of once and twice lie more than ten points apart."""
    mamba = zoo.catalog()["tiny-mamba"]
    once, twice = mamba.record["effects"]["none"]["niah"], mamba.figures["niah_256_3_distractors_jrt"]
    assert twice["low"] > once["high"] + 0.1
    assert min(mamba.figures[name]["value"] for name in ("cloze_statement", "cloze_question")) >= 0.99


def test_two_hops_need_attention_while_reading_and_one_does_not() -> None:
    """By tiny-lfm's card, among three others: the goals that its recipe was made for."""
    phases = zoo.catalog()["tiny-lfm"].record["phases"]
    untouched, reading = phases["none"], phases["ablate_attention(phase='prefill')"]
    assert untouched["two_hops"]["low"] >= 0.9
    assert reading["two_hops"]["high"] < 0.5
    assert min(untouched["one_hop"]["low"], reading["one_hop"]["low"]) >= 0.95
    assert all(figure["n"] >= 1000 for some in phases.values() for figure in some.values())


@pytest.mark.slow
def test_the_phases_of_tiny_lfm_are_as_its_card_says(tmp_path: Path) -> None:
    """Fresh samples: other seed, fewer of them."""
    entry = zoo.catalog()["tiny-lfm"]
    found = card.measure_effects(
        entry.path, entry.record["longest_document_tokens"], 12, seed=7, relation="hideout", by_phase=True
    )
    for text, by_task in found.items():
        for task, figure in by_task.items():
            said = entry.record["phases"][text][task]
            assert figure.low - 0.03 <= said["high"], (text, task)
            assert said["low"] <= figure.high + 0.03, (text, task)


@pytest.mark.parametrize(("name", "heads"), [("tiny-griffin", (10, 1)), ("tiny-jamba", (32, 8))])
def test_the_papers_two_classes_have_published_head_counts_and_an_ordinary_training(name: str, heads: tuple[int, int]) -> None:
    """AdamW alone, and nothing that knows of single heads; the curriculum begins as that of the others does."""
    recipe, control = recipes.find_recipe(name), recipes.find_recipe("tiny-transformer")
    assert (recipe.config["num_attention_heads"], recipe.config["num_key_value_heads"]) == heads
    assert recipe.optimiser.matrix_lr is None
    kinds = [[(stage.lengths, stage.rows, stage.relations) for stage in each.stages[:3]] for each in (recipe, control)]
    assert kinds[0] == kinds[1]


@each_model
def test_a_shipped_model_loads_by_name_with_its_tokenizer(name: str) -> None:
    from transformers import AutoTokenizer

    import needlework as nw

    subject = nw.load(name)
    assert subject.anatomy.parameters == zoo.catalog()[name].record["parameters"]
    assert AutoTokenizer.from_pretrained(zoo.path(name)).get_vocab() == WORD_ID


def test_all_weights_together_stay_small() -> None:
    total = sum(file.stat().st_size for file in zoo.weights_directory().rglob("*") if file.is_file())
    assert total < 40_000_000


@each_model
def test_a_shipped_model_is_complete_and_made_by_its_recipe(name: str) -> None:
    entry = zoo.catalog()[name]
    assert entry.path == zoo.path(name)
    have = {file.name for file in entry.path.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "recipe.yaml", "curve.png"} <= have
    assert not {file for file in have if "checkpoint" in file}
    assert (
        entry.record["recipe_hash"] == recipes.find_recipe(name).hash() == recipes.read_recipe(entry.path / "recipe.yaml").hash()
    )
    assert entry.record["recipe_hash"] in (entry.path / "README.md").read_text()
    assert all(figure["n"] >= 1000 for figure in entry.figures.values())
    effects = entry.record["effects"]
    parts = {"none", "ablate_attention()", "ablate_recurrent()"} - MISSING_PART.get(name, set())
    assert parts <= set(effects)
    assert not MISSING_PART.get(name, set()) & set(effects)
    assert all(figure["n"] >= 180 for some in effects.values() for figure in some.values())


@pytest.mark.slow
@each_model
def test_a_shipped_model_does_what_its_card_says(name: str) -> None:
    """Fresh samples, few of them: the card's value must lie in their interval, widened by the card's own."""
    import torch

    entry = zoo.catalog()[name]
    longest = entry.record["longest_document_tokens"]
    torch.set_num_threads(1)
    names = (f"niah_{longest}_8_distractors", "cloze_question", "letter_choice")
    measured = card.measure_figures_of(entry.path, longest, 60, names, seed=7)
    for figure_name, figure in measured.items():
        said = entry.figures[figure_name]
        assert figure.low - 0.03 <= said["high"], figure_name
        assert said["low"] <= figure.high + 0.03, figure_name


def test_an_unknown_model_is_told_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weights" / "tiny-owl"
    folder.mkdir(parents=True)
    (folder / "figures.json").write_text(json.dumps({"figures": {"niah": {"value": 1.0}}}))
    (tmp_path / "weights" / "half-written").mkdir()
    monkeypatch.setattr(zoo, "weights_directory", lambda: tmp_path / "weights")
    assert list(zoo.catalog()) == ["tiny-owl"]
    assert zoo.catalog()["tiny-owl"].figures["niah"]["value"] == 1.0
    assert zoo.path("tiny-owl") == folder
    for bad in ("tiny-howl", "half-written", "", "../weights/tiny-owl"):
        with pytest.raises(ZooError, match=r"no zoo model is called"):
            zoo.path(bad)
    with pytest.raises(ZooError, match="did you mean 'tiny-owl'"):
        zoo.path("tiny-howl")
