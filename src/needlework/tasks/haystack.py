"""Haystacks: text to hide needles in, from files or from the built-in generator, cut to a number of tokens.

The toy world makes its own (`needlework.toy.needles.scene`), by the same rule: a needle goes in after a sentence end.
"""

from __future__ import annotations

import glob
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, islice

from needlework.errors import NeedleworkError, shown
from needlework.files import read_text
from needlework.tasks import english
from needlework.tasks.base import Tokenizer
from needlework.tasks.prompts import Piece, token_offsets
from needlework.toy.sample import Stream

_END = re.compile(r"""[.!?]["'”’)\]]*(?=\s)""")
MOST_FILES = 10_000
MOST_BYTES = 1_000_000_000  # of one file
CHARACTERS_PER_TOKEN = 8  # more than in any ordinary tokenizer; too little text is doubled, so this only saves time


@dataclass(frozen=True)
class Haystack:
    """A text of `tokens` tokens; `ends` are the characters after which a sentence ends, with the token count there."""

    text: str
    tokens: int
    ends: tuple[tuple[int, int], ...]  # (character, tokens before it); the first is (0, 0)

    def slot(self, depth_percent: float) -> int:
        """Index of the nearest sentence end at or before a depth."""
        return max(i for i, (_, tokens) in enumerate(self.ends) if tokens <= self.tokens * depth_percent / 100)

    def depth_percent(self, slot: int) -> float:
        return 100 * self.ends[slot][1] / self.tokens if self.tokens else 0.0


@lru_cache(maxsize=16)
def read(pattern: str) -> tuple[str, ...]:
    """Sentences of all files that match, files in the order of their names, each with the white space before it."""
    found = list(islice(glob.iglob(pattern, recursive=True), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        raise NeedleworkError(f"haystack: more than {MOST_FILES:,} files match {shown(pattern)}; give a narrower pattern")
    paths = sorted(path for path in found if os.path.isfile(path))
    if not paths:
        raise NeedleworkError(f"haystack: no file matches {shown(pattern)}; give a pattern such as texts/*.txt")
    parts: list[str] = []
    for path in paths:
        try:
            text = read_text(path, "take less of it", most=MOST_BYTES).strip()
        except NeedleworkError as error:
            raise NeedleworkError(f"haystack: {error}, or leave it out of the pattern") from None
        if text:
            first, *rest = split(text)
            parts += ["\n\n" + first, *rest]
    if not parts:
        raise NeedleworkError(f"haystack: the files that match {pattern!r} are all empty")
    return tuple(parts)


def split(text: str) -> list[str]:
    """Sentences of a text; joined again they are the text."""
    cuts = [0, *(match.end() for match in _END.finditer(text))]
    parts = [text[a:b] for a, b in zip(cuts, (*cuts[1:], len(text)), strict=True)]
    return [part for part in parts if part]


def sentences(source: str | None, stream: Stream, start_anywhere: bool) -> Iterator[str]:
    """Sentences without end: of the files (over again when they run out), or made up when no files are named."""
    if source is None:
        return english.sentences(stream)
    parts = read(source)
    first = stream.below(len(parts)) if start_anywhere else 0
    return chain(parts[first:], cycle(parts))


def gather(tokenizer: Tokenizer, source: Iterator[str], tokens: int, whole: bool = False) -> Haystack:
    """The first `tokens` tokens of a source, cut exactly there as the paper does, or at the sentence end before it."""
    parts, _, offsets = _read(tokenizer, source, tokens)
    text = "".join(parts)
    hay = _cut(text, parts, offsets[:tokens])
    return _cut(text, parts, offsets[: hay.ends[-1][1]]) if whole else hay


def essay(tokenizer: Tokenizer, source: Iterator[str], tokens: int) -> list[int]:
    """The first `tokens` tokens of a source."""
    return _read(tokenizer, source, tokens)[1][:tokens]


def _read(tokenizer: Tokenizer, source: Iterator[str], tokens: int) -> tuple[list[str], list[int], list[tuple[int, int]]]:
    """Sentences that have more tokens than these, with their tokens and the characters of each."""
    parts: list[str] = []
    size, before = 0, -1
    while True:
        while size < CHARACTERS_PER_TOKEN * tokens + 1:
            parts.append(next(source) if parts else next(source).lstrip())
            size += len(parts[-1])
        text = "".join(parts)
        ids, offsets = token_offsets(tokenizer, text)
        if len(offsets) > tokens:
            return parts, ids, offsets
        if len(offsets) <= before:
            raise NeedleworkError(
                f"haystack: {size:,} characters are only {len(offsets)} tokens, and more text makes no more of them, so there is"
                f" no haystack of {tokens} tokens; does this tokenizer know the text's language?"
            )
        before = len(offsets)
        parts += islice(source, len(parts))
        size = sum(map(len, parts))


def _cut(text: str, parts: Sequence[str], offsets: Sequence[tuple[int, int]]) -> Haystack:
    length = offsets[-1][1] if offsets else 0
    stops = [b for _, b in offsets]
    ends = [(0, 0)]
    at = 0
    for part in parts:
        at += len(part)
        if at > length:
            break
        ends.append((at, bisect_right(stops, at)))
    return Haystack(text[:length], len(offsets), tuple(ends))


def weave(hay: Haystack, hidden: Sequence[tuple[int, Sequence[Piece]]]) -> list[Piece]:
    """The haystack with needles in it: each goes in after the sentence end of its slot, in the order given."""
    pieces: list[Piece] = []
    at = 0
    for slot, needle in sorted(hidden, key=lambda pair: pair[0]):
        place = hay.ends[slot][0]
        pieces.append(Piece(hay.text[at:place]))
        pieces += [*needle, Piece(" ")] if place == 0 else [Piece(" "), *needle]
        at = place
    rest = hay.text[at:]
    if not rest and pieces and pieces[-1] == Piece(" "):
        pieces.pop()
    return [piece for piece in (*pieces, Piece(rest)) if piece.text]
