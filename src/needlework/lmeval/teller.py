"""Asks a loaded model: every question under its intervention, handed to the engine together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from needlework.interventions import Intervention
from needlework.lmeval.answers import Told
from needlework.lmeval.asking import score
from needlework.lmeval.questions import Question
from needlework.receipts import Receipt

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

Asked = Sequence[tuple[Question, Intervention]]


def tell(lm: NeedleworkLM, asked: Asked) -> list[Told]:
    """Answers in order. All of one mode."""
    return _generated(lm, asked) if asked[0][0].mode == "generate" else _scored(lm, asked)


def _scored(lm: NeedleworkLM, asked: Asked) -> list[Told]:
    pairs = [(pair, act) for question, act in asked for some in question.pairs for pair in some]
    found = iter(score(lm.subject.engine, pairs))
    told = []
    for question, _ in asked:
        whole = [reduce(add, [next(found) for _ in some]) for some in question.pairs]
        rolling = question.mode == "perplexity"
        told.append(
            Told(
                tuple(one.logprob if rolling else (one.logprob, one.greedy) for one in whole),
                whole[0].receipt.to_dict(),
                next((one.error for one in whole if one.error), ""),
            )
        )
    return told


def _generated(lm: NeedleworkLM, asked: Asked) -> list[Told]:
    requests = [lm.request(one, act) for question, act in asked for one in question.generations]
    found = dict(lm.subject.engine.run(requests))
    told, at = [], 0
    for question, _ in asked:
        mine = [found[at + i] for i in range(len(question.generations))]
        at += len(mine)
        texts = tuple(lm.text(answer, one.until) for answer, one in zip(mine, question.generations, strict=True))
        receipt = reduce(add, [answer.receipt for answer in mine], Receipt())
        told.append(Told(texts, receipt.to_dict(), next((answer.error for answer in mine if answer.error), "")))
    return told
