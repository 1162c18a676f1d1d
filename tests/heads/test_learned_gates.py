"""Trained gates find the heads that were left in a model; closed gates are silenced heads."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from stock_heads import samples, score

import cases
import needlework as nw
from needlework.anatomy import Head
from needlework.heads.contribution import learned
from needlework.heads.methods import Scores
from needlework.model.hooked_model import answer_log_p, differentiable
from needlework.tasks.base import Item, make_task

PLANTED = (Head(2, 0), Head(2, 5), Head(2, 9), Head(2, 14))  # with these alone, it finds 9 needles in 10


@cache
def planted() -> tuple[nw.Subject, tuple[Item, ...]]:
    """tiny-griffin-small with nothing left of all heads but four, and needles that these still find."""
    subject = nw.load("tiny-griffin-small")
    with torch.no_grad():
        for layer, part in subject.anatomy.attention_parts():
            projection = cases.output_projection(subject.model.get_submodule(part.path), part.query_heads * part.value_dim)
            for head in subject.anatomy.layers[layer].heads:
                if head not in PLANTED:
                    projection.weight[:, head.index * part.value_dim : (head.index + 1) * part.value_dim] = 0.0
    task = make_task({"kind": "niah", "lengths": [48], "depths": [0, 25, 50, 75, 100], "samples": 2})
    return subject, tuple(task.items(subject.tokenizer, 0, None, None))


def _learned(**options: float) -> Scores:
    subject, items = planted()
    return learned(subject, items, seed=0, progress=lambda share: None, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_planted_heads_stay_open_and_no_others() -> None:
    subject = planted()[0]
    scores = _learned(steps=100, penalty=1.0)
    best = {subject.anatomy.heads[i] for i in np.argsort(-scores.values)[: len(PLANTED)]}
    assert best == set(PLANTED)
    gates = dict(zip(subject.anatomy.heads, scores.evidence["gates"], strict=True))
    assert all(gate == 0 for head, gate in gates.items() if head not in PLANTED)
    assert len(scores.evidence["used"]) >= 5


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma", "qwen3_next"])
def test_a_closed_gate_is_a_silenced_head(name: str) -> None:
    subject, item = cases.subject(name), samples(name)[0]
    off = [0, 5]
    gates = torch.ones(1, len(subject.anatomy.heads))
    gates[0, off] = 0.0
    with differentiable(subject.body):
        found = answer_log_p(subject.body, [(item.prompt, item.options[0])], gates)
    heads = [subject.anatomy.heads[i] for i in off]
    (expected,) = subject.choices([item.prompt], [item.options], nw.AblateHeads(heads=heads))
    assert float(found) == pytest.approx(expected.totals[0], abs=5 * cases.between_routes(name))


def test_one_seed_gives_one_result_and_a_price_closes_gates() -> None:
    a, b, c = (score("learned", "jamba", samples("jamba", 5), steps=8, rows=1, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(a.values, b.values)
    assert not np.array_equal(a.values, c.values)
    dear = score("learned", "jamba", steps=8, penalty=100.0)
    free = score("learned", "jamba", steps=8, penalty=0.0)
    assert dear.values.mean() < free.values.mean()
    assert np.all((dear.values >= 0) & (free.values <= 1))
    assert max(dear.evidence["gates"]) < 1  # all pay
