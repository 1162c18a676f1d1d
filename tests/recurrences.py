"""Recurrences written out once more: loops over tokens in float64, on what a stock model's own functions are given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Own = dict[int, Tensor]  # layer -> contributions [query, source, channels]
# (layer, contributions, the function's own outputs [query, channels]) -> what the outputs become
Change = Callable[[int, Tensor, Tensor], Tensor]


def lower(decay: Tensor) -> Tensor:
    """The product of decays after j and up to i, for logarithms [tokens, ...]: [i, j, ...], 0 where j > i."""
    count = len(decay)
    products = torch.zeros(count, *decay.shape, dtype=torch.float64)
    for i in range(count):
        for j in range(i + 1):
            products[i, j] = decay[j + 1 : i + 1].sum(0).exp()
    return products


def selective(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, delta_bias: Any = None, **_: Any) -> Tensor:
    """Mamba-1: x, dt [1, channels, tokens], A [channels, n], B, C [1, n, tokens]."""
    x, dt, A, B, C = (t.double() for t in (x[0].T, dt[0].T, A, B[0].T, C[0].T))
    dt = functional.softplus(dt if delta_bias is None else dt + delta_bias.double())
    decays = lower(dt[:, :, None] * A)  # [i, j, channels, n]
    weights = torch.einsum("in,ijcn,jn,jc->ijc", C, decays, B, dt)
    if D is not None:
        weights = weights + torch.eye(len(x))[..., None] * D.double()
    return weights * x


def ssd(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, dt_bias: Any = None, dt_limit: Any = None, **_: Any) -> Tensor:
    """Mamba-2: x [1, tokens, heads, dim], dt [1, tokens, heads], A [heads], B, C [1, tokens, groups, n]."""
    x, dt, A, B, C = (t.double() for t in (x[0], dt[0], A, B[0], C[0]))
    dt = functional.softplus(dt if dt_bias is None else dt + dt_bias.double()).clamp(*(dt_limit or (0.0, float("inf"))))
    B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))
    weights = torch.einsum("ihn,jhn,ijh,jh->ijh", C, B, lower(dt * A), dt)
    if D is not None:
        weights = weights + torch.eye(len(x))[..., None] * D.double()
    return (weights[..., None] * x).flatten(2)


def delta(q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, **_: Any) -> Tensor:
    """The (gated or Kimi) delta rule, one source at a time: q, k [1, tokens, key heads, d], v [1, tokens, heads, e]."""
    q, k, v, g, beta = (t[0].double() for t in (q, k, v, g, beta))
    count, heads = v.shape[:2]
    q, k = (t * (t.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, k = (t.repeat_interleave(heads // t.shape[1], 1) for t in (q, k))
    g = g if g.dim() == 3 else g[..., None]  # a decay for every channel of the keys, or one for each head
    found = torch.zeros(count, count, heads, v.shape[-1], dtype=torch.float64)
    for j in range(count):
        state = torch.zeros(heads, q.shape[-1], v.shape[-1], dtype=torch.float64)
        for i in range(j, count):
            state = state * g[i].exp()[..., None]
            new = v[i] if i == j else torch.zeros_like(v[i])
            told = torch.einsum("hd,hde->he", k[i], state)
            state = state + torch.einsum("hd,he->hde", k[i], beta[i][:, None] * (new - told))
            found[i, j] = torch.einsum("hd,hde->he", q[i], state) / q.shape[-1] ** 0.5
    return found.flatten(2)


def rglru(hidden_states: Any, recurrent_gate: Any, reset: Any, **_: Any) -> Tensor:
    """RG-LRU, from its gated and normalized inputs [1, tokens, width] and its decays."""
    decays = recurrent_gate[0].double() * ~reset[0]
    return lower(decays.clamp_min(1e-300).log()) * hidden_states[0].double()


def lightning(module: Any, qkv: Tensor) -> Tensor:
    """Lightning attention, from queries, keys and values [1, tokens, heads * 3 * dim] after their activation."""
    q, k, v = (t.double() for t in qkv[0].unflatten(-1, (module.num_attention_heads, -1)).chunk(3, -1))
    decays = lower(-module.slope_rate.double()[:, 0, 0].expand(len(q), -1))
    return torch.einsum("ihd,jhd,ijh,jhe->ijhe", q, k, decays, v).flatten(2)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "mamba_selective_scan": selective,
    "mamba2_chunk_scan": ssd,
    "torch_chunk_gated_delta_rule": delta,
    "chunk_kimi_delta_attention": delta,
}


@contextmanager
def stock_scans(subject: Any, change: Change) -> Iterator[Own]:
    """Replace the outputs of a stock model's recurrences by what `change` makes of their contributions, and collect these.

    Of needlework, only the paths of the mixers are used. A mixer that scans head by head is asked once for each head.
    """
    collected: dict[int, list[Tensor]] = {}
    running: list[int] = []

    def handle(own: Tensor, output: Tensor, time: int) -> Tensor:
        layer = running[-1]
        collected.setdefault(layer, []).append(own)
        changed = change(layer, own, output.movedim(time, 1).flatten(2)[0]).to(output.dtype)
        return changed.reshape(output.movedim(time, 1).shape).movedim(1, time)

    def stand_in(name: str, function: Any) -> Any:
        def scan(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **{**kwargs, "z": None} if name == "mamba_selective_scan" else kwargs)
            output, *others = result if isinstance(result, tuple) else (result,)
            own = _FUNCTIONS[name](*args, **{key: value for key, value in kwargs.items() if key != "chunk_size"})
            output = handle(own, output, 2 if name == "mamba_selective_scan" else 1)
            if name == "mamba_selective_scan" and kwargs.get("z") is not None:
                output = output * functional.silu(kwargs["z"])
            return (output, *others) if isinstance(result, tuple) else output

        return scan

    def rnn_scan(self: Any, **kwargs: Any) -> Any:
        output, state = stock_rnn(self, **kwargs)
        return handle(rglru(**kwargs), output, 1), state

    with ExitStack() as stack:
        for layer, part in subject.anatomy.recurrent_parts():
            module: Any = subject.model.get_submodule(part.path)
            stack.callback(module.register_forward_pre_hook(lambda *_, layer=layer: running.append(layer)).remove)
            names = vars(sys.modules[type(module).__module__])
            for name in _FUNCTIONS.keys() & names.keys():
                if names[name].__name__ != "scan":
                    stack.callback(names.__setitem__, name, names[name])
                    names[name] = stand_in(name, names[name])
            if hasattr(module, "rg_lru") and type(module.rg_lru)._rnn_scan is not rnn_scan:
                owner: Any = type(module.rg_lru)
                if owner._rnn_scan.__name__ != "rnn_scan":
                    stock_rnn = owner._rnn_scan
                    stack.callback(setattr, owner, "_rnn_scan", stock_rnn)
                    owner._rnn_scan = rnn_scan
            if hasattr(module, "slope_rate"):
                kept: dict[str, Tensor] = {}
                stack.callback(module.act_fn.register_forward_hook(lambda m, a, out, kept=kept: kept.update(qkv=out)).remove)

                def outputs(norm: Any, args: Any, module: Any = module, kept: Any = kept) -> Any:
                    return (handle(lightning(module, kept["qkv"]), args[0], 1), *args[1:])

                stack.callback(module.norm.register_forward_pre_hook(outputs).remove)
        own: Own = {}
        yield own
        own.update({layer: torch.cat(pieces, -1) for layer, pieces in collected.items()})


def convolved(line: Tensor, weight: Tensor) -> Tensor:
    """A depthwise convolution over tokens: inputs [channels, tokens], weights [channels, taps]; [query, source, channels]."""
    count, taps = line.shape[1], weight.shape[1]
    found = torch.zeros(count, count, len(line), dtype=torch.float64)
    for i in range(count):
        for lag in range(min(taps, i + 1)):
            found[i, i - lag] = line[:, i - lag].double() * weight[:, taps - 1 - lag].double()
    return found


@contextmanager
def stock_convolutions(subject: Any, change: Change) -> Iterator[Own]:
    """The same for the short convolutions: their outputs before any activation, whose bias is in the function's own outputs."""
    own: Own = {}
    running: list[int] = []

    def stand_in(function: Any) -> Any:
        def convolution(x: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any) -> Any:
            layer = running[-1]
            own[layer] = convolved(x[0], weight)
            output = change(layer, own[layer], function(x, weight, bias)[0].T).T[None].to(x.dtype)
            return output if activation is None else functional.silu(output)

        return convolution

    def of_module(layer: int) -> Any:
        def hook(conv: Any, args: Any, output: Tensor) -> Tensor:
            count = args[0].shape[-1]
            own[layer] = convolved(args[0][0], conv.weight[:, 0])
            changed = change(layer, own[layer], output[0, :, :count].T).T[None].to(output.dtype)
            return torch.cat([changed, output[..., count:]], -1)

        return hook

    with ExitStack() as stack:
        for layer, part in subject.anatomy.recurrent_parts():
            module: Any = subject.model.get_submodule(part.path)
            stack.callback(module.register_forward_pre_hook(lambda *_, layer=layer: running.append(layer)).remove)
            names = vars(sys.modules[type(module).__module__])
            if hasattr(module, "conv_1d"):
                stack.callback(module.conv_1d.register_forward_hook(of_module(layer)).remove)
            elif names["causal_conv1d_fn"].__name__ != "convolution":
                stack.callback(names.__setitem__, "causal_conv1d_fn", names["causal_conv1d_fn"])
                names["causal_conv1d_fn"] = stand_in(names["causal_conv1d_fn"])
        yield own
