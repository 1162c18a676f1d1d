"""Plug-in files (`--plugin file.py`): Python files that register interventions, tasks or head scores when they are run."""

from __future__ import annotations

import hashlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from needlework.errors import NeedleworkError
from needlework.interventions import acts, base
from needlework.tasks import TASKS


def load(file: str | Path) -> list[str]:
    """Run a Python file and return the names of the interventions, tasks and head scores that it registered.

    Raises:
        NeedleworkError: The file cannot be read, or fails; names file and line.
    """
    path = Path(file).expanduser()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise NeedleworkError(f"--plugin {file}: cannot be read ({error.strerror}); give a Python file") from None
    # A stable module name per file: a class with the same module and name may be registered again.
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    return define(name, str(path), source)


DEFINED: dict[str, tuple[str, str, bytes]] = {}  # plug-ins of this process, by module name; remote workers run them, too


def define(name: str, path: str, source: bytes) -> list[str]:
    """Run a plug-in's source as a module of this name and return the names that it registered."""
    before = _known()
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # pydantic resolves annotations there
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise NeedleworkError(_describe(error, path, 1)) from error
    DEFINED[name] = name, path, source
    return [known for known, cls in _known().items() if before.get(known) is not cls]


def _known() -> dict[str, Any]:
    """Return the registered classes and functions, by kind and name: an intervention and a task may have the same name."""
    interventions = {f"intervention {name}": cls for name, cls in base._REGISTRY.items()}
    scores = {f"head score {name}": score.function for name, score in acts.HEAD_SCORES.items()}
    return {**interventions, **scores, **{f"task {name}": cls for name, cls in TASKS.items()}}


def describe_error(error: BaseException) -> str | None:
    """Return a message with file and line for an error that was raised inside a plug-in, or None for other errors.

    A plug-in is any module outside of needlework that registers an intervention or a task.
    """
    modules = {cls.__module__ for cls in _known().values()}
    for name in modules:
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and name.split(".")[0] != "needlework" and (message := _describe(error, path)):
            return message
    return None


def _describe(error: BaseException, path: str, line: int = 0) -> str | None:
    """Return a message with the innermost line of the file in the error's traceback; without one, with `line` if it is given."""
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno or 1
    else:
        line = next((f.lineno or 1 for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == path), line)
    try:
        reason = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception:  # a plug-in's own error class may fail in __str__
        reason = "(its text cannot be shown)"
    return f"{path}:{line}: the plug-in fails: {type(error).__name__}: {reason}" if line else None
