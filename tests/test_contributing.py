"""The examples of CONTRIBUTING.md are code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import needlework as nw
from needlework.tasks import make_task

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


pytestmark = pytest.mark.usefixtures("registries")


def run(what: str, **given: Any) -> dict[str, Any]:
    """Run the example that holds these words, with these names at hand."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL) if what in code]
    exec(code, given)
    return given


def test_the_example_intervention_works_as_written() -> None:
    run("class ScaleHeads")
    half = nw.parse("scale_heads(factor=0.5, phase='decode')")
    assert nw.parse(str(half)) == half
    subject = cases.subject("jamba")
    prompts = [cases.PROMPT] * 3
    acts = [nw.NONE, half, nw.parse("scale_heads(factor=0.0, phase='decode')")]
    plain, halved, silent = subject.generate(prompts, interventions=acts, max_new_tokens=4)
    off = subject.generate([cases.PROMPT], nw.AblateAttention(phase="decode"), max_new_tokens=4)[0]
    layers = len(subject.anatomy.attention_layers)
    assert halved.receipt.total("heads_changed") == 4 * layers
    assert plain.receipt.total("heads_changed") == 0
    assert silent.logprobs == pytest.approx(off.logprobs, abs=1e-4)
    assert halved.logprobs != pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_the_example_patch_is_a_hook_on_the_output_projection(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, clean, other = cases.subject("jamba"), cases.PROMPT + cases.MORE, cases.TWIN + cases.MORE
    patched = run("class PatchHead", subject=subject, clean=clean, other=other)["patched"]
    assert patched[0].receipt.total("heads_changed") == len(other) + 3

    part = subject.anatomy.attention(2)
    width, split = part.value_dim, len(cases.PROMPT)  # the last token of the prompt is decoded
    projection = cases.output_projection(subject.model.get_submodule(part.path), width * part.query_heads)
    entered: list[Tensor] = []
    with cases.hook(projection.register_forward_pre_hook, lambda module, args: entered.append(args[0])):
        subject.logits([clean])

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, chosen = args[0].clone(), {"prefill": slice(split - 1), "decode": slice(split - 1, None), "both": slice(None)}[phase]
        x[:, chosen, 3 * width : 4 * width] = entered[0][:, chosen, 3 * width : 4 * width]
        return (x,)

    with cases.hook(projection.register_forward_pre_hook, replace):
        expected = subject.logits([other])
    monkeypatch.setattr("needlework.model.attention.CPU_BLOCK_BYTES", 600)  # several blocks of queries
    monkeypatch.setattr("needlework.model.attention.FEWEST_QUERIES", 1)
    for more in ("", " + limit_context(1000)"):  # stock attention, and needlework's own
        subject.logits([clean], "patch_head(3, record=True, layers=[2])" + more, prompt_tokens=split)
        found = subject.logits([other], f"patch_head(3, layers=[2], phase={phase!r})" + more, prompt_tokens=split)
        assert cases.apart(found, expected) < 1e-4
    assert cases.apart(expected, subject.logits([other])) > 1e-3


def test_the_example_score_works_as_written() -> None:
    run("def sharpest")
    act = nw.parse("keep_heads(1, by='sharpest')")
    assert nw.parse(str(act)) == act == nw.KeepHeads(k=1, by="sharpest")
    subject, silent = cases.subject("llama"), torch.ones(1, len(cases.PROMPT), 4, 1, dtype=torch.bool)
    with nw.observe(subject, patterns=True) as seen:
        subject.logits([cases.PROMPT])
    for position in range(len(cases.PROMPT)):
        largest = [float(x.weights.max()) for x in seen.patterns if (x.layer, x.position) == (0, position)]
        silent[0, position, largest.index(max(largest))] = False
    projection = cases.output_projection(subject.model.model.layers[0].self_attn, 32)

    def keep(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].unflatten(-1, (4, 8)).masked_fill(silent, 0.0).flatten(-2),)

    with cases.hook(projection.register_forward_pre_hook, keep):
        expected = subject.logits([cases.PROMPT])
    assert cases.apart(subject.logits([cases.PROMPT], "keep_heads(1, by='sharpest', layers=[0])"), expected) < 1e-5
    assert cases.apart(subject.logits([cases.PROMPT]), expected) > 1e-3


FOLLOWS = """
models: [tiny-griffin]
experiments:
  own:
    tasks: [{kind: follows, samples: 4}]
    interventions: [none, ablate_attention()]
"""


def test_the_example_task_works_as_written(tmp_path: Path) -> None:
    run("class Follows")
    task, subject = make_task({"kind": "follows", "samples": 3}), nw.load("tiny-griffin")
    items = list(task.items(subject.tokenizer, 0, None, None))
    assert items == list(task.items(subject.tokenizer, 0, None, None)) != list(task.items(subject.tokenizer, 1, None, None))
    for item in items:
        *words, last = item.prompt_text.split()
        assert words[words.index(last) + 1] == item.target
        assert subject.encode(item.prompt_text) == item.prompt
        assert subject.tokenizer.unk_token_id not in item.prompt
        assert task.score(item, nw.Answer(text=f"{item.target} x")) == {"correct": 1.0}
        assert task.score(item, nw.Answer(text=last)) == task.score(item, nw.Answer()) == {"correct": 0.0}
    (tmp_path / "plan.yaml").write_text(FOLLOWS)
    result = nw.run(tmp_path / "plan.yaml", tmp_path / "out", progress=False, doctor="off")
    assert result.sound
    rows = result.rows()
    assert list(rows["kind"]) == ["follows"] * 8
    assert set(rows["score_correct"]) <= {0.0, 1.0}
    assert result.report().is_file()
