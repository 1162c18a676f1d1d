"""Peak memory of long prompts, beyond weights and cache: read in chunks against read in one piece.

    python benchmarks/long.py [--lengths 8192 32768 65536] [--acts none keep] [--one-piece-up-to 32768]

A small Jamba with random weights reads one prompt of each length and answers with four tokens, each time in a process of its
own. The peak is the kernel's high-water mark of resident memory, set back just before; freed blocks go back to the system at
once (`MALLOC_MMAP_THRESHOLD_`), so that it is what tensors need. Weights are resident before; the cache's bytes are taken off.
Where both ways ran, their answers must be equal. Target: 65,536 tokens take less than 1.5 times what 8,192 take. Exit code 1
if it is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import foundation

TARGET, SHORT, LONG = 1.5, 8192, 65536
NEW_TOKENS = 4
ACTS = {"none": "none", "keep": "keep_heads(k=1, sinks=1, phase='prefill')"}
console = Console()


def jamba() -> Any:
    """Three Mamba layers, one of attention, experts: so small that 65,536 tokens take a minute."""
    import torch
    from transformers import JambaConfig, JambaForCausalLM

    torch.manual_seed(0)
    config = JambaConfig(
        **{**foundation.SIZES, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 2, "num_key_value_heads": 1},
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=2,
        num_experts_per_tok=1,
        expert_layer_period=2,
        mamba_d_state=8,
        initializer_range=0.1,
        use_mamba_kernels=False,
    )
    return JambaForCausalLM(config).eval()


def measure(way: str, act: str, tokens: int) -> dict[str, Any]:
    """One prompt read in this process: its peak, beyond weights and cache, and what was answered."""
    import torch

    import needlework as nw
    from needlework.model import hooked_model

    torch.set_num_threads(1)
    if way == "one piece":
        hooked_model.CHUNK_TOKENS = 1 << 30
    subject = nw.wrap(jamba())
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, foundation.SIZES["vocab_size"], (1, tokens), generator=draw).tolist()
    subject.generate([ids[0][:600]], ACTS[act], max_new_tokens=NEW_TOKENS)  # lazy imports, compiled kernels, proofs
    Path("/proc/self/clear_refs").write_text("5")
    before, began = foundation._status("VmRSS"), time.process_time()
    answer = subject.generate(ids, ACTS[act], max_new_tokens=NEW_TOKENS)[0]
    seconds, peak = time.process_time() - began, foundation._status("VmHWM") - before
    anatomy, costs = subject.anatomy, subject.engine.budget.costs
    cache = tokens * anatomy.kv_bytes_per_token + anatomy.state_bytes
    said = {"tokens": answer.tokens, "logprobs": answer.logprobs, "zeroed": answer.receipt.total("heads_zeroed")}
    return {"bytes": peak - cache, "cache": cache, "estimate": costs.prompt(tokens) - cache, "seconds": seconds, **said}


def elsewhere(way: str, act: str, tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", way, act, str(tokens)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """How far log-probabilities of equal answers lie apart."""
    if a["tokens"] != b["tokens"] or a["zeroed"] != b["zeroed"]:
        return float("inf")
    return max(abs(x - y) for x, y in zip(a["logprobs"], b["logprobs"], strict=True))


def compare(act: str, lengths: list[int], most: int) -> bool:
    """An intervention at all lengths, both ways; whether the target is met and answers are equal."""
    console.print(f"{ACTS[act]}: MB beyond weights and cache, and processor time")
    peaks, equal = {}, True
    for tokens in lengths:
        now = elsewhere("chunks", act, tokens)
        peaks[tokens] = now["bytes"]
        line = f"  {tokens:>7,} tokens: in chunks {now['bytes'] / 1e6:4.0f} MB in {now['seconds']:.1f} s"
        line += f" (estimated {now['estimate'] / 1e6:.0f} MB, beside a cache of {now['cache'] / 1e6:.0f})"
        if tokens <= most:
            once = elsewhere("one piece", act, tokens)
            equal = equal and apart(now, once) < 1e-3
            line += f"; in one piece {once['bytes'] / 1e6:4.0f} MB in {once['seconds']:.1f} s,"
            line += f" log-probabilities {apart(now, once):.0e} apart"
        console.print(line, soft_wrap=True)
    if not {SHORT, LONG} <= set(peaks):
        return equal
    ratio, words = peaks[LONG] / peaks[SHORT], "equal" if equal else "DIFFERENT"
    console.print(f"  {LONG:,} : {SHORT:,} tokens = {ratio:.2f} (target: below {TARGET}); answers are {words}\n")
    return equal and ratio < TARGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[SHORT, 32768, LONG])
    parser.add_argument("--acts", nargs="+", default=list(ACTS), choices=list(ACTS))
    parser.add_argument("--one-piece-up-to", type=int, default=32768, metavar="TOKENS", help="the old way is not run on more")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, act, tokens = options.measure
        print(json.dumps(measure(way, act, int(tokens))))
        return 0
    good = [compare(act, options.lengths, options.one_piece_up_to) for act in options.acts]  # each is shown
    return not all(good)


if __name__ == "__main__":
    sys.exit(main())
