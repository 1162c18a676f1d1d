"""The sample type of the toy language (ToySample) and the seeded random generator of all data (Stream)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

Words = tuple[str, ...]

TRAIN_SPLIT, EVAL_SPLIT = "train", "eval"


class Stream(random.Random):
    """A random generator whose seed is a hash of the text "split/part/part...".

    Only training uses the split "train", so evaluation data are held out by construction. All draws go through `random()`,
    because Python keeps its sequence stable across versions but not those of `choice`, `sample` and `shuffle`.
    """

    def __new__(cls, split: str, *parts: str | int) -> Stream:
        return super().__new__(cls)

    def __init__(self, split: str, *parts: str | int) -> None:
        text = "/".join([split, *map(str, parts)])
        super().__init__(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))

    def below(self, limit: int) -> int:
        return int(self.random() * limit)

    def between(self, low: int, high: int) -> int:
        """Draw an integer from low to high, both included."""
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
        """Draw `count` items without replacement, in random order."""
        if count > len(items):
            raise ValueError(f"cannot take {count} different items from {len(items)}")
        pool = list(items)
        for i in range(count):
            j = i + int(self.random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def mixed(self, items: Sequence[T]) -> list[T]:
        return self.distinct(items, len(items))

    def unique(self, make: Callable[[], H], count: int, taken: Iterable[H] = ()) -> list[H]:
        """Return `count` results of `make` that differ from each other and from `taken`; it is called until there are enough."""
        found = dict.fromkeys(taken)
        first = len(found)
        while len(found) < first + count:
            found[make()] = None
        return [*found][first:]


def fill_words(template: Sequence[str], **words: str) -> list[str]:
    """Return the words of a template with each {name} replaced."""
    return [words.get(word[1:-1], word) if word.startswith("{") else word for word in template]


@dataclass(frozen=True, slots=True)
class WordSpan:
    """A named half-open range of words of a prompt. A word is one token; word i is token i + 1, because BOS comes first."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ToySample:
    """One sample of the toy language: a prompt, its target, and what is needed to score an answer.

    `target` is the continuation of `prompt` without the word that ends it (`stop`). `choices` are the options of a
    multiple-choice question, the target among them. `distractors` are wrong values that occur in the context and
    `absent` are values of the same kind that do not; both serve as wrong options of a forced choice.
    """

    prompt: Words
    target: Words
    spans: tuple[WordSpan, ...] = ()
    choices: tuple[Words, ...] = ()
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

    def named(self, name: str) -> tuple[WordSpan, ...]:
        return tuple(span for span in self.spans if span.name == name)
