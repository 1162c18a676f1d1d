"""Names of models and tasks may hold anything; the page, the pictures and the summary show them and stay whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from needlework.analysis.reader import load
from needlework.reports import report, summary
from needlework.results import Store
from needlework.terminal import LONGEST_NAME, display_name

HOSTILE = {
    "mathtext": r"my $\foo$ model",
    "dollar": "price $ 5",
    "surrogate": "half \ud800 a character",
    "control": "bell\x07\x1b[31m and \u202eturned",
    "lines": "two\nlines",
    "other script": "模型 🧵",
    "long": "x" * 2_000_000,
    "markup": "[/x] <b>&amp;",
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("runs") / "few", ("tiny-griffin",), per_cell=1)


def named(few: Path, directory: Path, name: str) -> Path:
    """A run of one model of this name, as far as a database can hold it."""
    shutil.copytree(few, directory)
    store = Store(directory)
    store.db.execute("PRAGMA synchronous=OFF")
    store.db.execute(f"DELETE FROM trials WHERE rowid % {97 if len(name) < 1000 else 1997}")
    about = store.meta("models")["tiny-griffin"]
    try:
        store.db.execute("UPDATE trials SET model = ?", (name,))
        store.db.execute("UPDATE observations SET model = ?", (name,))
        store.db.execute("UPDATE trials SET task = task || ?", (name,))
        store.set_meta("models", {name: about})
    except UnicodeEncodeError:  # only JSON holds half a character
        store.set_meta("models", {"tiny-griffin": about, name: {**about, "weights": "others"}})
    store.close()
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_any_name_is_shown_and_breaks_nothing(few: Path, tmp_path: Path, kind: str) -> None:
    run = named(few, tmp_path / "run", HOSTILE[kind])
    page = report([run], pictures=kind in ("mathtext", "dollar", "other script"))
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 4_000_000
    label = display_name(HOSTILE[kind])
    assert label in load([run]).models
    assert label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary([run]))
    said = console.export_text()
    assert max(map(len, said.splitlines())) <= 80
    assert "\x07" not in said


@pytest.mark.slow
def test_bytes_that_are_no_text_do_not_hide_a_run(few: Path, tmp_path: Path) -> None:
    run = shutil.copytree(few, tmp_path / "run")
    whole = len(load([run]).data)
    store = Store(run)
    store.db.execute("UPDATE trials SET output = CAST(X'ff41' AS TEXT), task = CAST(task || X'ff' AS TEXT)")
    store.close()
    assert len(load([run]).data) == whole
    assert "�" in report([run], pictures=False).read_text(encoding="utf-8")


@given(st.text(alphabet=st.characters(), max_size=300))
def test_a_shown_name_is_short_and_printable(name: str) -> None:
    label = display_name(name)
    assert len(label) <= LONGEST_NAME + 9
    assert "\n" not in label
    label.encode("utf-8")
    assert display_name(label) == label, "what can be shown is shown as it is"


@given(
    st.lists(st.text(alphabet=st.sampled_from("ab\n\x00\ud800 "), min_size=60, max_size=90), unique=True, min_size=2, max_size=2)
)
def test_two_names_stay_two(names: Any) -> None:
    assert display_name(names[0]) != display_name(names[1])


def test_an_ordinary_name_is_left_alone() -> None:
    assert display_name("google/recurrentgemma-2b-it (bfloat16)") == "google/recurrentgemma-2b-it (bfloat16)"
    assert display_name("a" * 100).startswith("a" * 30)
    assert display_name("b" * 100 + "step-1000").endswith("step-1000")
