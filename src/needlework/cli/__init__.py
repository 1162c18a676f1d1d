"""The command line: one verb per command."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import needlework as nw
from needlework.cli import models, reference, runs  # noqa: F401  # each registers its commands, in the order of `--help`
from needlework.cli.options import EXAMPLES, app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"needlework {nw.__version__}")
        raise typer.Exit


@app.callback(epilog="\n\n".join(["Examples:", *(f"`{example}`" for example in EXAMPLES)]))
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Ablate attention heads, recurrent layers, context and memory of hybrid language models, and measure what they retrieve."""


def main() -> None:
    """Run the command that `sys.argv` names."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(app())
