"""Convert a Trial and its Answer into a Row of the store, and a Row back into an Answer for rescoring."""

from __future__ import annotations

from dataclasses import replace

from needlework.experiments.trials import Trial
from needlework.receipts import Receipt
from needlework.requests import Answer
from needlework.results import ANSWER_FINISH, Row
from needlework.results.rows import stored_answer, stored_facts, stored_finish


def stored(row: Row) -> Answer:
    """Return the answer that a row was made from."""
    finish = stored_finish(row)
    return replace(
        stored_answer(row),
        margins=tuple(row.margins),
        receipt=Receipt.from_dict(row.receipt),
        finish=finish,  # type: ignore[arg-type]
        error=row.error if finish == "failed" else "",
    )


# [walk 6] docs/architecture.md
def to_row(trial: Trial, answer: Answer, model: str, seconds: float, versions: str) -> Row:
    """Score an answer and return the row of its trial; an error of the task's scoring makes the row a failed one."""
    item, task = trial.item, trial.task.task
    facts = stored_facts(item, trial.mode)
    scores: dict[str, float] = {}
    finish, error, output = answer.finish, answer.error, answer.text
    if finish != "failed":
        try:
            output = task.said(item, answer)
            scores = dict(task.score(item, replace(answer, text=output)))
        except Exception as fault:  # a user's task may raise anything; the answer is kept
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
    """Return log-probabilities: per generated token, per option (choices), or per token of the text (perplexity)."""
    if trial.mode == "generate":
        return list(answer.logprobs)
    return [value for option in answer.option_logprobs for value in option] if trial.mode == "perplexity" else list(answer.totals)


def _margins(trial: Trial, answer: Answer) -> list[float]:
    """Return best minus second best: among the options (choices), else the logits at each decode step."""
    ordered = sorted(answer.totals, reverse=True)
    return [ordered[0] - ordered[1]] if trial.mode == "choices" and len(ordered) > 1 else list(answer.margins)
