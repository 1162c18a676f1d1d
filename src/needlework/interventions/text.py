"""Interventions from text: `keep_heads(k=2, phase='decode') + ablate_recurrent(layers=[0, 1])`."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions.base import NONE, Intervention, combine, registered
from needlework.interventions.ranking import Ranking


def parse(text: str) -> Intervention:
    """The intervention that a text stands for: `parse(str(x)) == x`. Nothing in the text is executed."""
    if text.strip() in ("none", ""):
        return NONE
    try:
        tree = ast.parse(_escape_keywords(text.strip()), mode="eval").body
    except (SyntaxError, tokenize.TokenError, IndentationError) as error:
        raise _bad(text, f"it does not read as calls joined by '+': {error}") from None
    calls = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        calls.append(tree.right)
        tree = tree.left
    calls.append(tree)
    parts = [part for call in reversed(calls) for part in _part(call, text).parts]
    return combine(parts)


def as_intervention(given: Intervention | str) -> Intervention:
    """What was given as a value or as its text."""
    if isinstance(given, str):
        return parse(given)
    if not isinstance(given, Intervention):
        raise NeedleworkError(f"{given!r} is no intervention; give one, nw.KeepHeads(2), or its text, 'keep_heads(2)'")
    return given


def _part(call: ast.expr, text: str) -> Intervention:
    if isinstance(call, ast.Name) and call.id == "none":
        return NONE
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _bad(text, f"expected name(key=value, ...), got {ast.unparse(call)!r}")
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
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ranking" and len(node.args) == 1:
        return Ranking.parse(ast.literal_eval(node.args[0]))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _bad(text, f"{ast.unparse(node)!r} is no plain value; write numbers, 'text' in quotes or [lists]") from None


def _escape_keywords(text: str) -> str:
    """`from=` is right in our text but a keyword in Python's grammar, which does the reading."""
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word = "from_" if token.type == tokenize.NAME and token.string == "from" else token.string
        tokens.append((token.type, word))
    return tokenize.untokenize(tokens).strip()


def _bad(text: str, why: str) -> NeedleworkError:
    return NeedleworkError(f"cannot read the intervention {text!r}: {why}")
