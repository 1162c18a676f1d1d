"""Right answers in tokens, and the samples that a model answers right: only there can a head have had a part in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from needlework.errors import NeedleworkError
from needlework.requests import Answer, Request
from needlework.tasks.base import Item
from needlework.tasks.prompts import token_ids

if TYPE_CHECKING:
    from needlework.subject import Subject


@dataclass(frozen=True)
class Question:
    """A sample that the model answers right, and how sure it is of that."""

    place: int  # among the items that were given
    item: Item
    answer: tuple[int, ...]
    log_p: float  # natural logarithm of the answer's probability


def answer_tokens(subject: Subject, item: Item) -> tuple[int, ...]:
    """The right answer as it follows the prompt.

    An item that offers options says so itself. Else the target is tokenized behind the prompt's text, where a tokenizer may
    join its first word with a space; where the prompt would then be other tokens (a chat template), it is tokenized alone.
    """
    if item.options and item.answer is not None:
        return item.options[item.answer]
    tokenizer = subject.tokenizer
    if tokenizer is None or not item.target:
        raise NeedleworkError(
            f"{item.id}: its right answer is not known in tokens; give it options, or a target and a model with a tokenizer"
        )
    for special in (False, True):
        whole = token_ids(tokenizer, item.prompt_text + item.target, special)
        if whole[: len(item.prompt)] == item.prompt and len(whole) > len(item.prompt):
            return whole[len(item.prompt) :]
    return token_ids(tokenizer, item.target)


def questions(subject: Subject, items: Sequence[Item]) -> list[Question]:
    """The samples whose right answer the model would say word by word if nobody interfered, in their order."""
    answers = [answer_tokens(subject, item) for item in items]
    asked = [Request(item.prompt, options=(answer,)) for item, answer in zip(items, answers, strict=True)]
    got: dict[int, Answer] = dict(subject.engine.run(asked))
    broken = next((i for i in got if got[i].error), None)
    if broken is not None:
        raise NeedleworkError(f"{items[broken].id}: the model cannot be asked: {got[broken].error}")
    return some([Question(i, item, answers[i], got[i].totals[0]) for i, item in enumerate(items) if got[i].greedy[0]], items)


def some(right: list[Question], items: Sequence[Item]) -> list[Question]:
    """These, if there are any: from none at all nothing can be told."""
    if not right:
        raise NeedleworkError(
            f"the model answers none of the {len(items)} samples right, so no head can be credited with it; choose an easier"
            " task (shorter lengths), or a model that retrieves"
        )
    return right
