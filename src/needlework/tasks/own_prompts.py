"""Tasks with the user's own prompts: a JSONL file with a prompt, its target and optionally a needle in each line.

Prompts are used unchanged and are the same for every seed. The needle's tokens are located as in all tasks (`prompts.py`), so
that interventions and observers that refer to them work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from needlework.errors import WHOLE, NeedleworkError
from needlework.files import read_text
from needlework.requests import Answer
from needlework.tasks import prompts, toy
from needlework.tasks.base import (
    Ability,
    ChoiceMixin,
    Item,
    Mode,
    Task,
    TaskExtent,
    Tokenizer,
    begins,
    describe_fault,
    equals,
    holds,
    plain,
    prefix_errors,
    task,
)
from needlework.tasks.prompts import Piece
from needlework.toy.sample import Stream

MATCHES = {"contains": holds, "begins": begins, "exact": equals}


Whole = Annotated[int, Field(ge=-WHOLE, lt=WHOLE)]


class PromptLine(BaseModel):
    """The keys of a line of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    prompt: str = Field(min_length=1)
    target: str  # the right answer
    needle: str | None = None  # text in the prompt that contains the answer; all occurrences become spans
    options: list[str] | None = None  # continuations of the prompt, with their white space; one is the target
    id: str | Whole | None = None  # None: the line's number
    cluster: str | Whole | None = None  # of lines that share a text; None: a cluster of its own


class Own(Task):
    """Base class of both tasks, which generate an answer or choose an option."""

    files: ClassVar[tuple[str, ...]] = ("file",)
    file: str  # JSONL
    chat: bool = False  # wrap each prompt as a user turn of the tokenizer's chat template

    @cached_property
    def ability(self) -> Ability:  # type: ignore[override]
        """Retrieval if every line has a needle, so that the prompt contains the answer; otherwise none."""
        return "retrieval" if all(line.needle is not None for line in self.lines.values()) else ""

    @cached_property
    def lines(self) -> dict[int, PromptLine]:
        """The lines of the file by number, read once so that later changes of the file do not affect a run."""
        with prefix_errors("file"):
            texts = read_text(self.file, "give a file of JSON lines", encoding="utf-8-sig").split("\n")
        lines: dict[int, PromptLine] = {}
        numbers: dict[str, int] = {}
        for number, text in enumerate(texts, 1):
            if not text.strip():
                continue
            with prefix_errors(f"{self.file}:{number}"):
                line = lines[number] = _read_line(text, self.mode)
                other = numbers.setdefault(_name(number, line), number)
                if other != number:
                    raise NeedleworkError(f"the id {line.id or number!r} is taken by line {other}; give each line its own")
        if not lines:
            raise NeedleworkError(f'{self.file}:1: the file is empty; write lines such as {{"prompt": "...", "target": "..."}}')
        return lines

    def check(self) -> None:
        _ = self.lines

    def extent(self) -> TaskExtent:
        return TaskExtent(len(self.lines), 0)

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        new_tokens = self.ending(tokenizer)[0]
        speaks_toy = toy.is_toy(tokenizer)
        for number, line in self.lines.items():
            with prefix_errors(f"{self.file}:{number}"):
                for text in (line.prompt, *(line.options or ())) if speaks_toy else ():
                    toy.encoded(tokenizer, text.split())  # raises for words outside the toy vocabulary
                parts = [line.prompt] if line.needle is None else re.split(f"({re.escape(line.needle)})", line.prompt)
                pieces = [Piece(text, ("needle",) if i % 2 else ()) for i, text in enumerate(parts) if text]
                if self.chat:
                    pieces = prompts.in_chat(tokenizer, pieces)
                encoded = prompts.encode(tokenizer, pieces, special=not self.chat)
                name = _name(number, line)
                options = Stream("options", name).mixed(line.options or ())
                if len({prompts.token_ids(tokenizer, option) for option in options}) < len(options):
                    raise NeedleworkError(
                        f"two of the options {line.options} are the same tokens to this tokenizer; choose other words"
                    )
                pairs = [("true" if option.strip() == line.target.strip() else "other", option) for option in options]
                facts = {"context_tokens": len(encoded.ids), **({"needles": len(encoded.spans["needle"])} if line.needle else {})}
                cluster = "" if line.cluster is None else str(line.cluster)
                item = prompts.make_item(tokenizer, name, encoded, line.target, pairs, facts, window, cluster=cluster)
                yield self.fitted(item, new_tokens, max_tokens, "shorten the prompt, or take the line out of the file")

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """Return max_new_tokens and the stop text, by default the full stop for zoo models."""
        return self.max_new_tokens, self.stop or (toy.STOP if toy.is_toy(tokenizer) else None)


@task
class OwnPrompts(Own):
    """Prompts from a file: generate the answer and match it with the target, ignoring case and punctuation."""

    kind = "prompts"
    mode: ClassVar[Mode] = "generate"
    match: Literal["contains", "begins", "exact"] = "contains"

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return {"correct": float(MATCHES[self.match](answer.text, item.target))}


@task
class OwnPromptsChoice(ChoiceMixin, Own):
    """Prompts from a file: the most likely option of each line is the answer."""

    kind = "prompts_choice"

    @property
    def chance(self) -> float:
        counts = [len(line.options or ()) for line in self.lines.values()]
        return sum(1 / count for count in counts) / len(counts)


def _name(number: int, line: PromptLine) -> str:
    return f"prompts/{number if line.id is None else line.id}"


def _read_line(text: str, mode: Mode) -> PromptLine:
    """Parse and validate one line; raise NeedleworkError with the reason if it is invalid."""
    try:
        line = PromptLine.model_validate_json(text)
    except ValidationError as error:
        raise NeedleworkError(describe_fault(error.errors()[0], PromptLine)) from None
    if line.needle is not None and not line.needle.strip():
        raise NeedleworkError("the needle is empty; give it some words, or leave it out")
    if line.needle is not None and line.needle not in line.prompt:
        raise NeedleworkError(f"the needle {line.needle!r} does not occur in the prompt; copy it from there letter by letter")
    if mode == "generate" and not plain(line.target):
        raise NeedleworkError(f"the target {line.target!r} has no letter or digit, and nothing else counts in an answer")
    options = line.options
    if options is None and mode == "choices":
        raise NeedleworkError('prompts_choice needs "options" in every line: two or more texts, the target among them')
    if options is not None and (len(options) < 2 or len(set(options)) < len(options) or not all(options)):
        raise NeedleworkError("options are two or more different texts, none of them empty")
    if options is not None and [option.strip() for option in options].count(line.target.strip()) != 1:
        raise NeedleworkError(f"the target {line.target!r} must be one of the options, and one only (white space aside)")
    return line
