"""Loading a model from a directory, a hub id, a GGUF file, or from its public configuration alone."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from needlework.errors import NeedleworkError
from needlework.model.body import Body, Kernels
from needlework.model.families import family
from needlework.model.presets import PRESETS
from needlework.model.probe import probe
from needlework.model.turns import turn

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
    if dtype not in DTYPES:
        raise NeedleworkError(f"dtype {dtype!r} is not known; choose from {', '.join(DTYPES)}")
    _check_kernels(kernels)
    place = _device(device)
    origin = _origin(source)
    options = {"revision": revision, "trust_remote_code": trust_remote_code, **origin.options}
    options = {key: value for key, value in options.items() if value is not None}
    config = _config(origin, options)
    _set_window(config, window)
    if origin.local:
        _refuse_pickles(Path(origin.name), origin.gguf)
    with turn():  # transformers changes torch's default type for as long as it loads
        model = _weights(origin, config, DTYPES[dtype], device_map, options)
    if device_map is None:
        model = model.to(place)
    return make_body(model, window, kernels), _tokenizer(origin, options)


def make_body(model: Any, window: Window = "transformers", kernels: Kernels = "fast") -> Body:
    """A body around a model that is already in memory."""
    _check_kernels(kernels)
    model.eval()
    kind = family(model.config.get_text_config(decoder=True).model_type)
    with turn():  # the probe watches every module of the process
        return Body(model, kind, probe(model, kind, window), kernels)


def blueprint(source: str | Path, window: Window = "transformers") -> Body:
    """A body without weights, on the meta device: from a preset's public values, or from a config.json."""
    if str(source) in PRESETS:
        config, dtype = PRESETS[str(source)](), torch.bfloat16
    else:
        origin = _origin(source)
        config = _config(origin, origin.options)
        dtype = getattr(config, "dtype", None) or torch.float32
    _set_window(config, window)
    config.get_text_config(decoder=True)._experts_implementation = "batched_mm"  # the others need values, not just shapes
    with torch.device("meta"):
        model = _model_class(config)(config).to(dtype)
    return make_body(model, window, "stock")


def _check_kernels(kernels: str) -> None:
    if kernels not in get_args(Kernels):
        raise NeedleworkError(f"kernels={kernels!r} is not known; choose from {', '.join(get_args(Kernels))}")


class _Origin:
    def __init__(self, name: str, local: bool, gguf: str = "") -> None:
        self.name, self.local, self.gguf = name, local, gguf
        self.options: dict[str, Any] = {"gguf_file": gguf} if gguf else {}


def _origin(source: str | Path) -> _Origin:
    text, path = str(source), Path(source)
    if path.is_file():
        if path.suffix != ".gguf":
            raise NeedleworkError(f"{path} is a file; give a directory with config.json and model.safetensors, or a .gguf file")
        return _Origin(str(path.parent), True, path.name)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise NeedleworkError(f"{path} has no config.json; save the model there with model.save_pretrained({text!r})")
        return _Origin(str(path), True)
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise NeedleworkError(f"there is no directory {path}; give a model directory, a .gguf file or a hub id such as org/name")
    from needlework import zoo

    close = difflib.get_close_matches(text, [*PRESETS, *zoo.names()], n=1, cutoff=0.7)
    if "/" not in text and close:
        raise NeedleworkError(f"there is no model {text!r}; did you mean {close[0]!r}?")
    return _Origin(text, False)


def _config(origin: _Origin, options: dict[str, Any]) -> Any:
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoConfig

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its retries would drown the one line that says what to do
    try:
        return AutoConfig.from_pretrained(origin.name, **options)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        if "model_type" in first or "does not recognize" in first or "Unrecognized" in first:
            raise NeedleworkError(
                f"{origin.name}: this version of transformers does not know the model type ({first}); upgrade transformers,"
                " or pass trust_remote_code=True if the model brings its own code and you trust it"
            ) from None
        if origin.local:
            raise NeedleworkError(f"{origin.name}: the configuration cannot be read ({first})") from None
        raise NeedleworkError(
            f"{origin.name!r} is no local directory and could not be had from the hub ({first}); check the name and the network"
        ) from None


def _model_class(config: Any) -> Any:
    """AutoModelForCausalLM's choice, or the class that the configuration names itself."""
    import transformers
    from transformers import AutoModelForCausalLM

    mapping = AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise NeedleworkError(
        f"transformers has no causal language model for {config.model_type!r}, and config.architectures names none"
    )


def _weights(origin: _Origin, config: Any, dtype: torch.dtype, device_map: Any, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    known = type(config) in AutoModelForCausalLM._model_mapping or options.get("trust_remote_code")
    loader = AutoModelForCausalLM if known else _model_class(config)
    try:
        return loader.from_pretrained(
            origin.name, config=config, dtype=dtype, device_map=device_map, use_safetensors=True if not origin.gguf else None,
            **options,
        )  # fmt: skip
    except NeedleworkError:
        raise
    except Exception as error:  # safetensors, OSError, KeyError...: what went wrong is in the message
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NeedleworkError(
            f"{origin.name}: the weights cannot be loaded ({first}). Needlework reads safetensors (or GGUF): if this is an old"
            " checkpoint, load it once with transformers and save_pretrained it again"
        ) from None


def _refuse_pickles(directory: Path, gguf: str) -> None:
    if gguf or any(directory.glob("*.safetensors")):
        return
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(pattern))
    if pickles:
        raise NeedleworkError(
            f"{directory} holds pickled weights only ({pickles[0]}): unpickling runs code from the file. Convert it where you"
            " trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., safe_serialization=True)"
        )
    raise NeedleworkError(f"{directory} holds no *.safetensors; `needlework inspect` works without weights, loading does not")


def _set_window(config: Any, window: Window) -> None:
    """DeepMind's code lets a query see one key more than transformers does with the same number."""
    if window not in ("transformers", "deepmind"):
        raise NeedleworkError(f"window={window!r} is not known; choose 'transformers' or 'deepmind'")
    if window == "deepmind":
        if not family(config.model_type).deepmind_window:
            raise NeedleworkError(f"window='deepmind' is for RecurrentGemma; {config.model_type} has only transformers' own rule")
        config.attention_window_size += 1


def _device(device: str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise NeedleworkError(f"device {device!r}: {str(error).splitlines()[0]}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise NeedleworkError(f"device {device!r}: this machine has no CUDA device that torch can use; choose device='cpu'")
    return found


def _tokenizer(origin: _Origin, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if origin.local and not origin.gguf and not any((Path(origin.name) / name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(origin.name, **options)
    except Exception as error:
        if origin.local and not origin.gguf:
            raise NeedleworkError(f"{origin.name}: the tokenizer cannot be read ({str(error).splitlines()[0]})") from None
        return None
