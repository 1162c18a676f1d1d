"""The public surface: exactly these names, quick to import, and forgiving about how values are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import cases
import needlework as nw
from needlework.requests import Request

PUBLIC = [
    "AblateAttention",
    "AblateHeads",
    "AblateRecurrent",
    "AblateRecurrentGroups",
    "Anatomy",
    "Answer",
    "BlockAttention",
    "BlockRecurrent",
    "ChangeOutputs",
    "Checkup",
    "ExposeTokens",
    "Group",
    "Head",
    "HeadComparison",
    "Intervention",
    "KeepHeads",
    "LimitContext",
    "LogitLens",
    "Means",
    "NONE",
    "NeedleworkError",
    "OnlyHeads",
    "Part",
    "Patching",
    "Ranking",
    "Request",
    "ResetState",
    "Result",
    "ServingBudget",
    "Store",
    "Subject",
    "SwapMemory",
    "TrialError",
    "__version__",
    "budget",
    "calibrate",
    "compare_heads",
    "doctor",
    "head_score",
    "load",
    "logit_lens",
    "observe",
    "parse",
    "patch",
    "prune",
    "rank",
    "recurrent_contributions",
    "recurrent_mass",
    "recurrent_side",
    "register",
    "report",
    "run",
    "sample_key",
    "smallest_set",
    "tasks",
    "wrap",
    "write_gguf",
]
FREE_OF_TORCH = "Answer ChangeOutputs Checkup KeepHeads Request Result Store head_score report run sample_key tasks"


def test_these_names_are_public_and_no_others() -> None:
    assert sorted(nw.__all__) == PUBLIC == dir(nw)
    for name in PUBLIC:
        assert getattr(nw, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'loads'"):
        nw.loads  # noqa: B018
    assert nw.Request is Request
    import needlework.reports  # noqa: F401

    assert isinstance(nw.report, FunctionType)
    assert callable(nw.run)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["dir(nw)", f"[getattr(nw, name) for name in '{FREE_OF_TORCH}'.split()]"])
def test_importing_brings_no_torch(code: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys, needlework as nw; {code}; print({{'torch', 'transformers'}} & set(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "set()\n"


def test_a_subject_says_what_it_is() -> None:
    assert repr(cases.subject("llama")) == (
        "<Subject LlamaForCausalLM: 4 layers, 16 attention heads, 45,344 parameters, float32 on cpu, no tokenizer>"
    )
    assert repr(nw.wrap(cases.build("mamba"), cases.Letters())).endswith("float32 on cpu, Letters>")


def test_interventions_are_taken_as_text() -> None:
    subject, text = cases.subject("jamba"), "keep_heads(2, phase='prefill') + ablate_recurrent(layers=[0])"
    act = nw.parse(text)
    assert nw.Request(cases.PROMPT, text) == nw.Request(list(cases.PROMPT), act)  # type: ignore[arg-type]
    assert subject.generate([cases.PROMPT], text, max_new_tokens=3) == subject.generate([cases.PROMPT], act, max_new_tokens=3)
    mixed = subject.generate([cases.PROMPT] * 2, interventions=[text, act], max_new_tokens=3)
    assert mixed[0] == mixed[1]
    assert subject.choices([cases.PROMPT], [[(5,)]], text) == subject.choices([cases.PROMPT], [[(5,)]], interventions=[act])
    for options in ({}, {"attention_mask": torch.ones(1, 12)}):
        assert torch.equal(subject.logits([cases.PROMPT], text, **options), subject.logits([cases.PROMPT], act, **options))
    assert mixed[0].logprobs != subject.generate([cases.PROMPT], "none", max_new_tokens=3)[0].logprobs
    for wrong in (5, None, ["keep_heads(2)"]):
        with pytest.raises(nw.NeedleworkError, match="is no intervention; give one"):
            nw.Request(cases.PROMPT, wrong)  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match="token ids, not text"):
        nw.Request("abc")  # type: ignore[arg-type]


def test_values_need_no_names() -> None:
    """Fields of one's own in order, in Python as in text; `phase` and `layers` are always named."""
    heads = [(2, 0), (5, 1)]
    for value, named, text in (
        (nw.KeepHeads(2), nw.KeepHeads(k=2), "keep_heads(2)"),
        (nw.KeepHeads(2, None, "l2"), nw.KeepHeads(k=2, by="l2"), "keep_heads(2, None, 'l2')"),
        (nw.AblateHeads(heads), nw.AblateHeads(heads=heads), "ablate_heads([[2, 0], [5, 1]])"),
        (nw.ExposeTokens("omit", "key"), nw.ExposeTokens(mode="omit", span="key"), "expose_tokens('omit', 'key')"),
        (nw.SwapMemory("kv", "b"), nw.SwapMemory(half="kv", from_="b"), "swap_memory('kv', 'b')"),
        (nw.AblateRecurrent("block"), nw.AblateRecurrent(site="block"), "ablate_recurrent('block')"),
        (nw.ResetState(3), nw.ResetState(at=3), "reset_state(3)"),
        (nw.BlockAttention("a", "b"), nw.BlockAttention(from_="a", to="b"), "block_attention('a', 'b')"),
        (nw.LimitContext(8, 1), nw.LimitContext(tokens=8, sinks=1), "limit_context(8, 1)"),
    ):
        assert value == named == nw.parse(text)
        assert str(value) == str(named)
    with pytest.raises(nw.NeedleworkError, match="2 values without names; it has site"):
        nw.AblateAttention("heads", "prefill")
    with pytest.raises(nw.NeedleworkError, match="is given 'from' twice"):
        nw.SwapMemory("kv", "a", from_="b")
    with pytest.raises(nw.NeedleworkError, match="it has no fields"):
        nw.Intervention(5)


@pytest.mark.parametrize(
    "dtype, expected",
    [
        ("float32", torch.float32),
        (torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16),
        ("auto", torch.bfloat16),
    ],
)
def test_dtypes_are_taken_as_torchs_by_name_and_from_the_checkpoint(dtype: Any, expected: torch.dtype, tmp_path: Path) -> None:
    cases.build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert nw.load(tmp_path, dtype=dtype).model.dtype == expected


def test_dtypes_that_are_none_are_refused(tmp_path: Path) -> None:
    for wrong in ("float31", torch.int64, None):
        with pytest.raises(nw.NeedleworkError, match="is not known; choose from float32"):
            nw.load("tiny-griffin", dtype=wrong)  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match=r"has no config\.json"):
        nw.load(tmp_path, dtype="auto")
    model = cases.build("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"dtype"', '"no_dtype"'))
    with pytest.raises(nw.NeedleworkError, match="its configuration names none; choose dtype='float32' or 'bfloat16'"):
        nw.load(tmp_path, dtype="auto")
