"""What a model can do before and after heads left it: the same held-out samples asked of both, and what they take."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Phase
from needlework.receipts import Tally
from needlework.requests import Request, stop_tokens
from needlework.stats import Estimate, accuracy, perplexity, retained
from needlework.tasks import toy
from needlework.tasks.base import Item, Task, make_task
from needlework.terminal import Bar
from needlework.zoo.shelf import RECORD

if TYPE_CHECKING:
    from needlework.subject import Subject

FIGURES_SEED = 1000  # heads are ranked on small seeds
DEPTHS = (0, 25, 50, 75, 100)
ROOM = 40  # words that question and answer need around the context of a toy prompt, at most
TEXTS = 64  # for perplexity
LONG, STEPS, REPEATS = 2048, 32, 3  # tokens of context, decoded ones and measurements of time


class Asked:
    """All samples of a task for one model, as requests."""

    def __init__(self, subject: Subject, task: Task, seed: int = FIGURES_SEED) -> None:
        anatomy, tokenizer = subject.anatomy, demanded(subject)
        self.subject, self.task = subject, task
        self.items: list[Item] = list(task.items(tokenizer, seed, anatomy.window, anatomy.max_tokens))
        most, stop = task.ending(tokenizer)
        eos = getattr(subject.model.generation_config, "eos_token_id", None)
        self._most = most
        self._stop = stop_tokens(eos, () if stop is None else (stop,), partial(subject.encode, continuation=True))

    def answers(self, bar: Bar, name: str) -> list[dict[str, float]]:
        """The scores of every sample, in order."""
        scores: list[dict[str, float]] = [{} for _ in self.items]
        bar.show(name)
        for i, answer in self.subject.engine.run([self._request(item) for item in self.items]):
            if answer.error:
                raise NeedleworkError(f"{self.items[i].id} could not be asked: {answer.error}")
            scores[i] = self.task.score(self.items[i], self.subject.with_text(answer))
            bar.advance()
        return scores

    def _request(self, item: Item) -> Request:
        if self.task.mode == "perplexity":
            return Request(item.prompt[:1], options=(item.prompt[1:],))
        most, stop = item.ending or (self._most, self._stop)
        return Request(item.prompt, max_new_tokens=most, stop=stop, spans=item.spans)


def demanded(subject: Subject) -> Any:
    if subject.tokenizer is None:
        raise NeedleworkError(
            "the model has no tokenizer, so that nothing can be asked of it: give a ranking file and samples=0 (--samples 0)"
        )
    return subject.tokenizer


def retrieval(subject: Subject, samples: int) -> Task:
    """Needles in haystacks of a length that the model was trained for, as far as that is known."""
    each = max(1, -(-samples // len(DEPTHS)))
    if toy.is_toy(demanded(subject)):
        return make_task(
            {"kind": "niah", "lengths": [longest(subject) - ROOM], "depths": DEPTHS, "samples": each, "distractors": 3}
        )
    return make_task({"kind": "niah", "lengths": [256], "depths": DEPTHS, "samples": each, "reserve_tokens": 60})


def longest(subject: Subject) -> int:
    """Tokens of the longest document of a zoo model's training."""
    try:
        assert subject.body.source is not None
        return int(json.loads((subject.body.source / RECORD).read_text(encoding="utf-8"))["longest_document_tokens"])
    except (AssertionError, OSError, ValueError, KeyError, TypeError):
        return 256


def _tasks(subject: Subject, samples: int) -> list[Task]:
    known = toy.is_toy(demanded(subject))
    knowledge = [make_task({"kind": "cloze"})] if known else []
    return [retrieval(subject, samples), *knowledge, make_task({"kind": "perplexity", "samples": min(TEXTS, samples)})]


def compare(before: Subject, after: Subject, samples: int, progress: bool = False) -> list[dict[str, Any]]:
    """Each ability of both, on the same samples, with what is left of it; ready for JSON."""
    tasks = _tasks(before, samples)
    pairs = [(Asked(before, task), Asked(after, task)) for task in tasks]
    rows = []
    with Bar(2 * sum(len(first.items) for first, _ in pairs), "samples", shown=progress) as bar:
        for task, pair in zip(tasks, pairs, strict=True):
            scores = [asked.answers(bar, f"{task.kind} {word}") for asked, word in zip(pair, ("before", "after"), strict=True)]
            rows.append(_row(task, pair[0].items, *scores))
    return rows


def _row(task: Task, items: Sequence[Item], before: list[dict[str, float]], after: list[dict[str, float]]) -> dict[str, Any]:
    clusters = np.unique([item.cluster for item in items], return_inverse=True)[1]
    row: dict[str, Any] = {"task": task.kind, "ability": task.ability, "n": len(items)}
    if task.mode == "perplexity":
        for name, scores in (("before", before), ("after", after)):
            tokens = [one["tokens"] for one in scores]
            nll = [one["nll"] * n for one, n in zip(scores, tokens, strict=True)]
            row[name] = as_dict(perplexity(nll, tokens, clusters))
        return row
    right = [[one["correct"] for one in scores] for scores in (before, after)]
    kept = retained(right[1], right[0], clusters, task.chance)
    return {**row, "before": as_dict(accuracy(right[0])), "after": as_dict(accuracy(right[1])), "retained": as_dict(kept)}


def as_dict(estimate: Estimate) -> dict[str, float | int | None]:
    """Ready for JSON, which has no NaN."""
    numbers = {key: getattr(estimate, key) for key in ("value", "low", "high")}
    return {**{key: value if np.isfinite(value) else None for key, value in numbers.items()}, "n": estimate.n}


def costs(before: Subject, after: Subject, tokens: int = LONG, progress: bool = False) -> dict[str, Any]:
    """Memory and time of both at one length of context, measured in turns: what else the machine does disturbs both."""
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
        prefill, decode = (min(one) for one in zip(*times[name], strict=True))  # noise only ever adds time
        found[name] |= {
            "parameters": subject.anatomy.parameters,
            "kv_bytes_per_token": found[name]["kv_bytes"] / tokens,
            "prefill_seconds": prefill,
            "decode_ms_per_token": 1000 * decode,
        }
    return found


def _measure(subject: Subject, tokens: int) -> tuple[tuple[float, float], int]:
    """Seconds of a prefill and of the fastest decoded token after it, and the bytes of keys and values that the prompt leaves."""
    body = subject.body
    ids = (torch.arange(tokens + STEPS, device=body.device) * 7 % body.anatomy.vocabulary)[None]
    slots = torch.zeros(1, dtype=torch.int64, device=body.device)
    with body.session():
        rows, memory, tally = body.compile([[]], [0], "prefill", slots), body.new_memory(1), Tally(1)

        def seconds(part: slice, phase: Phase) -> float:
            began = _now(body.device)
            body.feed(ids[:, part], memory, phase, rows, tally).argmax(-1).tolist()  # a GPU is waited for
            return _now(body.device) - began

        prefill, kv_bytes = seconds(slice(0, tokens), "prefill"), memory.nbytes("kv")
        return (prefill, min(seconds(slice(t, t + 1), "decode") for t in range(tokens, tokens + STEPS))), kv_bytes


def _now(device: torch.device) -> float:
    """With one thread, processor time: whoever else uses the machine does not count. Else the clock on the wall."""
    return time.process_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()
