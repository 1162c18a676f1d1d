"""A question's answers as a row of the store, and a row as the answers that lm-eval wants. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from needlework.lmeval.questions import Question
from needlework.store import LM_EVAL, Row
from needlework.tasks.base import Ability, Mode

EXPERIMENT = "ability"
_ABILITIES: dict[Mode, Ability] = {"choices": "knowledge", "perplexity": "perplexity", "generate": ""}


@dataclass(frozen=True)
class Told:
    """What came back for all requests of one question under one intervention."""

    responses: tuple[Any, ...]  # as lm-eval wants them: (log-likelihood, greedy), log-likelihood, or text
    receipt: dict[str, Any]
    error: str = ""


def scores(question: Question, responses: Sequence[Any]) -> dict[str, float]:
    """lm-eval's metrics of one document, and "correct": acc, exact match, or whether the predicted label is the right one."""
    for instance, response in zip(question.instances, responses, strict=True):
        instance.resps, instance.filtered_resps = [response], {}
    first = question.task._filters[0]
    first.apply(question.instances)
    metrics = question.task.process_results(question.doc, [i.filtered_resps[first.name] for i in question.instances])
    for instance in question.instances:
        instance.resps, instance.filtered_resps = [], {}
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, (bool, int, float))}
    found |= {name: float(value) for name, value in metrics.items() if hasattr(value, "item") and not hasattr(value, "__len__")}
    labels = [value for value in metrics.values() if isinstance(value, tuple) and len(value) == 2]
    for name in ("acc", "exact_match"):
        if name in found:
            return {"correct": found[name], **found}
    if question.mode == "choices" and labels:  # f1, mcc: (right label, predicted label)
        return {"correct": float(labels[0][0] == labels[0][1]), **found}
    return found


def row(question: Question, told: Told, model: str, trial: str, intervention: str, seconds: float, versions: str) -> Row:
    facts = question.facts()
    target = question.task.doc_to_target(question.doc)
    greedy: list[bool] = []
    if question.mode == "choices":
        facts["greedy"] = greedy = [bool(one) for _, one in told.responses]
        if isinstance(target, int) and 0 <= target < len(facts.get("options", ())):
            facts["answer_option"] = target
            target = facts["options"][target]
    totals = [float(r[0] if question.mode == "choices" else r) for r in told.responses] if question.mode != "generate" else []
    ordered = sorted(totals, reverse=True)
    return Row(
        id=trial,
        experiment=EXPERIMENT,
        model=model,
        task=question.task.task_name,
        sample=question.name,
        cluster=question.cluster(),
        seed=0,
        intervention=intervention,
        mode=question.mode,
        prompt=str(question.instances[0].args[0]),
        prompt_tokens=question.tokens,
        target=str(target),
        output=str(told.responses[0]) if question.mode == "generate" and not told.error else "",
        finish="failed" if told.error else "stop" if question.mode == "generate" else "scored",
        error=told.error,
        seconds=seconds,
        facts=facts,
        scores={} if told.error else scores(question, told.responses),
        logprobs=[] if told.error else totals,
        margins=[ordered[0] - ordered[1]] if len(ordered) > 1 and not told.error else [],
        receipt=told.receipt,
        prompt_id=question.digest(),
        versions=versions,
        kind=LM_EVAL,
        ability=_ABILITIES[question.mode],
        boundary="decode" if question.mode == "generate" else "",
        greedy=greedy,
    )


def responses(question: Question, trial: Row) -> list[Any]:
    """What lm-eval is told for a stored row. A failed one counts as wrong there; results.json says how many failed."""
    if trial.finish == "failed":
        nothing: dict[str, Any] = {"choices": (-math.inf, False), "perplexity": -math.inf, "generate": ""}
        return [nothing[question.mode]] * len(question.instances)
    if question.mode == "generate":
        return [trial.output]
    if question.mode == "perplexity":
        return list(trial.logprobs)
    return list(zip(trial.logprobs, trial.facts["greedy"], strict=True))
