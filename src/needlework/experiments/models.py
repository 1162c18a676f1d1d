"""What is known of a model before its weights are loaded: who it is (hashes), its anatomy and its tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.experiments.plan import Model
from needlework.model.files import fetch, read_config, read_tokenizer, weight_files

if TYPE_CHECKING:
    from needlework.engine.budget import Costs

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # of config.json: changes no answer


@dataclass(frozen=True)
class Sketch:
    """One model of a run. `weights` and `tokenizer_hash` say which; everything a trial's id needs is here."""

    model: Model
    weights: str
    tokenizer_hash: str
    anatomy: Anatomy
    tokenizer: Any
    eos: frozenset[int] = frozenset()
    directory: str = ""  # where it is loaded from
    costs: Costs | None = None  # what prompts and answers take of it
    _stops: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def sizes(self) -> dict[str, int]:
        """What the letters in a plan's ranges stand for."""
        heads = [part.query_heads for _, part in self.anatomy.attention_parts()]
        return {"H": min(heads, default=0)}

    def stops(self, text: str | None) -> frozenset[int]:
        """Token ids that end an answer: the model's own, and the task's stop."""
        if text is None:
            return self.eos
        if text not in self._stops:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise NeedleworkError(f"stop {text!r} is {len(ids)} tokens of {self.name}; a stop must be one token")
            self._stops[text] = int(ids[0])
        return self.eos | {self._stops[text]}

    def identity(self) -> dict[str, str]:
        """What a store remembers, and compares before it takes more trials."""
        return {
            "weights": self.weights,
            "tokenizer": self.tokenizer_hash,
            "dtype": self.model.dtype,
            "window_rule": self.anatomy.window_rule,
        }


def sketch(model: Model) -> Sketch:
    """Look at a model on disk. Needs transformers for the tokenizer and torch for the anatomy, but loads no weights."""
    from needlework.engine.budget import Costs
    from needlework.model.load import blueprint, torch_dtype

    try:
        place = locate(model)
        folder, gguf = (place.parent, place.name) if place.is_file() else (place, "")
        weights, tokenizer_hash = weights_hash(place), hash_files(_tokenizer_files(place))
        value_bytes = torch_dtype(model.dtype).itemsize
        body = blueprint(place, model.window)  # type: ignore[arg-type]
        tokenizer = read_tokenizer(folder, gguf)
        if tokenizer is None:
            raise NeedleworkError(
                f"{place} is without a tokenizer, and tasks need one; save it there with tokenizer.save_pretrained(...)"
            )
    except NeedleworkError as error:
        raise model.error(f"model {model.name!r}: {error}") from None
    return Sketch(model, weights, tokenizer_hash, body.anatomy, tokenizer, _eos(folder), str(place), Costs.of(body, value_bytes))


def locate(model: Model) -> Path:
    """The directory or .gguf file of a model: a path, a zoo name, or a hub id (fetched, or found in the hub's cache)."""
    from needlework import zoo

    here = Path(model.source).expanduser()
    if here.is_dir() or here.is_file():
        return here
    if model.source in zoo.names() or "/" not in model.source:
        return zoo.path(model.source)  # raises with the nearest name
    if here.is_absolute() or model.source.startswith((".", "~")) or model.source.count("/") > 1:
        raise NeedleworkError(f"there is no {model.source}; give a model directory, a .gguf file, a zoo name or a hub id")
    return fetch(model.source, model.revision)


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


def _eos(folder: Path) -> frozenset[int]:
    """As transformers does: the generation configuration's, else the model configuration's."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
