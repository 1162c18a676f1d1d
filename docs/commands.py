"""Write docs/commands.md from the command line itself: python docs/commands.py"""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer.main

from needlework.cli import app

PAGE = Path(__file__).resolve().parent / "commands.md"
HEAD = """# Commands

Every command and its options, as `needlework COMMAND --help` shows them. `--help` on any command
ends with an example. Exit codes are 0 (done), 1 (something failed, as each command says), 2 (bad
input) and 130 (stopped).
"""


def page() -> str:
    """Return the page's text."""
    group: Any = typer.main.get_command(app)
    parts = [HEAD]
    for name, command in group.commands.items():
        text, _, example = cleandoc(command.help or "").partition("Example: ")
        parts.append(f"## {name}\n\n{text.strip()}\n")
        if example:
            parts.append(f"```\n{example.strip().strip('`')}\n```\n")
        rows = [row for parameter in command.params if (row := _row(parameter)) is not None]
        if rows:
            parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _row(parameter: Any) -> str | None:
    if parameter.name == "help":
        return None
    names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{(parameter.metavar or parameter.name).upper()}`"
    value = parameter.default
    values = (
        [] if value is None or value is False or value == "" or callable(value) else value if isinstance(value, list) else [value]
    )
    default = ", ".join(f"`{one}`" for one in values)
    meaning = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {names} | {'required' if parameter.required else default} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
