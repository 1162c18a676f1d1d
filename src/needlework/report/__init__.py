"""Reports: tables, figures and one self-contained page from the trials of one or more runs. Free of torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from needlework.report.page import build
from needlework.report.tables import summary

__all__ = ["build", "report", "summary"]


def report(directories: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Build report.html of one run, or of several side by side, in `out` or the first run's directory; its path."""
    runs = [directories] if isinstance(directories, (str, Path)) else directories
    return build([Path(run) for run in runs], None if out is None else Path(out))


class _CallableModule(ModuleType):
    """`needlework.report` is this package, and it is the public function `nw.report(...)`: importing the one hides the other."""

    __call__ = staticmethod(report)


sys.modules[__name__].__class__ = _CallableModule
