"""What needlework costs when it does nothing, and how much memory it takes when it does: `python benchmarks/foundation.py`.

Idle overhead: greedy decoding through needlework against `model.generate` with SDPA on the same model, 64 prompt tokens and
64 new ones. Target: a ratio of at most 1.05. And reading alone: the next token of 8 prompts of 256 tokens, against one plain
forward of them that keeps the last logits. Target: the same.

Memory: the extra peak while 8,192 tokens are read with heads chosen by entropy, against stock SDPA reading the same tokens,
both with the logits of the last token only. Target: a ratio of at most 1.3.

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import compare, timed_ways

IDLE_TARGET, MEMORY_TARGET = 1.05, 1.3
PROMPT = NEW = 64
READ_ROWS, READ_TOKENS = 8, 256
LONG = 8192
ROUNDS = 7
FAMILIES = {"llama": "Llama", "jamba": "Jamba", "recurrent_gemma": "RecurrentGemma"}
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build(family: str, layers: int = 6) -> Any:
    """A small random model. The smaller it is, the more needlework's own work shows."""
    import torch
    from transformers import (
        JambaConfig,
        JambaForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        RecurrentGemmaConfig,
        RecurrentGemmaForCausalLM,
    )

    logging.disable(logging.WARNING)  # which optional kernels are missing
    torch.manual_seed(0)
    torch.set_num_threads(1)  # models this small gain nothing from a second thread, and other work on the machine shows less
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, max_position_embeddings=2 * LONG))
    elif family == "jamba":
        layout = {"attn_layer_period": 3, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
        model = JambaForCausalLM(
            JambaConfig(**SIZES, **layout, num_hidden_layers=layers, num_experts=2, num_experts_per_tok=1, mamba_d_state=8)
        )
    else:
        sizes = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 1408}
        model = RecurrentGemmaForCausalLM(
            RecurrentGemmaConfig(**sizes, num_hidden_layers=layers, lru_width=256, attention_window_size=512)
        )
    model.generation_config.eos_token_id = None  # both sides make all 64 tokens
    return model.eval()


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    ratio: float
    target: float | None  # None: for information
    note: str

    @property
    def missed(self) -> bool:
        return self.target is not None and self.ratio > self.target


# --- idle overhead ----------------------------------------------------------------------------------------------------


def idle(family: str) -> list[Line]:
    """What needlework adds to decoding.

    Processor time is compared, not time on the wall: one thread computes, and what other processes do meanwhile is not
    needlework's cost.
    """
    import torch

    import needlework as nw

    model = build(family)
    ids = torch.randint(3, SIZES["vocab_size"], (1, PROMPT), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(ids)

    def stock() -> list[int]:
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=seen, max_new_tokens=NEW, do_sample=False)
        tokens: list[int] = out[0, PROMPT:].tolist()
        return tokens

    def through(subject: nw.Subject) -> Callable[[], list[int]]:
        return lambda: list(subject.generate(ids.tolist(), max_new_tokens=NEW)[0].tokens)

    ways = {"generate": stock, "stock": through(nw.wrap(model, kernels="stock"))}
    if family != "llama":  # Llama has no recurrent layer that a kernel could speed up
        ways["fast"] = through(nw.wrap(model, kernels="fast"))
    return in_turns(f"idle overhead, {FAMILIES[family]}", ways, NEW)


def reading(family: str) -> list[Line]:
    """The same for prompts that are read and not continued: what needlework adds to one forward."""
    import torch

    import needlework as nw

    model = build(family)
    ids = torch.randint(3, SIZES["vocab_size"], (READ_ROWS, READ_TOKENS), generator=torch.Generator().manual_seed(1))

    def stock() -> list[int]:
        with torch.inference_mode():
            tokens: list[int] = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
        return tokens

    def through(subject: nw.Subject) -> Callable[[], list[int]]:
        asked = ids.tolist()
        return lambda: [answer.tokens[0] for answer in subject.generate(asked, max_new_tokens=1, boundary="prefill")]

    ways = {"generate": stock, "stock": through(nw.wrap(model, kernels="stock"))}
    if family != "llama":
        ways["fast"] = through(nw.wrap(model, kernels="fast"))
    return in_turns(f"idle reading, {FAMILIES[family]}", ways, READ_ROWS * READ_TOKENS)


def in_turns(what: str, ways: dict[str, Callable[[], list[int]]], tokens: int) -> list[Line]:
    """Every way against "generate", the stock model's own."""
    found = compare(timed_ways(ways), ROUNDS, what)
    each = {name: 1000 * found.median(name) / tokens for name in ways}
    return [
        Line(
            f"{what}, {name} kernels",
            found.ratio(name, "generate"),
            IDLE_TARGET if name == "stock" else None,
            f"{each[name]:.3f} against {each['generate']:.3f} ms per token",
        )
        for name in ways
        if name != "generate"
    ]


# --- memory -----------------------------------------------------------------------------------------------------------


def _status(field: str) -> int:
    """Bytes, from what the kernel says about this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {field}: memory can only be measured on Linux")


def peak(family: str, way: str) -> int:
    """Extra bytes at the peak of one long reading, in this process.

    The peak is the kernel's own high-water mark of resident memory, set back just before the reading: no sampling can miss
    it. A short reading goes first, so that lazy imports, compiled kernels and thread stacks do not count.
    """
    import torch

    import needlework as nw

    model = build(family, layers=3)  # more would add keys to both sides and so make the ratio look better
    ids = torch.randint(3, SIZES["vocab_size"], (1, LONG), generator=torch.Generator().manual_seed(1))
    if way == "stock SDPA":

        def read(tokens: torch.Tensor) -> None:
            with torch.inference_mode():
                model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=1, do_sample=False)
    else:
        subject = nw.wrap(model, kernels="fast" if way == "fast" else "stock")
        act = nw.KeepHeads(k=1, phase="prefill")

        def read(tokens: torch.Tensor) -> None:
            answer = subject.generate(tokens.tolist(), act, max_new_tokens=1)[0]
            if answer.receipt.total("heads_zeroed", "prefill") == 0:
                raise SystemExit("no head was zeroed: there is nothing to measure")

    read(ids[:, :32])
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident now
    before = _status("VmRSS")
    read(ids)
    return _status("VmHWM") - before


def memory(family: str) -> list[Line]:
    """Each reading in a process of its own: what one leaves in the allocator cannot serve another.

    Measured twice. "in use" has the target: freed blocks above 64 KiB go back to the system at once, so that resident
    memory is what tensors need. "resident" is for information: the C library's default keeps freed blocks and moves its own
    threshold as it goes, so that stock SDPA alone gave 135 to 198 MB from run to run. Either way the peak lies in the
    feed-forward layer, which needlework does not touch.
    """
    settings = {"in use": {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}, "resident": {}}
    ways = ["stock SDPA", "stock"] + (["fast"] if family != "llama" else [])
    lines = []
    for setting, variables in settings.items():
        peaks = {way: _peak_elsewhere(family, way, variables) for way in ways}
        lines += [
            Line(
                f"memory {setting}, {LONG:,} tokens, {FAMILIES[family]}, {way} kernels",
                peaks[way] / peaks["stock SDPA"],
                MEMORY_TARGET if setting == "in use" else None,
                f"{peaks[way] / 1e6:.0f} against {peaks['stock SDPA'] / 1e6:.0f} MB above the loaded model",
            )
            for way in ways[1:]
        ]
    return lines


def _peak_elsewhere(family: str, way: str, variables: dict[str, str]) -> int:
    command = [sys.executable, __file__, "--peak", family, way]
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


# --- the table --------------------------------------------------------------------------------------------------------


def show(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="needlework against stock transformers (SDPA)", title_justify="left")
    for name in ("ratio", "target", "", "what", "measured"):
        table.add_column(name, justify="right" if name in ("ratio", "target") else "left")
    for line in lines:
        verdict = "" if line.target is None else "[red]missed[/]" if line.missed else "[green]met[/]"
        target = "" if line.target is None else f"<= {line.target}"
        table.add_row(f"{line.ratio:.3f}", target, verdict, line.what, line.note)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["idle", "reading", "memory"], help="run one part")
    parser.add_argument("--peak", nargs=2, metavar=("FAMILY", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps({"bytes": peak(*options.peak)}))
        return 0
    parts: list[tuple[Callable[[str], list[Line]], str]] = []
    if options.only in (None, "idle"):
        parts += [(idle, family) for family in FAMILIES]
    if options.only in (None, "reading"):
        parts += [(reading, family) for family in FAMILIES]
    if options.only in (None, "memory"):
        parts += [(memory, family) for family in ("llama", "jamba")]
    lines: list[Line] = []
    for measure, family in parts:
        found = measure(family)
        print(*(f"{line.ratio:.3f}  {line.what}" for line in found), sep="\n", flush=True)  # a table comes only at the end
        lines += found
    show(lines)
    return 1 if any(line.missed for line in lines) else 0


if __name__ == "__main__":
    raise SystemExit(main())
