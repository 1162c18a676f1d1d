"""Print every file of the package with the first sentence of its docstring: python docs/tree.py"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "needlework"


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    head, dot, _ = text.partition(". ")
    return head + "." if dot else text


def tree(folder: Path = PACKAGE, indent: str = "") -> str:
    """List files first, then folders, each in alphabetical order; a folder shows the summary of its __init__."""
    lines = []
    for path in sorted(path for path in folder.glob("*.py") if path.name != "__init__.py"):
        lines.append(f"{indent}{path.name:<{24 - len(indent)}} {summary(path)}\n")
    for path in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        lines.append(f"{indent}{path.name + '/':<{24 - len(indent)}} {summary(path / '__init__.py')}\n")
        lines.append(tree(path, indent + "  "))
    return "".join(lines)


if __name__ == "__main__":
    print(tree(), end="")
