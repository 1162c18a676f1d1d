"""Haystacks: text from files or from the built-in generator, cut to a number of tokens, into which needles are inserted.

A needle is inserted after a sentence end. The toy language follows the same rule (`needlework.toy.needles.hide_needles`).
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

from needlework.errors import NeedleworkError, short_repr
from needlework.files import read_text
from needlework.tasks import english
from needlework.tasks.base import Tokenizer
from needlework.tasks.prompts import Piece, token_offsets
from needlework.toy.sample import Stream

_END = re.compile(r"""[.!?]["'”’)\]]*(?=\s)""")
MOST_FILES = 10_000
MOST_BYTES = 1_000_000_000  # of one file
CHARACTERS_PER_TOKEN = 8  # above that of usual tokenizers; only affects speed, as too short a text is extended


@dataclass(frozen=True)
class Haystack:
    """A text of `tokens` tokens and its sentence ends, where needles can be inserted."""

    text: str
    tokens: int
    ends: tuple[tuple[int, int], ...]  # (characters, tokens) up to each sentence end; the first is (0, 0)

    def slot(self, depth_percent: float) -> int:
        """Return the index in `ends` of the last sentence end at or before a depth."""
        return max(i for i, (_, tokens) in enumerate(self.ends) if tokens <= self.tokens * depth_percent / 100)

    def depth_percent(self, slot: int) -> float:
        return 100 * self.ends[slot][1] / self.tokens if self.tokens else 0.0


@lru_cache(maxsize=16)
def read_sentences(pattern: str, appended: bool = False) -> tuple[str, ...]:
    """Return the sentences of all matching files, sorted by path, each with the white space before it.

    Args:
        pattern: glob pattern.
        appended: concatenate the files unchanged, as the paper's authors do; by default a blank line separates two files.
    """
    found = list(islice(glob.iglob(pattern, recursive=True), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        raise NeedleworkError(f"haystack: more than {MOST_FILES:,} files match {short_repr(pattern)}; give a narrower pattern")
    paths = sorted(path for path in found if os.path.isfile(path))
    if not paths:
        raise NeedleworkError(f"haystack: no file matches {short_repr(pattern)}; give a pattern such as texts/*.txt")
    parts: list[str] = []
    for path in paths:
        try:
            text = read_text(path, "take less of it", most=MOST_BYTES)
        except NeedleworkError as error:
            raise NeedleworkError(f"haystack: {error}, or leave it out of the pattern") from None
        if appended:
            parts += split_sentences(text)
        elif text.strip():
            parts += split_sentences("\n\n" + text.strip())
    if not any(part.strip() for part in parts):
        raise NeedleworkError(f"haystack: the files that match {pattern!r} are all empty")
    return tuple(parts)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences; joined, they are the text again."""
    cuts = [0, *(match.end() for match in _END.finditer(text))]
    parts = [text[a:b] for a, b in zip(cuts, (*cuts[1:], len(text)), strict=True)]
    return [part for part in parts if part]


def iterate_sentences(source: str | None, stream: Stream, start_anywhere: bool, appended: bool = False) -> Iterator[str]:
    """Yield sentences without end: of the files, repeated when they run out, or generated ones if `source` is None."""
    if source is None:
        return english.sentences(stream)
    parts = read_sentences(source, appended)
    first = stream.below(len(parts)) if start_anywhere else 0
    return chain(parts[first:], cycle(parts))


def cut_haystack(tokenizer: Tokenizer, source: Iterator[str], tokens: int, whole: bool = False) -> Haystack:
    """Return the first `tokens` tokens of a source as a haystack; with `whole`, cut at the last sentence end before that."""
    parts, _, offsets = _read(tokenizer, source, tokens)
    text = "".join(parts)
    hay = _cut(text, parts, offsets[:tokens])
    return _cut(text, parts, offsets[: hay.ends[-1][1]]) if whole else hay


def take_tokens(tokenizer: Tokenizer, source: Iterator[str], tokens: int, from_start: bool) -> list[int]:
    """Return the first `tokens` token ids of a source. Leading white space is removed unless `from_start`."""
    return _read(tokenizer, source, tokens, keep_space=from_start)[1][:tokens]


def _read(
    tokenizer: Tokenizer, source: Iterator[str], tokens: int, keep_space: bool = False
) -> tuple[list[str], list[int], list[tuple[int, int]]]:
    """Return sentences with more than `tokens` tokens in total, their token ids, and the character range of each token."""
    parts: list[str] = []
    size, before = 0, -1
    while True:
        while size < CHARACTERS_PER_TOKEN * tokens + 1:
            parts.append(next(source) if parts or keep_space else next(source).lstrip())
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


def insert_needles(hay: Haystack, hidden: Sequence[tuple[int, Sequence[Piece]]]) -> list[Piece]:
    """Return the haystack with each needle after the sentence end of its slot; needles of one slot keep their order."""
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
