"""Loading a model from a directory, a hub id, a GGUF file, or from its public configuration alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from needlework.errors import NeedleworkError, shown
from needlework.model import session
from needlework.model.body import Body, Kernels
from needlework.model.families import family
from needlework.model.files import check_sizes, fetch, first_line, read_tokenizer, weight_files, whole_model
from needlework.model.presets import PRESETS
from needlework.model.probe import probe
from needlework.model.session import turn
from needlework.model.surgery import cut_class, cuts_of

Window = Literal["transformers", "deepmind"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_body(
    source: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    window: Window = "transformers",
    kernels: Kernels = "fast",
) -> tuple[Body, Any]:
    """A body and its tokenizer (None if there is none)."""
    precision = torch_dtype(dtype)
    _check_kernels(kernels)
    place = torch_device(device)
    origin = _origin(source)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = _config(origin, {key: value for key, value in options.items() if value is not None})
    _set_window(config, window)
    folder = Path(origin.name) if origin.local else fetch(origin.name, revision, code=trust_remote_code)
    if not origin.gguf:
        weight_files(folder)  # refuses what is no safetensors
    code = {"trust_remote_code": trust_remote_code}
    with turn():  # transformers changes torch's default type for as long as it loads
        model = _weights(folder, origin.gguf, config, dtype=precision, device_map=device_map, **code)
    if device_map is None:
        model = model.to(place)
    with whole_model(origin.name, "a short run of the model fails"):
        body = make_body(model, window, kernels)
    body.source = folder / origin.gguf if origin.gguf else folder
    return body, read_tokenizer(folder, origin.gguf, **code)


def torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise NeedleworkError(f"dtype {name!r} is not known; choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def make_body(model: Any, window: Window = "transformers", kernels: Kernels = "fast") -> Body:
    """A body around a model that is already in memory."""
    _check_kernels(kernels)
    model.eval()
    kind = family(model.config.get_text_config(decoder=True).model_type)
    on_gpu = next(model.parameters()).device.type == "cuda"
    with turn(), nullcontext() if on_gpu else session.slow_kernel_hints():  # the probe watches every module of the process
        return Body(model, kind, probe(model, kind, window), kernels)


def blueprint(source: str | Path, window: Window = "transformers") -> Body:
    """A body without weights, on the meta device: from a preset's public values, or from a config.json."""
    if str(source) in PRESETS:
        config, dtype = PRESETS[str(source)](), torch.bfloat16
    else:
        origin = _origin(source)
        config = _config(origin, {})
        dtype = getattr(config, "dtype", None) or torch.float32
    _set_window(config, window)
    config.get_text_config(decoder=True)._experts_implementation = "batched_mm"  # the others need values, not just shapes
    with whole_model(source, "its configuration makes no model"):
        return make_body(without_weights(config).to(dtype), window, "stock")


def without_weights(config: Any) -> Any:
    """The model that a configuration describes, on the meta device."""
    with torch.device("meta"):
        return _model_class(config)(config)


def _check_kernels(kernels: str) -> None:
    if kernels not in get_args(Kernels):
        raise NeedleworkError(f"kernels={kernels!r} is not known; choose from {', '.join(get_args(Kernels))}")


class _Origin:
    def __init__(self, name: str, local: bool, gguf: str = "") -> None:
        self.name, self.local, self.gguf = name, local, gguf


def _origin(source: str | Path) -> _Origin:
    text, path = str(source), Path(source)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise NeedleworkError(f"{path} is a file; give a directory with config.json and model.safetensors, or a .gguf file")
        return _Origin(str(path.parent), True, path.name)
    if os.path.isdir(path):
        if not (path / "config.json").exists():
            raise NeedleworkError(f"{path} has no config.json; save the model there with model.save_pretrained({text!r})")
        return _Origin(str(path), True)
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise NeedleworkError(
            f"there is no directory {shown(str(path))}; give a model directory, a .gguf file or a hub id such as org/name"
        )
    return _Origin(text, False)


def _config(origin: _Origin, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if origin.gguf:
        options = {**options, "gguf_file": origin.gguf}
    try:
        with session.hub_retries():
            config = AutoConfig.from_pretrained(origin.name, **options)
            check_sizes(origin.name, config.get_text_config(decoder=True))
            return config
    except NeedleworkError:
        raise
    except Exception as error:  # a configuration can be wrong in many ways, and each raises its own kind
        first = first_line(error)
        if "model_type" in first or "does not recognize" in first or "Unrecognized" in first:
            raise NeedleworkError(
                f"{origin.name}: this version of transformers does not know the model type ({first}); upgrade transformers,"
                " or pass trust_remote_code=True if the model brings its own code and you trust it"
            ) from None
        if origin.local:
            raise NeedleworkError(f"{origin.name}: the configuration cannot be read ({first})") from None
        raise NeedleworkError(
            f"{shown(origin.name)} is no local directory and could not be had from the hub ({first}); check name and network"
        ) from None


def _model_class(config: Any) -> Any:
    """The class of a configuration's models, without the heads that were taken out of them."""
    cuts = cuts_of(config)
    return cut_class(_stock_class(config), cuts) if cuts else _stock_class(config)


def _stock_class(config: Any) -> Any:
    """AutoModelForCausalLM's choice, or the class that the configuration names itself."""
    import transformers
    from transformers import AutoModelForCausalLM, PreTrainedModel

    mapping = AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    for name in config.architectures or ():
        named = getattr(transformers, str(name), None)  # a file may name anything that transformers has
        is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
        if is_model and getattr(named, "config_class", None) is type(config):
            return named
    raise NeedleworkError(
        f"transformers has no causal language model for {config.model_type!r}, and config.architectures names none"
    )


def _weights(folder: Path, gguf: str, config: Any, **options: Any) -> Any:
    """The model with its weights, all of them: whatever the files do not give would be random."""
    from transformers import AutoModelForCausalLM

    known = type(config) in AutoModelForCausalLM._model_mapping or options["trust_remote_code"]
    loader = AutoModelForCausalLM if known and not cuts_of(config) else _model_class(config)
    source = {"gguf_file": gguf} if gguf else {"use_safetensors": True}
    files = [folder / gguf] if gguf else weight_files(folder)
    if known and not gguf and not options["trust_remote_code"]:
        _refuse_larger_than_files(folder, config, files)
    with session.no_bar_for(sum(file.stat().st_size for file in files)), session.load_report() as report:
        try:
            model, loading_info = loader.from_pretrained(
                str(folder), config=config, output_loading_info=True, ignore_mismatched_sizes=True, **source, **options
            )
        except Exception as error:  # safetensors, OSError, KeyError...: what went wrong is in the message
            first = first_line(error)
            raise NeedleworkError(
                f"{folder}: the weights cannot be loaded ({_conversion_error(report) or first}). Needlework reads safetensors"
                " (or GGUF): if this is an old checkpoint, load it once with transformers and save_pretrained it again"
            ) from None
    _refuse_gaps(folder, model, loading_info)
    _refuse_not_finite(folder, model)
    return model


_MOST_PER_VALUE = 64  # parameters of a model for each value in its files: packed and quantised ones hold several


def _refuse_larger_than_files(folder: Path, config: Any, files: Sequence[Path]) -> None:
    """What the files do not hold would be made up, in memory: a slip in a configuration must not fill all of it."""
    from safetensors import safe_open

    with whole_model(folder, "its weights cannot be loaded"):
        stored = 0
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                stored += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        wanted = sum(parameter.numel() for parameter in without_weights(config).parameters())
    if wanted > _MOST_PER_VALUE * stored:
        raise NeedleworkError(
            f"{folder}: config.json describes a model of {wanted:,} parameters, and its files hold {stored:,} values: they do not"
            " belong together; copy or save the model again"
        )


def _refuse_not_finite(folder: Path, model: Any) -> None:
    """Weights that are no numbers answer nothing; found here, they are told by name instead of failing every trial."""
    for name, tensor in model.named_parameters():
        if tensor.device.type == "meta" or not tensor.is_floating_point():
            continue
        if not bool(tensor.detach().sum(dtype=torch.float32).isfinite()) and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise NeedleworkError(
                f"{folder}: {bad:,} of the {tensor.numel():,} weights in {name} are NaN or infinite, so that every answer would"
                " be; save the model again"
            )


def _conversion_error(report: list[str]) -> str:
    """Which tensor could not be put together from its parts, and why: transformers says it in its report alone."""
    match = re.search(r"^(.*)\nError: .* destined for (\S+?)\.?(?: |$)", "\n".join(report), re.MULTILINE)
    return f"{match[2]}: {match[1]}" if match else ""


def _refuse_gaps(folder: Path, model: Any, loading_info: dict[str, Any]) -> None:
    """Every tensor of the model from the files, and every tensor of the files in the model; tied ones count as there."""
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


def _first_few(names: Collection[str]) -> str:
    few = ", ".join(sorted(names)[:3])
    return f"{few}, ..." if len(names) > 3 else few


def _set_window(config: Any, window: Window) -> None:
    """DeepMind's code lets a query see one key more than transformers does with the same number."""
    if window not in ("transformers", "deepmind"):
        raise NeedleworkError(f"window={window!r} is not known; choose 'transformers' or 'deepmind'")
    if window == "deepmind":
        if not family(config.model_type).deepmind_window:
            raise NeedleworkError(f"window='deepmind' is for RecurrentGemma; {config.model_type} has only transformers' own rule")
        config.attention_window_size += 1


def torch_device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise NeedleworkError(f"device {device!r}: {str(error).splitlines()[0]}") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise NeedleworkError(f"device {device!r}: this machine has no CUDA device that torch can use; choose device='cpu'")
    if place.type == "meta":
        raise NeedleworkError("device 'meta' holds no values; choose device='cpu'")
    try:
        torch.empty(1, device=place)
    except Exception as error:  # each kind of device is missing in its own way
        why = first_line(error)
        raise NeedleworkError(f"device {device!r}: torch cannot use it on this machine ({why}); choose device='cpu'") from None
    return place
