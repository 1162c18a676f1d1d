"""Figures: exact match equals greedy decoding, intervals are Wilson's, samples never come from the training split."""

from __future__ import annotations

import pytest

from needlework.zoo import build, documents, evaluate, recipes, world
from needlework.zoo.evaluate import Figure
from needlework.zoo.sample import Stream


def test_wilson_intervals_by_hand() -> None:
    assert Figure(0, 73).interval() == pytest.approx((0.0, 0.04999), abs=1e-4)
    assert Figure(95, 100).interval() == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert Figure(1000, 1000).interval() == pytest.approx((0.99617, 1.0), abs=1e-4)


def test_exact_match_is_what_greedy_decoding_gives() -> None:
    """A model that has learnt to copy a little is right sometimes: both ways must agree on when."""
    import torch

    recipe = recipes.find("tiny-transformer")
    model = build.model(recipe).eval()
    with torch.no_grad():  # an untrained model that nearly repeats its input: right on some targets, wrong on others
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    group = []
    for i in range(30):
        last = world.VOCABULARY[10 + i]
        target = (last,) * (1 + i % 3) if i % 2 else (world.VOCABULARY[100 + i],)
        group.append(world.Sample(task="echo", prompt=("the",) * (i % 5) + (last,), target=target))
    greedy = []
    for sample in group:
        ids = torch.tensor([[world.WORD_ID[word] for word in (world.BOS, *sample.prompt)]])
        for _ in sample.target:
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        greedy.append(ids[0, -len(sample.target) :].tolist() == [world.WORD_ID[word] for word in sample.target])
    assert evaluate.exact(model, group) == greedy
    assert 5 < sum(greedy) < 25


def test_evaluation_shares_no_document_with_training() -> None:
    recipe = recipes.find("tiny-griffin")
    for name, make in evaluate.suite(recipe.longest).items():
        if name.startswith(("niah", "recall", "phone", "copy")):
            held_out = {sample.prompt for sample in evaluate.samples(name, make, 20)}
            trained = {make(Stream("train", name, 0, i)).prompt for i in range(20)}
            assert len(held_out) == 20
            assert not held_out & trained
    assert world.TRAIN_SPLIT != world.EVAL_SPLIT
    words = " ".join(documents.row(Stream(world.TRAIN_SPLIT, 0, 0, 0), 96, recipe.diet(recipe.stages[0]))[0])
    assert all(sample.text not in words for sample in evaluate.samples("x", evaluate.suite(64)["niah_64_1_needle"], 20))


def test_prompts_of_the_suite_have_the_length_in_their_name() -> None:
    for name, make in evaluate.suite(256).items():
        if name.startswith("niah"):
            limit = int(name.split("_")[1])
            lengths = [1 + len(s.prompt) + len(s.target) for s in evaluate.samples(name, make, 50)]
            assert limit - 40 < max(lengths) <= limit
