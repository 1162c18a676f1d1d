"""Commands about runs: plans, what they would ask, asking it, and what came of it."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import needlework as nw
from needlework.cli import options
from needlework.cli.options import EXAMPLES, FAILED, app, command, exit_on_error, print_json, read_bytes, show
from needlework.terminal import say


@command("needlework plans")
def plans(as_json: options.Json = False) -> None:
    """List the plans that come with needlework: what each is about, and the models that it names."""
    from needlework.experiments.plan import catalog
    from needlework.inspection import plans_table

    listed = catalog()
    rows = [{"name": name, "about": p.about, "models": list(p.models), "file": str(p.path)} for name, p in listed.items()]
    show(plans_table(listed), rows, as_json)


@command("needlework plan 02 --model tiny-griffin")
def plan(
    file: options.PlanFile,
    model: options.PlanModels = [],  # noqa: B006
    fast: options.Fast = False,
    plugin: options.Plugins = [],  # noqa: B006
    as_json: options.Json = False,
    *,
    loading: options.Loading,
) -> None:
    """Show what a plan would run: trials, prefills after sharing, time and memory. Runs nothing."""
    from needlework.experiments.plan import get

    checked = get(file, fast=fast, models=model, **loading)
    from needlework.experiments.estimate import describe  # torch comes with it: after the plan is known to be good

    description = describe(checked)
    show(description.output(), asdict(description), as_json)


# [walk 1] docs/architecture.md
@command("needlework run 02 --model mine=./my-checkpoint --out runs/sweep")
def run(
    file: options.PlanFile,
    model: options.PlanModels = [],  # noqa: B006
    fast: options.Fast = False,
    out: options.OutUnlessDry = None,
    memory: options.Memory = None,
    retry_failed: options.RetryFailed = False,
    doctor: Annotated[str, typer.Option(help="Examine each model first, for the record: quick, full or off.")] = "quick",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show placement, hours and memory; load and run nothing.")] = False,
    plugin: options.Plugins = [],  # noqa: B006
    as_json: options.Json = False,
    *,
    cluster: options.OptionalCluster,
    loading: options.Loading,
) -> None:
    """Run a plan into a directory. The same command resumes after a stop, a crash or a kill.

    Exit codes: 0 all is done; 1 trials of the plan failed, or a condition hid nothing in any of its trials; 2 bad input, or
    a full disk; 130 stopped.
    """
    if dry_run:
        from needlework.experiments.estimate import place
        from needlework.experiments.plan import get

        placed = place(get(file, fast=fast, models=model, **loading), cluster)
        show(placed.output(), asdict(placed), as_json)
        raise typer.Exit
    if out is None:
        raise nw.NeedleworkError("give --out DIR, the directory to write into")
    result = nw.run(
        file,
        out,
        models=model,
        fast=fast,
        memory_bytes=read_bytes(memory),
        retry_failed=retry_failed,
        doctor=doctor,  # type: ignore[arg-type]  # run refuses other words
        progress=not as_json,
        cluster=cluster,
        **loading,
    )
    if as_json:
        sound = {name: found.sound for name, found in result.checkups().items()}
        print_json({"directory": out, "sound": result.sound, "fingerprint": result.fingerprint, "doctor": sound})
    else:
        say(f"fingerprint {result.fingerprint} (of everything that a report reads); `needlework compare` looks at two runs")
    raise typer.Exit(0 if result.sound else FAILED)


@command("needlework compare runs/sweep runs/again")
def compare(
    first: options.RunDirectory,
    second: Annotated[Path, typer.Argument(help="Another one, of the same plan.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Log-probabilities may be so far apart, in nats.")] = 1e-4,
    as_json: options.Json = False,
) -> None:
    """Say whether two runs are the same: the rows that differ are counted and named.

    Exit codes: 0 the same; 1 not the same; 2 bad input.
    """
    from needlework.results import compare as hold_against

    found = hold_against(first, second, tolerance)
    show(found.text(), found.to_dict(), as_json)
    raise typer.Exit(0 if found.same else FAILED)


@command("needlework rescore runs/sweep")
def rescore(directory: options.RunDirectory, plugin: options.Plugins = [], as_json: options.Json = False) -> None:  # noqa: B006
    """Compute all scores again from stored answers. Needs no model: what changed is how answers are scored."""
    from needlework.results import Store, claimed
    from needlework.results.rows import rescore as score_again

    with closing(Store(directory)) as store, claimed(directory):
        done = score_again(store)
    if done.kept:
        say(f"{done.kept} rows could not be scored and keep what they have, for instance {done.why}")
    show(f"{done.changed} of {done.rows} rows have new scores", asdict(done), as_json)


@command("needlework export runs/sweep --to csv")
def export(
    directory: options.RunDirectory,
    to: Annotated[str, typer.Option(help="csv, parquet, json or lm-eval.")],
    out: Annotated[Path | None, typer.Option(help="Directory to write into; by default DIR/export.")] = None,
    as_json: options.Json = False,
) -> None:
    """Write a run's trials in another format. `needlework explain COLUMN` says what a column holds."""
    from needlework.results.export import export as write

    files = write(directory, to, out)
    show("\n".join(f"wrote {path}" for path in files), {"files": files}, as_json)


@command("needlework report runs/sweep")
def report(
    directories: Annotated[list[Path], typer.Argument(help="One or more run directories; several are put side by side.")],
    out: Annotated[Path | None, typer.Option(help="Directory for report.html; by default the first run's.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Compare the other models with this run or model, sample by sample.")
    ] = None,
    plugin: options.Plugins = [],  # noqa: B006
    as_json: options.Json = False,
) -> None:
    """Build one self-contained report.html, and PNG and SVG of every figure, and print what it concludes."""
    from needlework.reports.page import write_report

    written = write_report(directories, out, against)
    if as_json:
        return print_json(written.to_dict())
    return show(f"{written.text()}\nreport: {written.path}")


@command("needlework demo")
def demo(
    out: options.Out = Path("runs/demo"),
    full: Annotated[bool, typer.Option("--full", help="All conditions, more models and samples (plan demo-full).")] = False,
    as_json: options.Json = False,
    *,
    loading: options.Loading,
) -> None:
    """Test the paper's claims on three small models, one after the other, and print what each decides; build the report.

    With --full, all experiments run on more models of the zoo, with more samples, and the main numbers are printed at the end.
    Give it a directory of its own.
    """
    if not full:
        from needlework.cli.demo import run_demo

        result = run_demo("demo", out, **loading)
        if as_json:
            _print_demo(result)
        raise typer.Exit(0 if result.sound else FAILED)
    from needlework.cli.demo import PLAYED, write_playground
    from needlework.reports import summary

    start = time.perf_counter()
    result = nw.run("demo-full", out, **loading)
    write_playground(nw.load(PLAYED, **loading), out)
    report = result.report()
    Console().print(summary([out]))
    say(f"{time.perf_counter() - start:.0f} seconds. Report: {report}", stderr=False)
    if as_json:
        _print_demo(result)
    raise typer.Exit(0 if result.sound else FAILED)


def _print_demo(result: nw.Result) -> None:
    judged = [verdict.to_dict() for verdict in result.verdicts()]
    print_json(
        {"directory": result.directory, "sound": result.sound, "report": result.directory / "report.html", "verdicts": judged}
    )


@command("needlework eval tiny-griffin --tasks mini-mmlu --intervene none --intervene 'keep_heads(k=2)' --out runs/mmlu", "eval")
def evaluate(
    model: options.Model,
    out: options.Out,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks or groups, separated by commas.")] = "",
    intervene: options.Interventions = [],  # noqa: B006
    data: Annotated[Path | None, typer.Option(help="Directory with the tasks' data, where there is no hub.")] = None,
    paper: Annotated[bool, typer.Option(help="The paper's preset: MMLU and GLUE at its numbers of heads.")] = False,
    preset: Annotated[
        str | None, typer.Option(help="Retrieval: babilong, fda, swde or squad-completion, its heads ablated.")
    ] = None,
    length: Annotated[str | None, typer.Option(help="Length of BABILong's texts, 0k (default) to 128k.")] = None,
    limit: Annotated[float | None, typer.Option(help="Questions per task, for a trial run.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before each question, instead of the task's own.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Ask in the chat template. By default with --paper, if there is one.")] = None,
    memory: options.Memory = None,
    retry_failed: options.RetryFailed = False,
    plugin: options.Plugins = [],  # noqa: B006
    as_json: options.Json = False,
    *,
    cluster: options.OptionalCluster,
    loading: options.Loading,
) -> None:
    """Run lm-evaluation-harness tasks under several interventions in one pass. The same command resumes after a stop.

    Exit codes: 0 all is done; 1 questions failed, or a condition hid nothing in any of them; 2 bad input, or a full disk;
    130 stopped.
    """
    from needlework.lmeval import evaluate as evaluation

    summary = evaluation.evaluate(
        model,
        [name.strip() for name in tasks.split(",") if name.strip()],
        intervene,
        out,
        data=data,
        paper=paper,
        preset=preset,
        length=length,
        limit=limit,
        shots=shots,
        chat=chat,
        memory_bytes=read_bytes(memory),
        retry_failed=retry_failed,
        progress=not as_json,
        cluster=cluster,
        **loading,
    )
    show(evaluation.table(summary), summary.to_dict(), as_json)
    raise typer.Exit(FAILED if summary.failed or summary.idle else 0)


EXAMPLES.append("needlework lm-eval --model needlework --model_args pretrained=DIR --tasks mini-mmlu")


@app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def lm_eval(context: typer.Context) -> None:
    """Hand over to lm-eval's own command line, with the model type `needlework` registered."""
    with exit_on_error():
        from needlework.lmeval import require_lm_eval

        require_lm_eval()
        from needlework.lmeval.model import main as run

        run(context.args)
