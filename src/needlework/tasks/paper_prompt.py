"""The paper's needle-in-a-haystack prompt, token for token (`style: paper`).

The essay is tokenized and cut. The tokens of "\\n" + needle + "\\n" are inserted after the last "." token before the depth, at
the beginning if there is none, and at depth 100 at the very end, even within a word. The result is decoded, put into the prompt
as text, and tokenized again as a whole. A chat model gets the instruction once, after the last question.
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
    """A context with a needle as text in three parts, and the essay token before which the needle was inserted."""

    before: str
    needle: str  # with its line breaks
    after: str
    place: int


def needle_ids(tokenizer: Tokenizer, needle: str) -> tuple[int, ...]:
    return prompts.token_ids(tokenizer, f"\n{needle}\n")


def hide(tokenizer: Any, essay: Sequence[int], needle: Sequence[int], depth_percent: float) -> Hidden:
    """Insert the needle's tokens into the essay by the authors' rule, and decode the result.

    Raises:
        NeedleworkError: decoding is not prefix-stable, so that the needle's text cannot be located.
    """
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
    """Return the id of the token "."."""
    found = tokenizer.convert_tokens_to_ids(".")
    if found is None or found == getattr(tokenizer, "unk_token_id", None):
        raise NeedleworkError('style: paper puts needles after tokens that are ".", and this tokenizer has none; use style: base')
    return int(found)


def encode(tokenizer: Tokenizer, draft: Draft, layout: Layout) -> Encoded:
    """Tokenize the prompt as a whole; tokens that contain both needle and other text belong to the needle's span."""
    chat = prompts.has_chat(tokenizer)
    pieces = arranged(draft.context, draft.question, layout, FRAMES[draft.world])
    if chat:  # replace the last two pieces, the question and the blank line after it
        whole = prompts.in_chat(tokenizer, [*pieces[:-2], Piece(f"{draft.question} {CHAT_END}", ("question",))])
    else:
        whole = [*pieces, Piece(draft.lead)]
    return prompts.encode(tokenizer, whole, special=not chat, optional=("value", "question"), split=False)


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
