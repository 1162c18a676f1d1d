"""GGUF files: fast reading of headers without the tokenizer's arrays, and conversion to safetensors, once, into a cache.

transformers reads GGUF files slowly (minutes for a few hundred million parameters) and refuses to save a model that it read
from one, so every command would read it again. Does not import torch.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError
from needlework.model.files import WEIGHTS, hash_files

CACHE_VARIABLE = "NEEDLEWORK_CACHE"
COMPLETE = "source.json"  # hashes of the GGUF file and of the weights; written last, so a copy without it is incomplete
_LONG_ARRAY = 4096  # values; longer arrays belong to the tokenizer (tokens, merges, scores)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's scalar types
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
                if length > _LONG_ARRAY and (kind == _STRING or kind in _SIZES):
                    first = super()._get_field_parts(orig_offs + 12, kind)
                    end = _array_end(self.data, orig_offs + 12, kind, length)
                    types = [gguf.GGUFValueType(_ARRAY), gguf.GGUFValueType(kind)]
                    return end - orig_offs, [first[1][-1]], [0] * length, types
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]

    whole = gguf.GGUFReader
    gguf.GGUFReader = HeaderReader
    try:
        yield
    finally:
        gguf.GGUFReader = whole


def _array_end(data: Any, offset: int, kind: int, length: int) -> int:
    """Return the offset after an array's values; raise ValueError if its length exceeds the file."""
    least = _SIZES.get(kind, 8)
    if offset + length * least > len(data):
        raise ValueError("an array in the header is longer than the file")
    if kind in _SIZES:
        return offset + length * least
    buffer, read = memoryview(data), struct.Struct("<Q").unpack_from
    for _ in range(length):
        offset += 8 + read(buffer, offset)[0]
    return offset


def convert_once(file: Path, convert: Callable[[Path, Path], None]) -> Path:
    """Return the directory of a GGUF file's converted copy; `convert(file, directory)` writes it on first use.

    The copy is identified by the file's SHA-256, and is converted again if its weights differ from those that were written.
    """
    source = hash_files([file])
    target = cache_directory() / f"{file.stem}-{source[:12]}"
    if _is_complete(target, source):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise _cannot_write(target.parent, error) from None
    try:
        convert(file, unfinished)
        mark = {"source": source, "weights": hash_files([unfinished / WEIGHTS])}
        (unfinished / COMPLETE).write_text(json.dumps(mark), encoding="utf-8")
        if _is_complete(target, source):  # another process finished first; its copy is equal and may be in use
            return target
        shutil.rmtree(target, ignore_errors=True)
        try:
            unfinished.replace(target)
        except OSError:
            if not _is_complete(target, source):
                raise
    except OSError as error:
        raise _cannot_write(target.parent, error) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _cannot_write(cache: Path, error: OSError) -> NeedleworkError:
    return NeedleworkError(
        f"cannot write into the cache {cache} ({error.strerror or error}); set {CACHE_VARIABLE} to another directory"
    )


def _is_complete(target: Path, source: str) -> bool:
    try:
        written = json.loads((target / COMPLETE).read_text(encoding="utf-8"))
        return bool(written == {"source": source, "weights": hash_files([target / WEIGHTS])})
    except (OSError, ValueError):
        return False
