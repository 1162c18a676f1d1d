"""Prompts from named pieces of text, whose token spans are computed and not searched for; items from prompts.

The character range of a piece is known from the construction of the text; the tokenizer's offset mapping gives its tokens. If a
token would contain both needle and other text, the text is split there before it is tokenized. (`style: paper` does not split and
records such spans.) All other spans are decoded and compared with their text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Span
from needlework.tasks.base import Item, Tokenizer

MARKER = "CONTENTGOESHERE"  # placeholder for the user's text when the chat template is split
_PLAIN = "ask in plain text (style: base; of kind prompts, chat: false)"


@dataclass(frozen=True)
class Piece:
    """Text and the names of the spans that it belongs to. Adjacent pieces of one name form one range."""

    text: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Encoded:
    ids: tuple[int, ...]
    text: str
    spans: dict[str, Span]
    wider: tuple[str, ...] = ()  # spans whose outermost tokens also contain other text


def token_ids(tokenizer: Tokenizer, text: str, special: bool = False) -> tuple[int, ...]:
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"])


def token_offsets(tokenizer: Tokenizer, text: str, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
    """Return token ids and the character range (start, end) of each; this needs a fast tokenizer."""
    try:
        encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        return [int(i) for i in encoding["input_ids"]], [(int(a), int(b)) for a, b in encoding["offset_mapping"]]
    except (NotImplementedError, KeyError):
        raise NeedleworkError(
            "this tokenizer cannot say which characters its tokens come from, so needles cannot be placed; "
            "use a fast tokenizer (a directory with tokenizer.json)"
        ) from None


def encode(
    tokenizer: Tokenizer, pieces: Sequence[Piece], special: bool = True, optional: Sequence[str] = (), split: bool = True
) -> Encoded:
    """Tokenize the joined pieces and return the token ranges of every span name.

    Args:
        special: add the tokenizer's special tokens (BOS); False for chat templates, which contain their own.
        optional: spans to omit if they match no token range, such as a value that shares a token with its needle. For other
            spans this is an error.
        split: tokenize separately at span edges inside a token. If False, such spans include the shared tokens (`wider`).
    """
    text = "".join(piece.text for piece in pieces)
    wanted = {name: list(_ranges(pieces, name)) for name in dict.fromkeys(n for p in pieces for n in p.names)}
    ids, offsets = token_offsets(tokenizer, text, special)
    _drop_end(tokenizer, ids, offsets)
    edges = {edge for name, ranges in wanted.items() if name not in optional for r in ranges for edge in r}
    where = _Map(text, offsets)
    cuts = sorted(edge for edge in edges if where.joined_at(edge))
    if cuts and split:
        ids, offsets = _in_parts(tokenizer, text, cuts, special)
        where = _Map(text, offsets)
    spans: dict[str, Span] = {}
    wider = []
    for name, ranges in wanted.items():
        if not split and name not in optional and any(where.place(*part) is None for part in ranges):
            spans[name] = tuple((inside[0], inside[-1] + 1) for inside in (where.overlapping(*part) for part in ranges))
            wider.append(name)
            continue
        with suppress(NeedleworkError) if name in optional else nullcontext():
            spans[name] = tuple(_verified(tokenizer, ids, where.place(a, b), text[a:b], name) for a, b in ranges)
    return Encoded(tuple(ids), text, spans, tuple(wider))


def _ranges(pieces: Sequence[Piece], name: str) -> Iterator[tuple[int, int]]:
    """Yield the character ranges of a span name, without white space at their ends."""
    text, at, start = "".join(piece.text for piece in pieces), 0, None
    for piece in (*pieces, Piece("")):
        if name in piece.names and start is None:
            start = at
        if name not in piece.names and start is not None:
            part = text[start:at]
            if not part.strip():
                raise NeedleworkError(f"the {name} is empty; give it some words")
            yield at - len(part.lstrip()), start + len(part.rstrip())
            start = None
        at += len(piece.text)


def _drop_end(tokenizer: Tokenizer, ids: list[int], offsets: list[tuple[int, int]]) -> None:
    """Remove the EOS token that some tokenizers append, because an answer must follow."""
    end = getattr(tokenizer, "eos_token_id", None)
    while ids and ids[-1] == end and offsets[-1][0] == offsets[-1][1]:
        ids.pop()
        offsets.pop()


class _Map:
    """Map from characters to tokens. Tokens without characters (BOS) are omitted, so that starts and ends are sorted."""

    def __init__(self, text: str, offsets: Sequence[tuple[int, int]]) -> None:
        self.text, self.offsets = text, offsets
        self.numbers = [i for i, (a, b) in enumerate(offsets) if b > a]
        self.starts = [offsets[i][0] for i in self.numbers]
        self.ends = [offsets[i][1] for i in self.numbers]

    def overlapping(self, start: int, end: int) -> list[int]:
        """Return the tokens that contain a non-space character of this range."""
        near = self.numbers[bisect_right(self.ends, start) : bisect_left(self.starts, end)]
        return [i for i in near if self.text[max(self.offsets[i][0], start) : min(self.offsets[i][1], end)].strip()]

    def joined_at(self, edge: int) -> bool:
        """Return whether a token contains non-space characters on both sides of this position."""
        near = self.numbers[bisect_right(self.ends, edge) : bisect_left(self.starts, edge)]
        return any(self.text[self.offsets[i][0] : edge].strip() and self.text[edge : self.offsets[i][1]].strip() for i in near)

    def place(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the token range of a character range; None if its first or last token also contains other text."""
        inside = self.overlapping(start, end)
        if not inside or self.text[self.offsets[inside[0]][0] : start].strip():
            return None
        return None if self.text[end : self.offsets[inside[-1]][1]].strip() else (inside[0], inside[-1] + 1)


def _in_parts(tokenizer: Tokenizer, text: str, edges: Sequence[int], special: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokenize the text in parts split at these characters; raise NeedleworkError if it then decodes differently."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    for start, end in zip((0, *edges), (*edges, len(text)), strict=True):
        part_ids, where = token_offsets(tokenizer, text[start:end], special and start == 0)
        _drop_end(tokenizer, part_ids, where)
        ids += part_ids
        offsets += [(a + start, b + start) for a, b in where]
    whole = token_ids(tokenizer, text, special=False)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    if tokenizer.decode(ids, **plain).strip() != tokenizer.decode(list(whole), **plain).strip():
        near = text[max(0, edges[0] - 12) : edges[0] + 12]
        raise NeedleworkError(
            f"a span ends inside a token at {near!r}, and this tokenizer changes the text when it is split there; "
            "begin the needle with a space before it and end it with a full stop, or choose other words"
        )
    return ids, offsets


def _verified(tokenizer: Tokenizer, ids: Sequence[int], tokens: tuple[int, int] | None, words: str, name: str) -> tuple[int, int]:
    """Return the token range; raise NeedleworkError if it does not decode to `words`."""
    if tokens is None:
        raise NeedleworkError(f"no token range holds the {name} {words!r} alone; choose other words for it")
    inside = ids[tokens[0] : tokens[1]]
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown in inside:
        raise NeedleworkError(f"the tokenizer does not know all words of the {name} {words!r}; choose words it knows")
    shown = tokenizer.decode(list(inside), clean_up_tokenization_spaces=False).strip()
    if shown == words:
        return tokens
    alone = tokenizer.decode(list(token_ids(tokenizer, words)), clean_up_tokenization_spaces=False).strip()
    if shown != alone:  # accept tokenizers that change all text (e.g. lower-case it), but no wrong range
        raise NeedleworkError(f"the {name} {words!r} decodes to {shown!r}: this tokenizer cannot place it")
    return tokens


def has_chat(tokenizer: Tokenizer) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def in_chat(tokenizer: Any, pieces: Sequence[Piece]) -> list[Piece]:
    """Wrap the pieces as one user turn of the tokenizer's chat template, with the generation prompt."""

    def shown(content: str) -> str:
        turn = [{"role": "user", "content": content}]
        return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    if not has_chat(tokenizer):
        raise NeedleworkError(f"this tokenizer has no chat template; {_PLAIN}")
    frame = shown(MARKER).split(MARKER)
    if len(frame) != 2:
        raise NeedleworkError(f"the chat template shows the user's words {len(frame) - 1} times, not once; {_PLAIN}")
    content = "".join(piece.text for piece in pieces)
    if shown(content) != content.join(frame):
        raise NeedleworkError(f"the chat template changes the user's words, so needles cannot be placed; {_PLAIN}")
    return [Piece(frame[0]), *pieces, Piece(frame[1])]


def make_item(
    tokenizer: Tokenizer,
    name: str,
    encoded: Encoded,
    target: str,
    options: Sequence[tuple[str, str]],  # (kind, text); kind: "true" (once), "context" (wrong, in the context), "absent", "other"
    facts: Mapping[str, Any],
    window: int | None,  # of sliding attention; with several needles (copies, chains, values) it must hold the last one only
    *,
    cluster: str = "",  # default: the item itself
    twin: tuple[tuple[int, ...], str] | None = None,  # tokens and right answer of a counterfactual prompt
    more: Mapping[str, Any] = MappingProxyType({}),  # facts that come last and replace others of the same name
) -> Item:
    """Return the item of a prompt, with facts about its options and about the place of its needle."""
    kinds, texts = [kind for kind, _ in options], [text for _, text in options]
    about: dict[str, Any] = {"options": texts, "option_kinds": kinds, "chance": 1 / len(kinds)} if kinds else {}
    about |= {f"chance_{kind}": 1 / (1 + kinds.count(kind)) for kind in ("context", "absent") if kind in kinds}
    if encoded.spans.get("needle"):
        distance = len(encoded.ids) - max(start for start, _ in encoded.spans["needle"])
        about |= {"needle_distance_tokens": distance, "in_window": window is None or distance <= window}
    return Item(
        id=name,
        cluster=cluster or name,
        prompt=encoded.ids,
        prompt_text=encoded.text,
        target=target,
        spans=encoded.spans,
        options=tuple(token_ids(tokenizer, text) for text in texts),
        answer=kinds.index("true") if kinds else None,
        twins={"twin": twin[0]} if twin else {},
        twin_target=twin[1] if twin else "",
        facts={**facts, **about, **more},
    )
