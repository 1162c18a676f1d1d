"""A Row of the store from a Trial and its Answer; and an Answer from a Row, to be scored anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from needlework.experiments.trials import Trial
from needlework.receipts import Receipt
from needlework.requests import Answer
from needlework.rescoring import stored_answer, stored_facts, stored_finish
from needlework.store import ANSWER_FINISH, Row

NO_SCORES: Mapping[str, float] = MappingProxyType({})


def failed(error: Exception) -> Answer:
    return Answer(finish="failed", error=f"{type(error).__name__}: {error}")


def stored(row: Row) -> Answer:
    """The answer of a row, as it came back."""
    finish = stored_finish(row)
    return replace(
        stored_answer(row),
        margins=tuple(row.margins),
        receipt=Receipt.from_dict(row.receipt),
        finish=finish,  # type: ignore[arg-type]
        error=row.error if finish == "failed" else "",
    )


# [walk 6] docs/architecture.md
def to_row(
    trial: Trial, answer: Answer, model: str, seconds: float, versions: str, lasting: Mapping[str, float] = NO_SCORES
) -> Row:
    """`lasting` are scores that stay if they cannot be computed again."""
    item, task = trial.item, trial.task.task
    facts = stored_facts(item, trial.mode)
    scores: dict[str, float] = {}
    finish, error, output = answer.finish, answer.error, answer.text
    if finish != "failed":
        try:
            output = task.said(item, answer)
            scores = {**lasting, **task.score(item, replace(answer, text=output))}
        except Exception as fault:  # a task of one's own may be wrong; its answers are kept all the same
            facts[ANSWER_FINISH] = finish
            finish, error = "failed", f"the task could not score this: {type(fault).__name__}: {fault}"
    return Row(
        id=trial.id,
        experiment=trial.experiment,
        model=model,
        task=trial.task.name,
        sample=item.id,
        cluster=item.cluster,
        seed=trial.seed,
        intervention=str(trial.intervention),
        mode=trial.mode,
        prompt=item.prompt_text,
        prompt_tokens=max(len(part.prompt) for part in (item, *item.also)),
        target=item.target,
        output=output,
        finish=finish,
        error=error,
        seconds=seconds,
        spans={name: [list(part) for part in span] for name, span in item.spans.items()},
        facts=facts,
        scores=scores,
        logprobs=_logprobs(trial, answer),
        margins=_margins(trial, answer),
        receipt=answer.receipt.to_dict(),
        prompt_id=trial.prompt_id,
        versions=versions,
        kind=task.kind,
        ability=task.ability,
        boundary=trial.boundary if trial.mode == "generate" else "",
        scoring=trial.task.scoring,
        greedy=list(answer.greedy),
        tokens=list(answer.tokens),
    )


def _logprobs(trial: Trial, answer: Answer) -> list[float]:
    """Of each token that was said, of each option, or, of a whole text, of each of its tokens."""
    if trial.mode == "generate":
        return list(answer.logprobs)
    return [value for option in answer.option_logprobs for value in option] if trial.mode == "perplexity" else list(answer.totals)


def _margins(trial: Trial, answer: Answer) -> list[float]:
    """Best minus second best: at each step, or among the options."""
    ordered = sorted(answer.totals, reverse=True)
    return [ordered[0] - ordered[1]] if trial.mode == "choices" and len(ordered) > 1 else list(answer.margins)
