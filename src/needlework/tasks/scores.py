"""Scores of one answer: exact, graded, and forced choice. Case and punctuation never count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks.base import Item

# Rises when the same answer gets another score. Answers stay valid: `needlework rescore` computes their scores again.
# 2: punctuation separates words; version 1 deleted it, so that "day.The" and "day</b>" were words of their own.
SCORES_VERSION = 2
WHOLE = 5.0  # graded points for the whole needle


def plain(text: str) -> str:
    """Words in lower case with single spaces. Whatever is no letter or digit separates: "day.</b>The" is "day b the"."""
    return " ".join(re.sub(r"[\W_]+", " ", text.casefold()).split())


def holds(text: str, part: str) -> bool:
    """The words of `part` stand one after the other in `text`."""
    return f" {plain(part)} " in f" {plain(text)} "


def begins(text: str, target: str) -> bool:
    """The answer's first words are the target: what counts where nothing but the target is asked for."""
    return f"{plain(text)} ".startswith(f"{plain(target)} ")


def equals(text: str, target: str) -> bool:
    """The answer is the target and nothing else."""
    return plain(text) == plain(target)


def graded(text: str, needle: str, parts: Mapping[str, float]) -> float:
    """0 to 5: points for each part that occurs, all of them for the whole needle."""
    if holds(text, needle):
        return WHOLE
    return min(WHOLE, sum(points for part, points in parts.items() if holds(text, part)))


def words_right(text: str, target: str) -> float:
    """0 to 5: the share of the target's words that stand in their place at the beginning of the answer."""
    said, wanted = plain(text).split(), plain(target).split()
    return WHOLE * sum(a == b for a, b in zip(said, wanted, strict=False)) / max(1, len(wanted))


def share_found(text: str, targets: Sequence[str]) -> float:
    """The share of targets that occur anywhere in the answer."""
    return sum(holds(text, target) for target in targets) / len(targets)


def choice(item: Item, answer: Answer, against: str = "all") -> dict[str, float]:
    """Forced choice by log-likelihood. The first best option wins; options stand in random order, so ties are fair.

    `correct` is the choice among all options, `correct_context` among those that stand in the prompt (binding: which of
    them belongs to the question?), `correct_absent` against those that do not (presence: which of them was read?).
    `correct_per_token` divides by length, `margin` is in nats, `top1` says that the model would have answered so.
    """
    if item.answer is None or len(answer.totals) != len(item.options):
        raise NeedleworkError(
            f"{item.id} has {len(item.options)} options but {len(answer.totals)} log-likelihoods; ask for it in mode choices"
        )
    logs, right = answer.totals, item.answer
    sets = {"all": range(len(logs)), **option_sets(item)}
    scores = {f"correct_{name}": _first_best(logs, among, right) for name, among in sets.items()}
    scores["correct"] = scores.pop("correct_all") if against == "all" else scores[f"correct_{against}"]
    if all(item.options):  # a row of an old store does not know its options' tokens
        per_token = [value / len(option) for value, option in zip(logs, item.options, strict=True)]
        scores["correct_per_token"] = _first_best(per_token, range(len(logs)), right)
    scores["margin"] = logs[right] - max(value for i, value in enumerate(logs) if i != right)
    if answer.greedy:
        scores["top1"] = float(answer.greedy[right])
    return scores


def option_sets(item: Item) -> dict[str, list[int]]:
    """Options that stand in the context, and those that do not, each with the right one."""
    kinds: Sequence[Any] = item.facts.get("option_kinds", ())
    return {
        name: [i for i, kind in enumerate(kinds) if kind in ("true", name)] for name in ("context", "absent") if name in kinds
    }


def _first_best(logs: Sequence[float], among: Sequence[int], right: int) -> float:
    return float(max(among, key=lambda i: logs[i]) == right)
