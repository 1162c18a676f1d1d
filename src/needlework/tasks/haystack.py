"""Haystacks: text from files or generated from a small grammar, cut to a number of tokens, into which needles are inserted.

A needle is inserted after a sentence end. The toy language follows the same rule (`needlework.toy.needles.hide_needles`).
Generated text is not taken from elsewhere.
"""

from __future__ import annotations

import glob
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, cycle, islice, takewhile
from typing import Any

from needlework.errors import NeedleworkError, short_repr
from needlework.files import package_yaml, read_text
from needlework.tasks.base import Tokenizer, prefix_errors
from needlework.tasks.prompts import Piece, token_offsets
from needlework.toy.sample import Stream

_SENTENCE = re.compile(r"""(?s).*?(?:[.!?]["'”’)\]]*(?=\s)|\Z)""")
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
    """Return the sentences of all files that match a glob pattern, sorted by path, each with the white space before it.

    A blank line separates two files; `appended` ones are concatenated unchanged, as the paper's authors do.
    """
    found = list(islice(glob.iglob(pattern, recursive=True), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        raise NeedleworkError(f"haystack: more than {MOST_FILES:,} files match {short_repr(pattern)}; give a narrower pattern")
    paths = sorted(path for path in found if os.path.isfile(path))
    if not paths:
        raise NeedleworkError(f"haystack: no file matches {short_repr(pattern)}; give a pattern such as texts/*.txt")
    parts: list[str] = []
    for path in paths:
        with prefix_errors("haystack"):
            text = read_text(path, "take less of it, or leave it out of the pattern", most=MOST_BYTES)
        if appended or text.strip():
            parts += split_sentences(text if appended else "\n\n" + text.strip())
    if not any(part.strip() for part in parts):
        raise NeedleworkError(f"haystack: the files that match {pattern!r} are all empty")
    return tuple(parts)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences; joined, they are the text again."""
    return [part for part in _SENTENCE.findall(text) if part]


def iterate_sentences(source: str | None, stream: Stream, start_anywhere: bool, appended: bool = False) -> Iterator[str]:
    """Yield sentences without end: of the files, repeated when they run out, or generated ones if `source` is None."""
    if source is None:
        return generate_sentences(stream)
    parts = read_sentences(source, appended)
    first = stream.below(len(parts)) if start_anywhere else 0
    return chain(parts[first:], cycle(parts))


def cut_haystack(tokenizer: Tokenizer, source: Iterator[str], tokens: int, whole: bool = False) -> Haystack:
    """Return the first `tokens` tokens of a source as a haystack; with `whole`, cut at the last sentence end before that."""
    parts, _, offsets = read_tokens(tokenizer, source, tokens)

    def cut(count: int) -> Haystack:
        stops = [end for _, end in offsets[:count]]
        length = stops[-1] if stops else 0
        ends = takewhile(lambda at: at <= length, accumulate(map(len, parts)))
        return Haystack("".join(parts)[:length], count, ((0, 0), *((at, bisect_right(stops, at)) for at in ends)))

    hay = cut(tokens)
    return cut(hay.ends[-1][1]) if whole else hay


def read_tokens(
    tokenizer: Tokenizer, source: Iterator[str], tokens: int, keep_space: bool = False
) -> tuple[list[str], list[int], list[tuple[int, int]]]:
    """Return sentences with more than `tokens` tokens in total, their token ids, and the character range of each token.

    White space before the first sentence is removed unless `keep_space`.
    """
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


def fill_template(template: str, **words: str) -> str:
    """Replace each {name}; braces of other names are kept."""
    for name, word in words.items():
        template = template.replace(f"{{{name}}}", word)
    return template


def needle_pieces(template: str, span: str = "needle", marked: str = "value", **words: str) -> list[Piece]:
    """Return a filled template as pieces of a span; in a needle, the word `marked` belongs to the span "value", too."""
    before, found, after = template.partition(f"{{{marked}}}")
    pieces = [Piece(fill_template(before, **words), (span,))]
    if found:
        pieces.append(Piece(words[marked], (span, "value") if span == "needle" else (span,)))
    pieces.append(Piece(fill_template(after, **words), (span,)))
    return [piece for piece in pieces if piece.text]


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


# --- Generated text ---


ENGLISH: Mapping[str, Any] = package_yaml(__file__, "english.yaml")
_PARTS = ("people", "acts", "times", "places", "reasons", "things", "states", "nouns", "first_names", "last_names")
PEOPLE, ACTS, TIMES, PLACES, REASONS, THINGS, STATES, NOUNS, FIRST_NAMES, LAST_NAMES = (
    tuple(str(ENGLISH[name]).split(", ")) for name in _PARTS
)


def generate_sentences(stream: Stream) -> Iterator[str]:
    """Yield sentences of 5 to 27 words without end, each after the first with its separator: a space, or in 10 % a blank line.

    The parts of a sentence are drawn independently, so that none predicts another.
    """
    separator = ""
    while True:
        if stream.chance(0.25):
            text = f"{stream.pick(THINGS)} {stream.pick(STATES)}."
        else:
            words = [stream.pick(PEOPLE), stream.pick(ACTS)]
            endings = ((PLACES, 0.5), (TIMES, 0.5), (REASONS, 0.4))
            words += [stream.pick(options) for options, share in endings if stream.chance(share)]
            text = " ".join(words) + "."
        yield f"{separator}{text[0].upper()}{text[1:]}"
        separator = "\n\n" if stream.chance(0.1) else " "
