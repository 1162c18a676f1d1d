"""Log-likelihoods of (context, continuation) pairs under any number of interventions, in one pass through the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from needlework.engine.engine import Engine
from needlework.interventions.base import Intervention
from needlework.receipts import Receipt
from needlework.requests import Answer, Request

Tokens = tuple[int, ...]
Pair = tuple[Tokens, Tokens]  # context, continuation
Key = tuple[Tokens, str]  # context, intervention


@dataclass(frozen=True)
class Scored:
    """One continuation: its log-likelihood, whether the model would have said it, and what was done to the model."""

    logprob: float
    greedy: bool
    receipt: Receipt
    error: str = ""

    def __add__(self, other: Scored) -> Scored:
        """A text that was scored in two windows."""
        return Scored(
            self.logprob + other.logprob, self.greedy and other.greedy, self.receipt + other.receipt, self.error or other.error
        )


def fit(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Pair:
    """As lm-eval's `hf` model: what is too long loses its beginning. The last token is predicted, never read."""
    whole = tuple([*context, *continuation][-(max_length + 1) :])
    return whole[: len(whole) - len(continuation)], whole[len(whole) - len(continuation) :]


def score(engine: Engine, asked: Sequence[tuple[Pair, Intervention]]) -> list[Scored]:
    """Every pair under its intervention, in order. Pairs of one context and intervention share one reading of it."""
    texts = {id(act): str(act) for _, act in asked}
    acts = {texts[id(act)]: act for _, act in asked}
    options: dict[Key, dict[Tokens, None]] = {}
    for (context, continuation), act in asked:
        options.setdefault((context, texts[id(act)]), {})[continuation] = None
    requests = [Request(context, acts[text], options=tuple(options[context, text])) for context, text in options]
    scored: dict[tuple[Tokens, str, Tokens], Scored] = {}
    keys = list(options)
    for i, answer in engine.run(requests):
        for option, one in zip(requests[i].options, _each(answer), strict=True):
            scored[(*keys[i], option)] = one
    return [scored[context, texts[id(act)], continuation] for (context, continuation), act in asked]


def _each(answer: Answer) -> Iterator[Scored]:
    for total, greedy in zip(answer.totals, answer.greedy, strict=True):
        yield Scored(total, greedy, answer.receipt, answer.error)
