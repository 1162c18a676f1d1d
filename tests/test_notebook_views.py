"""What a notebook shows of values: HTML with escaped text, data frames, and plots without pyplot."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from pydantic import BaseModel

import cases
import needlework as nw
from needlework.anatomy import Head
from needlework.checks import Check
from needlework.observation import HeadRow
from needlework.receipts import Receipt
from needlework.tables import Table

HOSTILE = "<script>\x1b[2J|</b>"


def ranking(**more: Any) -> nw.Ranking:
    scores = {Head(layer, index): float(index - layer) for layer in (2, 5) for index in range(4)}
    return nw.Ranking.by_scores(scores, method="copy_score", **more)


def checkup() -> nw.Checkup:
    checks = (Check("causal", "x", "pass", HOSTILE, 1e-7, 1e-5), Check("window", "x", "does not apply", "no window"))
    return nw.Checkup("Llama", checks, {}, "2026-01-01")


def has_picture(ax: Any) -> bool:
    picture: bytes = ax._repr_png_()
    return isinstance(ax.figure, Figure) and picture.startswith(b"\x89PNG") and len(picture) > 2000


def test_a_table_is_html_with_escaped_text() -> None:
    html = Table(["a<b", "n"], [[HOSTILE, "1"]], HOSTILE, left=["a<b"])._repr_html_()
    assert html.count("&lt;script&gt;\\x1b[2J|&lt;/b&gt;") == 2
    assert "<script>" not in html
    assert '<th style="text-align: left">a&lt;b</th><th style="text-align: right">n</th>' in html


def test_every_value_that_comes_from_others_is_escaped_in_a_notebook() -> None:
    answer = nw.Answer(tokens=(1,), logprobs=(-0.5,), margins=(1.0,), text=HOSTILE, receipt=Receipt(notes=(HOSTILE,)))
    for value in (answer, answer.receipt, ranking(model={"name": HOSTILE}), checkup()):
        html = value._repr_html_()
        assert "<script>" not in html
        assert "&lt;script&gt;" in html


def test_frames_hold_the_numbers() -> None:
    subject = cases.subject("jamba")
    layers = subject.anatomy.frame()
    assert list(layers["kind"]) == [layer.kind for layer in subject.anatomy.layers]
    assert layers["attention_parameters"].sum() == subject.anatomy.attention_parameters
    assert layers["query_heads"].sum() == len(subject.anatomy.heads)
    with nw.observe(subject, "first") as seen:
        spans = [{"first": ((1, 4),)}]
        answer = subject.generate([cases.PROMPT], nw.AblateAttention(phase="decode"), max_new_tokens=3, spans=spans)[0]
    tokens = answer.frame()
    assert tuple(tokens["token"]) == answer.tokens
    assert tuple(tokens["logprob"]) == answer.logprobs
    counts = answer.receipt.frame()
    assert counts["heads_zeroed"].sum() == answer.receipt.total("heads_zeroed") > 0
    assert set(counts["phase"]) == {"prefill", "decode"}
    table = seen.frame()
    assert list(table.columns) == [field.name for field in fields(HeadRow)]
    assert [HeadRow(*row) for row in table[table["phase"] == "decode"].itertuples(index=False)] == seen.table("decode")
    scored = subject.choices([cases.PROMPT], [[(5,), (6, 7)]])[0]
    assert tuple(scored.frame()["logprob"]) == scored.totals
    assert f"best option: {scored.best}" in scored._repr_html_()
    for value in (subject, subject.anatomy, answer, seen):
        assert "<table>" in value._repr_html_()  # type: ignore[attr-defined]
    assert subject.anatomy.architecture in subject._repr_html_()


def test_a_ranking_is_a_frame_and_a_heat_map() -> None:
    one = ranking(evidence={"intervals": {"2.3": [0.5, 1.5]}})
    frame = one.frame()
    assert [Head(*pair) for pair in frame[["layer", "head"]].itertuples(index=False)] == list(one.order)
    assert frame.loc[0, ["place", "score", "low", "high"]].tolist() == [1, 1.0, 0.5, 1.5]
    assert "score" not in nw.Ranking.parse("2.0 2.1").frame()
    ax = one.plot(best=2)
    assert np.array_equal(ax.images[0].get_array(), [[-2, -1, 0, 1], [-5, -4, -3, -2]])
    marked = {(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines}
    assert marked == {(3, 0), (2, 0)}
    assert has_picture(ax)
    assert has_picture(nw.Ranking.parse("2.0 2.1").plot())
    assert "rows 1 to" not in one._repr_html_()


def test_plots_draw_into_given_axes() -> None:
    own = Figure().add_subplot()
    assert ranking().plot(own) is own
    subject = cases.subject("jamba")
    with nw.observe(subject) as seen:
        subject.generate([cases.PROMPT], max_new_tokens=2)
    for ax in (subject.anatomy.plot(), seen.plot(of="entropy", phase="prefill")):
        assert has_picture(ax)
    assert seen.plot(of="entropy").images[0].get_array().max() == seen.frame().query("phase == 'decode'")["entropy"].max()
    with pytest.raises(nw.NeedleworkError, match="did you mean 'entropy'"):
        seen.plot(of="entropi")
    with nw.observe(subject) as nothing, pytest.raises(nw.NeedleworkError, match="nothing was observed in decode"):
        nothing.plot()


def test_a_checkup_is_a_frame() -> None:
    frame = checkup().frame()
    assert list(frame["outcome"]) == ["pass", "does not apply"]
    assert frame["measured"][0] == 1e-7
    assert np.isnan(frame["measured"][1])
    assert "all 1 laws hold" in checkup()._repr_html_()


@pytest.mark.slow
def test_plots_leave_pyplot_alone() -> None:
    code = (
        "import sys, needlework as nw; r = nw.Ranking.parse('2.0 2.1'); r._repr_html_(); print('matplotlib' in sys.modules);"
        " r.plot(); print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\nFalse False\n"


def documented(cls: type) -> set[str]:
    """Return the names in the Attributes section of a class's docstring."""
    _, _, section = inspect.getdoc(cls).partition("Attributes:\n")  # type: ignore[union-attr]
    return set(re.findall(r"^    (\w+): \S", section, re.MULTILINE))


@pytest.mark.parametrize("name", [name for name in nw.__all__ if isinstance(getattr(nw, name), type)])
def test_help_explains_every_field(name: str) -> None:
    cls = getattr(nw, name)
    if issubclass(cls, BaseModel):
        own = set(cls.model_fields)
    elif is_dataclass(cls):
        own = {field.name for field in fields(cls)}
    else:
        own = set(getattr(cls, "_fields", ()))
    assert own <= documented(cls)
    assert name in ("NeedleworkError", "TrialError") or documented(cls)
