"""The scans against transformers' own, side by side in one run: `python benchmarks/kernels.py [NAME ...]`.

Names: rglru, selective, memory, train-griffin, train-jamba. Every one asserts first that both sides compute the same;
both sides are timed in turns and the best of each counts, because other work on the machine only ever adds time.
Absolute times are notes. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness import compare, timed_ways

RGLRU, SELECTIVE, MEMORY, TRAIN_GRIFFIN, TRAIN_JAMBA = 12.0, 12.0, 8.0, 12.0, 10.0  # ratios to reach


def best_of_each(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Best time of each side in seconds; their outputs were compared before."""
    found = compare(timed_ways(sides, time.perf_counter), rounds, "", same=lambda *_: True)
    return {name: found.best(name) for name in sides}


def verdict(what: str, ratio: float, target: float, note: str) -> bool:
    reached = ratio >= target
    print(f"{what}: {ratio:.1f}x ({'reached' if reached else 'MISSED'}: {target:g}x)  {note}", flush=True)
    return reached


def bandwidth() -> float:
    """Bytes per second of a plain copy, read and written, in memory that has been touched before."""
    source = torch.ones(1 << 26)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / best_of_each({"copy": lambda: target.copy_(source)}, 5)["copy"]


def assert_equal(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    worst, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    assert worst <= tolerance * scale, f"not the same: off by {worst:.1e} at a scale of {scale:.1e}"


@torch.no_grad()
def rglru() -> bool:
    """T = 4096, width 2560, forward, from the gates on: the kernel against torch's gates and RecurrentGemmaRglru's loop."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    from needlework.kernels.rglru import gated_rglru, rglru_gates

    inputs = (*(torch.randn(1, 4096, 2560) for _ in range(3)), 0.01 + torch.rand(2560))
    state, reset = torch.randn(1, 2560), torch.zeros(1, 4096, 1, dtype=torch.bool)

    def loop() -> tuple[Tensor, Tensor]:
        return RecurrentGemmaRglru._rnn_scan(None, *rglru_gates(*inputs), reset, state)

    for ours, theirs in zip(gated_rglru(*inputs, state), loop(), strict=True):
        assert_equal(ours, theirs)
    times = best_of_each({"loop": loop, "kernel": lambda: gated_rglru(*inputs, state)}, 15)
    limit = 4 * inputs[0].nbytes / bandwidth()
    note = f"{1e3 * times['loop']:.0f} ms -> {1e3 * times['kernel']:.1f} ms; copying as many bytes: {1e3 * limit:.1f} ms"
    return verdict("RG-LRU", times["loop"] / times["kernel"], RGLRU, note)


def selective_inputs() -> dict[str, Tensor]:
    """T = 2048, inner width 4096, state 16: what a mixer hands to its scan, channels before time."""
    torch.manual_seed(0)
    timed = {name: torch.randn(1, 4096, 2048) for name in ("hidden_states", "dt", "z")}
    small = {name: torch.randn(1, 16, 2048) for name in ("B", "C")}
    rates = {"A": -torch.arange(1.0, 17.0).repeat(4096, 1), "D": torch.randn(4096), "delta_bias": torch.randn(4096)}
    return timed | small | rates


def time_first(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in the layout that our convolution and projections leave: tokens one after the other."""
    return {name: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 3 else t for name, t in inputs.items()}


def selective_sides() -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    from transformers.models.mamba import modeling_mamba

    from needlework.model import families

    stock = modeling_mamba.mamba_selective_scan
    options: dict[str, Any] = {"delta_softplus": True, "return_last_state": True}
    return {
        "loop": lambda **inputs: stock(**inputs, **options),
        "kernel": lambda **inputs: families._scan_for(stock)(**inputs, **options),
    }


@torch.no_grad()
def selective() -> bool:
    """The kernel against transformers' torch path, with time step, skip and gate, as a mixer calls it."""
    sides, inputs = selective_sides(), selective_inputs()
    ours = time_first(inputs)
    for found, expected in zip(sides["kernel"](**ours), sides["loop"](**inputs), strict=True):
        assert_equal(found, expected, 2e-5)
    times = best_of_each({"loop": lambda: sides["loop"](**inputs), "kernel": lambda: sides["kernel"](**ours)}, 4)
    other = best_of_each({"kernel": lambda: sides["kernel"](**inputs)}, 4)["kernel"]
    limit = 4 * inputs["dt"].nbytes / bandwidth()
    exps = inputs["dt"].numel() * 16 / times["kernel"] / 1e9
    note = (
        f"{1e3 * times['loop']:.0f} ms -> {1e3 * times['kernel']:.0f} ms (channels first: {1e3 * other:.0f} ms); "
        f"bound by arithmetic: {exps:.2f} states/ns; copying as many bytes: {1e3 * limit:.0f} ms"
    )
    return verdict("selective scan", times["loop"] / times["kernel"], SELECTIVE, note)


def peak_of(side: str) -> int:
    """Bytes above what was there before one call, at the worst moment, in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, "--peak", side],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return int(json.loads(run.stdout.splitlines()[-1]))


@torch.no_grad()
def print_peak(side: str) -> None:
    scan, inputs = selective_sides()[side], selective_inputs()
    if side == "kernel":
        inputs = time_first(inputs)
    scan(**{name: t[..., :40].clone() if t.dim() == 3 else t for name, t in inputs.items()})  # compile and import first
    with contextlib.suppress(OSError):  # where this is not allowed, the worst moment of importing counts as well
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    scan(**inputs)
    high = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps(int(high.split()[1]) * 1024 - before))


def memory() -> bool:
    peaks = {side: peak_of(side) for side in ("loop", "kernel")}
    note = f"{peaks['loop'] / 1e6:.0f} MB -> {peaks['kernel'] / 1e6:.0f} MB above the inputs, results included"
    return verdict("selective scan, peak memory", peaks["loop"] / peaks["kernel"], MEMORY, note)


def tiny_griffin() -> Any:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    return RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            num_hidden_layers=6,
            vocab_size=600,
            hidden_size=128,
            intermediate_size=768,
            num_attention_heads=8,
            num_key_value_heads=1,
            lru_width=128,
            head_dim=32,
            attention_window_size=2048,
            pad_token_id=0,
        )
    )


def tiny_jamba() -> Any:
    from transformers import JambaConfig, JambaForCausalLM

    return JambaForCausalLM(
        JambaConfig(
            vocab_size=600,
            hidden_size=96,
            intermediate_size=288,
            num_hidden_layers=6,
            num_attention_heads=12,
            num_key_value_heads=3,
            attn_layer_period=3,
            attn_layer_offset=2,
            num_experts=1,
            num_experts_per_tok=1,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_expand=2,
            initializer_range=0.1,
            pad_token_id=0,
        )
    )


def step(model: Any, ids: Tensor) -> float:
    """Forward and backward; the loss."""
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item()


def shares(run: Callable[[], Any]) -> str:
    """Where the time of one run goes, by the kind of operation."""
    kinds = {"matmul": ("mm", "addmm", "bmm", "baddbmm"), "our kernels": ("_Cpu",)}
    with torch.profiler.profile() as profile:
        run()
    events = [(event.key.removeprefix("aten::"), event.self_cpu_time_total) for event in profile.key_averages()]
    total = sum(took for _, took in events)
    spent = {"matmul": sum(took for name, took in events if name in kinds["matmul"])}
    spent["our kernels"] = sum(took for name, took in events if name.startswith(kinds["our kernels"]))
    parts = ", ".join(f"{100 * took / total:.0f} % {kind}" for kind, took in spent.items())
    return f"{parts}, the rest the model's other operations"


def train(what: str, make: Callable[[], Any], target: float) -> bool:
    """Forward and backward at T = 256, batch 16: tokens a second, stock against `fast_kernels`."""
    from needlework.model.families import fast_kernels

    torch.manual_seed(0)
    model = make().train()
    ids = torch.randint(3, 600, (16, 256))

    def fast(tokens: Tensor = ids) -> float:
        with fast_kernels(model):
            return step(model, tokens)

    expected = step(model, ids[:2, :40])
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert abs(fast(ids[:2, :40]) - expected) <= 1e-5 * expected
    for name, p in model.named_parameters():
        if name in grads:
            assert_equal(p.grad, grads[name], 1e-3)  # a training step in fp32 rounds as coarsely on either side
    times = best_of_each({"stock": lambda: step(model, ids), "fast": fast}, 4)
    note = f"{ids.numel() / times['stock']:.0f} -> {ids.numel() / times['fast']:.0f} tokens/s; {shares(fast)}"
    return verdict(what, times["stock"] / times["fast"], target, note)


BENCHES: dict[str, Callable[[], bool]] = {
    "rglru": rglru,
    "selective": selective,
    "memory": memory,
    "train-griffin": lambda: train("training, tiny Griffin", tiny_griffin, TRAIN_GRIFFIN),
    "train-jamba": lambda: train("training, tiny Jamba", tiny_jamba, TRAIN_JAMBA),
}


def main(names: list[str]) -> int:
    logging.disable(logging.WARNING)  # which optional kernels are missing
    if names[:1] == ["--peak"]:
        print_peak(names[1])
        return 0
    if unknown := set(names) - set(BENCHES):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(BENCHES)}")
    print(f"{torch.get_num_threads()} threads; {bandwidth() / 1e9:.1f} GB/s copy; load before: {os.getloadavg()[0]:.1f}")
    reached = {name: BENCHES[name]() for name in names or BENCHES}
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
