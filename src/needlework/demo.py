"""`needlework demo`: every experiment on the models that come with needlework, in a grid small enough for a laptop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from needlework import zoo
from needlework.experiments import shipped
from needlework.files import whole
from needlework.store import made, writing
from needlework.terminal import say


def demo(out: Path, **loading: Any) -> bool:
    """Run, report, print. `loading` is as in `nw.load`. True if all went well."""
    console = Console()
    plan = yaml.safe_load(shipped.names()["demo"].read_text(encoding="utf-8"))
    missing = _leave_out(plan, set(zoo.catalog()))
    if missing:
        console.print(f"not in this zoo, so left out: {', '.join(sorted(missing))}", style="yellow")
    if not plan["experiments"]:
        random_demo(console)
        return True
    from needlework.experiments.run import run
    from needlework.report import summary

    path = made(out) / "plan.yaml"
    with writing(out), whole(path) as file:
        file.write(yaml.safe_dump(plan, sort_keys=False, width=120))
    start = time.perf_counter()
    result = run(path, out, **loading)
    report = result.report()
    console.print(summary([out]))
    say(f"{time.perf_counter() - start:.0f} seconds. Report: {report}", stderr=False)
    return result.sound


def _leave_out(plan: dict[str, Any], known: set[str]) -> set[str]:
    """Take models that the zoo lacks out of a plan, and experiments that no model is left for; the names taken out."""
    missing = {name for name in plan["models"] if name not in known}
    plan["models"] = [name for name in plan["models"] if name in known]
    for name, experiment in list(plan["experiments"].items()):
        if "models" in experiment:
            missing |= {model for model in experiment["models"] if model not in known}
            experiment["models"] = [model for model in experiment["models"] if model in known]
        if not experiment.get("models", plan["models"]):
            del plan["experiments"][name]
    return missing


def random_demo(console: Console) -> None:
    """With no trained model at hand: what the interventions do to a tiny random one. It retrieves nothing."""
    import torch
    from transformers import JambaConfig, JambaForCausalLM

    import needlework as nw
    from needlework.inspection import answers_table, table

    console.print("No trained model is at hand. This is a tiny model with random weights: it shows the tool, not a finding.")
    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=3,
        attn_layer_offset=2,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=8,
        initializer_range=0.2,
        pad_token_id=0,
    )
    subject = nw.wrap(JambaForCausalLM(config))
    console.print(table(subject.anatomy))
    texts = ["none", "keep_heads(k=1, phase='decode')", "ablate_attention()", "ablate_recurrent()"]
    acts = [nw.parse(text) for text in texts]
    answers = subject.generate([list(range(3, 40))] * len(acts), interventions=acts, max_new_tokens=8)
    shown = [answer.with_text(" ".join(map(str, answer.tokens))) for answer in answers]
    console.print(answers_table(acts, shown))
