"""Leaving out every head, through the engine against the naive loop: equal numbers first, then the ratio of times.

    python benchmarks/heads.py [NAME ...] [--samples N]      names: both, decode

The naive loop is what one writes with transformers alone: the stock model, one hook on an output projection, one head and one
sample at a time. It runs on some of the pairs, drawn evenly over lengths and layers before, between and after the engine's
turns, and is scaled to all of them; absolute times are notes. Seconds are those in which this process computed, over all its
threads: on a machine that others use, too, the time on the wall says more about them.

Fifty times was hoped for. In phase both it is out of reach: without a head of a lower layer, every later layer reads something
else at every token, so all of that is computed anew for each head, and per token the stock model takes but twice our time. In
decode a prompt of 170 tokens is read once for 64 heads and three tokens are fed for each of them: 30 times fewer tokens in all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import process_time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

import needlework as nw
from harness import report_goals
from needlework import zoo
from needlework.heads.causal import Scores, leave_one_out
from needlework.heads.samples import AnsweredItem, select_correct
from needlework.tasks.base import Item, make_task

MODEL, SAMPLES = "tiny-jamba", 64
GOALS = {"both": 5, "decode": 30}
TURNS = 2  # of the engine over all samples, with naive pairs before, between and after them
PAIRS = 24  # of the naive loop each time
console = Console()


def needles(subject: nw.Subject, samples: int) -> list[Item]:
    """The paper's grid in toy words: 4 lengths, 8 depths, as many samples in each cell as needed."""
    cells = {"depths": [0, 14, 28, 42, 57, 71, 85, 100], "samples": -(-samples // 32)}
    items = make_task({"kind": "niah", **cells}).items(subject.tokenizer, 0, subject.anatomy.window, subject.anatomy.max_tokens)
    every = list(items)
    return every[:: len(every) // samples][:samples]


class Naive:
    """Stock transformers: what no one would call clever."""

    def __init__(self, source: Any, subject: nw.Subject) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(source).eval()
        self.projections = {
            layer: (self.model.get_submodule(part.path).o_proj, part.value_dim)
            for layer, part in subject.anatomy.attention_parts()
        }

    @contextmanager
    def without(self, layer: int, head: int) -> Iterator[None]:
        projection, width = self.projections[layer]

        def zero(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0].clone()
            x[..., head * width : (head + 1) * width] = 0.0
            return (x,)

        handle = projection.register_forward_pre_hook(zero)
        try:
            yield
        finally:
            handle.remove()

    @torch.inference_mode()
    def both(self, question: AnsweredItem, layer: int, head: int) -> float:
        """Log-likelihood of the answer with the head silent everywhere."""
        prompt, answer = question.item.prompt, question.answer
        with self.without(layer, head):
            logits = self.model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0].log_softmax(-1)
        return sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))

    @torch.inference_mode()
    def decode(self, question: AnsweredItem, layer: int, head: int) -> float:
        """The same with the head silent from the last token of the prompt on."""
        prompt, answer = question.item.prompt, question.answer
        cache, total = DynamicCache(config=self.model.config), 0.0
        self.model(torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        with self.without(layer, head):
            for fed, token in zip((prompt[-1], *answer), answer, strict=False):
                logits = self.model(torch.tensor([[fed]]), past_key_values=cache, use_cache=True).logits[0, -1]
                total += float(logits.log_softmax(-1)[token])
        return total


def compare(when: Any, samples: int) -> float:
    """How many times the engine's time the naive loop takes."""
    subject = nw.load(MODEL)
    naive, items, heads = Naive(zoo.path(MODEL), subject), needles(subject, samples), subject.anatomy.heads
    asked = select_correct(subject, items)  # also compiles the kernels
    slow: Callable[[AnsweredItem, int, int], float] = getattr(naive, when)
    slow(asked[0], *heads[0])
    every = [(i, h) for i in range(len(asked)) for h in range(len(heads))]
    draw = np.random.default_rng(0)
    slow_seconds, fast_seconds, scores, found = 0.0, [], None, {}
    for turn in range(TURNS + 1):
        start = process_time()
        for i, h in _spread(every, asked, draw):
            found[i, h] = slow(asked[i], *heads[h])
        slow_seconds += process_time() - start
        if turn < TURNS:
            start = process_time()
            scores = leave_one_out(subject, items, seed=0, progress=lambda share: None, phase=when)
            fast_seconds.append(process_time() - start)
    assert scores is not None
    _check(scores, asked, found)
    scaled = slow_seconds / (PAIRS * (TURNS + 1)) * len(every)
    ratio = scaled / float(np.mean(fast_seconds))
    _show(when, scaled, fast_seconds, ratio, len(asked), len(every), len(found))
    return ratio


def _spread(every: list[tuple[int, int]], asked: list[AnsweredItem], draw: np.random.Generator) -> list[tuple[int, int]]:
    """Some pairs of sample and head, one from each stretch of all of them in order of length, so that their mean is fair."""
    order = sorted(every, key=lambda pair: (len(asked[pair[0]].item.prompt), pair))
    edges = np.linspace(0, len(order), PAIRS + 1).astype(int)
    return [order[int(draw.integers(a, b))] for a, b in pairwise(edges)]


def _check(scores: Scores, asked: list[AnsweredItem], found: dict[tuple[int, int], float]) -> None:
    assert scores.each is not None
    apart = max(abs(asked[i].log_p - value - scores.each[i, h]) for (i, h), value in found.items())
    if apart > 1e-4:
        raise SystemExit(f"the engine's drops differ from the naive loop's by {apart:.1e}")
    console.print(f"{len(found)} drops of log P checked against the naive loop: at most {apart:.0e} apart")


def _show(when: str, scaled: float, fast: list[float], ratio: float, samples: int, pairs: int, checked: int) -> None:
    title = f"leave one out, {MODEL}, phase {when}, {samples} samples, {pairs} pairs: [bold]{ratio:.1f}x[/] (goal {GOALS[when]}x)"
    table = Table(title=title, title_justify="left")
    table.add_column("way")
    table.add_column("seconds", justify="right")
    table.add_row(f"naive loop (scaled from {PAIRS * (TURNS + 1)} pairs)", f"{scaled:.0f}")
    table.add_row("engine, each turn", ", ".join(f"{x:.1f}" for x in fast))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(GOALS))
    parser.add_argument("--samples", type=int, default=SAMPLES)
    given = parser.parse_args()
    console.print(f"machine: {torch.get_num_threads()} threads\n")
    ratios = {name: compare(name, given.samples) for name in given.names}
    missed = [f"{name}: {ratio:.1f} < {GOALS[name]}" for name, ratio in ratios.items() if ratio < GOALS[name]]
    return report_goals(missed)


if __name__ == "__main__":
    sys.exit(main())
