"""What is known of model families: facts that a probe cannot discover, and replacements of transformers' modeling code.

Two kinds of recurrent layers cannot continue a prefill with several tokens in transformers: RecurrentGemma overwrites its
convolution state, and the Mamba-1 mixers call a scan without an initial state. `fast_kernels` replaces the code on the class or
module that owns it while the context is open, and restores it afterwards.
"""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from needlework.errors import NeedleworkError


@dataclass(frozen=True)
class Family:
    """Facts about one `model_type`."""

    mixer_class: str = ""  # class of a recurrent mixer that does not use the cache, so that the probe cannot find it
    state_names: tuple[str, ...] = ()  # attributes of such a mixer that hold its state
    no_mixer: str = ""  # reason why no recurrent part can be ablated on its own
    dense_masks: bool = False  # the model itself computes with its masks and needs real ones
    make_cache: Callable[[Any], Any] = lambda config: DynamicCache(config=config)
    deepmind_window: bool = False  # trained with a sliding window of one key more than in transformers
    continues: bool = False  # the stock code accepts several tokens after a prefill (tested)
    mended_mixer: str = ""  # mixer class that does so only with `fast_kernels`
    drift: float = 0.0  # difference between stock decode and stock full forward, in standard deviations of the logits
    drift_reason: str = ""
    refused: str = ""  # reason why models of this family cannot be loaded

    def continues_prefill(self, fast: bool) -> bool:
        """Return whether several tokens in one forward may follow a prefill, with stock code or (`fast`) in `fast_kernels`.

        False for unknown families: feeding token by token is correct for all of them.
        """
        return self.continues or (fast and bool(self.mended_mixer))


def _recurrent_gemma_cache(config: Any) -> Any:
    """Return RecurrentGemma's cache, with layer types that the cache knows.

    Layer 0 is recurrent: a cache without layer types would report length 0 and reset every decode step. From transformers
    5.23 on, the configuration has these types; before, it has names of its own.
    """
    if getattr(config, "layer_types", None) is None:
        config = copy.copy(config)
        kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
        config.layer_types = [kinds[kind] for kind in config.layers_block_type]
    return DynamicCache(config=config)


def _minimax_cache(config: Any) -> Any:
    """Return a MiniMax cache that reports lengths of the first attention layer."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    first = list(config.layer_types).index("full_attention") if "full_attention" in config.layer_types else 0

    class Cache(MiniMaxCache):  # type: ignore[misc, unused-ignore]
        """A MiniMaxCache for models whose layer 0, which lengths and mask sizes are read from, is linear attention."""

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return int(super().get_seq_length(layer_idx or first))

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return super().get_mask_sizes(query_length, layer_idx or first)  # type: ignore[no-any-return]

    return Cache()


_SHORT_CONVOLUTIONS = "its short convolutions sit inside attention and feed-forward layers"
_NOTHING_ELSE = (
    *("bailing_hybrid", "bamba", "falcon_h1", "gemma3", "gemma3_text", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe"),
    *("lfm3", "llama", "mamba2", "olmo_hybrid", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    "qwen3_next",
)
_ROUNDED_TABLES = "prefill uses the decay tables of the checkpoint, which may be in half precision; decode computes its own"
_OWN_STATE = "its state is kept outside of transformers' cache classes, where rows cannot be forked, swapped or cleared"
_CLAMPED = "prefill clamps the time step at its minimum, single-token decode does not"

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_NOTHING_ELSE, Family(continues=True)),
    **dict.fromkeys(("glm5_next", "glm5_next_text", "qwen4_exp", "qwen4_exp_text"), Family(continues=True, dense_masks=True)),
    **dict.fromkeys(("inkling", "inkling_text"), Family(continues=True, no_mixer=_SHORT_CONVOLUTIONS)),
    "hrm_text": Family(continues=True, no_mixer="it recurs over depth, not over tokens"),
    "zaya": Family(continues=True, no_mixer="its convolution sits inside the query, key and value projections"),
    **dict.fromkeys(("nemotron_h", "zamba2"), Family(continues=True, drift=0.1, drift_reason=_CLAMPED)),
    "minimax": Family(make_cache=_minimax_cache, drift=0.1, drift_reason=_ROUNDED_TABLES),
    "falcon_mamba": Family(mended_mixer="FalconMambaMixer"),
    "jamba": Family(mended_mixer="JambaMambaMixer"),
    "mamba": Family(mended_mixer="MambaMixer"),
    "zamba": Family(mended_mixer="ZambaMambaMixer"),
    **dict.fromkeys(("rwkv", "xlstm"), Family(refused=_OWN_STATE)),
    "recurrent_gemma": Family(
        mixer_class="RecurrentGemmaRecurrentBlock",
        state_names=("conv1d_state", "rg_lru.recurrent_states"),
        make_cache=_recurrent_gemma_cache,
        deepmind_window=True,
        mended_mixer="RecurrentGemmaRecurrentBlock",
    ),
}


def family(model_type: str) -> Family:
    """Return the facts about a model type; the defaults for an unknown one."""
    return FAMILIES.get(model_type, Family())


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


@contextmanager
def without_initial_state() -> Iterator[None]:
    """Let the scans that are called while the context is open start from an empty state."""
    token = _initial_states.set(None)
    try:
        yield
    finally:
        _initial_states.reset(token)


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
