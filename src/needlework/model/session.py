"""What holds while a model is in use: one caller at a time, and no advice that is not true.

While a model answers, its attention function is switched, code of its family is replaced for every model of that family, and
some models keep their state on their modules: a second caller would change the first one's numbers without an error. What
transformers says where it does not hold, or where an error says it better, is kept back. All of it is undone afterwards.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from needlework.errors import NeedleworkError

_taken = threading.Lock()
_holder: int | None = None  # the thread whose turn it is


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other thread uses a model. The thread whose turn it is cannot have another one: it would wait for itself."""
    global _holder
    thread = threading.get_ident()
    if _holder == thread:
        gc.collect()  # an iteration that was dropped half way may linger in a reference cycle; this ends it
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
def withheld(logger: str, part: str) -> Iterator[list[str]]:
    """While open, warnings of this logger that hold `part` are collected instead of shown, whatever its verbosity."""
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


def load_report() -> AbstractContextManager[list[str]]:
    """The table of tensors that do not fit: our error names them."""
    return withheld("transformers.modeling_utils", "LOAD REPORT")


def slow_kernel_hints() -> AbstractContextManager[list[str]]:
    """Advice to install libraries for GPUs. On a CPU they serve nothing, and most of what is named runs on our kernels."""
    return withheld("transformers.integrations.hub_kernels", "is falling back to its reference")


@contextmanager
def hub_retries() -> Iterator[None]:
    """Without a network, the hub's retries would drown the one line that says what to do."""
    from huggingface_hub.utils import logging as hub_logging

    before = hub_logging.get_verbosity()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)  # type: ignore[no-untyped-call]


_WORTH_A_BAR = 2**30  # bytes of weights; fewer are read in less than two seconds


@contextmanager
def no_bar_for(weight_bytes: int) -> Iterator[None]:
    """transformers shows a bar while it reads weights, however few."""
    from transformers.utils import logging as transformers_logging

    if weight_bytes >= _WORTH_A_BAR or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
