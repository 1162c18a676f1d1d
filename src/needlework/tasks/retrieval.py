"""What all retrieval tasks share: their fields, their items in English, and their two ways of being asked.

One generator makes a task's items. Each item holds a prompt to answer *and* options to choose from, so the task that
generates (`niah`) and its companion that scores the options (`niah_choice`) have equal ids, clusters and prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from needlework.errors import NeedleworkError
from needlework.requests import MOST_TOKENS, Answer
from needlework.tasks import prompts, toy
from needlework.tasks.base import Ability, Item, Mode, Task, Tokenizer
from needlework.tasks.prompts import Piece
from needlework.tasks.scores import choice
from needlework.toy.sample import Stream

Length = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Sizes = Annotated[tuple[Length, ...], Field(min_length=1)]
Layout = Literal["plain", "jrt", "question_first"]
FRAMES = {"english": ("CONTEXT: ", "QUESTION: ", "\n\n"), "toy": ("context : ", "question : ", " ")}
BASE_LEAD = "ANSWER: Here is the most relevant sentence in the context: "
CHAT_END = "Output the most relevant sentence in the context, word by word!"


@dataclass(frozen=True)
class Draft:
    """A sample in text, before it is tokenized."""

    context: Sequence[Piece]
    question: str
    target: str
    lead: str  # what a base model continues
    instruction: str  # what a chat model is told
    options: Sequence[tuple[str, str]] = ()  # (true | context | absent, text)
    facts: Mapping[str, Any] = field(default_factory=dict)
    world: str = "english"
    value: str = ""  # what a twin would replace, wherever a piece named "value" holds it
    spare: Sequence[str] = ()  # values that it could be replaced with


class Retrieval(Task):
    """Fields of every task that hides something in a context and asks for it."""

    ability: ClassVar[Ability] = "retrieval"
    toy_new_tokens: ClassVar[int] = 12
    world: Literal["auto", "toy", "english"] = "auto"  # auto: the toy language if the tokenizer speaks it
    samples: int = Field(1, ge=1)  # per cell of the task's grid
    style: Literal["auto", "base", "chat"] = "auto"  # of English prompts; auto: chat if there is a chat template
    layout: Layout = "plain"
    absent: int = Field(3, ge=0, le=3)  # options that do not stand in the context
    against: Literal["all", "context", "absent"] = "all"  # which options count for "correct" in the choice task
    twins: bool = False  # English: demand a twin prompt of the same length (toy prompts have one where there can be one)

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """Answers in the toy language are short and end with a full stop, so nothing is decoded in vain."""
        if not toy.is_toy(tokenizer):
            return self.max_new_tokens, self.stop
        chosen = "max_new_tokens" in self.model_fields_set
        return self.max_new_tokens if chosen else self.toy_new_tokens, self.stop or toy.STOP

    def chance_among(self, in_context: int) -> float:
        counts = {"all": in_context + self.absent, "context": in_context, "absent": self.absent}
        return 1 / (1 + counts[self.against])

    def drafted_item(self, tokenizer: Tokenizer, draft: Draft, name: str, cluster: str, window: int | None) -> Item:
        """Tokens of a draft, with its options in an order that depends on the item's name alone."""
        encoded = self.encode(tokenizer, draft)
        options = Stream("options", name).mixed(draft.options) if len(draft.options) > 1 else []
        twin = self._twin(tokenizer, draft, len(encoded.ids)) if self.twins or draft.world == "toy" else None
        return Item(
            id=name,
            cluster=cluster,
            prompt=encoded.ids,
            prompt_text=encoded.text,
            target=draft.target,
            spans=encoded.spans,
            options=tuple(prompts.token_ids(tokenizer, text) for _, text in options),
            answer=[kind for kind, _ in options].index("true") if options else None,
            twins={"twin": twin[0]} if twin else {},
            twin_target=twin[1] if twin else "",
            facts={
                "world": draft.world,
                "layout": self.layout,
                **draft.facts,
                **toy.option_facts([kind for kind, _ in options], [text for _, text in options]),
                **toy.placed_facts(encoded.spans, len(encoded.ids), window),
                **({"wider_spans": list(encoded.wider)} if encoded.wider else {}),
            },
        )

    def _twin(self, tokenizer: Tokenizer, draft: Draft, length: int) -> tuple[tuple[int, ...], str] | None:
        """The same prompt with another value of the same number of tokens: memory is swapped token for token."""
        for other in draft.spare if draft.value else ():
            twin = swapped(draft, other)
            with suppress(NeedleworkError):  # a value that this tokenizer cannot place is no twin
                ids = self.encode(tokenizer, twin).ids
                if len(ids) == length:
                    return ids, twin.target
        if self.twins:
            raise NeedleworkError(
                f"{self.kind}: no other value gives a prompt of the same length in this tokenizer, so there is no twin; "
                + (f"offer a value with as many tokens as {draft.value!r}" if draft.value else "it has no single value")
            )
        return None

    def encode(self, tokenizer: Tokenizer, draft: Draft) -> prompts.Encoded:
        chat = self.style == "chat" or (self.style == "auto" and prompts.has_chat(tokenizer))
        pieces = arranged(draft.context, draft.question, self.layout, FRAMES[draft.world])
        if chat:
            whole = prompts.in_chat(tokenizer, [*pieces, Piece(draft.instruction)])
        else:
            whole = [*pieces, Piece(draft.lead)]
        return prompts.encode(tokenizer, whole, special=not chat, optional=("value", "distractor", "question"))


def swapped(draft: Draft, value: str) -> Draft:
    """The same draft about another value."""
    context = [
        replace(piece, text=value) if "value" in piece.names and piece.text == draft.value else piece for piece in draft.context
    ]
    return replace(draft, context=context, target=draft.target.replace(draft.value, value))


def arranged(context: Sequence[Piece], question: str, layout: Layout, frame: tuple[str, str, str]) -> list[Piece]:
    """The paper's blocks: context and question; the same twice (JRT); or the question before the context."""
    read = [Piece(frame[0]), *context, Piece(frame[2])]
    asked = [Piece(frame[1]), Piece(question, ("question",)), Piece(frame[2])]
    if layout == "question_first":
        return [*asked, *read]
    return [*read, *asked] * (2 if layout == "jrt" else 1)


def different(stream: Stream, pool: Sequence[str], count: int, what: str, cure: str) -> list[str]:
    """`count` of the pool, no two alike, in random order."""
    if count > len(pool):
        raise NeedleworkError(f"{count} different {what} are needed, there are {len(pool)}; {cure}")
    return stream.distinct(pool, count)


if TYPE_CHECKING:
    _Companion = Retrieval
else:
    _Companion = object  # no fields, or Retrieval's defaults would go before those of the task that it is mixed with


class Chosen(_Companion):
    """Makes the companion of a retrieval task: the same items, scored by the likelihood of their options."""

    mode: ClassVar[Mode] = "choices"

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        for item in super().items(tokenizer, seed, window, max_tokens):
            kinds = item.facts.get("option_kinds", [])
            if len(item.options) < 2 or (self.against != "all" and self.against not in kinds):
                raise NeedleworkError(
                    f"{self.kind}: there is nothing to choose from (against: {self.against}); add distractors or absent "
                    "values, and for own needles put {value} into the needle and give others"
                )
            yield item

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return choice(item, answer, self.against)
