"""`nw.patch` and plain hooks, one site after the other: `python benchmarks/patching.py [MODEL ...]`

Four pairs of prompts of 256 tokens that differ in eight of them, each with one-token answers. Three tables: every head at every
position, the outputs of attention and mixers at every position, and every layer at the last token. Plain hooks record all sites
in one forward of the clean prompts, and then run the corrupt prompts, all in one batch, once for every site, in the stock model
(SDPA). Shares of both must agree before anything is timed; rounds in alternating order on one thread, in processor time.
`--rounds N`. Exit code 1 if `nw.patch` is slower in any table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import harness

MODELS = ("tiny-griffin", "tiny-jamba")
PAIRS, TOKENS, SPAN = 4, 256, slice(40, 48)
TABLES: dict[str, dict[str, Any]] = {
    "every head": {"sites": "heads"},
    "attention and mixers": {"sites": None},
    "layers, last token": {"sites": "layers", "at": -1},
}
GOAL = 1.0


def prompts(vocabulary: int) -> tuple[Any, Any]:
    import torch

    draw = torch.Generator().manual_seed(0)
    clean = torch.randint(3, vocabulary, (PAIRS, TOKENS), generator=draw)
    corrupt = clean.clone()
    corrupt[:, SPAN] = torch.randint(3, vocabulary, (PAIRS, SPAN.stop - SPAN.start), generator=draw)
    return clean, corrupt


def answers(subject: Any, clean: Any, corrupt: Any) -> list[tuple[tuple[int], tuple[int]]]:
    """Return the tokens that each pair's prompts tell apart most."""
    gap = (subject.logits(clean) - subject.logits(corrupt))[:, -1]
    return [((int(row.argmax()),), (int(row.argmin()),)) for row in gap]


class PlainHooks:
    """The stock model with a hook on one module at a time."""

    def __init__(self, model: Any, anatomy: Any, clean: Any, corrupt: Any, pairs: list[Any]) -> None:
        import torch

        self.model, self.anatomy, self.clean, self.corrupt = model, anatomy, clean, corrupt
        self.first, self.second = (torch.tensor([pair[i][0] for pair in pairs]) for i in (0, 1))

    def module(self, site: str, layer: int) -> Any:
        part = self.anatomy.layers[layer]
        if site == "layers":
            return self.model.model.layers[layer]
        side = part.recurrent if site == "mixers" else part.attention
        module = self.model.get_submodule(side.path)
        return module.o_proj if site == "heads" else module

    def metric(self, ids: Any) -> Any:
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        rows = range(len(ids))
        return logits[rows, self.first] - logits[rows, self.second]

    def hook(self, site: str, layer: int, function: Callable[[Any], Any]) -> Any:
        """Register a hook that replaces the output of a module, or the input of a head's output projection."""
        if site == "heads":
            return self.module(site, layer).register_forward_pre_hook(lambda m, a: (function(a[0]), *a[1:]))
        changed = lambda m, a, o: (function(o[0]), *o[1:]) if isinstance(o, tuple) else function(o)  # noqa: E731
        return self.module(site, layer).register_forward_hook(changed)

    def table(self, rows: Any) -> list[float]:
        """Return the restored share of every row of a table of `nw.patch`."""
        import torch

        with torch.inference_mode():
            recorded: dict[tuple[str, int], Any] = {}
            keep = lambda where: lambda x: recorded.setdefault(where, x)  # noqa: E731
            handles = [self.hook(*where, keep(where)) for where in dict.fromkeys((row.site, row.layer) for row in rows)]
            clean = self.metric(self.clean)
            for handle in handles:
                handle.remove()
            corrupt, shares = self.metric(self.corrupt), []
            for row in rows:
                width = self.anatomy.attention(row.layer).value_dim if row.head is not None else 0
                channels = slice(None) if row.head is None else slice(row.head * width, (row.head + 1) * width)
                tokens = slice(None) if row.at == "all" else slice(-1, None)

                def put(x: Any, new: Any = recorded[row.site, row.layer], at: Any = (slice(None), tokens, channels)) -> Any:
                    x = x.clone()
                    x[at] = new[at]
                    return x

                handle = self.hook(row.site, row.layer, put)
                shares.append(float((self.metric(self.corrupt) - corrupt).sum() / (clean - corrupt).sum()))
                handle.remove()
        return shares


def compare(name: str, rounds: int) -> list[float]:
    """Print the times of each table and return how many times as fast `nw.patch` is."""
    import torch
    from transformers import AutoModelForCausalLM

    import needlework as nw
    from needlework import zoo

    torch.set_num_threads(1)
    subject, stock = nw.load(name), AutoModelForCausalLM.from_pretrained(zoo.path(name)).eval()
    clean, corrupt = prompts(subject.anatomy.vocabulary)
    pairs = answers(subject, clean, corrupt)
    plain, ratios = PlainHooks(stock, subject.anatomy, clean, corrupt, pairs), []
    both = [list(map(tuple, ids.tolist())) for ids in (clean, corrupt)]
    for table, how in TABLES.items():
        ours = lambda how=how: nw.patch(subject, *both, answers=pairs, **how)  # noqa: E731
        rows = ours().rows
        actions = {"needlework": lambda ours=ours: [row.share.value for row in ours().rows], "plain": lambda: plain.table(rows)}  # noqa: B023
        same = lambda a, b: max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-3  # noqa: E731
        found = harness.compare(harness.timed_ways(actions, time.process_time), rounds, f"{name}, {table}", same)
        ratios.append(found.ratio("plain", "needlework"))
        seconds = ", ".join(f"{way} {found.best(way):.2f} s" for way in actions)
        print(f"{name:17} {table:21} {len(rows):3} sites  {seconds}  {ratios[-1]:.1f} times as fast", flush=True)
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    missed = [name for name in options.models if min(compare(name, options.rounds)) < GOAL]
    return harness.report_goals([f"slower than plain hooks on {name}" for name in missed])


if __name__ == "__main__":
    sys.exit(main())
