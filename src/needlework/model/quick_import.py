"""Import transformers' modeling code without the parts of torch that only compilation and several machines need.

`import transformers.modeling_utils` imports torch's compiler (`torch._dynamo`) and its distributed tensors, which takes longer
than torch itself and is not used to ask a model a question. A command that only asks may load its model with `load_quickly`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from needlework.errors import NeedleworkError

T = TypeVar("T")
_COMPILER = "torch._dynamo"
_MODE = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MODULES = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation.utils")


def load_quickly(load: Callable[[], T]) -> T:
    """Call a function that loads a model, with the short way of importing; as usual if the compiler is imported already.

    Functions of transformers are not marked for `torch.compile` afterwards, and its tensor parallelism is unavailable: this is
    for a process that does neither. If the short way fails, transformers' modules are imported anew and `load` is called again.
    """
    if _COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules:
        return load()
    known = set(sys.modules)
    try:
        with _without_compiler():
            for name in _MODULES:
                importlib.import_module(name)
            return load()
    except Exception as error:
        if isinstance(error, NeedleworkError) and "_dynamo" not in str(error):
            raise
    for name in set(sys.modules) - known:
        if name.startswith("transformers"):  # another version, which needs more of the compiler
            del sys.modules[name]
    return load()


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Replace torch's compiler by decorators that return the function, and hide what is optional, while the context is open."""
    import torch
    import torch.distributed
    from transformers import utils

    compiler, mode = ModuleType(_COMPILER), ModuleType(_MODE)
    for name in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(compiler, name, _unchanged)
    compiler.__path__ = []
    mode.TransformGetItemToIndex = _real_mode  # type: ignore[attr-defined]
    is_available, is_scipy_available = torch.distributed.is_available, utils.is_scipy_available
    sys.modules.update({_COMPILER: compiler, _MODE: mode})
    torch._dynamo = compiler
    torch.distributed.is_available = lambda: False
    utils.is_scipy_available = lambda: False  # it serves losses for object detection
    try:
        yield
    finally:
        torch.distributed.is_available, utils.is_scipy_available = is_available, is_scipy_available
        vars(torch).pop("_dynamo", None)
        for name in (_COMPILER, _MODE):
            del sys.modules[name]


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Return the function, or a decorator that does, as the decorators of the compiler are used both ways."""
    return _unchanged if function is None else function


def _real_mode() -> Any:
    return importlib.import_module(_MODE).TransformGetItemToIndex()
