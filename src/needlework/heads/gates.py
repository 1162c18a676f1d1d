"""Heads by gates that are trained: weights stay as they are, every head has to pay for being heard, and some stay open.

The idea is DuoAttention's (arXiv 2410.10819), but there a gate mixes full attention with a short window, to find heads that need
their far keys. Here it multiplies what the head says, so that a closed gate is exactly a silenced head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from needlework.heads.answers import Question, questions
from needlework.heads.causal import Progress, evidence
from needlework.heads.methods import Scores, method
from needlework.heads.pieces import in_one_piece
from needlework.model.gates import answer_log_p, differentiable
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.subject import Subject


@method("learned", "learned", "how long a gate on the head stays open in training that taxes gates (L1; after DuoAttention)")
def learned(
    subject: Subject,
    items: Sequence[Item],
    *,
    seed: int,
    progress: Progress,
    steps: int = 200,
    rows: int = 4,
    penalty: float = 1.0,
    rate: float = 0.05,
) -> Scores:
    """Gates begin at 1 and stay in [0, 1]. The loss is -log P of an answer's tokens, on average, plus `penalty` times the mean
    gate: a gate closes if its head is worth less than its share of that. Of gates that end alike, the one that was open for
    longer is better: the score is the mean over all steps.
    """
    piece = partial(_trained, seed=seed, steps=steps, rows=rows, penalty=penalty, rate=rate)
    return in_one_piece(subject, piece, items, progress)


def _trained(
    subject: Subject,
    items: Sequence[Item],
    progress: Progress,
    *,
    seed: int,
    steps: int,
    rows: int,
    penalty: float,
    rate: float,
) -> Scores:
    asked, body = questions(subject, items), subject.body
    batches = _alike(asked, rows)
    draw = np.random.default_rng(seed)
    gates = torch.ones(1, len(subject.anatomy.heads), device=body.device, requires_grad=True)
    optimiser = torch.optim.Adam([gates], lr=rate, betas=(0.9, 0.99))
    total, losses = torch.zeros_like(gates[0], requires_grad=False), []
    with differentiable(body):
        for step in range(steps):
            batch = batches[int(draw.integers(len(batches)))]
            log_p = answer_log_p(body, [(x.item.prompt, x.answer) for x in batch], gates)
            loss = -log_p.sum() / sum(len(x.answer) for x in batch)
            losses.append(float(loss.detach()))
            (gates.grad,) = torch.autograd.grad(loss + penalty * gates.mean(), gates)
            optimiser.step()
            with torch.no_grad():
                gates.clamp_(0, 1)
                total += gates[0]
            progress((step + 1) / steps)
    facts = {**evidence(asked, items), "gates": [round(g, 4) for g in gates[0].tolist()], "loss": losses[:: max(1, steps // 50)]}
    return Scores((total / steps).double().cpu().numpy(), None, {**facts, "steps": steps, "penalty": penalty})


def _alike(asked: Sequence[Question], rows: int) -> list[list[Question]]:
    """Batches of samples of about one length, so that little is padded."""
    order = sorted(asked, key=lambda question: len(question.item.prompt) + len(question.answer))
    return [list(order[start : start + rows]) for start in range(0, len(order), rows)]
