"""Wrap lm-eval's documents as a Task, so that plans' runner executes them: questions are samples, metrics are scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

from pydantic import PrivateAttr

from needlework.lmeval.questions import Question
from needlework.requests import Answer, stop_tokens
from needlework.results import LM_EVAL, Row
from needlework.tasks.base import Ability, Item, Mode, Task, Tokenizer

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

_ABILITIES: dict[Mode, Ability] = {"choices": "knowledge", "perplexity": "perplexity", "generate": ""}


class Documents(Task):
    """The documents of one lm-eval task."""

    kind = LM_EVAL
    task: str  # name of the lm-eval task
    _questions: dict[str, Question] = PrivateAttr()  # by digest
    _lm: Any = PrivateAttr()
    _eos: frozenset[int] = PrivateAttr()

    @classmethod
    def of(cls, questions: Sequence[Question], lm: NeedleworkLM, eos: frozenset[int]) -> Documents:
        """Build the task of these questions, which belong to one lm-eval task and have the same mode."""
        made = cls(task=questions[0].task.task_name)
        made._questions = {question.digest(): question for question in questions}
        made._lm, made._eos = lm, eos
        return made

    @property
    def _first(self) -> Question:
        return next(iter(self._questions.values()))

    @property
    def mode(self) -> Mode:  # type: ignore[override]
        return self._first.mode

    @property
    def ability(self) -> Ability:  # type: ignore[override]
        return _ABILITIES[self.mode]

    @property
    def chance(self) -> float:
        return float(self._first.facts().get("chance", 0.0))

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        return (self._item(digest, question) for digest, question in self._questions.items())

    def _item(self, digest: str, question: Question) -> Item:
        facts, target, answer = question.facts(), question.task.doc_to_target(question.doc), None
        if question.mode == "choices" and isinstance(target, int) and 0 <= target < len(facts.get("options", ())):
            answer, target = target, facts["options"][target]
        (prompt, options), *others = _requests(question)
        ending = None
        if question.mode == "generate":
            asked = question.generations[0]
            ending = (asked.max_new_tokens, stop_tokens(self._eos, self._lm.tokens_with(asked.until)))
        return Item(
            id=question.name,
            cluster=question.cluster(),
            prompt=prompt,
            prompt_text=str(question.instances[0].args[0]),
            target=str(target),
            options=options,
            answer=answer,
            facts=facts,
            ending=ending,
            stem=question.task.task_name if question.task.config.num_fewshot else "",
            digest=digest,
            also=tuple(Item(question.name, "", context, "", "", options=more) for context, more in others),
        )

    def said(self, item: Item, answer: Answer) -> str:
        if self.mode != "generate" or not answer.tokens:  # answers from a store have no tokens, and their text is cut already
            return answer.text
        return cast(str, self._lm.text(answer, self._questions[item.digest].generations[0].until))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        question = self._questions[item.digest]
        return metrics(question, responses(question, answer.text, answer.totals, answer.greedy))


def _requests(question: Question) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Return (prompt, options) in tokens, in the order of lm-eval's requests; requests with one common prompt are merged."""
    if question.mode == "generate":
        return [(question.generations[0].prompt, ())]
    pairs = [pair for windows in question.pairs for pair in windows]
    contexts = {context for context, _ in pairs}
    if len(contexts) == 1:
        return [(pairs[0][0], tuple(continuation for _, continuation in pairs))]
    return [(context, (continuation,)) for context, continuation in pairs]


def responses(question: Question, text: str, totals: Sequence[float], greedy: Sequence[bool]) -> list[Any]:
    """Return an answer in lm-eval's format, one entry per request.

    Args:
        text: Generated text (mode "generate").
        totals: Log-likelihood of each option, or of each window of each text.
        greedy: Whether each option is the greedy continuation (mode "choices").

    Returns:
        (log-likelihood, greedy) of each option, the log-likelihood of each text, or the generated text.
    """
    if question.mode == "generate":
        return [text]
    if question.mode == "choices":
        return list(zip(totals, greedy, strict=True))
    ends = accumulate((len(windows) for windows in question.pairs), initial=0)  # a long text has several windows
    return [sum(totals[start:end]) for start, end in pairwise(ends)]


def stored_responses(question: Question, row: Row) -> list[Any]:
    """Return the responses of a stored row. A failed row is scored as wrong; results.json has the number of failures."""
    if row.finish == "failed":
        nothing: dict[str, Any] = {"choices": (-math.inf, False), "perplexity": -math.inf, "generate": ""}
        return [nothing[question.mode]] * len(question.instances)
    if question.mode == "perplexity":
        return [sum(row.logprobs)] if len(question.instances) == 1 else list(row.logprobs)
    return responses(question, row.output, row.logprobs, row.greedy)


def metrics(question: Question, responses: Sequence[Any]) -> dict[str, float]:
    """Compute lm-eval's metrics of one document; adds "correct": acc, exact match, or whether the label is right."""
    for instance, response in zip(question.instances, responses, strict=True):
        instance.resps, instance.filtered_resps = [response], {}
    first = question.task._filters[0]
    first.apply(question.instances)
    results = question.task.process_results(question.doc, [i.filtered_resps[first.name] for i in question.instances])
    for instance in question.instances:
        instance.resps, instance.filtered_resps = [], {}
    numbers = {name: float(value) for name, value in results.items() if isinstance(value, (bool, int, float))}
    numbers |= {name: float(value) for name, value in results.items() if hasattr(value, "item") and not hasattr(value, "__len__")}
    labels = [value for value in results.values() if isinstance(value, tuple) and len(value) == 2]
    for name in ("acc", "exact_match"):
        if name in numbers:
            return {"correct": numbers[name], **numbers}
    if question.mode == "choices" and labels:  # f1, mcc: (right label, predicted label)
        return {"correct": float(labels[0][0] == labels[0][1]), **numbers}
    return numbers
