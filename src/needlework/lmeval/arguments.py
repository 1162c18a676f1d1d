"""What the model type `needlework` is given as text, and what it refuses. Free of torch and of lm-eval."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from needlework.errors import NeedleworkError
from needlework.interventions import Intervention

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # context, continuation


@dataclass(frozen=True)
class Generation:
    """A prompt to be continued."""

    prompt: tuple[int, ...]
    until: tuple[str, ...]  # texts that end the answer
    max_new_tokens: int


def check_phases(intervention: Intervention) -> None:
    """Scoring reads every position as prefill: what acts in decode only would do nothing, and is refused."""
    for part in intervention.parts:
        if part.phase == "decode":
            raise NeedleworkError(
                f"{part} acts in decode only, but log-likelihoods are prefill at every position: use phase='prefill' or"
                " phase='both'"
            )
        if part.side == "memory":
            raise NeedleworkError(f"{part} swaps memory between prefill and decode; scoring has no decode")


def greedy_settings(settings: Mapping[str, Any]) -> None:
    """Refuse what would not be greedy decoding."""
    if settings.get("do_sample") or float(settings.get("temperature") or 0):
        raise NeedleworkError("the model type needlework decodes greedily; set do_sample=False and temperature=0")
    beams = settings.get("num_beams", 1)
    if beams != 1:
        raise NeedleworkError(f"the model type needlework decodes greedily; num_beams={beams} is not")


def split_arguments(text: str) -> dict[str, Any]:
    """`pretrained=DIR,intervention=keep_heads(k=5, by='entropy')` as a mapping: commas in brackets or quotes do not split."""
    arguments = {}
    for item in _split(text):
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise NeedleworkError(f"model_args: {item.strip()!r} is not name=value")
        arguments[name.strip()] = _value(value.strip())
    return arguments


def _split(text: str) -> Iterator[str]:
    item, depth, quote = "", 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield item
            item = ""
            continue
        item += char
    if item.strip():
        yield item


def _value(text: str) -> Any:
    """Numbers, truth values and quoted text as such; everything else is text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def fit(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Pair:
    """As lm-eval's `hf` model: what is too long loses its beginning. The last token is predicted, never read."""
    whole = tuple([*context, *continuation][-(max_length + 1) :])
    return whole[: len(whole) - len(continuation)], whole[len(whole) - len(continuation) :]
