"""Tables for the terminal: a model's anatomy, answers, the zoo, results of the doctor, shipped plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from needlework import zoo
from needlework.anatomy import Anatomy, Layer
from needlework.checks import Checkup
from needlework.interventions import Intervention
from needlework.requests import Answer
from needlework.tables import Table
from needlework.terminal import plain


def anatomy_of(source: str, window: str = "transformers") -> Anatomy:
    """Return the anatomy of a preset, zoo name, model directory, hub id or GGUF file, without loading weights."""
    from needlework.model.load import blueprint

    return blueprint(zoo.resolve(source), window).anatomy  # type: ignore[arg-type]


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def anatomy_table(anatomy: Anatomy, name: str = "") -> Group:
    """Return a table with one row per layer, then totals of the attention and recurrent sides, and notes."""
    from needlework.model.families import family
    from needlework.model.hooked_model import CHUNK_TOKENS

    columns = ("layer", "kind", "query/kv heads", "dim", "window", "output", "groups", "memory, bytes", "parameters")
    rows = Table(columns, [_layer_row(layer) for layer in anatomy.layers], left=("kind", "output"))
    window = f"window rule: {anatomy.window_rule}" if anatomy.window else "no window: attention sees all keys before it"
    mixers = sorted({f"{part.mixer} ({part.made_of})" for _, part in anatomy.recurrent_parts()})
    chunks = family(anatomy.model_type).continues_prefill(fast=True)
    chunked = f"chunks of {CHUNK_TOKENS:,} tokens" if chunks else "one piece: its state does not take a second one"
    notes = f"* at a context of 2,048 tokens; {window}; mixer: {', '.join(mixers) or 'none'}; long prompts are read in {chunked}"
    notes += f"\nno recurrent side to switch off: {anatomy.no_mixer_reason}" if anatomy.no_mixer_reason else ""
    notes += f"\nnot loaded: {anatomy.left_out}" if anatomy.left_out else ""
    title = f"{name}: {anatomy.architecture} ({anatomy.model_type})".removeprefix(": ")
    heading = ("side", "layers", "heads", "parameters", "share", "memory, bytes", "FLOPs/token*")
    totals = Table(heading, caption="\ntotals", left=("side",))
    attention, recurrent = anatomy.attention_parameters, anatomy.recurrent_parameters
    kv, state = f"{_count(anatomy.kv_bytes_per_token)}/token", _count(anatomy.state_bytes)
    sides: tuple[tuple[Any, int, str, int, str], ...] = (
        ("attention", len(anatomy.attention_layers), str(len(anatomy.heads)), attention, kv),
        ("recurrent", len(anatomy.recurrent_layers), f"{len(anatomy.groups)} groups", recurrent, state),
    )
    for side, layers, heads, parameters, size in sides:
        share = f"{100 * parameters / anatomy.parameters:.1f} %"
        totals.add_row(side, str(layers), heads, _count(parameters), share, size, _count(anatomy.flops_per_token(side, 2048)))
    totals.add_row("whole model", str(len(anatomy.layers)), "", _count(anatomy.parameters), "100 %", "", "")
    return Group(Text(title), rows, totals, Text(f"\n{notes}"))


def _layer_row(layer: Layer) -> tuple[str, ...]:
    memory, sizes = [], []
    heads = dims = window = output = groups = ""
    if a := layer.attention:
        heads, window = f"{a.query_heads} / {a.kv_heads}", str(a.window or "all")
        dims = f"{a.key_dim}" if a.key_dim == a.value_dim else f"{a.key_dim}/{a.value_dim}"
        output = " ".join(part for part, has in (("gate", a.output_gate), ("bias", a.output_bias)) if has)
        memory.append(f"{a.kv_bytes_per_token:,}/token")
        sizes.append(_count(a.parameters))
    if r := layer.recurrent:
        groups = str(r.groups or "unknown")
        memory.append(f"{r.state_bytes:,}")
        sizes.append(_count(r.parameters))
    return (str(layer.index), layer.kind, heads, dims, window, output, groups, " + ".join(memory), " + ".join(sizes))


def answers_table(interventions: Sequence[Intervention], answers: Sequence[Answer]) -> Table:
    """Return a table with one row per intervention: the answer and counts of its receipt."""
    columns = ("intervention", "answer", "finish", "mean logprob", "heads zeroed", "states cut", "columns touched")
    rows = Table(columns, left=columns[:3])
    for intervention, answer in zip(interventions, answers, strict=True):
        mean = sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else float("nan")
        done = [str(answer.receipt.total(what)) for what in ("heads_zeroed", "states_cut", "columns_touched")]
        rows.add_row(str(intervention), answer.error or answer.text, answer.finish, f"{mean:.2f}", *done)
    return rows


_FIGURES = (  # column, and figure of a card for n or 2n tokens
    ("needle at n", "niah_{0}_1_needle"),
    ("among 8 others", "niah_{0}_8_distractors"),
    ("needle at 2n", "niah_{1}_1_needle"),
    ("among 8 others", "niah_{1}_8_distractors"),
    ("cloze facts", "cloze_question"),
    ("letter facts", "letter_choice"),
)
_ABLATED = {"ablate_attention()": "no heads", "keep_heads(fraction=0.15)": "15 % heads", "ablate_recurrent()": "no memory"}


def zoo_table(models: Mapping[str, zoo.ZooModel]) -> Group:
    """Return two tables with one row per model: accuracy, and accuracy with a part ablated."""

    def percent(figure: Mapping[str, float] | None) -> str:
        return "-" if figure is None else f"{100 * figure['value']:.1f}"

    title = "the zoo: % right of held-out questions (their number and intervals: `--json`)"
    able = Table(("model", "size", "n", *(label for label, _ in _FIGURES)), caption=title, left=("model",))
    ablated = (f"{label}: {what}" for label in _ABLATED.values() for what in ("needle", "facts"))
    left = Table(("model", *ablated), caption="\nthe same with a part ablated", left=("model",))
    for name, model in models.items():
        record, longest = model.record, model.record["longest_document_tokens"]
        figures = [percent(record["figures"].get(key.format(longest, 2 * longest))) for _, key in _FIGURES]
        able.add_row(name, f"{record['parameters'] / 1e6:.2f}M", str(longest), *figures)
        effects = [record["effects"].get(act, {}) for act in _ABLATED]
        left.add_row(name, *(percent(effect.get(task)) for effect in effects for task in ("niah", "cloze")))
    notes = f"""
size: parameters. n: tokens of the longest document in training.
And {zoo.SMOLLM2}, a pretrained Transformer: {zoo.INSTALL}"""
    return Group(able, left, Text(notes))


def checkup_table(checkup: Checkup) -> Group:
    """Return a table with one row per law, then lines to check by eye, and the result in one sentence."""
    columns = ("law", "result", "measured", "allowed", "what was seen, or why it does not apply")
    rows = Table(columns, left=(columns[0], columns[1], columns[4]))
    styles = {"pass": "green", "fail": "bold red", "does not apply": "dim"}
    for check in checkup.checks:
        numbers = ["" if value is None else f"{value:.1e}" for value in (check.measured, check.allowed)]
        rows.add_row(check.law, Text(check.outcome, styles[check.outcome]), *numbers, check.why)
    shown = [Text(plain(f"\n{check.law}\n" + "\n".join(check.shown))) for check in checkup.checks if check.shown]
    unit = Text("\nmeasured, allowed: in standard deviations of the model's logits")
    return Group(rows, unit, *shown, Text(f"\n{checkup.verdict()}", "" if checkup.sound else "bold red"))


def plans_table(plans: Mapping[str, Any]) -> Table:
    """Return a table with one row per shipped plan."""
    columns = ("plan", "models", "about")
    rows = [(name, ", ".join(plan.models), plan.about) for name, plan in plans.items()]
    return Table(columns, rows, "needlework run PLAN --out DIR (a plan's number or its words alone will do)")
