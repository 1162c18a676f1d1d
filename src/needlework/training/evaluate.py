"""Evaluate a zoo model on held-out samples: exact match with n and Wilson interval. Samples come from the split "eval"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from needlework import stats
from needlework.toy import facts, judgements, needles, recall
from needlework.toy.sample import EVAL_SPLIT, Stream, ToySample
from needlework.toy.words import BOS, PAD, WORD_ID

Maker = Callable[[Stream], ToySample]
QUESTION_ROOM = 24  # most words that question and answer add to the context
TOKENS_AT_ONCE = 8192  # in one batch


@dataclass(frozen=True)
class CardFigure:
    """An accuracy with its 95 % Wilson interval."""

    correct: int
    n: int

    @property
    def value(self) -> float:
        return self.correct / self.n

    def interval(self) -> tuple[float, float]:
        share = stats.wilson(self.correct, self.n)
        return share.low, share.high

    def as_dict(self) -> dict[str, float]:
        low, high = self.interval()
        return {"value": self.value, "low": low, "high": high, "correct": self.correct, "n": self.n}


def _niah(
    relations: Sequence[str], context_tokens: int, distractors: int, layout: str = "plain", quote: bool = False, hops: int = 1
) -> Maker:
    def make(stream: Stream) -> ToySample:
        return needles.make_niah(
            stream,
            context_tokens=context_tokens,
            distractors=distractors,
            depth_percent=100 * stream.random(),
            relation=stream.pick(relations),
            layout=layout,
            quote=quote,
            hops=hops,
        )

    return make


def _fact(asked: bool) -> Maker:
    """Return a maker of cloze samples, each after a new sentence: training has seen all facts and all ways to ask for them."""
    return lambda stream: facts.make_cloze(stream, asked=asked, before=needles.make_sentence(stream))


def _judge(kind: str) -> Maker:
    return lambda stream: judgements.make_judgement(stream, kind)


def suite(longest: int, relations: Sequence[str] = needles.RELATION_NAMES) -> dict[str, Maker]:
    """Return the makers of the card's figures by name, for a longest training document and the kinds of needle trained on."""
    at, twice = longest - QUESTION_ROOM, 2 * longest - QUESTION_ROOM
    niah = partial(_niah, relations)
    return {
        f"niah_{longest}_1_needle": niah(at, 0),
        f"niah_{longest}_8_distractors": niah(at, 8),
        f"niah_{2 * longest}_1_needle": niah(twice, 0),
        f"niah_{2 * longest}_8_distractors": niah(twice, 8),
        f"niah_{longest}_3_distractors_jrt": niah((longest - 2 * QUESTION_ROOM) // 2, 3, "jrt"),
        f"niah_{longest}_3_distractors_question_first": niah(at, 3, "question_first"),
        f"niah_{longest}_3_distractors_quote": niah(at, 3, quote=True),
        f"niah_{longest}_3_distractors_two_hops": niah(at, 3, hops=2),
        "cloze_statement": _fact(asked=False),
        "cloze_question": _fact(asked=True),
        "letter_choice": lambda stream: facts.make_letter_choice(stream),
        "letter_lookup": lambda stream: facts.make_letter_lookup(stream),
        "acceptability": _judge("acceptability"),
        "entailment": _judge("entailment"),
        "paraphrase": _judge("paraphrase"),
        "recall_16_pairs": lambda stream: recall.make_key_values(stream, 16, 1)[0],
        "phone_book_8": lambda stream: recall.make_phone_book(stream, 8, 1)[0],
        "copy_16": lambda stream: recall.make_copy(stream, 16),
        "variables_2_chains": lambda stream: needles.make_variable_chains(stream, chains=2, hops=1, room=longest - QUESTION_ROOM)[
            0
        ],
    }


def samples(name: str, make: Maker, n: int, seed: int = 0) -> Iterable[ToySample]:
    """Return `n` held-out samples of a figure, each a function of (name, seed, index)."""
    return (make(Stream(EVAL_SPLIT, name, seed, i)) for i in range(n))


def exact(model: Any, group: Sequence[ToySample]) -> list[bool]:
    """Return whether greedy decoding gives each sample's target, from one forward pass.

    Greedy decoding gives the target exactly if each target token is the argmax after the prompt and the preceding target
    tokens, so no generation is needed. Rows are padded on the right, which does not affect a causal model.
    """
    import torch

    rows = [[WORD_ID[word] for word in (BOS, *s.prompt, *s.target)] for s in group]
    ids = torch.full((len(rows), max(map(len, rows))), WORD_ID[PAD])
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    with torch.inference_mode():
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    right = []
    for i, (row, sample) in enumerate(zip(rows, group, strict=True)):
        start = len(row) - len(sample.target)
        right.append(best[i, start - 1 : len(row) - 1].tolist() == row[start:])
    return right


def figure(model: Any, name: str, make: Maker, n: int, seed: int = 0) -> CardFigure:
    """Measure one figure on `n` samples, in batches of similar prompt length."""
    asked = sorted(samples(name, make, n, seed), key=lambda sample: len(sample.prompt))
    longest = len(asked[-1].prompt) + len(asked[-1].target) + 1
    at_once = max(1, TOKENS_AT_ONCE // longest)
    right = [ok for i in range(0, n, at_once) for ok in exact(model, asked[i : i + at_once])]
    return CardFigure(sum(right), len(right))


def figures(
    model: Any,
    longest: int,
    n: int,
    names: Sequence[str] | None = None,
    seed: int = 0,
    relations: Sequence[str] = needles.RELATION_NAMES,
) -> dict[str, CardFigure]:
    """Measure all figures of the suite, or those in `names`; the model's training mode is restored."""
    was_training = model.training
    model.eval()
    try:
        every = suite(longest, relations)
        return {name: figure(model, name, make, n, seed) for name, make in every.items() if names is None or name in names}
    finally:
        model.train(was_training)


def figures_of(folder: Path, longest: int, n: int, names: Sequence[str] | None = None, seed: int = 0) -> dict[str, CardFigure]:
    """Measure the figures of a model on disk, with the kinds of needle of its recipe's last stage."""
    from transformers import AutoModelForCausalLM

    from needlework.model.patches import fast_kernels
    from needlework.training import recipes

    relations = recipes.read_recipe(folder / "recipe.yaml").stages[-1].relations
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    with fast_kernels(model):
        return figures(model, longest, n, names, seed, relations)


def probe_names(longest: int) -> tuple[str, ...]:
    """Return the names of the figures that are measured during training."""
    return (f"niah_{longest}_8_distractors", "cloze_statement", "letter_choice", "entailment")
