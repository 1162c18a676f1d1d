"""Discovery of a model's attention modules and recurrent mixers from one short forward. Works without weights (meta device)."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.modules.module as module_hooks
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from needlework.anatomy import Anatomy, AttentionPart, GroupKind, Layer, RecurrentPart
from needlework.errors import NeedleworkError
from needlework.interventions.acts import Half
from needlework.model.families import Family
from needlework.model.memory import Memory, Mixer, states_on_modules
from needlework.model.pruned import ENTRY, Streams, streams_of
from needlework.model.scans import recurrence_of

PROBE = "needlework_probe"
PROBE_TOKENS = 6


@dataclass
class _Call:
    """A recorded call of the attention function."""

    module: nn.Module
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    keys_untouched: bool  # the keys are the tensor that the cache returned, and there is no position bias
    output: Tensor
    gate: bool = False  # outputs are gated before the output projection
    bias: bool = False  # the output projection has a bias
    projected: bool = False  # the output projection was found


@dataclass
class _Log:
    """What the probe recorded in its forward."""

    model: Any
    calls: list[_Call] = field(default_factory=list)
    stack: list[nn.Module] = field(default_factory=list)  # modules that are running, innermost last
    mixers: dict[nn.Module, int] = field(default_factory=dict)  # module that updated a recurrent state -> cache layer
    returned_keys: list[Tensor] = field(default_factory=list)  # by the cache
    cached: dict[nn.Module, set[int]] = field(default_factory=dict)  # module -> cache layers that it stores keys in
    projections: dict[nn.Module, nn.Linear] = field(default_factory=dict)  # module -> linear map whose output it returns
    projected: tuple[nn.Linear, Tensor] | None = None  # the last linear map over [rows, tokens, channels], and its output


_LOG: ContextVar[_Log | None] = ContextVar("needlework_probe_log", default=None)


def _watch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Run stock SDPA and record the call (transformers' attention interface)."""
    log = _LOG.get()
    if log is not None and not log.model._supports_sdpa:
        raise NeedleworkError(
            f"{type(log.model).__name__} is not supported: its attention is more than scaled dot products (learned sinks or"
            " capped scores, for example), so that transformers has no SDPA for it, which needlework's attention stands in for"
        )
    out, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if log is not None:
        untouched = any(key is x for x in log.returned_keys) and kwargs.get("position_bias") is None
        dims = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        log.calls.append(_Call(module, *dims, kwargs.get("sliding_window"), untouched, out))
    return out, weights


AttentionInterface.register(PROBE, _watch)
AttentionMaskInterface.register(PROBE, sdpa_mask)


@dataclass
class Findings:
    """The result of a probe."""

    anatomy: Anatomy
    attention: dict[nn.Module, int]  # attention module -> layer
    mixers: tuple[Mixer, ...]
    shareable: bool  # forked rows can share the keys of a prefix without a copy
    streams: Streams | None = None  # streaming heads, which keep the first and the newest tokens only
    kv_layers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # attention layer -> cache layers of its keys


@contextmanager
def attention_switched(model: Any, name: str) -> Iterator[None]:
    """Use the attention function of this name for the text part of a model while the context is open."""
    config = model.config
    text = config.get_text_config(decoder=True)
    before = text._attn_implementation
    composite = "text_config" in getattr(config, "sub_configs", {})
    model.set_attn_implementation({"text_config": name} if composite else name)
    try:
        yield
    finally:
        model.set_attn_implementation({"text_config": before} if composite else before)


@contextmanager
def _recorded(log: _Log, memory: Memory) -> Iterator[None]:
    """Record running modules, output projections and cache updates with global module hooks while the context is open."""

    def entered(module: nn.Module, args: Any) -> None:
        log.stack.append(module)
        call = log.calls[-1] if log.calls else None
        if call is None or call.projected or call.module not in log.stack[:-1]:
            return
        if isinstance(module, nn.Linear) and args and module.in_features == call.heads * call.value_dim:
            if call.output.device.type == "meta":  # no values to compare: look for a separate gate projection, or rows for it
                own = any("gate" in name or name == "g_proj" for name, _ in call.module.named_children())
                queries = getattr(call.module, "q_proj", None)
                call.gate = own or (isinstance(queries, nn.Linear) and queries.out_features == 2 * call.heads * call.key_dim)
            else:  # with a gate, the projection's input differs from the flattened head outputs
                flat = call.output.flatten(2)
                call.gate = not torch.equal(args[0].reshape(flat.shape), flat)
            call.bias, call.projected = module.bias is not None, True

    def left(module: nn.Module, args: Any, output: Any) -> None:
        log.stack.pop()
        if isinstance(module, nn.Linear) and args and args[0].dim() == 3:
            log.projected = (module, output)
        elif log.projected is not None and first(output) is log.projected[1]:
            log.projections[module] = log.projected[0]

    def spied(method: Any, name: str) -> Any:
        """Wrap a cache's update method to record returned keys, or the module that updates a recurrent state."""

        def spy(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            index = next(x for x in (*args, *kwargs.values()) if isinstance(x, int))
            if name == "update":
                log.returned_keys.append(result[0])
                for module in log.stack:
                    log.cached.setdefault(module, set()).add(index)
            else:
                log.mixers.setdefault(log.stack[-1], index)
            return result

        return spy

    before = module_hooks.register_module_forward_pre_hook(entered)
    after = module_hooks.register_module_forward_hook(left, always_call=True)
    for name in ("update_conv_state", "update_recurrent_state", "set_linear_cache", "update"):
        if hasattr(memory.cache, name):
            setattr(memory.cache, name, spied(getattr(memory.cache, name), name))
    token = _LOG.set(log)
    try:
        yield
    finally:
        _LOG.reset(token)
        before.remove()
        after.remove()


def probe(model: Any, family: Family, window_rule: str) -> Findings:
    """Run a few tokens through the model and return the attention modules and mixers that were seen.

    Raises:
        NeedleworkError: If the model's attention cannot be computed by SDPA, or if no layer could be ablated.
    """
    if family.refused:
        raise NeedleworkError(f"{type(model).__name__} ({model.config.model_type}) is not supported: {family.refused}")
    config = model.config.get_text_config(decoder=True)
    device = next(model.parameters()).device
    paths = {module: path for path, module in model.named_modules()}
    named = [
        Mixer(_number(p), m, _number(p), family.state_names) for m, p in paths.items() if type(m).__name__ == family.mixer_class
    ]
    memory = Memory(family.make_cache(model.config), states_on_modules(named), rows=1)
    ids = (torch.arange(PROBE_TOKENS, device=device) % config.vocab_size)[None]
    log = _Log(model)
    with torch.no_grad(), attention_switched(model, PROBE), _recorded(log, memory), memory.mounted():
        run_model(model, ids, torch.arange(PROBE_TOKENS, device=device)[None], memory)
    calls = list({call.module: call for call in log.calls}.values())  # a module may be called several times
    numbers = [_number(paths[call.module]) for call in calls]
    unique = len(set(numbers)) == len(numbers)  # if not, several stacks repeat numbers: layers are in the order of their calls
    attention = {call.module: number if unique else turn for turn, (call, number) in enumerate(zip(calls, numbers, strict=True))}
    found = named or [Mixer(_number(paths[module]), module, layer) for module, layer in log.mixers.items()]
    mixers: tuple[Mixer, ...] = ()
    for mixer in () if family.no_mixer else found:
        output = log.projections.get(mixer.module)
        groups = groups_of(mixer.module, output.in_features)[1] if output is not None else 0  # none without a last linear map
        lone_window = len(memory.states_of(mixer.cache_layer, "conv")) == 1
        convolution = short_convolution(mixer.module) if lone_window else None
        mixers += (replace(mixer, groups=groups, output=output, convolution=convolution),)
    if not calls and not mixers and not family.no_mixer:
        raise NeedleworkError(
            f"{type(model).__name__} is not supported: none of its layers was seen to call transformers' attention or to use its"
            " cache, so that nothing could be ablated"
        )
    streams = streams_of(model.config) if hasattr(model.config, ENTRY) else None
    anatomy = Anatomy(
        model_type=config.model_type,
        architecture=type(model).__name__,
        layers=_streaming(_layers(paths, log.cached, calls, attention, mixers, memory), streams),
        parameters=sum(p.numel() for p in model.parameters()),
        vocabulary=config.vocab_size,
        max_tokens=getattr(config, "max_position_embeddings", None),
        window_rule=window_rule,
        no_mixer_reason=family.no_mixer,
    )
    shareable = bool(calls) and all(call.keys_untouched for call in calls) and not family.dense_masks
    kv_layers = {layer: tuple(sorted(log.cached.get(module, ()))) for module, layer in attention.items()}
    return Findings(anatomy, attention, mixers, shareable, streams, kv_layers)


def run_model(model: Any, ids: Tensor, positions: Tensor, memory: Memory | None, **kwargs: Any) -> Any:
    """Call a model with those of the arguments that its forward has, under the names that it uses."""
    known = _parameter_names(type(model))  # type: ignore[arg-type]
    name = "cache_params" if "cache_params" in known else "past_key_values"
    if memory is not None:
        kwargs[name] = memory.cache
    if "position_ids" in known:
        kwargs["position_ids"] = positions
    if "logits_to_keep" not in known:
        kwargs.pop("logits_to_keep", None)
    return model(input_ids=ids, use_cache=memory is not None, **kwargs)


@functools.cache
def _parameter_names(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]


def _number(path: str) -> int:
    """Return the first number in a module path, the index of its layer; 0 if there is none."""
    match = re.search(r"\.(\d+)(?:\.|$)", path)
    return int(match.group(1)) if match else 0


def _layers(
    paths: dict[nn.Module, str],
    cached: dict[nn.Module, set[int]],
    calls: list[_Call],
    layer_of: dict[nn.Module, int],
    mixers: tuple[Mixer, ...],
    memory: Memory,
) -> tuple[Layer, ...]:
    """Return all layers of the model with their attention and recurrent parts."""

    def bytes_of(half: Half, layers: Iterable[int]) -> int:
        return sum(s.tensor.numel() * s.tensor.element_size() for s in memory.slots(half) if s.layer in layers)

    mixing = {mixer.cache_layer for mixer in mixers}
    attention = {
        layer_of[call.module]: AttentionPart(
            path=paths[call.module],
            query_heads=call.heads,
            kv_heads=call.kv_heads,
            key_dim=call.key_dim,
            value_dim=call.value_dim,
            window=call.window,
            output_gate=call.gate,
            output_bias=call.bias,
            parameters=_parameters(call.module),
            kv_bytes_per_token=bytes_of("kv", cached.get(call.module, ())) // PROBE_TOKENS,
            state_bytes=bytes_of("recurrent", cached.get(call.module, set()) - mixing),
        )
        for call in calls
    }
    recurrent = {}
    for mixer in mixers:
        module, output, convolution = mixer.module, mixer.output, mixer.convolution
        kinds = [slot.kind for slot in memory.slots("recurrent") if slot.layer == mixer.cache_layer]
        width = output.in_features if isinstance(output, nn.Linear) else 0
        recurrent[mixer.layer] = RecurrentPart(
            path=paths[module],
            mixer=type(module).__name__,
            parameters=_parameters(module),
            state_bytes=bytes_of("recurrent", [mixer.cache_layer]),
            groups=mixer.groups,
            group_kind=groups_of(module, width)[0] if mixer.groups else "",
            group_width=width // mixer.groups if mixer.groups else 0,
            no_groups_reason="" if mixer.groups else NO_GROUPS,
            taps=convolution.kernel_size[0] if convolution is not None else 0,
            carries_state="state" in kinds,
            recurrence=recurrence_of(module),
        )
    # The longest top-level list of layers, without vision layers.
    lists = [m for m, path in paths.items() if isinstance(m, nn.ModuleList) and not re.search(r"\.\d+\.", path)]
    sizes = [len(m) for m in lists if len({type(x).__name__ for x in m}) <= 3 and "vis" not in paths[m]]
    count = max([*sizes, *(1 + i for i in (*attention, *recurrent))], default=0)
    return tuple(Layer(i, attention.get(i), recurrent.get(i)) for i in range(count))


def _streaming(layers: tuple[Layer, ...], streams: Streams | None) -> tuple[Layer, ...]:
    """Return layers with the KV bytes per token of full heads only: the buffers of streaming heads do not grow."""
    new = list(layers)
    for index, heads in streams.kv_heads.items() if streams else ():
        part = layers[index].attention if index < len(layers) else None
        if part is None or max(heads, default=0) >= part.kv_heads:
            raise NeedleworkError(f"config.json: kv heads {heads} of layer {index} are to stream, and there are no such ones")
        each = part.kv_bytes_per_token // part.kv_heads
        new[index] = replace(new[index], attention=replace(part, kv_bytes_per_token=each * (part.kv_heads - len(heads))))
    return tuple(new)


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# --- Parts of a mixer ---

# Attributes with the number of heads and their width. A pair is used only if their product is the input width of the output
# projection, so that an attribute with another meaning in some family is not mistaken for heads.
_HEADS = (
    *(("num_v_heads", "head_v_dim"), ("num_heads", "head_dim"), ("n_mamba_heads", "mamba_head_dim")),
    ("num_attention_heads", "head_dim"),
)
_BLOCKS = (("num_attention_heads", "block_width"),)  # of RG-LRU, whose gates are block-diagonal
MOST_CHANNEL_GROUPS = 16
NO_GROUPS = "what the mixer says is not the output of one linear map over its channels, so none can be silenced before it"


def groups_of(mixer: nn.Module, width: int) -> tuple[GroupKind, int]:
    """Return kind and number of groups of the `width` inputs of the output projection: heads, RG-LRU blocks or channels."""
    for kind, names in (("heads", _HEADS), ("blocks", _BLOCKS)):
        for module in mixer.modules() if kind == "blocks" else (mixer,):
            for count, size in names:
                heads, dim = (getattr(module, name, None) for name in (count, size))
                if isinstance(heads, int) and isinstance(dim, int) and heads > 1 and heads * dim == width:
                    return kind, heads  # type: ignore[return-value]
    return "channels", max(n for n in range(1, MOST_CHANNEL_GROUPS + 1) if width % n == 0)


def short_convolution(mixer: nn.Module) -> nn.Conv1d | None:
    """Return the mixer's depthwise convolution over tokens; None if it has none, or several."""
    found = [m for m in mixer.modules() if isinstance(m, nn.Conv1d) and m.groups == m.in_channels == m.out_channels]
    return found[0] if len(found) == 1 else None


def first(output: Any) -> Tensor:
    """Return a module's output, or the first entry if it is a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def replace_first(output: Any, hidden: Tensor | None) -> Any:
    """Return a module's output with its tensor, or the first entry of its tuple, replaced."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
