"""Rows of the store from what came back: one for every experiment that wants the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from needlework.experiments.asks import Ask, Home
from needlework.experiments.live import Scored
from needlework.requests import Answer
from needlework.rescoring import lasting_scores, stored_facts, stored_finish, stored_outcome
from needlework.store import ANSWER_FINISH, Row
from needlework.tasks.base import Outcome


@dataclass(frozen=True)
class Result:
    """What came back for one question, however it was asked."""

    outcome: Outcome = field(default_factory=Outcome)
    output: str = ""
    finish: str = "failed"
    error: str = ""
    logprobs: Sequence[float] = ()
    margins: Sequence[float] = ()
    receipt: Mapping[str, Any] | None = None
    lasting: Mapping[str, float] = field(default_factory=dict)  # scores that stay if they cannot be computed again


def answered(answer: Answer) -> Result:
    return Result(
        outcome=Outcome(text=answer.text),
        output=answer.text,
        finish=answer.finish,
        error=answer.error,
        logprobs=answer.logprobs,
        margins=answer.margins,
        receipt=answer.receipt.to_dict(),
    )


def scored(ask: Ask, scores: Scored) -> Result:
    """Log-likelihoods of the options; for perplexity those of every token."""
    totals = tuple(sum(some) for some in scores.logprobs)
    tokens = tuple(one for some in scores.logprobs for one in some) if ask.settings.mode == "perplexity" else ()
    ordered = sorted(totals, reverse=True)
    return Result(
        outcome=Outcome(option_logprobs=totals, token_logprobs=tokens, greedy=scores.greedy),
        finish="failed" if scores.error else "scored",
        error=scores.error,
        logprobs=tokens or totals,
        margins=(ordered[0] - ordered[1],) if len(ordered) > 1 else (),
        receipt=scores.receipt.to_dict(),
    )


def failed(error: Exception | str) -> Result:
    return Result(error=error if isinstance(error, str) else f"{type(error).__name__}: {error}")


def stored(trial: Row) -> Result:
    """The answer of a row, as it came back."""
    finish = stored_finish(trial)
    return Result(
        outcome=stored_outcome(trial),
        output=trial.output,
        finish=finish,
        error=trial.error if finish == "failed" else "",
        logprobs=trial.logprobs,
        margins=trial.margins,
        receipt=trial.receipt,
        lasting=lasting_scores(trial),
    )


def rows(ask: Ask, result: Result, model: str, seconds: float, versions: str) -> list[Row]:
    return [row(ask, home, result, model, seconds, versions) for home in ask.homes]


def row(ask: Ask, home: Home, result: Result, model: str, seconds: float, versions: str) -> Row:
    item = home.item
    facts = stored_facts(item, ask.settings.mode)
    scores: dict[str, float] = {}
    finish, error = result.finish, result.error
    if finish != "failed":
        try:
            scores = {**result.lasting, **home.task.task.score(item, result.outcome)}
        except Exception as fault:  # a task of one's own may be wrong; its answers are kept all the same
            facts[ANSWER_FINISH] = finish
            finish, error = "failed", f"the task could not score this: {type(fault).__name__}: {fault}"
    return Row(
        id=ask.id,
        experiment=home.experiment,
        model=model,
        task=home.task.name,
        sample=item.id,
        cluster=item.cluster,
        seed=home.seed,
        intervention=str(ask.intervention),
        mode=ask.settings.mode,
        prompt=item.prompt_text,
        prompt_tokens=len(item.prompt),
        target=item.target,
        output=result.output,
        finish=finish,
        error=error,
        seconds=seconds,
        spans={name: [list(part) for part in span] for name, span in item.spans.items()},
        facts=facts,
        scores=scores,
        logprobs=list(result.logprobs),
        margins=list(result.margins),
        receipt=result.receipt or {},
        prompt_id=ask.prompt_id,
        versions=versions,
        kind=home.task.task.kind,
        ability=home.task.task.ability,
        boundary=ask.settings.boundary if ask.settings.mode == "generate" else "",
        scoring=home.task.scoring,
        greedy=list(result.outcome.greedy),
    )
