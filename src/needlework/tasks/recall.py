"""Recall without a haystack: key-value lists (MQAR), phone books and copying.

Zoo models are asked in the words of their training; real models in English. Items of one list share a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import ClassVar

from pydantic import Field

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import english, toy
from needlework.tasks.base import Extent, Item, Mode, Tokenizer, task
from needlework.tasks.prompts import Piece
from needlework.tasks.retrieval import Chosen, Draft, Retrieval, Sizes, different
from needlework.tasks.scores import begins, words_right
from needlework.toy import world as toy_world
from needlework.toy.sample import Sample, Stream

MOST_OPTIONS = 7  # of values that stand in the list


class Lists(Retrieval):
    """Base: lists of several sizes, each asked several times."""

    sizes: Sizes = (4, 8, 16)  # entries of a list
    queries: int = Field(1, ge=1)  # keys that are asked, of each list
    samples: int = Field(8, ge=1)  # lists of each size

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        make = self._toy_items if toy.resolve(self.world, tokenizer) == "toy" else self._english_items
        new_tokens = self.ending(tokenizer)[0]
        for size, i in product(self.sizes, range(self.samples)):
            if self.queries > size:
                raise NeedleworkError(f"{self.kind}: {self.queries} queries need as many entries; sizes holds {size}")
            name = f"{self.kind.removesuffix('_choice')}/size={size}/{i}"
            stream = Stream(toy_world.EVAL_SPLIT, name, seed)
            for item in make(tokenizer, stream, size, name, window):
                yield self.fitted(item, new_tokens, max_tokens)

    def extent(self) -> Extent:
        return Extent(len(self.sizes) * self.samples * self.queries, max(self.sizes))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        exact = float(begins(answer.text, item.target))
        return {"correct": exact, "graded": words_right(answer.text, item.target)}

    def in_context(self) -> int:
        return min(MOST_OPTIONS, min(self.sizes) - 1)

    def toy_samples(self, stream: Stream, size: int) -> list[Sample]:
        raise TypeError(f"{type(self).__name__} must define toy_samples()")

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        raise TypeError(f"{type(self).__name__} must define english_drafts()")

    def _toy_items(self, tokenizer: Tokenizer, stream: Stream, size: int, name: str, window: int | None) -> Iterator[Item]:
        try:
            samples = self.toy_samples(stream, size)
        except ValueError as error:
            raise NeedleworkError(f"{name}: {error}") from None
        for j, sample in enumerate(samples):
            facts = {"entries": size, "query": j, "layout": "plain"}
            yield toy.toy_item(
                tokenizer,
                sample,
                f"{name}/{j}",
                cluster=name,
                absent=self.absent,
                facts=facts,
                window=window,
                in_context=self.in_context(),
            )

    def _english_items(self, tokenizer: Tokenizer, stream: Stream, size: int, name: str, window: int | None) -> Iterator[Item]:
        for j, draft in enumerate(self.english_drafts(stream, size)):
            yield self.drafted_item(tokenizer, draft, f"{name}/{j}", name, window)

    def _asked(self, stream: Stream, keys: list[str], values: list[str], spare: list[str], question: str) -> list[Draft]:
        """One draft for each query of an English list; the asked entry is the needle."""
        drafts = []
        for j, i in enumerate(stream.distinct(range(len(keys)), self.queries)):
            context: list[Piece] = []
            for k, (key, value) in enumerate(zip(keys, values, strict=True)):
                name = "needle" if k == i else "distractor"
                inside = (name, "value") if k == i else (name,)
                context += [Piece(f"{key}: ", (name,)), Piece(value, inside), Piece("\n")]
            others = stream.mixed([value for k, value in enumerate(values) if k != i])[: self.in_context()]
            options = [("true", values[i]), *(("context", value) for value in others)]
            options += [("absent", value) for value in spare[: self.absent]]
            drafts.append(
                Draft(
                    context=context[:-1],
                    question=question.format(key=keys[i]),
                    target=values[i],
                    lead="ANSWER: ",
                    instruction="Answer with nothing but what is asked for.",
                    options=options,
                    facts={"entries": len(keys), "query": j, "key": keys[i], "needles": len(keys)},
                    value=values[i],
                    spare=spare,
                )
            )
        return drafts


@task
class Mqar(Lists):
    """Multi-query associative recall: which value stood after this key?"""

    kind = "mqar"
    mode: ClassVar[Mode] = "generate"
    toy_new_tokens: ClassVar[int] = 1

    def toy_samples(self, stream: Stream, size: int) -> list[Sample]:
        return toy_world.key_values(stream, size, self.queries)

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        words = different(stream, english.NOUNS, 2 * size + 3, "words", "choose smaller sizes")
        question = "Which word stands after {key} in the list?"
        return self._asked(stream, words[:size], words[size : 2 * size], words[2 * size :], question)


@task
class MqarChoice(Chosen, Mqar):
    kind = "mqar_choice"

    @property
    def chance(self) -> float:
        return self.chance_among(self.in_context())


@task
class PhoneBook(Lists):
    """A list of names and numbers; which number has this name?"""

    kind = "phone_book"
    mode: ClassVar[Mode] = "generate"
    toy_new_tokens: ClassVar[int] = 6

    def toy_samples(self, stream: Stream, size: int) -> list[Sample]:
        return toy_world.phone_book(stream, size, self.queries)

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        names = tuple(f"{a} {b}" for a, b in product(english.FIRST_NAMES, english.LAST_NAMES))
        numbers: dict[str, None] = {}
        while len(numbers) < size + 3:
            numbers[f"{stream.between(200, 999)}-{stream.between(1000, 9999)}"] = None
        listed = list(numbers)
        question = "What is the phone number of {key}?"
        return self._asked(
            stream, different(stream, names, size, "names", "choose smaller sizes"), listed[:size], listed[size:], question
        )


@task
class PhoneBookChoice(Chosen, PhoneBook):
    kind = "phone_book_choice"

    @property
    def chance(self) -> float:
        return self.chance_among(self.in_context())


@task
class Copy(Lists):
    """Say the same words again. Options are the same words in other orders: they do not stand in the context."""

    kind = "copy"
    mode: ClassVar[Mode] = "generate"

    def in_context(self) -> int:
        return 0

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        most, stop = super().ending(tokenizer)
        return max(most, 4 * max(self.sizes)) if "max_new_tokens" not in self.model_fields_set else most, stop

    def toy_samples(self, stream: Stream, size: int) -> list[Sample]:
        sample = toy_world.copying(stream, size)
        return [_with_orders(stream, sample)]

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        words = [stream.pick(english.NOUNS) for _ in range(size)]
        text = " ".join(words)
        options = [("true", text), *(("absent", " ".join(other)) for other in _orders(stream, words)[: self.absent])]
        return [
            Draft(
                context=[Piece(text, ("needle", "value"))],
                question="Which words stand above?",
                target=text,
                lead="ANSWER: ",
                instruction="Repeat the context word for word.",
                options=options,
                facts={"entries": size, "needles": 1},
            )
        ]


@task
class CopyChoice(Chosen, Copy):
    kind = "copy_choice"

    @property
    def chance(self) -> float:
        return self.chance_among(0)


def _orders(stream: Stream, words: list[str]) -> list[list[str]]:
    """Three other orders of some words."""
    if len(set(words)) < 3:
        raise NeedleworkError("copy: these words have too few orders to choose from; use sizes of 4 or more")
    orders: list[list[str]] = []
    while len(orders) < 3:
        order = stream.mixed(words)
        if order != words and order not in orders:
            orders.append(order)
    return orders


def _with_orders(stream: Stream, sample: Sample) -> Sample:
    return replace(sample, absent=tuple(tuple(order) for order in _orders(stream, list(sample.target))))
