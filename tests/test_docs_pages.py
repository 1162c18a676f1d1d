"""Pages of docs/ that are written by a command are what the command writes now, and the site names every page."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import yaml

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_commands_is_current() -> None:
    written = runpy.run_path(str(DOCS / "commands.py"))["page"]()
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == written, "run `python docs/commands.py`"


def test_diagrams_are_current(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(DOCS / "pictures.py"))
    for name in ("idea", "phases", "sites"):
        drawn[name].__globals__["IMAGES"] = tmp_path
        drawn[name]()
        assert (DOCS / "images" / f"{name}.svg").read_text() == (tmp_path / f"{name}.svg").read_text()


def test_every_page_is_in_the_navigation() -> None:
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["site_name"] == "needlework"
    assert set(re.findall(r": ([\w-]+\.md)", text)) == {page.name for page in DOCS.glob("*.md")}
