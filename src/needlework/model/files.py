"""Which files of a model directory are read: its weights and its tokenizer.

The weights are exactly the files that a model's identity is hashed from. Free of torch. A directory may come from anybody,
so what its files say is checked before anything acts on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers loads, in the order of their names. Anything that is no safetensors is refused."""
    _refuse_what_loads_otherwise(directory)
    entry = read_config(directory).get("transformers_weights") or (WEIGHTS if (directory / WEIGHTS).is_file() else INDEX)
    file = _beside(directory, entry, "config.json", (".safetensors", ".safetensors.index.json"))
    if not file.is_file():
        raise _no_weights(directory)
    if file.suffix == ".safetensors":
        return [file]
    try:
        shards = json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise NeedleworkError(f"{directory}: {file.name} has no readable weight_map; save the model again") from None
    files = sorted({_beside(directory, shard, file.name, (".safetensors",)) for shard in shards})
    if lost := [shard.name for shard in files if not shard.is_file()] or ([] if files else ["nothing"]):
        raise NeedleworkError(f"{directory}: {file.name} names {lost[0]}, which is not there; copy or save the model again")
    return files


def _beside(directory: Path, name: Any, said_by: str, endings: tuple[str, ...]) -> Path:
    """A file in the directory itself, of a kind that runs no code when it is opened."""
    if not isinstance(name, str) or not name.endswith(endings) or Path(name).name != name or "\\" in name:
        raise NeedleworkError(
            f"{directory}: {said_by} names {name!r} as weights; only *.safetensors files in the directory itself are read."
            " Other formats may run code when they are opened: convert them where you trust them"
        )
    return directory / name


def _refuse_what_loads_otherwise(directory: Path) -> None:
    """transformers would load these instead of the weights, or on top of them."""
    if (directory / "adapter_config.json").exists():
        raise NeedleworkError(
            f"{directory} holds an adapter (adapter_config.json): merge it into its model (merge_and_unload) and save that"
        )
    if shard := next(directory.glob("shard-*-model-*.safetensors"), None):
        raise NeedleworkError(f"{directory} holds a distributed checkpoint ({shard.name}): load it and save_pretrained it whole")


def _no_weights(directory: Path) -> NeedleworkError:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(pattern))
    if pickles:
        return NeedleworkError(
            f"{directory} holds pickled weights only ({pickles[0]}): unpickling runs code from the file. Convert it where you"
            " trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., safe_serialization=True)"
        )
    return NeedleworkError(
        f"{directory} holds no *.safetensors that is the model ({WEIGHTS}, or {INDEX} and its parts): save it there with"
        " model.save_pretrained(...). `needlework inspect` works without weights, loading does not"
    )


def read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NeedleworkError(f"{directory} has no readable config.json ({error})") from None
    if not isinstance(config, dict):
        raise NeedleworkError(f"{directory}: config.json holds no configuration; save the model again")
    return config


@contextmanager
def whole_model(place: Path | str, what: str) -> Iterator[None]:
    """A directory may come from anybody and be wrong in many ways, each of which raises its own kind of error in transformers
    or torch. All of them mean one thing: no model can be made of it."""
    try:
        yield
    except NeedleworkError:
        raise
    except Exception as error:
        raise NeedleworkError(
            f"{place}: {what} ({type(error).__name__}: {first_line(error)}); check that its files are whole and belong together"
        ) from None


_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size")
_MAY_LACK = ("num_key_value_heads", "intermediate_size")
_MOST_LAYERS, _MOST_SIZE = 2000, 2**31


def check_sizes(place: Path | str, config: Any) -> None:
    """Refuse a configuration whose sizes are none, before anything is built from it: that could take all memory, or hours."""
    for key in (*_SIZES, "max_position_embeddings"):
        size = getattr(config, key, None)
        if size is None and (key not in _SIZES or key in _MAY_LACK or not hasattr(config, key)):
            continue
        most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST_SIZE
        lists = isinstance(size, (list, tuple)) and key not in ("hidden_size", "vocab_size")  # of some, one for each layer
        for one in size if lists and size else [size]:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= most or (one == 0 and not lists):
                raise NeedleworkError(
                    f"{place}: its configuration says {key}: {shown(one)}; that is a whole number from 1 to {most:,}"
                )


def read_tokenizer(directory: Path, gguf: str = "", **options: Any) -> Any:
    """The tokenizer that stands beside a model, or None: transformers would make up one of a few tokens."""
    from transformers import AutoTokenizer

    if gguf:
        options["gguf_file"] = gguf
    elif not any(file.is_file() for pattern in _VOCABULARIES for file in directory.glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(directory), **options)
    except Exception as error:  # many kinds, all of which mean that there is none to be had
        if gguf:
            return None
        first = first_line(error)
        raise NeedleworkError(f"{directory}: the tokenizer cannot be read ({first})") from None


def fetch(name: str, revision: str | None = None, code: bool = False) -> Path:
    """The directory of a model of the hub, fetched or found in the hub's cache; its own Python files only with `code`."""
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_PATTERNS, *(["*.py"] if code else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["consolidated*"]))
    except Exception as error:  # the hub raises many kinds; all mean that the model cannot be had
        first = first_line(error)
        raise NeedleworkError(f"{name!r} could not be had from the hub ({first}); check name and network") from None


def first_line(error: Exception) -> str:
    """What a library's error says, without the advice that follows."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # of config.json: changes no answer


def weights_hash(place: Path) -> str:
    """Which weights these are: the bytes of the files that are loaded, and of the configuration what changes answers."""
    if place.is_file():
        return hash_files([place])
    config = read_config(place)
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    text = hash_files(weight_files(place)) + json.dumps(kept, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def config_hash(config: Mapping[str, Any]) -> str:
    """Of a configuration in memory, what changes answers: no names, paths, versions, and nothing that is private to a session."""

    dropped = (*_NOT_THE_MODEL, "architectures")  # which is set when a model is saved

    def kept(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: kept(one) for key, one in value.items() if key not in dropped and not str(key).startswith("_")}

    text = json.dumps(kept(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_files(files: Iterable[Path]) -> str:
    """One hash over names and bytes. Big files are hashed once: the result is kept with their size and time."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{_file_hash(file)}\0".encode())
    return total.hexdigest()[:32]


_WORTH_KEEPING = 64 * 2**20


def _file_hash(file: Path) -> str:
    stat = file.stat()
    key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    if stat.st_size < _WORTH_KEEPING:
        return _digest(file)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "needlework" / "hashes.json"
    known = _read_cache(cache)
    if key not in known:
        known[key] = _digest(file)
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            half = cache.with_suffix(f".{os.getpid()}")
            half.write_text(json.dumps(known), encoding="utf-8")
            half.replace(cache)
        except OSError:
            pass  # a cache that cannot be written costs time, not correctness
    return known[key]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_cache(cache: Path) -> dict[str, str]:
    try:
        known = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _tokenizer_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return [place / name for name in _TOKENIZER_FILES if (place / name).is_file()]


def tokenizer_hash(place: Path) -> str:
    return hash_files(_tokenizer_files(place))
