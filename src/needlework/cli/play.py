"""The command that opens the playground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import needlework as nw
from needlework.cli.options import Loading, Model, Plugins, command
from needlework.terminal import say


@command("needlework play tiny-griffin")
def play(
    model: Model = "tiny-griffin",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: any free one.")] = 8765,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    export: Annotated[
        Path | None, typer.Option(help="Write the page into one file instead, which needs neither server nor install.")
    ] = None,
    plugin: Plugins = [],  # noqa: B006
    *,
    loading: Loading,
) -> None:
    """Open a page on which parts of a model are switched off, and see how its answer changes.

    The page is served on loopback, for this machine only, until it is stopped with Ctrl+C. docs/play.md describes it.
    """
    from needlework.play.playground import Playground

    if export is not None:
        from needlework.play.export import export as write

        size = write(Playground(nw.load(model, **loading), Path(model).name), export)
        say(f"wrote {export} ({size / 2**20:.1f} MiB)", stderr=False)
        return
    try:
        from needlework.play.server import open_socket, serve
    except ImportError as error:
        raise nw.NeedleworkError(f"the playground needs {error.name}; pip install 'needlework[play]'") from None
    listening = open_socket(port)  # before the model is loaded, which may take long
    with listening:
        playground = Playground(nw.load(model, **loading), model)
        say(f"{model}: answering the tour once, so that the page answers at once")
        playground.warm_up()
        serve(playground, listening, lambda address: say(f"{model}: {address}  (Ctrl+C stops)", stderr=False), open_)
