"""Who owns which token: phases are stated, never guessed, and a trial that was not acted on as asked fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cases
import needlework as nw
import needlework.model.attention
from needlework.requests import Request

DECODE, PREFILL = nw.AblateAttention(phase="decode"), nw.AblateAttention(phase="prefill")
IDS = torch.tensor([cases.PROMPT + cases.MORE])
N = len(cases.PROMPT)
SOME = ["llama", "jamba", "recurrent_gemma", "falcon_h1"]


@pytest.mark.parametrize("name", SOME)
def test_boundary_decode_owns_the_last_prompt_token(name: str) -> None:
    subject = cases.subject(name)
    plain = subject.logits(IDS, prompt_tokens=N)
    acted = subject.logits(IDS, DECODE, prompt_tokens=N)
    assert cases.apart(acted[:, : N - 1], plain[:, : N - 1]) < 1e-5
    assert cases.apart(acted[:, N - 1], plain[:, N - 1]) > 1e-2
    receipt = subject.generate([cases.PROMPT], DECODE, max_new_tokens=1)[0].receipt
    assert receipt.total("heads_zeroed", "decode") == len(subject.anatomy.heads)
    assert receipt.total("heads_zeroed", "prefill") == 0


@pytest.mark.parametrize("name", SOME)
def test_boundary_prefill_leaves_the_first_answer_token_alone(name: str) -> None:
    """As in `generate` of transformers: the first token comes out of prefill, so what acts in decode comes too late."""
    subject = cases.subject(name)
    plain = subject.logits(IDS, prompt_tokens=N, boundary="prefill")
    acted = subject.logits(IDS, DECODE, prompt_tokens=N, boundary="prefill")
    assert cases.apart(acted[:, :N], plain[:, :N]) < 1e-5
    assert cases.apart(acted[:, N], plain[:, N]) > 1e-2
    answers = [subject.generate([cases.PROMPT], x, max_new_tokens=3, boundary="prefill")[0] for x in (nw.NONE, DECODE)]
    assert answers[0].tokens[0] == answers[1].tokens[0]
    assert answers[0].logprobs[0] == pytest.approx(answers[1].logprobs[0], abs=1e-5)
    assert answers[0].logprobs[1:] != pytest.approx(answers[1].logprobs[1:], abs=1e-3)
    after = len(answers[1].tokens) - 1
    assert answers[1].receipt.total("heads_zeroed", "decode") == after * len(subject.anatomy.heads)


@pytest.mark.parametrize("boundary", ["prefill", "decode"])
@pytest.mark.parametrize("name", SOME)
def test_phases_add_up(name: str, boundary: Any) -> None:
    """What acts in prefill and what acts in decode, together, is what acts in both; and each acts in its own."""
    subject = cases.subject(name)
    both = subject.logits(IDS, nw.AblateAttention(), prompt_tokens=N, boundary=boundary)
    added = subject.logits(IDS, PREFILL + DECODE, prompt_tokens=N, boundary=boundary)
    assert torch.equal(both, added)
    for act in (PREFILL, DECODE):
        assert cases.apart(subject.logits(IDS, act, prompt_tokens=N, boundary=boundary), both) > 1e-2


@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma"])
def test_both_boundaries_give_one_answer_without_intervention(name: str) -> None:
    subject = cases.subject(name)
    decode, prefill = (subject.generate([cases.PROMPT], max_new_tokens=4, boundary=x)[0] for x in ("decode", "prefill"))
    assert decode.tokens == prefill.tokens
    assert decode.logprobs == pytest.approx(prefill.logprobs, abs=1e-4)


def test_phases_that_read_nothing_are_refused() -> None:
    subject = cases.subject("llama")
    with pytest.raises(nw.NeedleworkError, match="scoring has no decode phase"):
        subject.logits(IDS, DECODE)
    with pytest.raises(nw.NeedleworkError, match="scoring has no decode phase"):
        subject.choices([cases.PROMPT], [[(5,), (6,)]], DECODE)
    with pytest.raises(nw.NeedleworkError, match="one new token nothing is decoded"):
        subject.generate([cases.PROMPT], DECODE, max_new_tokens=1, boundary="prefill")
    with pytest.raises(nw.NeedleworkError, match="no prefill token"):
        subject.generate([(5,)], PREFILL)


def test_a_prompt_of_one_token() -> None:
    """With boundary="decode" nothing is prefilled, in all families, and an earlier run's state is not seen."""
    for name in ("llama", "recurrent_gemma", "jamba", "mamba"):
        subject = cases.subject(name)
        subject.generate([cases.PROMPT], max_new_tokens=2)
        answer = subject.generate([(5,)], max_new_tokens=3)[0]
        logits = subject.logits([(5, *answer.tokens[:-1])])[0].log_softmax(-1)
        assert answer.logprobs == pytest.approx([float(x[t]) for x, t in zip(logits, answer.tokens, strict=True)], abs=1e-4)


# --- trials that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [nw.KeepHeads(k=1), nw.AblateAttention(), nw.AblateAttention(site="block")], ids=str)
def test_an_intervention_that_did_nothing_fails_its_trial(act: nw.Intervention, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention function that ignores its edits: the answer looks fine, the receipt does not."""
    subject = cases.subject("llama")
    monkeypatch.setattr(needlework.model.attention.LayerEdits, "edit_outputs", lambda self, forward, layer, out, *_: out)
    monkeypatch.setattr("needlework.model.outputs.OutputEdits.apply", lambda self, forward, layer, outputs, _: outputs)
    ignored, plain = subject.generate([cases.PROMPT] * 2, interventions=[act, nw.NONE], max_new_tokens=3)
    assert ignored.finish == "failed"
    assert "should have acted in" in ignored.error
    assert plain.finish != "failed"
    assert plain.error == ""


def test_a_mixer_that_was_not_cut_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("jamba")
    monkeypatch.setattr("needlework.model.mixers._MixerHooks.leave", lambda *_: None)
    answer = subject.generate([cases.PROMPT], nw.AblateRecurrent(), max_new_tokens=2)[0]
    assert answer.finish == "failed"
    assert "states_cut is 0" in answer.error


@pytest.mark.parametrize("boundary", ["prefill", "decode"])
def test_logits_that_are_no_numbers_fail_one_trial(boundary: Any) -> None:
    """A broken embedding: trials that read it fail, the others of the batch answer as if alone."""
    model = cases.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = float("nan")
    subject = nw.wrap(model)
    bad = (*cases.PROMPT[:5], 99, *cases.PROMPT[6:])
    answers = subject.generate([cases.PROMPT, bad, cases.TWIN], max_new_tokens=3, boundary=boundary)
    alone = subject.generate([cases.TWIN], max_new_tokens=3, boundary=boundary)[0]
    assert [answer.finish == "failed" for answer in answers] == [False, True, False]
    assert "not finite" in answers[1].error
    assert "embed_tokens" in answers[1].error  # it says where it went wrong
    assert answers[2].tokens == alone.tokens
    assert answers[2].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_trial_that_breaks_while_it_decodes_keeps_what_it_had() -> None:
    model = cases.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = float("nan")
    answer = nw.wrap(model).answer([Request(cases.PROMPT, forced=(5, 99, 6, 7))])[0]
    assert answer.finish == "failed"
    assert answer.tokens == (5, 99)


def test_stops_and_lengths() -> None:
    subject = cases.subject("llama")
    free = subject.generate([cases.PROMPT], max_new_tokens=6)[0]
    assert free.finish == "length"
    stopped = subject.generate([cases.PROMPT], max_new_tokens=6, stop=[free.tokens[2]])[0]
    assert stopped.finish == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[2]) + 1]
