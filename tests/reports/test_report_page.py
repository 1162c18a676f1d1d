"""The page: whole, safe, small, and honest about what was not run."""

from __future__ import annotations

import builtins
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import synthetic
from rich.console import Console

from needlework import explain
from needlework.analysis.reader import load
from needlework.analysis.verdicts import RULES
from needlework.errors import NeedleworkError
from needlework.experiments import plan as plans
from needlework.reports import report, summary, tables
from needlework.reports.figures import FIGURES
from needlework.reports.page import PAPER, script_json
from needlework.results import Store


class Outline(HTMLParser):
    """Checks that elements close in order and collects what matters."""

    VOID = {"meta", "col", "rect", "line", "circle", "br", "polygon", "polyline"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.scripts += tag == "script"
        self.ids += [attributes["id"]] if attributes.get("id") else []
        self.links += [attributes["href"]] if tag == "a" and attributes.get("href") else []
        self.outside += [attributes[k] or "" for k in ("src", "href") if str(attributes.get(k, "")).startswith(("http", "//"))]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def outline(path: Path) -> Outline:
    parser = Outline()
    parser.feed(path.read_text(encoding="utf-8"))
    assert parser.open == []
    return parser


def test_the_page_is_whole_and_needs_nothing_else(page: Path) -> None:
    parsed = outline(page)
    assert parsed.outside == [PAPER], "a link to the paper and nothing that a browser would load"
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {link[1:] for link in parsed.links if link.startswith("#")} <= set(parsed.ids)
    assert page.stat().st_size < 8_000_000
    sections = "findings models heads needles exposure dissociation memory head-map context layouts tasks method"
    assert set(sections.split()) <= set(parsed.ids)


def test_every_key_of_a_figure_has_its_trials(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))  # type: ignore[union-attr]
    keys = set(re.findall(r'data-k="(\w+)"', text))
    assert keys == set(data["cells"])
    for cell in data["cells"].values():
        assert 0 < len(cell["trials"]) <= min(20, cell["n"])
    assert all(0 <= i < len(data["trials"]) for cell in data["cells"].values() for i in cell["trials"])


@pytest.mark.slow
def test_answers_cannot_leave_their_place(hostile: Path) -> None:
    text = hostile.read_text(encoding="utf-8")
    parsed = outline(hostile)
    assert parsed.scripts == 2
    assert "<script>window.pwned" not in text
    assert "onerror=window.pwned" in text  # there, as data
    assert "<img" not in text
    assert "\u2028" not in text


def test_model_names_are_text(tmp_path: Path) -> None:
    synthetic.write(tmp_path, ("tiny-mamba",), per_cell=1)
    store = Store(tmp_path)
    bad = "<b>m</b>{{data}}\"'"
    store.db.execute("UPDATE trials SET model = ?", (bad,))
    store.set_meta("models", {bad: store.meta("models")["tiny-mamba"]})
    store.close()
    text = report([tmp_path], pictures=False).read_text(encoding="utf-8")
    assert "<b>m</b>" not in text
    assert "&lt;b&gt;m&lt;/b&gt;{{data}}&#34;" in text


@pytest.mark.parametrize("text", ["</script>", "<!--", "\u2028", "\u2029", "&lt;", "]]>", "\ud800"])
def test_script_json_is_safe_and_comes_back(text: str) -> None:
    made = script_json({"a": text})
    assert not set(made) & set("<>&\u2028\u2029")
    assert json.loads(made)["a"] == ("?" if text == "\ud800" else text)


@pytest.mark.slow
def test_no_block_only_says_that_something_was_not_run(tmp_path: Path) -> None:
    """What was not run is a cell of the picture; a claim that nobody was asked about is named below it, with its command."""
    synthetic.write(tmp_path / "m", ("tiny-griffin", "tiny-mamba"), per_cell=1)
    store = Store(tmp_path / "m")
    store.db.execute("DELETE FROM trials WHERE intervention LIKE '%expose%' OR intervention LIKE '%swap%'")
    store.close()
    text = report([tmp_path / "m"], pictures=False).read_text(encoding="utf-8")
    assert "This was not run" not in text
    assert '<section id="exposure">' not in text
    assert '<section id="layouts">' in text
    assert 'id="claim-exposure"' not in text
    assert "<code>needlework run 04 --model MODEL --out DIR</code>" in text
    assert "This model has no" not in text, "the picture says it"


def test_every_claim_has_its_plan_and_every_figure_its_link() -> None:
    assert {rule.plan for rule in RULES} <= set(plans.plan_names())
    assert len({figure.link for figure in FIGURES.values()}) == len(FIGURES)


def test_every_column_is_explained(run: Path) -> None:
    frame = load([run])
    for table in (tables.models, tables.scores, tables.knowledge, tables.contrasts):
        for column in table(frame).columns:
            assert explain.explain(column), column


@pytest.mark.slow
def test_two_runs_side_by_side(tmp_path: Path, run: Path) -> None:
    other = synthetic.write(tmp_path / "second", ("tiny-jamba",), per_cell=1)
    store = Store(other)
    store.set_meta("models", {"tiny-jamba": {"anatomy": synthetic.anatomy("tiny-jamba"), "weights": "retrained"}})
    store.close()
    path = report([run, other], tmp_path / "both", pictures=False)
    assert path == tmp_path / "both" / "report.html"
    assert "tiny-jamba (second)" in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_same_run_gives_the_same_page(run: Path, page: Path, tmp_path: Path) -> None:
    assert report([run], tmp_path, pictures=False).read_bytes() == page.read_bytes()


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NeedleworkError, match="holds no run"):
        report([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_every_figure(tmp_path: Path) -> None:
    synthetic.write(tmp_path, ("tiny-mamba",), per_cell=1)
    report([tmp_path])
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"needles.png", "needles.svg", "layouts.png", "layouts.svg"} <= names
    assert (tmp_path / "figures" / "needles.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".html", ".png", ".svg"])
def test_a_full_disk_leaves_the_report_of_before(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.write(tmp_path, ("tiny-mamba",), per_cell=1)
    report([tmp_path])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.suffix in (".html", ".png", ".svg")}
    real = io.open

    def full(path: Any, *args: Any, **options: Any) -> Any:
        file = real(path, *args, **options)
        if not str(path).endswith(".half") or ending not in str(path):
            return file
        file.close()
        return real("/dev/full", *args, **options)  # every write ends with "no space left on device"

    monkeypatch.setattr(io, "open", full)
    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(NeedleworkError, match=r"cannot write the report .*No space left"):
        report([tmp_path])
    assert before == {path: path.read_bytes() for path in before}
    assert [path for path in tmp_path.rglob("*") if path.name.endswith(".half")] == []


def test_summary_in_the_terminal(run: Path) -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary([run]))
    text = console.export_text()
    assert "Attention does the retrieving" in text
    assert "tiny-jamba" in text
    assert "no heads" in text


def test_the_summary_cuts_neither_a_name_nor_a_verdict(run: Path) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary([run]))
    text = console.export_text().replace("\u00a0", " ")
    assert "…" not in text
    assert all(name in text for name in ("tiny-griffin", "tiny-jamba", "tiny-mamba", "● supported", "does not apply"))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_a_report_needs_no_torch(run: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from needlework.reports import report;"
    code += f"report([Path({str(run)!r})], Path({str(tmp_path)!r}), pictures=False); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_playground_beside_the_report_is_linked(run: Path, tmp_path: Path) -> None:
    link = '<a href="play.html">Playground</a>'
    assert link not in report([run], tmp_path, pictures=False).read_text(encoding="utf-8")
    (tmp_path / "play.html").write_text("")
    assert link in report([run], tmp_path, pictures=False).read_text(encoding="utf-8")
