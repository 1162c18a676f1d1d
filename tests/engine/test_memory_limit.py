"""`--memory`: a limit for prompts and answers that is kept to, or refused with the least that would do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import cases
import needlework as nw
from needlework import zoo
from needlework.cli import app
from needlework.cli.options import read_bytes
from needlework.engine.budget import Costs, amount
from needlework.experiments.models import DiskModels
from needlework.experiments.plan import Model
from needlework.experiments.schema import Loading
from needlework.requests import Request, prepare

PROMPTS = [[*cases.PROMPT] * 10, [*cases.PROMPT]]


def _least(message: str) -> str:
    """What an error says to give."""
    match = re.search(r"Give (\S+) or more", " ".join(message.split()))
    assert match, message
    return match[1]


@pytest.mark.parametrize("name", ["llama", "recurrent_gemma", "zamba2"])
def test_too_little_is_refused_with_the_least_that_does(name: str) -> None:
    body = cases.subject(name).body
    with pytest.raises(nw.NeedleworkError, match="one request of 125 tokens") as error:
        nw.Subject(body, memory_bytes=4096).generate(PROMPTS, max_new_tokens=5)
    least = read_bytes(_least(str(error.value)))
    assert least is not None
    answers = nw.Subject(body, memory_bytes=least).generate(PROMPTS, max_new_tokens=5)
    assert [a.tokens for a in answers] == [a.tokens for a in cases.subject(name).generate(PROMPTS, max_new_tokens=5)]
    with pytest.raises(nw.NeedleworkError, match="is too little"):
        nw.Subject(body, memory_bytes=least - 2048).generate(PROMPTS, max_new_tokens=5)


def test_without_a_limit_nothing_is_refused() -> None:
    subject = nw.Subject(cases.subject("llama").body)
    subject.engine.budget.limit = 1  # as on a machine without free memory: one request at a time, and hope
    assert subject.generate(PROMPTS, max_new_tokens=2)[0].error == ""


def test_options_count_with_all_their_logits() -> None:
    subject = cases.subject("llama")
    costs, vocabulary = subject.engine.budget.costs, subject.anatomy.vocabulary

    def row(tokens: int, scoring: bool) -> int:
        options = ((5,) * tokens,) if scoring else ()
        return costs.row(prepare(Request(cases.PROMPT, max_new_tokens=tokens, options=options), subject.anatomy))

    assert row(101, True) - row(1, True) >= 100 * 12 * vocabulary
    assert row(101, False) - row(1, False) < 100 * 12 * vocabulary
    with pytest.raises(nw.NeedleworkError, match="is too little"):
        nw.Subject(subject.body, memory_bytes=100_000).choices([cases.PROMPT], [[[5] * 200]])


def test_a_twin_that_is_read_too_counts() -> None:
    subject = cases.subject("jamba")
    costs = subject.engine.budget.costs
    plain, swapped = (
        prepare(Request(cases.PROMPT, act, twins={"twin": cases.TWIN}), subject.anatomy)
        for act in (nw.NONE, nw.SwapMemory(half="kv"))
    )
    assert costs.batch([swapped]) - costs.batch([plain]) == costs.prompt(swapped.prefill_tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_of_a_model_costs_what_the_model_costs(dtype: str) -> None:
    seen = DiskModels().inspect(Model("plan.yaml:1", "m", "tiny-transformer", Loading(dtype=dtype)))
    assert seen.costs == Costs.of(nw.load(zoo.path("tiny-transformer"), dtype=dtype).body)


def _plan(folder: Path) -> Path:
    tasks = [
        {"kind": "niah", "lengths": [64, 128], "depths": [50], "samples": 1},
        {"kind": "niah_choice", "lengths": [64], "depths": [50], "samples": 1},
    ]
    experiments = {"e": {"tasks": tasks, "interventions": ["none", "ablate_attention()"]}}
    (folder / "plan.yaml").write_text(yaml.safe_dump({"name": "p", "models": ["tiny-griffin-small"], "experiments": experiments}))
    return folder / "plan.yaml"


@pytest.mark.slow
def test_a_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    words = ["run", str(_plan(tmp_path)), "--out", str(tmp_path / "out"), "--memory"]
    refused = CliRunner().invoke(app, [*words, "100KiB"])
    assert refused.exit_code == 2, refused.output
    assert "100KiB is too little" in refused.output
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(app, [*words, _least(refused.output)])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_an_evaluation_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    words = ["eval", "tiny-griffin-small", "--tasks", "mini-glue", "--intervene", "none", "--limit", "2"]
    words += ["--out", str(tmp_path / "out"), "--memory"]
    refused = CliRunner().invoke(app, [*words, "10KiB"])
    assert refused.exit_code == 2, refused.output
    assert "10KiB is too little" in refused.output
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(app, [*words, _least(refused.output)])
    assert done.exit_code == 0, done.output


def test_amounts_are_said_as_they_are_taken() -> None:
    for count in (1, 1023, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**30):
        said = read_bytes(amount(count))
        assert said is not None
        assert count <= said <= count + 2**20
