"""Every module has a one-line summary, one trial enters few files, and docs/architecture.md names the six to read."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import needlework
from needlework.experiments.run import run

ROOT = Path(__file__).parent.parent
PACKAGE = Path(needlework.__file__).parent
MOST_FILES = 45  # that one trial may enter; kernels/ counts as one
PLAN = """
models: [tiny-griffin]
experiments:
  one:
    tasks: [{kind: niah, lengths: [64], depths: [50]}]
    interventions: [keep_heads(k=2)]
"""


def tree() -> Any:
    spec = importlib.util.spec_from_file_location("tree", ROOT / "docs" / "tree.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_says_what_it_holds_in_one_line() -> None:
    sentences: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = tree().summary(path)
        assert 10 < len(text) <= 150, (path, text)
        assert text not in sentences, (path, sentences.get(text))
        sentences[text] = path


class Trace:
    """The files of the package whose functions run while it is open. Importing a file is not entering it."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and path.is_relative_to(PACKAGE):
            name = str(path.relative_to(PACKAGE))
            self.files.setdefault("kernels/" if name.startswith("kernels/") else name, set()).add(code.co_qualname)

    def __enter__(self) -> Trace:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def test_one_trial_enters_few_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    assert run(plan, tmp_path / "first", progress=False).sound  # imports, compiles and probes
    with Trace() as trace:
        assert run(plan, tmp_path / "second", progress=False).sound
    with capsys.disabled():
        functions = sum(map(len, trace.files.values()))
        print(f"\none trial: {len(trace.files)} files, {functions} functions")
    assert len(trace.files) <= MOST_FILES, sorted(trace.files)


def test_the_walk_is_numbered_in_the_code_too() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## The walk of one trial")[1].split("\n## ")[0]
    steps = re.findall(r"^(\d+)\. \*\*`([\w/]+\.py)`\*\*", section, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    for number, name in steps:
        assert f"[walk {number}]" in (PACKAGE / name).read_text(encoding="utf-8"), name
