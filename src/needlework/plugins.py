"""`--plugin file.py`: interventions and tasks that are in no package, made known by running the file that registers them."""

from __future__ import annotations

import hashlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from needlework.errors import NeedleworkError
from needlework.interventions import base
from needlework.tasks import TASKS


def load(file: str | Path) -> list[str]:
    """Run a Python file; the names of the interventions and tasks that it registered. Its faults are told with their line."""
    path = Path(file).expanduser()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise NeedleworkError(f"--plugin {file}: cannot be read ({error.strerror}); give a Python file") from None
    # A name of its own, the same every time: two classes of one module and name are one class, defined again.
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    return define(name, str(path), source)


DEFINED: dict[str, tuple[str, str, bytes]] = {}  # what was run in this process, by module name: workers elsewhere run it, too


def define(name: str, path: str, source: bytes) -> list[str]:
    """Run a plug-in's text as a module of this name."""
    before = _known()
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # where pydantic looks up the names in annotations
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise NeedleworkError(f"{path}:{_line(error, path)}: the plug-in fails: {type(error).__name__}: {reason}") from error
    DEFINED[name] = name, path, source
    return [known for known, cls in _known().items() if before.get(known) is not cls]


def _known() -> dict[str, type]:
    """What is registered now. Interventions and tasks are apart: one of each may have the same name."""
    interventions = {f"intervention {name}": cls for name, cls in base._REGISTRY.items()}
    return {**interventions, **{f"task {name}": cls for name, cls in TASKS.items()}}


def _line(error: BaseException, path: str) -> int:
    """The last line of the file that was at work."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno or 1
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return (lines[-1] if lines else 1) or 1
