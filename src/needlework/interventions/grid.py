"""Intervention text that stands for many: `keep_heads(k=0..H, phase={'prefill', 'decode'})`. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from needlework.errors import NeedleworkError
from needlework.interventions import Intervention, parse

MOST = 10_000  # interventions from one text
SIZES = {"H": "query heads of a layer (the fewest of any layer)"}

_RANGE = re.compile(r"(?<![\w.])(-?\w+)\.\.(-?\w+)(?:\.\.(-?\w+))?(?![\w.])")
_SIZE = re.compile(r"(?<![\w.'\"])([A-Z])(?![\w.'\"(=])")
_QUOTED = re.compile(r"('[^']*'|\"[^\"]*\")")
_CLOSES = {"(": ")", "[": "]", "{": "}"}


def expand(text: str, sizes: Mapping[str, int]) -> list[Intervention]:
    """Every intervention that the text stands for, each once, in the order written."""
    texts = list(islice(_alternatives(text, sizes), MOST + 1))
    if len(texts) > MOST:
        raise NeedleworkError(f"{text!r} stands for more than {MOST} interventions; narrow its ranges")
    by_text = {str(intervention): intervention for intervention in map(parse, texts)}
    return list(by_text.values())


def check(text: str) -> None:
    """Raise if the text cannot be read, whatever the model: sizes are taken large enough for every range."""
    written = [int(number) for number in re.findall(r"\d{1,9}", text)]
    expand(text, dict.fromkeys(SIZES, min(MOST, max(written, default=0) + 1)))


def _alternatives(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Texts without braces and ranges. Braces go first: they may hold ranges, never the other way round."""
    start = _outside_quotes(text, "{")
    if start is None:
        yield from _ranges(text, sizes)
        return
    end, options = _braces(text, start)
    for option in options:
        yield from _alternatives(text[:start] + option + text[end:], sizes)


def _outside_quotes(text: str, char: str) -> int | None:
    quote = ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c == char:
            return i
    return None


def _braces(text: str, start: int) -> tuple[int, list[str]]:
    """The end of the braces that open at `start`, and what stands between their own commas."""
    closers, quote, options, last = "", "", [], start + 1
    for i in range(start, len(text)):
        c = text[i]
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in _CLOSES:
            closers += _CLOSES[c]
        elif c == "," and len(closers) == 1:
            options.append(text[last:i].strip())
            last = i + 1
        elif c in _CLOSES.values():
            if c != closers[-1]:
                raise NeedleworkError(f"{text!r}: {closers[-1]!r} is missing before {text[i:]!r}")
            closers = closers[:-1]
            if not closers:
                options.append(text[last:i].strip())
                if not all(options):
                    raise NeedleworkError(f"{text!r}: an alternative in {text[start : i + 1]!r} is empty; write none")
                return i + 1, options
    raise NeedleworkError(f"{text!r}: a brace that opens is never closed")


def _ranges(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    pieces = _QUOTED.split(text)  # odd pieces stand in quotes and are left alone
    for i in range(0, len(pieces), 2):
        if match := _RANGE.search(pieces[i]):
            before = "".join(pieces[:i]) + pieces[i][: match.start()]
            after = pieces[i][match.end() :] + "".join(pieces[i + 1 :])
            for number in _numbers(match, text, sizes):
                yield from _ranges(f"{before}{number}{after}", sizes)
            return
        if ".." in pieces[i]:
            raise NeedleworkError(f"{text!r}: ranges need whole numbers: 0..16, 0..H, 0..16..4; list others: {{a, b}}")
        pieces[i] = _SIZE.sub(lambda m: str(_whole(m[1], text, sizes)), pieces[i])
    yield "".join(pieces)


def _numbers(match: re.Match[str], text: str, sizes: Mapping[str, int]) -> range:
    first, last = _whole(match[1], text, sizes), _whole(match[2], text, sizes)
    step = _whole(match[3], text, sizes) if match[3] else 1
    if step < 1 or first > last:
        raise NeedleworkError(f"{text!r}: the range {match[0]} is empty; begin with the smaller number, step at least 1")
    return range(first, last + 1, step)


def _whole(word: str, text: str, sizes: Mapping[str, int]) -> int:
    if re.fullmatch(r"-?\d{1,9}", word):
        return int(word)
    if word in sizes:
        return sizes[word]
    known = ", ".join(f"{name} ({meaning})" for name, meaning in SIZES.items())
    raise NeedleworkError(f"{text!r}: {word!r} is neither a whole number nor a size of the model; known: {known}")
