"""Measure a model before and after pruning, and describe it: the model card and the summary for the terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined

from needlework.interventions.acts import Phase
from needlework.measure import make_samples, measure, require_tokenizer
from needlework.receipts import Tally
from needlework.stats import Estimate, accuracy, perplexity, retained
from needlework.subject import Subject
from needlework.tasks import toy
from needlework.tasks.base import Task, make_task
from needlework.terminal import Bar
from needlework.zoo import RECORD

FIGURES_SEED = 1000  # far from the small seeds that heads are ranked with
DEPTHS = (0, 25, 50, 75, 100)
ROOM = 40  # most words that question and answer add to the context of a toy prompt
TEXTS = 64  # for perplexity
LONG, STEPS, REPEATS = 2048, 32, 3  # context tokens, decode steps and repetitions when time is measured


def needle_task(subject: Subject, samples: int) -> Task:
    """Return a needle task whose context is as long as the model's training documents (zoo models), or 256 tokens."""
    how: dict[str, Any] = {"kind": "niah", "depths": DEPTHS, "samples": max(1, -(-samples // len(DEPTHS)))}
    if not toy.is_toy(require_tokenizer(subject)):
        return make_task({**how, "lengths": [256], "reserve_tokens": 60})
    try:
        assert subject.body.source is not None
        record = json.loads((subject.body.source / RECORD).read_text(encoding="utf-8"))
        longest = int(record["longest_document_tokens"])
    except (AssertionError, OSError, ValueError, KeyError, TypeError):
        longest = 256
    return make_task({**how, "lengths": [longest - ROOM], "distractors": 3})


def compare(before: Subject, after: Subject, samples: int, progress: bool = False) -> list[dict[str, Any]]:
    """Measure both models on the same samples of each task; return a JSON-compatible row for each task."""
    tasks = [needle_task(before, samples)]
    if toy.is_toy(before.tokenizer):
        tasks.append(make_task({"kind": "cloze"}))
    tasks.append(make_task({"kind": "perplexity", "samples": min(TEXTS, samples)}))
    samples_of = [make_samples(before, task, FIGURES_SEED) for task in tasks]
    rows = []
    with Bar(2 * sum(map(len, samples_of)), "samples", shown=progress) as bar:
        for task, drawn in zip(tasks, samples_of, strict=True):
            clusters = np.unique([sample.item.cluster for sample in drawn], return_inverse=True)[1]
            row: dict[str, Any] = {"task": task.kind, "ability": task.ability, "n": len(drawn)}
            right = []
            for subject, word in ((before, "before"), (after, "after")):
                bar.show(f"{task.kind} {word}")
                scores = measure(subject, drawn, progress=lambda _: bar.advance()).scores[0]
                if task.mode == "perplexity":
                    tokens = [one["tokens"] for one in scores]
                    nll = [one["nll"] * n for one, n in zip(scores, tokens, strict=True)]
                    row[word] = perplexity(nll, tokens, clusters).to_dict()
                else:
                    right.append([one["correct"] for one in scores])
                    row[word] = accuracy(right[-1]).to_dict()
            if right:
                row["retained"] = retained(right[1], right[0], clusters, task.chance).to_dict()
            rows.append(row)
    return rows


def costs(before: Subject, after: Subject, tokens: int = LONG, progress: bool = False) -> dict[str, Any]:
    """Measure cache size and time of both models at one context length, alternating, so that other load affects both."""
    subjects = {"before": before, "after": after}
    tokens = min([tokens, *(s.anatomy.max_tokens - STEPS for s in subjects.values() if s.anatomy.max_tokens)])
    found: dict[str, Any] = {"tokens": tokens, "threads": torch.get_num_threads()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    with Bar(2 * REPEATS, "measurements", shown=progress) as bar:
        for turn in range(REPEATS):
            for name in sorted(subjects, reverse=turn % 2 == 0):
                bar.show(f"time {name}")
                seconds, kv_bytes = _measure_costs(subjects[name], tokens)
                times[name].append(seconds)
                found[name] = {"kv_bytes": kv_bytes}
                bar.advance()
    for name, subject in subjects.items():
        prefill, decode = (min(one) for one in zip(*times[name], strict=True))  # minimum, because other load only adds time
        found[name] |= {
            "parameters": subject.anatomy.parameters,
            "kv_bytes_per_token": found[name]["kv_bytes"] / tokens,
            "prefill_seconds": prefill,
            "decode_ms_per_token": 1000 * decode,
        }
    return found


def _measure_costs(subject: Subject, tokens: int) -> tuple[tuple[float, float], int]:
    """Return (seconds of a prefill, of the fastest decode step after it), and the bytes of the KV cache after prefill."""
    body = subject.body
    ids = (torch.arange(tokens + STEPS, device=body.device) * 7 % body.anatomy.vocabulary)[None]
    slots = torch.zeros(1, dtype=torch.int64, device=body.device)
    # CPU time if one CPU thread is used, because other processes do not affect it.
    alone = body.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    with body.session():
        rows, memory, tally = body.compile([[]], [0], "prefill", slots), body.new_memory(1), Tally(1)

        def seconds(part: slice, phase: Phase) -> float:
            began = clock()
            body.feed(ids[:, part], memory, phase, rows, tally).argmax(-1).tolist()  # .tolist() synchronises a GPU
            return clock() - began

        prefill, kv_bytes = seconds(slice(0, tokens), "prefill"), memory.nbytes("kv")
        return (prefill, min(seconds(slice(t, t + 1), "decode") for t in range(tokens, tokens + STEPS))), kv_bytes


_WORDS = {"retrieval": "needles found", "knowledge": "facts completed", "perplexity": "perplexity"}


def _estimate(value: dict[str, Any], row: dict[str, Any]) -> str:
    middle, low, high = (float("nan") if value[key] is None else value[key] for key in ("value", "low", "high"))
    return Estimate(middle, low, high, value["n"]).text("" if row["ability"] == "perplexity" else "%")


def summarize(record: dict[str, Any]) -> str:
    """Return a summary of the record in a few lines for the terminal."""
    heads, found, weights = record["heads"], record["costs"], record["weight_bytes"]
    streams = sum(len(layer["streaming_kv_heads"]) for layer in record["layers"].values())
    did = f"{heads['kept']} of {heads['before']} heads kept" if record["others"] == "none" else f"{streams} kv heads stream"
    lines = [f"{did}; loads with {record['loads_with']}"]
    for x in record["figures"]:
        lines.append(f"{_WORDS[x['ability']]}: {_estimate(x['before'], x)} before, {_estimate(x['after'], x)} after")
    lines.append(f"weights: {weights['before']:,} bytes before, {weights['after']:,} after")
    if found:
        a, b = found["before"], found["after"]
        cached = f"cache of {found['tokens']:,} tokens, bytes for each"
        lines.append(f"{cached}: {a['kv_bytes_per_token']:,.0f} before, {b['kv_bytes_per_token']:,.0f} after")
        for key, name in (("prefill_seconds", f"prefill of {found['tokens']:,} tokens"), ("decode_ms_per_token", "decode")):
            lines.append(f"{name}: {b[key] / a[key]:.2f} of the time before")
    return "\n".join(lines)


def render_card(record: dict[str, Any], name: str) -> str:
    """Return the model card as Markdown, from the template card.md."""
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    environment = Environment(trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(record, name=name, words=_WORDS, estimate=_estimate)
