"""The base class of retrieval tasks, and the tasks `<kind>_choice` that score options instead of generating.

Each item has both a prompt to answer and options to choose from, so that the generating task (`niah`) and its choice task
(`niah_choice`) have the same ids, clusters and prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from needlework.errors import NeedleworkError
from needlework.requests import MOST_TOKENS, Answer
from needlework.tasks import prompts, toy
from needlework.tasks.base import Ability, Item, Mode, Task, Tokenizer, task
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
    """A sample as text, before it is tokenized."""

    context: Sequence[Piece]
    question: str
    target: str
    lead: str  # end of a base model's prompt, which it continues
    instruction: str  # end of a chat model's user turn
    options: Sequence[tuple[str, str]] = ()  # (kind, text); kind: true, context (wrong, in the context) or absent
    facts: Mapping[str, Any] = field(default_factory=dict)
    world: str = "english"
    value: str = ""  # replaced in a twin, in the pieces named "value"
    spare: Sequence[str] = ()  # candidates to replace it


class Retrieval(Task):
    """Base class of tasks that ask for something in the context."""

    ability: ClassVar[Ability] = "retrieval"
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

    def drafted_item(
        self, tokenizer: Tokenizer, draft: Draft, name: str, cluster: str, window: int | None, order: str = ""
    ) -> Item:
        """Tokenize a draft. Its options are shuffled with the seed `order`, by default the item's name."""
        encoded = self.encode(tokenizer, draft)
        options = Stream("options", order or name).mixed(draft.options) if len(draft.options) > 1 else []
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
        """Return the tokens of a prompt of `length` tokens with another value, and its target; None if no spare value fits."""
        for other in draft.spare if draft.value else ():
            context = [
                replace(piece, text=other) if "value" in piece.names and piece.text == draft.value else piece
                for piece in draft.context
            ]
            twin = replace(draft, context=context, target=draft.target.replace(draft.value, other))
            with suppress(NeedleworkError):  # skip values whose span this tokenizer cannot represent
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


R = TypeVar("R", bound=Retrieval)


def choice_companion(base: type[R]) -> type[R]:
    """Register and return the task `<kind>_choice`, which scores the log-likelihood of the options of the same items.

    Assign it to `<Name>Choice` in the module of the task, so that it can be pickled.
    """

    class Companion(base):  # type: ignore[valid-type,misc]
        kind = f"{base.kind}_choice"
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

        @property
        def chance(self) -> float:
            in_context = self.in_context()
            counts = {"all": in_context + self.absent, "context": in_context, "absent": self.absent}
            return float(1 / (1 + counts[self.against]))

    Companion.__name__ = Companion.__qualname__ = f"{base.__name__}Choice"
    Companion.__module__ = base.__module__
    Companion.__doc__ = f"The same items as `{base.kind}`: the most likely option is the answer."
    return task(Companion)
