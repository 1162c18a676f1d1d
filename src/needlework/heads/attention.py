"""Rank heads by their attention weights while the model answers without intervention.

torch is imported only when heads are scored, so that a plan can name these methods without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.heads.methods import Scores, method
from needlework.measure import Progress
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.heads.observers import AttentionSums
    from needlework.subject import Subject


def _observed(subject: Subject, items: Sequence[Item], progress: Progress, null: bool = False) -> AttentionSums:
    from needlework.heads.observers import observe_samples

    return observe_samples(subject, items, progress, null)


def _pooled(top: np.ndarray, bottom: np.ndarray, sign: float = 1.0, **evidence: Any) -> Scores:
    """Return scores from two sums per sample: their ratio over all samples, as in `nw.observe`, and for each sample.

    Args:
        top: [samples, heads] numerators.
        bottom: [samples, heads] denominators.
        sign: -1 where lower values are better.
        evidence: What the ranking file records beside the scores.
    """
    values = top.sum(0) / np.maximum(bottom.sum(0), 1e-300)
    return Scores(sign * values, sign * top / np.maximum(bottom, 1e-300), evidence)


@method("needle_mass", "attention", "attention on the needle while answering", of_seen=lambda head: head.needle_mass)
def needle_mass(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Score a head by its mean attention on the needle over decode steps."""
    seen = _observed(subject, items, progress)
    return _pooled(seen.all_heads("needle_mass"), seen.all_heads("queries"))


@method(
    "copy_score",
    "attention",
    "looks most at the very needle token that is being said (Wu et al. 2024)",
    of_seen=lambda head: head.copy_score,
)
def copy_score(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Score a head by how often its most attended key is the needle token being generated, among generated needle tokens."""
    seen = _observed(subject, items, progress)
    copied = seen.all_heads("copied")
    return _pooled(seen.all_heads("copies"), copied, copied_tokens=int(copied[:, 0].sum()))


@method(
    "question_mass",
    "attention",
    "attention from the question to the needle while reading, less that of an empty question (QRHead)",
)
def question_mass(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Score a head by the mean attention of question tokens on the needle, minus that of a question without content."""
    asked = _observed(subject, items, lambda share: progress(share / 2))
    null = _observed(subject, items, lambda share: progress(0.5 + share / 2), null=True)
    shares = [seen.all_heads("question_mass") / np.maximum(seen.all_heads("question_tokens"), 1) for seen in (asked, null)]
    return Scores.of_samples(shares[0] - shares[1], with_question=shares[0].mean(0).tolist())


@method("entropy", "attention", "looks at few tokens while answering (negative entropy)", of_seen=lambda head: -head.entropy)
def negative_entropy(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Score a head by minus its mean attention entropy over decode steps."""
    seen = _observed(subject, items, progress)
    return _pooled(seen.all_heads("entropy"), seen.all_heads("queries"), -1.0)


@method("entropy_no_sink", "attention", "the same of its attention beside the first token, which many heads rest on")
def negative_entropy_no_sink(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Score a head by minus its mean entropy over decode steps, with the first token left out and the rest normalized."""
    seen = _observed(subject, items, progress)
    return _pooled(seen.all_heads("entropy_no_sink"), seen.all_heads("queries"), -1.0)
