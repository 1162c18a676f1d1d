"""The shared matrix: tiny random models of 29 architectures, and the interventions that each of them is put through."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emulated_device
import needlework as nw
from needlework.anatomy import Anatomy
from needlework.interventions.acts import Half
from needlework.model.memory import Memory
from tiny import ARCHITECTURES, NO_HEADS, build

NO_MIXER = {  # why the recurrent side cannot be addressed
    "hrm_text": "it recurs over depth, not over tokens",
    "zaya": "its convolution sits inside the query, key and value projections",
    "inkling": "its short convolutions sit inside attention and feed-forward layers",
    "llama": "no separate recurrent layers",
    "qwen3": "no separate recurrent layers",
    "gemma3": "no separate recurrent layers",
}
CORE = ("llama", "jamba", "recurrent_gemma", "mamba")  # not slow
ALL = tuple(ARCHITECTURES)
WITH_HEADS = tuple(name for name in ALL if name not in NO_HEADS)
WITH_MIXER = tuple(name for name in ALL if name not in NO_MIXER)
HYBRIDS = tuple(name for name in WITH_HEADS if name in WITH_MIXER)


def each(names: tuple[str, ...]) -> Any:
    """Parametrise a test over architectures; those outside CORE are slow."""
    params = [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", params)


DEVICE = os.environ.get("NEEDLEWORK_TEST_DEVICE", "cpu")  # cuda, or emu for the device of tests/emulated_device.py
if emulated_device.is_named(DEVICE):
    emulated_device.register()


@functools.cache
def subject(name: str, kernels: str = "fast", device: str = DEVICE) -> nw.Subject:
    """The tiny subject of an architecture, built once a process. Tests must leave it as it was."""
    return nw.wrap(build(name).to(device), kernels=kernels)  # type: ignore[arg-type]


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(seed))


def fail_first_join(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the first join of two decoding batches run out of memory; the list that is returned is filled when it does."""
    failed: list[str] = []

    class Full(Memory):
        @staticmethod
        def join(memories: Sequence[Memory]) -> Memory:
            if not failed:
                failed.append("out of memory")
                raise torch.OutOfMemoryError("CUDA out of memory")
            return Memory.join(memories)

    monkeypatch.setattr("needlework.engine.engine.Memory", Full)
    return failed


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@contextmanager
def hook(register: Callable[..., Any], function: Callable[..., Any]) -> Iterator[None]:
    """Hang a function on a module for as long as the context is open."""
    handle = register(function)
    try:
        yield
    finally:
        handle.remove()


def output_projection(module: nn.Module, width: int) -> nn.Linear:
    """The module's last linear map from all head outputs, by the names that transformers gives it."""
    (projection,) = [m for name in ("o_proj", "dense", "out_proj") if (m := getattr(module, name, None)) is not None]
    assert projection.in_features == width
    return projection


def between_routes(name: str) -> float:
    """How far logits may lie apart when tokens are read one by one instead of at once.

    zamba2 and nemotron_h drift by themselves (`families.py` says why); in Qwen's delta rule rounding grows.
    """
    return {"zamba2": 5e-2, "nemotron_h": 5e-2, "qwen3_next": 5e-4, "qwen3_5": 5e-4, "qwen3_5_moe": 5e-4}.get(name, 1e-4)


def _first(anatomy: Anatomy) -> int:
    return anatomy.attention_layers[0].index if anatomy.attention_layers else 0


def _mixed(anatomy: Anatomy) -> nw.Intervention:
    layers = [layer.index for layer in anatomy.recurrent_layers][:1] or None
    return nw.KeepHeads(k=1, phase="decode") + nw.AblateRecurrent(layers=layers)


def _swapped_layer(half: Half, anatomy: Anatomy) -> nw.SwapMemory:
    own = anatomy.attention_layers if half == "kv" else anatomy.recurrent_layers
    return nw.SwapMemory(half=half, layers=[layer.index for layer in own][-1:] or [0])


def _some_groups(anatomy: Anatomy) -> nw.AblateRecurrentGroups:
    return nw.AblateRecurrentGroups(groups=anatomy.groups[1::3] or [(0, 0)])


Make = Callable[[Anatomy], nw.Intervention]
_MADE: dict[str, Make] = {
    "only some heads": lambda a: nw.OnlyHeads(heads=[(_first(a), 0), (_first(a), 3)]),
    "one head off": lambda a: nw.AblateHeads(heads=[(_first(a), 1)]),
    "needle blocked for one head": lambda a: nw.BlockAttention(to=(2, 4, 6), heads=[(_first(a), 2)]),
    "keep by ranking": lambda a: nw.KeepHeads(k=1, by=nw.Ranking(order=a.heads[::-1])),
    "both sides": _mixed,
    "groups off": _some_groups,
    "keys of a layer swapped": lambda a: _swapped_layer("kv", a),
    "keys of the needle swapped": lambda a: nw.SwapMemory(half="kv", at="needle"),
    "state of a layer swapped": lambda a: _swapped_layer("recurrent", a),
    "groups and state off": lambda a: _some_groups(a) + nw.AblateRecurrent(site="state"),
}
_FIXED: dict[str, nw.Intervention] = {
    "none": nw.NONE,
    "keep by entropy": nw.KeepHeads(k=2),
    "keep without sinks": nw.KeepHeads(k=2, sinks=1),
    "keep by l2": nw.KeepHeads(k=1, by="l2"),
    "keep by norm": nw.KeepHeads(k=3, by="norm"),
    "keep at random": nw.KeepHeads(fraction=0.5, by="random", seed=3),
    "keep a random set": nw.KeepHeads(k=3, by="random", draw="trial", scope="model"),
    "keep in decode": nw.KeepHeads(k=1, phase="decode"),
    "attention off": nw.AblateAttention(),
    "attention block off": nw.AblateAttention(site="block"),
    "attention off in prefill": nw.AblateAttention(phase="prefill"),
    "needle omitted": nw.ExposeTokens(mode="omit"),
    "needle only": nw.ExposeTokens(mode="only", renormalize=True),
    "needle null": nw.ExposeTokens(mode="null", phase="decode"),
    "needle balanced": nw.ExposeTokens(mode="balanced"),
    "needle by phase": nw.ExposeTokens(mode="omit", phase="prefill", renormalize=True)
    + nw.ExposeTokens(mode="only", phase="decode"),
    "needle blocked": nw.BlockAttention(),
    "short context": nw.LimitContext(tokens=4, sinks=1),
    "memory off": nw.AblateRecurrent(),
    "mixers off": nw.AblateRecurrent(site="block"),
    "convolution off": nw.AblateRecurrent(site="conv"),
    "state off": nw.AblateRecurrent(site="state"),
    "reset at a token": nw.ResetState(at=9),
    "reset after the needle": nw.ResetState(at="needle"),
    "span blocked in the state": nw.BlockRecurrent(),
    "span blocked in the convolution": nw.BlockRecurrent(site="conv"),
    "keys swapped": nw.SwapMemory(half="kv"),
    "state swapped": nw.SwapMemory(half="recurrent"),
}
RECURRENT_SIDE = (
    *("memory off", "mixers off", "convolution off", "state off", "groups off", "groups and state off"),
    *("reset at a token", "reset after the needle", "state swapped", "both sides"),
    "state of a layer swapped",
    *("span blocked in the state", "span blocked in the convolution"),
)
NO_CONVOLUTION = ("minimax",)
NO_STATE = ("lfm2", "lfm2_moe", "lfm3")  # a short convolution is all that their mixers remember with
ATTENTION_SIDE = (*(x for x in (*_FIXED, *_MADE) if x not in ("none", *RECURRENT_SIDE)), "both sides")
INTERVENTIONS = (*_FIXED, *_MADE)

PROMPT = (17, 45, 9, 71, 30, 22, 8, 64, 51, 90, 13, 37)
TWIN = (17, 45, 9, 80, 55, 41, 8, 64, 51, 90, 13, 37)  # another needle value, the same last token
SPANS = {"needle": ((3, 6),)}
MORE = (28, 66, 5, 19)  # what is decoded after the prompt where the tokens are given


def intervention(which: str, anatomy: Anatomy) -> nw.Intervention:
    return _MADE[which](anatomy) if which in _MADE else _FIXED[which]


def refusal(name: str, which: str) -> str:
    """The reason with which this cell of the matrix is refused; empty where the laws hold."""
    if which in ("keys swapped", "keys of a layer swapped", "keys of the needle swapped"):
        return "no kv memory" if name in NO_HEADS else ""
    if which in ("state swapped", "state of a layer swapped"):
        return "no recurrent memory" if name in NO_MIXER else ""
    if which in ATTENTION_SIDE and name in NO_HEADS:
        return "no separate attention layers"
    if which in ("span blocked in the convolution", "convolution off") and name in NO_CONVOLUTION:
        return "no short convolution of their own"
    if which in ("span blocked in the state", "state off", "groups and state off") and name in NO_STATE:
        return "no recurrent state of their own"
    return NO_MIXER.get(name, "") if which in RECURRENT_SIDE else ""


class Letters:
    """The smallest tokenizer: one token a letter."""

    all_special_ids: tuple[int, ...] = (1,)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(c) - 90 for c in text]}

    def decode(self, tokens: Any) -> str:
        return "".join(chr(t + 90) for t in tokens)
