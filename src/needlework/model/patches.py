"""Temporary replacements of transformers' modeling code: needlework's kernels, and prefill that can be continued.

Two kinds of recurrent layers cannot continue a prefill with several tokens in transformers: RecurrentGemma overwrites its
convolution state, and the Mamba-1 mixers call a scan without an initial state. `fast_kernels` replaces the code on the class or
module that owns it while the context is open, and restores it afterwards.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from needlework.errors import NeedleworkError
from needlework.model.families import family

# --- RecurrentGemma ---------------------------------------------------------------------------------------------------


def _recurrent_block(
    self: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    use_cache: bool | None = True,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Forward of RecurrentGemma's recurrent block that continues from its states with any number of tokens.

    A row whose first position is 0 starts a new sequence, with zero states.
    """
    from needlework.kernels import causal_conv  # numba comes with it, which kernels="stock" does not need

    gate = self.act_fn(self.linear_y(input_states))
    x = self.linear_x(input_states)  # [batch, time, width]
    weight, bias = self.conv_1d.weight[:, 0], self.conv_1d.bias
    if not use_cache:
        self.conv1d_state = self.rg_lru.recurrent_states = None
        hidden = self.rg_lru(causal_conv(x, weight, bias), position_ids)
        self.rg_lru.recurrent_states = None
        return self.linear_out(hidden * gate), None
    # The convolution's inputs before this chunk, [batch, width, taps - 1]; zeros for rows that start a sequence.
    if self.conv1d_state is None or self.conv1d_state.shape[0] != len(x):
        self.rg_lru.recurrent_states = torch.zeros(len(x), x.shape[2], device=x.device)
        before = x.new_zeros(len(x), x.shape[2], self.conv1d_width - 1)
    else:
        before = self.conv1d_state.masked_fill(position_ids[:, :1, None] == 0, 0.0)
    if x.shape[1] == 1:  # a decode step: few operations, because overhead dominates
        window = torch.cat([before, x.transpose(1, 2)], dim=-1)  # [batch, width, taps]
        convolved = ((window * weight).sum(-1) + bias)[:, None]
        self.conv1d_state = window[..., 1:]
    else:
        convolved = causal_conv(x, weight, bias, before.transpose(1, 2))
        taps = before.shape[-1]
        seen = x if x.shape[1] >= taps else torch.cat([before.transpose(1, 2), x], dim=1)
        self.conv1d_state = seen[:, seen.shape[1] - taps :].transpose(1, 2).contiguous()
    return self.linear_out(self.rg_lru(convolved, position_ids) * gate), None


def _rglru(self: Any, activations: Tensor, position_ids: Tensor) -> Tensor:
    """Forward of RecurrentGemma's RG-LRU: gate projections per head, then needlework's kernel."""
    from needlework.kernels import gated_rglru

    batch, length, width = activations.shape
    by_head = activations.reshape(batch * length, self.num_attention_heads, self.block_width).transpose(0, 1)
    gate_in, gate_keep = (
        torch.baddbmm(bias[:, None], by_head, weight).transpose(0, 1).reshape(batch, length, width)
        for weight, bias in (
            (self.input_gate_weight, self.input_gate_bias),
            (self.recurrent_gate_weight, self.recurrent_gate_bias),
        )
    )
    rate = 8.0 * functional.softplus(self.recurrent_param.float())
    reset = (position_ids == 0).expand(batch, length)
    hidden, self.recurrent_states = gated_rglru(activations, gate_in, gate_keep, rate, self.recurrent_states, reset)
    return hidden


# --- Mamba-1 ----------------------------------------------------------------------------------------------------------

# The initial states for the running mixer's scans, one per call of the scan.
_initial_states: ContextVar[Iterator[Tensor] | None] = ContextVar("initial_states", default=None)


def _continuing(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a mixer's forward to pass the layer's recurrent state to the scan that it calls."""

    def forward(self: Any, hidden_states: Tensor, cache_params: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        # Read here, because the mixer's convolution marks the cache as filled before the scan is called.
        state = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx)
        # Zamba keeps [batch, heads, inner, n] and scans head by head.
        states = None if state is None else iter(state.unbind(1) if state.dim() == 4 else [state])
        token = _initial_states.set(states)
        try:
            return stock(self, hidden_states, cache_params, *args, **kwargs)
        finally:
            _initial_states.reset(token)

    return forward


def _conv_for(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `causal_conv1d_fn` [batch, channels, time] for CPUs, with channels adjacent so that the scan needs no copy."""
    from needlework.kernels import causal_conv

    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        packed = any(kwargs.get(name) is not None for name in ("seq_idx", "cu_seqlens"))
        if hidden_states.device.type != "cpu" or activation not in (None, "silu") or packed:
            return stock(hidden_states, weight, bias, activation=activation, **kwargs)
        return causal_conv(hidden_states.transpose(1, 2), weight, bias, silu=activation == "silu").transpose(1, 2)

    return causal_conv1d_fn


def _scan_for(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `mamba_selective_scan` [batch, channels, time] that continues from the layer's state."""
    from needlework.kernels import selective_scan
    from needlework.kernels.devices import library_function

    def mamba_selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        states = _initial_states.get()
        made_for_device = hidden_states.device.type != "cpu" and library_function("mamba_ssm", "selective_scan_fn")
        if states is None and made_for_device:
            options: dict[str, Any] = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, **kwargs}
            return stock(hidden_states, dt, A, B, C, D=D, z=z, return_last_state=return_last_state, **options)
        bias = dt.new_zeros(dt.shape[1]) if delta_bias is None else delta_bias
        if not delta_softplus:
            dt = dt + bias[:, None]
        x, dt, B, C = (tensor.transpose(1, 2) for tensor in (hidden_states, dt, B, C))
        state = None if states is None else next(states)
        gate = None if z is None else z.transpose(1, 2)
        y, final = selective_scan(x, dt, A, B, C, state, dt_bias=bias if delta_softplus else None, skip=D, z=gate)
        return (y.transpose(1, 2), final) if return_last_state else y.transpose(1, 2)

    return mamba_selective_scan


# --- replacing and restoring ------------------------------------------------------------------------------------------


def _replacements(model_type: str) -> list[tuple[Any, str, Any]]:
    """Return (owner, name, replacement) for all code that is replaced in this family."""
    if not (mended := family(model_type).mended_mixer):
        return []
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    mixer = getattr(modeling, mended)
    if model_type == "recurrent_gemma":
        return [(mixer, "forward", _recurrent_block), (modeling.RecurrentGemmaRglru, "forward", _rglru)]
    return [
        (mixer, "forward", _continuing(mixer.forward)),
        (modeling, "causal_conv1d_fn", _conv_for(modeling.causal_conv1d_fn)),
        (modeling, "mamba_selective_scan", _scan_for(modeling.mamba_selective_scan)),
    ]


_lock = threading.Lock()
_open: dict[str, tuple[int, ExitStack]] = {}  # model type -> number of open scopes, and the stack that restores the code


@contextmanager
def fast_kernels(model: nn.Module) -> Iterator[None]:
    """Run the model's family on needlework's kernels, with continued prefill, while open; no-op for other families.

    Scopes may nest and may overlap between threads; the stock code is restored when the last one closes. RecurrentGemma
    keeps states on its modules: a chunk whose position_ids start at 0 starts a new sequence, any other continues one.
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    with _lock:
        if model_type not in _open:
            with ExitStack() as replacing:
                for owner, name, replacement in _replacements(model_type):
                    replacing.callback(setattr, owner, name, vars(owner)[name])
                    setattr(owner, name, replacement)
                _open[model_type] = (0, replacing.pop_all())
        depth, undo = _open[model_type]
        _open[model_type] = (depth + 1, undo)
    classes = tuple(owner for owner, name, _ in _replacements(model_type) if isinstance(owner, type) and name == "forward")
    try:
        with ExitStack() as restoring:
            for module in model.modules():
                if not isinstance(module, classes) or "forward" not in vars(module):
                    continue
                # For a device map, accelerate wrapped the method that the class had: the replacement is set in the wrapper.
                if "_old_forward" not in vars(module):
                    raise NeedleworkError(
                        f"the forward of a {type(module).__name__} was replaced by code that needlework does not know; load the"
                        " model without it, or with kernels='stock'"
                    )
                restoring.callback(setattr, module, "_old_forward", module._old_forward)
                module._old_forward = MethodType(type(module).forward, module)  # type: ignore[assignment]
            yield
    finally:
        with _lock:
            depth, undo = _open.pop(model_type)
            if depth > 1:
                _open[model_type] = (depth - 1, undo)
            else:
                undo.close()
