"""Record how the progress bars of a command moved, for tests of the estimated time.

    python -m benchmarks.timeline OUT.json [--cold] [--slow-model DIR] -- run demo --out DIR

The command runs as usual. For every bar of a run that takes at least ten seconds, OUT.json has the kinds of work, the work of
each kind that was expected at first, in seconds, and samples, one per second at most: [seconds since the bar began, number of
the kind, work of this kind that is done, or null, work of it that is expected]. With --cold, kernels are compiled anew. With
--slow-model, a model of 200 million parameters, which loads slowly, is first written into a directory for the command to use.
tests/experiments/timelines holds what this wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMELINES: list[dict[str, Any]] = []


def record() -> None:
    """Make every bar of this process record its timeline."""
    from needlework import terminal

    class Recorder(terminal.Throughput):
        def __init__(self, work: Mapping[str, float], assumed: float | None = None) -> None:
            super().__init__(work, assumed)
            self.kinds, self.began, self.expected = list(work), 0.0, dict[str, float]()
            self.timeline: dict[str, Any] = {"assumed": assumed, "kinds": self.kinds, "work": [], "samples": []}
            TIMELINES.append(self.timeline)

        def update(self, now: float, kind: str, done: float) -> None:
            super().update(now, kind, done)
            samples = self.timeline["samples"]
            if not self.expected:
                self.began, self.expected = now, dict(self.work)
                self.timeline["work"] = [round(work, 3) for work in self.work.values()]
            for number, (name, work) in enumerate(self.work.items()):
                if work != self.expected[name]:
                    samples.append([round(now - self.began, 2), number, None, round(work, 3)])
            self.expected = dict(self.work)
            sample = [round(now - self.began, 2), self.kinds.index(kind), round(done, 3), round(self.work[kind], 3)]
            if len(samples) > 1 and samples[-1][1] == samples[-2][1] == sample[1] and sample[0] - samples[-2][0] < 1:
                samples[-1] = sample
            else:
                samples.append(sample)

    terminal.Throughput = Recorder  # type: ignore[misc]


def write_slow_model(directory: Path) -> None:
    """Write an untrained model of the toy language with many experts, of which each token uses one."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from needlework.toy.tokenizer import build

    sizes = {"hidden_size": 256, "moe_intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 32}
    experts = {"num_experts": 128, "num_experts_per_tok": 1, "num_key_value_heads": 8}
    torch.manual_seed(0)
    tokenizer = build()
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cold", action="store_true", help="compile kernels into an empty directory")
    parser.add_argument("--slow-model", type=Path, help="directory for a model that loads slowly")
    parser.add_argument("command", nargs="+", help="of needlework, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.cold:
            os.environ["NUMBA_CACHE_DIR"] = directory
        if options.slow_model:
            write_slow_model(options.slow_model)
        record()
        from needlework.cli import app

        try:
            app(options.command, standalone_mode=False)
        finally:
            longest = [line for line in TIMELINES if len(line["kinds"]) > 1 and line["samples"][-1][0] >= 10]
            found = {"command": " ".join(options.command), "cold": options.cold, "timelines": longest}
            text = json.dumps(found, separators=(",", ":"))
            options.out.write_text(text.replace("],[", "],\n[") + "\n")
            print(f"{len(longest)} timelines in {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
