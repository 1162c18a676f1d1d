"""The command line: one verb per command. Each parses, calls one function and prints; nothing heavy is imported before."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from needlework.errors import NeedleworkError
from needlework.terminal import plain, say

FAILED, BAD_INPUT, STOPPED = 1, 2, 130
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Which attention does the retrieving in a hybrid language model, and what is the rest for?",
)
F = TypeVar("F", bound=Callable[..., None])
Model = Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or a name from `needlework zoo`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
_MEMORY = "Most memory for prompts and answers, e.g. 8GiB, beside weights and program. Default: half of what is free."
Memory = Annotated[str | None, typer.Option(help=_MEMORY)]
Out = Annotated[Path, typer.Option(help="Directory to write into.")]


def command(example: str, name: str | None = None) -> Callable[[F], F]:
    """Register a command; its help ends with an example."""

    def decorate(function: F) -> F:
        function.__doc__ = f"{function.__doc__}\n\nExample: `{example}`"

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except NeedleworkError as error:
                say(f"error: {error}", style="red")
                raise typer.Exit(BAD_INPUT) from None
            except KeyboardInterrupt:
                say("stopped")
                raise typer.Exit(STOPPED) from None

        app.command(name)(run)
        return function

    return decorate


def read_bytes(text: str | None) -> int | None:
    """"8GiB" -> bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise NeedleworkError(f"--memory {text!r} is no amount of memory; write e.g. 8GiB or 500MiB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


@command("needlework inspect recurrentgemma-2b")
def inspect(
    model: Model,
    as_json: Json = False,
    window: Annotated[str, typer.Option(help="RecurrentGemma's window rule: transformers or deepmind.")] = "transformers",
) -> None:
    """Show what a model is made of: layers, heads, windows, memory and cost of each side. Weights are not needed."""
    from needlework.inspection import anatomy_of, table

    anatomy = anatomy_of(model, window)
    if as_json:
        typer.echo(json.dumps(anatomy.to_dict(), indent=1))
    else:
        Console().print(table(anatomy))


@command("needlework ask tiny-griffin 'the secret code of ...' --intervene none --intervene 'ablate_attention()'")
def ask(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The prompt, as the model's own text.")],
    intervene: Annotated[list[str], typer.Option(help="An intervention in text form; may be repeated.")] = ["none"],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 40,
    as_json: Json = False,
) -> None:
    """Ask one prompt under several interventions and show the answers side by side, with their receipts."""
    from needlework.inspection import answers_table
    from needlework.interventions import parse
    from needlework.subject import load

    interventions = [parse(text) for text in intervene]
    subject = load(model)
    answers = subject.generate([prompt] * len(interventions), interventions=interventions, max_new_tokens=max_new_tokens)
    if as_json:
        rows = [
            {"intervention": str(i), "text": a.text, "finish": a.finish, "error": a.error, "receipt": a.receipt.to_dict()}
            for i, a in zip(interventions, answers, strict=True)
        ]
        typer.echo(json.dumps(rows, indent=1))
    else:
        Console().print(answers_table(interventions, answers))


@command("needlework zoo")
def zoo(as_json: Json = False) -> None:
    """List the models that come with needlework, with their measured figures."""
    from needlework.inspection import zoo_table
    from needlework.zoo import catalog

    entries = catalog()
    if as_json:
        typer.echo(json.dumps({name: entry.record for name, entry in entries.items()}, indent=1))
    else:
        Console().print(zoo_table(entries))


@command("needlework train tiny-griffin --out my-griffin")
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe of the zoo, or a YAML file of your own.")],
    out: Out,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's own number.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's own seed.")] = None,
) -> None:
    """Train a zoo recipe or your own. A training that was stopped is taken up again by the same command."""
    from needlework.training.train import train as run

    record = run(recipe, out, steps=steps, seed=seed)
    say(f"{record['name']}: {record['steps']} steps, card in {out / 'README.md'}", stderr=False)


@command("needlework plan plans/02-head-sparsification.yaml")
def plan(
    file: Annotated[Path, typer.Argument(help="A plan in YAML.")],
    model: Annotated[list[str], typer.Option(help="Instead of the plan's models; may be repeated.")] = [],  # noqa: B006
    fast: Annotated[bool, typer.Option(help="The reduced grid.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a plan would run: trials, prefills after sharing, time and memory. Runs nothing."""
    from dataclasses import asdict

    from needlework.experiments.describe import describe
    from needlework.experiments.plan import load

    found = describe(load(file, fast=fast, models=model))
    typer.echo(json.dumps(asdict(found), indent=1) if as_json else plain(found.text()))


@command("needlework run plans/02-head-sparsification.yaml --out runs/sweep")
def run(
    file: Annotated[Path, typer.Argument(help="A plan in YAML.")],
    out: Out,
    model: Annotated[list[str], typer.Option(help="Instead of the plan's models; may be repeated.")] = [],  # noqa: B006
    fast: Annotated[bool, typer.Option(help="The reduced grid.")] = False,
    memory: Memory = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try trials again that failed.")] = False,
) -> None:
    """Run a plan into a directory. The same command goes on after a stop, a crash or a kill.

    Exit codes: 0 all is done; 1 trials of the plan failed, or a condition hid nothing in any of its trials; 2 bad input, or
    a full disk; 130 stopped.
    """
    from needlework.experiments.run import run_plan

    code = run_plan(file, out, fast=fast, models=model, memory_bytes=read_bytes(memory), retry_failed=retry_failed)
    raise typer.Exit(code)


@command("needlework rescore runs/sweep")
def rescore(
    directory: Annotated[Path, typer.Argument(help="A directory that `needlework run` wrote.")],
    as_json: Json = False,
) -> None:
    """Compute all scores again from stored answers. Needs no model: what changed is how answers are scored."""
    from dataclasses import asdict

    from needlework.rescoring import rescore_directory

    done = rescore_directory(directory)
    if as_json:
        typer.echo(json.dumps(asdict(done)))
        return
    if done.kept:
        typer.echo(f"{done.kept} rows could not be scored and keep what they have, for instance {done.why}", err=True)
    typer.echo(f"{done.changed} of {done.rows} rows have new scores")


@command("needlework export runs/sweep --to csv")
def export(
    directory: Annotated[Path, typer.Argument(help="A directory that `needlework run` wrote.")],
    to: Annotated[str, typer.Option(help="csv, parquet, json or lm-eval.")],
    out: Annotated[Path | None, typer.Option(help="File or directory to write; by default beside the run.")] = None,
) -> None:
    """Write a run's trials in another format. docs/store.md describes every column."""
    from needlework.experiments.export import export as write

    for path in write(directory, to, out):
        say(f"wrote {path}", stderr=False)


@command("needlework report runs/sweep")
def report(
    directories: Annotated[list[Path], typer.Argument(help="One or more run directories; several are put side by side.")],
    out: Annotated[Path | None, typer.Option(help="Directory for report.html; by default the first run's.")] = None,
) -> None:
    """Build one self-contained report.html, and PNG and SVG of every figure."""
    from needlework.report import build

    say(f"report: {build(directories, out)}", stderr=False)


@command("needlework demo")
def demo(out: Out = Path("runs/demo")) -> None:
    """Run all experiments on the zoo in a reduced grid, print the main numbers and build the report."""
    from needlework.demo import demo as run

    raise typer.Exit(run(out))


@command("needlework eval tiny-griffin --tasks mini-mmlu --intervene none --intervene 'keep_heads(k=2)' --out runs/mmlu", "eval")
def evaluate(
    model: Model,
    out: Out,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks or groups, separated by commas.")] = "",
    intervene: Annotated[list[str], typer.Option(help="An intervention in text form; may be repeated.")] = [],  # noqa: B006
    data: Annotated[Path | None, typer.Option(help="Directory with the tasks' data, where there is no hub.")] = None,
    paper: Annotated[bool, typer.Option(help="The paper's preset: MMLU and GLUE at its numbers of heads.")] = False,
    limit: Annotated[float | None, typer.Option(help="Questions per task, for a trial run.")] = None,
    memory: Memory = None,
) -> None:
    """Ask lm-evaluation-harness tasks under several interventions in one pass. Goes on after a stop.

    Exit codes: 0 all is done; 1 questions failed, or a condition hid nothing in any of them; 2 bad input, or a full disk;
    130 stopped.
    """
    from needlework.lmeval.evaluate import evaluate as run
    from needlework.lmeval.evaluate import table

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    found = run(model, names, intervene, out, data=data, paper=paper, limit=limit, memory_bytes=read_bytes(memory))
    Console().print(table(found))
    errors = Console(stderr=True, soft_wrap=True)
    for note in [*found.idle, *([f"{found.failed} questions failed"] if found.failed else [])]:
        errors.print(note, markup=False, highlight=False)
    raise typer.Exit(FAILED if found.failed or found.idle else 0)


@app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def lm_eval(context: typer.Context) -> None:
    """Hand over to lm-eval's own command line, with the model type `needlework` registered.

    Example: `needlework lm-eval --model needlework --model_args pretrained=DIR --tasks mini-mmlu`
    """
    from needlework.lmeval.model import main as run

    run(context.args)


def main() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(app())
