"""Attention knockout is an additive mask of the stock model; what blocks nothing says so; what cannot be meant is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cases
import needlework as nw
from needlework.receipts import nothing_to_hide

IDS = torch.tensor([cases.PROMPT + cases.MORE])
TOKENS = IDS.shape[1]
QUESTION, NEEDLE = range(7, 10), range(3, 6)
SPANS = {"needle": ((3, 6),), "question": ((7, 10),)}


def stock_logits(name: str, edges: list[tuple[int, int]], heads: tuple[int, ...]) -> Tensor:
    """One forward of the stock model whose causal mask has these (query, key) pairs masked for some heads."""
    model = cases.build(name, "sdpa")
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1).repeat(1, 4, 1, 1)
    for query, key in edges:
        mask[:, list(heads), query, key] = torch.finfo(torch.float32).min
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=mask, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "granitemoehybrid"])
def test_stock_transformers_with_a_mask_of_its_own(name: str) -> None:
    subject, every = cases.subject(name), (0, 1, 2, 3)
    layers = [layer.index for layer in subject.anatomy.attention_layers]
    asked = [(q, k) for q in QUESTION for k in NEEDLE]
    answered = [(q, k) for q in range(len(cases.PROMPT) - 1, TOKENS) for k in NEEDLE]
    whole = [(q, k) for k in NEEDLE for q in range(k + 1, TOKENS)]
    for text, edges, heads in (
        ("block_attention(from='question', to='needle')", asked, every),
        ("block_attention(from='answer')", answered, every),
        ("block_attention('question') + block_attention('answer')", asked + answered, every),
        ("block_attention()", whole, every),
        (f"block_attention(heads={[[layer, head] for layer in layers for head in (1, 2)]})", whole, (1, 2)),
    ):
        found = subject.logits(IDS, text, prompt_tokens=len(cases.PROMPT), spans=SPANS)
        expected = stock_logits(name, edges, heads)
        assert cases.apart(found, expected) < 1e-4, text
        assert cases.apart(expected, stock_logits(name, [], every)) > 0.1


def test_options_are_predicted_from_answer_tokens() -> None:
    """Scoring has no decode phase: from='answer' is the last token of the prompt and the option's tokens."""
    subject = cases.subject("llama")
    blocked = subject.choices([cases.PROMPT], [[cases.MORE]], "block_attention('answer')", spans=[SPANS])[0]
    logits = stock_logits("llama", [(q, k) for q in range(len(cases.PROMPT) - 1, TOKENS) for k in NEEDLE], (0, 1, 2, 3))
    expected = logits[0, len(cases.PROMPT) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(cases.MORE)[:, None])[:, 0]
    assert blocked.option_logprobs[0] == pytest.approx(expected.tolist(), abs=1e-4)
    assert blocked.receipt.total("edges_blocked") == len(cases.MORE) * len(NEEDLE) * len(subject.anatomy.attention_layers)


def test_a_span_named_answer_is_that_span() -> None:
    named = {**SPANS, "answer": ((8, 10),)}
    text = cases.subject("llama").logits(IDS, "block_attention('answer')", spans=named)
    assert torch.equal(text, cases.subject("llama").logits(IDS, "block_attention([8, 9])", spans=SPANS))


def test_a_query_sees_its_own_key() -> None:
    """Without a key before it, a token of the span itself is left as alone as the prompt's first token is."""
    subject = cases.subject("llama")
    answer = subject.generate([cases.PROMPT], nw.BlockAttention(to=tuple(range(12))), max_new_tokens=1)[0]
    assert answer.receipt.total("edges_blocked", layer=0) == 12 * 11 // 2
    alone = subject.logits(IDS[:, :4], nw.BlockAttention(to=tuple(range(4))))
    assert cases.apart(alone, subject.logits(IDS[:, :4], nw.LimitContext(tokens=1))) < 1e-5


@pytest.mark.parametrize(
    ("name", "text", "silent"),
    [
        ("llama", "block_attention(from='needle', to='question')", True),  # the needle is read before the question
        ("llama", "block_attention(from='question', phase='decode')", True),
        ("llama", "block_attention(from='answer', phase='decode')", False),
        ("llama", "block_attention(from='answer', phase='prefill')", True),
        ("llama", "block_attention(from='question') + block_attention(from='needle', to='question')", False),
        ("recurrent_gemma", "block_attention(from='answer')", True),  # the needle lies outside its window of 8
        ("recurrent_gemma", "block_attention()", False),
    ],
)
def test_what_blocks_nothing_is_noted_and_no_failure(name: str, text: str, silent: bool) -> None:
    prompt = (*cases.PROMPT, *cases.tokens(8).tolist())
    (answer,) = cases.subject(name).generate([prompt], text, max_new_tokens=2, spans=[SPANS])
    assert answer.error == ""
    assert nothing_to_hide(answer.receipt.to_dict()) == silent
    assert bool(answer.receipt.total("edges_blocked")) != silent


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("block_attention(from='quest')", "no span 'quest' .it has: needle, question.; pass spans"),
        ("block_attention(to='answer')", "no span 'answer'"),
        ("block_attention(to=[3, 40])", "outside the prompt of 12 tokens"),
        ("block_attention(to=[])", "covers positions nothing"),
        ("block_attention(heads=[[0, 9]])", "no such heads"),
        ("block_attention(heads=[[0, 1]], layers=[2])", "which `layers` leaves out"),
        ("block_attention(layers=[77])", "are no attention layers"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(nw.NeedleworkError, match=says):
        cases.subject("llama").generate([cases.PROMPT], text, max_new_tokens=2, spans=[SPANS])
