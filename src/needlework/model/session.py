"""Exclusive use of models, and suppression of misleading log messages while one is in use.

While a model runs, its attention function is switched, code of its family is replaced for all models of that family, and some
models keep states on their modules: a second caller would change the first one's numbers without an error. Messages of
transformers and the hub that do not apply, or that repeat an error of needlework, are suppressed. Everything is undone on exit.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from needlework.errors import NeedleworkError

_taken = threading.Lock()
_holder: int | None = None  # the thread that holds the lock


@contextmanager
def exclusive_use() -> Iterator[None]:
    """Wait until no other thread uses a model, then hold the lock while the context is open.

    Raises:
        NeedleworkError: If the calling thread holds the lock already; it would wait for itself.
    """
    global _holder
    thread = threading.get_ident()
    if _holder == thread:
        gc.collect()  # closes an abandoned engine.run(...) iterator that a reference cycle keeps alive
    if _holder == thread:
        raise NeedleworkError(
            "a model is already answering in this thread: inside an intervention no model can be asked, and an iteration over"
            " engine.run(...) must be finished or closed first"
        )
    with _taken:
        _holder = thread
        try:
            yield
        finally:
            _holder = None


@contextmanager
def replaced_value(holder: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Replace an entry of a dict, such as an object's `vars`, while the context is open."""
    before = holder[name]
    holder[name] = value
    try:
        yield
    finally:
        holder[name] = before


@contextmanager
def withheld(logger: str, part: str) -> Iterator[list[str]]:
    """Collect a logger's messages that contain `part` instead of showing them, at any verbosity."""
    log = logging.getLogger(logger)
    level, shown = log.level, log.isEnabledFor(logging.WARNING)
    collected: list[str] = []

    def let_through(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if part not in text:
            return shown or record.levelno > logging.WARNING
        collected.append(text)
        return False

    log.addFilter(let_through)
    if not shown:
        log.setLevel(logging.WARNING)
    try:
        yield collected
    finally:
        log.setLevel(level)
        log.removeFilter(let_through)


def slow_kernel_hints() -> AbstractContextManager[list[str]]:
    """Suppress advice to install GPU kernels: they do not run on a CPU, where needlework has kernels of its own."""
    return withheld("transformers.integrations.hub_kernels", "is falling back to its reference")


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
