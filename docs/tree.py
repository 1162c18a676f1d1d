"""Writes the tree of docs/architecture.md: every file of the package with the first sentence of its docstring.

python docs/tree.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "needlework"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree -->\n```\n", "```\n<!-- end of tree -->"


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    head, dot, _ = text.partition(". ")
    return head + "." if dot else text


def tree(folder: Path = PACKAGE, indent: str = "") -> str:
    """Files first, then folders, each in alphabetical order; a folder says what its __init__ says."""
    lines = []
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    for path in files:
        lines.append(f"{indent}{path.name:<{24 - len(indent)}} {sentence(path)}\n")
    for path in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        lines.append(f"{indent}{path.name + '/':<{24 - len(indent)}} {sentence(path / '__init__.py')}\n")
        lines.append(tree(path, indent + "  "))
    return "".join(lines)


def page() -> str:
    """The page with its tree as it must be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tree() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
