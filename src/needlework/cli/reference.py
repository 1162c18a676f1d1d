"""Commands that show documentation."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from needlework.cli.options import Json, command, print_json
from needlework.terminal import plain


@command("needlework explain \"ablate_recurrent(site='conv')\"")
def explain(
    topic: Annotated[
        str,
        typer.Argument(
            help="An intervention or its option, task, ranking method, rule ('rule 2'), claim, column, figure, plan key, command"
            " or its option (without --), or Python name; none: list all names."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Print what the documentation says about a name."""
    from rich.markdown import Markdown

    from needlework.explain import entries
    from needlework.explain import explain as look_up

    found = look_up(topic) if topic else list(entries())
    if as_json:
        return print_json([entry.to_dict() for entry in found])
    console = Console()
    if not topic:
        for page in dict.fromkeys(entry.page for entry in found):
            names = dict.fromkeys(name for entry in found if entry.page == page for name in entry.names if len(name.split()) < 4)
            console.print(f"[bold]{page}[/]: {', '.join(names)}\n", highlight=False)
        return None
    for entry in found:
        console.print(Markdown(plain(f"**{entry.title}** ({entry.page}: {entry.section})\n\n{entry.text}\n\n---")))
    return None
