"""The engine gives the slow way's answers, whatever it shares, batches, refills or halves."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch

import cases
import needlework as nw
from needlework.engine import engine as engine_module
from needlework.errors import NeedleworkError
from needlework.requests import Answer, Request

LENGTHS = (5, 9, 9, 14, 23, 23)


def sweep(subject: nw.Subject, steps: int = 6) -> list[Request]:
    """Prompts of several lengths, some with a shared beginning, under decode and prefill interventions."""
    hay = cases.tokens(1, 40)[0].tolist()
    prompts = [tuple(hay[:n]) for n in LENGTHS[:2]] + [(*hay[: n - 3], 99, 98, 97 - n) for n in LENGTHS[2:]]
    acts: list[nw.Intervention] = [nw.NONE]
    if subject.anatomy.heads:
        acts += [nw.KeepHeads(k=1, phase="decode"), nw.KeepHeads(k=2), nw.LimitContext(tokens=3, phase="prefill")]
    if subject.anatomy.recurrent_layers:
        acts += [nw.AblateRecurrent(phase="decode"), nw.ResetState(at=3)]
    return [Request(p, a, steps + i % 3) for i, p in enumerate(prompts) for a in acts]


def alone(subject: nw.Subject, request: Request) -> Answer:
    return subject.answer([request])[0]


def assert_same(fast: Answer, slow: Answer) -> None:
    assert fast.tokens == slow.tokens
    assert fast.receipt == slow.receipt
    assert fast.error == slow.error == ""
    assert torch.allclose(torch.tensor(fast.logprobs), torch.tensor(slow.logprobs), atol=1e-4)


@pytest.mark.slow
@cases.each(("llama", "gemma3", "jamba", "recurrent_gemma", "falcon_h1", "qwen3_next", "glm5_next", "mamba", "minimax"))
def test_everything_at_once_equals_one_by_one(name: str) -> None:
    subject = cases.subject(name)
    requests = sweep(subject)
    for fast, request in zip(subject.answer(requests), requests, strict=True):
        assert_same(fast, alone(subject, request))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "recurrent_gemma", "mamba"])
def test_refilled_batches_equal_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a few rows only, rows of different lengths and ages stand side by side."""
    subject = cases.subject(name)
    requests = sweep(subject)
    wanted = [alone(subject, request) for request in requests]
    monkeypatch.setattr(engine_module, "ROWS_AT_ONCE", 5)
    joined = 0
    join = engine_module.Decoder.join

    def counted(self: Any, other: Any) -> Any:
        nonlocal joined
        joined += 1
        return join(self, other)

    monkeypatch.setattr(engine_module.Decoder, "join", counted)
    for fast, slow in zip(subject.answer(requests), wanted, strict=True):
        assert_same(fast, slow)
    assert joined >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "recurrent_gemma", "falcon_h1", "qwen3_next"])
def test_shared_stems_read_less_and_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject(name)
    requests = sweep(subject)
    wanted = [alone(subject, request) for request in requests]
    monkeypatch.setattr("needlework.engine.budget._FORWARD_FLOPS", {"cpu": 0.0})
    got = subject.answer(requests)
    reader = subject.engine.prefiller
    assert reader.tokens_computed < reader.tokens_requested
    assert not reader._kept, "stems are let go when nobody will start from them any more"
    for fast, slow in zip(got, wanted, strict=True):
        assert_same(fast, slow)


def test_one_prefill_serves_all_decode_interventions() -> None:
    subject = cases.subject("jamba")
    prompt = tuple(cases.tokens(1, 12)[0].tolist())
    subject.answer([Request(prompt, nw.KeepHeads(k=k, phase="decode"), 2) for k in range(4)])
    assert subject.engine.prefiller.prompts_read == 1
    subject.answer([Request(prompt, nw.KeepHeads(k=k), 2) for k in range(4)])
    assert subject.engine.prefiller.prompts_read == 4  # k = 4 would be the identity and share with none


def test_rows_stop_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("recurrent_gemma")
    prompt = tuple(cases.tokens(1, 12)[0].tolist())
    free = alone(subject, Request(prompt, max_new_tokens=8))
    stop = free.tokens[2]
    first = free.tokens.index(stop)
    stopped = alone(subject, Request(prompt, max_new_tokens=8, stop=frozenset({stop})))
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.finish == "stop"
    assert free.finish == "length"


def test_out_of_memory_halves_and_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    subject = cases.subject("llama")
    requests = sweep(subject)
    wanted = subject.answer(requests)
    feed = subject.body.feed

    def small(ids: Any, *args: Any, **kwargs: Any) -> Any:
        if ids.shape[0] > 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return feed(ids, *args, **kwargs)

    monkeypatch.setattr(subject.body, "feed", small)
    with caplog.at_level(logging.WARNING, "needlework"):
        got = subject.answer(requests)
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
    assert "out of memory" in caplog.text


def test_a_join_that_runs_out_of_memory_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is left of the first batch when the second one is to join it."""
    subject, act = cases.subject("llama"), nw.KeepHeads(k=1, phase="decode")
    prompts = [(cases.PROMPT, 3), (cases.TWIN, 8), (cases.PROMPT[:7], 4), (cases.TWIN[:7], 4)]
    requests = [Request(prompt, act, steps) for prompt, steps in prompts]
    wanted = [alone(subject, request) for request in requests]
    monkeypatch.setattr(engine_module, "ROWS_AT_ONCE", 2)
    failed = cases.fail_first_join(monkeypatch)
    for fast, slow in zip(subject.answer(requests), wanted, strict=True):
        assert_same(fast, slow)
    assert failed


@pytest.mark.parametrize("rows", [1, 3])
def test_a_single_request_that_does_not_fit_beside_others_waits_for_them(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("llama")
    acts = [nw.KeepHeads(k=1 + k, phase="decode") for k in range(rows)]
    requests = [Request(cases.PROMPT, max_new_tokens=3), *(Request(cases.TWIN, act, 8) for act in acts)]
    requests += [Request(cases.PROMPT[:7], max_new_tokens=4)]
    wanted = [alone(subject, request) for request in requests]
    monkeypatch.setattr(engine_module, "ROWS_AT_ONCE", 2 * rows)
    failed = cases.fail_first_join(monkeypatch)
    got = dict(subject.engine.run(requests))
    assert failed
    assert sorted(got) == list(range(len(requests)))
    for i, slow in enumerate(wanted):
        assert_same(got[i], slow)


def test_one_trial_too_large_is_an_error_not_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("llama")

    def never(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(subject.body, "feed", never)
    with pytest.raises(MemoryError, match="does not fit"):
        subject.answer([Request((5, 6, 7), max_new_tokens=2)])


def test_other_errors_are_not_taken_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("llama")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(subject.body, "feed", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        subject.answer([Request((5, 6, 7), max_new_tokens=2)])


@pytest.mark.slow
def test_a_budget_splits_batches_and_changes_nothing() -> None:
    model = cases.subject("jamba").model
    small, large = nw.Subject(nw.wrap(model).body, memory_bytes=200_000), nw.wrap(model)
    requests = sweep(large)
    pieces = list(small.engine.budget.batches([(i, p) for i, p in enumerate(_prepared(small, requests))], 256))
    assert len(pieces) > len(set(LENGTHS))
    assert [a.tokens for a in small.answer(requests)] == [a.tokens for a in large.answer(requests)]


def _prepared(subject: nw.Subject, requests: list[Request]) -> list[Any]:
    from needlework.requests import prepare

    return [prepare(request, subject.anatomy) for request in requests]


def test_a_stop_in_the_middle_keeps_what_was_yielded_and_leaves_the_model_as_it_was() -> None:
    subject = cases.subject("recurrent_gemma")
    before = subject.model.config._attn_implementation
    requests = [Request(tuple(range(3, 3 + n)), max_new_tokens=n) for n in (2, 5, 9)]
    running = subject.engine.run(requests)
    index, answer = next(running)
    running.close()  # what Ctrl-C does to a generator
    assert_same(answer, alone(subject, requests[index]))
    assert subject.model.config._attn_implementation == before
    assert all(not module._forward_hooks for module in subject.model.modules())


def test_nan_fails_its_trial_names_the_layer_and_spares_the_others() -> None:
    model = cases.subject("llama").model
    subject = nw.wrap(model)
    weight = subject.model.model.embed_tokens.weight
    kept = weight[77].clone()
    with torch.no_grad():
        weight[77] = float("nan")
    try:
        bad, good = subject.answer([Request((5, 77, 6), max_new_tokens=3), Request((5, 8, 6), max_new_tokens=3)])
    finally:
        with torch.no_grad():
            weight[77] = kept
    assert bad.finish == "failed"
    assert "model.embed_tokens" in bad.error
    assert good.finish == "length"
    assert good.error == ""


def test_a_prompt_longer_than_the_model_allows_is_refused_before_compute() -> None:
    subject = cases.subject("llama")
    most = subject.anatomy.max_tokens
    assert most is not None
    with pytest.raises(NeedleworkError, match=str(most)):
        subject.answer([Request((5,) * most, max_new_tokens=2)])


def test_receipts_stay_with_their_prompts_when_these_start_from_different_stems(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch, three readings: two continue a shared stem under one act, one starts from nothing under another."""
    monkeypatch.setattr("needlework.engine.budget._FORWARD_FLOPS", {"cpu": 0.0})
    subject = cases.subject("llama")
    start, end = tuple(range(5, 13)), (20, 21, 22)
    prompts = [(*start, 30, *end), (*range(40, 49), *end), (*start, 31, *end)]
    acts = [nw.KeepHeads(k=1), nw.KeepHeads(k=3), nw.KeepHeads(k=1)]
    requests = [Request(prompt, act, 2) for prompt, act in zip(prompts, acts, strict=True)]
    together = subject.answer(requests)
    assert subject.engine.prefiller.tokens_computed < sum(len(prompt) - 1 for prompt in prompts)  # the stem was shared
    assert [answer.receipt for answer in together] == [subject.answer([request])[0].receipt for request in requests]


def test_the_share_of_the_work_grows_between_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a batch may end together: how far it is must be seen before."""
    from needlework.engine.engine import Decoder

    subject = cases.subject("recurrent_gemma")
    shares: list[float] = []
    step = Decoder.step

    def looked_at(self: Decoder) -> Any:
        shares.append(subject.engine.share)
        return step(self)

    monkeypatch.setattr(Decoder, "step", looked_at)
    requests = [Request(tuple(range(3, 3 + n)), text, max_new_tokens=6) for n in (9, 9, 12) for text in ("none", "keep_heads(1)")]
    running = subject.engine.run(requests)
    next(running)
    assert len(shares) == 6, "no answer came before the last step"
    assert all(0 < a < b < 1 for a, b in pairwise(shares))
    assert subject.engine.share == pytest.approx(1)
    running.close()
    assert subject.engine.share == 0
    scored = [Request((3, 4, 5), options=((6, 7), (8,))), Request((3, 4, 5, 6), options=((6, 7), (8,)))]
    monkeypatch.setattr("needlework.engine.engine.ROWS_AT_ONCE", 1)
    running = subject.engine.run(scored)
    assert [round(subject.engine.share, 2) for _ in running] == [0.52, 1.0]  # longest first: (4 + 3 x 2.5) of 22
    assert subject.engine.share == 0
