"""Nothing is left behind on a model: not after a call, not after an exception in the middle of a forward."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import cases
import needlework as nw
from needlework.model.attention import get_current

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")


class Stop(Exception):
    pass


def _fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that could be left behind, as plain values."""
    code = dict(vars(sys.modules[type(model).__module__]))
    for cls in {type(module) for module in model.modules()}:
        code |= {f"{cls.__qualname__}.{name}": value for name, value in vars(cls).items()}
    return {
        "attention": model.config.get_text_config(decoder=True)._attn_implementation,
        "hooks": {path: [len(getattr(m, name)) for name in _HOOKS] for path, m in model.named_modules()},
        "attributes": {path: sorted(vars(m)) for path, m in model.named_modules()},
        "training": {path: m.training for path, m in model.named_modules()},
        "code": {name: value for name, value in code.items() if callable(value)},
        "states": {
            path: getattr(m, name, None) for path, m in model.named_modules() for name in ("conv1d_state", "recurrent_states")
        },
        "weights": sum(float(p.detach().double().sum()) for p in model.parameters()),
        "grad": [p.requires_grad for p in model.parameters()],
    }


def _acts(name: str) -> nw.Intervention:
    act = nw.NONE if name in cases.NO_HEADS else nw.KeepHeads(k=1) + nw.AblateAttention(site="block", phase="decode")
    return act if name in cases.NO_MIXER else act + nw.AblateRecurrent()


@cases.each(cases.ALL)
def test_nothing_is_left_after_an_exception(name: str) -> None:
    """The last layer raises: once in prefill, once after a few steps of decoding."""
    subject = cases.subject(name)
    before = _fingerprint(subject.model)
    norm = [m for path, m in subject.model.named_modules() if "norm" in path.lower()][-1]
    for allowed in (0, 2):
        calls = []

        def hook(module: Any, args: Any, output: Any, calls: list[int] = calls, allowed: int = allowed) -> None:
            calls.append(1)
            if len(calls) > allowed:
                raise Stop

        handle = norm.register_forward_hook(hook)
        try:
            with pytest.raises(Stop):
                subject.generate([cases.PROMPT], _acts(name), max_new_tokens=6)
            calls.clear()
            with pytest.raises(Stop):
                subject.logits([cases.PROMPT], _acts(name), prompt_tokens=9)
        finally:
            handle.remove()
        assert _fingerprint(subject.model) == before
        assert get_current() is None
        assert not torch.is_inference_mode_enabled()


@cases.each(cases.ALL)
def test_nothing_is_left_after_a_call(name: str) -> None:
    model = cases.build(name, "eager")
    subject = nw.wrap(model)  # wrapping probes the model: that must leave no trace either
    before = _fingerprint(cases.build(name, "eager"))
    assert _fingerprint(model) == before
    subject.generate([cases.PROMPT, cases.TWIN], interventions=[_acts(name), nw.NONE], max_new_tokens=3)
    both = nw.AblateRecurrent() if name in cases.WITH_MIXER else nw.KeepHeads(k=1)
    subject.choices([cases.PROMPT], [[(5, 6), (7,)]], both)
    subject.logits([cases.PROMPT])
    assert _fingerprint(model) == before
    assert get_current() is None


def test_the_mode_of_training_comes_back() -> None:
    """Also where some modules train and others do not."""
    model = cases.build("llama")
    subject = nw.wrap(model)
    model.train()
    model.model.layers[1].eval()
    before = _fingerprint(model)
    subject.logits([cases.PROMPT])
    assert _fingerprint(model) == before


def test_a_subject_goes_on_after_an_exception() -> None:
    subject = cases.subject("recurrent_gemma")
    expected = subject.generate([cases.PROMPT], max_new_tokens=4)[0]
    handle = subject.model.model.layers[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        subject.generate([cases.TWIN], max_new_tokens=4)
    handle.remove()
    assert subject.generate([cases.PROMPT], max_new_tokens=4)[0] == expected
