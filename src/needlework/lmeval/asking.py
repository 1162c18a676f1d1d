"""Log-likelihoods of (context, continuation) pairs under any number of interventions, in one pass through the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from needlework.engine.engine import Engine
from needlework.engine.score import Scores, choices
from needlework.interventions.base import Intervention
from needlework.receipts import Receipt
from needlework.requests import Request

Tokens = tuple[int, ...]
Pair = tuple[Tokens, Tokens]  # context, continuation
Key = tuple[Tokens, str]  # context, intervention

_LOGIT_BYTES = 2**29  # of logits kept at once: a long continuation keeps those of all its tokens


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
    found: dict[tuple[Tokens, str, Tokens], Scored] = {}
    for part in _parts(options, engine.body.anatomy.vocabulary):
        requests = [(Request(context, acts[text]), tuple(options[context, text])) for context, text in part]
        for i, scores in choices(engine, requests):
            for option, one in zip(requests[i][1], _each(scores), strict=True):
                found[(*part[i], option)] = one
    return [found[context, texts[id(act)], continuation] for (context, continuation), act in asked]


def _each(scores: Scores) -> Iterator[Scored]:
    for total, greedy in zip(scores.totals, scores.greedy, strict=True):
        yield Scored(total, greedy, scores.receipt, scores.error)


def _parts(options: dict[Key, dict[Tokens, None]], vocabulary: int) -> Iterator[list[Key]]:
    """Contexts that are scored together. Short continuations all at once; long ones, whose logits are large, by weight."""
    keys = sorted(options, key=lambda key: max(map(len, options[key])))
    part: list[Key] = []
    rows = 0
    for key in keys:
        longest = max(map(len, options[key]))
        rows += len(options[key])
        if part and longest > 1 and 4 * rows * longest * vocabulary > _LOGIT_BYTES:
            yield part
            part, rows = [], len(options[key])
        part.append(key)
    if part:
        yield part
