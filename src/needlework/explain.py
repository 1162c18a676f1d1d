"""Look up a word of needlework: interventions, tasks, methods, rules, columns, figures, plan keys, commands, Python names.

The sources are the pages in docs/, which a wheel contains as `needlework/pages` (setup.py copies them), and the docstrings of
interventions and of what `nw` exports.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from needlework.analysis.verdicts import RULES
from needlework.errors import NeedleworkError, short_repr

PACKAGE = Path(__file__).parent
REFERENCE = (
    "method",
    "plans",
    "heads",
    "report",
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
    "commands",
)
MOST_NEAR = 3  # names that a message about an unknown one suggests
_NAME = re.compile(r"`([A-Za-z][\w-]*)")
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Entry:
    """One documented thing: a section of a page, a row of one of its tables, or a docstring."""

    names: tuple[str, ...]
    page: str
    section: str
    title: str
    text: str  # Markdown

    def to_dict(self) -> dict[str, str]:
        return {"title": self.title, "text": self.text, "page": self.page, "section": self.section}


def pages_folder() -> Path:
    """Return the folder of the documentation's pages, in a wheel or in a clone."""
    folder = next((f for f in (PACKAGE / "pages", PACKAGE.parents[1] / "docs") if (f / "method.md").exists()), None)
    if folder is None:
        raise NeedleworkError("this installation has no documentation; install needlework from a wheel or from a clone")
    return folder


@cache
def entries() -> tuple[Entry, ...]:
    """Read all entries: those of the reference pages, in their order, then options of interventions."""
    folder = pages_folder()
    pages = [folder / f"{name}.md" for name in REFERENCE]
    found = [entry for page in pages if page.exists() for entry in _page(page.stem, page.read_text(encoding="utf-8"))]
    return *found, *_intervention_options()


def _intervention_options() -> Iterator[Entry]:
    """Yield an entry for each option of each shipped intervention, from the docstring of its class."""
    from needlework.interventions.base import _REGISTRY

    for name, cls in _REGISTRY.items():
        if not cls.__module__.startswith("needlework."):
            continue
        _, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        for option, text in re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", attributes, re.MULTILINE):
            yield Entry((option,), "interventions", name, f"{name}({option}=...)", " ".join(text.split()))


def _python_name(name: str) -> list[Entry]:
    """Return the signature and docstring of what `nw` exports under this name; nothing if it does not."""
    import needlework as nw

    name = name.removeprefix("nw.")
    found = getattr(nw, name) if name in dir(nw) else None
    if not callable(found) or not (text := inspect.getdoc(found)):
        return []
    signature = "" if isinstance(found, type) else re.sub(r"<function (\w+) at \w+>", r"\1", str(inspect.signature(found)))
    return [Entry((name,), "Python", "nw", f"nw.{name}", f"```\nnw.{name}{signature}\n\n{text}\n```")]


def _page(page: str, text: str) -> Iterator[Entry]:
    """Yield the sections whose heading is a name or a word, and the rows of tables whose first cell has a name."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", lambda block: block[0].replace("#", "\0"), text, flags=re.DOTALL)  # comments are no headings
    text = re.sub(rf"docs/({'|'.join(REFERENCE)})\.md", r"`needlework explain \1`", text)  # no wheel has docs/
    first_of_page: tuple[str, ...] = (page,)  # another name of the page's first section
    for heading, body in re.findall(r"^#+ +(.+)\n((?:(?!#+ ).*\n?)*)", text, re.MULTILINE):
        body = body.replace("\0", "#").strip()
        words = re.sub(r"^(an?|the|every) ", "", heading.lower())
        names = tuple(_NAME.findall(heading)) or tuple(dict.fromkeys([words, words.partition(":")[0]]))
        if body:
            yield Entry((*first_of_page, *names), page, heading, heading, body)
            first_of_page = ()
        for table in re.findall(r"(?:^\|.*\n?)+", body, re.MULTILINE):
            head, _, *rows = [[cell.strip() for cell in _CELL.split(line.strip())[1:-1]] for line in table.strip().splitlines()]
            for first, *rest in rows:
                if page == "commands":
                    named: tuple[str, ...] = tuple(re.findall(r"`--([\w-]+)`", first))
                elif page == "report":
                    named = tuple(name.partition(" (")[0] for name in re.findall(r"`([^`]+)`", first))
                elif head[0] == "rule":
                    claims = {str(rule.number): rule.claim for rule in RULES}
                    named = (f"rule {first}", claims[first]) if first else ()
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
    written = re.split(r"[(+]", topic.strip().removeprefix("needlework "), maxsplit=1)[0].strip()
    name = _normal(written)
    arguments = re.findall(r"(\w+)\s*=\s*['\"]?(\w+)", topic)
    found = [entry for entry in entries() if name in map(_normal, entry.names)] or _python_name(written)
    if not found:
        known = {_normal(shown) for entry in entries() for shown in entry.names}
        near = " or ".join(map(repr, get_close_matches(name, known, n=MOST_NEAR, cutoff=0)))
        raise NeedleworkError(
            f"nothing is documented as {short_repr(topic)}; did you mean {near}?"
            " `needlework explain` without an argument lists all names"
        )
    exact = [e for e in found if arguments and all(f"{key}={value}" in e.title.replace('"', "") for key, value in arguments)]
    return exact or found


def _normal(name: str) -> str:
    """KeepHeads and keep_heads are one name; so are `few heads` and `few-heads`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s-]+", "_", snake.lower())
