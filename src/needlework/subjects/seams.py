"""Scoped replacements inside transformers' modeling code: our scans, and prefill that can be continued.

Two families of recurrent layers cannot take a second multi-token chunk in transformers: RecurrentGemma overwrites its
convolution state, and the Mamba-1 mixers call a scan that has no initial state. `fast_kernels` mends both for as long as
it is open, on the class or module that owns the code, and puts everything back.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from needlework.kernels import rglru_scan, selective_scan

MAMBA1_MIXERS = {
    "jamba": "JambaMambaMixer",
    "zamba": "ZambaMambaMixer",
    "mamba": "MambaMixer",
    "falcon_mamba": "FalconMambaMixer",
}


def _modeling(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


# --- RecurrentGemma ---------------------------------------------------------------------------------------------------


def _recurrent_block_forward(
    self: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    use_cache: bool | None = True,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A recurrent block that starts from `conv1d_state` and `recurrent_states`, however many tokens come.

    A row whose first position is 0 starts a new sequence: both states of that row count as zero.
    """
    batch, length, _ = input_states.shape
    gate = self.act_fn(self.linear_y(input_states))
    x = self.linear_x(input_states).transpose(1, 2)  # [batch, width, time]
    context = _conv_context(self, x, position_ids) if use_cache else x.new_zeros(*x.shape[:2], self.conv1d_width - 1)
    x = torch.cat([context, x], dim=-1)
    conv = nn.functional.conv1d(x, self.conv_1d.weight, self.conv_1d.bias, groups=self.conv_1d.groups)
    if not use_cache:
        self.rg_lru.recurrent_states = None
    hidden = self.rg_lru(conv.transpose(1, 2), position_ids)
    self.conv1d_state = x[..., length:] if use_cache else None
    if not use_cache:
        self.rg_lru.recurrent_states = None
    return self.linear_out(hidden * gate), None


def _conv_context(block: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """The inputs before this chunk, [batch, width, conv - 1]; zeros for rows that start a sequence."""
    batch, width, _ = x.shape
    if block.conv1d_state is None or block.conv1d_state.shape[0] != batch:
        block.rg_lru.recurrent_states = torch.zeros(batch, width, device=x.device)
        return x.new_zeros(batch, width, block.conv1d_width - 1)
    starts = position_ids[:, :1, None] == 0  # [batch or 1, 1, 1]
    context: Tensor = block.conv1d_state.masked_fill(starts, 0.0)
    return context


def _rnn_scan(
    self: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    batch, length, _ = hidden_states.shape
    return rglru_scan(hidden_states, recurrent_gate, recurrent_states, reset[..., 0].expand(batch, length))


# --- Mamba-1 ----------------------------------------------------------------------------------------------------------

# The recurrent states that the running mixer continues from, one per call of the scan that is still to come.
_initial_states: ContextVar[Iterator[Tensor] | None] = ContextVar("initial_states", default=None)


def _continuing(stock_forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The mixer's own forward, with the layer's recurrent state laid out for the scan that it will call."""

    def forward(self: Any, hidden_states: Tensor, cache_params: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        state = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx)
        if state is None:
            states = None
        else:  # Zamba keeps [batch, heads, inner, n] and scans head by head
            states = iter(state.unbind(1) if state.dim() == 4 else [state])
        token = _initial_states.set(states)
        try:
            return stock_forward(self, hidden_states, cache_params, *args, **kwargs)
        finally:
            _initial_states.reset(token)

    return forward


def _mamba_selective_scan(
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
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba_selective_scan` of the modeling code (channels before time), continuing from the layer's state."""
    states = _initial_states.get()
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    if delta_softplus:
        dt = nn.functional.softplus(dt)
    time_first = (tensor.transpose(1, 2) for tensor in (B, C))
    out, final = selective_scan(
        hidden_states.transpose(1, 2), dt.transpose(1, 2), A, *time_first, state=None if states is None else next(states)
    )
    out = out.transpose(1, 2)
    if D is not None:
        out = out + hidden_states * D[:, None]
    if z is not None:
        out = out * nn.functional.silu(z)
    return (out, final) if return_last_state else out


# --- opening and closing ----------------------------------------------------------------------------------------------


def _replacements(model_type: str) -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) for every piece of code that this family has replaced."""
    if model_type == "recurrent_gemma":
        modeling = _modeling(model_type)
        return [
            (modeling.RecurrentGemmaRecurrentBlock, "forward", _recurrent_block_forward),
            (modeling.RecurrentGemmaRglru, "_rnn_scan", _rnn_scan),
        ]
    if model_type in MAMBA1_MIXERS:
        modeling = _modeling(model_type)
        mixer = getattr(modeling, MAMBA1_MIXERS[model_type])
        return [
            (mixer, "forward", _continuing(mixer.forward)),
            (modeling, "mamba_selective_scan", _mamba_selective_scan),
        ]
    return []


def continues_prefill(model_type: str, fast: bool) -> bool:
    """Whether a family takes several tokens at once after a prefill: stock code does not where `fast_kernels` mends it."""
    return fast or model_type not in {"recurrent_gemma", *MAMBA1_MIXERS}


_lock = threading.Lock()
_open: dict[str, tuple[int, ExitStack]] = {}  # model type -> how many scopes are open, what the last one undoes


@contextmanager
def fast_kernels(model: nn.Module) -> Iterator[None]:
    """While open, `model`'s family runs on our kernels and continues a prefill correctly; no-op for other families.

    Scopes may nest and may overlap between threads; the stock code is back when the last one closes. RecurrentGemma keeps
    its state on its modules: a chunk whose position_ids start at 0 starts a new sequence, any other continues.
    """
    model_type = str(getattr(model.config, "model_type", ""))
    with _lock:
        depth, undo = _open.get(model_type, (0, ExitStack()))
        if depth == 0:
            for owner, name, replacement in _replacements(model_type):
                undo.enter_context(patch.object(owner, name, replacement))
        _open[model_type] = (depth + 1, undo)
    try:
        yield
    finally:
        with _lock:
            depth, undo = _open.pop(model_type)
            if depth > 1:
                _open[model_type] = (depth - 1, undo)
            else:
                undo.close()
