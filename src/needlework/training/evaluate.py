"""Held-out figures of a zoo model: exact match with n and Wilson interval. Streams use the split "eval"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from needlework import stats
from needlework.toy import world
from needlework.toy.sample import Sample, Stream

Maker = Callable[[Stream], Sample]
QUESTION_ROOM = 24  # words that prompt and answer need around the context, at most
TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Figure:
    """A share of right answers with its 95 % Wilson interval."""

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
    def make(stream: Stream) -> Sample:
        return world.niah(
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
    """There are few facts and few ways to ask for one, and training has seen them all: a new sentence stands before each."""
    return lambda stream: world.cloze(stream, asked=asked, before=world.sentence(stream))


def _judge(kind: str) -> Maker:
    return lambda stream: world.judgement(stream, kind)


def suite(longest: int, relations: Sequence[str] = world.RELATION_NAMES) -> dict[str, Maker]:
    """The card's figures for a model whose longest training document has `longest` tokens and whose needles are of these."""
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
        "letter_choice": lambda stream: world.letter_choice(stream),
        "letter_lookup": lambda stream: world.letter_lookup(stream),
        "acceptability": _judge("acceptability"),
        "entailment": _judge("entailment"),
        "paraphrase": _judge("paraphrase"),
        "recall_16_pairs": lambda stream: world.key_values(stream, 16, 1)[0],
        "phone_book_8": lambda stream: world.phone_book(stream, 8, 1)[0],
        "copy_16": lambda stream: world.copying(stream, 16),
        "variables_2_chains": lambda stream: world.variables(stream, chains=2, hops=1, room=longest - QUESTION_ROOM)[0],
    }


def samples(name: str, make: Maker, n: int, seed: int = 0) -> Iterable[Sample]:
    return (make(Stream(world.EVAL_SPLIT, name, seed, i)) for i in range(n))


def exact(model: Any, group: Sequence[Sample]) -> list[bool]:
    """Whether each target is the greedy answer, from one forward pass.

    Greedy decoding gives the target exactly when each target word is the argmax after the prompt and the target words
    before it, so no generation is needed. Rows are padded on the right, which a causal model cannot see.
    """
    import torch

    rows = [[world.WORD_ID[word] for word in (world.BOS, *s.prompt, *s.target)] for s in group]
    ids = torch.full((len(rows), max(map(len, rows))), world.WORD_ID[world.PAD])
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    with torch.inference_mode():
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    right = []
    for i, (row, sample) in enumerate(zip(rows, group, strict=True)):
        start = len(row) - len(sample.target)
        right.append(best[i, start - 1 : len(row) - 1].tolist() == row[start:])
    return right


def figure(model: Any, name: str, make: Maker, n: int, seed: int = 0) -> Figure:
    asked = sorted(samples(name, make, n, seed), key=lambda sample: len(sample.prompt))
    longest = len(asked[-1].prompt) + len(asked[-1].target) + 1
    at_once = max(1, TOKENS_AT_ONCE // longest)
    right = [ok for i in range(0, n, at_once) for ok in exact(model, asked[i : i + at_once])]
    return Figure(sum(right), len(right))


def figures(
    model: Any,
    longest: int,
    n: int,
    names: Sequence[str] | None = None,
    seed: int = 0,
    relations: Sequence[str] = world.RELATION_NAMES,
) -> dict[str, Figure]:
    """All figures of the suite, or those named. The model is left in the mode it came in."""
    was_training = model.training
    model.eval()
    try:
        every = suite(longest, relations)
        return {name: figure(model, name, make, n, seed) for name, make in every.items() if names is None or name in names}
    finally:
        model.train(was_training)


def figures_of(folder: Path, longest: int, n: int, names: Sequence[str] | None = None, seed: int = 0) -> dict[str, Figure]:
    """The figures of a model on disk; its needles are of the kinds that its recipe ends with."""
    from transformers import AutoModelForCausalLM

    from needlework.model.patches import fast_kernels
    from needlework.training import recipes

    relations = recipes.read(folder / "recipe.yaml").stages[-1].relations
    model = AutoModelForCausalLM.from_pretrained(folder)
    with fast_kernels(model):
        return figures(model, longest, n, names, seed, relations)


def probe_names(longest: int) -> tuple[str, ...]:
    """The few figures that are followed while training."""
    return (f"niah_{longest}_8_distractors", "cloze_statement", "letter_choice", "entailment")
