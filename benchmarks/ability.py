"""`needlework eval` over 5 interventions against 5 runs of lm-eval's `hf` class with its eager attention patched.

    python benchmarks/ability.py [MODEL]      a directory or a zoo name; without one a random model of the zoo's make

Both answer the same questions in one process; scores are compared before times. Two cases: idle (five times nothing is
done: what is shared is shared) and prefill-active (five different interventions that all change the prefill: nothing is
shared between them). Loading and building of requests are part of both sides.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DISABLE_MULTIPROC="1", TOKENIZERS_PARALLELISM="false")

import torch
from rich.console import Console
from rich.table import Table

TASKS = ["mini-mmlu", "mini-mmlu-cloze"]
ACTIVE = [0, 1, 2, 3, 5]  # heads kept
LIMIT = None  # questions of each of the twelve tasks: all
GOAL = 3.0
BATCH = 32  # of lm-eval's model; its default is 1


def checkpoint(folder: Path) -> Path:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    from needlework.toy import tokenizer

    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        num_hidden_layers=6,
        vocab_size=len(tokenizer.build()),
        hidden_size=128,
        intermediate_size=768,
        num_attention_heads=16,
        num_key_value_heads=1,
        lru_width=128,
        head_dim=32,
        attention_window_size=512,
        conv1d_width=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = RecurrentGemmaForCausalLM(config)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.build().save_pretrained(folder)
    return folder


def patched(k: int | None) -> Any:
    """transformers' eager attention that keeps the k heads of least entropy for each token: the paper's way."""
    from transformers.models.llama.modeling_llama import repeat_kv

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, Any]:
        groups = query.shape[1] // key.shape[1]
        logits = query @ repeat_kv(key, groups).transpose(2, 3) * scaling
        weights = (logits if mask is None else logits + mask[..., : key.shape[2]]).softmax(-1)
        out = weights @ repeat_kv(value, groups)  # [rows, heads, queries, dim]
        if k is not None and k < query.shape[1]:
            score = weights.clamp_min(1e-30).log().mul(weights).sum(-1)  # negative entropy, [rows, heads, queries]
            order = score.sort(dim=1, descending=True, stable=True).indices  # ties go to the lower head, as ours do
            keep = torch.zeros_like(score, dtype=torch.bool).scatter_(1, order[:, :k], True)
            out = out * keep[..., None]
        return out.transpose(1, 2).contiguous(), weights

    return attention


def run_hf(model: Path, tasks: list[str], manager: Any, k: int | None, batch: int = BATCH, **options: Any) -> dict[str, Any]:
    """Run lm-eval's tasks with its own `hf` class and patched attention."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    from needlework.lmeval.documents import silence_lm_eval

    AttentionInterface.register("patched_eager", patched(k))
    AttentionMaskInterface.register("patched_eager", eager_mask)
    with silence_lm_eval():
        lm = HFLM(str(model), device="cpu", dtype="float32", batch_size=batch, attn_implementation="patched_eager")
        return simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options)  # type: ignore[return-value]


def ours(model: Path, acts: list[str]) -> list[Path]:
    from needlework.lmeval.evaluate import evaluate

    with tempfile.TemporaryDirectory() as out:
        files = evaluate(model, TASKS, acts, out, limit=LIMIT, progress=False).files
        kept = [Path(tempfile.mkdtemp()) / "results" for _ in files]
        for file, place in zip(files, kept, strict=True):
            file.parent.rename(place)
    return kept


def agree(folder: Path, found: dict[str, Any]) -> tuple[float, int, int]:
    """The largest difference of log-likelihoods, and how many questions were judged otherwise, of how many."""
    import json

    worst, other, count = 0.0, 0, 0
    for task, samples in found["samples"].items():
        mine = [json.loads(line) for line in (folder / f"samples_{task}.jsonl").read_text().splitlines()]
        for a, b in zip(mine, samples, strict=True):
            worst = max(worst, *(abs(x[0][0] - y[0][0]) for x, y in zip(a["resps"], b["resps"], strict=True)))
            other, count = other + (a["acc"] != b["acc"]), count + 1
    return worst, other, count


def main() -> int:
    from lm_eval.tasks import TaskManager

    import needlework.lmeval.model  # noqa: F401  (both sides need lm-eval: its import is nobody's time)
    from needlework.experiments.models import locate
    from needlework.experiments.plan import Model
    from needlework.lmeval import FOLDER

    place = sys.argv[1] if len(sys.argv) > 1 else ""
    model = locate(Model("", place, place)) if place else checkpoint(Path(tempfile.mkdtemp()))
    table = Table(title=f"5 interventions, {', '.join(TASKS)}, {torch.get_num_threads()} threads, {place or 'random griffin'}")
    for name in ("case", "lm-eval hf, s", "needlework eval, s", "ratio", "largest difference", "judged otherwise"):
        table.add_column(name)
    missed = False
    for case, kept in (("idle", [None] * 5), ("prefill-active", ACTIVE)):
        start = time.perf_counter()
        manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
        its = [run_hf(model, list(TASKS), manager, k, limit=LIMIT) for k in kept]
        middle = time.perf_counter()
        # Five equal interventions would be one question: idle ones differ in text (k = all heads) and do nothing alike.
        texts = [f"keep_heads(k={k})" for k in ACTIVE] if case != "idle" else ["none", *idle(model)]
        mine = ours(model, texts)
        end = time.perf_counter()
        found = [agree(a, b) for a, b in zip(mine, its, strict=True)]
        ratio = (middle - start) / (end - middle)
        missed |= ratio < GOAL
        table.add_row(
            case,
            f"{middle - start:.1f}",
            f"{end - middle:.1f}",
            f"{ratio:.1f}",
            f"{max(f[0] for f in found):.1e}",
            f"{sum(f[1] for f in found)} of {sum(f[2] for f in found)}",
        )
    Console(width=140).print(table)
    print(f"goal of {GOAL:g}x missed" if missed else f"goal of {GOAL:g}x reached")
    return missed


def idle(model: Path) -> list[str]:
    """Four texts that stand for nothing: all heads are kept, by four scores."""
    from needlework.model.load import blueprint

    heads = min(part.query_heads for _, part in blueprint(model).anatomy.attention_parts())
    return [f"keep_heads(k={heads}, by='{by}')" for by in ("entropy", "l2", "norm", "random")]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
