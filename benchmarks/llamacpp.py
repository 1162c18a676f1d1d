"""Models in llama.cpp: the numbers of needlework, and what removed heads save there.

    python benchmarks/llamacpp.py [--tokens 2048] [--samples 50] [--only tiny-jamba,smollm2-135m,jamba-1024]

Needs llama-cpp-python (tried with 0.3.36), which is no dependency. Whole and pruned models are written as GGUF files with float32
weights. Logits of a prompt (largest difference, as a share of the largest logit) and answers are compared with those of
needlework, with a cache in float32; then time is measured in llama.cpp with its own 16-bit cache and flash attention, whole and
pruned in turns on one thread (CPU time, the fastest of each). Bytes are those that llama.cpp writes to save a request of so many
tokens. Exit code 1 if numbers differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import needlework as nw
from harness import report_goals
from needlework.anatomy import heads_of_share
from needlework.measure import Sample, make_samples
from needlework.pruning.card import needle_task
from needlework.pruning.llama_cpp import not_llama_cpp
from needlework.pruning.prune import choose, prune_subject, uniform_heads
from pruning import WIDE

try:
    import llama_cpp
except ImportError:
    sys.exit(
        "llama_cpp is not importable, and nothing was compared: pip install llama-cpp-python, here or elsewhere on PYTHONPATH"
    )

console = Console(width=170)
DIFFERENCE, STEPS, ROUNDS = 1e-4, 16, 3
KEPT: dict[str, dict[str, float]] = {  # share of heads that stay, in equal numbers and wherever they are best
    "tiny-transformer": {"uniform": 0.5},
    "tiny-jamba": {"uniform": 0.125},
    "smollm2-135m": {"uniform": 0.66, "free": 0.5},
    "llama-1024": {"uniform": 0.25},
    "jamba-1024": {"uniform": 0.25},
}


def variants(name: str, samples: int) -> tuple[dict[str, nw.Subject], list[Sample]]:
    """Return the whole model and its pruned versions that llama.cpp can load, and needles to find (no random weights do)."""
    whole = nw.load(name) if name not in WIDE else WIDE[name]()
    found = {"whole": whole}
    drawn = [] if name in WIDE else make_samples(whole, needle_task(whole, samples), 3000)[:samples]
    order = whole.anatomy.heads if name in WIDE else choose(whole, 0.5, progress=True).ranking.order  # random weights: any order
    for how, share in KEPT[name].items():
        count = heads_of_share(share, len(order))
        heads = uniform_heads(order, whole.anatomy, count) if how == "uniform" else order[:count]
        found[how] = prune_subject(whole, heads).subject
    for how, subject in list(found.items()):
        if reason := not_llama_cpp(subject):
            console.print(f"{name}, {how}: {reason}")
            del found[how]
    return found, drawn


def open_file(file: Path, tokens: int, exact: bool) -> Any:
    kind = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
    options: dict[str, Any] = {"type_k": kind, "type_v": kind, "logits_all": exact, "flash_attn": not exact}
    return llama_cpp.Llama(
        str(file), n_ctx=tokens, n_batch=min(tokens, 512), n_threads=1, n_threads_batch=1, verbose=False, **options
    )


def difference(file: Path, subject: nw.Subject, tokens: int = 256) -> float:
    ids = torch.arange(tokens) * 7 % subject.anatomy.vocabulary
    theirs, ours = open_file(file, tokens, exact=True), subject.logits(ids[None])[0].numpy()
    theirs.eval(ids.tolist())
    return float(np.abs(theirs.scores[:tokens] - ours).max() / np.abs(ours).max())


def same_answers(file: Path, subject: nw.Subject, drawn: Sequence[Sample]) -> tuple[int, int]:
    """Return how many greedy answers are equal token by token, and how many are right."""
    theirs = open_file(file, max(len(one.item.prompt) for one in drawn) + 64, exact=True)
    equal = right = 0
    for one in drawn:
        (request,) = one.requests(nw.NONE)
        answer = subject.generate([request.prompt], max_new_tokens=request.max_new_tokens, stop=request.stop)[0]
        theirs.reset()
        theirs.eval(list(request.prompt))
        said: list[int] = []
        while len(said) < request.max_new_tokens and (
            (token := int(theirs.scores[theirs.n_tokens - 1].argmax())) not in request.stop
        ):
            said.append(token)
            theirs.eval([token])
        equal += said == [token for token in answer.tokens if token not in request.stop]
        right += one.item.target in subject.tokenizer.decode(said)
    return equal, right


def memory_bytes(theirs: Any, tokens: int) -> list[int]:
    """Return the size of a request's saved memory after half of the tokens and after all."""
    theirs.reset()
    sizes = []
    for _ in range(2):
        theirs.eval([5] * (tokens // 2))
        sizes.append(int(llama_cpp.llama_state_seq_get_size(theirs.ctx, 0)))
    return sizes


def seconds(theirs: Any, ids: Sequence[int]) -> tuple[float, float]:
    """Return the CPU time of a prefill, and of the fastest decode step after it."""
    theirs.reset()
    began = time.process_time()
    theirs.eval(ids[:-STEPS])
    prefill, steps = time.process_time() - began, []
    for token in ids[-STEPS:]:
        began = time.process_time()
        theirs.eval([token])
        steps.append(time.process_time() - began)
    return prefill, min(steps)


def compared(name: str, tokens: int, samples: int) -> list[str]:
    """Print a table, and return what differs."""
    table = Table(
        "", *("model", "logits differ by", "equal answers", "right", "file MB", "kv heads"), title=f"{name} in llama.cpp"
    )
    for column in ("KV bytes per token", "state bytes", f"prefill of {tokens}, s", "decode, ms"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        subjects, drawn = variants(name, samples)
        files = {how: nw.write_gguf(subject, Path(folder) / f"{how}.gguf") for how, subject in subjects.items()}
        opened = {how: open_file(file.path, tokens + STEPS, exact=False) for how, file in files.items()}
        vocabulary = next(iter(subjects.values())).anatomy.vocabulary
        ids = [7 * i % vocabulary for i in range(tokens + STEPS)]
        rounds = [{how: seconds(theirs, ids) for how, theirs in opened.items()} for _ in range(ROUNDS)]
        wrong = []
        for how, subject in subjects.items():
            off = difference(files[how].path, subject)
            equal, right = same_answers(files[how].path, subject, drawn) if drawn else (0, 0)
            half, whole = memory_bytes(opened[how], tokens)
            prefill, step = (min(turn[how][i] for turn in rounds) for i in (0, 1))
            heads = [kv for kv in files[how].kv_heads if kv]
            cells: tuple[str, ...] = (
                how,
                files[how].architecture,
                f"{off:.0e}",
                f"{equal} of {len(drawn)}",
                f"{right} of {len(drawn)}",
            )
            sizes = (
                f"{files[how].bytes / 1e6:.1f}",
                f"{sum(heads)} in {len(heads)} layers",
                f"{2 * (whole - half) / tokens:,.0f}",
            )
            table.add_row(*cells, *sizes, f"{2 * half - whole:,}", f"{prefill:.3f}", f"{1000 * step:.2f}")
            wrong += [f"{name}, {how}: logits"] * (off > DIFFERENCE) + [f"{name}, {how}: answers"] * (equal < len(drawn))
    console.print(table)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--only", default=",".join(KEPT))
    given = parser.parse_args()
    torch.set_num_threads(1)
    return report_goals([goal for name in given.only.split(",") for goal in compared(name, given.tokens, given.samples)])


if __name__ == "__main__":
    sys.exit(main())
