"""Which model this is: hashes of the files that are loaded, kept where they are large."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from needlework.model.files import read_config, weight_files

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
