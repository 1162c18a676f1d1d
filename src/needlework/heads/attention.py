"""Heads by where they look: at the needle, at the token being said, from the question, or at few tokens whatever they are.

The model answers freely, with nothing done to it. Free of torch until heads are scored, so that a plan can name these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.heads.methods import Scores, method
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.heads.looking import Look
    from needlework.subject import Subject

Progress = Callable[[float], None]


def look(subject: Subject, items: Sequence[Item], progress: Progress, null: bool = False) -> Look:
    from needlework.heads.looking import look as watched

    return watched(subject, items, progress, null)


def _pooled(top: np.ndarray, bottom: np.ndarray, sign: float = 1.0, **evidence: Any) -> Scores:
    """Sums over all samples divided by each other, as `nw.observe` has it, and the same for each sample by itself."""
    values = top.sum(0) / np.maximum(bottom.sum(0), 1e-300)
    return Scores(sign * values, sign * top / np.maximum(bottom, 1e-300), evidence)


@method("needle_mass", "attention", "attention on the needle while answering", of_seen=lambda head: head.needle_mass)
def needle_mass(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    seen = look(subject, items, progress)
    return _pooled(seen.all_heads("needle_mass"), seen.all_heads("queries"))


@method(
    "copy_score",
    "attention",
    "looks most at the very needle token that is being said (Wu et al. 2024)",
    of_seen=lambda head: head.copy_score,
)
def copy_score(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Of the tokens said that stand in the needle, the share at which the head's most attended key was such a token there."""
    seen = look(subject, items, progress)
    hits = seen.all_heads("copies")
    copied = np.broadcast_to(seen.copied.numpy()[:, None], hits.shape)
    return _pooled(hits, copied, copied_tokens=int(seen.copied.sum()))


@method(
    "question_mass",
    "attention",
    "attention from the question to the needle while reading, less that of an empty question (QRHead)",
)
def question_mass(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    asked = look(subject, items, lambda share: progress(share / 2))
    null = look(subject, items, lambda share: progress(0.5 + share / 2), null=True)
    shares = [seen.all_heads("question_mass") / np.maximum(seen.all_heads("question_tokens"), 1) for seen in (asked, null)]
    return Scores.of_samples(shares[0] - shares[1], with_question=shares[0].mean(0).tolist())


@method("entropy", "attention", "looks at few tokens while answering (negative entropy)", of_seen=lambda head: -head.entropy)
def negative_entropy(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    seen = look(subject, items, progress)
    return _pooled(seen.all_heads("entropy"), seen.all_heads("queries"), -1.0)


@method("entropy_no_sink", "attention", "the same of its attention beside the first token, which many heads rest on")
def negative_entropy_no_sink(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    seen = look(subject, items, progress)
    return _pooled(seen.all_heads("entropy_no_sink"), seen.all_heads("queries"), -1.0)
