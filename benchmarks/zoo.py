"""Training throughput of the zoo's recurrent classes, ours against stock transformers, side by side in one run.

    python benchmarks/zoo.py [--rows 16] [--length 256] [--steps 3]

Both sides train the same recipe on the same documents with the same thread count; only the scans differ.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from typing import Any

import torch

from needlework.subjects.seams import fast_kernels
from needlework.zoo import build, documents, recipes
from needlework.zoo.train import one_pace

WANTED = {"tiny-griffin": 12.0, "tiny-jamba": 10.0}  # times the tokens per second of stock transformers


def seconds_per_step(model: Any, ids: torch.Tensor, steps: int) -> float:
    """The fastest of `steps` forward and backward passes: noise only ever adds time."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        model.zero_grad()
        times.append(time.perf_counter() - began)
    return min(times)


def compare(name: str, rows: int, length: int, steps: int, threads: int) -> dict[str, Any]:
    recipe = recipes.find(name)
    array, _ = documents.batch(0, 0, rows, length, recipe.diet(recipe.stages[-1]))
    ids = torch.from_numpy(array)
    model = build.model(recipe).train()
    rates = {}
    with one_pace(threads):
        for side, scope in (("needlework", fast_kernels(model)), ("transformers", nullcontext())):
            with scope:
                if side == "needlework":
                    seconds_per_step(model, ids[:2, :32], 1)  # compiles
                rates[side] = rows * length / seconds_per_step(model, ids, steps)
    return {
        "recipe": name,
        "rows": rows,
        "length": length,
        "threads": threads,
        "tokens_per_second": {side: round(rate, 1) for side, rate in rates.items()},
        "times_faster": round(rates["needlework"] / rates["transformers"], 2),
        "wanted": WANTED[name],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for name in WANTED:
        print(json.dumps(compare(name, options.rows, options.length, options.steps, options.threads)), flush=True)


if __name__ == "__main__":
    main()
