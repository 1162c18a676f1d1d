"""Load a model from a directory, a hub id or a GGUF file, or build it without weights from its configuration."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.fx.experimental._config

from needlework.errors import NeedleworkError, short_repr
from needlework.model import files
from needlework.model.families import family
from needlework.model.hooked_model import HookedModel, Kernels, exclusive_use, slow_kernel_hints, withheld
from needlework.model.probe import probe
from needlework.model.pruned import ENTRY, cut_class, cuts_of
from needlework.terminal import say

Window = Literal["transformers", "deepmind"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_hooked_model(
    source: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    window: Window = "transformers",
    kernels: Kernels = "fast",
) -> tuple[HookedModel, Any]:
    """Load a model with its weights, and its tokenizer (None if it has none).

    Args:
        source: a directory, a hub id or a GGUF file.
        device_map: passed to transformers; if given, `device` is not used.
        window: rule of the sliding window, see `_set_window`.
        kernels: "fast" for needlework's kernels, "stock" for transformers' code.
    """
    precision = torch_dtype(dtype)
    _check_choice("kernels=", kernels, get_args(Kernels))
    place = torch_device(device)
    origin = _origin(source)
    file = Path(origin.name) / origin.gguf if origin.gguf else None
    if file:
        origin = _Origin(str(convert_gguf(file)), True)
    published = _config(origin, revision, trust_remote_code)
    config = causal_config(published)
    _set_window(config, window)
    folder = Path(origin.name) if origin.local else files.fetch(origin.name, revision, code=trust_remote_code)
    stored = _check_files(folder, config, trust_remote_code)
    with exclusive_use():  # transformers changes torch's default dtype while it loads
        model = _weights(folder, "", config, trust_remote_code, dtype=precision, device_map=device_map)
    if device_map is None:
        model = model.to(place)
    with files.whole_model(origin.name, "a short run of the model fails"):
        body = hook_model(model, window, kernels)
    body.anatomy = replace(body.anatomy, left_out=_left_out(published, type(model), stored))
    body.source = file or folder
    return body, files.read_tokenizer(folder, trust_remote_code=trust_remote_code)


def convert_gguf(file: Path) -> Path:
    """Return the directory of a GGUF file's copy as float32 safetensors, which is written on first use."""
    return files.convert_once(file, _convert_gguf)


def _convert_gguf(file: Path, into: Path) -> None:
    """Write a GGUF file's weights, configuration and tokenizer as a transformers model directory."""
    from safetensors.torch import save_file

    config = causal_config(_config(_Origin(str(file.parent), True, file.name)))
    say(f"converting {file.name} to safetensors, once, into {into.parent} (float32; later commands read it from there)")
    with exclusive_use(), progress_bar(True):
        model = _weights(file.parent, file.name, config, dtype=torch.float32)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    tensors = {name: t.detach().float().contiguous() for name, t in model.state_dict().items() if name not in tied}
    save_file(tensors, into / files.WEIGHTS, metadata={"format": "pt"})
    for key in ("quantization_config", "_pre_quantization_dtype"):  # transformers would look for the GGUF file again
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.config.save_pretrained(into)
    model.generation_config.save_pretrained(into)
    if tokenizer := files.read_tokenizer(file.parent, file.name):
        tokenizer.save_pretrained(into)


def torch_dtype(name: str) -> torch.dtype:
    _check_choice("dtype ", name, DTYPES)
    return DTYPES[name]


def _check_choice(what: str, chosen: str, choices: Collection[str]) -> None:
    if chosen not in choices:
        raise NeedleworkError(f"{what}{chosen!r} is not known; choose from {', '.join(choices)}")


def hook_model(model: Any, window: Window = "transformers", kernels: Kernels = "fast") -> HookedModel:
    """Probe a model that is already in memory and wrap it as a HookedModel."""
    _check_choice("kernels=", kernels, get_args(Kernels))
    model.eval()
    kind = family(model.config.get_text_config(decoder=True).model_type)
    on_gpu = next(model.parameters()).device.type == "cuda"
    hints = nullcontext() if on_gpu else slow_kernel_hints()
    with exclusive_use(), hints:  # exclusive, because the probe registers global module hooks
        return HookedModel(model, kind, probe(model, kind, window), kernels)


def blueprint(
    source: str | Path, window: Window = "transformers", trust_remote_code: bool = False, revision: str | None = None
) -> HookedModel:
    """Build a HookedModel without weights (meta device) from a preset, a config.json or a GGUF header."""
    if str(source) in files.presets():
        published, dtype = files.preset_config(str(source)), torch.bfloat16
    else:
        published = _config(_origin(source), revision, trust_remote_code)
        dtype = published.get_text_config(decoder=True).dtype or published.dtype or torch.float32
    config = causal_config(published)
    _set_window(config, window)
    config.get_text_config(decoder=True)._experts_implementation = "batched_mm"  # others do not run on the meta device
    # Qwen4's indexer calls torch.nonzero, whose shape depends on values; the number of results does not matter here.
    assume_nonzero = torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with files.whole_model(source, "its configuration makes no model"), assume_nonzero:
        body = hook_model(without_weights(config).to(dtype), window, "stock")
        body.anatomy = replace(body.anatomy, left_out=_left_out(published))
        return body


def without_weights(config: Any) -> Any:
    """Build the model of a configuration on the meta device."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():  # initialization would import torch's compiler, which takes a second
        model = _model_class(config)(config)
    model.tie_weights()  # it belongs to the initialization that was left out
    return model


def own_dtype(source: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> str:
    """Return the dtype that a checkpoint's configuration names."""
    try:
        config = _config(_origin(source), revision, trust_remote_code)
    except NeedleworkError:
        return "float32"  # loading will raise the same error with more detail
    named = config.get_text_config(decoder=True).dtype or config.dtype
    if named is None:
        raise NeedleworkError(f"{source}: dtype='auto', but its configuration names none; choose dtype='float32' or 'bfloat16'")
    return str(named).removeprefix("torch.")


_LONGEST_HUB_ID = 200  # characters; the hub allows 96


class _Origin(NamedTuple):
    """The source of a model."""

    name: str  # a local directory or a hub id
    local: bool
    gguf: str = ""  # name of a GGUF file in that directory


def _origin(source: str | Path) -> _Origin:
    """Resolve a source to a local directory, a GGUF file or a hub id."""
    text, path = str(source), Path(source)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise NeedleworkError(f"{path} is a file; give a directory with config.json and model.safetensors, or a .gguf file")
        return _Origin(str(path.parent), True, path.name)
    if os.path.isdir(path):
        if not (path / "config.json").exists():
            raise NeedleworkError(f"{path} has no config.json; save the model there with model.save_pretrained({text!r})")
        return _Origin(str(path), True)
    if text in files.presets():
        raise NeedleworkError(
            f"{text} is a preset: `inspect` and `plan` know its public configuration, its weights are not here. Give its"
            " directory, or its full name on the hub (org/name)"
        )
    elsewhere = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or text.endswith(".gguf")
    if elsewhere or len(text) > _LONGEST_HUB_ID:
        raise NeedleworkError(
            f"there is no directory {short_repr(str(path))}; give a model directory, a .gguf file or a hub id such as org/name"
        )
    return _Origin(text, False)


def _config(origin: _Origin, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Read and check a model's configuration."""
    from transformers import AutoConfig, PreTrainedConfig

    options: dict[str, Any] = {"revision": revision} if revision else {}
    if origin.gguf:
        options["gguf_file"] = origin.gguf
    try:
        with hub_retries(), files.header_only() if origin.gguf else nullcontext():
            files.check_config(origin.name, PreTrainedConfig.get_config_dict(origin.name, **options)[0])
            config = AutoConfig.from_pretrained(origin.name, trust_remote_code=trust_remote_code, **options)
            files.check_sizes(origin.name, config.get_text_config(decoder=True))
            config._attn_implementation = None  # needlework sets its own, whatever the file names
            return config
    except NeedleworkError:
        raise
    except Exception as error:  # invalid configurations raise many types
        first = files.first_line(error)
        if any(word in first for word in ("model_type", "does not recognize", "Unrecognized", "custom code")):
            raise NeedleworkError(
                f"{origin.name}: this version of transformers does not know the model type ({first}); upgrade transformers,"
                " or pass trust_remote_code=True if the model brings its own code and you trust it"
            ) from None
        if origin.local:
            raise NeedleworkError(f"{origin.name}: the configuration cannot be read ({first})") from None
        raise NeedleworkError(
            f"{short_repr(origin.name)} is no local directory and could not be had from the hub ({first}); check name and network"
        ) from None


def causal_config(config: Any) -> Any:
    """Return the configuration that AutoModelForCausalLM builds its model from.

    That is the text part of a composite configuration where the causal class has no other part (Qwen3.5, for example).
    """
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    text_class = config.sub_configs.get("text_config")
    if text_class is None or type(config) not in mapping or mapping[type(config)].config_class is not text_class:
        return config
    text = config.get_text_config(decoder=True)
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def _left_out(published: Any, model_class: Any = None, stored: Collection[str] = ()) -> str:
    """Return the names of checkpoint parts that the causal model does not load, such as a vision tower; empty if none."""
    text_only = causal_config(published) is not published
    parts = [name for name in published.sub_configs if text_only and name != "text_config"]
    ignored = [re.compile(pattern) for pattern in getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ()]
    names = [name for name in stored if any(pattern.search(name) for pattern in ignored)]
    if names:
        prefixes = {".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in names}
        parts.append(f"{len(names)} tensors ({_first_few(prefixes)})")
    return ", ".join(parts)


def _model_class(config: Any) -> Any:
    """Return the model class of a configuration, adapted to the heads that were pruned.

    That is AutoModelForCausalLM's class, or the class that the configuration names.
    """
    import transformers
    from transformers import AutoModelForCausalLM, PreTrainedModel

    mapping = AutoModelForCausalLM._model_mapping
    candidates = [mapping[type(config)]] if type(config) in mapping else []
    for name in config.architectures or ():
        named = getattr(transformers, str(name), None)  # untrusted: may be anything in transformers, so it is checked
        is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
        if is_model and getattr(named, "config_class", None) is type(config):
            candidates.append(named)
    if not candidates:
        raise NeedleworkError(
            f"transformers has no causal language model for {config.model_type!r}, and config.architectures names none"
        )
    cuts = cuts_of(config) if hasattr(config, ENTRY) else ()
    return cut_class(candidates[0], cuts) if cuts else candidates[0]


def _weights(folder: Path, gguf: str, config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load the model with its weights; missing tensors, which transformers would initialize randomly, are an error."""
    from transformers import AutoModelForCausalLM

    known = type(config) in AutoModelForCausalLM._model_mapping or trust_remote_code
    loader = AutoModelForCausalLM if known and not hasattr(config, ENTRY) else _model_class(config)
    options |= {"gguf_file": gguf} if gguf else {"use_safetensors": True}
    options |= {"config": config, "trust_remote_code": trust_remote_code, "ignore_mismatched_sizes": True}
    stored = [folder / gguf] if gguf else files.weight_files(folder)
    with no_bar_for(sum(file.stat().st_size for file in stored)), withheld(*_LOAD_REPORT) as report:
        try:
            model, loading_info = loader.from_pretrained(str(folder), output_loading_info=True, **options)
        except Exception as error:  # SafetensorError, OSError, KeyError...
            # The load report names the tensor that could not be assembled, and the reason.
            match = re.search(r"^(.*)\nError: .* destined for (\S+?)\.?(?: |$)", "\n".join(report), re.MULTILINE)
            why = f"{match[2]}: {match[1]}" if match else files.first_line(error)
            raise NeedleworkError(
                f"{folder}: the weights cannot be loaded ({why}). Needlework reads safetensors"
                " (or GGUF): if this is an old checkpoint, load it once with transformers and save_pretrained it again"
            ) from None
    # Missing, unexpected and misshapen tensors are refused; tied tensors count as present.
    mismatched = sorted(loading_info["mismatched_keys"])
    shapes = [f"{name} is {list(stored)} and must be {list(wanted)}" for name, stored, wanted in mismatched]
    missing, unexpected = loading_info["missing_keys"], loading_info["unexpected_keys"]
    kinds = {"missing": missing, "not of this model": unexpected, "of another shape": shapes}
    wrong = [f"{len(names)} {kind} ({_first_few(names)})" for kind, names in kinds.items() if names]
    if wrong:
        raise NeedleworkError(
            f"{folder}: the weights cannot be loaded as {type(model).__name__}: of its {len(model.state_dict())} tensors"
            f" {'; '.join(wrong)}. Missing ones would be random, so nothing was run: check that config.json and weights belong"
            " together and that all files were copied"
        )
    _refuse_not_finite(folder, model)
    return model


_LOAD_REPORT = "transformers.modeling_utils", "LOAD REPORT"  # its table of missing and mismatched tensors; our error names them
_MOST_PER_VALUE = 64  # maximum parameters per stored value: packed and quantised tensors hold several parameters in a value


def _check_files(folder: Path, config: Any, trust_remote_code: bool) -> Collection[str]:
    """Refuse tensors of a wrong dtype or in two files, and a configuration of a model much larger than its files.

    Missing tensors are initialized in memory before loading fails, so a wrong configuration could use up all memory. Return the
    names of all stored tensors.
    """
    with files.whole_model(folder, "its weights cannot be loaded"):
        if trust_remote_code:
            return files.check_weights(folder)
        model = without_weights(config)
        # Integer buffers, such as token indices, are stored as integers.
        integers = {name.rpartition(".")[2] for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
        skipped = [*(model._keys_to_ignore_on_load_unexpected or ()), *(rf"(^|\.){re.escape(name)}$" for name in integers)]
        shapes = files.check_weights(folder, skipped)
        wanted = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(math.prod(shape) for shape in shapes.values())
    if wanted > _MOST_PER_VALUE * stored:
        raise NeedleworkError(
            f"{folder}: config.json describes a model of {wanted:,} parameters, and its files hold {stored:,} values: they do not"
            " belong together; copy or save the model again"
        )
    return shapes


def _refuse_not_finite(folder: Path, model: Any) -> None:
    """Refuse NaN and infinite weights, with which every trial would fail."""
    for name, tensor in model.named_parameters():
        if tensor.device.type == "meta" or not tensor.is_floating_point():
            continue
        if not bool(tensor.detach().sum(dtype=torch.float32).isfinite()) and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise NeedleworkError(
                f"{folder}: {bad:,} of the {tensor.numel():,} weights in {name} are NaN or infinite, so that every answer would"
                " be; save the model again"
            )


def _first_few(names: Collection[str]) -> str:
    few = ", ".join(sorted(names)[:3])
    return f"{few}, ..." if len(names) > 3 else few


def _set_window(config: Any, window: Window) -> None:
    """Apply a sliding window rule: in DeepMind's code, a query sees one key more than in transformers'."""
    if window not in ("transformers", "deepmind"):
        raise NeedleworkError(f"window={window!r} is not known; choose 'transformers' or 'deepmind'")
    if window == "deepmind":
        if not family(config.model_type).deepmind_window:
            raise NeedleworkError(f"window='deepmind' is for RecurrentGemma; {config.model_type} has only transformers' own rule")
        config.attention_window_size += 1


def torch_device(device: str) -> torch.device:
    """Return a device by name, or raise an error if torch cannot use it on this machine."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise NeedleworkError(f"device {device!r} is not known to torch; choose cpu, cuda, cuda:1 or mps") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise NeedleworkError(f"device {device!r}: this machine has no CUDA device that torch can use; choose device='cpu'")
    if place.type == "meta":
        raise NeedleworkError("device 'meta' holds no values; choose device='cpu'")
    try:
        torch.empty(1, device=place)
    except Exception as error:  # of a type that depends on the device
        why = files.first_line(error)
        raise NeedleworkError(f"device {device!r}: torch cannot use it on this machine ({why}); choose device='cpu'") from None
    return place


@contextmanager
def hub_retries() -> Iterator[None]:
    """Suppress the hub's messages about retries, so that needlework's error is visible without a network."""
    from huggingface_hub.utils import logging as hub_logging

    before = hub_logging.get_verbosity()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)  # type: ignore[no-untyped-call]


_WORTH_A_BAR = 2**30  # bytes of weights; fewer are loaded in less than two seconds


@contextmanager
def progress_bar(shown: bool) -> Iterator[None]:
    """Show or hide transformers' progress bar while the context is open."""
    from transformers.utils import logging as transformers_logging

    switch = {True: transformers_logging.enable_progress_bar, False: transformers_logging.disable_progress_bar}
    before = bool(transformers_logging.is_progress_bar_enabled())
    switch[shown]()
    try:
        yield
    finally:
        switch[before]()


def no_bar_for(weight_bytes: int) -> AbstractContextManager[None]:
    """Hide transformers' progress bar while small weights are loaded."""
    return progress_bar(False) if weight_bytes < _WORTH_A_BAR else nullcontext()
