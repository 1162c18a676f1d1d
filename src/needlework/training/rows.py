"""A training document as it grows: words and their loss weights; and what a stage's documents are made of."""

from __future__ import annotations

from dataclasses import dataclass

from needlework.toy import words as w
from needlework.toy.needles import RELATION_NAMES
from needlework.toy.sample import Sample, Words


@dataclass(frozen=True)
class Diet:
    """What a training step is made of: shares of row kinds, shares of items in short rows, weight of answers."""

    rows: dict[str, float]
    items: dict[str, float]
    answer_weight: float
    relations: tuple[str, ...] = RELATION_NAMES
    names: int = len(w.NAMES)  # how many names the documents of "hops" are about
    said: float = 0.5  # share of the documents of "hops" whose links say the value behind the name they give


class Row:
    """Words and their loss weights, growing up to a fixed length."""

    def __init__(self, length: int, answer_weight: float) -> None:
        self.length = length
        self.answer_weight = answer_weight
        self.words: list[str] = [w.BOS]
        self.weights: list[float] = [0.0]

    @property
    def room(self) -> int:
        return self.length - len(self.words)

    def add(self, words: list[str] | tuple[str, ...], weight: float = 1.0) -> None:
        self.words += words
        self.weights += [weight] * len(words)

    def add_answer(self, target: tuple[str, ...], stop: str) -> None:
        self.add(target, self.answer_weight)
        if stop:
            self.add((stop,))

    def add_sample(self, sample: Sample) -> None:
        self.add(sample.prompt)
        self.add_answer(sample.target, sample.stop)

    def add_series(self, samples: list[Sample]) -> None:
        """Samples that each continue the one before it."""
        start = len(self.words)
        for sample in samples:
            self.add(sample.prompt[len(self.words) - start :])
            self.add_answer(sample.target, sample.stop)

    def add_lines(self, lines: list[tuple[list[str], Words]], stop: str) -> None:
        """Words and the answer to them, in turn, as many as there is room for."""
        for words, answer in lines:
            if len(words) + len(answer) + 1 > self.room:
                break
            self.add(words)
            self.add_answer(answer, stop)
