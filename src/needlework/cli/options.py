"""What commands share: options with their help, errors as exit codes, tables, plug-ins."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO, TypeVar

import typer
from rich.console import Console, RenderableType
from typer.core import TyperCommand

from needlework.errors import NeedleworkError, short_repr
from needlework.files import write_error
from needlework.terminal import say, wrap

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
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts on stdout, and everything else on stderr.")]
_json_output: ContextVar[TextIO | None] = ContextVar("_json_output", default=None)  # stdout of a command with --json
_MEMORY = "Most memory for prompts and answers, e.g. 8GiB, beside weights and program. Default: half of what is free."
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Try trials again that failed.")]
Memory = Annotated[str | None, typer.Option(help=_MEMORY)]
Out = Annotated[Path, typer.Option(help="Directory to write into.")]
OutUnlessDry = Annotated[Path | None, typer.Option(help="Directory to write into.")]
RunDirectory = Annotated[Path, typer.Argument(help="A directory that `needlework run` wrote.")]


def _load_plugins(files: list[Path]) -> list[Path]:
    """Run plug-in files, which register interventions, tasks and head scores; warn about those that register nothing."""
    if not files:  # what plug-ins may register takes a while to import
        return files
    with exit_on_error():
        from needlework.plugins import load

        for file in dict.fromkeys(files):
            if not load(file):
                cure = "its classes need @needlework.register or @needlework.tasks.task, its scores @needlework.head_score()"
                say(f"{file} registers nothing; {cure}", style="yellow")
    return files


_PLUGIN = "A Python file that registers interventions, tasks or head scores; may be repeated."
Plugins = Annotated[list[Path], typer.Option("--plugin", callback=_load_plugins, help=_PLUGIN)]


def _set_threads(context: typer.Context, count: int | None) -> int | None:
    """Limit torch's threads until the command ends."""
    if count is not None:
        import torch

        context.call_on_close(functools.partial(torch.set_num_threads, torch.get_num_threads()))
        torch.set_num_threads(count)
    return count


_loading = functools.partial(typer.Option, rich_help_panel="How models are loaded (of a plan: all of them, whatever it says)")
Device = Annotated[str | None, _loading(help="cpu (default), cuda, cuda:1, mps.")]
Dtype = Annotated[str | None, _loading(help="float32 (default), bfloat16, float16, or auto: what the checkpoint names.")]
Window = Annotated[str | None, _loading(help="RecurrentGemma's window rule: transformers (default) or deepmind.")]
Kernels = Annotated[str | None, _loading(help="fast (default), or stock: transformers' own scans.")]
Threads = Annotated[int | None, _loading(min=1, max=4096, callback=_set_threads, help="Processor threads that torch may use.")]
_cluster = functools.partial(typer.Option, rich_help_panel="A cluster of several workers (`needlework explain hours`: estimates)")
_ADDRESS = "Ask workers of a Ray cluster: local (default) is made for this run, auto or HOST:PORT is there."
Ray = Annotated[str | None, _cluster(metavar="[ADDRESS]", help=_ADDRESS)]
Workers = Annotated[int | None, _cluster(min=1, help="At most so many. Default: as there is room, now or later.")]
GpusPerWorker = Annotated[int | None, _cluster(min=1, help="More than 1 where a model is larger than a GPU.")]


def read_loading(
    device: Device = None, dtype: Dtype = None, window: Window = None, kernels: Kernels = None, threads: Threads = None
) -> dict[str, Any]:
    """Return the options that were given, as keyword arguments of `nw.load`; --threads has taken effect already."""
    options = {"device": device, "dtype": dtype, "window": window, "kernels": kernels}
    return {name: value for name, value in options.items() if value is not None}


def read_cluster(ray: Ray = None, workers: Workers = None, gpus_per_worker: GpusPerWorker = None, threads: Threads = None) -> Any:
    """Return the Cluster that --ray asks for, or None without --ray."""
    if ray is None:
        if workers or gpus_per_worker:
            raise NeedleworkError("--workers and --gpus-per-worker part a cluster; give --ray, too")
        return None
    from needlework.experiments.ray_executor import Cluster

    return Cluster(ray, workers, gpus_per_worker or 1, threads or 1)


@dataclass(frozen=True)
class OptionGroup:
    """Annotation of a command's argument that `read` makes of several options: the parameters of `read`."""

    read: Callable[..., Any]


Loading = Annotated[dict[str, Any], OptionGroup(read_loading)]
OptionalCluster = Annotated[Any, OptionGroup(read_cluster)]


def command(example: str, name: str | None = None) -> Callable[[F], F]:
    """Register a command; its help ends with an example. An argument that is an OptionGroup becomes the options of the group."""
    EXAMPLES.append(example)

    def decorate(function: F) -> F:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nExample: `{example}`"
        groups: dict[str, Callable[..., Any]] = {}
        options: dict[str, dict[str, inspect.Parameter]] = {}  # by argument
        for argument in inspect.signature(function, eval_str=True).parameters.values():
            options[argument.name] = {argument.name: argument}
            for group in getattr(argument.annotation, "__metadata__", ()):
                if isinstance(group, OptionGroup):
                    groups[argument.name] = group.read
                    options[argument.name] = dict(inspect.signature(group.read, eval_str=True).parameters)

        @functools.wraps(function)
        def run(**given: Any) -> None:
            with exit_on_error(), only_json() if given.get("as_json") else nullcontext():
                made = {name: read(**{option: given[option] for option in options[name]}) for name, read in groups.items()}
                function(**{name: made[name] if name in made else given[name] for name in options})

        flat: dict[str, inspect.Parameter] = {}
        for option, part in (pair for parts in options.values() for pair in parts.items()):
            flat.pop(option, None)  # an option of two groups is shown with the latter
            flat[option] = part
        parameters = [part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in flat.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name, cls=_Command)(run)
        return function

    return decorate


NARROW = 80  # columns; below, the panels of rich cut the names of options


class _Command(TyperCommand):
    """A command whose option --ray may stand without an address, and whose help fits narrow terminals."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = copy(self)
        if (width := Console().width) < NARROW:
            formatter.width = width - 2
            shown.rich_markup_mode = None
            shown.help = (self.help or "").replace("\n\nExample:", "\n\n\b\nExample:")  # not wrapped, so that it can be copied
        super(_Command, shown).format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--ray" not in args:
            return super().parse_args(ctx, args)
        from needlework.experiments.ray_executor import LOCAL, is_address

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
                f"--ray {short_repr(following)} is no address of a Ray cluster, and without it there is an argument too"
                " many; give"
                " --ray alone or --ray local (a cluster of this machine), --ray auto, or --ray HOST:PORT of its head node",
                ctx,
            ) from None


def interrupt_after_imports(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not inside an import statement: try again shortly until the import is done.

    Libraries catch exceptions around their imports, and an extension module whose import was interrupted cannot be imported
    again, so that a stop there would become an ImportError. While torch or transformers is imported, no work has begun, so
    the process ends at once.
    """
    for name in ("torch", "transformers"):
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            os._exit(STOPPED)
    at = frame
    while at is not None:
        if at.f_code.co_name == "_find_and_load" and hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, interrupt_after_imports)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
        at = at.f_back
    raise KeyboardInterrupt


@contextmanager
def only_json() -> Iterator[None]:
    """Send all that is printed to stderr, except what `print_json` writes."""
    token = _json_output.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _json_output.reset(token)


def print_json(data: Any) -> None:
    """Print data as JSON on the command's stdout; NaN and infinity become null, which every JSON reader accepts."""
    typer.echo(json.dumps(_json_value(data), indent=1, allow_nan=False), file=_json_output.get())


def _json_value(value: Any) -> Any:
    """Return the value without what JSON cannot hold: NaN and infinity become None, paths become text."""
    if isinstance(value, dict):
        return {name: _json_value(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Convert known errors into a message and an exit code. Anything else is a bug and keeps its traceback."""
    if getattr(signal.getsignal(signal.SIGINT), "__name__", "") == QUIET_STOP:
        signal.signal(signal.SIGINT, interrupt_after_imports)  # from here on, a stop is passed on to whoever must tidy up
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(STOPPED) from None
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        say(f"error: {message}", style="red")
        raise typer.Exit(BAD_INPUT) from None


def _explain(error: Exception) -> str | None:
    """Describe an error that the user can do something about: bad input, the file system, memory, a plug-in of theirs."""
    if isinstance(error, NeedleworkError):
        return str(error)
    if isinstance(error, MemoryError):
        why = f" ({error})" if str(error) else ""
        return f"out of memory{why}; choose a smaller model or plan, or a smaller --memory"
    from needlework.plugins import describe_error

    if message := describe_error(error):
        return message
    fault = error if isinstance(error, OSError) else write_error(error)
    if fault is None:
        return None
    where = f" ({short_repr(str(fault.filename))})" if fault.filename else ""
    return f"{fault.strerror or fault}{where}; give another path, or make room there"


def read_bytes(text: str | None) -> int | None:
    """Return bytes: "8GiB" and "8G" in powers of 1024, "8GB" in powers of 1000."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?B?)\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise NeedleworkError(f"--memory {short_repr(text)} is no amount of memory; write e.g. 8GiB or 8GB")
    return int(float(match[1]) * (1000 if match[3].upper() == "B" else 1024) ** " KMGT".index(match[2].upper() or " "))


def show(shown: RenderableType | Sequence[RenderableType], data: Any = None, as_json: bool = False) -> None:
    """Print data as JSON, or else texts and tables, as wide as the terminal; a word that is wider than it is not cut."""
    if as_json:
        return print_json(data)
    for part in [shown] if isinstance(shown, str) or not isinstance(shown, Sequence) else shown:
        console = Console()
        if isinstance(part, str):
            typer.echo(wrap(part, console.width))
            continue
        console.width = max(console.width, console.measure(part, options=console.options.update(width=10_000)).minimum)
        console.print(part)
    return None
