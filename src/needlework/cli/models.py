"""Commands about one model: what it is made of, whether it can be trusted, its heads; and how models are made."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import needlework as nw
from needlework.cli import options
from needlework.cli.options import FAILED, MODEL_HELP, command, show
from needlework.errors import short_repr
from needlework.terminal import plain, say

_SHORT_PROMPT = 256  # tokens; up to these, transformers' own code is as fast as loading (and at first compiling) kernels


@command("needlework inspect recurrentgemma-2b")
def inspect(model: options.Model, as_json: options.Json = False, window: options.Window = None) -> None:
    """Show what a model is made of: layers, heads, windows, memory and cost of each side. Weights are not needed."""
    from needlework.inspection import anatomy_of, anatomy_table

    anatomy = anatomy_of(model, window or "transformers")
    show(anatomy_table(anatomy, model), anatomy.to_dict(), as_json)


@command("needlework ask tiny-griffin 'the secret code of ...' --intervene none --intervene 'ablate_attention()'")
def ask(
    model: options.Model,
    prompt: Annotated[str, typer.Argument(help="The prompt, as the model's own text.")],
    intervene: options.Interventions = ["none"],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens that an answer may have.")] = 40,
    plugin: options.Plugins = [],  # noqa: B006
    as_json: options.Json = False,
    *,
    loading: options.Loading,
) -> None:
    """Ask one prompt under several interventions and show the answers side by side, with their receipts.

    A prompt of at most 256 tokens is answered by transformers' own code, which needs no compilation, unless --kernels is
    given. Answers of zoo models end at the full stop.

    Exit codes: 0 all is done; 1 an answer failed; 2 bad input; 130 stopped.
    """
    from needlework.inspection import answers_table
    from needlework.model.quick_import import load_quickly
    from needlework.toy.words import is_toy

    interventions = [nw.parse(text) for text in intervene]
    subject = load_quickly(lambda: nw.load(model, **{"kernels": "stock", **loading}))
    if "kernels" not in loading and subject.tokenizer is not None and len(subject.encode(prompt)) > _SHORT_PROMPT:
        subject.body.kernels = "fast"
    stop: tuple[str, ...] = ()
    if subject.tokenizer is not None:
        stop = (".",) if is_toy(subject.tokenizer) else ()
        if unknown := _unknown_words(subject.tokenizer, prompt):
            words = ", ".join(map(short_repr, unknown[:8])) + (", ..." if len(unknown) > 8 else "")
            hint = "; models of the zoo speak a small toy language (`needlework zoo`); smollm2-135m knows English" if stop else ""
            say(f"{model} does not know {words}: the answer means nothing{hint}", style="yellow")
    answers = subject.generate(
        [prompt] * len(interventions), interventions=interventions, max_new_tokens=max_new_tokens, stop=stop
    )
    rows = [
        {"intervention": str(i), "text": a.text, "finish": a.finish, "error": a.error, "receipt": a.receipt.to_dict()}
        for i, a in zip(interventions, answers, strict=True)
    ]
    show(answers_table(interventions, answers), rows, as_json)
    raise typer.Exit(FAILED if any(answer.error for answer in answers) else 0)


def _unknown_words(tokenizer: Any, prompt: str) -> list[str]:
    """Return the words of a prompt that its tokenizer replaces by the token for unknown text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or unknown not in tokenizer(prompt)["input_ids"]:
        return []
    words = dict.fromkeys(re.findall(r"\w+|[^\w\s]+", prompt))
    return [word for word in words if unknown in tokenizer(word, add_special_tokens=False)["input_ids"]]


@command("needlework doctor ./my-checkpoint --dtype bfloat16")
def doctor(
    model: options.Model,
    tokens: Annotated[int, typer.Option(min=64, help="The longest prompt: windows that end beyond are not looked at.")] = 4096,
    as_json: options.Json = False,
    *,
    loading: options.Loading,
) -> None:
    """Check the laws that every number rests on, on one model: a table of what holds, what fails and what does not apply.

    Exit codes: 0 no law fails; 1 one does, so that no number of this model is to be believed; 2 bad input; 130 stopped.
    """
    from needlework.inspection import checkup_table

    subject = nw.load(model, **loading)
    found = nw.doctor(subject, most_tokens=tokens, progress=True)
    show(checkup_table(found), found.to_dict(), as_json)
    raise typer.Exit(0 if found.sound else FAILED)


@command("needlework heads tiny-griffin --out heads-of-griffin")
def heads(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL_HELP} --methods needs none.", show_default=False)] = None,
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
    dynamic: Annotated[
        bool, typer.Option("--dynamic/--no-dynamic", help="Compare a static choice of heads with a dynamic one.")
    ] = True,
    retest: Annotated[bool, typer.Option("--retest/--no-retest", help="Rank on other samples, too, and compare.")] = True,
    import_: Annotated[
        list[Path], typer.Option("--import", help="A ranking to judge: ours, Wu's .json or DuoAttention's .tsv.")
    ] = [],  # noqa: B006
    export: Annotated[list[str], typer.Option(help="Write rankings for other programs, too: wu, locos or duo.")] = [],  # noqa: B006
    recurrent: Annotated[
        bool, typer.Option("--recurrent", help="The recurrent side instead: its groups, convolutions and states.")
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="Another checkpoint: which of the best heads it kept, lost or moved.", show_default=False)
    ] = None,
    methods: Annotated[bool, typer.Option("--methods", help="List the methods and do nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="New directory for rankings, numbers, pictures and a page.")] = None,
    plugin: options.Plugins = [],  # noqa: B006
    as_json: options.Json = False,
    *,
    cluster: options.OptionalCluster,
    loading: options.Loading,
) -> None:
    """Rank a model's attention heads by their role in retrieval, and measure how reliable each ranking is.

    Rankings are judged on samples that they have not seen. `needlework explain METHOD` says what a method measures. With
    --recurrent, groups of the recurrent layers are left out instead, and their convolutions and states are cut. With
    --against, heads of two checkpoints are compared, and Q/K of the first are put into the second. On several workers:
    `needlework heads tiny-griffin --ray --workers 2`.
    """
    from needlework.experiments.heads import METHOD, check_methods, compare_heads, heads_of, open_subject, recurrent_side_of
    from needlework.heads import output
    from needlework.heads.survey import SurveySettings

    if methods:
        listed = output.method_table()
        return show(listed, listed.records(), as_json)
    if model is None:
        raise nw.NeedleworkError("which model? e.g. `needlework heads tiny-griffin`; `needlework zoo` lists those that are here")
    if recurrent and (by or import_ or export):
        raise nw.NeedleworkError("--recurrent ranks groups of the recurrent side: it goes without --by, --import and --export")
    output.check_out(out, export)
    check_methods(by)
    if against:
        if recurrent or import_ or export or cluster or len(by) > 1:
            raise nw.NeedleworkError(
                "--against compares by one method (--by): it goes without --recurrent, --import, --export, --ray"
            )
        counts: dict[str, Any] = {"samples": samples, "held_out": held_out, "seed": seed, "progress": not as_json}
        both = compare_heads(model, against, by[0] if by else METHOD, task=task, **counts, **loading)
        written = output.save_comparison(both, out) if out else []
        if as_json:
            return options.print_json(both.to_dict())
        for table_ in both.tables():
            show(table_)
        show(output.comparison_legend(both))
        return say(f"wrote {len(written)} files into {out}", stderr=False) if out else None
    settings = SurveySettings(samples, held_out, seed, keep, share, judge, dynamic, retest)
    name, shown = Path(model).name, not as_json
    with open_subject(model, cluster, **loading) as subject:
        if recurrent:
            side = recurrent_side_of(subject, task, samples, seed, progress=shown)
            if out:
                output.save_recurrent(side, out, name)
            return show(output.recurrent_table(side), side.to_dict(), as_json)
        found = heads_of(subject, by, task, settings, files=import_, name=name, progress=shown)
    written = output.save_survey(found, out, export) if out else []
    if as_json:
        return options.print_json(found.to_dict())
    for table_ in output.survey_tables(found):
        show(table_)
    show(output.legend(found))
    if found.smallest:
        say(f"smallest set: {found.smallest.text()}", stderr=False)
    return say(f"wrote {len(written)} files into {out}", stderr=False) if out else None


@command("needlework prune tiny-jamba --keep 0.25 --uniform --out small-jamba")
def prune(
    model: options.Model,
    keep: Annotated[
        str,
        typer.Option(
            help="Heads that stay: a number, a share (of heads ranked on the spot), a ranking's file, FILE:10, or '2.0 2.5'."
        ),
    ],
    out: options.Out,
    others: Annotated[
        str, typer.Option(help="What stays of the other heads: none, or window=64,sinks=4 (they stream, weights stay).")
    ] = "none",
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Equally many heads in every layer, whole groups: stock transformers loads it.")
    ] = False,
    samples: Annotated[int, typer.Option(min=0, help="Needles for the card, rounded up to all depths; 0: none.")] = 1000,
    plugin: options.Plugins = [],  # noqa: B006
    as_json: options.Json = False,
    *,
    loading: options.Loading,
) -> None:
    """Write a smaller checkpoint: heads are removed from the weights, and kv heads and caches with their groups.

    The new model is compared with the whole one, read back, measured, and described in its README.md.
    """
    from needlework.pruning.card import summarize

    done = nw.prune(model, keep, out, others=others, uniform=uniform, samples=samples, progress=not as_json, **loading)
    show(f"{summarize(done.record)}\ncard: {out / 'README.md'}", done.record, as_json)


@command("needlework budget jamba-v0.1 --context 131072 --batch 8 --memory 160GB")
def budget(
    model: options.Model,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each request, prompt and answer.")],
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    memory: Annotated[str | None, typer.Option(help="The limit for weights, KV cache and states, e.g. 24GB or 24GiB.")] = None,
    ranking: Annotated[
        Path | None,
        typer.Option(help="The order in which heads keep all keys: ours, Wu's or LOCOS's .json, or DuoAttention's .tsv."),
    ] = None,
    stream: Annotated[str, typer.Option(help="What a streaming head keeps: last and first keys.")] = "window=256,sinks=4",
    samples: Annotated[int, typer.Option(min=0, help="Needles that retrieval is measured on; 0: it is not measured.")] = 0,
    export: Annotated[list[str], typer.Option(help="Forms for other programs: duo, kvpress, locos or vllm.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Directory for --export.")] = None,
    as_json: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernels: options.Kernels = None,
    threads: options.Threads = None,
) -> None:
    """Compute the memory of a model that is served, and which attention heads can keep all keys within a limit.

    Heads that do not fit stream: they keep a window of keys and the first keys. Weights are only loaded with --samples, which
    measures the retrieval that is left.
    """
    from needlework.pruning.prune import parse_others

    if bool(export) != bool(out):
        raise nw.NeedleworkError("--export and --out go together, e.g. --export vllm --out serving")
    streaming = parse_others(stream)
    if streaming is None:
        raise nw.NeedleworkError("--stream none keeps nothing; give e.g. window=256,sinks=4")
    found = nw.budget(
        model,
        context=context,
        batch=batch,
        memory=options.read_bytes(memory),
        ranking=ranking,
        window=streaming.window,
        sinks=streaming.sinks,
        samples=samples,
        **options.read_loading(device, dtype, kernels=kernels),
    )
    written = found.save(out, export) if out else []
    sentences = "\n".join(["", found.text(), *(f"wrote {file}" for file in written)])
    show([found.table(), sentences], {**found.to_dict(), "files": written}, as_json)


@command("needlework gguf small-jamba --out small-jamba.gguf")
def gguf(
    model: options.Model,
    out: Annotated[Path, typer.Option(help="The new file.")],
    dtype: Annotated[str | None, typer.Option(help="Of matrices: float32, float16, bfloat16. Default: the weights' own.")] = None,
    as_json: options.Json = False,
) -> None:
    """Write a model for llama.cpp: a GGUF file, of Llama and Jamba classes, whole or with heads removed.

    Layers that llama.cpp cannot load are refused, and the message says what to keep instead.
    """
    written = nw.write_gguf(model, out, dtype)
    said = (
        f"{written.path}: {written.bytes:,} bytes; architecture {written.architecture}, tokenizer {written.tokenizer},"
        f" kv heads of the layers: {' '.join(map(str, written.kv_heads))}"
    )
    if written.tokenizer == "none":
        said += "\nllama.cpp has no tokenizer like this model's: give token ids, and get token ids"
    show(said, {**asdict(written), "path": str(written.path)}, as_json)


@command("needlework zoo")
def zoo(as_json: options.Json = False) -> None:
    """List the models that come with needlework, with their measured figures."""
    from needlework.inspection import zoo_table
    from needlework.zoo import catalog

    entries = catalog()
    show(zoo_table(entries), {name: entry.record for name, entry in entries.items()}, as_json)


@command("needlework train tiny-griffin --out my-griffin")
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe of the zoo, or a YAML file of your own.")],
    out: options.Out,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's own number.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's own seed.")] = None,
    card: Annotated[bool, typer.Option("--card/--no-card", help="Measure figures for the model card at the end.")] = True,
    as_json: options.Json = False,
) -> None:
    """Train a zoo recipe or your own. The same command resumes a training that was stopped.

    With --no-card nothing is measured at the end; the model can be loaded, and its record says so.
    """
    from needlework.training.train import CARD_SAMPLES
    from needlework.training.train import train as run

    record = run(recipe, out, steps=steps, seed=seed, card_samples=CARD_SAMPLES if card else 0)
    what = "card" if card else "not measured; a card without figures"
    show(f"{record['name']}: {record['steps']} steps, {what} in {out / 'README.md'}", record, as_json)


@command("needlework study concentration --out runs/concentration --jobs 2")
def study(
    file: Annotated[str, typer.Argument(help="A study that comes with needlework, or a YAML file of your own.")],
    out: options.Out,
    jobs: Annotated[int, typer.Option(min=1, help="Models trained at a time, one core each.")] = 1,
    seed: Annotated[
        list[int], typer.Option(min=0, help="Training seeds instead of the study's own; give it several times.")
    ] = [],  # noqa: B006
    train: Annotated[bool, typer.Option(help="Or ask the models that are trained so far, and train no other.")] = True,
    plugin: options.Plugins = [],  # noqa: B006
    as_json: options.Json = False,
) -> None:
    """Train a grid of recipes, run one plan on all of them, and say what retrieval in few heads depends on.

    Two come with needlework: `concentration` (optimiser x number of heads) and `seeds` (tiny-griffin and tiny-jamba anew).
    """
    from needlework.training.study import study as run
    from needlework.training.study import study_numbers

    result = run(file, out, jobs=jobs, training_seeds=seed, train=train, progress=not as_json)
    if as_json:
        options.print_json(study_numbers(result.models))
    else:
        typer.echo(plain(result.text))  # Markdown, which is not to be wrapped
    if not result.run.sound:
        raise typer.Exit(FAILED)


@command("needlework play tiny-griffin")
def play(
    model: options.Model = "tiny-griffin",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: any free one.")] = 8765,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    export: Annotated[
        Path | None, typer.Option(help="Write the page into one file instead, which needs neither server nor install.")
    ] = None,
    plugin: options.Plugins = [],  # noqa: B006
    *,
    loading: options.Loading,
) -> None:
    """Open a page on which parts of a model are switched off, and see how its answer changes.

    The page is served on loopback, for this machine only, until it is stopped with Ctrl+C.
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
        serve(playground, listening, lambda address: say(f"{model}: {address}  (Ctrl+C stops)", stderr=False), open_)
