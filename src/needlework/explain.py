"""Look up a word of needlework in its documentation: interventions, tasks, methods, rules, columns, plan keys.

The pages in docs/ are the only source. A wheel contains them as `needlework/pages` (setup.py copies them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from needlework.errors import NeedleworkError, did_you_mean, short_repr

PACKAGE = Path(__file__).parent
REFERENCE = (
    "method",
    "plans",
    "heads",
    "store",
    "recurrent",
    "patching",
    "pruning",
    "ability",
    "trust",
    "scale",
    "zoo",
    "play",
    "glossary",
)
_NAME = re.compile(r"`([A-Za-z][\w-]*)")
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Entry:
    """One documented thing: a section of a page, or a row of one of its tables."""

    names: tuple[str, ...]
    page: str
    section: str
    title: str
    text: str  # Markdown

    def to_dict(self) -> dict[str, str]:
        return {"title": self.title, "text": self.text, "page": f"docs/{self.page}.md", "section": self.section}


def pages_folder() -> Path:
    """Return the folder of the documentation's pages, in a wheel or in a clone."""
    folder = next((f for f in (PACKAGE / "pages", PACKAGE.parents[1] / "docs") if (f / "method.md").exists()), None)
    if folder is None:
        raise NeedleworkError("this installation has no documentation; install needlework from a wheel or from a clone")
    return folder


@cache
def entries() -> tuple[Entry, ...]:
    """Read all entries of the reference pages, in their order."""
    folder = pages_folder()
    pages = [folder / f"{name}.md" for name in REFERENCE]
    return tuple(entry for page in pages if page.exists() for entry in _page(page.stem, page.read_text(encoding="utf-8")))


def _page(page: str, text: str) -> Iterator[Entry]:
    """Yield the sections whose heading is a name or a word, and the rows of tables whose first cell has a name."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", lambda block: block[0].replace("#", "\0"), text, flags=re.DOTALL)  # comments are no headings
    for heading, body in re.findall(r"^#+ +(.+)\n((?:(?!#+ ).*\n?)*)", text, re.MULTILINE):
        body = body.replace("\0", "#").strip()
        names = tuple(_NAME.findall(heading)) or (re.sub(r"^(an?|the|every) ", "", heading.lower()),)
        if body:
            yield Entry(names, page, heading, heading, body)
        for table in re.findall(r"(?:^\|.*\n?)+", body, re.MULTILINE):
            head, _, *rows = [[cell.strip() for cell in _CELL.split(line.strip())[1:-1]] for line in table.strip().splitlines()]
            for first, *rest in rows:
                if head[0] == "rule":
                    named: tuple[str, ...] = (f"rule {first}",) if first else ()
                elif head[0] in ("law", "field"):
                    named = tuple(part.strip() for part in first.split(","))
                else:
                    named = tuple(_NAME.findall(first))
                if named:
                    cells = [f"**{name}:** {cell}" for name, cell in zip(head[1:], rest, strict=False) if cell]
                    yield Entry(named, page, heading, named[0] if head[0] == "rule" else first, "\n\n".join(cells))


def explain(topic: str) -> list[Entry]:
    """Return what the documentation says about a name, a text of an intervention, or a rule ("rule 2").

    Arguments in an intervention's text select the rows that describe exactly them, if there are any.

    Raises:
        NeedleworkError: Nothing is documented under this name; names the nearest ones.
    """
    name = _normal(re.split(r"[(+]", topic.strip(), maxsplit=1)[0])
    arguments = re.findall(r"(\w+)\s*=\s*['\"]?(\w+)", topic)
    found = [entry for entry in entries() if name in map(_normal, entry.names)]
    if not found:
        known = [shown for entry in entries() for shown in entry.names]
        raise NeedleworkError(
            f"nothing is documented as {short_repr(topic)}; {did_you_mean(name, map(_normal, known), cutoff=0)}"
            " `needlework explain` without an argument lists all names"
        )
    exact = [e for e in found if arguments and all(f"{key}={value}" in e.title.replace('"', "") for key, value in arguments)]
    return exact or found


def _normal(name: str) -> str:
    """KeepHeads and keep_heads are one name; so are `few heads` and `few-heads`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s-]+", "_", snake.lower())
