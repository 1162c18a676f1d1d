"""Recurrences as linear maps: calls of a mixer's scan and short convolution, intercepted, replayed and changed while it runs.

Given its gates, a recurrence is linear in its values: output_i = sum_j W_ij value_j. Each family computes it with a function of
transformers (or of `needlework.kernels`) that takes values and gates as separate arguments. Calling this function again with
other values and the same gates gives the contribution of any token, without knowledge of the recurrence itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from needlework.model.families import without_initial_state
from needlework.model.memory import Mixer

Key = int | str  # of an argument: its position or its name


@dataclass(frozen=True)
class Scan:
    """How a scan function takes its arguments."""

    kind: str  # what the literature calls the recurrence
    values: Key
    time: int | None  # dimension of tokens in values, outputs and `per_token`; None: one token, and the state is updated in place
    per_token: tuple[Key, ...] = ()  # other arguments with an entry for each token
    state: Key | None = None  # the state before the first token
    gate: Key | None = None  # multiplies the output, after the recurrence


_DELTA = Scan("gated delta rule", 2, 1, (0, 1, "g", "beta"), state="initial_state")
_KIMI = Scan("Kimi delta attention", 2, 1, (0, 1, "g", "beta"), state="initial_state")
_LIGHTNING = Scan("lightning attention", 2, 1, (0, 1))

SCANS = {
    "mamba_selective_scan": Scan("Mamba-1", 0, 2, (1, 3, 4), gate="z"),
    "mamba_selective_state_update": Scan("Mamba-1", 1, None, state=0, gate="z"),
    "mamba2_chunk_scan": Scan("Mamba-2", 0, 1, (1, 3, 4), state="initial_states"),
    "mamba2_selective_state_update": Scan("Mamba-2", 1, None, state=0),
    "torch_chunk_gated_delta_rule": _DELTA,
    "torch_recurrent_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _KIMI,
    "recurrent_kimi_delta_attention": _KIMI,
    "gated_rglru": Scan("RG-LRU", 0, 1, (1, 2, 5), state=4),
    "_rnn_scan": Scan("RG-LRU", "hidden_states", 1, ("recurrent_gate", "reset"), state="recurrent_states"),
}
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


def _functions(mixer: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the owner and name of each scan and convolution function of transformers that a mixer may call."""
    rglru = getattr(mixer, "rg_lru", None)
    for owner in [sys.modules[type(mixer).__module__], *([] if rglru is None else [type(rglru)])]:
        yield from ((owner, name) for name in (*SCANS, *_CONVOLUTIONS) if name in vars(owner))


def _is_lightning(mixer: nn.Module) -> bool:
    """Whether a mixer computes lightning attention, in its own forward and without a function of its own."""
    return all(hasattr(mixer, name) for name in ("slope_rate", "act_fn", "norm", "num_attention_heads", "head_dim"))


def recurrence_of(mixer: nn.Module) -> str:
    """Return the kind of a mixer's recurrence, one that is linear in its values; empty if none is known."""
    kinds = {SCANS[name].kind for _, name in _functions(mixer) if name in SCANS}
    return _LIGHTNING.kind if _is_lightning(mixer) else min(kinds, default="")


@dataclass
class ScanCall:
    """One call of a scan function: its arguments, which can be replaced."""

    scan: Scan
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    offset: int = 0  # of its channels in those of the mixer, which may call the function once per head

    def get(self, key: Key) -> Any:
        return self.args[key] if isinstance(key, int) else self.kwargs.get(key)

    @property
    def values(self) -> Tensor:
        """The values that the output is linear in: [rows, tokens, channels]."""
        return self._flat(self.get(self.scan.values))

    def _flat(self, tensor: Tensor) -> Tensor:
        time = self.scan.time
        by_token = tensor[:, None] if time is None else tensor.movedim(time, 1)
        return by_token.flatten(2)

    def _shaped(self, flat: Tensor, like: Tensor) -> Tensor:
        """Invert `_flat` for [any rows, any tokens, channels]."""
        if self.scan.time is None:
            return flat[:, 0].reshape(len(flat), *like.shape[1:])
        inner = like.movedim(self.scan.time, 1).shape[2:]
        return flat.reshape(*flat.shape[:2], *inner).movedim(1, self.scan.time)

    def _with(self, changed: Mapping[Key, Any]) -> Any:
        args = [changed.get(i, value) for i, value in enumerate(self.args)]
        names = {key: value for key, value in changed.items() if isinstance(key, str)}
        return self.function(*args, **{**self.kwargs, **names})

    def replay(self, flat: Tensor, rows: Tensor, tokens: Tensor | None = None, gated: bool = False) -> Tensor:
        """Run the recurrence from an empty state, with other values and the gates of these rows.

        Args:
            flat: [n, tokens, channels] values.
            rows: [n] rows whose gates are used.
            tokens: [n] the only token of each sequence; None: all tokens.
            gated: whether the gate that follows the recurrence is applied.

        Returns:
            Outputs [n, tokens, channels].
        """
        scan, time = self.scan, self.scan.time
        changed: dict[Key, Any] = {}
        if scan.state is not None:  # functions that update the state in place need one
            changed[scan.state] = torch.zeros_like(self.get(scan.state)) if time is None else None
        for key in (*scan.per_token, scan.gate):
            if time is not None and key is not None and isinstance(value := self.get(key), Tensor):
                by_token = value.movedim(time, 1)[rows]
                by_token = by_token if tokens is None else by_token[torch.arange(len(rows)), tokens][:, None]
                changed[key] = by_token.movedim(1, time).contiguous()
        if scan.gate is not None and not gated:
            changed[scan.gate] = None
        if tokens is not None and "chunk_size" in self.kwargs and flat.device.type == "cpu":
            changed["chunk_size"] = 1  # else every single token is padded to a whole chunk
        changed[scan.values] = self._shaped(flat, self.get(scan.values)).contiguous()
        with without_initial_state():
            result = self._with(changed)
        return self._flat(result[0] if isinstance(result, tuple) else result)

    def blocked(self, keep: Tensor) -> tuple[Any, tuple[Tensor, Tensor], Tensor]:
        """Leave the values where `keep` [rows, tokens, channels] is False out of the state.

        Returns:
            The function's result; (rows, tokens) of the tokens that lost a value; their own contributions [n, channels].
        """
        values = self.values
        rows, tokens = (~keep).any(-1).nonzero(as_tuple=True)
        lost = values * ~keep
        if self.scan.time is None:  # a step: one token in every row
            own = self.replay(lost, rows, gated=True)[rows, 0]
        else:
            own = self.replay(lost[rows, tokens][:, None], rows, tokens, gated=True)[:, 0]
        others = self._shaped(values * keep, self.get(self.scan.values))
        return self._with({self.scan.values: others}), (rows, tokens), own

    def add(self, result: Any, at: tuple[Tensor, Tensor], own: Tensor) -> Any:
        """Add contributions [n, channels] at (rows, tokens) to the outputs of a result."""
        output = result[0] if isinstance(result, tuple) else result
        flat = torch.zeros_like(self._flat(output)).index_put_(at, own.to(output.dtype))
        output = output + self._shaped(flat, output)
        return (output, *result[1:]) if isinstance(result, tuple) else output


def impulse_responses(call: ScanCall, at_once: int = 4096) -> Tensor:
    """Return the linear map W [query, source, channels] of a call with one row: output_i = sum_j W_ij * value_j, by channel.

    Every source token has a row in which its values are 1 and all others 0. The contribution of a token in one channel (or head)
    depends on its value in this channel alone.
    """
    _, tokens, channels = call.values.shape
    pieces = []
    for sources in torch.arange(tokens, device=call.values.device).chunk(max(1, tokens * tokens // at_once)):
        flat = functional.one_hot(sources, tokens).to(call.values.dtype)[..., None].expand(-1, -1, channels)
        pieces.append(call.replay(flat, torch.zeros_like(sources)))
    return torch.cat(pieces).transpose(0, 1)


@dataclass
class ConvolutionCall:
    """One call of a depthwise convolution over tokens, before any activation."""

    inputs: Tensor  # [rows, channels, past + tokens]
    weight: Tensor  # [channels, taps]
    bias: Tensor | None
    tokens: int

    def windows(self) -> Tensor:
        """Return the inputs by token and lag: [rows, channels, tokens, taps], lag 0 first."""
        taps = self.weight.shape[-1]
        padded = functional.pad(self.inputs, (taps - 1, 0))
        return padded.unfold(-1, taps, 1)[:, :, -self.tokens :].flip(-1)

    def share(self, marked: Tensor) -> Tensor:
        """Return what marked lags [rows, tokens, taps] contribute to the outputs: [rows, channels, tokens]."""
        return (self.windows() * self.weight.flip(-1)[:, None] * marked[:, None]).sum(-1)


ScanHandler = Callable[[Mixer, ScanCall], Tensor | None]  # returns which values are kept [rows, tokens, channels]; None: all
ConvolutionHandler = Callable[[Mixer, ConvolutionCall], Tensor | None]  # returns lags to leave out [rows, tokens, taps]


@dataclass
class _Interceptor:
    """Passes the calls of running mixers to the handlers and changes their results as these say."""

    scans: ScanHandler
    convolutions: ConvolutionHandler
    running: list[Mixer] = field(default_factory=list)
    offset: int = 0  # channels of the running mixer's earlier calls
    tokens: int = 0  # of the running forward
    own: tuple[tuple[Tensor, Tensor], Tensor] | None = None  # lightning attention: to be added to the next outputs
    past: Tensor | None = None  # RG-LRU: the convolution's inputs before this forward
    inputs: Tensor | None = None  # RG-LRU: those of this forward

    def start(self, mixer: Mixer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which mixer runs (forward pre-hook of the mixer)."""
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() == 3)
        self.running, self.offset, self.tokens = [mixer], 0, hidden.shape[1]
        state = getattr(module, "conv1d_state", None)
        self.past = state.clone() if isinstance(state, Tensor) else None

    def stop(self, *_: Any) -> None:
        self.running = []

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for a scan or convolution function."""
        if not self.running:
            return function(*args, **kwargs)
        if name in _CONVOLUTIONS:
            return self._convolution(name, function, args, kwargs)
        call = ScanCall(SCANS[name], function, args, kwargs, self.offset)
        self.offset += call.values.shape[-1]
        keep = self.scans(self.running[-1], call)
        if keep is None:
            return function(*args, **kwargs)
        result, at, own = call.blocked(keep)
        return call.add(result, at, own)

    def _convolution(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("x", "conv_state", "weight", "bias", "activation")
        given = dict(zip(names if name == "causal_conv1d_update" else (names[0], *names[2:]), args, strict=False)) | kwargs
        inputs, state, activation = given["x"], given.get("conv_state"), given.get("activation")
        line = inputs if state is None else torch.cat([state, inputs], -1)
        marked = self.convolutions(self.running[-1], ConvolutionCall(line, given["weight"], given.get("bias"), self.tokens))
        before = None if state is None else state.clone()
        output = function(*args, **kwargs)
        if marked is None:
            return output
        call = ConvolutionCall(line, given["weight"], given.get("bias"), self.tokens)
        more = () if before is None else (before,)
        plain = function(inputs, *more, given["weight"], given.get("bias"), activation=None)
        share = functional.pad(call.share(marked), (plain.shape[-1] - self.tokens, 0))
        changed = plain - share.to(plain.dtype)
        changed = changed if activation is None else functional.silu(changed)
        return torch.where(marked.any((1, 2))[:, None, None], changed, output)

    # Lightning attention has no function of its own: its values are changed after the activation, its outputs before the norm.

    def lightning_values(self, module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Change the values in MiniMax's queries, keys and values (forward hook of the activation)."""
        if not self.running:
            return None
        mixer: Any = self.running[-1].module
        whole = output.view(*output.shape[:2], mixer.num_attention_heads, 3 * mixer.head_dim)
        call = ScanCall(_LIGHTNING, partial(_lightning, mixer.slope_rate), tuple(whole.chunk(3, -1)), {})
        keep = self.scans(self.running[-1], call)
        if keep is None:
            return None
        query, key, value = call.args
        rows, tokens = (~keep).any(-1).nonzero(as_tuple=True)
        lost = (call.values * ~keep)[rows, tokens][:, None]
        self.own = (rows, tokens), call.replay(lost, rows, tokens)[:, 0]
        return torch.cat([query, key, value * keep.view_as(value)], -1).flatten(2)

    def lightning_outputs(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Add what blocked tokens contribute to their own outputs (forward pre-hook of the norm)."""
        if not self.running or self.own is None:
            return None
        (at, own), self.own = self.own, None
        return (args[0] + torch.zeros_like(args[0]).index_put_(at, own.to(args[0].dtype)), *args[1:])

    # RG-LRU's convolution is a module or a kernel: its inputs are those of `linear_x`, its outputs those given to `rg_lru`.

    def rglru_inputs(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.inputs = output.transpose(1, 2)

    def rglru_convolved(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Take the share of marked lags out of the convolution's outputs (forward pre-hook of `rg_lru`)."""
        if not self.running or self.inputs is None:
            return None
        own: Any = self.running[-1].module.conv_1d
        known = self.past is not None and len(self.past) == len(self.inputs)
        line = torch.cat([self.past, self.inputs], -1) if known and self.past is not None else self.inputs
        call = ConvolutionCall(line, own.weight[:, 0], own.bias, self.tokens)
        marked = self.convolutions(self.running[-1], call)
        return None if marked is None else (args[0] - call.share(marked).transpose(1, 2), *args[1:])


def _lightning(slope: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute sum_j exp(-slope (i - j)) (q_i . k_j) v_j of [rows, tokens, heads, dim]; slope: [heads, 1, 1]."""
    distance = torch.arange(query.shape[1], device=query.device)
    distance = distance[:, None] - distance
    decay = torch.where(distance >= 0, torch.exp(-slope * distance.clamp_min(0)), 0.0)  # [heads, query, source]
    return torch.einsum("bihd,bjhd,hij,bjhe->bihe", query, key, decay.to(query.dtype), value)


@contextmanager
def intercepted(mixers: Sequence[Mixer], scans: ScanHandler, convolutions: ConvolutionHandler) -> Iterator[None]:
    """Pass the scans and convolutions of these mixers to handlers while the context is open."""
    from needlework import kernels  # numba comes with it, which loading and probing a model do not need

    interceptor = _Interceptor(scans, convolutions)
    functions = dict.fromkeys(owned for mixer in mixers for owned in _functions(mixer.module))
    if any(hasattr(mixer.module, "rg_lru") for mixer in mixers):
        functions[kernels, "gated_rglru"] = None  # called in place of transformers' `_rnn_scan`
    with ExitStack() as stack:
        for owner, name in functions:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, _stand_in(interceptor, name, vars(owner)[name]))
        for mixer in mixers:
            module: Any = mixer.module
            start = partial(interceptor.start, mixer)
            stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(interceptor.stop, always_call=True).remove)
            if _is_lightning(module):
                stack.callback(module.act_fn.register_forward_hook(interceptor.lightning_values).remove)
                stack.callback(module.norm.register_forward_pre_hook(interceptor.lightning_outputs).remove)
            if hasattr(module, "rg_lru"):
                stack.callback(module.linear_x.register_forward_hook(interceptor.rglru_inputs).remove)
                stack.callback(module.rg_lru.register_forward_pre_hook(interceptor.rglru_convolved).remove)
        yield


def _stand_in(interceptor: _Interceptor, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, which also binds to instances where it replaces a method."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return interceptor.call(name, function, *args, **kwargs)

    return stand_in
