"""SECURITY.md's promises that no other test holds: no pickle, no code of a model's, names that stay inside, an honest audit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

import audit
import needlework as nw
from needlework import zoo
from needlework.cli import app
from needlework.files import file_name
from needlework.model.load import blueprint

SRC = Path(nw.__file__).parent


def test_nothing_here_reads_or_writes_pickles() -> None:
    named = re.compile(r"^\s*(import|from) (pickle|dill|cloudpickle|joblib|shelve|marshal)\b|allow_pickle=True", re.M)
    assert [str(path) for path in SRC.rglob("*.py") if named.search(path.read_text())] == []
    loads = [call for path in SRC.rglob("*.py") for call in re.findall(r"torch\.load\([^\n]*", path.read_text())]
    assert loads == ["torch.load(path, weights_only=True)"], "checkpoints of one's own training, without objects"


def test_no_command_and_no_plan_lets_a_model_bring_code(tmp_path: Path) -> None:
    for name in ("cli/models.py", "cli/runs.py", "cli/options.py", "experiments/schema.py"):
        assert "trust_remote_code" not in (SRC / name).read_text()
    model = Path(shutil.copytree(zoo.path("tiny-griffin-small"), tmp_path / "model"))
    ran = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass X: pass\n")
    config = json.loads((model / "config.json").read_text())
    mapped = {"AutoConfig": "evil.X", "AutoModelForCausalLM": "evil.X", "AutoTokenizer": "evil.X"}
    (model / "config.json").write_text(json.dumps({**config, "auto_map": mapped}))
    nw.load(model)
    (model / "config.json").write_text(json.dumps({**config, "auto_map": mapped, "model_type": "unheard-of"}))
    with pytest.raises(nw.NeedleworkError):
        nw.load(model)
    assert not ran.exists()


@pytest.mark.parametrize(
    "words",
    [["inspect", "{model}"], ["plan", "02", "--model", "m={model}"], ["run", "02", "--model", "m={model}", "--out", "{out}"]],
)
def test_no_command_asks_whether_a_models_code_may_run(words: list[str], tmp_path: Path) -> None:
    """transformers would ask, and run what the directory brings after a "y"."""
    model = Path(shutil.copytree(zoo.path("tiny-griffin-small"), tmp_path / "model"))
    ran = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass X: pass\n")
    mapped = {"AutoConfig": "evil.X", "AutoModelForCausalLM": "evil.X", "AutoTokenizer": "evil.X"}
    (model / "config.json").write_text(json.dumps({"model_type": "unheard-of", "auto_map": mapped}))
    call = [word.format(model=model, out=tmp_path / "out") for word in words]
    said = CliRunner().invoke(app, call, input="y\n" * 10)
    assert not ran.exists()
    assert said.exit_code == 2
    assert "trust_remote_code" in said.output
    assert "[y/N]" not in said.output


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["org/kernel", "org/kernel@v1:attention", {"": "org/kernel"}])
def test_a_configuration_fetches_no_kernel(key: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import hub_kernels

    fetched: list[object] = []
    for name in ("load_and_register_attn_kernel", "lazy_import_flash_attention"):
        monkeypatch.setattr(hub_kernels, name, lambda *args, **_: fetched.append(args), raising=False)
        monkeypatch.setattr(transformers.modeling_utils, name, lambda *args, **_: fetched.append(args), raising=False)
    model = Path(shutil.copytree(zoo.path("tiny-griffin-small"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    for read in (nw.load, blueprint):
        with pytest.raises(nw.NeedleworkError, match=r"asks for the kernel .*org/kernel"):
            read(model)
    assert fetched == []


def test_an_attention_that_is_not_installed_is_not_asked_for(tmp_path: Path) -> None:
    """Checkpoints are published with `flash_attention_2`; attention is needlework's own."""
    model = Path(shutil.copytree(zoo.path("tiny-griffin-small"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attn_implementation": "flash_attention_2"}))
    assert nw.load(model).generate(["the"], max_new_tokens=1)[0].error == ""


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "..", ".", "a/b", "a\\b", "", "\x00", "\ud800", "x" * 10_000, ".hidden", "con\n"]
)
def test_a_name_never_leads_out_of_its_directory(name: str, tmp_path: Path) -> None:
    file = tmp_path / file_name(name)
    assert file.parent == tmp_path
    assert file.name not in ("", ".", "..")
    file.write_text("x")
    assert list(tmp_path.iterdir()) == [file]
    assert file_name(name) != file_name(name + "!"), "two texts, two names"


def test_the_audit_says_what_it_could_not_ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Said:
        returncode, stdout, stderr = 1, "", "requests.exceptions.ConnectionError: Max retries exceeded"

    monkeypatch.setattr(audit.subprocess, "run", lambda *_, **__: Said)
    assert audit.holes() == 0
    assert "NOT CHECKED: offline" in capsys.readouterr().out
    Said.stderr = "Found 1 known vulnerability in 1 package"
    assert audit.holes() == 1, "a hole fails the target"


def test_licences_of_all_locked_packages_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert audit.doubtful(sorted(audit.locked())) == []
    assert len(audit.locked()) > 50
    monkeypatch.setattr(audit, "licence", lambda name: "GPL-3.0-only")
    assert audit.doubtful(["x"]) == ["x: GPL-3.0-only"]
