"""What a program asks of a model is checked at the door: clear errors, never a raw one, never an endless answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cases
import needlework as nw


@pytest.fixture(scope="module")
def subject() -> nw.Subject:
    return cases.subject("jamba")


@pytest.mark.parametrize("count", [float("nan"), float("inf"), 2.5, "3", None, 0, -1, 2**22 + 1, 10**30])
def test_a_number_of_tokens_that_is_none(count: Any, subject: nw.Subject) -> None:
    with pytest.raises(nw.NeedleworkError, match="max_new_tokens"):
        subject.generate([[5, 6, 7]], max_new_tokens=count)


@pytest.mark.parametrize(
    "spans",
    [
        {"needle": 5},
        {"needle": "ab"},
        {"needle": [5]},
        {"needle": [("a", "b")]},
        {"needle": [(0.5, 2)]},
        {"needle": [(0, 1, 2)]},
        {"needle": [(2, 1)]},
        {"needle": [(0, 99)]},
        {"needle": [(None, 1)]},
        {"needle": None},
        5,
    ],
    ids=repr,
)
def test_spans_that_are_none(spans: Any, subject: nw.Subject) -> None:
    with pytest.raises(nw.NeedleworkError, match="span"):
        subject.generate([[5, 6, 7]], "expose_tokens(mode='only')", spans=[spans], max_new_tokens=2)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: nw.Request((5, 6), options=((10**6,),)),
        lambda: nw.Request((5, 6), options=((-1,),)),
        lambda: nw.Request((5, 6), options=((),)),
        lambda: nw.Request((5, 6), options=(5,)),  # type: ignore[arg-type]
        lambda: nw.Request((5, 6), options=(("a",),)),  # type: ignore[arg-type]
        lambda: nw.Request((5, 6), options=5),  # type: ignore[arg-type]
        lambda: nw.Request((5.5, 6)),  # type: ignore[arg-type]
        lambda: nw.Request(5),  # type: ignore[arg-type]
        lambda: nw.Request(("a",)),  # type: ignore[arg-type]
        lambda: nw.Request((5, 10**30)),
        lambda: nw.Request(()),
        lambda: nw.Request((5, 6), forced=("x",)),  # type: ignore[arg-type]
        lambda: nw.Request((5, 6), twins=5),  # type: ignore[arg-type]
        lambda: nw.Request((5, 6, 7), "swap_memory(half='kv')", twins={"twin": (5, 10**6, 7)}),
        lambda: nw.Request((5, 6, 7), "swap_memory(half='kv')", twins={"twin": ("a", "b", "c")}),  # type: ignore[dict-item]
        lambda: nw.Request((5, 6, 7), "swap_memory(half='kv')", twins={"twin": 5}),  # type: ignore[dict-item]
        lambda: nw.Request((5, 6, 7), "swap_memory(half='kv', from=[5, 1000000, 7])"),
    ],
)
def test_tokens_that_the_model_does_not_have(request_of: Any, subject: nw.Subject) -> None:
    with pytest.raises(nw.NeedleworkError):
        subject.answer([request_of()])


def test_whole_numbers_of_other_kinds_are_tokens(subject: nw.Subject) -> None:
    plain = subject.answer([nw.Request((5, 6, 7), max_new_tokens=2)])[0].tokens
    assert subject.answer([nw.Request(torch.tensor([5, 6, 7]), max_new_tokens=2)])[0].tokens == plain  # type: ignore[arg-type]
    assert subject.generate([torch.tensor([5, 6, 7])], max_new_tokens=2)[0].tokens == plain  # type: ignore[list-item]


def test_logits_and_choices_are_watched(subject: nw.Subject) -> None:
    ids = [list(cases.PROMPT)]
    with nw.observe(subject, span="needle", patterns=True, positions=[3]) as seen:
        subject.logits(ids, spans={"needle": ((1, 3),)})
        subject.logits(ids, prompt_tokens=4, spans={"needle": ((1, 3),)})
        subject.choices(ids, [[[5], [6, 7]]], spans=[{"needle": ((1, 3),)}])
    assert seen.table()
    assert seen.patterns
    for bad in ({"needle": ((0, 10**6),)}, {"needle": 5}):
        with nw.observe(subject), pytest.raises(nw.NeedleworkError, match="span"):
            subject.logits(ids, spans=bad)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["zoo"], ["inspect", "tiny-griffin"], ["plan", "02", "--model", "tiny-griffin"]], ids=lambda w: w[0]
)
def test_a_stop_in_the_first_moments_is_quiet(words: list[str]) -> None:
    """From when our first module, a few lines, is there: exit code 130 and no traceback, whatever module is coming in."""
    code = """
import needlework.__main__ as begin
set_handler = begin.signal.signal
begin.signal.signal = lambda *what: (set_handler(*what), print("begun", flush=True))
begin.main()
"""
    env = {**os.environ, "PYTHONPATH": str(Path(nw.__file__).parents[1]), "PYTHONSTARTUP": ""}
    for wait in (0.0, 0.1, 0.25, 0.5, 1.0):
        child = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        time.sleep(wait)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
        assert "Traceback" not in err, (wait, err)
        assert child.returncode in (130, 0), (wait, err)  # 0: it was done before
    light = "import sys; before = set(sys.modules); import needlework.__main__; print('typing' in set(sys.modules) - before)"
    assert subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, env=env, check=True).stdout == "False\n"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a Unix timer")
def test_a_stop_inside_an_import_waits_for_its_end(tmp_path: Path) -> None:
    """A library that catches everything around its imports gets no exception; the stop arrives directly afterwards."""
    (tmp_path / "slow_extension.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\nDONE = True\n"
    )
    (tmp_path / "careless.py").write_text("try:\n    import slow_extension\nexcept BaseException:\n    slow_extension = None\n")
    code = """
import signal, sys, time
from needlework.cli.options import interrupt_after_imports
signal.signal(signal.SIGINT, interrupt_after_imports)
try:
    import careless
    time.sleep(20)
except KeyboardInterrupt:
    print("stopped", sys.modules["slow_extension"].DONE)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(nw.__file__).parents[1]), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout == "stopped True\n", done.stderr
