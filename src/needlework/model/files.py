"""Files that models are read from, checked before they are used: model directories, GGUF files and presets.

Model files are untrusted: names, sizes and types in them are checked before use. The weight files that are loaded are exactly
those whose hash identifies the model. Does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError, short_repr
from needlework.files import atomic_write

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that transformers loads, sorted by name; formats other than safetensors are an error."""
    return _weight_map(directory)[0]


def _weight_map(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the weight files that transformers loads, and the file of each tensor by the index (empty without an index)."""
    # transformers would load adapters and distributed checkpoints instead of the weights or on top of them.
    if (directory / "adapter_config.json").exists():
        raise NeedleworkError(
            f"{directory} holds an adapter (adapter_config.json): merge it into its model (merge_and_unload) and save that"
        )
    if part := next(directory.glob("shard-*-model-*.safetensors"), None):
        raise NeedleworkError(f"{directory} holds a distributed checkpoint ({part.name}): load it and save_pretrained it whole")
    entry = read_config(directory).get("transformers_weights") or (WEIGHTS if (directory / WEIGHTS).is_file() else INDEX)
    file = _beside(directory, entry, "config.json", (".safetensors", ".safetensors.index.json"))
    if not file.is_file():
        if pickles := sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(pattern)):
            raise NeedleworkError(
                f"{directory} holds pickled weights only ({pickles[0]}): unpickling runs code from the file. Convert it where you"
                " trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., safe_serialization=True)"
            )
        raise NeedleworkError(
            f"{directory} holds no *.safetensors that is the model ({WEIGHTS}, or {INDEX} and its parts): save it there with"
            " model.save_pretrained(...). `needlework inspect` works without weights, loading does not"
        )
    if file.suffix == ".safetensors":
        return [file], {}
    try:
        shards = json.loads(file.read_text(encoding="utf-8"))["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise NeedleworkError(f"{directory}: {file.name} has no readable weight_map; save the model again") from None
    index = {name: _beside(directory, shard, file.name, (".safetensors",)) for name, shard in shards}
    files = sorted(set(index.values()))
    if lost := [shard.name for shard in files if not shard.is_file()] or ([] if files else ["nothing"]):
        raise NeedleworkError(f"{directory}: {file.name} names {lost[0]}, which is not there; copy or save the model again")
    return files, index


_FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of stored weights; others need a quantization_config


def check_weights(directory: Path, skipped: Iterable[str] = ()) -> dict[str, list[int]]:
    """Check the dtype of all stored tensors, and that each is stored once.

    transformers would cast any dtype to the model's, and load a tensor that is in two files from either.

    Args:
        directory: of the model.
        skipped: regular expressions of tensor names whose dtype is not checked.

    Returns:
        The shape of each tensor, by its name.
    """
    from safetensors import safe_open

    quantised = "quantization_config" in read_config(directory)
    files, places = _weight_map(directory)
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_slice(name)
                shapes[name] = tensor.get_shape()
                if (place := places.setdefault(name, file)) != file:
                    raise NeedleworkError(
                        f"{directory}: the tensor {short_repr(name)} is in {file.name}, and should be in {place.name} alone;"
                        " copy or save the model again"
                    )
                loads = not any(re.search(pattern, name) for pattern in skipped)
                if loads and not quantised and tensor.get_dtype() not in _FLOATS:
                    raise NeedleworkError(
                        f"{directory}: the tensor {short_repr(name)} is stored as {tensor.get_dtype()}; weights are"
                        f" {', '.join(_FLOATS)} unless config.json has a quantization_config. Save the model again"
                    )
    return shapes


def _beside(directory: Path, name: Any, said_by: str, endings: tuple[str, ...]) -> Path:
    """Return the path of a named file; only safe formats, directly in the directory, are allowed."""
    if not isinstance(name, str) or not name.endswith(endings) or Path(name).name != name or "\\" in name:
        raise NeedleworkError(
            f"{directory}: {said_by} names {name!r} as weights; only *.safetensors files in the directory itself are read."
            " Other formats may run code when they are opened: convert them where you trust them"
        )
    return directory / name


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json as a dict, without interpreting it."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NeedleworkError(f"{directory} has no readable config.json ({error})") from None
    if not isinstance(config, dict):
        raise NeedleworkError(f"{directory}: config.json holds no configuration; save the model again")
    return config


@contextmanager
def whole_model(place: Path | str, what: str) -> Iterator[None]:
    """Convert any error of transformers or torch into a NeedleworkError that begins with `place` and `what`."""
    try:
        yield
    except NeedleworkError:
        raise
    except Exception as error:
        raise NeedleworkError(
            f"{place}: {what} ({type(error).__name__}: {first_line(error)}); check that its files are whole and belong together"
        ) from None


_MOST_LABELS = 10**6


def check_config(place: Path | str, config: Any) -> None:
    """Refuse entries of a raw configuration, at any depth, that make transformers fetch code or allocate without limit."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        check_config(place, value)
        values = value.values() if isinstance(value, dict) else [value]
        if "_implementation" in str(key) and any("/" in str(one) for one in values):
            raise NeedleworkError(
                f"{place}: its configuration asks for the kernel {short_repr(value)} ({key}), which would be fetched and"
                " run; remove the entry, needlework brings its own attention"
            )
        if key == "num_labels" and isinstance(value, int) and value > _MOST_LABELS:
            raise NeedleworkError(f"{place}: its configuration says num_labels: {value}; that is at most {_MOST_LABELS:,}")


_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size")
_MAY_LACK = ("num_key_value_heads", "intermediate_size")
_MOST_LAYERS, _MOST_SIZE = 2000, 2**31


def check_sizes(place: Path | str, config: Any) -> None:
    """Refuse a configuration with impossible sizes before a model is built, which could take all memory or hours."""
    for key in (*_SIZES, "max_position_embeddings"):
        size = getattr(config, key, None)
        if size is None and (key not in _SIZES or key in _MAY_LACK or not hasattr(config, key)):
            continue
        most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST_SIZE
        lists = isinstance(size, (list, tuple)) and key not in ("hidden_size", "vocab_size")  # some sizes are per layer
        for one in size if lists and size else [size]:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= most or (one == 0 and not lists):
                raise NeedleworkError(
                    f"{place}: its configuration says {key}: {short_repr(one)}; that is a whole number from 1 to {most:,}"
                )


def read_tokenizer(directory: Path, gguf: str = "", trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model directory; None if it has no vocabulary, where transformers would invent a tokenizer."""
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf} if gguf else {}
    if not gguf and not any(file.is_file() for pattern in _VOCABULARIES for file in directory.glob(pattern)):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # of many types; each means that the tokenizer cannot be read
        if gguf:
            return None
        raise NeedleworkError(f"{directory}: the tokenizer cannot be read ({first_line(error)})") from None
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, (int, float)) or not longest > 0:
        raise NeedleworkError(
            f"{directory}: tokenizer_config.json says model_max_length: {short_repr(longest)}; that is a number of tokens above 0"
        )
    return tokenizer


def fetch(name: str, revision: str | None = None, code: bool = False) -> Path:
    """Download a model from the hub, or find it in the hub's cache, and return its directory; Python files only with `code`."""
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_PATTERNS, *(["*.py"] if code else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["consolidated*"]))
    except Exception as error:  # of many types; each means that the download failed
        raise NeedleworkError(f"{name!r} could not be had from the hub ({first_line(error)}); check name and network") from None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the advice that follows."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # config.json keys that are not hashed


def weights_hash(place: Path) -> str:
    """Hash the bytes of the weight files and the part of the configuration that affects outputs."""
    if place.is_file():
        return hash_files([place])
    config = read_config(place)
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    text = hash_files(weight_files(place)) + json.dumps(kept, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash the part of a configuration in memory that affects outputs: no names, paths, versions or private keys."""

    dropped = (*_NOT_THE_MODEL, "architectures")  # transformers sets it when a model is saved

    def kept(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: kept(one) for key, one in value.items() if key not in dropped and not str(key).startswith("_")}

    text = json.dumps(kept(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_files(files: Iterable[Path]) -> str:
    """Hash names and bytes of files. Hashes of large files are cached by path, size and modification time."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{_file_hash(file)}\0".encode())
    return total.hexdigest()[:32]


_WORTH_KEEPING = 64 * 2**20


def _file_hash(file: Path) -> str:
    stat = file.stat()
    kept = stat.st_size >= _WORTH_KEEPING
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "needlework" / "hashes.json"
    known: Any = None
    if kept:
        with suppress(OSError, ValueError):
            known = json.loads(cached.read_text(encoding="utf-8"))
    hashes: dict[str, str] = known if isinstance(known, dict) else {}
    key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    if key in hashes:
        return hashes[key]
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if kept:
        with suppress(OSError):  # a cache that cannot be written costs time, not correctness
            cached.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(cached) as out:
                json.dump(hashes | {key: digest}, out)
    return digest


def tokenizer_hash(place: Path) -> str:
    """Hash the tokenizer files of a model directory, or a GGUF file."""
    return hash_files([place] if place.is_file() else [place / name for name in _TOKENIZER_FILES if (place / name).is_file()])


# --- GGUF files -------------------------------------------------------------------------------------------------------

# transformers reads GGUF files slowly (minutes for a few hundred million parameters) and refuses to save a model that it read
# from one, so that every command would read it again: they are converted to safetensors, once, into a cache.

CACHE_VARIABLE = "NEEDLEWORK_CACHE"
COMPLETE = "source.json"  # hashes of the GGUF file and of the weights; written last, so a copy without it is incomplete
_LONG_ARRAY = 4096  # values; longer arrays belong to the tokenizer (tokens, merges, scores)
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's scalar types
_STRING, _ARRAY = 8, 9


def cache_directory() -> Path:
    """Return the directory of converted models: $NEEDLEWORK_CACHE, or the platform's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "needlework"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local"))) / "needlework" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "needlework"


@contextmanager
def header_only() -> Iterator[None]:
    """Make transformers skip the contents of long arrays in GGUF headers while the context is open.

    Lengths are right and values are placeholders: a configuration needs only the number of tokens. Reading 262,144 tokens one
    by one takes transformers about 20 seconds.
    """
    import gguf

    class HeaderReader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if int(raw_type) == _ARRAY:
                kind, length = struct.unpack_from("<IQ", self.data, orig_offs)
                if length > _LONG_ARRAY and (kind == _STRING or kind in _SCALAR_BYTES):
                    first = super()._get_field_parts(orig_offs + 12, kind)
                    end = orig_offs + 12 + length * _SCALAR_BYTES.get(kind, 8)  # of a string: at least its length
                    if end > len(self.data):
                        raise ValueError("an array in the header is longer than the file")
                    if kind == _STRING:
                        buffer, read, end = memoryview(self.data), struct.Struct("<Q").unpack_from, orig_offs + 12
                        for _ in range(length):
                            end += 8 + read(buffer, end)[0]
                    types = [gguf.GGUFValueType(_ARRAY), gguf.GGUFValueType(kind)]
                    return end - orig_offs, [first[1][-1]], [0] * length, types
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]

    stock, gguf.GGUFReader = gguf.GGUFReader, HeaderReader
    try:
        yield
    finally:
        gguf.GGUFReader = stock


def convert_once(file: Path, convert: Callable[[Path, Path], None]) -> Path:
    """Return the directory of a GGUF file's converted copy; `convert(file, directory)` writes it on first use.

    The copy is identified by the file's SHA-256, and is converted again if its weights differ from those that were written.
    """
    source = hash_files([file])
    target = cache_directory() / f"{file.stem}-{source[:12]}"
    if _is_complete(target, source):
        return target
    unfinished: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        convert(file, unfinished)
        mark = {"source": source, "weights": hash_files([unfinished / WEIGHTS])}
        (unfinished / COMPLETE).write_text(json.dumps(mark), encoding="utf-8")
        if not _is_complete(target, source):  # if another process finished first, its copy is equal and may be in use
            shutil.rmtree(target, ignore_errors=True)
            try:
                unfinished.replace(target)
            except OSError:
                if not _is_complete(target, source):
                    raise
    except OSError as error:
        raise NeedleworkError(
            f"cannot write into the cache {target.parent} ({error.strerror or error}); set {CACHE_VARIABLE} to another directory"
        ) from None
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _is_complete(target: Path, source: str) -> bool:
    try:
        written = json.loads((target / COMPLETE).read_text(encoding="utf-8"))
        return bool(written == {"source": source, "weights": hash_files([target / WEIGHTS])})
    except (OSError, ValueError):
        return False


# --- Presets ----------------------------------------------------------------------------------------------------------


# A preset is the public configuration of a real checkpoint: `presets.json` holds the values that determine sizes and layers,
# the parameter count that the publisher states, and the public source of each value. Names are the hub's, in lower case.


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return all presets by name; alternative names map to the same entry."""
    text = (resources.files("needlework.model") / "presets.json").read_text(encoding="utf-8")
    named: dict[str, dict[str, Any]] = json.loads(text)
    return named | {other: preset for preset in named.values() for other in preset.get("also", ())}


def preset_config(name: str) -> Any:
    """Build the transformers configuration of a preset."""
    import transformers

    preset = presets()[name]
    options = dict(preset["config"])
    for key in ("layer_types", "layers_block_type"):
        if key in options:
            most, *others = options[key].items()  # {"most": kind, other kind: [indices]}
            named = {index: kind for kind, indices in others for index in indices}
            options[key] = [named.get(index, most[1]) for index in range(options["num_hidden_layers"])]
    try:
        return transformers.AutoConfig.for_model(preset["model_type"], **options)
    except ValueError:
        raise NeedleworkError(
            f"{name}: transformers {transformers.__version__} does not know the model type {preset['model_type']!r};"
            " upgrade transformers to inspect it"
        ) from None
