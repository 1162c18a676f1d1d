"""One caller at a time in a process.

While a model answers, its attention function is switched, code of its family is replaced for every model of that family, and
some models keep their state on their modules: a second caller would change the first one's numbers without an error.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
