"""The one table type: the same rows in a terminal, in Markdown and in JSON, whatever their cells hold."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from needlework.reports.page import _environment
from needlework.tables import Table

HOSTILE = "[red]a[/red]\x1b[2J <b>|</b>"


def test_cells_are_text_in_every_format() -> None:
    table = Table(["name", "n"], [[HOSTILE, "1"]], "[bold]title")
    shown = table.to_text(80)
    assert r"[red]a[/red]\x1b[2J <b>|</b>" in shown
    assert "[bold]title" in shown
    assert table.to_markdown().splitlines()[-1].count("\\|") == 1
    html = str(_environment().get_template("macros.html").module.table(table))  # type: ignore[attr-defined]
    assert "&lt;b&gt;|&lt;/b&gt;" in html
    assert "<caption>[bold]title</caption>" in html


def test_captions_and_column_names_are_escaped_in_a_terminal() -> None:
    shown = Table(["n\x1b[2J"], [["1" * 40]], "title\x1b]0;x\x07").to_text(80)
    assert not set("\x1b\x07") & set(shown)
    assert r"n\x1b[2J" in shown
    assert r"title\x1b]0;x\x07" in shown


def test_columns_are_aligned() -> None:
    table = Table(["name", "n"], [["a", "5"], [Text("bb", "red"), "10"]], left=["name"])
    assert table.to_markdown() == "| name | n |\n|---|---:|\n| a | 5 |\n| bb | 10 |"
    lines = table.to_text(80).splitlines()
    assert [line.rstrip() for line in lines if line.startswith(("a", "b"))] == ["a      5", "bb    10"]
    assert table.records() == [{"name": "a", "n": "5"}, {"name": "bb", "n": "10"}]
    assert Table(["a", "b"], [["", "x"]]).to_markdown() == "| a | b |\n|---|---|\n| | x |"


def test_no_name_is_cut_and_aligned_tables_share_widths() -> None:
    long = Table(["name", "n"], [["a" * 90, "1"]])
    assert "a" * 90 in long.to_text(200)
    console = Console(width=40)
    assert console.measure(long, options=console.options.update(width=10_000)).minimum >= 90
    short = Table(["name", "n"], [["b", "1"]], show_header=False, aligned_with=[long])
    assert short.to_text(200).splitlines()[-1].index("1") == long.to_text(200).splitlines()[-1].index("1")
    assert "name" not in short.to_text(200)
