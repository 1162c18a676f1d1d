"""The public face: bad input gets a clear error that says how to fix it, before any compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import cases
import needlework as nw
from needlework.experiments.models import LoadedSubject
from needlework.experiments.plan import Model
from needlework.requests import Request, stop_tokens
from needlework.tasks.prompts import token_ids


@pytest.fixture(autouse=True)
def _no_compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests named `test_refused_*` fail if the model runs at all."""
    if request.node.name.startswith("test_refused"):

        def forward(*_: Any, **__: Any) -> None:
            raise AssertionError("the model was run")

        monkeypatch.setattr("needlework.model.hooked_model.run_model", forward)


def _refused(name: str, act: nw.Intervention, says: str, **options: Any) -> None:
    subject = cases.subject(name)
    for call in (
        lambda: subject.generate([cases.PROMPT], act, **options),
        lambda: subject.logits([cases.PROMPT], act, prompt_tokens=9),
        lambda: subject.choices([cases.PROMPT], [[(5,)]], act),
    ):
        with pytest.raises(nw.NeedleworkError) as error:
            call()
        assert says in str(error.value)


def test_refused_more_heads_than_there_are() -> None:
    _refused("llama", nw.KeepHeads(k=5), "k=5 is more than the 4 heads there are; choose k from 0 to 4")
    ranking = nw.Ranking(order=cases.subject("llama").anatomy.heads)
    _refused("llama", nw.KeepHeads(k=17, by=ranking, scope="model"), "more than the 16 heads")
    _refused("llama", nw.KeepHeads(k=2, by=nw.Ranking(order=[(0, 0)])), "does not cover heads")


def test_refused_layers_and_heads_that_are_not_there() -> None:
    _refused("jamba", nw.KeepHeads(k=1, layers=[2, 3]), "layers [3] are no attention layers")
    _refused("jamba", nw.AblateRecurrent(layers=[2]), "layers [2] are no recurrent layers")
    _refused("jamba", nw.AblateHeads(heads=[(2, 4)]), "no such heads [(2, 4)]")
    _refused("jamba", nw.AblateHeads(heads=[(0, 0)]), "choose from [2, 5]")
    _refused("jamba", nw.AblateHeads(heads=[(99, 0)]), "choose from [2, 5]")
    _refused("jamba", nw.OnlyHeads(heads=[(5, 9)]), "no such heads [(5, 9)]")
    _refused("jamba", nw.OnlyHeads(heads=[]), "no such heads")
    _refused("jamba", nw.OnlyHeads(heads=[(2, 0)], layers=[99]), "layers [99] are no attention layers")
    _refused("jamba", nw.AblateHeads(heads=[(2, 0)], layers=[2, 99]), "layers [99] are no attention layers")
    _refused("jamba", nw.AblateHeads(heads=[(2, 0), (5, 1)], layers=[2]), "names heads of layers [5], which `layers` leaves out")


def test_refused_sides_that_are_not_there() -> None:
    _refused("mamba", nw.KeepHeads(k=1), "MambaForCausalLM has no separate attention layers")
    _refused("llama", nw.AblateRecurrent(), "LlamaForCausalLM has no separate recurrent layers")
    _refused("hrm_text", nw.AblateRecurrent(), "it recurs over depth, not over tokens")


def test_refused_spans_that_are_not_in_the_prompt() -> None:
    _refused("llama", nw.ExposeTokens(mode="omit"), "the prompt has no span 'needle' (it has: none); pass spans=")
    _refused("llama", nw.ExposeTokens(mode="omit", span=(3, 12)), "covers positions [12] outside the prompt of")
    _refused("jamba", nw.ResetState(at="needle"), "no span 'needle'")
    _refused("jamba", nw.ResetState(at=0), "choose at >= 1")
    _refused("jamba", nw.ResetState(at=500), "no token is read there")
    with pytest.raises(nw.NeedleworkError, match="outside the prompt"):
        cases.subject("llama").generate([cases.PROMPT], nw.ExposeTokens(mode="omit"), spans=[{"needle": ((10, 14),)}])


def test_refused_prompts() -> None:
    subject = cases.subject("llama")
    most = subject.anatomy.max_tokens
    assert most is not None
    with pytest.raises(nw.NeedleworkError, match=f"more than the {most}"):
        subject.generate([[5] * (most - 3)], max_new_tokens=4)
    with pytest.raises(nw.NeedleworkError, match=f"more than the {most}"):
        subject.logits(torch.full((1, most + 1), 5))
    with pytest.raises(nw.NeedleworkError, match=f"more than the {most}"):
        subject.choices([[5] * most], [[(5, 5)]])
    with pytest.raises(nw.NeedleworkError, match="token id 128 is outside the vocabulary of 128"):
        subject.generate([[5, 128]])
    with pytest.raises(nw.NeedleworkError, match="the prompt is empty"):
        subject.generate([[]])
    with pytest.raises(nw.NeedleworkError, match="give a list of prompts"):
        subject.generate("hello")  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match="at least 1"):
        subject.generate([[5]], max_new_tokens=0)
    with pytest.raises(nw.NeedleworkError, match="2 interventions for 1 prompts"):
        subject.generate([[5]], interventions=[nw.NONE, nw.NONE])
    with pytest.raises(nw.NeedleworkError, match="must be \\[rows, tokens\\]"):
        subject.logits(torch.tensor([5, 6]))
    with pytest.raises(nw.NeedleworkError, match="prompt_tokens=4 must lie between 1 and the 3"):
        subject.logits([[5, 6, 7]], prompt_tokens=4)
    with pytest.raises(nw.NeedleworkError, match="at least one option"):
        subject.choices([[5]], [[]])


@pytest.mark.parametrize("boundary", ["Decode", "x", None, 5])
def test_refused_boundaries(boundary: Any) -> None:
    """Each of these would have meant prefill."""
    subject = cases.subject("llama")
    for call in (
        lambda: subject.generate([cases.PROMPT], boundary=boundary),
        lambda: subject.logits([cases.PROMPT], prompt_tokens=9, boundary=boundary),
    ):
        with pytest.raises(nw.NeedleworkError, match="choose 'decode' or 'prefill'"):
            call()


@pytest.mark.parametrize("span", [(-5, 99999), (3, 13), (-1, 2), (4, 4), (6, 3), 3, (1, 2, 3)])
def test_refused_spans_that_are_no_ranges_of_the_prompt(span: Any) -> None:
    """Also where no intervention asks for them: an observer would watch other tokens."""
    subject = cases.subject("llama")
    spans = {"needle": (span,)}
    with nw.observe(subject):
        for call in (
            lambda: subject.generate([cases.PROMPT], spans=[spans]),
            lambda: subject.choices([cases.PROMPT], [[(5,)]], spans=[spans]),
            lambda: subject.logits([cases.PROMPT], spans=spans),
        ):
            with pytest.raises(nw.NeedleworkError, match="outside the prompt of 12 tokens or is no range"):
                call()


def test_refused_texts_that_would_be_read_as_letters() -> None:
    subject = nw.wrap(cases.build("llama"), cases.Letters())
    for call in (
        lambda: subject.generate("abc"),
        lambda: subject.generate(["abc"], stop="de"),
        lambda: subject.choices("abc", [["d"]] * 3),
        lambda: subject.choices(["abc"], ["de"]),
        lambda: subject.choices(["abc", "abd"], "de"),
        lambda: nw.calibrate(subject, "abc"),
    ):
        with pytest.raises(nw.NeedleworkError, match="list"):
            call()
    with pytest.raises(nw.NeedleworkError, match="neither text nor a list of token ids"):
        subject.generate([5, 6, 7])  # type: ignore[list-item]
    with pytest.raises(nw.NeedleworkError, match="neither text nor a list of token ids"):
        subject.generate([[5.5, 6]])  # type: ignore[list-item]


@pytest.mark.parametrize("key", ["weight", "0", "x.prefill", "0.prefill.more"])
def test_refused_means_with_other_keys(key: str, tmp_path: Path) -> None:
    save_file({key: torch.zeros(2)}, str(tmp_path / "means.safetensors"))
    with pytest.raises(nw.NeedleworkError, match="no calibrated means can be read"):
        nw.Means.load(tmp_path / "means.safetensors")


def test_refused_two_answers_to_one_question() -> None:
    subject = cases.subject("llama")
    for call in (
        lambda: subject.generate([cases.PROMPT], nw.AblateAttention(), interventions=[nw.NONE]),
        lambda: subject.choices([cases.PROMPT], [[(5,)]], nw.AblateAttention(), interventions=[nw.NONE]),
    ):
        with pytest.raises(nw.NeedleworkError, match="give one for all prompts, or one for each"):
            call()
    with pytest.raises(nw.NeedleworkError, match="2 lists of options for 1 prompts"):
        subject.choices([cases.PROMPT], [[(5,)], [(6,)]])
    with pytest.raises(nw.NeedleworkError, match="spans must be a list with one entry for each prompt"):
        subject.generate([cases.PROMPT], spans=cases.SPANS)  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match="is no intervention"):
        subject.generate([cases.PROMPT], 5)  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match="did you mean 'ablate_attention'"):
        subject.generate([cases.PROMPT], "ablate_atention()")


@pytest.mark.parametrize("many", [float("nan"), 2.5, float("inf"), "4", None])
def test_refused_numbers_of_tokens(many: Any) -> None:
    """With nan no answer would ever end."""
    with pytest.raises(nw.NeedleworkError, match="must be a whole number, at least 1"):
        cases.subject("llama").generate([cases.PROMPT], max_new_tokens=many)


def test_refused_tokens_outside_the_vocabulary() -> None:
    subject, twin = cases.subject("jamba"), (*cases.TWIN[:-2], 128, cases.TWIN[-1])
    for call in (
        lambda: subject.choices([cases.PROMPT], [[(5, 128)]]),
        lambda: subject.choices([cases.PROMPT], [[(-1,)]]),
        lambda: subject.generate([cases.PROMPT], nw.SwapMemory(half="kv"), twins=[{"twin": twin}]),
        lambda: subject.generate([cases.PROMPT], nw.SwapMemory(half="kv", from_=twin)),
        lambda: subject.answer([Request(cases.PROMPT, forced=(5, 128))]),
        lambda: nw.calibrate(subject, [[5, 128]]),
    ):
        with pytest.raises(nw.NeedleworkError, match="outside the vocabulary of 128"):
            call()


def test_refused_twins_that_change_nothing() -> None:
    """The last token is read in decode: a twin that differs there alone has the prompt's memory."""
    subject, other_end = cases.subject("jamba"), (*cases.PROMPT[:-1], 99)
    for twin, boundary in ((cases.PROMPT, "prefill"), (cases.PROMPT, "decode"), (other_end, "decode")):
        with pytest.raises(nw.NeedleworkError, match="the twin is the prompt"):
            subject.generate([cases.PROMPT], nw.SwapMemory(half="kv"), twins=[{"twin": twin}], boundary=boundary)


def test_refused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlework.model.load._weights", lambda *_: pytest.fail("weights were loaded first"))
    with pytest.raises(nw.NeedleworkError, match="kernels='x' is not known; choose from fast, stock"):
        nw.load("tiny-griffin", kernels="x")  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match="kernels='x' is not known"):
        nw.wrap(cases.build("llama"), kernels="x")  # type: ignore[arg-type]


def test_refused_in_a_batch_before_any_row_runs() -> None:
    """One bad request among good ones: nothing is computed."""
    with pytest.raises(nw.NeedleworkError, match="more than the 4 heads"):
        cases.subject("llama").generate([cases.PROMPT] * 3, interventions=[nw.NONE, nw.NONE, nw.KeepHeads(k=9)])


def test_texts_go_through_the_tokenizer() -> None:
    subject = nw.wrap(cases.build("llama"), cases.Letters())
    text, ids = (subject.generate([prompt], max_new_tokens=3)[0] for prompt in ("abcab", (1, 7, 8, 9, 7, 8)))
    assert text == ids
    assert text.text == cases.Letters().decode(text.tokens)
    assert subject.choices(["abc"], [["de", "f"]]) == subject.choices([(1, 7, 8, 9)], [[(10, 11), (12,)]])
    stop = chr(text.tokens[0] + 90)
    assert subject.generate(["abcab"], max_new_tokens=3, stop=[stop])[0].finish == "stop"
    with pytest.raises(nw.NeedleworkError, match="a stop must be one token"):
        subject.generate(["abc"], stop=["ab"])


@pytest.mark.parametrize(("eos", "ends"), [(None, set()), (2, {2}), ([2, 5], {2, 5}), ((), set())])
def test_stop_tokens_are_the_models_own_and_those_that_are_given(eos: Any, ends: set[int]) -> None:
    encode = partial(token_ids, cases.Letters())
    assert stop_tokens(eos) == ends
    assert stop_tokens(eos, [7, "a", "b"], encode) == ends | {7, 8}
    with pytest.raises(nw.NeedleworkError, match="stop 'ab' is 2 tokens; a stop must be one token"):
        stop_tokens(eos, ["ab"], encode)
    with pytest.raises(nw.NeedleworkError, match="stop 'a': without a tokenizer, a stop must be a token id"):
        stop_tokens(eos, ["a"])


def test_the_special_token_that_ends_an_answer_is_not_part_of_its_text() -> None:
    """Left in, "... on a sunny day.<|im_end|>" is not the needle "... on a sunny day."."""
    letters = cases.Letters()
    subject = nw.wrap(cases.build("llama"), letters)
    tokens = subject.generate(["abcab"], max_new_tokens=3)[0].tokens
    last = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i)
    stop, before = letters.decode(tokens[last : last + 1]), letters.decode(tokens[:last])
    assert subject.generate(["abcab"], max_new_tokens=3, stop=[stop])[0].text == before + stop, "a stop of one's own is said"
    letters.all_special_ids = (tokens[last], tokens[0])
    ended = subject.generate(["abcab"], max_new_tokens=3, stop=[stop])[0]
    assert ended.tokens == tokens[: last + 1]
    assert ended.text == before, "only the last one is left out, and the tokens are whole"
    assert subject.generate(["abcab"], max_new_tokens=3)[0].text == letters.decode(tokens), "what did not end it is said"
    asked = Request(subject.encode("abcab"), nw.NONE, max_new_tokens=3, stop=frozenset([tokens[last]]))
    answers = LoadedSubject(subject, Model("x:1", "x", "x")).answers([asked])
    assert [answer.text for _, answer in answers] == [before], "in a run, too"


def test_the_parts_stay_within_reach() -> None:
    model = cases.build("llama")
    subject = nw.wrap(model, "tokenizer")
    assert subject.model is model
    assert subject.tokenizer == "tokenizer"
    assert len(subject.anatomy.layers[0].heads) == 4


def test_a_run_prepares_a_request_once_and_one_that_cannot_be_asked_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = nw.wrap(cases.build("llama"))
    requests = [Request((1, 2, 3), act, max_new_tokens=2) for act in ("none", "ablate_attention(layers=[99])", "none")]
    monkeypatch.setattr("needlework.engine.engine.prepare", lambda *_: pytest.fail("prepared again"))
    answers = dict(LoadedSubject(subject, Model("x:1", "x", "x")).answers(requests))
    assert [bool(answers[i].tokens) for i in range(3)] == [True, False, True]
    assert answers[1].finish == "failed"
    assert answers[1].error.startswith("NeedleworkError: ")
    assert "[99]" in answers[1].error
