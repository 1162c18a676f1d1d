"""Pruned models against the whole ones: what they find, what they hold, how fast they read and answer.

    python benchmarks/pruning.py [--samples 1000] [--tokens 2048] [--only tiny-jamba,jamba-1024]

Zoo models keep the best heads by their attention on needles (ranked on other samples than they are judged on), at most a third.
Models of a width that people serve have random weights: there the gain is that of the shapes. Whole and pruned model are measured
in turns in one process, the fastest of each counts, and before that the pruned one must give the answers of the whole one with
the same heads silenced. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, JambaConfig, LlamaConfig

import needlework as nw
from harness import report_goals
from needlework.anatomy import Head
from needlework.pruning.card import compare, costs
from needlework.pruning.prune import choose, prune_subject

console = Console(width=150)
MOST_HEADS, LEAST_LEFT = 1 / 3, 0.99
MOST_CACHE = {"tiny-jamba": 0.4}
SAME_SPEED = 1.05  # decode is no slower, up to noise
ZOO = {"tiny-jamba": 12, "tiny-griffin": 6}  # heads that stay
_WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 1000}
_PLAIN = {"num_hidden_layers": 2, "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _random(config: Any) -> nw.Subject:
    torch.manual_seed(0)
    return nw.wrap(AutoModelForCausalLM.from_config(config))


WIDE: dict[str, Callable[[], nw.Subject]] = {
    "llama-1024": lambda: _random(LlamaConfig(**_WIDE, **_PLAIN)),
    "jamba-1024": lambda: _random(
        JambaConfig(**_WIDE, **_PLAIN, attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1)
    ),
}


def third(subject: nw.Subject) -> tuple[Head, ...]:
    """The first third of each layer's heads: of random weights, no head is better than another."""
    return tuple(head for layer in subject.anatomy.attention_layers for head in layer.heads[: len(layer.heads) // 3])


def same_answers(whole: nw.Subject, smaller: nw.Subject, equals: nw.Intervention) -> None:
    prompts = [tuple(range(3, 40)), tuple(range(100, 140)), tuple(range(7, 60, 2))]
    ours, theirs = (x.generate(prompts, act, max_new_tokens=12) for x, act in ((smaller, "none"), (whole, equals)))
    assert [a.tokens for a in ours] == [a.tokens for a in theirs], "the pruned model gives other answers"


def measured(name: str, tokens: int, samples: int) -> list[str]:
    """Prints a table; gives the goals that are missed."""
    whole = nw.load(name) if name in ZOO else WIDE[name]()
    heads: Sequence[Head] = choose(whole, ZOO[name], progress=True).heads if name in ZOO else third(whole)
    smaller = prune_subject(whole, heads)
    same_answers(whole, smaller.subject, smaller.equals)
    found = costs(whole, smaller.subject, tokens, progress=True)
    rows = compare(whole, smaller.subject, samples, progress=True) if name in ZOO and samples else []
    ratios = {key: found["after"][key] / found["before"][key] for key in found["before"] if found["before"][key]}
    share = len(heads) / len(whole.anatomy.heads)
    table = Table(
        "", "whole", "pruned", "ratio", title=f"{name}: {len(heads)} of {len(whole.anatomy.heads)} heads, {tokens} tokens"
    )
    for key, ratio in ratios.items():
        table.add_row(key, f"{found['before'][key]:,.4g}", f"{found['after'][key]:,.4g}", f"{ratio:.3f}")
    for row in rows:
        table.add_row(row["task"], f"{row['before']['value']:.3f}", f"{row['after']['value']:.3f}", f"n = {row['n']}")
    console.print(table)
    left = [row["retained"]["value"] for row in rows if row["ability"] == "retrieval"]
    wanted = {
        "at most a third of the heads": share <= MOST_HEADS,
        "99 % of the baseline's needles": all(value >= LEAST_LEFT for value in left),
        "fewer parameters": ratios["parameters"] < 1,
        "a smaller cache": ratios["kv_bytes_per_token"] <= MOST_CACHE.get(name, 1),
        "prefill faster": ratios["prefill_seconds"] < 1,
        "decode no slower": ratios["decode_ms_per_token"] <= SAME_SPEED,
    }
    return [f"{name}: {goal}" for goal, reached in wanted.items() if not reached]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--only", default=",".join([*ZOO, *WIDE]))
    given = parser.parse_args()
    torch.set_num_threads(1)
    missed = [goal for name in given.only.split(",") for goal in measured(name, given.tokens, given.samples)]
    return report_goals(missed)


if __name__ == "__main__":
    sys.exit(main())
