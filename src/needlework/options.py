"""What commands share: options with their help, errors as exit codes, tables. `cli.py` has the commands themselves."""

from __future__ import annotations

import functools
import inspect
import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperCommand

from needlework.errors import NeedleworkError, shown
from needlework.terminal import say

FAILED, BAD_INPUT, STOPPED = 1, 2, 130
QUIET_STOP = "stop_quietly"  # the handler of `__main__`, until a command begins
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
EXAMPLES: list[str] = []  # one for each command, in the order of the commands
F = TypeVar("F", bound=Callable[..., None])
MODEL_HELP = "A directory, a .gguf file, a hub id, or a name from `needlework zoo`."
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="A plan in YAML, or a shipped one's name (`needlework plans`).")]
PlanModels = Annotated[
    list[str],
    typer.Option("--model", help="Instead of the plan's models; may be repeated. NAME=PATH gives it a name for the tables."),
]
Fast = Annotated[bool, typer.Option("--fast", help="Take the plan's reduced grid.")]
Interventions = Annotated[list[str], typer.Option("--intervene", help="An intervention in text form; may be repeated.")]
Plugins = Annotated[
    list[Path], typer.Option("--plugin", help="A Python file that registers interventions or tasks; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
_MEMORY = "Most memory for prompts and answers, e.g. 8GiB, beside weights and program. Default: half of what is free."
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Try trials again that failed.")]
Memory = Annotated[str | None, typer.Option(help=_MEMORY)]
Out = Annotated[Path, typer.Option(help="Directory to write into.")]

_PANEL = "How models are loaded (of a plan: all of them, whatever it says)"
OutUnlessDry = Annotated[Path | None, typer.Option(help="Directory to write into.")]
_option = functools.partial(typer.Option, rich_help_panel=_PANEL)
Window = Annotated[str | None, _option(help="RecurrentGemma's window rule: transformers (default) or deepmind.")]
_LOADING = {
    "device": Annotated[str | None, _option(help="cpu (default), cuda, cuda:1, mps.")],
    "dtype": Annotated[str | None, _option(help="float32 (default), bfloat16, float16, or auto: what the checkpoint names.")],
    "window": Window,
    "kernels": Annotated[str | None, _option(help="fast (default), or stock: transformers' own scans.")],
}
_THREADS = Annotated[int | None, _option(min=1, max=4096, help="Processor threads that torch may use.")]
LoadingOptions = dict[str, Any]  # those of _LOADING that were given: a command with such a parameter has all these options
_CLUSTER_PANEL = "A cluster of several workers (docs/scale.md)"
_ADDRESS = "Ask workers of a Ray cluster: local (default) is made for this run, auto or HOST:PORT is there."
_CLUSTER = {
    "ray": Annotated[str | None, typer.Option(metavar="[ADDRESS]", rich_help_panel=_CLUSTER_PANEL, help=_ADDRESS)],
    "workers": Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_CLUSTER_PANEL, help="At most so many. Default: as there is room, now or later."),
    ],
    "gpus_per_worker": Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_CLUSTER_PANEL, help="More than 1 where a model is larger than a GPU.")
    ],
}
ClusterOptions = Any  # a Cluster if --ray was given, else None: a command with such a parameter `cluster` has these options


def command(example: str, name: str | None = None) -> Callable[[F], F]:
    """Register a command; its help ends with an example."""
    EXAMPLES.append(example)

    def decorate(function: F) -> F:
        function.__doc__ = f"{function.__doc__}\n\nExample: `{example}`"
        body = _with_loading(function) if "loading" in inspect.signature(function).parameters else function

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            with told():
                body(*args, **kwargs)

        app.command(name, cls=_Command)(run)
        return function

    return decorate


class _Command(TyperCommand):
    """A command whose option --ray may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--ray" not in args:
            return super().parse_args(ctx, args)
        from needlework.experiments.cluster import LOCAL, is_address

        after = args.index("--ray") + 1
        following = "".join(args[after : after + 1])
        if following and is_address(following):
            return super().parse_args(ctx, args)
        try:
            return super().parse_args(ctx, [*args[:after], LOCAL, *args[after:]])
        except Exception as error:  # typer has no public name for a wrong use of a command
            if "unexpected extra argument" not in str(error).lower() or following.startswith("-"):
                raise
            raise typer.BadParameter(
                f"--ray {shown(following)} is no address of a Ray cluster, and without it there is an argument too many; give"
                " --ray alone or --ray local (a cluster of this machine), --ray auto, or --ray HOST:PORT of its head node",
                ctx,
            ) from None


@contextmanager
def told() -> Iterator[None]:
    """What a command was refused, as a line and an exit code. Anything else is a fault of ours, and keeps its traceback."""
    if getattr(signal.getsignal(signal.SIGINT), "__name__", "") == QUIET_STOP:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on, a stop is passed on to whoever must tidy up
    try:
        yield
    except NeedleworkError as error:
        say(f"error: {error}", style="red")
        raise typer.Exit(BAD_INPUT) from None
    except OSError as error:  # a name that is too long, a place that may not be written, a disk that is full
        where = f" ({shown(str(error.filename))})" if error.filename else ""
        say(f"error: {error.strerror or error}{where}; give another path, or make room there", style="red")
        raise typer.Exit(BAD_INPUT) from None
    except MemoryError as error:
        why = f" ({error})" if str(error) else ""
        say(f"error: out of memory{why}; choose a smaller model or plan, or a smaller --memory", style="red")
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(STOPPED) from None


def _with_loading(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `loading` is filled from options: typer sees those in its place."""

    @functools.wraps(function)
    def filled(*, threads: int | None, **options: Any) -> None:
        given = {key: value for key in _LOADING if (value := options.pop(key)) is not None}
        if clustered:
            options["cluster"] = _cluster(threads, *(options.pop(key) for key in _CLUSTER))
        with _threads(threads):
            function(loading=given, **options)

    signature = inspect.signature(function, eval_str=True)
    clustered = "cluster" in signature.parameters
    own = [parameter for parameter in signature.parameters.values() if parameter.name not in ("loading", "cluster")]
    kinds = {**(_CLUSTER if clustered else {}), **_LOADING, "threads": _THREADS}
    shared = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kinds[key]) for key in kinds]
    filled.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    return filled


def _cluster(threads: int | None, address: str | None, workers: int | None, gpus: int | None) -> Any:
    if address is None:
        if workers or gpus:
            raise NeedleworkError("--workers and --gpus-per-worker part a cluster; give --ray, too")
        return None
    from needlework.experiments.cluster import Cluster

    return Cluster(address, workers, gpus or 1, threads or 1)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    if count is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_bytes(text: str | None) -> int | None:
    """ "8GiB" -> bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?|\.\d+)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise NeedleworkError(f"--memory {shown(text)} is no amount of memory; write e.g. 8GiB or 500MiB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def show(table: Any, data: Any = None, as_json: bool = False) -> None:
    """Print a table as wide as its words need (in a narrow terminal lines run over, and no name is cut), or its data as JSON."""
    if as_json:
        return typer.echo(json.dumps(data, indent=1))
    console = Console()
    console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).minimum)
    return console.print(table)


def use(plugins: list[Path]) -> None:
    """Make the interventions and tasks of some files known."""
    from needlework.plugins import load

    for file in dict.fromkeys(plugins):
        if not load(file):
            say(f"{file} registers nothing; its classes need @needlework.register or @needlework.tasks.task", style="yellow")
