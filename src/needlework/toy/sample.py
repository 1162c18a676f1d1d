"""What all of the toy world is made with: a Sample (a question and its answer) and a Stream (seeded chance)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

Words = tuple[str, ...]

TRAIN_SPLIT, EVAL_SPLIT = "train", "eval"


class Stream(random.Random):
    """Chance that depends on a split and a seed alone.

    The seed of the generator is a hash of the text "split/part/part...". Training uses the split "train" and nothing
    else does, so evaluation data are held out by construction: the two never share a generator state. Only `random()`
    is used underneath, because Python promises its sequence across versions and promises nothing about `choice`,
    `sample` or `shuffle`.
    """

    def __new__(cls, split: str, *parts: str | int) -> Stream:
        return super().__new__(cls)

    def __init__(self, split: str, *parts: str | int) -> None:
        text = "/".join([split, *map(str, parts)])
        super().__init__(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))

    def below(self, limit: int) -> int:
        return int(self.random() * limit)

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def weighted(self, weights: dict[str, float]) -> str:
        point = self.random() * sum(weights.values())
        for name, weight in weights.items():
            point -= weight
            if point < 0:
                return name
        return name

    def distinct(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in random order."""
        if count > len(items):
            raise ValueError(f"cannot take {count} different items from {len(items)}")
        pool = list(items)
        for i in range(count):
            j = i + int(self.random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def mixed(self, items: Sequence[T]) -> list[T]:
        return self.distinct(items, len(items))


@dataclass(frozen=True, slots=True)
class Span:
    """Words start..stop-1 of a prompt, by name. Every word is one token; the tokenizer puts one BOS before the first."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One question about the toy world and everything needed to score its answer.

    `prompt` ends where the answer begins; `target` is the answer without the word that ends it (`stop`).
    `choices` holds the options of a multiple-choice question, each a sequence of words that may follow the prompt, the
    right one at index `answer`. `distractors` are wrong values that stand in the context, `absent` are values of the
    same kind that do not: forced choice compares the target with either.
    """

    task: str
    prompt: Words
    target: Words
    spans: tuple[Span, ...] = ()
    choices: tuple[Words, ...] = ()
    answer: int | None = None
    distractors: tuple[Words, ...] = ()
    absent: tuple[Words, ...] = ()
    subject: str | None = None
    relation: str | None = None
    key: str | None = None
    form: str | None = None
    layout: str | None = None
    depth_percent: float | None = None
    context_tokens: int | None = None
    stop: str = "."

    @property
    def text(self) -> str:
        return " ".join(self.prompt)

    @property
    def target_text(self) -> str:
        return " ".join(self.target)

    def named(self, name: str) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.name == name)
