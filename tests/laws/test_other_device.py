"""What is computed on another device is what the CPU computes, and nothing of a model on two devices is left on the wrong one.

`NEEDLEWORK_TEST_DEVICE=emu pytest tests/laws/test_other_device.py` runs on an accelerator in software (`emulated_device.py`), as
`make test` does; `NEEDLEWORK_TEST_DEVICE=cuda` on a real one.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model

import cases
import needlework as nw
from needlework.engine import budget as budget_module
from needlework.engine import shared_layers as layers_module
from needlework.heads import samples
from needlework.heads.methods import find_methods
from needlework.model import hooked_model, memory
from needlework.model.attention import Forward
from needlework.requests import Answer, Request
from tiny import build

pytestmark = pytest.mark.skipif(cases.DEVICE == "cpu", reason="NEEDLEWORK_TEST_DEVICE names no other device")
OTHER = torch.device(cases.DEVICE if ":" in cases.DEVICE else f"{cases.DEVICE}:0")
SECOND = torch.device(OTHER.type, 1)
ZOO = "tiny-griffin"
SPLIT = ("llama", "gemma3", "jamba", "recurrent_gemma", "falcon_h1", "granitemoehybrid", "lfm2", "qwen3_next", "mamba")


@functools.cache
def spread(name: str) -> nw.Subject:
    """A tiny model with its first layers on one device and its last ones on another."""
    model = build(name)
    path, stack = next((path, m) for path, m in model.named_modules() if hasattr(m, "layers"))
    places: dict[str, Any] = {child: OTHER for child, _ in model.named_children() if child != path}
    places |= {f"{path}.{child}": OTHER for child, _ in stack.named_children() if child != "layers"}
    half = len(stack.layers) // 2
    places |= {f"{path}.layers.{i}": OTHER if i < half else SECOND for i in range(len(stack.layers))}
    subject = nw.wrap(dispatch_model(model, places, main_device=OTHER))
    assert {p.device for p in model.parameters()} == {OTHER, SECOND}
    return subject


def generated(subject: nw.Subject, acts: list[nw.Intervention]) -> list[Answer]:
    prompts, spans, twins = [cases.PROMPT] * len(acts), [cases.SPANS] * len(acts), [{"twin": cases.TWIN}] * len(acts)
    return subject.generate(prompts, interventions=acts, max_new_tokens=4, spans=spans, twins=twins)


def assert_equal(here: list[Answer], there: list[Answer], labels: Any) -> None:
    for a, b, label in zip(here, there, labels, strict=True):
        assert a.error == "" == b.error, label
        assert a.receipt == b.receipt, label
        # The likeliest token may be another one where two tie; how likely it is may not.
        assert a.logprobs[0] == pytest.approx(b.logprobs[0], abs=1e-3), label


def matrix(name: str, there: nw.Subject) -> None:
    here = cases.subject(name, device="cpu")
    whiches = [which for which in cases.INTERVENTIONS if not cases.refusal(name, which)]
    acts = [cases.intervention(which, here.anatomy) for which in whiches]
    assert_equal(generated(here, acts), generated(there, acts), whiches)


@cases.each(cases.ALL)
def test_every_intervention_does_there_what_it_does_on_the_cpu(name: str) -> None:
    """All cells of the matrix that are not refused, in one batch for each architecture."""
    matrix(name, cases.subject(name))


two_devices = pytest.mark.skipif(
    OTHER.type == "cuda" and torch.cuda.device_count() < 2, reason="there is no second device of this kind"
)


@two_devices
@cases.each(SPLIT)
def test_a_model_on_two_devices_equals_the_cpu(name: str) -> None:
    matrix(name, spread(name))


@two_devices
def test_chunks_of_a_model_on_two_devices_go_on_from_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate wraps each module's own method, which the code that continues a prefill must take the place of, too."""
    for name in ("jamba", "recurrent_gemma", "mamba"):
        with monkeypatch.context() as patch:
            patch.setattr(hooked_model, "CHUNK_TOKENS", 5)
            chunked = spread(name).logits([cases.PROMPT])
        assert cases.apart(chunked.cpu(), cases.subject(name, device="cpu").logits([cases.PROMPT])) < 1e-4


@two_devices
def test_a_hand_over_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = spread("llama")
    monkeypatch.setattr(Forward, "on", lambda forward, device: forward)
    with pytest.raises(RuntimeError, match="device"):
        subject.generate([cases.PROMPT], nw.LimitContext(tokens=4), max_new_tokens=2)


def test_a_tensor_made_without_its_device_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("llama")
    made = lambda own, q_positions: q_positions[:, -1:] + torch.arange(1 - own.count, 1)  # noqa: E731
    monkeypatch.setattr(memory.OwnKeys, "positions", made)
    with pytest.raises(RuntimeError, match="device"):
        subject.generate([cases.PROMPT], nw.LimitContext(tokens=4), max_new_tokens=2)


@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma", "falcon_h1"])
def test_shared_beginnings_shared_depth_and_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "_FORWARD_FLOPS", {OTHER.type: 0.0, "cpu": 0.0})  # else prompts are too short to share
    monkeypatch.setattr(layers_module, "_PROOF_COST", 0)
    here, there = cases.subject(name, device="cpu"), cases.subject(name)
    last = here.anatomy.attention_layers[-1].index
    acts = [nw.NONE, nw.AblateHeads(heads=[(last, 0)]), nw.KeepHeads(k=1), nw.KeepHeads(k=2, by="norm", layers=[last])]
    stem = cases.PROMPT + cases.MORE
    prompts = [(*stem, *more) for more in ((7, 8, 9), (11, 12, 13, 14), (21,))]
    requests = [Request(prompt, act, 3) for prompt, act in itertools.product(prompts, acts)]
    requests += [Request(prompt, act, options=((5,), (9, 4))) for prompt, act in itertools.product(prompts, acts)]
    a, b = here.answer(requests), there.answer(requests)
    assert there.engine.prefiller.tokens_computed < there.engine.prefiller.tokens_requested, "nothing was shared"
    for request, x, y in zip(requests, a, b, strict=True):
        assert (x.error, x.receipt) == ("", y.receipt)
        assert (x.totals or x.logprobs[:1]) == pytest.approx(y.totals or y.logprobs[:1], abs=1e-3), request
    monkeypatch.setattr(hooked_model, "CHUNK_TOKENS", 5)
    assert_equal(a[: len(acts)], there.answer(requests[: len(acts)]), acts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma", "falcon_h1", "lfm2"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """The CPU's own kernels round at other places than what runs there: logits agree as far as half precision goes."""
    here, there = nw.wrap(build(name).to(dtype)), nw.wrap(build(name).to(dtype).to(OTHER))
    for act in (nw.NONE, nw.KeepHeads(k=2), nw.AblateRecurrent() if here.anatomy.recurrent_layers else nw.LimitContext(tokens=4)):
        a, b = (x.logits([cases.PROMPT], act, prompt_tokens=9).cpu() for x in (here, there))
        assert float((a - b).abs().median() / a.abs().max()) < 2e-2


def test_observation() -> None:
    tables, patterns = [], []
    for subject in (cases.subject("jamba", device="cpu"), cases.subject("jamba")):
        with nw.observe(subject, "needle", patterns=True) as seen:
            subject.generate([cases.PROMPT, cases.TWIN], max_new_tokens=3, spans=[cases.SPANS] * 2)
        tables.append([list(vars(row).values())[3:] for phase in ("prefill", "decode") for row in seen.table(phase)])
        patterns.append([pattern.weights for pattern in seen.patterns])
    assert np.allclose(*tables, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*patterns, strict=True))


@two_devices
def test_observation_of_a_model_on_two_devices() -> None:
    tables = []
    for subject in (cases.subject("jamba", device="cpu"), spread("jamba")):
        with nw.observe(subject, "needle") as seen:
            subject.generate([cases.PROMPT], max_new_tokens=3, spans=[cases.SPANS])
        tables.append([list(vars(row).values())[3:] for row in seen.table()])
    assert np.allclose(*tables, atol=1e-5)


@functools.cache
def zoo_subject(device: Any) -> nw.Subject:
    return nw.load(ZOO, device=str(device))


@pytest.mark.parametrize("by", ["needle_mass", "question_mass", "locos", "gradient", "leave_one_out", "patching"])
def test_rankings_of_heads(by: str) -> None:
    task = nw.tasks.make_task({"kind": "niah", "lengths": [64], "depths": [20, 80], "distractors": 1, "twins": True})
    scores = []
    for device in ("cpu", OTHER):
        subject = zoo_subject(device)
        items = [sample.item for sample in samples.draw_samples(subject, [task], 3, seed=5)]
        scores.append(find_methods([by])[0].score(subject, items, seed=0, progress=lambda share: None).values)
    assert np.allclose(*scores, atol=1e-3)


def test_pruning_and_calibration(tmp_path: Path) -> None:
    heads = zoo_subject("cpu").anatomy.heads[:4]
    means, logits = [], []
    for device in ("cpu", OTHER):
        subject = zoo_subject(device)
        smaller = nw.prune(subject, heads, tmp_path / str(device).replace(":", "-"), samples=0).subject
        logits.append(smaller.logits([cases.PROMPT], prompt_tokens=9).cpu())
        means.append(nw.calibrate(subject, [cases.PROMPT + cases.MORE]))
        off = nw.AblateHeads(heads=heads[:1], value="mean", means=means[-1].hash)
        logits.append(subject.logits([cases.PROMPT], off).cpu())
    assert cases.apart(logits[0], logits[2]) < 1e-4
    assert cases.apart(logits[1], logits[3]) < 1e-4
