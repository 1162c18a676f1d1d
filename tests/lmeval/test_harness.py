"""With nothing done to the model, ours and lm-eval's `hf` model say the same; batches and padding change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mini_tasks import docs

from needlework import NeedleworkError

pytestmark = pytest.mark.slow  # lm-eval alone takes 14 s to import
LETTER, CLOZE = docs("letter")["test"][:8], docs("cloze")["test"][:8]
ODD = [
    ("", "the king"),
    ("the king ", "of arbovia is"),
    ("<bos> the king", " sees"),
    ("question :", " the king sees the apple near the river . the queen"),
]
PAIRS = [(d["prompt"], f" {choice}") for d in LETTER + CLOZE for choice in d["choices"]] + ODD


def requests(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, i, ("t", i, 1)) for i, one in enumerate(arguments)]


def both(folder: Path, **options: Any) -> tuple[Any, Any]:
    from lm_eval.models.huggingface import HFLM

    from needlework.lmeval.model import NeedleworkLM

    return NeedleworkLM(str(folder), **options), HFLM(str(folder), device="cpu", batch_size=1, **options)


@pytest.mark.parametrize("max_length", [None, 12])
@pytest.mark.parametrize("name", ["griffin", "jamba", "llama"])
def test_log_likelihoods_are_those_of_lm_evals_own_model(
    name: str, max_length: int | None, request: pytest.FixtureRequest
) -> None:
    ours, hf = both(request.getfixturevalue(name), **({"max_length": max_length} if max_length else {}))
    mine = ours.loglikelihood(requests("loglikelihood", PAIRS))
    its = hf.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [one[1] for one in mine] == [one[1] for one in its]
    assert max(abs(a[0] - b[0]) for a, b in zip(mine, its, strict=True)) < 1e-4
    texts = [(d["prompt"],) for d in LETTER]
    mine = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    its = hf.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)
    assert mine == pytest.approx(its, abs=1e-4)


def test_a_model_with_a_limit_is_filled_to_the_last_token_as_lm_eval_does(tmp_path: Path) -> None:
    from checkpoints import save

    ours, hf = both(save("llama", tmp_path, max_position_embeddings=16))
    assert ours.max_length == hf.max_length == 16
    mine = ours.loglikelihood(requests("loglikelihood", PAIRS))
    its = hf.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert max(abs(a[0] - b[0]) for a, b in zip(mine, its, strict=True)) < 1e-4


@pytest.mark.parametrize("name", ["griffin", "llama"])
def test_generated_texts_are_those_of_lm_evals_own_model(name: str, request: pytest.FixtureRequest) -> None:
    ours, hf = both(request.getfixturevalue(name))
    free = ours.generate_until(requests("generate_until", [(d["prompt"], {"until": ["."], "max_gen_toks": 6}) for d in LETTER]))
    stop = free[0].split()[2]  # a word that does come: the text ends before it
    asked = [(d["prompt"], {"until": [stop], "max_gen_toks": 6}) for d in LETTER]
    mine = ours.generate_until(requests("generate_until", asked))
    assert mine == hf.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert mine[0].split() == free[0].split()[: free[0].split().index(stop)]
    with pytest.raises(NeedleworkError, match="greedily"):
        ours.generate_until(requests("generate_until", [("the king", {"do_sample": True, "temperature": 1.0})]))


def test_an_intervention_acts_and_equals_the_subject_asked_directly(griffin: Path) -> None:
    import needlework as nw
    from needlework.lmeval.model import NeedleworkLM

    text = "keep_heads(k=1, by='entropy') + limit_context(tokens=3)"
    ours = NeedleworkLM.create_from_arg_string(f"pretrained={griffin},intervention={text},batch_size=2")
    found = [one[0] for one in ours.loglikelihood(requests("loglikelihood", PAIRS[:8]))]
    subject = nw.load(griffin)
    direct = subject.choices([d["prompt"] for d in LETTER[:2]], [d["choices"] for d in LETTER[:2]], nw.parse(text))
    assert found == pytest.approx([total for one in direct for total in one.totals], abs=1e-5)
    idle = subject.choices([LETTER[0]["prompt"]], [LETTER[0]["choices"]])[0].totals
    assert max(abs(a - b) for a, b in zip(found, idle, strict=False)) > 0.01


def test_what_cannot_be_done_is_refused_before_weights_are_read(griffin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import needlework.subject
    from needlework.lmeval.model import NeedleworkLM

    monkeypatch.setattr(needlework.subject, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    for text, why in [
        ("keep_heads(k=1, phase='decode')", "decode only"),
        ("keep_hats(k=1)", "keep_heads"),
        ("keep_heads(k=99)", "99"),
        ("swap_memory(half='kv')", "memory"),
    ]:
        with pytest.raises(NeedleworkError, match=why):  # decode and swaps are refused when something is scored
            NeedleworkLM(str(griffin), text).loglikelihood(requests("loglikelihood", PAIRS[:1]))
    with pytest.raises(NeedleworkError, match="peft"):
        NeedleworkLM(str(griffin), peft="adapter")


def test_chat_template_and_encoding_are_inherited(griffin: Path) -> None:
    ours, hf = both(griffin)
    talk = [{"role": "user", "content": "the king"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}]
    assert ours.apply_chat_template(talk) == hf.apply_chat_template(talk)
    assert ours.chat_template(True) == hf.chat_template(True) != ""
    assert ours.tokenizer_name == hf.tokenizer_name


def test_the_arguments_of_a_string_split_outside_brackets_and_quotes_only() -> None:
    from needlework.lmeval.model import split_arguments

    text = "pretrained=a/b,intervention=keep_heads(k=5, by='entropy') + ablate_recurrent(layers=[0, 1]),"
    text += "max_length=7,truncation=True"
    assert split_arguments(text) == {
        "pretrained": "a/b",
        "intervention": "keep_heads(k=5, by='entropy') + ablate_recurrent(layers=[0, 1])",
        "max_length": 7,
        "truncation": True,
    }
    with pytest.raises(NeedleworkError, match="name=value"):
        split_arguments("pretrained")


@pytest.mark.slow
def test_lm_evals_own_command_line_runs_our_model_type(griffin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user types it, with no device: lm-eval asks for cuda:0 by itself."""
    from needlework.lmeval.model import main

    arguments = f"pretrained={griffin},intervention=keep_heads(k=1, by='entropy')"
    main(["--model", "needlework", "--model_args", arguments, "--tasks", "mini_mmlu_animals", "--limit", "2"])
    shown = capsys.readouterr().out
    assert "|animals|" in shown  # lm-eval's own table, with the task's short name
    assert "keep_heads(k=1, by='entropy')" in shown


@pytest.mark.parametrize("word", ["no", "0", "off", "'False '", "yes", "1"])
def test_a_word_that_is_no_truth_value_is_refused(word: str, griffin: Path) -> None:
    from needlework.lmeval.model import NeedleworkLM

    for name in ("trust_remote_code", "use_fast_tokenizer", "truncation"):
        with pytest.raises(NeedleworkError, match=f"{name}=.* is no truth value; write {name}=true or {name}=false"):
            NeedleworkLM.create_from_arg_string(f"pretrained={griffin},{name}={word}")


@pytest.mark.parametrize(
    ("words", "trusted"), [("", False), (",trust_remote_code=False", False), (",trust_remote_code=true", True)]
)
def test_code_of_a_model_is_trusted_only_where_it_says_true(words: str, trusted: bool, griffin: Path) -> None:
    from needlework.lmeval.model import NeedleworkLM

    assert NeedleworkLM.create_from_arg_string(f"pretrained={griffin}{words}")._loading["trust_remote_code"] is trusted
