"""The zoo: training throughput against stock transformers, and the shipped models' cards measured again.

    python benchmarks/zoo.py [--rows 16] [--length 256] [--steps 3] [--samples 1000]

Both sides of the throughput do the forward and backward passes of one recipe on the same documents with the same thread
count; only the scans differ. Two more sides say what is in reach: `free_scan` is stock transformers with RecurrentGemma's
loop over tokens left out; `products_alone` computes nothing but the matrix products of a step (not even attention), at the rate
that one large matrix product has on this machine.
Cards are measured on held-out samples of another seed, also what silencing parts does. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from harness import report_goals
from needlework import zoo
from needlework.model.families import fast_kernels
from needlework.stats import Estimate
from needlework.training import card, documents, recipes
from needlework.training.train import build_model, fixed_threads

SEED = 2  # cards use 0, and what is followed while training 1
WANTED = {"tiny-griffin": 12.0, "tiny-jamba": 10.0}  # times the tokens per second of stock transformers


def goals(name: str, longest: int) -> dict[str, float]:
    """What a card must show: needles at training lengths and at twice that, with and without distractors, and facts."""
    facts = {"cloze_statement": 0.95, "cloze_question": 0.95}
    if name == "tiny-mamba":  # without attention: a needle among few, if the text is read twice
        return {**facts, f"niah_{longest}_3_distractors_jrt": 0.7}
    if name == "tiny-lfm":  # which knows hideouts only; its goals are those of `phases`
        return {}
    hay = {longest: 0.99, 2 * longest: 0.95}
    needles = {f"niah_{length}_{among}": goal for length, goal in hay.items() for among in ("1_needle", "8_distractors")}
    return {**needles, **facts, "letter_choice": 0.9}


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


def free_scan() -> AbstractContextManager[Any]:
    """Stock RecurrentGemma whose recurrence costs nothing (and does nothing)."""

    def passed_on(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, hidden_states[:, -1]

    return patch.object(RecurrentGemmaRglru, "_rnn_scan", passed_on)


def products_alone(model: Any, ids: torch.Tensor) -> float:
    """Seconds of one forward and backward pass whose matrix products ran as fast as one large product does."""
    with FlopCounterMode(display=False) as counter:
        seconds_per_step(model, ids, 1)
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
    return float(counter.get_total_flops() / (2 * size**3 / best))


def compare(name: str, rows: int, length: int, steps: int, threads: int) -> dict[str, Any]:
    recipe = recipes.find_recipe(name)
    if "num_experts" in recipe.config:  # both sides spend the same time on experts: they would only hide the scan
        dense = {**recipe.config, "num_experts": 1, "num_experts_per_tok": 1}
        recipe = recipes.validate_recipe({**recipe.model_dump(), "config": dense}, name)
    array, _ = documents.make_batch(0, 0, rows, length, recipe.document_mix(recipe.stages[-1]))
    ids = torch.from_numpy(array)
    model = build_model(recipe).train()
    rates = {}
    with fixed_threads(threads):
        sides = {"needlework": fast_kernels(model), "transformers": nullcontext()}
        sides |= {"free_scan": free_scan()} if name == "tiny-griffin" else {}
        for side, scope in sides.items():
            with scope:
                if side == "needlework":
                    seconds_per_step(model, ids[:2, :32], 1)  # compiles
                rates[side] = rows * length / seconds_per_step(model, ids, steps)
        with fast_kernels(model):
            rates["products_alone"] = rows * length / products_alone(model, ids)
    return {
        "recipe": name,
        "rows": rows,
        "length": length,
        "threads": threads,
        "tokens_per_second": {side: round(rate, 1) for side, rate in rates.items()},
        "times_faster": round(rates["needlework"] / rates["transformers"], 2),
        "most_in_reach": round(rates["products_alone"] / rates["transformers"], 2),
        "wanted": WANTED[name],
    }


def tells_phases_apart(found: card.Effects) -> bool:
    """Two hops need attention while reading, one does not."""
    untouched, reading = found["none"], found["ablate_attention(phase='prefill')"]
    one_hop = min(untouched["one_hop"].low, reading["one_hop"].low)
    return untouched["two_hops"].value >= 0.9 and reading["two_hops"].high < 0.5 and one_hop >= 0.95


def agrees(said: dict[str, float], now: Estimate) -> bool:
    """A card and a new measurement of the same thing: their intervals meet, or nearly (a hundred pairs are compared)."""
    return said["low"] - 0.03 <= now.high and now.low <= said["high"] + 0.03


def check_card(name: str, samples: int) -> list[str]:
    """Measure what a card says again, on other samples; the goals that are missed, and where the card is not borne out."""
    entry = zoo.catalog()[name]
    longest = entry.record["longest_document_tokens"]
    wanted = goals(name, longest)
    measured = card.measure_figures_of(entry.path, longest, samples, tuple(wanted), seed=SEED)
    relation = card.relation_of(recipes.find_recipe(name))
    silenced = card.measure_effects(entry.path, longest, seed=SEED, relation=relation)
    phases = {"seed": SEED, "relation": relation, "by_phase": True}
    in_phases = card.measure_effects(entry.path, longest, samples // 5, **phases) if "phases" in entry.record else {}
    pairs = {key: (entry.figures[key], figure) for key, figure in measured.items()}
    pairs |= {
        f"{task} under {text}": (entry.record[table][text][task], figure)
        for table, found in (("effects", silenced), ("phases", in_phases))
        for text, some in found.items()
        for task, figure in some.items()
    }
    told = {
        key: {"card": said["value"], "now": now.value, "n": now.n, "goal": wanted.get(key)} for key, (said, now) in pairs.items()
    }
    print(json.dumps({"model": name, "figures": told}), flush=True)
    missed = [f"{name} {key}" for key, goal in wanted.items() if measured[key].value < goal]
    missed += [f"{name}: hops by phase"] if in_phases and not tells_phases_apart(in_phases) else []
    return missed + [f"{name} {key}: not what its card says" for key, (said, now) in pairs.items() if not agrees(said, now)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    missed = []
    for name, wanted in WANTED.items():
        found = compare(name, options.rows, options.length, options.steps, options.threads)
        print(json.dumps(found), flush=True)
        missed += [f"training {name}"] if found["times_faster"] < wanted else []
    for name in recipes.builtin_recipes():
        missed += check_card(name, options.samples) if name in zoo.catalog() else [f"{name} is not there"]
    return report_goals(missed)


if __name__ == "__main__":
    sys.exit(main())
