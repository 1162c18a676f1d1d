"""The paper's own needle prompt, token for token: where its authors put the needle, and how they ask (`style: paper`).

The essay is tokenized and cut; "\\n" + needle + "\\n" goes in as tokens after the nearest token before the depth that is ".",
at the beginning if there is none, and at depth 100 at the very end, in the middle of a word if need be. The result is decoded,
put into the prompt as text, and tokenized as a whole. A chat model's question and instruction stand on one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from needlework.errors import NeedleworkError
from needlework.tasks import prompts
from needlework.tasks.base import Tokenizer
from needlework.tasks.prompts import Encoded, Piece
from needlework.tasks.retrieval import CHAT_END, FRAMES, Draft, Layout, arranged


@dataclass(frozen=True)
class Hidden:
    """A context with a needle in it, as text in three parts, and the token of the essay that the needle stands before."""

    before: str
    needle: str  # with the line breaks around it
    after: str
    place: int


def needle_ids(tokenizer: Tokenizer, needle: str) -> tuple[int, ...]:
    return prompts.token_ids(tokenizer, f"\n{needle}\n")


def hide(tokenizer: Any, essay: Sequence[int], needle: Sequence[int], depth_percent: float) -> Hidden:
    """Put the needle's tokens among the essay's, by the authors' rule."""
    place = len(essay)
    if depth_percent != 100:
        stop = full_stop(tokenizer)
        place = int(len(essay) * (depth_percent / 100))
        while place and essay[place - 1] != stop:
            place -= 1
    shown = [
        _decode(tokenizer, ids) for ids in (essay[:place], [*essay[:place], *needle], [*essay[:place], *needle, *essay[place:]])
    ]
    before, with_needle, whole = shown
    if not (with_needle.startswith(before) and whole.startswith(with_needle)):
        raise NeedleworkError(
            "this tokenizer decodes tokens otherwise when others follow, so no needle can be placed; use style: base"
        )
    return Hidden(before, with_needle[len(before) :], whole[len(with_needle) :], place)


def full_stop(tokenizer: Any) -> int:
    """The token that is "." and nothing else."""
    found = tokenizer.convert_tokens_to_ids(".")
    if found is None or found == getattr(tokenizer, "unk_token_id", None):
        raise NeedleworkError('style: paper puts needles after tokens that are ".", and this tokenizer has none; use style: base')
    return int(found)


def encode(tokenizer: Tokenizer, draft: Draft, layout: Layout) -> Encoded:
    """The tokens are those of the text as a whole; one that holds needle and other words belongs to the span."""
    chat = prompts.has_chat(tokenizer)
    question = f"{draft.question} {CHAT_END}" if chat else draft.question
    pieces = arranged(draft.context, question, layout, FRAMES[draft.world])
    whole = prompts.in_chat(tokenizer, pieces[:-1]) if chat else [*pieces, Piece(draft.lead)]
    return prompts.encode(tokenizer, whole, special=not chat, optional=("value", "question"), split=False)


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
