"""The command line: one verb per command. Each parses, calls one function and prints; nothing heavy is imported before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import needlework as nw
from needlework.options import (
    EXAMPLES,
    FAILED,
    ClusterOptions,
    Fast,
    Interventions,
    Json,
    LoadingOptions,
    Memory,
    Model,
    Out,
    OutUnlessDry,
    PlanFile,
    PlanModels,
    Plugins,
    RetryFailed,
    Window,
    app,
    command,
    read_bytes,
    show,
    told,
    use,
)
from needlework.terminal import plain, say


@command("needlework inspect recurrentgemma-2b")
def inspect(
    model: Model,
    as_json: Json = False,
    window: Window = None,
) -> None:
    """Show what a model is made of: layers, heads, windows, memory and cost of each side. Weights are not needed."""
    from needlework.inspection import anatomy_of, table

    anatomy = anatomy_of(model, window or "transformers")
    show(table(anatomy, model), anatomy.to_dict(), as_json)


@command("needlework ask tiny-griffin 'the secret code of ...' --intervene none --intervene 'ablate_attention()'")
def ask(
    model: Model,
    loading: LoadingOptions,
    prompt: Annotated[str, typer.Argument(help="The prompt, as the model's own text.")],
    intervene: Interventions = ["none"],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens that an answer may have.")] = 40,
    plugin: Plugins = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Ask one prompt under several interventions and show the answers side by side, with their receipts."""
    from needlework.inspection import answers_table

    use(plugin)
    interventions = [nw.parse(text) for text in intervene]
    subject = nw.load(model, **loading)
    answers = subject.generate([prompt] * len(interventions), interventions=interventions, max_new_tokens=max_new_tokens)
    rows = [
        {"intervention": str(i), "text": a.text, "finish": a.finish, "error": a.error, "receipt": a.receipt.to_dict()}
        for i, a in zip(interventions, answers, strict=True)
    ]
    show(answers_table(interventions, answers), rows, as_json)


@command("needlework doctor ./my-checkpoint --dtype bfloat16")
def doctor(
    model: Model,
    loading: LoadingOptions,
    tokens: Annotated[int, typer.Option(min=64, help="The longest prompt: windows that end beyond are not looked at.")] = 4096,
    as_json: Json = False,
) -> None:
    """Try on a model the laws that every number rests on: a table of what holds, what fails and what does not apply.

    Exit codes: 0 no law fails; 1 one does, so that no number of this model is to be believed; 2 bad input; 130 stopped.
    """
    from needlework.inspection import checkup_table

    found = nw.doctor(nw.load(model, **loading), most_tokens=tokens, progress=True)
    show(checkup_table(found), found.to_dict(), as_json)
    raise typer.Exit(0 if found.sound else FAILED)


@command("needlework zoo")
def zoo(as_json: Json = False) -> None:
    """List the models that come with needlework, with their measured figures."""
    from needlework.inspection import zoo_table
    from needlework.zoo import catalog

    entries = catalog()
    show(zoo_table(entries), {name: entry.record for name, entry in entries.items()}, as_json)


@command("needlework heads tiny-griffin --out heads-of-griffin")
def heads(
    model: Model,
    loading: LoadingOptions,
    by: Annotated[
        list[str], typer.Option(help="A method, or all; may be repeated. Default: those that look once, and greedy.")
    ] = [],  # noqa: B006
    task: Annotated[str, typer.Option(help="niah, recall, or a plan whose retrieval tasks are taken.")] = "niah",
    samples: Annotated[int, typer.Option(help="Samples that heads are ranked on.")] = 60,
    held_out: Annotated[int, typer.Option(help="Other samples that rankings are judged on, twice as many in all.")] = 120,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples; the three after it are used, too.")] = 0,
    keep: Annotated[float, typer.Option(help="Share of retrieval that the smallest set of heads is to keep.")] = 0.99,
    share: Annotated[float, typer.Option(help="Share of each layer's heads, for static against dynamic choice.")] = 0.15,
    judge: Annotated[bool, typer.Option("--judge/--no-judge", help="Judge rankings on held-out samples.")] = True,
    dynamic: Annotated[bool, typer.Option("--dynamic/--no-dynamic", help="Set static against dynamic choice.")] = True,
    retest: Annotated[bool, typer.Option("--retest/--no-retest", help="Rank on other samples, too, and compare.")] = True,
    import_: Annotated[
        list[Path], typer.Option("--import", help="A ranking to judge: ours, Wu's .json or DuoAttention's .tsv.")
    ] = [],  # noqa: B006
    export: Annotated[list[str], typer.Option(help="Write rankings for other programs, too: wu or duo.")] = [],  # noqa: B006
    methods: Annotated[bool, typer.Option("--methods", help="List the methods and do nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="New directory for rankings, numbers, pictures and a page.")] = None,
    as_json: Json = False,
) -> None:
    """Rank a model's attention heads by what retrieval owes to them, and say how far to trust each ranking.

    Rankings are judged on samples that they have not seen. docs/heads.md says what each method and number means.
    """
    from needlework.experiments.heads import check_methods, heads_of
    from needlework.heads import tables
    from needlework.heads.survey import Settings

    if methods:
        listed = tables.methods()
        return show(listed.sheet(), [dict(zip(listed.columns, row, strict=True)) for row in listed.rows], as_json)
    tables.check_out(out, export)
    check_methods(by)
    settings = Settings(samples, held_out, seed, keep, share, judge, dynamic, retest)
    subject = nw.load(model, **loading)
    found = heads_of(subject, by, task, settings, files=import_, name=Path(model).name, progress=not as_json)
    written = tables.save(found, out, export) if out else []
    if as_json:
        return typer.echo(json.dumps(found.to_dict(), indent=1))
    for grid in tables.grids(found):
        show(grid.sheet())
    if found.smallest:
        say(f"smallest set: {found.smallest.text()}", stderr=False)
    return say(f"wrote {len(written)} files into {out}", stderr=False) if out else None


@command("needlework train tiny-griffin --out my-griffin")
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe of the zoo, or a YAML file of your own.")],
    out: Out,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's own number.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's own seed.")] = None,
    card: Annotated[bool, typer.Option("--card/--no-card", help="Measure figures for the model card at the end.")] = True,
) -> None:
    """Train a zoo recipe or your own. A training that was stopped is taken up again by the same command.

    With --no-card, for trials, nothing is measured at the end: the model can be loaded, and its record says that.
    """
    from needlework.training.train import CARD_SAMPLES
    from needlework.training.train import train as run

    record = run(recipe, out, steps=steps, seed=seed, card_samples=CARD_SAMPLES if card else 0)
    what = "card" if card else "not measured; a card without figures"
    say(f"{record['name']}: {record['steps']} steps, {what} in {out / 'README.md'}", stderr=False)


@command("needlework study concentration --out runs/concentration --jobs 2")
def study(
    file: Annotated[str, typer.Argument(help="A study that comes with needlework, or a YAML file of your own.")],
    out: Out,
    jobs: Annotated[int, typer.Option(min=1, help="Models trained at a time, one core each.")] = 1,
    seed: Annotated[
        list[int], typer.Option(min=0, help="Training seeds instead of the study's own; give it several times.")
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Train a grid of recipes, run one plan on all of them, and say what retrieval in few heads depends on."""
    from needlework.training.concentration import as_json as numbers
    from needlework.training.study import study as run

    result = run(file, out, jobs=jobs, training_seeds=seed, progress=not as_json)
    typer.echo(json.dumps(numbers(result.models), indent=1) if as_json else plain(result.text))
    if not result.run.sound:
        raise typer.Exit(FAILED)


@command("needlework plans")
def plans(as_json: Json = False) -> None:
    """List the plans that come with needlework: what each is about, and the models that it names."""
    from needlework.experiments.shipped import catalog
    from needlework.inspection import plans_table

    listed = catalog()
    rows = [{"name": name, "about": p.about, "models": list(p.models), "file": str(p.path)} for name, p in listed.items()]
    show(plans_table(listed), rows, as_json)


@command("needlework plan 02 --model tiny-griffin")
def plan(
    file: PlanFile,
    loading: LoadingOptions,
    model: PlanModels = [],  # noqa: B006
    fast: Fast = False,
    plugin: Plugins = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Show what a plan would run: trials, prefills after sharing, time and memory. Runs nothing."""
    from dataclasses import asdict

    from needlework.experiments.shipped import get

    use(plugin)
    checked = get(file, fast=fast, models=model, **loading)
    from needlework.experiments.describe import describe  # torch comes with it: after the plan is known to be good

    description = describe(checked)
    typer.echo(json.dumps(asdict(description), indent=1) if as_json else plain(description.text()))


# [walk 1] docs/architecture.md
@command("needlework run 02 --model mine=./my-checkpoint --out runs/sweep")
def run(
    file: PlanFile,
    loading: LoadingOptions,
    model: PlanModels = [],  # noqa: B006
    fast: Fast = False,
    out: OutUnlessDry = None,
    memory: Memory = None,
    retry_failed: RetryFailed = False,
    doctor: Annotated[str, typer.Option(help="Examine each model first, for the record: quick, full or off.")] = "quick",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show placement, hours and memory; load and run nothing.")] = False,
    plugin: Plugins = [],  # noqa: B006
    as_json: Json = False,
    cluster: ClusterOptions = None,
) -> None:
    """Run a plan into a directory. The same command goes on after a stop, a crash or a kill.

    Exit codes: 0 all is done; 1 trials of the plan failed, or a condition hid nothing in any of its trials; 2 bad input, or
    a full disk; 130 stopped.
    """
    use(plugin)
    if dry_run:
        from needlework.experiments.placement import place
        from needlework.experiments.shipped import get

        placed = place(get(file, fast=fast, models=model, **loading), cluster)
        typer.echo(json.dumps(placed.to_dict(), indent=1) if as_json else plain(placed.text()))
        raise typer.Exit
    if out is None:
        raise nw.NeedleworkError("give --out DIR, the directory to write into")
    limit = read_bytes(memory)
    options: dict[str, Any] = {"memory_bytes": limit, "retry_failed": retry_failed, "doctor": doctor, "progress": not as_json}
    result = nw.run(file, out, models=model, fast=fast, cluster=cluster, **options, **loading)
    if as_json:
        sound = {name: found.sound for name, found in result.checkups().items()}
        typer.echo(json.dumps({"directory": str(out), "sound": result.sound, "fingerprint": result.fingerprint, "doctor": sound}))
    else:
        say(f"fingerprint {result.fingerprint} (of trial ids, tokens and scores); `needlework compare` looks at two runs")
    raise typer.Exit(0 if result.sound else FAILED)


@command("needlework compare runs/sweep runs/again")
def compare(
    first: Annotated[Path, typer.Argument(help="A directory that `needlework run` wrote.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same plan.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Log-probabilities may be so far apart, in nats.")] = 1e-4,
    as_json: Json = False,
) -> None:
    """Say whether two runs are the same: the rows that differ are counted and named.

    Exit codes: 0 the same; 1 not the same; 2 bad input.
    """
    from needlework.store import compare as hold_against

    found = hold_against(first, second, tolerance)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else plain(found.text()))
    raise typer.Exit(0 if found.same else FAILED)


@command("needlework rescore runs/sweep")
def rescore(
    directory: Annotated[Path, typer.Argument(help="A directory that `needlework run` wrote.")],
    plugin: Plugins = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Compute all scores again from stored answers. Needs no model: what changed is how answers are scored."""
    from dataclasses import asdict

    from needlework.rescoring import rescore_directory

    use(plugin)
    done = rescore_directory(directory)
    if done.kept:
        say(f"{done.kept} rows could not be scored and keep what they have, for instance {done.why}")
    typer.echo(json.dumps(asdict(done)) if as_json else f"{done.changed} of {done.rows} rows have new scores")


@command("needlework prune tiny-jamba --keep 0.25 --out small-jamba")
def prune(
    model: Model,
    keep: Annotated[
        str,
        typer.Option(
            help="Heads that stay: a number, a share (of heads ranked on the spot), a ranking's file, FILE:10, or '2.0 2.5'."
        ),
    ],
    out: Out,
    loading: LoadingOptions,
    others: Annotated[
        str, typer.Option(help="What stays of the other heads: none, or window=64,sinks=4 (they stream, weights stay).")
    ] = "none",
    samples: Annotated[int, typer.Option(min=0, help="Needles asked of both models for the card; 0 measures nothing.")] = 1000,
    as_json: Json = False,
) -> None:
    """Write a checkpoint that is really smaller: heads leave the weights, kv heads and caches go with their groups.

    The new model is tried against the whole one, read back, measured, and described in its README.md.
    """
    from needlework.pruning.card import summary

    done = nw.prune(model, keep, out, others=others, samples=samples, progress=not as_json, **loading)
    typer.echo(json.dumps(done.record, indent=1) if as_json else plain(f"{summary(done.record)}\ncard: {out / 'README.md'}"))


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
    plugin: Plugins = [],  # noqa: B006
) -> None:
    """Build one self-contained report.html, and PNG and SVG of every figure."""
    use(plugin)
    say(f"report: {nw.report(directories, out)}", stderr=False)


@command("needlework demo")
def demo(loading: LoadingOptions, out: Out = Path("runs/demo")) -> None:
    """Run all experiments on the zoo in a reduced grid, print the main numbers and build the report."""
    from needlework.demo import demo as run

    raise typer.Exit(0 if run(out, **loading) else FAILED)


@command("needlework eval tiny-griffin --tasks mini-mmlu --intervene none --intervene 'keep_heads(k=2)' --out runs/mmlu", "eval")
def evaluate(
    model: Model,
    out: Out,
    loading: LoadingOptions,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks or groups, separated by commas.")] = "",
    intervene: Interventions = [],  # noqa: B006
    data: Annotated[Path | None, typer.Option(help="Directory with the tasks' data, where there is no hub.")] = None,
    paper: Annotated[bool, typer.Option(help="The paper's preset: MMLU and GLUE at its numbers of heads.")] = False,
    limit: Annotated[float | None, typer.Option(help="Questions per task, for a trial run.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before each question, instead of the task's own.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Ask in the chat template. By default with --paper, if there is one.")] = None,
    memory: Memory = None,
    retry_failed: RetryFailed = False,
    plugin: Plugins = [],  # noqa: B006
    cluster: ClusterOptions = None,
) -> None:
    """Ask lm-evaluation-harness tasks under several interventions in one pass. Goes on after a stop.

    Exit codes: 0 all is done; 1 questions failed, or a condition hid nothing in any of them; 2 bad input, or a full disk;
    130 stopped.
    """
    from needlework.lmeval.evaluate import evaluate as run
    from needlework.lmeval.evaluate import table

    use(plugin)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    summary = run(
        model,
        names,
        intervene,
        out,
        data=data,
        paper=paper,
        limit=limit,
        shots=shots,
        chat=chat,
        memory_bytes=read_bytes(memory),
        retry_failed=retry_failed,
        cluster=cluster,
        **loading,
    )
    show(table(summary))
    raise typer.Exit(FAILED if summary.failed or summary.idle else 0)


EXAMPLES.append("needlework lm-eval --model needlework --model_args pretrained=DIR --tasks mini-mmlu")


@app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def lm_eval(context: typer.Context) -> None:
    """Hand over to lm-eval's own command line, with the model type `needlework` registered."""
    with told():
        from needlework.lmeval import demand_lm_eval

        demand_lm_eval()
        from needlework.lmeval.model import main as run

        run(context.args)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"needlework {nw.__version__}")
        raise typer.Exit


@app.callback(epilog="\n\n".join(["Examples:", *(f"`{example}`" for example in EXAMPLES)]))
def options(
    version: Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Which attention does the retrieving in a hybrid language model, and what is the rest for?"""


def main() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(app())
