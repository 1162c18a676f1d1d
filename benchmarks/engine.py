"""The engine against the slow way, side by side in one run: equal answers first, then the ratio of times.

    python benchmarks/engine.py [NAME ...]  names: niah, niah-both, niah-16, niah-both-16, wide, leave-one-out, fork, growth, bf16

References run on a stratified sample of the trials (at least 5 %) and are scaled, half of them before the engine and half after
it; absolute times are notes. On a machine that does other things, the ratio of processor time (one thread) is the steadier one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import needlework as nw
import reference
from harness import report_goals, timed
from needlework import zoo
from needlework.requests import Request

STEPS = 40
console = Console()
MATMUL_RATE = [1.0]  # FLOP/s, measured at the start


def griffin(heads: int = 16, width: int = 128, layers: int = 6, vocabulary: int = 600, window: int = 512) -> Any:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    head_dim = width // heads if width >= 1024 else 32
    return RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            num_hidden_layers=layers,
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=6 * width,
            num_attention_heads=heads,
            num_key_value_heads=1,
            lru_width=width,
            head_dim=head_dim,
            attention_window_size=window,
            conv1d_width=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


def jamba() -> Any:
    from transformers import JambaConfig, JambaForCausalLM

    torch.manual_seed(0)
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
            eos_token_id=2,
        )
    ).eval()


def model_of(name: str, fallback: Callable[[], Any]) -> tuple[Any, str]:
    """A shipped model, or a random one of the same make until it exists."""
    if name in zoo.catalog():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(zoo.path(name)).eval(), name
    return fallback(), f"random {name}"


def grid(lengths: Sequence[int], depths: Sequence[float], vocabulary: int) -> list[tuple[int, ...]]:
    """One haystack; a needle at every depth of every length, as the paper's grid has it."""
    draw = torch.Generator().manual_seed(7)
    hay = torch.randint(3, vocabulary, (max(lengths),), generator=draw).tolist()
    needle, question = (torch.randint(3, vocabulary, (12,), generator=draw).tolist() for _ in range(2))
    prompts = []
    for length in lengths:
        room = length - len(needle) - len(question)
        for depth in depths:
            at = int(room * depth)
            prompts.append(tuple(hay[:at] + needle + hay[at:room] + question))
    return prompts


class Bench:
    """One comparison: all trials through the engine, a sample of them the slow way, and the rungs between."""

    def __init__(self, title: str, model: Any, requests: list[Request], slow: Callable[[Any, Request], list[int]], goal: float):
        self.title, self.model, self.requests, self.slow, self.goal = title, model, requests, slow, goal

    def run(self, share: float = 0.05, rungs: bool = True) -> float:
        subject = nw.wrap(self.model)
        subject.answer([self.requests[0], self.requests[-1]])  # compile kernels, warm caches
        sample = list(range(0, len(self.requests), max(1, int(1 / share))))
        busy = [time.process_time()]
        before, slow_seconds = timed(lambda: {i: self.slow(self.model, self.requests[i]) for i in sample[::2]})
        busy.append(time.process_time())
        fast, fast_seconds = timed(lambda: subject.answer(self.requests))
        busy.append(time.process_time())
        read, asked = subject.engine.prefiller.tokens_computed, subject.engine.prefiller.tokens_requested
        after, seconds = timed(lambda: {i: self.slow(self.model, self.requests[i]) for i in sample[1::2]})
        busy.append(time.process_time())
        slow_seconds += seconds
        wrong = [i for i, tokens in (before | after).items() if list(fast[i].tokens) != tokens]
        if wrong:
            raise SystemExit(f"{self.title}: {len(wrong)} of {len(sample)} answers differ, first at trial {wrong[0]}")
        scaled = slow_seconds / len(sample) * len(self.requests)
        ratio = scaled / fast_seconds
        table = Table(title=f"{self.title}: [bold]{ratio:.1f}x[/] (goal {self.goal:g}x)", title_justify="left")
        for name in ("way", "seconds", "ratio to the next"):
            table.add_column(name, justify="left" if name == "way" else "right")
        steps = [("the paper's way (scaled)", scaled), *(self._rungs(subject, sample) if rungs else []), ("engine", fast_seconds)]
        for (name, seconds), following in zip(steps, [*steps[1:], None], strict=True):
            table.add_row(name, f"{seconds:.1f}", f"{seconds / following[1]:.1f}x" if following else "")
        console.print(table)
        slow_busy, fast_busy = busy[3] - busy[2] + busy[1] - busy[0], busy[2] - busy[1]
        busy_ratio = slow_busy / len(sample) * len(self.requests) / fast_busy
        console.print(
            f"by processor time: {busy_ratio:.1f}x ({fast_busy:.1f} s of the engine's)\n"
            f"{len(self.requests)} trials, {len(sample)} checked token by token and equal; "
            f"{asked:,} prompt tokens asked after sharing prefills, {read:,} read after sharing stems\n"
            f"the weights' matrix products alone, at this machine's rate: {self._least(subject, read, fast):.1f} s\n"
        )
        return ratio

    @staticmethod
    def _least(subject: nw.Subject, read: int, answers: list[Any]) -> float:
        """Seconds that no engine can go below that reads and decodes these tokens."""
        tokens = read + sum(len(answer.tokens) for answer in answers)
        return 2 * subject.anatomy.parameters * tokens / MATMUL_RATE[0]

    def _rungs(self, subject: nw.Subject, sample: list[int]) -> list[tuple[str, float]]:
        """One trial at a time (SDPA and our scan), then one prompt at a time (sharing), before everything at once."""
        _, alone = timed(lambda: [subject.answer([self.requests[i]]) for i in sample])
        prompts = list(dict.fromkeys(self.requests[i].prompt for i in sample))[:: max(1, len(sample) // 8)]
        groups = [[r for r in self.requests if r.prompt == prompt] for prompt in prompts]
        _, shared = timed(lambda: [subject.answer(some) for some in groups])
        total = len(self.requests)
        return [
            ("one trial at a time, our kernels", alone / len(sample) * total),
            ("one prompt at a time, prefill shared", shared / sum(map(len, groups)) * total),
        ]


def niah(both: bool, sixteen: bool = False) -> tuple[float, float]:
    """The paper's grid on the shipped model, of 10 heads, or on one of 16 with random weights."""
    model, name = (griffin(), "random griffin") if sixteen else model_of("tiny-griffin", griffin)
    heads, vocabulary = model.config.num_attention_heads, model.config.vocab_size
    lengths = [250 + round(i * (2048 - 250) / 9) for i in range(10)]
    prompts = grid(lengths, [i / 9 for i in range(10)], vocabulary)
    phase = "both" if both else "decode"
    requests = [Request(p, nw.KeepHeads(k=k, phase=phase), STEPS) for p in prompts for k in range(heads + 1)]
    slow = lambda m, r: reference.generate(m, r.prompt, STEPS, r.intervention.k, both_phases=both)  # noqa: E731
    goal = (20.0 if both else 100.0) if sixteen else (12.0 if both else 50.0)
    title = f"NIAH 10 x 10, lengths to 2,048, k = 0..{heads}, {'prefill and decode' if both else 'decode only'}, {name}"
    return Bench(title, model, requests, slow, goal).run(rungs=not both), goal


def wide() -> tuple[float, float]:
    model = griffin(heads=10, width=2560, vocabulary=32_000, window=2048)
    prompts = grid([256, 512, 768], [0, 0.25, 0.5, 0.75, 1], 32_000)
    requests = [Request(p, nw.KeepHeads(k=k, phase="decode"), STEPS) for p in prompts for k in range(11)]
    slow = lambda m, r: reference.generate(m, r.prompt, STEPS, r.intervention.k)  # noqa: E731
    return Bench("NIAH 3 x 5, k = 0..10, RecurrentGemma at 2B width", model, requests, slow, 10).run(rungs=False), 10


def leave_one_out() -> tuple[float, float]:
    model, name = model_of("tiny-jamba", jamba)
    anatomy = nw.wrap(model).anatomy
    prompts = grid([256], [i / 7 for i in range(8)], model.config.vocab_size)
    requests = [Request(p, nw.AblateHeads(heads=[head], phase="decode"), STEPS) for p in prompts for head in anatomy.heads]

    def slow(m: Any, r: Request) -> list[int]:
        layer, head = r.intervention.heads[0]  # type: ignore[attr-defined]
        return reference.generate(m, r.prompt, STEPS, off={layer: [head]})

    return Bench(f"leave one head out, every head, {name}", model, requests, slow, 15).run(share=0.1), 15


def fork() -> tuple[float, float]:
    """Memory of 16 forked rows of one 2,048-token prompt against 16 copies."""
    subject = nw.wrap(jamba())
    ids = torch.tensor([grid([2048], [0.5], 600)[0]])
    from needlework.model.hooked_model import Rows
    from needlework.receipts import Tally

    with subject.body.session():
        memory = subject.body.new_memory(1)
        subject.body.feed(ids, memory, "prefill", Rows(torch.zeros(1, dtype=torch.int64)), Tally(1))
        rows = torch.zeros(16, dtype=torch.int64)
        shared, copied = memory.share(rows).nbytes(), memory.select(rows).nbytes()
    console.print(
        f"16 forked rows of 2,048 tokens: {shared / copied:.3f} of 16 copies ({shared:,} of {copied:,} bytes; goal 0.25)\n"
    )
    return copied / shared, 4


def growth() -> tuple[float, float]:
    """Time should grow as P + N * D, not as N * (P + D)."""
    model, _ = model_of("tiny-griffin", griffin)
    subject = nw.wrap(model)
    table = Table(title="seconds for one prompt under N interventions", title_justify="left")
    table.add_column("prompt tokens")
    counts = (1, 4, 16, 64)
    for n in counts:
        table.add_column(f"N = {n}", justify="right")
    for length in (256, 1024, 2048):
        prompt = grid([length], [0.5], model.config.vocab_size)[0]
        cells = []
        for n in counts:
            some = [Request(prompt, nw.KeepHeads(k=1, by="random", seed=s, phase="decode"), STEPS) for s in range(n)]
            subject.answer(some)
            cells.append(timed(lambda some=some: subject.answer(some))[1])  # type: ignore[misc]
        table.add_row(f"{length:,}", *(f"{x:.2f}" for x in cells))
    console.print(table)
    return 1, 0


def bf16() -> tuple[float, float]:
    """Batched bf16 products round differently: the share of equal tokens, reported apart."""
    model = griffin().to(torch.bfloat16)
    subject = nw.wrap(model)
    prompts = grid([250, 650], [0, 0.5, 1], 600)
    requests = [Request(p, nw.KeepHeads(k=k, phase="decode"), STEPS) for p in prompts for k in (0, 2, 16)]
    fast = subject.answer(requests)
    slow = [reference.generate(model, r.prompt, STEPS, r.intervention.k) for r in requests]  # type: ignore[attr-defined]
    equal = [a == b for x, y in zip(fast, slow, strict=True) for a, b in zip(x.tokens, y, strict=True)]
    first = [x.tokens[0] == y[0] for x, y in zip(fast, slow, strict=True)]
    console.print(f"bf16: {sum(equal) / len(equal):.1%} of tokens equal, {sum(first) / len(first):.1%} of first tokens\n")
    return 1, 0


BENCHES: dict[str, Callable[[], tuple[float, float]]] = {
    "niah": lambda: niah(both=False),
    "niah-both": lambda: niah(both=True),
    "niah-16": lambda: niah(both=False, sixteen=True),
    "niah-both-16": lambda: niah(both=True, sixteen=True),
    "leave-one-out": leave_one_out,
    "fork": fork,
    "growth": growth,
    "bf16": bf16,
    "wide": wide,
}


def machine() -> None:
    """How fast this machine is right now: the limits that the figures below can be held against."""
    a = torch.randn(2048, 2048)
    MATMUL_RATE[0] = max(2 * 2048**3 / timed(lambda: a @ a)[1] for _ in range(5))
    x, y = torch.randn(1 << 25), torch.empty(1 << 25)
    copy = max(2 * x.numel() * 4 / timed(lambda: y.copy_(x))[1] for _ in range(5)) / 1e9
    rates = f"{MATMUL_RATE[0] / 1e9:.0f} GFLOPS fp32 matmul, {copy:.1f} GB/s copy"
    console.print(f"machine: {torch.get_num_threads()} threads, {rates}\n")


def main() -> int:
    machine()
    missed = []
    for name in sys.argv[1:] or BENCHES:
        ratio, goal = BENCHES[name]()
        if ratio < goal:
            missed.append(f"{name}: {ratio:.1f} < {goal:g}")
    return report_goals(missed)


if __name__ == "__main__":
    sys.exit(main())
