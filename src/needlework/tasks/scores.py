"""Scores of one answer: exact match, graded points and forced choice. Case and punctuation are ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks.base import Item, Mode, Task, task

# Incremented when the same answer gets a different score; `needlework rescore` recomputes the scores of stored answers.
# Version 2: punctuation separates words. Version 1 deleted it, so that "day.The" was one word.
SCORES_VERSION = 2
WHOLE = 5.0  # points for the whole needle


def plain(text: str) -> str:
    """Return the case-folded words of a text. Punctuation and symbols separate words: "day.</b>The" is "day b the"."""
    return " ".join(re.sub(r"[\W_]+", " ", text.casefold()).split())


def holds(text: str, part: str) -> bool:
    """Return whether the words of `part` occur consecutively in `text`."""
    return f" {plain(part)} " in f" {plain(text)} "


def begins(text: str, target: str) -> bool:
    """Return whether the first words of `text` are the target."""
    return f"{plain(text)} ".startswith(f"{plain(target)} ")


def equals(text: str, target: str) -> bool:
    """Return whether the words of `text` are exactly the target."""
    return plain(text) == plain(target)


def graded(text: str, needle: str, parts: Mapping[str, float]) -> float:
    """Return 5 if the text contains the whole needle, else the sum of points of the parts it contains, at most 5."""
    if holds(text, needle):
        return WHOLE
    return min(WHOLE, sum(points for part, points in parts.items() if holds(text, part)))


def words_right(text: str, target: str) -> float:
    """Return 5 times the fraction of the target's words that the answer has at the same position."""
    said, wanted = plain(text).split(), plain(target).split()
    return WHOLE * sum(a == b for a, b in zip(said, wanted, strict=False)) / max(1, len(wanted))


def share_found(text: str, targets: Sequence[str]) -> float:
    """Return the fraction of targets that occur anywhere in the answer."""
    return sum(holds(text, target) for target in targets) / len(targets)


def choice(item: Item, answer: Answer, against: str = "all") -> dict[str, float]:
    """Score a forced choice by the log-likelihood of the options. Ties go to the first option; the right one's index is random.

    Returns:
        "correct": whether the right option is the most likely one of those that `against` selects (default: all);
        "correct_context": among it and the wrong options in the prompt (binding); "correct_absent": among it and those that are
        not in the prompt (presence); "correct_per_token": among all by log-likelihood per token; "margin": log-likelihood in nats
        minus that of the best wrong option of all; "top1": whether greedy decoding would generate it.
    """
    if item.answer is None or len(answer.totals) != len(item.options):
        raise NeedleworkError(
            f"{item.id} has {len(item.options)} options but {len(answer.totals)} log-likelihoods; ask for it in mode choices"
        )
    logs, right, kinds = answer.totals, item.answer, item.facts.get("option_kinds", ())
    sets: dict[str, Sequence[int]] = {"all": range(len(logs))}  # or the right option with the wrong ones of one kind
    sets |= {name: [i for i, k in enumerate(kinds) if k in ("true", name)] for name in ("context", "absent") if name in kinds}
    scores = {f"correct_{name}": _first_best(logs, among, right) for name, among in sets.items()}
    scores["correct"] = scores.pop("correct_all") if against == "all" else scores[f"correct_{against}"]
    if all(item.options):  # rows of old stores have no tokens of their options
        per_token = [value / len(option) for value, option in zip(logs, item.options, strict=True)]
        scores["correct_per_token"] = _first_best(per_token, range(len(logs)), right)
    scores["margin"] = logs[right] - max(value for i, value in enumerate(logs) if i != right)
    if answer.greedy:
        scores["top1"] = float(answer.greedy[right])
    return scores


def _first_best(logs: Sequence[float], among: Sequence[int], right: int) -> float:
    return float(max(among, key=lambda i: logs[i]) == right)


class ChoiceMixin:
    """Score the log-likelihood of an item's options instead of generating. Against which options: the task's `against`."""

    mode: ClassVar[Mode] = "choices"

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return choice(item, answer, getattr(self, "against", "all"))


def choice_companion(base: type[Task]) -> type[Task]:
    """Register and return the task `<kind>_choice`, which scores the log-likelihood of the options of the same items.

    Assign it to `<Name>Choice` in the module of the task, so that it can be pickled.
    """
    about = f"The same items as `{base.kind}`: the most likely option is the answer."
    fields = {"kind": f"{base.kind}_choice", "__module__": base.__module__, "__doc__": about}
    return task(cast(type[Task], type(f"{base.__name__}Choice", (ChoiceMixin, base), fields)))
