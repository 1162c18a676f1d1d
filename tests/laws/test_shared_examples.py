"""Questions that share their examples: the examples are read once under each intervention, and every answer is the one alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cases
import needlework as nw
from needlework.engine import budget as budget_module
from needlework.engine import prefill as prefill_module
from needlework.engine.engine import Engine
from needlework.engine.prefill import Padding
from needlework.model import hooked_model
from needlework.requests import Answer, Request
from tiny import build

STEMS = [tuple(cases.tokens(n, seed=n).tolist()) for n in (17, 11)]  # the examples of two subjects
RESTS = (3, 7, 4, 9, 7)  # tokens of the questions of each
PROMPTS = [(*stem, *cases.tokens(n, seed=50 + 10 * s + i).tolist()) for s, stem in enumerate(STEMS) for i, n in enumerate(RESTS)]
LETTERS = ((5,), (9,), (11,), (13,))
PIECE = 16  # tokens of a forward: some rows are alone in theirs
MIXED = ((5,), (9, 4), (11, 7, 6))


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stems this short would not be worth a forward; and few rows at a time, so that batches are cut and put together."""
    monkeypatch.setattr(budget_module, "_FORWARD_FLOPS", {"cpu": 0.0})
    monkeypatch.setattr(prefill_module, "forward_overhead", lambda body: 8.0)
    monkeypatch.setattr(budget_module, "FORWARD_TOKENS", {"cpu": PIECE})
    monkeypatch.setattr(prefill_module, "FORWARD_TOKENS", {"cpu": PIECE})


def acts(name: str) -> list[nw.Intervention]:
    """Acts that do the same to every token, and acts that do not."""
    some: list[nw.Intervention] = [nw.NONE]
    if name not in cases.NO_HEADS:
        some += [nw.KeepHeads(k=1), nw.KeepHeads(k=2, by="norm"), nw.AblateAttention(site="block"), nw.LimitContext(tokens=4)]
        layer = cases.subject(name).anatomy.attention_layers[0].index
        some += [nw.AblateHeads(heads=[(layer, 0)]) + nw.KeepHeads(k=2), nw.BlockAttention("answer", (2, 3))]
    if name not in cases.NO_MIXER:
        some += [nw.AblateRecurrent(), nw.ResetState(at=9)]
    return some


def asked(some: list[nw.Intervention], options: Any = LETTERS) -> list[Request]:
    return [Request(prompt, act, options=options) for prompt in PROMPTS for act in some]


def same(a: Answer, b: Answer) -> None:
    assert (a.finish, a.error, a.receipt, a.greedy) == (b.finish, b.error, b.receipt, b.greedy)
    for one, other in zip(a.option_logprobs, b.option_logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def answers(engine: Engine, requests: list[Request]) -> list[Answer]:
    found = dict(engine.run(requests))
    return [found[i] for i in range(len(requests))]


class Fed:
    """Everything that a model is fed: the number of tokens of each row of each forward, and where the row begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[int, int]] = []
        stock = hooked_model.run_model

        def run_model(model: Any, ids: Tensor, positions: Tensor, memory: Any, **kwargs: Any) -> Any:
            self.rows += [(int(at), ids.shape[1]) for at in positions[:, 0]]
            return stock(model, ids, positions, memory, **kwargs)

        monkeypatch.setattr(hooked_model, "run_model", run_model)


@pytest.mark.slow
@cases.each(cases.ALL)
def test_shared_examples_change_no_answer(name: str) -> None:
    """Two subjects, questions of four lengths, every intervention, letters: all in one call, and every fifth by itself."""
    subject, requests = cases.subject(name), asked(acts(name))
    together = answers(subject.engine, requests)
    for request, answer in list(zip(requests, together, strict=True))[::5]:
        same(answer, subject.answer([request])[0])


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma"])
def test_a_model_that_cannot_continue_a_prefill_answers_all_the_same(name: str) -> None:
    subject = cases.subject(name, "stock")
    assert not subject.body.continues or name == "recurrent_gemma"
    requests = asked([nw.NONE, nw.KeepHeads(k=1)])
    for request, answer in list(zip(requests, answers(subject.engine, requests), strict=True))[::5]:
        same(answer, subject.answer([request])[0])


@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma"])
def test_examples_are_read_once_for_each_subject_and_intervention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject(name)
    some = [nw.NONE, nw.KeepHeads(k=1), nw.KeepHeads(k=4), nw.AblateAttention(site="block")]  # of 4 heads: the third is nothing
    engine = Engine(subject.body)
    answers(engine, asked(some))  # what must be proven of the model is proven now
    fed = Fed(monkeypatch)
    answers(engine, asked(some))
    begun = [tokens for at, tokens in fed.rows if at == 0]
    assert sorted(begun) == sorted(len(stem) for stem in STEMS for _ in range(3))
    assert sum(at > 0 for at, _ in fed.rows) == 3 * len(PROMPTS)
    assert len(fed.rows) == 3 * (len(STEMS) + len(PROMPTS))
    assert engine.prefiller.tokens_computed == 3 * (sum(map(len, STEMS)) + len(STEMS) * sum(RESTS))
    assert not engine.prefiller.kept_bytes, "a stem outlives its last reader"


@pytest.mark.slow
@pytest.mark.parametrize("options", [LETTERS, MIXED])
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_options_scored_together_are_those_scored_singly(name: str, options: Any) -> None:
    subject = cases.subject(name)
    requests = [Request(prompt, act, options=options) for prompt in PROMPTS[3:7] for act in (nw.NONE, nw.KeepHeads(k=1))]
    for request, answer in zip(requests, answers(subject.engine, requests), strict=True):
        single = [subject.answer([Request(request.prompt, request.intervention, options=(option,))])[0] for option in options]
        assert answer.greedy == tuple(one.greedy[0] for one in single)
        for mine, its in zip(answer.option_logprobs, single, strict=True):
            assert mine == pytest.approx(its.option_logprobs[0], abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma"])
def test_what_stands_in_the_padding_is_seen_by_no_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = Engine(cases.subject(name).body), asked([nw.NONE, nw.KeepHeads(k=1)])
    fed, found = Fed(monkeypatch), []
    for pad in (0, 77):
        monkeypatch.setattr(prefill_module, "PAD", pad)
        found.append(answers(engine, requests))
    for a, b in zip(*found, strict=True):
        same(a, b)
    assert any(tokens not in (*RESTS, *map(len, STEMS)) or at for at, tokens in fed.rows)
    padded = sum(tokens for at, tokens in fed.rows if at > 0)
    assert padded > 2 * 2 * len(STEMS) * sum(RESTS), "no row was padded: this test shows nothing"


class _Looks(nn.Module):
    """Adds to every token something of all tokens, also of those that follow."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + x.mean(1, keepdim=True))  # type: ignore[no-any-return]


def test_a_model_that_looks_ahead_is_not_padded() -> None:
    model = build("llama")
    model.model.norm = _Looks(model.model.norm)
    subject = nw.wrap(model)
    with subject.body.session():
        assert not Padding(subject.body).proven()
        assert Padding(cases.subject("llama").body)._proven is None
    requests = [Request(tuple(cases.tokens(n, seed=n).tolist()), options=LETTERS) for n in (5, 9, 7)]
    for request, answer in zip(requests, answers(subject.engine, requests), strict=True):
        same(answer, subject.answer([request])[0])


def test_who_watches_sees_no_padding() -> None:
    subject, requests = cases.subject("jamba"), asked([nw.NONE])
    seen = []

    def see(module: nn.Module, given: Any) -> None:
        seen.append(given[0].shape[1])

    with cases.hook(subject.model.get_input_embeddings().register_forward_pre_hook, see):
        for request, answer in zip(requests, answers(Engine(subject.body), requests), strict=True):
            same(answer, subject.answer([request])[0])
    assert set(seen) <= {*RESTS, *map(len, STEMS), *map(len, PROMPTS)}


def test_room_for_stems_is_counted() -> None:
    """Where a request does not fit beside its stem, it is read whole; where stems fit, batches are smaller by what they take."""
    subject, requests = cases.subject("jamba"), asked([nw.NONE, nw.KeepHeads(k=1)])
    free = Engine(subject.body)
    expected = answers(free, requests)
    costs = free.budget.costs
    one = max(costs.batch([item]) for item in _prepared(subject, requests))
    tight = Engine(subject.body, one)
    for answer, other in zip(answers(tight, requests), expected, strict=True):
        same(answer, other)
    assert not tight.prefiller._prefixes
    assert free.prefiller._prefixes
    limit = 3 * one + costs.prompt(max(map(len, STEMS)))
    items = _prepared(subject, requests)

    def most(prefixes_of: Any) -> int:
        """What the largest batch takes, stems included, if batches are cut for these stems."""
        with subject.body.session():
            cut = Engine(subject.body, limit).budget.batches(list(enumerate(items)), 256, prefixes_of, free.padding.allowed)
            batches = [[item for _, item in batch] for batch in cut]
        assert max(map(len, batches)) > 1
        return max(map(taken, batches))

    def taken(batch: list[Any]) -> int:
        longest, stems = max(item.prefill_tokens for item in batch), [free.prefiller.prefixes_of(item) for item in batch]
        kept = {id(stem): costs.prompt(len(stem.tokens)) for chain in stems for stem in chain}
        readings = {item.group for item in batch}
        return sum(map(costs.row, batch)) + len(readings) * costs.prompt(longest) + sum(kept.values())

    assert most(free.prefiller.prefixes_of) <= limit < most(lambda item: ())


def _prepared(subject: nw.Subject, requests: list[Request]) -> list[Any]:
    from needlework.requests import prepare

    return [prepare(request, subject.anatomy) for request in requests]


def _partitions(n: int) -> Iterator[list[int]]:
    for marks in range(2 ** max(0, n - 1)):
        yield [0, *(i + 1 for i in range(n - 1) if marks >> i & 1), n]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([0.0, 3.0, 20.0]))
def test_rows_are_parted_as_costs_least(lengths: list[int], forward: float) -> None:
    """Against every way to cut the rows, in order of length, into forwards."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(prefill_module, "forward_overhead", lambda body: forward)
    try:
        padding = Padding(cases.subject("llama").body)
        pieces = padding.split(lengths)
    finally:
        monkeypatch.undo()
    assert sorted(i for piece in pieces for i in piece) == list(range(len(lengths)))
    down = sorted(lengths, reverse=True)

    def cost(parts: list[list[int]]) -> float:
        return sum(len(part) * max(part) + forward for part in parts)

    ways = [[down[a:b] for a, b in pairwise(cuts)] for cuts in _partitions(len(down))]
    fitting = [way for way in ways if all(len(part) == 1 or len(part) * part[0] <= PIECE for part in way)]
    assert cost([[lengths[i] for i in piece] for piece in pieces]) == pytest.approx(min(map(cost, fitting)))


def test_counts_of_padded_rows_are_whole() -> None:
    from needlework.receipts import Receipt

    receipt = Receipt({(0, "prefill"): {"positions": 12, "heads_zeroed": 36}})
    assert prefill_module.without_padding(receipt, 5, 12).counts == {(0, "prefill"): {"positions": 5, "heads_zeroed": 15}}
    with pytest.raises(AssertionError, match="uneven"):
        prefill_module.without_padding(Receipt({(0, "prefill"): {"keys_hidden": 7}}), 5, 12)


def test_long_padded_prompts_may_be_read_in_several_forwards() -> None:
    """The logits of each row are those after its own last token, whichever forward that is in."""
    subject = cases.subject("jamba")
    body, ids = subject.body, cases.tokens(3, 14, seed=8)
    ends = torch.tensor([3, 13, 8])
    with body.session():
        rows = body.compile([()] * 3, [0] * 3, "prefill", torch.arange(3))
        from needlework.receipts import Tally

        every = body.feed(ids, body.new_memory(3), "prefill", rows, Tally(3), keep="all")
        cleared = body.compile([()] * 3, [0] * 3, "prefill", torch.arange(3))
        cleared.clears = {6: {}, 11: {}}  # cuts the reading in three, and clears nothing
        found = body.feed(ids, body.new_memory(3), "prefill", cleared, Tally(3), keep=ends)
    assert found.shape == (3, 1, every.shape[2])
    assert torch.allclose(found[:, 0], every[torch.arange(3), ends], atol=1e-4)
