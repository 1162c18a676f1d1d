"""The words that RULER's tasks are made of, in English and in the toy language."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from needlework.tasks import english
from needlework.toy import words as w
from needlework.toy import world as toy_world
from needlework.toy.sample import Stream

# Words that nobody has read before: what frequent words are made of, so that only counting helps.
COINED = tuple(
    a + b + c for a, b, c in product(("bro", "fli", "ka", "mu", "ste", "zo"), ("dra", "lo", "ni", "pu"), ("k", "m", "x"))
)
TOY_WORDS = (*w.THINGS, *w.PLACES, *w.LOOKS, *w.PEOPLE)


@dataclass(frozen=True)
class Language:
    """Sentences hold {key}, {value} or {other}; `leads` are what the answer begins after, by variant."""

    world: str
    keys: tuple[str, ...]
    words: tuple[str, ...]  # for common words
    rare: tuple[str, ...]  # for frequent words
    needle: str
    question: str
    questions: str  # several keys in one question; empty: asked one after the other
    given: str  # a variable gets a value
    copied: str  # a variable gets what another one has
    who: str  # which variables have this value?
    most: str  # which {count} words are the most frequent?
    lead: str
    join: str  # between words of a list
    number: Callable[[Stream], str]
    sentences: Callable[[Stream], Iterator[str]]

    def numbers(self, stream: Stream, count: int) -> list[str]:
        """Different values."""
        values: dict[str, None] = {}
        while len(values) < count:
            values[self.number(stream)] = None
        return list(values)

    def listed(self, keys: Sequence[str]) -> str:
        return ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]


def _toy_sentences(stream: Stream) -> Iterator[str]:
    yield " ".join(toy_world.sentence(stream))
    while True:
        yield " " + " ".join(toy_world.sentence(stream))


ENGLISH = Language(
    world="english",
    keys=english.NOUNS,
    words=english.NOUNS,
    rare=COINED,
    needle="The locker number for the {key} is {value}.",
    question="What is the locker number for the {key}? If there are several, give all of them.",
    questions="What are the locker numbers for the {key}?",
    given="The {key} was given the number {value}.",
    copied="The {key} was given the same number as the {other}.",
    who="Which things were given the number {value}, directly or through others? Name all of them.",
    most="Which {count} words occur most often in the list above?",
    lead="ANSWER: ",
    join=" ",
    number=lambda stream: str(stream.between(10000, 99999)),
    sentences=english.sentences,
)
TOY = Language(
    world="toy",
    keys=w.NAMES,
    words=TOY_WORDS,
    rare=TOY_WORDS,
    needle="the secret code of {key} is {value} .",
    question="what is the secret code of {key} ?",
    questions="",
    given="the secret code of {key} is {value} .",
    copied="the secret code of {key} is the code of {other} .",
    who="who has the secret code {value} ?",
    most="which word is in the context again and again ?",
    lead="answer :",
    join=" ",
    number=lambda stream: " ".join(stream.pick(w.DIGITS) for _ in range(3)),
    sentences=_toy_sentences,
)
LANGUAGES = {"english": ENGLISH, "toy": TOY}
