"""The base class of retrieval tasks, and recall tasks without a haystack: key-value lists (MQAR), phone books and copying.

Each item has both a prompt to answer and options to choose from, so that the generating task (`niah`) and its choice task
(`niah_choice`) have the same ids, clusters and prompts. Prompts are in the toy language for zoo models, in English for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from needlework.errors import NeedleworkError
from needlework.requests import MOST_TOKENS, Answer
from needlework.tasks import prompts, toy
from needlework.tasks.base import (
    Ability,
    Item,
    Mode,
    Task,
    TaskExtent,
    Tokenizer,
    begins,
    choice_companion,
    prefix_errors,
    task,
    words_right,
)
from needlework.tasks.haystack import FIRST_NAMES, LAST_NAMES, NOUNS, fill_template, needle_pieces
from needlework.tasks.prompts import Piece
from needlework.toy import needles
from needlework.toy.sample import EVAL_SPLIT, Stream, ToySample, Words

Length = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Sizes = Annotated[tuple[Length, ...], Field(min_length=1)]
Depths = Annotated[tuple[Annotated[float, Field(ge=0, le=100)], ...], Field(min_length=1)]
Layout = Literal["plain", "jrt", "question_first"]
FRAMES = {"english": ("CONTEXT: ", "QUESTION: ", "\n\n"), "toy": ("context : ", "question : ", " ")}


@dataclass(frozen=True)
class Draft:
    """A sample as text, before it is tokenized."""

    context: Sequence[Piece]
    question: str
    target: str
    lead: str = "ANSWER: "  # end of a base model's prompt, which it continues
    instruction: str = "Answer with nothing but what is asked for."  # end of a chat model's user turn
    value: str = ""  # the right option of the choice task
    wrong: Sequence[str] = ()  # wrong options that occur in the context
    absent: Sequence[str] = ()  # values that do not occur in it: wrong options, and values of a twin
    option: str = "{value}"  # template of an option; "": no options
    has_twin: bool = True  # whether the pieces named "value" can be replaced by another value
    facts: Mapping[str, Any] = field(default_factory=dict)
    world: str = "english"


class Retrieval(Task):
    """Base class of tasks that ask for something in the context."""

    ability: ClassVar[Ability] = "retrieval"
    mode: ClassVar[Mode] = "generate"
    toy_new_tokens: ClassVar[int] = 12
    world: Literal["auto", "toy", "english"] = "auto"  # auto: toy if the tokenizer is the zoo's
    samples: int = Field(1, ge=1)  # per cell of the task's grid, such as length x depth
    style: Literal["auto", "base", "chat"] = "auto"  # of English prompts; auto: chat if there is a chat template
    layout: Layout = "plain"
    absent: int = Field(3, ge=0, le=3)  # wrong options that do not occur in the context
    against: Literal["all", "context", "absent"] = "all"  # wrong options that count for "correct" in the choice task
    twins: bool = False  # English: require a twin of equal length (toy prompts always get one if possible)

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """Return max_new_tokens and the stop text; toy answers are short and end with a full stop."""
        if not toy.is_toy(tokenizer):
            return self.max_new_tokens, self.stop
        chosen = "max_new_tokens" in self.model_fields_set
        return self.max_new_tokens if chosen else self.toy_new_tokens, self.stop or toy.STOP

    def in_context(self) -> int:
        """Return the number of wrong options that occur in the context."""
        raise TypeError(f"{type(self).__name__} must define in_context()")

    def fitted(self, item: Item, new_tokens: int, max_tokens: int | None, hint: str = "choose a shorter length") -> Item:
        """Return the item; raise NeedleworkError if it is too long, or if a choice task has nothing to choose from."""
        kinds = super().fitted(item, new_tokens, max_tokens, hint).facts.get("option_kinds", [])
        if self.mode == "choices" and (len(kinds) < 2 or self.against not in ("all", *kinds)):
            raise NeedleworkError(
                f"{self.kind}: there is nothing to choose from (against: {self.against}); add distractors or absent "
                "values, and for own needles put {value} into the needle and give others"
            )
        return item

    @property
    def chance(self) -> float:
        counts = {"all": self.in_context() + self.absent, "context": self.in_context(), "absent": self.absent}
        return float(1 / (1 + counts[self.against])) if self.mode == "choices" else 0.0

    def drafted_item(
        self, tokenizer: Tokenizer, draft: Draft, name: str, cluster: str, window: int | None, order: str = ""
    ) -> Item:
        """Tokenize a draft. Its options are shuffled with the seed `order`, by default the item's name."""
        encoded = self.encode(tokenizer, draft)
        values = [("true", draft.value), *(("context", value) for value in draft.wrong[: self.in_context()])]
        values += [("absent", value) for value in draft.absent[: self.absent]]
        options = [(kind, fill_template(draft.option, value=value)) for kind, value in values if draft.option]
        return prompts.make_item(
            tokenizer,
            name,
            encoded,
            draft.target,
            Stream("options", order or name).mixed(options) if len(options) > 1 else [],
            {"world": draft.world, "layout": self.layout, **draft.facts},
            window,
            cluster=cluster,
            twin=self._twin(tokenizer, draft, len(encoded.ids)) if self.twins or draft.world == "toy" else None,
            more={"wider_spans": list(encoded.wider)} if encoded.wider else {},
        )

    def _twin(self, tokenizer: Tokenizer, draft: Draft, length: int) -> tuple[tuple[int, ...], str] | None:
        """Return the tokens of a prompt of `length` tokens with another value, and its target; None if no spare value fits."""
        for other in draft.absent if draft.has_twin else ():
            swapped = {
                Piece(draft.value, names): Piece(other, names) for piece in draft.context if "value" in (names := piece.names)
            }
            context = [swapped.get(piece, piece) for piece in draft.context]
            twin = replace(draft, context=context, target=draft.target.replace(draft.value, other))
            with suppress(NeedleworkError):  # skip values whose span this tokenizer cannot represent
                ids = self.encode(tokenizer, twin).ids
                if len(ids) == length:
                    return ids, twin.target
        if self.twins:
            raise NeedleworkError(
                f"{self.kind}: no other value gives a prompt of the same length in this tokenizer, so there is no twin; "
                + (f"offer a value with as many tokens as {draft.value!r}" if draft.has_twin else "it has no single value")
            )
        return None

    def encode(self, tokenizer: Tokenizer, draft: Draft) -> prompts.Encoded:
        chat = self.style == "chat" or (self.style == "auto" and prompts.has_chat(tokenizer))
        pieces = arranged(draft.context, draft.question, self.layout, FRAMES[draft.world])
        pieces.append(Piece(draft.instruction if chat else draft.lead))
        whole = prompts.in_chat(tokenizer, pieces) if chat else pieces
        return prompts.encode(tokenizer, whole, special=not chat, optional=("value", "distractor", "question"))


class Grid(Retrieval):
    """Base class of tasks that hide a needle at each length and depth."""

    usual_lengths: ClassVar[tuple[int, ...]]  # of English prompts, where none are given
    lengths: Sizes | None = None
    depths: Depths = (0, 25, 50, 75, 100)
    distractors: int = Field(3, ge=0)  # similar needles

    def extent(self) -> TaskExtent:
        lengths = self.lengths or self.usual_lengths
        return TaskExtent(len(lengths) * len(self.depths) * self.samples, max(lengths))

    def in_context(self) -> int:
        return self.distractors


def arranged(context: Sequence[Piece], question: str, layout: Layout, frame: tuple[str, str, str]) -> list[Piece]:
    """Return the pieces of a layout: context and question; both twice (jrt); or the question first."""
    read = [Piece(frame[0]), *context, Piece(frame[2])]
    asked = [Piece(frame[1]), Piece(question, ("question",)), Piece(frame[2])]
    if layout == "question_first":
        return [*asked, *read]
    return [*read, *asked] * (2 if layout == "jrt" else 1)


def draw_distinct(stream: Stream, pool: Sequence[str], count: int, what: str, hint: str) -> list[str]:
    """Draw `count` items of the pool without replacement; raise NeedleworkError if there are too few."""
    if count > len(pool):
        raise NeedleworkError(f"{count} different {what} are needed, there are {len(pool)}; {hint}")
    return stream.distinct(pool, count)


# --- Recall without a haystack ---

MOST_OPTIONS = 7  # wrong options from the list


class Lists(Retrieval):
    """Base class: lists of several sizes with several queries each."""

    english_question: ClassVar[str] = ""
    sizes: Sizes = (4, 8, 16)  # entries per list
    queries: int = Field(1, ge=1)  # queried keys per list
    samples: int = Field(8, ge=1)  # lists per size

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        is_toy = toy.resolve(self.world, tokenizer) == "toy"
        new_tokens = self.ending(tokenizer)[0]
        for size, i in product(self.sizes, range(self.samples)):
            if self.queries > size:
                raise NeedleworkError(f"{self.kind}: {self.queries} queries need as many entries; sizes holds {size}")
            if is_toy and self.layout != "plain":
                raise NeedleworkError(
                    f"{self.kind}: in the toy language it has the layout plain only, not {self.layout}: leave layout out"
                )
            name = f"{self.kind.removesuffix('_choice')}/size={size}/{i}"
            stream = Stream(EVAL_SPLIT, name, seed)
            if is_toy:
                with prefix_errors(name):
                    samples = self.toy_samples(stream, size)
                make = partial(
                    toy.toy_item, tokenizer, absent=self.absent, in_context=self.in_context(), window=window, cluster=name
                )
                facts = [{"entries": size, "query": j, "layout": "plain"} for j in range(len(samples))]
                items = [make(sample, f"{name}/{j}", facts=facts[j]) for j, sample in enumerate(samples)]
            else:
                drafts = self.english_drafts(stream, size)
                items = [self.drafted_item(tokenizer, draft, f"{name}/{j}", name, window) for j, draft in enumerate(drafts)]
            yield from (self.fitted(item, new_tokens, max_tokens) for item in items)

    def extent(self) -> TaskExtent:
        return TaskExtent(len(self.sizes) * self.samples * self.queries, max(self.sizes))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        exact = float(begins(answer.text, item.target))
        return {"correct": exact, "graded": words_right(answer.text, item.target)}

    def in_context(self) -> int:
        return min(MOST_OPTIONS, min(self.sizes) - 1)

    def toy_samples(self, stream: Stream, size: int) -> list[ToySample]:
        raise TypeError(f"{type(self).__name__} must define toy_samples()")

    def english_entries(self, stream: Stream, size: int) -> tuple[list[str], list[str], list[str]]:
        """Return the keys and values of an English list, and three values that are not in it."""
        raise TypeError(f"{type(self).__name__} must define english_entries()")

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        """Return a draft for each query of an English list; the queried entry is the needle."""
        keys, values, spare = self.english_entries(stream, size)
        drafts = []
        for j, i in enumerate(stream.distinct(range(size), self.queries)):
            context: list[Piece] = []
            for k, (key, value) in enumerate(zip(keys, values, strict=True)):
                context += needle_pieces("{key}: {value}", "needle" if k == i else "distractor", key=key, value=value)
                context.append(Piece("\n"))
            drafts.append(
                Draft(
                    context=context[:-1],
                    question=self.english_question.format(key=keys[i]),
                    target=values[i],
                    value=values[i],
                    wrong=stream.mixed([value for k, value in enumerate(values) if k != i]),
                    absent=spare,
                    facts={"entries": len(keys), "query": j, "key": keys[i], "needles": len(keys)},
                )
            )
        return drafts


@task
class Mqar(Lists):
    """Multi-query associative recall: the value that follows a key in a list of pairs."""

    kind = "mqar"
    toy_new_tokens: ClassVar[int] = 1
    english_question = "Which word stands after {key} in the list?"

    def toy_samples(self, stream: Stream, size: int) -> list[ToySample]:
        return needles.make_key_values(stream, size, self.queries)

    def english_entries(self, stream: Stream, size: int) -> tuple[list[str], list[str], list[str]]:
        words = draw_distinct(stream, NOUNS, 2 * size + 3, "words", "choose smaller sizes")
        return words[:size], words[size : 2 * size], words[2 * size :]


MqarChoice = choice_companion(Mqar)


@task
class PhoneBook(Lists):
    """Phone book: the number of a name in a list."""

    kind = "phone_book"
    toy_new_tokens: ClassVar[int] = 6
    english_question = "What is the phone number of {key}?"

    def toy_samples(self, stream: Stream, size: int) -> list[ToySample]:
        return needles.make_phone_book(stream, size, self.queries)

    def english_entries(self, stream: Stream, size: int) -> tuple[list[str], list[str], list[str]]:
        numbers = stream.unique(lambda: f"{stream.between(200, 999)}-{stream.between(1000, 9999)}", size + 3)
        names = [f"{first} {last}" for first, last in product(FIRST_NAMES, LAST_NAMES)]
        return draw_distinct(stream, names, size, "names", "choose smaller sizes"), numbers[:size], numbers[size:]


PhoneBookChoice = choice_companion(PhoneBook)


@task
class Copy(Lists):
    """Repeat the words of the context. Wrong options are the same words in other orders."""

    kind = "copy"

    def in_context(self) -> int:
        return 0

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        most, stop = super().ending(tokenizer)
        return max(most, 4 * max(self.sizes)) if "max_new_tokens" not in self.model_fields_set else most, stop

    def toy_samples(self, stream: Stream, size: int) -> list[ToySample]:
        sample = needles.make_copy(stream, size)
        return [replace(sample, absent=tuple(_other_orders(stream, sample.target)))]

    def english_drafts(self, stream: Stream, size: int) -> list[Draft]:
        words = [stream.pick(NOUNS) for _ in range(size)]
        text = " ".join(words)
        return [
            Draft(
                context=[Piece(text, ("needle", "value"))],
                question="Which words stand above?",
                target=text,
                instruction="Repeat the context word for word.",
                value=text,
                absent=[" ".join(other) for other in _other_orders(stream, words)],
                has_twin=False,
                facts={"entries": size, "needles": 1},
            )
        ]


CopyChoice = choice_companion(Copy)


def _other_orders(stream: Stream, words: Sequence[str]) -> list[Words]:
    """Return three distinct permutations of the words that differ from their order."""
    if len(set(words)) < 3:
        raise NeedleworkError("copy: these words have too few orders to choose from; use sizes of 4 or more")
    return stream.unique(lambda: tuple(stream.mixed(words)), 3, [tuple(words)])
