"""Judging rankings: areas, the smallest set and static against dynamic, on made-up answers and on a model of the zoo."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import needlework as nw
from needlework.anatomy import heads_of_share
from needlework.experiments.heads import tasks_of
from needlework.heads import evaluation, samples
from needlework.heads.evaluation import RetrievalCurve
from needlework.interventions.ranking import Ranking
from needlework.measure import measure


def curve(right: list[list[float]], ks: tuple[int, ...] = (0, 1, 2, 4, 8)) -> RetrievalCurve:
    rows = np.array(right, dtype=float)
    return RetrievalCurve("made up", 8, ks, rows, tuple(f"c{i // 2}" for i in range(rows.shape[1])))


def test_the_area_is_the_trapezoid_over_the_share_of_heads() -> None:
    rng = np.random.default_rng(0)
    rows = (rng.random((5, 40)) < np.array([[0.0], [0.3], [0.6], [0.9], [1.0]])).astype(float)
    made = curve(rows.tolist())
    assert made.weights.sum() == pytest.approx(1.0)
    assert made.area.value == pytest.approx(np.trapezoid(rows.mean(1), np.array(made.ks) / 8))
    assert made.area.low < made.area.value < made.area.high
    assert curve([[1] * 6] * 5).area.value == 1.0
    assert curve([[1] * 6] * 5).area.low < 1.0  # six samples are no certainty
    better = curve([[1] * 40] * 5).above(made)
    assert better.value == pytest.approx(1 - made.area.value)
    assert better.low > 0


@pytest.mark.parametrize("mine, others", [(0.0, 0.1), (0.6, 0.7), (0.1, 0.0), (0.4, 0.4), (1.0, 0.0)])
def test_a_constant_difference_of_curves_has_an_interval_around_it(mine: float, others: float) -> None:
    a, b = (curve([[share] * 6] * 5) for share in (mine, others))
    found, back = a.above(b), b.above(a)
    assert found.value == pytest.approx(mine - others)
    assert -1 <= found.low <= found.value <= found.high <= 1
    assert found.high - found.low > 0.05
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))


def test_samples_that_were_drawn_are_not_drawn_again() -> None:
    subject = nw.load("tiny-griffin-small")
    tasks = tasks_of(nw.tasks.make_task({"kind": "niah", "lengths": [64], "depths": [0, 100], "samples": 4}), subject)
    first = samples.draw_samples(subject, tasks, 8, seed=0)
    taken = {sample.item.prompt for sample in first}
    assert not taken & {sample.item.prompt for sample in samples.draw_samples(subject, tasks, 8, 1, taken)}
    few = set(list(taken)[:3])
    assert {sample.item.prompt for sample in samples.draw_samples(subject, tasks, 8, 0, few)} == taken - few
    with pytest.raises(nw.NeedleworkError, match="no samples are left"):
        samples.draw_samples(subject, tasks, 8, 0, taken)


def test_the_fewest_heads_are_enough_from_there_on() -> None:
    right = [[0] * 10, [1] * 10, [1] * 8 + [0] * 2, [1] * 10, [1] * 10]
    assert curve(right).smallest(0.99) == 4  # at one head it was luck: at two some are lost again
    assert curve(right).smallest(0.8) == 1
    assert curve([[1] * 4] * 5).smallest(1.0) == 0


def test_numbers_of_heads_begin_with_none_and_end_with_all() -> None:
    for heads in (1, 2, 7, 20, 64, 270):
        ks = evaluation.head_counts(heads)
        assert (ks[0], ks[-1]) == (0, heads)
        assert list(ks) == sorted(set(ks))
        assert len(ks) < 20


@functools.cache
def subject() -> nw.Subject:
    return nw.load("tiny-griffin-small")


@functools.cache
def drawn(count: int = 6, seed: int = 0) -> list[samples.Sample]:
    task = nw.tasks.make_task({"kind": "niah", "lengths": [48], "depths": [50], "distractors": 1})
    return samples.draw_samples(subject(), [task], count, seed)


def quiet(share: float) -> None:
    assert 0 <= share <= 1


def test_random_orders_are_of_their_seed_and_of_all_heads() -> None:
    anatomy = subject().anatomy
    orders = {evaluation.random_order(anatomy, seed) for seed in range(5)}
    assert len(orders) == 5
    assert all(sorted(order.order) == list(anatomy.heads) for order in orders)
    assert evaluation.random_order(anatomy, 3) == evaluation.random_order(anatomy, 3)


def test_samples_are_of_their_seed_in_the_window_and_as_many_as_asked() -> None:
    assert [s.item.prompt for s in drawn()] == [s.item.prompt for s in drawn()]
    assert not {s.item.prompt for s in drawn()} & {s.item.prompt for s in drawn(seed=1)}
    for count in (1, 7, 30):
        some = samples.draw_samples(subject(), samples.named_tasks("recall", subject()), count, 0)
        assert len({s.item.prompt for s in some}) == count
    anatomy = replace(subject().anatomy, layers=tuple(_narrow(layer) for layer in subject().anatomy.layers))
    narrow = nw.Subject.__new__(nw.Subject)
    narrow.body, narrow.tokenizer = _Body(subject(), anatomy), subject().tokenizer  # type: ignore[assignment]
    narrow.model, narrow.anatomy = subject().model, anatomy
    some = samples.draw_samples(narrow, samples.named_tasks("niah", subject()), 30, 0)
    assert 0 < len(some) < 30
    assert all(len(s.item.prompt) - s.item.spans["needle"][0][0] <= 60 for s in some)


def _narrow(layer: nw.anatomy.Layer) -> nw.anatomy.Layer:  # type: ignore[name-defined]
    return replace(layer, attention=replace(layer.attention, window=60)) if layer.attention else layer


class _Body:
    def __init__(self, whole: nw.Subject, anatomy: nw.Anatomy) -> None:
        self.anatomy, self.model = anatomy, whole.model


def test_curves_are_what_the_model_answers_with_these_heads_alone() -> None:
    anatomy = subject().anatomy
    order = Ranking(order=anatomy.heads[::-1])
    found = evaluation.evaluate_rankings(
        subject(), {"again": order, "mine": order}, drawn(), quiet, orders=0
    )  # shared sets are asked once
    made = found["mine"]
    assert (found["again"].right == made.right).all()
    for k in (0, 2, len(anatomy.heads)):
        kept = order.top(k)
        act = nw.OnlyHeads(heads=kept) if 0 < k < len(anatomy.heads) else nw.NONE if k else nw.AblateAttention()
        answers = subject().answer([request for s in drawn() for request in s.requests(act)])
        expected = [s.task.score(s.item, a)["correct"] for s, a in zip(drawn(), answers, strict=True)]
        assert made.right[made.ks.index(k)].tolist() == expected
    assert made.right[-1].mean() == 1.0 > made.right[0].mean()


def test_a_model_that_cannot_do_the_task_is_not_ranked() -> None:
    blind = nw.load("tiny-griffin-small")
    with torch.no_grad():
        for name, weight in blind.model.named_parameters():
            if "self_attn" in name or "temporal_block.o_proj" in name:
                weight.zero_()
    with pytest.raises(nw.NeedleworkError, match=r"retrieves \d.*no ranking can be had from a task that it cannot do"):
        nw.rank(blind, samples=6)


@pytest.mark.parametrize(
    "call,says",
    [
        (lambda s: nw.rank(s, samples=0), "samples=0 must be a whole number, at least 1"),
        (lambda s: nw.rank(s, samples=2.5), r"samples=2\.5 must be"),
        (lambda s: nw.rank(s, "copy_scor"), "did you mean 'copy_score'"),
        (lambda s: nw.rank(s, task="nihaa"), "'nihaa' is neither a plan nor niah or recall; did you mean 'niah'"),
        (
            lambda s: nw.rank(s, task=nw.tasks.make_task({"kind": "niah_choice"})),
            "no task here generates",
        ),
        (lambda s: nw.smallest_set(s, keep=0), "keep=0 is the share"),
        (lambda s: nw.smallest_set(s, keep=1.5), "keep=1.5 is the share"),
        (lambda s: nw.rank(nw.load("tiny-mamba")), "has no attention heads, so there is nothing to rank"),
    ],
)
def test_bad_input_is_told_before_anything_is_asked(call, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(nw.NeedleworkError, match=says):
        call(subject())


def test_tasks_come_from_plans() -> None:
    kinds = {task.kind for task in tasks_of("demo-full", subject())}
    assert kinds == {"niah"}
    assert len(tasks_of("demo-full", subject())) > 1
    assert [task.kind for task in tasks_of("recall", subject())] == ["mqar", "phone_book"]


def test_dynamic_choice_is_recorded_as_it_acts() -> None:
    """Against the attention patterns themselves: at every token, the heads of least entropy in each layer."""
    share, some = 0.15, drawn()[:2]
    found = evaluation.count_selections(subject(), some, quiet, share)
    expected = dict.fromkeys(subject().anatomy.heads, 0)
    for sample in some:
        with nw.observe(subject(), patterns=True) as watch:
            subject().answer(sample.requests(nw.KeepHeads(fraction=share)))
        tokens: dict[tuple[int, int], list[tuple[float, int]]] = {}
        for pattern in watch.patterns:
            p = pattern.weights.double()
            nats = -float(torch.special.xlogy(p, p).sum())
            tokens.setdefault((pattern.layer, pattern.position), []).append((round(nats, 6), pattern.head))
        for (layer, _), heads in tokens.items():
            for _, head in sorted(heads)[: heads_of_share(share, len(heads))]:
                expected[nw.Head(layer, head)] += 1
    counts = found.all_heads("anywhere").sum(0)
    assert counts.sum() == sum(expected.values())
    assert np.abs(counts - np.array(list(expected.values()))).sum() <= 0.01 * counts.sum()  # but for near ties


@pytest.mark.slow
def test_the_smallest_set_keeps_what_it_says() -> None:
    task = drawn()[0].task
    found = nw.smallest_set(subject(), 0.9, by="copy_score", task=task, samples=6, held_out=12, seed=3)
    assert 0 < len(found.heads) < found.of
    assert found.retained.n == 12
    assert found.retained.value > found.random.value
    others = samples.draw_samples(subject(), [task], 12, 3 + 3)  # neither ranked nor chosen on
    right = measure(subject(), others, [nw.NONE, nw.OnlyHeads(heads=found.heads)]).values()
    assert found.retained.value == pytest.approx(right[1].mean() / right[0].mean())
    assert found.text().startswith(f"{len(found.heads)} of 32 heads")
    assert found.to_dict()["k"] == len(found.heads)
