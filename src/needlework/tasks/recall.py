"""Recall tasks without a haystack: key-value lists (MQAR), phone books and copying.

Prompts are in the toy language for zoo models and in English for others. Items of one list share a cluster.
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
from needlework.tasks.base import Item, Mode, TaskExtent, Tokenizer, task
from needlework.tasks.prompts import Piece
from needlework.tasks.retrieval import Draft, Retrieval, Sizes, choice_companion, draw_distinct
from needlework.tasks.scores import begins, words_right
from needlework.toy import recall
from needlework.toy.sample import EVAL_SPLIT, Stream, ToySample

MOST_OPTIONS = 7  # wrong options from the list


class Lists(Retrieval):
    """Base class: lists of several sizes with several queries each."""

    sizes: Sizes = (4, 8, 16)  # entries per list
    queries: int = Field(1, ge=1)  # queried keys per list
    samples: int = Field(8, ge=1)  # lists per size

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        make = self._toy_items if toy.resolve(self.world, tokenizer) == "toy" else self._english_items
        new_tokens = self.ending(tokenizer)[0]
        for size, i in product(self.sizes, range(self.samples)):
            if self.queries > size:
                raise NeedleworkError(f"{self.kind}: {self.queries} queries need as many entries; sizes holds {size}")
            name = f"{self.kind.removesuffix('_choice')}/size={size}/{i}"
            stream = Stream(EVAL_SPLIT, name, seed)
            for item in make(tokenizer, stream, size, name, window):
                yield self.fitted(item, new_tokens, max_tokens)

    def extent(self) -> TaskExtent:
        return TaskExtent(len(self.sizes) * self.samples * self.queries, max(self.sizes))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        exact = float(begins(answer.text, item.target))
        return {"correct": exact, "graded": words_right(answer.text, item.target)}

    def in_context(self) -> int:
        return min(MOST_OPTIONS, min(self.sizes) - 1)

    def toy_samples(self, stream: Stream, size: int) -> list[ToySample]:
        raise TypeError(f"{type(self).__name__} must define toy_samples()")

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        raise TypeError(f"{type(self).__name__} must define english_drafts()")

    def _toy_items(self, tokenizer: Tokenizer, stream: Stream, size: int, name: str, window: int | None) -> Iterator[Item]:
        if self.layout != "plain":
            raise NeedleworkError(
                f"{self.kind}: in the toy language it has the layout plain only, not {self.layout}: leave layout out"
            )
        try:
            samples = self.toy_samples(stream, size)
        except ValueError as error:
            raise NeedleworkError(f"{name}: {error}") from None
        for j, sample in enumerate(samples):
            facts = {"entries": size, "query": j, "layout": "plain"}
            options = {"absent": self.absent, "in_context": self.in_context()}
            yield toy.toy_item(tokenizer, sample, f"{name}/{j}", cluster=name, facts=facts, window=window, **options)

    def _english_items(self, tokenizer: Tokenizer, stream: Stream, size: int, name: str, window: int | None) -> Iterator[Item]:
        for j, draft in enumerate(self.english_drafts(stream, size)):
            yield self.drafted_item(tokenizer, draft, f"{name}/{j}", name, window)

    def _draft_queries(self, stream: Stream, keys: list[str], values: list[str], spare: list[str], question: str) -> list[Draft]:
        """Return a draft for each query of an English list; the queried entry is the needle."""
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
    """Multi-query associative recall: the value that follows a key in a list of pairs."""

    kind = "mqar"
    mode: ClassVar[Mode] = "generate"
    toy_new_tokens: ClassVar[int] = 1

    def toy_samples(self, stream: Stream, size: int) -> list[ToySample]:
        return recall.make_key_values(stream, size, self.queries)

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        words = draw_distinct(stream, english.NOUNS, 2 * size + 3, "words", "choose smaller sizes")
        question = "Which word stands after {key} in the list?"
        return self._draft_queries(stream, words[:size], words[size : 2 * size], words[2 * size :], question)


MqarChoice = choice_companion(Mqar)


@task
class PhoneBook(Lists):
    """Phone book: the number of a name in a list."""

    kind = "phone_book"
    mode: ClassVar[Mode] = "generate"
    toy_new_tokens: ClassVar[int] = 6

    def toy_samples(self, stream: Stream, size: int) -> list[ToySample]:
        return recall.make_phone_book(stream, size, self.queries)

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        names = tuple(f"{a} {b}" for a, b in product(english.FIRST_NAMES, english.LAST_NAMES))
        numbers: dict[str, None] = {}
        while len(numbers) < size + 3:
            numbers[f"{stream.between(200, 999)}-{stream.between(1000, 9999)}"] = None
        listed = list(numbers)
        keys = draw_distinct(stream, names, size, "names", "choose smaller sizes")
        return self._draft_queries(stream, keys, listed[:size], listed[size:], "What is the phone number of {key}?")


PhoneBookChoice = choice_companion(PhoneBook)


@task
class Copy(Lists):
    """Repeat the words of the context. Wrong options are the same words in other orders."""

    kind = "copy"
    mode: ClassVar[Mode] = "generate"

    def in_context(self) -> int:
        return 0

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        most, stop = super().ending(tokenizer)
        return max(most, 4 * max(self.sizes)) if "max_new_tokens" not in self.model_fields_set else most, stop

    def toy_samples(self, stream: Stream, size: int) -> list[ToySample]:
        sample = recall.make_copy(stream, size)
        return [replace(sample, absent=tuple(tuple(order) for order in _other_orders(stream, list(sample.target))))]

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        words = [stream.pick(english.NOUNS) for _ in range(size)]
        text = " ".join(words)
        options = [("true", text), *(("absent", " ".join(other)) for other in _other_orders(stream, words)[: self.absent])]
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


CopyChoice = choice_companion(Copy)


def _other_orders(stream: Stream, words: list[str]) -> list[list[str]]:
    """Return three distinct permutations of the words that differ from their order."""
    if len(set(words)) < 3:
        raise NeedleworkError("copy: these words have too few orders to choose from; use sizes of 4 or more")
    orders: list[list[str]] = []
    while len(orders) < 3:
        order = stream.mixed(words)
        if order != words and order not in orders:
            orders.append(order)
    return orders
