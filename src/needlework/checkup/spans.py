"""Do the tokenizer, its chat template and the spans of a needle agree, token by token? Found anew by decoding alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needlework.checkup.case import Case, DoesNotApply, Finding
from needlework.tasks import make_task, toy
from needlework.tasks.base import Item
from needlework.tasks.niah import KEY, NEEDLE, VALUE, filled
from needlework.tasks.prompts import MARKER, has_chat, token_ids

_NEIGHBOURS = 3  # tokens shown on either side of a needle


def sample(tokenizer: Any, chat: bool) -> Item:
    """A short needle prompt as experiments ask it, with the needle in the middle."""
    if toy.is_toy(tokenizer):
        settings: dict[str, Any] = {"lengths": [64]}
    else:
        settings = {"lengths": [240], "reserve_tokens": 0, "style": "chat" if chat else "base"}
    task = make_task({"kind": "niah", "depths": [50], **settings})
    return next(iter(task.items(tokenizer, 0, None, None)))


def plain_spans(case: Case) -> Finding:
    tokenizer = _tokenizer(case)
    return _aligned(tokenizer, sample(tokenizer, chat=False))


def chat_spans(case: Case) -> Finding:
    tokenizer = _tokenizer(case)
    if not has_chat(tokenizer):
        raise DoesNotApply("the tokenizer has no chat template")
    if toy.is_toy(tokenizer):
        raise DoesNotApply("the toy language is asked in plain text")
    item = sample(tokenizer, chat=True)
    frame = _in_template(tokenizer, MARKER).split(MARKER)
    content = item.prompt_text.removeprefix(frame[0]).removesuffix(frame[-1])
    expected, found = _in_template(tokenizer, content, tokens=True), item.prompt
    if tuple(expected) != found and _decoded(tokenizer, expected) != _decoded(tokenizer, found):
        at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found)))
        words = f"the prompt is not what the chat template gives: {_quoted(tokenizer, found, at, at + 3)} and not"
        return Finding(False, f"{words} {_quoted(tokenizer, expected, at, at + 3)} at token {at}")
    return _aligned(tokenizer, item)


def _tokenizer(case: Case) -> Any:
    tokenizer = case.subject.tokenizer
    if tokenizer is None:
        raise DoesNotApply("there is no tokenizer")
    unknown = getattr(tokenizer, "unk_token_id", None)
    if not toy.is_toy(tokenizer) and unknown is not None and unknown in token_ids(tokenizer, filled(NEEDLE, KEY, VALUE)):
        raise DoesNotApply("the tokenizer does not know the words of the built-in English needle")
    return tokenizer


def _aligned(tokenizer: Any, item: Item) -> Finding:
    """The needle's span against where decoding finds the needle, and one BOS at most."""
    ((start, end),) = item.spans["needle"]
    ids = item.prompt
    shown = _shown(tokenizer, ids, start, end)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:2] == (bos, bos):
        return Finding(False, "the prompt begins with BOS twice", shown=shown)
    if toy.is_toy(tokenizer):
        needle = _decoded(tokenizer, ids[start:end])
        whole = item.target in needle and needle in item.prompt_text
        return Finding(whole, f"tokens {start} to {end - 1} are {needle!r}, which holds the answer {item.target!r}", shown=shown)
    needle = filled(NEEDLE, KEY, VALUE)
    if needle not in _decoded(tokenizer, ids):  # a tokenizer that changes all text, to lower case for instance
        needle = _decoded(tokenizer, token_ids(tokenizer, needle))
    found = _search(tokenizer, ids, needle)
    if found is None:
        return Finding(False, f"decoding the prompt does not give back the needle {needle!r}", shown=shown)
    if found != (start, end):
        words = f"the span is tokens {start} to {end - 1}, decoding finds the needle in {found[0]} to {found[1] - 1}"
        return Finding(False, words, shown=shown)
    return Finding(True, f"the needle is tokens {start} to {end - 1} of {len(ids)}, and decoding finds it there", shown=shown)


def _search(tokenizer: Any, ids: Sequence[int], needle: str) -> tuple[int, int] | None:
    """The shortest range of tokens whose text holds the needle: spans come from offsets, this from decoding."""
    ends = (end for end in range(1, len(ids) + 1) if needle in _decoded(tokenizer, ids[:end]))
    end = next(ends, None)
    if end is None:
        return None
    return next((start, end) for start in range(end - 1, -1, -1) if needle in _decoded(tokenizer, ids[start:end]))


def _shown(tokenizer: Any, ids: Sequence[int], start: int, end: int) -> tuple[str, ...]:
    parts = {
        "begins": (0, min(_NEIGHBOURS, start)),
        "before": (max(0, start - _NEIGHBOURS), start),
        "needle": (start, end),
        "after": (end, end + _NEIGHBOURS),
        "ends": (max(end, len(ids) - 2 * _NEIGHBOURS), len(ids)),
    }
    return tuple(f"{name:<7}{a:>4}: {_quoted(tokenizer, ids, a, b)}" for name, (a, b) in parts.items() if b > a)


def _quoted(tokenizer: Any, ids: Sequence[int], start: int, end: int) -> str:
    return " ".join(repr(_decoded(tokenizer, [token], strip=False)) for token in ids[start:end])


def _decoded(tokenizer: Any, ids: Sequence[int], strip: bool = True) -> str:
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    return text.strip() if strip else text


def _in_template(tokenizer: Any, content: str, tokens: bool = False) -> Any:
    turn = [{"role": "user", "content": content}]
    made = tokenizer.apply_chat_template(turn, tokenize=tokens, add_generation_prompt=True)
    return tuple(made["input_ids"] if hasattr(made, "keys") else made) if tokens else str(made)
