"""Measure a model before and after pruning: accuracy and perplexity on the same samples, memory and time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Phase
from needlework.measure import make_samples, measure
from needlework.receipts import Tally
from needlework.stats import accuracy, perplexity, retained
from needlework.tasks import toy
from needlework.tasks.base import Item, Task, make_task
from needlework.terminal import Bar
from needlework.zoo import RECORD

if TYPE_CHECKING:
    from needlework.subject import Subject

FIGURES_SEED = 1000  # far from the small seeds that heads are ranked with
DEPTHS = (0, 25, 50, 75, 100)
ROOM = 40  # most words that question and answer add to the context of a toy prompt
TEXTS = 64  # for perplexity
LONG, STEPS, REPEATS = 2048, 32, 3  # context tokens, decode steps and repetitions when time is measured


def require_tokenizer_to_measure(subject: Subject) -> Any:
    """Return the model's tokenizer; raise if it has none."""
    if subject.tokenizer is None:
        raise NeedleworkError(
            "the model has no tokenizer, so that nothing can be asked of it: give a ranking file and samples=0 (--samples 0)"
        )
    return subject.tokenizer


def retrieval(subject: Subject, samples: int) -> Task:
    """Return a needle task whose context is as long as the model's training documents (zoo models), or 256 tokens."""
    each = max(1, -(-samples // len(DEPTHS)))
    if toy.is_toy(require_tokenizer_to_measure(subject)):
        return make_task(
            {"kind": "niah", "lengths": [longest_document(subject) - ROOM], "depths": DEPTHS, "samples": each, "distractors": 3}
        )
    return make_task({"kind": "niah", "lengths": [256], "depths": DEPTHS, "samples": each, "reserve_tokens": 60})


def longest_document(subject: Subject) -> int:
    """Return the number of tokens of the longest training document of a zoo model; 256 for other models."""
    try:
        assert subject.body.source is not None
        return int(json.loads((subject.body.source / RECORD).read_text(encoding="utf-8"))["longest_document_tokens"])
    except (AssertionError, OSError, ValueError, KeyError, TypeError):
        return 256


def _tasks(subject: Subject, samples: int) -> list[Task]:
    known = toy.is_toy(require_tokenizer_to_measure(subject))
    knowledge = [make_task({"kind": "cloze"})] if known else []
    return [retrieval(subject, samples), *knowledge, make_task({"kind": "perplexity", "samples": min(TEXTS, samples)})]


def compare(before: Subject, after: Subject, samples: int, progress: bool = False) -> list[dict[str, Any]]:
    """Measure both models on the same samples of each task; return a JSON-compatible row for each task."""
    tasks = _tasks(before, samples)
    samples_of = [make_samples(before, task, FIGURES_SEED) for task in tasks]
    rows = []
    with Bar(2 * sum(map(len, samples_of)), "samples", shown=progress) as bar:
        for task, drawn in zip(tasks, samples_of, strict=True):
            scores = []
            for subject, word in ((before, "before"), (after, "after")):
                bar.show(f"{task.kind} {word}")
                scores.append(measure(subject, drawn, progress=lambda _: bar.advance()).scores[0])
            rows.append(_row(task, [sample.item for sample in drawn], *scores))
    return rows


def _row(task: Task, items: Sequence[Item], before: list[dict[str, float]], after: list[dict[str, float]]) -> dict[str, Any]:
    clusters = np.unique([item.cluster for item in items], return_inverse=True)[1]
    row: dict[str, Any] = {"task": task.kind, "ability": task.ability, "n": len(items)}
    if task.mode == "perplexity":
        for name, scores in (("before", before), ("after", after)):
            tokens = [one["tokens"] for one in scores]
            nll = [one["nll"] * n for one, n in zip(scores, tokens, strict=True)]
            row[name] = perplexity(nll, tokens, clusters).to_dict()
        return row
    right = [[one["correct"] for one in scores] for scores in (before, after)]
    kept = retained(right[1], right[0], clusters, task.chance)
    return {**row, "before": accuracy(right[0]).to_dict(), "after": accuracy(right[1]).to_dict(), "retained": kept.to_dict()}


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
                seconds, kv_bytes = _measure(subjects[name], tokens)
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


def _measure(subject: Subject, tokens: int) -> tuple[tuple[float, float], int]:
    """Return (seconds of a prefill, of the fastest decode step after it), and the bytes of the KV cache after prefill."""
    body = subject.body
    ids = (torch.arange(tokens + STEPS, device=body.device) * 7 % body.anatomy.vocabulary)[None]
    slots = torch.zeros(1, dtype=torch.int64, device=body.device)
    with body.session():
        rows, memory, tally = body.compile([[]], [0], "prefill", slots), body.new_memory(1), Tally(1)

        def seconds(part: slice, phase: Phase) -> float:
            began = _now(body.device)
            body.feed(ids[:, part], memory, phase, rows, tally).argmax(-1).tolist()  # .tolist() synchronises a GPU
            return _now(body.device) - began

        prefill, kv_bytes = seconds(slice(0, tokens), "prefill"), memory.nbytes("kv")
        return (prefill, min(seconds(slice(t, t + 1), "decode") for t in range(tokens, tokens + STEPS))), kv_bytes


def _now(device: torch.device) -> float:
    """Return CPU time if one CPU thread is used, which other processes do not affect; otherwise wall-clock time."""
    return time.process_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()
