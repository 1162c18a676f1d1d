"""Import transformers' modeling code without the parts of torch that only compilation and several machines need.

`import transformers.modeling_utils` imports torch's compiler (`torch._dynamo`) and its distributed tensors, which takes longer
than torch itself and is not used to ask a model a question. A command that only asks may load its model with `load_quickly`.
"""

from __future__ import annotations

import gc
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from needlework.errors import NeedleworkError

T = TypeVar("T")
_COMPILER = "torch._dynamo"
_MODE = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MODULES = ("transformers.modeling_utils", "transformers.masking_utils", "transformers.generation.utils")


_OF_NUMBERS: dict[str, dict[str, Any]] = {  # what operations on the meta device ask about sizes, if these are numbers
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), bool),
        "guarding_hint_or_throw": lambda size: size,
        "has_guarding_hint": lambda size: True,
        "is_nested_int": lambda size: False,
        "statically_known_true": bool,
        "sym_and": lambda *conditions: all(conditions),
        "sym_eq": operator.eq,
        "sym_or": lambda *conditions: any(conditions),
    },
    "sympy": {"Basic": type("Basic", (), {})},
}


class _Extract(ModuleType):
    """Some names of a module that takes long to import; it is imported when another name is needed."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for extract in _OF_NUMBERS:  # all of them, because the real ones use each other
            if isinstance(sys.modules.get(extract), _Extract):
                del sys.modules[extract]
        return getattr(importlib.import_module(self.__name__), name)


def load_quickly(load: Callable[[], T]) -> T:
    """Call a function that loads a model, with the short way of importing; as usual if the compiler is imported already.

    Functions of transformers are not marked for `torch.compile` afterwards, and its tensor parallelism is unavailable: this is
    for a process that does neither. If the short way fails, transformers' modules are imported anew and `load` is called again.
    """
    if _COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules:
        return load()
    known, collects = set(sys.modules), gc.isenabled()
    gc.disable()  # little of what imports create is garbage
    try:
        with _without_compiler():
            for name in _MODULES:
                importlib.import_module(name)
            return load()
    except Exception as error:
        if isinstance(error, NeedleworkError) and "_dynamo" not in str(error):
            raise
    finally:
        if collects:
            gc.freeze()  # nor is it at the end of the process
            gc.enable()
    for name in set(sys.modules) - known:
        if name.startswith(("transformers", "needlework")):  # another version, which needs more of the compiler
            del sys.modules[name]
    return load()


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Replace torch's compiler by decorators that return the function, and hide what is optional, while the context is open.

    Operations on the meta device import sympy to compare sizes that are symbols. Here all sizes are numbers.
    """
    import torch
    import torch.distributed
    from transformers import utils

    compiler, mode = ModuleType(_COMPILER), ModuleType(_MODE)
    for name in ("disable", "allow_in_graph", "assume_constant_result", "mark_static_address"):
        setattr(compiler, name, _unchanged)
    compiler.__path__ = []
    extracts = {name: _Extract(name, known) for name, known in _OF_NUMBERS.items() if name not in sys.modules}
    mode.TransformGetItemToIndex = _real_mode  # type: ignore[attr-defined]
    is_available, is_scipy_available = torch.distributed.is_available, utils.is_scipy_available
    sys.modules.update({_COMPILER: compiler, _MODE: mode, **extracts})
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
        for name, extract in extracts.items():
            if sys.modules.get(name) is extract:
                del sys.modules[name]


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Return the function, or a decorator that does, as the decorators of the compiler are used both ways."""
    return _unchanged if function is None else function


def _real_mode() -> Any:
    return importlib.import_module(_MODE).TransformGetItemToIndex()
