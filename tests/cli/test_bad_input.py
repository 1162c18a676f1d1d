"""Bad values are refused where they enter, in words and at once: intervention texts, plans, options of commands."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import needlework as nw
from needlework.cli import app
from needlework.errors import NeedleworkError, short_repr
from needlework.experiments.plan import load
from needlework.experiments.trials import MOST_SAMPLES
from needlework.interventions.base import MOST_CHARACTERS, check_ranges, expand
from needlework.tasks import make_task

runner = CliRunner()
BIG = "9" * 30
TEXTS = [
    ("ablate_heads(heads=[2])", "a head is a pair [layer, head]"),
    ("ablate_heads(heads='2.3')", "heads are a list of [layer, head] pairs"),
    ("ablate_heads(heads=[[]])", "a head is a pair"),
    ("ablate_heads(heads=[['a', 'b']])", "layer and head are whole numbers"),
    ("keep_heads(k=2, layers=[1,'x'])", "layers are whole numbers"),
    ("keep_heads(k=2, layers=[[]])", "layers are whole numbers"),
    ("[[]]", "expected name(key=value, ...)"),
    ("{[]}", "expected name(key=value, ...)"),
    ("keep_heads(k=2, by=ranking(x))", "'ranking(x)' is no plain value"),
    ("keep_heads(k=2, by=ranking(5))", "expected words such as"),
    ("keep_heads(k=2, by='\ud800')", "half a character"),
    ("\ud800", "half a character"),
    ("-" * 100_000 + "1", "too many parts"),
    ("keep_heads(k=" + "-" * 100_000 + "1)", "too many parts"),
    ("none + " * 20_000 + "none", "too many parts"),
    (f"keep_heads(k={BIG})", "more than 64 bits"),
    (f"keep_heads(k=1, by='random', seed=-{BIG})", "more than 64 bits"),
    (f"keep_heads(k=1, layers=[{BIG}])", "more than 64 bits"),
    (f"swap_memory(half='kv', from=[1, {BIG}])", "more than 64 bits"),
    ("keep_heads(k=1, layers=[" + ",".join(map(str, range(200_000))) + "])", f"at most {MOST_CHARACTERS:,} are read"),
    ("{" * 2000 + "}" * 2000, "more than 100 braces"),
    ("keep_heads(k=" + "{1," * 300 + "2" + "}" * 300 + ")", "more than 100 braces"),
]


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """What takes longer than this has gone wrong; the machine may be busy."""

    def hang(*_: Any) -> None:
        raise TimeoutError("this takes too long")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("text", "says"), TEXTS, ids=[text[:24].encode("ascii", "replace").decode() for text, _ in TEXTS])
def test_a_text_that_is_no_intervention_is_refused_at_once(text: str, says: str) -> None:
    start = time.process_time()
    for read in (nw.parse, check_ranges, lambda text: expand(text, {"H": 4})):
        with pytest.raises(NeedleworkError) as error:
            read(text)
        assert len(str(error.value)) < 700, "long texts are not repeated"
    assert says in str(error.value) or says in _parse_error(text)
    assert time.process_time() - start < 5


def _parse_error(text: str) -> str:
    with pytest.raises(NeedleworkError) as error:
        nw.parse(text)
    return str(error.value)


def test_values_that_are_given_in_python_come_through_the_same_door() -> None:
    for make, says in [
        (lambda: nw.KeepHeads(k=2, seed=2**63), "64 bits"),
        (lambda: nw.AblateHeads(heads=[2]), "pair"),  # type: ignore[list-item]
        (lambda: nw.Ranking(order=[1, 2]), "pair"),  # type: ignore[arg-type]
        (lambda: nw.Ranking(order=[(1, 10**20)]), "64 bits"),  # type: ignore[arg-type]
        (lambda: nw.Ranking(order=[(1, 1), (1, 1)]), "twice"),  # type: ignore[arg-type]
        (lambda: nw.Ranking.parse("1.2.3"), "expected words"),
    ]:
        with pytest.raises(NeedleworkError, match=says):
            make()
    assert nw.KeepHeads(k=2, seed=2**63 - 1).seed == 2**63 - 1


def test_what_was_right_reads_as_before() -> None:
    many = " + ".join(f"reset_state(at={i})" for i in range(1, 300))
    assert len(nw.parse(many).parts) == 299
    assert [str(act) for act in expand("keep_heads(k={1, {2, 3}}, by='entropy')", {})] == [
        f"keep_heads(k={k})" for k in (1, 2, 3)
    ]
    assert str(nw.parse("swap_memory(half='kv', from=[1, 2])")) == "swap_memory(half='kv', from=[1, 2])"
    assert str(nw.parse("ablate_heads(heads=[[5, 1], (2, 0), [2, 0]])")) == "ablate_heads(heads=[[2, 0], [5, 1]])"


def test_long_values_are_shown_in_part() -> None:
    assert short_repr("abc") == "'abc'"
    assert len(short_repr("x" * 10**6)) < 150
    assert len(short_repr([1] * 10**4)) < 150


# --- plans ------------------------------------------------------------------------------------------------------------

REST = "experiments: {a: {tasks: [%s], interventions: [%s]}}\n"


def _plan(task: str = "niah", act: str = "none", front: str = "", models: str = "[tiny-griffin]") -> str:
    return f"{front}models: {models}\n" + REST % (task, act)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_plan(front="seeds: !!timestamp x\n"), "plan.yaml:1: cannot read the value 'x': it is no tag:yaml.org,2002:timestamp"),
        (_plan(front='about: x\nseeds: !!int ""\n'), "plan.yaml:2: cannot read the value ''"),
        (_plan(front="seeds: !!bool x\n"), "plan.yaml:1: cannot read the value 'x'"),
        ("models: " + "[" * 2000 + "]" * 2000 + "\n", "plan.yaml:1: not valid YAML: the file holds too much or is too deep"),
        ("".join(" " * i + "a:\n" for i in range(1000)), "too deep"),
        (_plan(act='"' + "{" * 2000 + "}" * 2000 + '"'), "plan.yaml:2: "),
        (_plan(front=f"seeds: {BIG}\n"), "plan.yaml:1: a whole number has more than 64 bits"),
        (_plan(front='about: "\\ud800"\n'), "plan.yaml:1: '\\ud800' holds half a character"),
        (_plan(task='{kind: niah, needle: "\\ud800 {value}"}'), "plan.yaml:2: '\\ud800 {value}' holds half a character"),
        (_plan(front="max_new_tokens: 1000000000000\n"), "plan.yaml:1: max_new_tokens"),
        (_plan(task="{kind: niah, lengths: [100000000]}"), "lengths.0: Input should be less than or equal to 4194304"),
        (_plan(task="{kind: perplexity, tokens: 1000000000}"), "tokens: Input should be less than or equal to 4194304"),
        (_plan(task="{kind: cloze, shots: 1000000000}"), "shots: Input should be less than or equal to 1000"),
        ("#" * 1_000_001, "has more than 1,000,000 bytes"),
    ],
)
def test_a_plan_that_cannot_be_read_is_told_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(NeedleworkError) as error:
        load(tmp_path / "plan.yaml")
    assert says in str(error.value)
    assert len(str(error.value)) < 1500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "front"),
    [
        ("{kind: niah, lengths: [64], samples: 1000000000}", ""),
        ("{kind: niah, lengths: [64], depths: [50]}", "seeds: 0..999999\n"),
        ("{kind: mqar, samples: 1000000000}", ""),
        ("{kind: ruler, samples: 1000000000}", ""),
        ("{kind: letter_lookup, samples: 1000000000}", ""),
        ("{kind: judgements, samples: 1000000000}", ""),
        ("{kind: cloze, rounds: 1000000000}", ""),
        ("{kind: perplexity, samples: 1000000000}", ""),
        ("{kind: perplexity, tokens: 4000000, samples: 1000}", ""),
        ("{kind: cloze, shots: 1000, rounds: 700}", ""),
    ],
)
def test_what_a_plan_would_run_is_counted_before_it_is_made(task: str, front: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(_plan(task, front=front))
    said = runner.invoke(app, ["plan", str(tmp_path / "plan.yaml")])
    assert said.exit_code == 2, said.output
    words = " ".join(said.output.split())
    assert "for tiny-griffin, the plan makes" in words
    assert "take fewer seeds, samples, lengths or interventions" in words


def test_trials_count_samples_times_interventions(tmp_path: Path) -> None:
    task = "{kind: niah, lengths: [64], depths: [50], samples: 200000}"
    (tmp_path / "plan.yaml").write_text(_plan(task, act="none, 'keep_heads(k=0..10)', 'limit_context(tokens=10..40)'"))
    said = runner.invoke(app, ["plan", str(tmp_path / "plan.yaml")])
    assert (said.exit_code, "makes 8,600,000 trials; the most is 5,000,000" in " ".join(said.output.split())) == (2, True), (
        said.output
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["niah", "niah_choice", "mqar", "phone_book", "copy", "ruler", "letter", "cloze", "judgements"])
def test_the_count_is_what_is_made(kind: str) -> None:
    from needlework.experiments.models import DiskModels
    from needlework.experiments.plan import Model

    model = DiskModels().inspect(Model("x", "tiny-griffin-small", "tiny-griffin-small"))
    fields = {
        "niah": {"lengths": [64, 96], "samples": 2},
        "mqar": {"queries": 2},
        "ruler": {"samples": 2},
        "cloze": {"rounds": 2},
    }
    task = make_task({"kind": kind, **fields.get(kind.removesuffix("_choice"), {})})
    made = list(task.items(model.tokenizer, 0, None, None))
    extent = task.extent()
    assert extent is not None
    assert len(made) <= extent.samples <= 4 * len(made)
    if kind != "niah" or task.lengths is not None:  # type: ignore[attr-defined]
        assert extent.samples == len(made) or kind in ("ruler", "niah_choice")


def test_a_task_that_cannot_say_how_much_it_makes_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from needlework.experiments import trials
    from needlework.tasks.niah import Niah

    monkeypatch.setattr(Niah, "extent", lambda self: None)
    monkeypatch.setattr(trials, "MOST_SAMPLES", 3)
    (tmp_path / "plan.yaml").write_text(_plan("{kind: niah, lengths: [64], depths: [50], samples: 4}"))
    said = runner.invoke(app, ["plan", str(tmp_path / "plan.yaml")])
    assert (said.exit_code, "more than 3 samples" in said.output) == (2, True), said.output
    assert MOST_SAMPLES == 250_000


@pytest.mark.parametrize("name", ["a" * 5000, "./" + "a" * 5000, "a/" + "a" * 5000, "a\\0b"])
def test_a_model_name_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(_plan(models=f'["{name}"]'))
    for words in (["plan", str(tmp_path / "plan.yaml")], ["run", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out")]):
        said = runner.invoke(app, words)
        assert said.exit_code == 2, said.output
        assert "plan.yaml:1: model" in " ".join(said.output.split())
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_encoding_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(_plan().encode() + b"# caf\xe9\n")
    with pytest.raises(NeedleworkError, match=r"plan\.yaml:3: is not UTF-8 text \(byte 0xe9\); save it as UTF-8"):
        load(tmp_path / "plan.yaml")
    (tmp_path / "hay.txt").write_bytes(b"one.\ntwo.\nthr\xe9e.")
    from needlework.tasks import haystack

    with pytest.raises(NeedleworkError, match=r"haystack: .*hay\.txt:3: is not UTF-8"):
        haystack.read_sentences(str(tmp_path / "hay.txt"))
    (tmp_path / "own.jsonl").write_bytes(b'{"prompt": "a", "target": "b"}\n\xff')
    with pytest.raises(NeedleworkError, match=r"own\.jsonl:2: is not UTF-8"):
        make_task({"kind": "prompts", "file": str(tmp_path / "own.jsonl")}).check()
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(NeedleworkError, match=r"deep\.jsonl:1: Invalid JSON"):
        make_task({"kind": "prompts", "file": str(tmp_path / "deep.jsonl")}).check()


def test_a_pattern_that_matches_a_whole_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from needlework.tasks import haystack

    monkeypatch.setattr(haystack, "MOST_FILES", 3)
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("a.")
    with pytest.raises(NeedleworkError, match="more than 3 files match"):
        haystack.read_sentences(str(tmp_path / "*.txt"))


# --- options of commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "02", "--out", "x", "--memory", "9" * 400], "is no amount of memory"),
        (["inspect", ""], "the model's name is empty"),
        (["ask", "", "hello"], "the model's name is empty"),
        (["plan", "02", "--model", ""], "--model is empty"),
        (["plan", "02", "--model", "a" * 5000], "no zoo model is called"),
        (["plan", "a" * 5000], "no shipped plan is called"),
        (["inspect", "a" * 5000], "there is no directory"),
        (["report", "a" * 5000], "holds no run"),
        (["export", "a" * 5000, "--to", "csv"], "holds no run"),
        (["ask", "tiny-griffin-small", "\ud800 x"], "half a character"),
        (
            ["ask", "tiny-griffin-small", "the", "--max-new-tokens", "99999999999999999999"],
            "max_new_tokens=99999999999999999999 must",
        ),
        (["ask", "tiny-griffin-small", "the", "--threads", "99999999999"], "--threads"),
        (["ask", "tiny-griffin-small", "the", "--device", "meta"], "device 'meta' holds no values"),
        (
            ["eval", "tiny-griffin-small", "--tasks", "mini-mmlu", "--intervene", "none", "--out", "x", "--limit", "nan"],
            "limit=nan",
        ),
        (
            ["eval", "tiny-griffin-small", "--tasks", "mini-mmlu", "--intervene", "none", "--out", "x", "--limit", "inf"],
            "limit=inf",
        ),
        (
            ["eval", "tiny-griffin-small", "--tasks", "mini-mmlu", "--intervene", "none", "--out", "x", "--limit", "-1"],
            "limit=-1",
        ),
        (["eval", "tiny-griffin-small", "--tasks", "mini-mmlu", "--intervene", "none", "--out", "x", "--limit", "0"], "limit=0"),
    ],
    ids=lambda words: " ".join(words)[:40].encode("ascii", "replace").decode() if isinstance(words, list) else "",
)
def test_a_value_that_is_none_is_refused(words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = runner.invoke(app, words)
    assert said.exit_code == 2, said.output
    assert says in " ".join(said.output.split())
    assert "Traceback" not in said.output
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize("device", ["mps", "xpu", "vulkan"])
def test_a_device_that_torch_lacks_is_refused_before_anything_is_written(device: str, tmp_path: Path) -> None:
    import torch

    if device == "mps" and torch.backends.mps.is_available():
        return  # this machine has one
    (tmp_path / "plan.yaml").write_text(_plan(models=f"[{{source: tiny-griffin-small, device: {device}}}]"))
    said = runner.invoke(app, ["run", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out")])
    assert said.exit_code == 2, said.output
    assert f"device '{device}': torch cannot use it on this machine" in " ".join(said.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_where_a_directory_is_due(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for words in (["demo", "--out", place], ["run", "02", "--fast", "--model", "tiny-griffin-small", "--out", place]):
        said = runner.invoke(app, words)
        assert said.exit_code == 2, said.output
        assert "is a file; give a directory" in said.output or "Not a directory; choose another directory" in said.output
    assert (tmp_path / "file").read_text() == "mine"


def test_square_brackets_in_a_path_are_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word of a demo names its report, after all the work is done."""
    from needlework.experiments import run
    from needlework.experiments.result import Result

    out = tmp_path / "a[/x]" / "[bold]b"
    monkeypatch.setattr(run, "run", lambda *_, **__: Result(out, True))
    monkeypatch.setattr(Result, "report", lambda self, out=None: self.directory / "report.html")
    monkeypatch.setattr("needlework.reports.summary", lambda _: "")
    monkeypatch.setattr("needlework.play.export.export", lambda *_: 0)
    said = runner.invoke(app, ["demo", "--full", "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert "a[/x]/[bold]b/report.html" in said.output.replace("\n", "")


@pytest.mark.parametrize(
    "words", [["lm-eval", "--help"], ["eval", "x", "--tasks", "mini-mmlu", "--intervene", "none", "--out", "x"]]
)
def test_lm_eval_without_its_extra(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr("needlework.lmeval.find_spec", lambda name: None if name == "lm_eval" else find(name))
    said = runner.invoke(app, words)
    assert said.exit_code == 2, said.output
    assert "pip install 'needlework[lm-eval]'" in " ".join(said.output.split())


def test_more_shots_than_there_are(tmp_path: Path) -> None:
    words = ["eval", "tiny-griffin-small", "--tasks", "mini-mmlu", "--intervene", "none", "--out", str(tmp_path / "x")]
    said = runner.invoke(app, [*words, "--limit", "1", "--shots", "1000000000"])
    assert said.exit_code == 2, said.output
    assert "lm-eval cannot put these questions" in said.output
