"""A row of a batch is the run by itself: mixed prompts, lengths, interventions; left padding; no padding at all."""

from __future__ import annotations

import pytest
import torch

import cases
import needlework as nw
from needlework.requests import Answer, Request

PROMPTS = [cases.PROMPT, cases.TWIN, cases.PROMPT[:7], cases.PROMPT + cases.MORE]


def _some(name: str) -> list[nw.Intervention]:
    heads = [nw.KeepHeads(k=1), nw.LimitContext(tokens=3), nw.AblateAttention(phase="decode"), nw.BlockAttention(to=(1, 3))]
    mixers = [nw.AblateRecurrent(), nw.ResetState(at=4)]
    some: list[nw.Intervention] = [nw.NONE]
    return some + (heads if name not in cases.NO_HEADS else []) + (mixers if name not in cases.NO_MIXER else [])


def _same(a: Answer, b: Answer, tolerance: float = 1e-4) -> None:
    assert (a.tokens, a.finish, a.error, a.receipt) == (b.tokens, b.finish, b.error, b.receipt)
    assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)
    assert a.margins == pytest.approx(b.margins, abs=10 * tolerance)


@pytest.mark.slow
@cases.each(cases.ALL)
def test_mixed_rows_equal_single_runs(name: str) -> None:
    """Four prompts of three lengths, each under every intervention, in one call; every third of them by itself."""
    subject = cases.subject(name)
    rows = [(prompt, act) for prompt in PROMPTS for act in _some(name)]
    together = subject.generate([p for p, _ in rows], interventions=[a for _, a in rows], max_new_tokens=4)
    for (prompt, act), answer in list(zip(rows, together, strict=True))[::3]:
        _same(answer, subject.generate([prompt], act, max_new_tokens=4)[0])


@cases.each(cases.WITH_HEADS)
def test_shared_keys_equal_copied_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked rows that read the prompt's keys in place answer as rows that own a copy."""
    subject = cases.subject(name)
    if not subject.body.shareable:
        pytest.skip("its keys are changed after the cache returns them: rows always own a copy")
    acts = [nw.NONE, nw.KeepHeads(k=1, phase="decode"), nw.LimitContext(tokens=4, sinks=1, phase="decode")]
    shared = subject.generate([cases.PROMPT] * 3, interventions=acts, max_new_tokens=5)
    monkeypatch.setattr(subject.body, "shareable", False)
    for a, b in zip(shared, subject.generate([cases.PROMPT] * 3, interventions=acts, max_new_tokens=5), strict=True):
        _same(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma"])
def test_rows_that_finish_early_leave_the_others_alone(name: str) -> None:
    """Rows of one batch end at different steps, each under something else: those that stay keep their own."""
    subject = cases.subject(name)
    layer = subject.anatomy.attention_layers[0].index
    some: list[nw.Intervention] = [nw.AblateHeads(heads=[(layer, i)]) for i in range(3)]
    some += [nw.KeepHeads(k=k, by=by) for k, by in ((1, "entropy"), (2, "l2"), (3, "norm"), (2, "random"))]  # type: ignore[arg-type]
    some += [nw.LimitContext(tokens=n, sinks=n % 2) for n in (2, 3, 5)]
    some += [nw.ExposeTokens(mode=x, span=(3, 4)) for x in ("omit", "only", "balanced")]  # type: ignore[arg-type]
    some += [nw.AblateAttention(site="block"), nw.NONE]
    if name != "llama":
        some += [nw.AblateRecurrent(), nw.AblateRecurrent(site="block"), nw.ResetState(at=13), nw.ResetState(at=14)]
    steps = [5 if isinstance(act, nw.ResetState) else 1 + i % 4 for i, act in enumerate(some)]
    requests = [Request(cases.PROMPT, act, forced=(*cases.MORE, 3)[:n]) for act, n in zip(some, steps, strict=True)]
    for request, answer in zip(requests, subject.answer(requests), strict=True):
        _same(answer, subject.answer([request])[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma", "zamba2"])
def test_a_small_budget_changes_nothing(name: str) -> None:
    """Whatever fits at once, and in whatever order rows come: the answers are the same."""
    subject = cases.subject(name)
    rows = [(prompt, act) for prompt in PROMPTS for act in _some(name)]

    def ask(subject: nw.Subject, rows: list[tuple[tuple[int, ...], nw.Intervention]]) -> list[Answer]:
        return subject.generate([p for p, _ in rows], interventions=[a for _, a in rows], max_new_tokens=3)

    whole = ask(subject, rows)
    small = nw.Subject(subject.body)
    small.engine.budget.limit = 1  # one request at a time
    for a, b in zip(whole, ask(small, rows), strict=True):
        _same(a, b)
    for a, b in zip(whole[::-1], ask(subject, rows[::-1]), strict=True):
        _same(a, b)


@pytest.mark.slow
@cases.each(cases.ALL)
def test_left_padding_changes_no_answer(name: str) -> None:
    subject = cases.subject(name)
    ids = torch.zeros(2, 12, dtype=torch.long)
    ids[0], ids[1, 4:] = torch.tensor(cases.PROMPT), torch.tensor(cases.PROMPT[:8])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    act = _some(name)[1]
    for prompt_tokens in (None, 5):
        padded = subject.logits(ids, act, attention_mask=mask, prompt_tokens=prompt_tokens)
        alone = subject.logits([cases.PROMPT[:8]], act, prompt_tokens=prompt_tokens)
        assert cases.apart(padded[1:, 4:], alone) < 1e-4
        assert cases.apart(padded[:1], subject.logits([cases.PROMPT], act, prompt_tokens=prompt_tokens)) < 1e-4
        assert bool((padded[1, :4] == 0).all())


def test_padding_counts_neither_for_the_prompt_nor_for_spans() -> None:
    """Rows of unequal padding, one number of prompt tokens, one span: both mean a row's own tokens."""
    subject, prompts = cases.subject("llama"), (cases.PROMPT, cases.PROMPT[:10], cases.PROMPT[:7])
    ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 12 - len(prompt) :], mask[row, 12 - len(prompt) :] = torch.tensor(prompt), 1
    act = nw.ExposeTokens(mode="omit", phase="decode")
    padded = subject.logits(ids, act, attention_mask=mask, prompt_tokens=6, spans=cases.SPANS)
    for row, prompt in enumerate(prompts):
        alone = subject.logits([prompt], act, prompt_tokens=6, spans=cases.SPANS)
        assert cases.apart(padded[row : row + 1, 12 - len(prompt) :], alone) < 1e-4
    with pytest.raises(nw.NeedleworkError, match="counts without padding, the shortest row has 7 tokens"):
        subject.logits(ids, act, attention_mask=mask, prompt_tokens=8, spans=cases.SPANS)


@pytest.mark.parametrize("mask", [[[1, 1, 0]], [[0, 1, 0]], [[1, 0, 1]], [[1, 1]], [[0, 0, 0]]])
def test_any_other_mask_is_refused(mask: list[list[int]]) -> None:
    with pytest.raises(nw.NeedleworkError, match="left padding only"):
        cases.subject("llama").logits([[5, 6, 7]], attention_mask=torch.tensor(mask))


@cases.each(cases.ALL)
def test_choices_are_plain_forwards(name: str) -> None:
    """Options of different lengths, scored after one reading of the prompt: full forwards give the same."""
    subject = cases.subject(name)
    options = [(5,), (9, 33, 7), (64, 8), (70, 71, 72, 73)]
    found = subject.choices([cases.PROMPT, cases.PROMPT[:6]], [options, options[:2]])
    for prompt, some, scores in ((cases.PROMPT, options, found[0]), (cases.PROMPT[:6], options[:2], found[1])):
        for option, logprobs in zip(some, scores.option_logprobs, strict=True):
            logits = subject.logits([prompt + option])[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logits.gather(1, torch.tensor(option)[:, None])[:, 0].tolist()
            assert logprobs == pytest.approx(expected, abs=cases.between_routes(name))
        assert scores.totals == pytest.approx([sum(x) for x in scores.option_logprobs])
        assert scores.best == max(range(len(some)), key=lambda i: scores.totals[i])


@pytest.mark.parametrize("name", ["llama", "recurrent_gemma"])
def test_choices_under_an_intervention_are_forwards_under_it(name: str) -> None:
    subject, options = cases.subject(name), [(9, 33, 7), (64,)]
    acts = [nw.KeepHeads(k=2), nw.LimitContext(tokens=3), nw.NONE]
    for act, scores in zip(acts, subject.choices([cases.PROMPT] * 3, [options] * 3, interventions=acts), strict=True):
        for option, logprobs in zip(options, scores.option_logprobs, strict=True):
            logits = subject.logits([cases.PROMPT + option], act)[0, len(cases.PROMPT) - 1 : -1].log_softmax(-1)
            expected = logits.gather(1, torch.tensor(option)[:, None])[:, 0].tolist()
            assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "recurrent_gemma"])
def test_receipts_of_choices_count_the_options_and_nothing_else(name: str) -> None:
    """The last token of an option is never read; a shorter option has no more tokens than its own."""
    subject, options = cases.subject(name), [(9, 33, 7), (64,), (5, 6)]
    receipt = subject.choices([cases.PROMPT], [options], nw.KeepHeads(k=1))[0].receipt
    tokens = len(cases.PROMPT) + sum(len(option) - 1 for option in options)
    for layer in subject.anatomy.attention_layers:
        assert receipt.total("positions", layer=layer.index) == tokens
        assert receipt.total("heads_zeroed", layer=layer.index) == tokens * (len(layer.heads) - 1)
