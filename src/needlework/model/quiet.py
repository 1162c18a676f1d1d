"""Withholding log messages that do not apply here or that our own error says better. Undone afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


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
