"""Tables for people: the anatomy of a model, answers side by side, the zoo, what the doctor found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from needlework.anatomy import Anatomy
from needlework.checkup.findings import Checkup
from needlework.interventions import Intervention
from needlework.requests import Answer
from needlework.terminal import Sheet, plain
from needlework.zoo import smollm2


def anatomy_of(source: str, window: str = "transformers") -> Anatomy:
    """Anatomy of a preset or configuration without weights, or of a model on disk or on the hub."""
    from needlework.model.load import blueprint, load_body
    from needlework.zoo import resolve

    place = resolve(source)
    if Path(place).is_file():  # a GGUF file has no configuration of its own apart from its weights
        return load_body(place, window=window)[0].anatomy  # type: ignore[arg-type]
    return blueprint(place, window).anatomy  # type: ignore[arg-type]


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def table(anatomy: Anatomy, name: str = "") -> Group:
    """One row per layer, then the totals of each side."""
    columns: tuple[str, ...] = (
        "layer",
        "kind",
        "query/kv heads",
        "dim",
        "window",
        "output",
        "groups",
        "memory, bytes",
        "parameters",
    )
    rows = Sheet(columns, words=("kind", "output"))
    for layer in anatomy.layers:
        a, r = layer.attention, layer.recurrent
        dims = "" if not a else f"{a.key_dim}" if a.key_dim == a.value_dim else f"{a.key_dim}/{a.value_dim}"
        output = " ".join(part for part, has in (("gate", a.output_gate), ("bias", a.output_bias)) if has) if a else ""
        memory = [f"{a.kv_bytes_per_token:,}/token"] if a else []
        memory += [f"{r.state_bytes:,}"] if r else []
        sizes = [_count(part.parameters) for part in (a, r) if part]
        rows.add_row(
            str(layer.index),
            layer.kind,
            f"{a.query_heads} / {a.kv_heads}" if a else "",
            dims,
            (str(a.window) if a.window else "all") if a else "",
            output,
            (str(r.groups) if r.groups else "unknown") if r else "",
            " + ".join(memory),
            " + ".join(sizes),
        )
    columns = ("side", "layers", "heads", "parameters", "share", "memory, bytes", "FLOPs/token*")
    totals = Sheet(columns, "\ntotals", words=("side",))
    sides: tuple[tuple[Any, int, str, int, str], ...] = (
        (
            "attention",
            len(anatomy.attention_layers),
            str(len(anatomy.heads)),
            anatomy.attention_parameters,
            f"{_count(anatomy.kv_bytes_per_token)}/token",
        ),
        (
            "recurrent",
            len(anatomy.recurrent_layers),
            f"{len(anatomy.groups)} groups",
            anatomy.recurrent_parameters,
            f"{_count(anatomy.state_bytes)}",
        ),
    )
    for side, layers, heads, parameters, size in sides:
        share = f"{100 * parameters / anatomy.parameters:.1f} %"
        totals.add_row(side, str(layers), heads, _count(parameters), share, size, _count(anatomy.flops_per_token(side, 2048)))
    totals.add_row("whole model", str(len(anatomy.layers)), "", _count(anatomy.parameters), "100 %", "", "")
    window = f"window rule: {anatomy.window_rule}" if anatomy.window else "no window: attention sees all keys before it"
    reason = f"\nno recurrent side to switch off: {anatomy.no_mixer_reason}" if anatomy.no_mixer_reason else ""
    mixers = sorted({f"{part.mixer} ({part.made_of})" for _, part in anatomy.recurrent_parts()})
    notes = f"* at a context of 2,048 tokens; {window}; mixer: {', '.join(mixers) or 'none'}"
    notes += f"; {_long_prompts(anatomy)}"
    title = f"{name}: {anatomy.architecture} ({anatomy.model_type})".removeprefix(": ")
    return Group(Text(title), rows, totals, Text(f"\n{notes}{reason}"))


def _long_prompts(anatomy: Anatomy) -> str:
    from needlework.model.chunks import CHUNK_TOKENS
    from needlework.model.families import family

    if family(anatomy.model_type).continues_prefill(fast=True):
        return f"long prompts are read in chunks of {CHUNK_TOKENS:,} tokens"
    return "long prompts are read in one piece: its state does not take a second one"


def answers_table(interventions: Sequence[Intervention], answers: Sequence[Answer]) -> Table:
    """One row per intervention, with what was done and what came of it."""
    columns = ("intervention", "answer", "finish", "mean logprob", "heads zeroed", "states cut", "columns touched")
    rows = Sheet(columns, words=columns[:3])
    for intervention, answer in zip(interventions, answers, strict=True):
        mean = sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else float("nan")
        done = [str(answer.receipt.total(what)) for what in ("heads_zeroed", "states_cut", "columns_touched")]
        said = Text(plain(answer.error or answer.text))
        rows.add_row(Text(plain(str(intervention))), said, answer.finish, f"{mean:.2f}", *done)
    return rows


_FIGURES = (
    ("needle at n", "niah_{n}_1_needle"),
    ("among 8 others", "niah_{n}_8_distractors"),
    ("needle at 2n", "niah_{2n}_1_needle"),
    ("among 8 others", "niah_{2n}_8_distractors"),
    ("cloze facts", "cloze_question"),
    ("letter facts", "letter_choice"),
)
_SILENCED = {"ablate_attention()": "no heads", "keep_heads(fraction=0.15)": "15 % heads", "ablate_recurrent()": "no memory"}


def zoo_table(entries: Mapping[str, Any]) -> Group:
    """One row a model: what it can do, and what is left when a part of it is silenced."""
    title = "the zoo: % right of held-out questions (their number and intervals: `--json`)"
    able = Sheet(("model", "size", "n", *(label for label, _ in _FIGURES)), title, words=("model",))
    silenced = (f"{label}: {what}" for label in _SILENCED.values() for what in ("needle", "facts"))
    left = Sheet(("model", *silenced), "\nthe same with a part silenced", words=("model",))
    for name, entry in entries.items():
        record = entry.record
        figures = [_percent(record["figures"].get(_at(key, record))) for _, key in _FIGURES]
        able.add_row(name, f"{record['parameters'] / 1e6:.2f}M", str(record["longest_document_tokens"]), *figures)
        effects = [record["effects"].get(act, {}) for act in _SILENCED]
        left.add_row(name, *(_percent(effect.get(task)) for effect in effects for task in ("niah", "cloze")))
    notes = f"""
size: parameters. n: tokens of the longest document in training.
And {smollm2.NAME}, a pretrained Transformer: {smollm2.INSTALL}"""
    return Group(able, left, Text(notes))


def checkup_table(checkup: Checkup) -> Group:
    """One row a law; then what a person should look at themselves, and the result in one sentence."""
    columns = ("law", "result", "measured", "allowed", "what was seen, or why it does not apply")
    rows = Sheet(columns, words=(columns[0], columns[1], columns[4]))
    styles = {"pass": "green", "fail": "bold red", "does not apply": "dim"}
    for check in checkup.checks:
        numbers = ["" if value is None else f"{value:.1e}" for value in (check.measured, check.allowed)]
        rows.add_row(check.law, Text(check.outcome, styles[check.outcome]), *numbers, Text(plain(check.why)))
    shown = [Text(plain(f"\n{check.law}\n" + "\n".join(check.shown))) for check in checkup.checks if check.shown]
    unit = Text("\nmeasured, allowed: in standard deviations of the model's logits")
    return Group(rows, unit, *shown, Text(f"\n{checkup.verdict()}", "" if checkup.sound else "bold red"))


def plans_table(plans: Mapping[str, Any]) -> Table:
    """One row a shipped plan. Its number or its words alone are names, too."""
    columns = ("plan", "models", "about")
    rows = Sheet(columns, "needlework run PLAN --out DIR (a plan's number or its words alone will do)", words=columns)
    for name, plan in plans.items():
        rows.add_row(name, Text(", ".join(plan.models)), Text(plan.about))
    return rows


def _at(key: str, record: Mapping[str, Any]) -> str:
    longest = record["longest_document_tokens"]
    return key.replace("{n}", str(longest)).replace("{2n}", str(2 * longest))


def _percent(figure: Mapping[str, float] | None) -> str:
    return "-" if figure is None else f"{100 * figure['value']:.1f}"
