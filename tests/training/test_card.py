"""Figures: exact match equals greedy decoding, intervals are Wilson's, samples never come from the training split."""

from __future__ import annotations

from typing import Any

import pytest

from needlework.stats import wilson
from needlework.toy.sample import Stream, ToySample
from needlework.toy.words import BOS, VOCABULARY, WORD_ID
from needlework.training import card, documents, recipes
from needlework.training.train import build_model


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"), [(0, 73, 0.0, 0.04999), (95, 100, 0.8882, 0.9785), (1000, 1000, 0.99617, 1.0)]
)
def test_a_record_has_wilson_intervals_by_hand(correct: int, n: int, low: float, high: float) -> None:
    record = card.to_record({"none": {"niah": wilson(correct, n)}})["none"]["niah"]
    assert list(record) == ["value", "low", "high", "correct", "n"]
    assert (record["correct"], record["n"]) == (correct, n)
    assert (record["low"], record["high"]) == pytest.approx((low, high), abs=1e-4)


def test_exact_match_is_what_greedy_decoding_gives() -> None:
    """A model that has learnt to copy a little is right sometimes: both ways must agree on when."""
    import torch

    recipe = recipes.find_recipe("tiny-transformer")
    model = build_model(recipe).eval()
    with torch.no_grad():  # an untrained model that nearly repeats its input: right on some targets, wrong on others
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    group = []
    for i in range(30):
        last = VOCABULARY[10 + i]
        target = (last,) * (1 + i % 3) if i % 2 else (VOCABULARY[100 + i],)
        group.append(ToySample(prompt=("the",) * (i % 5) + (last,), target=target))
    greedy = []
    for sample in group:
        ids = torch.tensor([[WORD_ID[word] for word in (BOS, *sample.prompt)]])
        for _ in sample.target:
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        greedy.append(ids[0, -len(sample.target) :].tolist() == [WORD_ID[word] for word in sample.target])
    assert card.exact_matches(model, group) == greedy
    assert 5 < sum(greedy) < 25


def test_evaluation_shares_no_document_with_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held out by the split: training draws from "train" alone, figures from "eval" alone."""
    splits: list[str] = []

    class Noting(Stream):
        def __init__(self, split: str, *parts: str | int) -> None:
            splits.append(split)
            super().__init__(split, *parts)

    recipe = recipes.find_recipe("tiny-griffin")
    monkeypatch.setattr(documents, "Stream", Noting)
    documents.make_batch(0, 0, 4, 96, recipe.document_mix(recipe.stages[0]))
    assert splits == ["train"] * 4
    splits.clear()
    monkeypatch.setattr(card, "Stream", Noting)
    for name, make in card.suite(recipe.longest).items():
        assert len({sample.prompt for sample in card.samples(name, make, 200)}) == 200, name
    assert set(splits) == {"eval"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [
        {"kind": "niah", "lengths": [440], "depths": [0, 50], "samples": 20, "distractors": 8},
        {"kind": "phone_book", "sizes": [20], "samples": 40},
        {"kind": "mqar", "sizes": [30], "samples": 40},
        {"kind": "copy", "sizes": [30], "samples": 40},
        {"kind": "cloze", "per_subject": 8},
        {"kind": "letter", "per_subject": 8},
        {"kind": "letter_lookup", "samples": 40},
        {"kind": "judgements", "samples": 15},
    ],
    ids=lambda told: told["kind"],
)
def test_card_figures_are_what_task_and_engine_give(told: dict[str, Any]) -> None:
    """The same questions as Items through the engine and as Samples through one forward pass: right on the same ones.

    A model that knows everything could not tell the two ways apart, so it is spoilt until it knows some answers only.
    """
    import torch

    from needlework import load
    from needlework.tasks import make_task

    subject = load("tiny-griffin")
    task = make_task(told)
    items = list(task.items(subject.tokenizer, 3, None, None))
    bos = subject.tokenizer.bos_token_id
    words = [subject.tokenizer.convert_ids_to_tokens([t for t in item.prompt if t != bos]) for item in items]
    group = [
        ToySample(prompt=tuple(prompt), target=tuple(item.target.split())) for prompt, item in zip(words, items, strict=True)
    ]
    torch.manual_seed(0)
    right = answered(subject, task, items)
    while all(right):
        with torch.no_grad():
            for weight in subject.model.parameters():
                weight.mul_(1 + 0.15 * torch.randn_like(weight))
        right = answered(subject, task, items)
    assert any(right)
    assert card.exact_matches(subject.model, group) == right


def answered(subject: Any, task: Any, items: list[Any]) -> list[bool]:
    """Whether each item's target is what the model says, by the task's own score."""
    from needlework.requests import Request

    if task.mode == "choices":
        scored = subject.choices([item.prompt for item in items], [item.options for item in items])
        return [bool(task.score(item, answer)["top1"]) for item, answer in zip(items, scored, strict=True)]
    most, stop = task.ending(subject.tokenizer)
    ends = frozenset([subject.tokenizer.convert_tokens_to_ids(stop)]) if stop else frozenset()
    answers = subject.answer([Request(item.prompt, max_new_tokens=most, stop=ends) for item in items])
    return [bool(task.score(item, a)["correct"]) for item, a in zip(items, answers, strict=True)]


def test_prompts_of_the_suite_have_the_length_in_their_name() -> None:
    for name, make in card.suite(256).items():
        if name.startswith("niah"):
            limit = int(name.split("_")[1])
            lengths = [1 + len(s.prompt) + len(s.target) for s in card.samples(name, make, 50)]
            assert limit - 40 < max(lengths) <= limit


def test_needles_of_the_suite_are_of_the_kinds_that_are_asked_for() -> None:
    for relations in (("hideout",), ("gift", "badge")):
        for name, make in card.suite(160, relations).items():
            if name.startswith("niah"):
                assert {sample.relation for sample in card.samples(name, make, 20)} == set(relations), name
