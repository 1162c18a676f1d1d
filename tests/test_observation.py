"""What observers are shown is what stock eager attention computes, whatever is shared, forked or read in blocks."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
import needlework as nw
from needlework.observation import PatternBlock
from needlework.requests import Request, prepare


@functools.cache
def _attentions(name: str, tokens: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Stock weights of every layer, [heads, queries, keys]."""
    with torch.no_grad():
        seen = cases.build(name, "eager")(torch.tensor([tokens]), output_attentions=True).attentions
    return tuple(layer[0] for layer in seen)


def _assert_stock(name: str, patterns: list[Any], tokens: dict[int, tuple[int, ...]]) -> None:
    for x in patterns:
        expected = _attentions(name, tokens[x.sample])[x.layer][x.head, x.position]
        assert float(x.weights.sum()) == pytest.approx(1, abs=1e-5)
        assert cases.apart(x.weights, expected[x.keys]) < 1e-5
        assert float(expected.sum() - expected[x.keys].sum()) == pytest.approx(0, abs=1e-6), "no key is missing"


def _places(patterns: list[Any]) -> list[tuple[Any, ...]]:
    return sorted((x.sample, x.layer, x.head, x.phase, x.position) for x in patterns)


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # gemma3: a window of 8 in every other layer
@pytest.mark.parametrize("blocks", ["one", "many"])
def test_patterns_are_the_weights_of_stock_attention(name: str, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks == "many":
        monkeypatch.setattr("needlework.model.attention.CPU_BLOCK_BYTES", 600)
        monkeypatch.setattr("needlework.model.attention.FEWEST_QUERIES", 1)
    subject, tokens = cases.subject(name), cases.PROMPT + cases.MORE
    split = len(cases.PROMPT)
    with nw.observe(subject, patterns=True) as seen:
        subject.logits([tokens], prompt_tokens=split)
    key = nw.sample_key(cases.PROMPT)
    phases = {p: "decode" if p >= split - 1 else "prefill" for p in range(len(tokens))}
    assert _places(seen.patterns) == sorted((key, *head, phases[p], p) for head in subject.anatomy.heads for p in phases)
    _assert_stock(name, seen.patterns, {key: tokens})
    for x in seen.patterns:
        window = 8 if name == "gemma3" and x.layer % 2 == 0 else 100
        assert x.keys.tolist() == list(range(max(0, x.position + 1 - window), x.position + 1))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chosen_heads_and_positions_of_many_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with a common beginning and of different lengths, forked rows with shared keys: each sample has its own."""
    monkeypatch.setattr("needlework.engine.budget._FORWARD_FLOPS", {"cpu": 0.0})  # beginnings would be shared
    subject, heads, positions = cases.subject(name), [(0, 1), (3, 2)], [2, 9, 13]
    prompts = [cases.PROMPT, (*cases.PROMPT[:-1], 99), cases.PROMPT[:7], cases.PROMPT + cases.MORE]
    with nw.observe(subject, patterns=True, heads=heads, positions=positions) as seen:
        answers = subject.generate(prompts, max_new_tokens=6)
    tokens = {nw.sample_key(p): (*p, *a.tokens[:-1]) for p, a in zip(prompts, answers, strict=True)}
    expected = [
        (nw.sample_key(p), *head, "decode" if at >= len(p) - 1 else "prefill", at)
        for p in prompts
        for head in heads
        for at in positions
        if at < len(p) + 5
    ]
    assert _places(seen.patterns) == sorted(expected)
    _assert_stock(name, seen.patterns, tokens)


@pytest.mark.parametrize("ends", ["at the first token", "out of memory"])
def test_a_batch_that_does_not_join_leaves_the_other_rows_observed(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch is prefilled while one row of the first decodes, and that row goes on alone."""
    subject, boundary = cases.subject("llama"), "prefill" if ends == "at the first token" else "decode"
    first = [Request(cases.PROMPT, max_new_tokens=3, spans=cases.SPANS)]
    first += [Request(cases.TWIN, max_new_tokens=8, spans={"needle": ((0, 2),)})]
    second = [Request(prompt[:7], max_new_tokens=1, boundary=boundary) for prompt in (cases.PROMPT, cases.TWIN)]
    with nw.observe(subject, patterns=True) as alone:
        for request in (*first, *second):
            subject.answer([request])
    monkeypatch.setattr("needlework.engine.engine.ROWS_AT_ONCE", 2)
    failed = cases.fail_first_join(monkeypatch)
    with nw.observe(subject, patterns=True) as seen:
        subject.answer([*first, *second])
    assert bool(failed) == (ends == "out of memory")
    got, expected = ([x for x in observer.patterns if x.phase == "decode"] for observer in (seen, alone))
    assert _places(got) == _places(expected)
    for row, other in zip(seen.table(), alone.table(), strict=True):
        assert (row.queries, row.copied) == (other.queries, other.copied)
        assert (row.needle_mass, row.copy_score) == pytest.approx((other.needle_mass, other.copy_score), abs=1e-5)


def test_prepared_requests_are_observed_sample_by_sample() -> None:
    """Requests that were prepared before an observer came: equal prompts of two samples are still read apart."""
    subject = cases.subject("llama")
    prepared = [prepare(Request(cases.PROMPT, max_new_tokens=2, sample=key), subject.anatomy) for key in (1, 2)]
    with nw.observe(subject, patterns=True) as seen:
        list(subject.engine.run(prepared))
    assert {pattern.sample for pattern in seen.patterns if pattern.phase == "prefill"} == {1, 2}


def test_a_function_gets_every_block_and_nothing_is_kept() -> None:
    subject, blocks = cases.subject("llama"), list[PatternBlock]()
    with nw.observe(subject, patterns=blocks.append) as seen:
        subject.generate([cases.PROMPT, cases.TWIN[:9]], max_new_tokens=3)
    assert seen.patterns == []
    keys = {nw.sample_key(cases.PROMPT), nw.sample_key(cases.TWIN[:9])}
    assert {sample for block in blocks for sample in block.samples} == keys
    assert {block.layer for block in blocks} == {0, 1, 2, 3}
    for block in blocks:
        rows, heads, queries, width = block.weights.shape
        assert (rows, heads) == (len(block.samples), 4)
        assert block.q_positions.shape == (rows, queries)
        assert block.k_positions.shape == (rows, width)
        assert cases.apart(block.weights.sum(-1), torch.ones(rows, heads, queries)) < 1e-5
        hidden = (block.k_positions[:, None] < 0) | (block.k_positions[:, None] > block.q_positions[:, :, None])
        assert not bool(block.weights.masked_select(hidden[:, None]).any())
    read = sum(block.q_positions.numel() for block in blocks if block.layer == 0)
    assert read == 12 + 2 + 9 + 2  # the last token of an answer is never fed


def _sinks_of_best(patterns: list[Any], layer: int, phase: str, kept: int) -> float:
    """Attention on the first token of the `kept` heads of least entropy, query by query."""
    queries: dict[Any, list[tuple[float, float]]] = {}
    seen: dict[Any, int] = {}
    for x in patterns:
        if (x.layer, x.phase) == (layer, phase):
            turn = seen[x.sample, x.position, x.head] = seen.get((x.sample, x.position, x.head), -1) + 1
            entropy = float(-torch.special.xlogy(x.weights, x.weights).sum())
            queries.setdefault((x.sample, x.position, turn), []).append((entropy, float(x.weights[x.keys == 0].sum())))
    means = [sum(sink for _, sink in sorted(heads, key=lambda pair: pair[0])[:kept]) / kept for heads in queries.values()]
    return sum(means) / len(means)


def test_figures_of_heads_are_those_of_their_patterns() -> None:
    subject = cases.subject("llama")
    with nw.observe(subject, patterns=True) as seen:
        subject.generate([cases.PROMPT, cases.TWIN], max_new_tokens=4, spans=[cases.SPANS] * 2)
        subject.choices([cases.PROMPT], [[(5, 6, 7), (8,), (9, 10)]], spans=[cases.SPANS])
        subject.logits([cases.TWIN], prompt_tokens=9, spans=cases.SPANS)
    for phase in ("prefill", "decode"):
        for row in seen.table(phase):
            own = [x for x in seen.patterns if (x.layer, x.head, x.phase) == (row.layer, row.head, phase)]
            mass = sum(float(x.weights[(x.keys >= 3) & (x.keys < 6)].sum()) for x in own) / len(own)
            entropy = sum(float(-torch.special.xlogy(x.weights, x.weights).sum()) for x in own) / len(own)
            assert row.queries == len(own)
            assert (row.needle_mass, row.entropy) == pytest.approx((mass, entropy), abs=1e-5)
            sink = sum(float(x.weights[x.keys == 0].sum()) for x in own) / len(own)
            assert row.sink_mass == pytest.approx(sink, abs=1e-5)
            assert row.sink_mass_of_best == pytest.approx(_sinks_of_best(seen.patterns, row.layer, phase, row.head + 1), abs=1e-5)
    assert len(seen.table("prefill")) == len(seen.table()) == 16


def test_watching_changes_no_answer() -> None:
    subject, acts = cases.subject("llama"), ["none", "keep_heads(1)", "expose_tokens('omit')"]
    plain = subject.generate([cases.PROMPT] * 3, interventions=acts, max_new_tokens=4, spans=[cases.SPANS] * 3)
    with nw.observe(subject, patterns=True) as seen:
        watched = subject.generate([cases.PROMPT] * 3, interventions=acts, max_new_tokens=4, spans=[cases.SPANS] * 3)
    assert [a.tokens for a in plain] == [a.tokens for a in watched]
    assert subject.body.observer is None
    assert all(float(x.weights.sum()) == pytest.approx(1, abs=1e-5) for x in seen.patterns), "seen before columns are rewritten"


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"heads": [(0, 4)], "patterns": True},
            r"LlamaForCausalLM has no heads \[\(0, 4\)\]; attention layers are \[0, 1, 2, 3\]",
        ),
        ({"heads": [(9, 0)], "patterns": True}, "has no heads"),
        ({"positions": [-1], "patterns": True}, "must count from 0"),
        ({"heads": [(0, 0)]}, "they go with patterns=True"),
        ({"positions": [3], "patterns": print}, "they go with patterns=True"),
    ],
)
def test_what_cannot_be_watched_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(nw.NeedleworkError, match=says), nw.observe(cases.subject("llama"), **options):
        pass


def test_an_unknown_span_is_an_error_with_the_nearest_name() -> None:
    subject = cases.subject("llama")
    with nw.observe(subject, span="nedle"), pytest.raises(nw.NeedleworkError, match=r"no span 'nedle'.*did you mean 'needle'"):
        subject.generate([cases.PROMPT], max_new_tokens=2, spans=[cases.SPANS])
    with nw.observe(subject, span="needle"), pytest.raises(nw.NeedleworkError, match="it has no spans"):
        subject.generate([cases.PROMPT], max_new_tokens=2)
    with nw.observe(subject), pytest.raises(nw.NeedleworkError, match="no span 'needle'"):
        subject.generate([cases.PROMPT], max_new_tokens=2, spans=[{"other": ((1, 3),)}])
    with nw.observe(subject) as seen:
        subject.generate([cases.PROMPT], max_new_tokens=2)
    assert all(row.entropy > 0 for row in seen.table()), "a request without spans is observed all the same"


def test_each_thread_observes_what_it_asks_and_nothing_else() -> None:
    """More threads than cores, all at once on one subject, beside threads that ask without observing."""
    subject = cases.subject("llama")
    prompts = [cases.PROMPT[i:] + cases.PROMPT[:i] for i in range(8)]

    def observed(prompt: tuple[int, ...]) -> list[Any]:
        with nw.observe(subject) as seen:
            for _ in range(2):
                subject.generate([prompt], max_new_tokens=3, spans=[cases.SPANS])
        return seen.table()

    alone = [observed(prompt) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(subject.generate, [prompt], max_new_tokens=3) for prompt in prompts[:4]]
        together = [pool.submit(observed, prompt) for prompt in prompts]
        assert [table.result() for table in together] == alone
        assert all(len(other.result()) == 1 for other in others)
    assert subject.body.observer is None
