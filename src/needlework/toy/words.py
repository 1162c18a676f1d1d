"""Vocabulary of the toy language by word class, read from language.yaml. Every word is one token."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, product
from typing import Any

from needlework.files import package_yaml

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNK)
LANGUAGE: Mapping[str, Any] = package_yaml(__file__, "language.yaml")


def _word_class(words: str | Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of a class. Endings vary slowest, so that neighbours in the list look different."""
    if isinstance(words, str):
        return tuple(words.split())
    return tuple(stem + ending for ending, stem in product(words["endings"].split(), words["stems"].split()))


CLASSES: dict[str, tuple[str, ...]] = {name: _word_class(words) for name, words in LANGUAGE["words"].items()}
DIGITS, LETTERS, NAMES = (CLASSES[name] for name in ("digits", "letters", "names"))
DETERMINERS, PEOPLE, MANNERS, VERBS = (CLASSES[name] for name in ("determiners", "people", "manners", "verbs"))
THINGS, LOOKS, PLACES, SIDES = (CLASSES[name] for name in ("things", "looks", "places", "sides"))
SAME_VERBS = tuple(zip(VERBS[::2], VERBS[1::2], strict=True))  # pairs of synonyms
TIMES = tuple(tuple(phrase.split()) for phrase in LANGUAGE["times"])

VOCABULARY: tuple[str, ...] = (*SPECIAL, *dict.fromkeys(chain(*CLASSES.values(), *TIMES)))
WORD_ID: dict[str, int] = {word: index for index, word in enumerate(VOCABULARY)}


def is_toy(tokenizer: Any) -> bool:
    """Return whether the tokenizer contains the toy vocabulary with the same ids."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return all(vocabulary.get(word) == number for word, number in WORD_ID.items())
