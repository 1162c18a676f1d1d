"""Reports: tables, figures and a self-contained HTML page from the trials of one or more runs. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from needlework.reports.page import build
from needlework.reports.tables import summary

__all__ = ["build", "report", "summary"]


def report(
    directories: str | Path | Sequence[str | Path], out: str | Path | None = None, against: str | Path | None = None
) -> Path:
    """Write report.html for one or more runs and return its path.

    Args:
        directories: Directories of runs.
        out: Output directory; the first run's directory by default.
        against: Directory of one of the runs, or a model's name: the other models are compared with it, sample by sample.
    """
    runs = [directories] if isinstance(directories, (str, Path)) else directories
    return build([Path(run) for run in runs], None if out is None else Path(out), against=against)
