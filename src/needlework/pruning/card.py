"""Model card of a pruned model: heads removed, results before and after, memory and time, and how to load it."""

from __future__ import annotations

from typing import Any

from needlework.stats import Estimate
from needlework.tables import Table

_WORDS = {"retrieval": "needles found", "knowledge": "facts completed", "perplexity": "perplexity"}


def text(record: dict[str, Any], name: str) -> str:
    """Return the card as Markdown."""
    sections = [_head(record, name), _loading(record), _cut(record), _figures(record["figures"]), _costs(record)]
    return "\n\n".join(section for section in sections if section) + "\n"


def summary(record: dict[str, Any]) -> str:
    """Return a summary of the record in a few lines for the terminal."""
    heads, costs, weights = record["heads"], record["costs"], record["weight_bytes"]
    streams = sum(len(layer["streaming_kv_heads"]) for layer in record["layers"].values())
    did = f"{heads['kept']} of {heads['before']} heads kept" if record["others"] == "none" else f"{streams} kv heads stream"
    lines = [f"{did}; loads with {record['loads_with']}"]
    lines += [
        f"{_WORDS[x['ability']]}: {_estimate(x['before'], x)} before, {_estimate(x['after'], x)} after" for x in record["figures"]
    ]
    lines.append(f"weights: {weights['before']:,} bytes before, {weights['after']:,} after")
    if costs:
        a, b = costs["before"], costs["after"]
        cached = f"cache of {costs['tokens']:,} tokens, bytes for each"
        lines.append(f"{cached}: {a['kv_bytes_per_token']:,.0f} before, {b['kv_bytes_per_token']:,.0f} after")
        for key, name in (("prefill_seconds", f"prefill of {costs['tokens']:,} tokens"), ("decode_ms_per_token", "decode")):
            lines.append(f"{name}: {b[key] / a[key]:.2f} of the time before")
    return "\n".join(lines)


def _head(record: dict[str, Any], name: str) -> str:
    heads = record["heads"]
    if record["others"] == "none":
        did = (
            f"from which {heads['before'] - heads['kept']} of its {heads['before']} attention heads were taken out of the weights"
        )
    else:
        did = f"in which kv heads that none of {heads['kept']} chosen heads reads hold few tokens ({record['others']})"
    return f"""# {name}

`{record["model"]}` ({record["architecture"]}), {did}; made by needlework {record["needlework"]}.
It computes what the whole model computes under `{record["equals"]}`; that was tried before it was written."""


def _loading(record: dict[str, Any]) -> str:
    if record["loads_with"] == "AutoModelForCausalLM":
        how = (
            "Every attention layer has the same numbers of heads: it loads with `AutoModelForCausalLM.from_pretrained`, without\n"
            "needlework, and with `needlework.load`."
        )
    elif record["others"] == "none":
        how = (
            "Layers have different numbers of heads, or numbers that this family's configuration has no words for: it loads\n"
            "with `needlework.load` (and in every needlework command). `AutoModelForCausalLM` refuses it: shapes do not fit."
        )
    else:
        how = (
            "Heads stream with `needlework.load` (and in every needlework command). `AutoModelForCausalLM` loads the same\n"
            "weights as the whole model: all heads see all keys there."
        )
    return f"## Loading\n\n{how}"


def _cut(record: dict[str, Any]) -> str:
    table = Table(["layer", "query / kv heads before", "after", "kept heads", "streaming kv heads"])
    for layer, x in record["layers"].items():
        table.add_row(layer, _pair(x["before"]), _pair(x["after"]), _list(x["kept"]), _list(x["streaming_kv_heads"]))
    zero = record["heads"]["zero"]
    filled = f"\n\n{zero} heads of zeros fill groups: all kv heads of a layer have equally many query heads." if zero else ""
    return f"""## What was cut, and why

The heads that stay are the best of: {record["said_by"]}.

{table.to_markdown()}{filled}"""


def _pair(numbers: list[int]) -> str:
    return f"{numbers[0]} / {numbers[1]}" if numbers[0] else "none, no cache"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "–"


def _figures(figures: list[dict[str, Any]]) -> str:
    if not figures:
        return "## Held-out figures\n\nNothing was measured (`--samples 0`): it is not known what this model can do."
    table = Table(["", "before", "after", "left of the baseline"])
    for x in figures:
        left = _estimate(x["retained"], x) if "retained" in x else "–"
        table.add_row(f"{_WORDS[x['ability']]} (`{x['task']}`)", _estimate(x["before"], x), _estimate(x["after"], x), left)
    return f"""## Held-out figures

The same samples asked of both models; 95 % intervals (Wilson; of what is left, a paired bootstrap by cluster).

{table.to_markdown()}"""


def _estimate(value: dict[str, Any], row: dict[str, Any]) -> str:
    middle, low, high = (float("nan") if value[key] is None else value[key] for key in ("value", "low", "high"))
    return Estimate(middle, low, high, value["n"]).text("" if row["ability"] == "perplexity" else "%")


def _costs(record: dict[str, Any]) -> str:
    found, weights = record["costs"], record["weight_bytes"]
    how = "processor time with one thread" if found.get("threads") == 1 else f"time on the wall, {found.get('threads')} threads"
    measured = f"The fastest of several, both models measured in turns on the machine that pruned ({how}).\n\n" if found else ""
    rows = [("weights on disk, bytes", weights["before"], weights["after"], 0)]
    rows.append(("parameters", record["parameters"]["before"], record["parameters"]["after"], 0))
    if found:
        a, b = found["before"], found["after"]
        rows += [
            (f"KV bytes per token, at {found['tokens']:,} tokens", a["kv_bytes_per_token"], b["kv_bytes_per_token"], 0),
            (f"prefill of {found['tokens']:,} tokens, s", a["prefill_seconds"], b["prefill_seconds"], 3),
            ("decode after that, ms per token", a["decode_ms_per_token"], b["decode_ms_per_token"], 2),
        ]
    cells = [(name, f"{x:,.{d}f}", f"{y:,.{d}f}", f"{y / x if x else 1:.2f}") for name, x, y, d in rows]
    return f"""## Memory and time

{measured}{Table(["", "before", "after", "ratio"], cells).to_markdown()}"""
