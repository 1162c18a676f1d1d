"""Parse interventions from text: one, `keep_heads(k=2)`, or a sweep, `keep_heads(k=0..H, phase={'prefill', 'decode'})`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from needlework.errors import NeedleworkError, check_plain, did_you_mean, short_repr
from needlework.interventions.base import NONE, Intervention, combine, registered
from needlework.interventions.ranking import Ranking, Recorded

MOST_CHARACTERS = 250_000  # of one text; all texts that it expands to may have 100 times as many
MOST_BRACES = 100
# `from`, a field of SwapMemory, outside of strings: the text is parsed by Python, where it is a keyword.
_FROM = re.compile(r"""('(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?)|\bfrom\b""")


def parse(text: str) -> Intervention:
    """Return the intervention of a text: `parse(str(x)) == x`. Nothing in the text is executed.

    Raises:
        NeedleworkError: The text is invalid.
    """
    if text.strip() in ("none", ""):
        return NONE
    _check_size(text)
    try:
        tree = ast.parse(_FROM.sub(lambda match: match[1] or "from_", text.strip()), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise _bad(text, f"it does not read as calls joined by '+': {error}") from None
    except (MemoryError, RecursionError):  # limits of Python's parser
        raise _bad(text, "it has too many parts, or one inside the other too often") from None
    calls = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        calls.append(tree.right)
        tree = tree.left
    calls.append(tree)
    return combine([part for call in reversed(calls) for part in _part(call, text).parts])


def as_intervention(given: Intervention | str) -> Intervention:
    """Return the intervention given as a value or as its text."""
    if isinstance(given, str):
        return parse(given)
    if not isinstance(given, Intervention):
        raise NeedleworkError(f"{given!r} is no intervention; give one, nw.KeepHeads(2), or its text, 'keep_heads(2)'")
    return given


def _part(call: ast.expr, text: str) -> Intervention:
    if isinstance(call, ast.Name) and call.id == "none":
        return NONE
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _bad(text, f"expected name(key=value, ...), got {_source(call)}")
    known = registered()
    name = call.func.id
    if name not in known:
        raise _bad(text, f"unknown intervention {name!r}; {did_you_mean(name, known)}")
    cls = known[name]
    keys = {info.alias or key for key, info in cls.model_fields.items()}
    fields: dict[str, Any] = {}
    for keyword in call.keywords:
        key = (keyword.arg or "**").rstrip("_")
        if key not in keys:
            raise _bad(text, f"{name} has no {key!r}; {did_you_mean(key, keys)}")
        if key in fields:
            raise _bad(text, f"{name} is given {key!r} twice; which one is meant?")
        fields[key] = _value(keyword.value, text)
    return cls(*(_value(node, text) for node in call.args), **fields)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "recorded":
        words: list[Any] = [getattr(argument, "value", None) for argument in node.args]
        if node.keywords or len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
            raise _bad(text, "write recorded('name'), with a name of the plan's rankings")
        return Recorded(name=words[0], content="".join(words[1:]))
    ranks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ranking" and len(node.args) == 1
    try:
        value = ast.literal_eval(node.args[0] if ranks else node)  # type: ignore[attr-defined]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # of invalid or deeply nested text
        raise _bad(text, f"{_source(node)} is no plain value; write numbers, 'text' in quotes or [lists]") from None
    return Ranking.parse(value) if ranks else value


def _source(node: ast.expr) -> str:
    try:
        return short_repr(ast.unparse(node))
    except RecursionError:
        return "something too deep to be shown"


def _check_size(text: str) -> None:
    """Raise if a text is too long, which bounds the time and memory of parsing, or holds values that cannot be stored."""
    if len(text) > MOST_CHARACTERS:
        raise _bad(text, f"it has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        check_plain(text)
    except NeedleworkError as error:
        raise _bad(text, str(error)) from None


def _bad(text: str, why: str) -> NeedleworkError:
    return NeedleworkError(f"cannot read the intervention {short_repr(text)}: {why}")


MOST = 10_000  # interventions from one text
SIZES = {"H": "query heads of a layer (the fewest of any layer)"}

_RANGE = re.compile(r"(?<![\w.])(-?\w+)\.\.(-?\w+)(?:\.\.(-?\w+))?(?![\w.])")
_SIZE = re.compile(r"(?<![\w.'\"])([A-Z])(?![\w.'\"(=])")
_QUOTED = re.compile(r"('[^']*'|\"[^\"]*\")")
_MARK = re.compile(r"""'[^']*'?|"[^"]*"?|[][(){},]""")  # text in quotes, a bracket or a comma
_CLOSES = {"(": ")", "[": "]", "{": "}"}


def expand(text: str, sizes: Mapping[str, int]) -> list[Intervention]:
    """Expand the braces and ranges of a text and return the distinct interventions, in the order written.

    Args:
        text: Such as `keep_heads(k=0..H)`.
        sizes: Values of the names in `SIZES` for the model.
    """
    _check_size(text)
    most = min(MOST, 100 * MOST_CHARACTERS // max(1, len(text)))
    each = _alternatives(text, sizes)
    first = next(each)
    parse(first)  # fail early, before all texts are expanded
    texts = [first, *islice(each, most)]
    if len(texts) > most:
        raise NeedleworkError(f"{short_repr(text)} stands for more than {most} interventions; narrow its ranges")
    return list({str(intervention): intervention for intervention in map(parse, texts)}.values())


def check_ranges(text: str) -> None:
    """Raise if the text is invalid for any model; sizes are set large enough for every range."""
    written = [int(number) for number in re.findall(r"\d{1,9}", text)]
    expand(text, dict.fromkeys(SIZES, min(MOST, max(written, default=0) + 1)))


def _alternatives(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield texts without braces and ranges. Braces are expanded first: they may contain ranges, but not vice versa."""
    if text.count("{") > MOST_BRACES:
        raise NeedleworkError(f"{short_repr(text)} has more than {MOST_BRACES} braces; write several texts instead")
    waiting = [text]
    while waiting:
        one = waiting.pop()
        start = one.find("{")
        if start > 0 and _QUOTED.search(one, 0, start):  # skip braces in later quotes; those in the first are expanded
            start = next((mark.start() for mark in _MARK.finditer(one) if mark[0] == "{"), -1)
        if start < 0:
            yield from _ranges(one, sizes)
        else:
            end, options = _braces(one, start)
            waiting += [one[:start] + option + one[end:] for option in reversed(options)]


def _braces(text: str, start: int) -> tuple[int, list[str]]:
    """Return the end of the brace group that opens at `start`, and its comma-separated alternatives."""
    closers, options, last = "", [], start + 1
    for mark in _MARK.finditer(text, start):
        c, i = mark[0], mark.start()
        if c in _CLOSES:
            closers += _CLOSES[c]
        elif c in (",", "}") and len(closers) == 1:
            options.append(text[last:i].strip())
            last = i + 1
            if c == "}":
                if not all(options):
                    group = short_repr(text[start:last])
                    raise NeedleworkError(f"{short_repr(text)}: an alternative in {group} is empty; write none")
                return last, options
        elif c in _CLOSES.values():
            if c != closers[-1]:
                raise NeedleworkError(f"{short_repr(text)}: {closers[-1]!r} is missing before {short_repr(text[i:])}")
            closers = closers[:-1]
    raise NeedleworkError(f"{short_repr(text)}: a brace that opens is never closed")


def _ranges(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the texts for all values of the ranges in a text, with sizes (H) replaced by numbers."""
    pieces = _QUOTED.split(text)  # odd items are quoted and not expanded
    for i in range(0, len(pieces), 2):
        if match := _RANGE.search(pieces[i]):
            before = "".join(pieces[:i]) + pieces[i][: match.start()]
            after = pieces[i][match.end() :] + "".join(pieces[i + 1 :])
            first, last, step = (_whole(word, text, sizes) for word in (match[1], match[2], match[3] or "1"))
            if step < 1 or first > last:
                raise NeedleworkError(
                    f"{short_repr(text)}: the range {match[0]} is empty; begin with the smaller number, step at least 1"
                )
            for number in range(first, last + 1, step):
                yield from _ranges(f"{before}{number}{after}", sizes)
            return
        if ".." in pieces[i]:
            raise NeedleworkError(f"{short_repr(text)}: ranges need whole numbers: 0..16, 0..H, 0..16..4; list others: {{a, b}}")
        pieces[i] = _SIZE.sub(lambda m: str(_whole(m[1], text, sizes)), pieces[i])
    yield "".join(pieces)


def _whole(word: str, text: str, sizes: Mapping[str, int]) -> int:
    if re.fullmatch(r"-?\d{1,9}", word):
        return int(word)
    if word in sizes:
        return sizes[word]
    known = ", ".join(f"{name} ({meaning})" for name, meaning in SIZES.items())
    raise NeedleworkError(
        f"{short_repr(text)}: {short_repr(word)} is neither a whole number nor a size of the model; known: {known}"
    )
