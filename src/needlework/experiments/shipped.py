"""The plans that come with needlework, by name: `02-head-sparsification`, `02` and `head-sparsification` are the same one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError, did_you_mean, shown
from needlework.experiments.lines import PlanError
from needlework.experiments.plan import Plan, load


def files() -> list[Path]:
    """The plan files, in order. The package is always installed as plain files, never run from an archive."""
    return sorted((Path(str(resources.files("needlework"))) / "plans").glob("*.yaml"))


def catalog() -> dict[str, Plan]:
    """All shipped plans by their full names."""
    return {path.stem: load(path) for path in files()}


def names() -> dict[str, Path]:
    """Every name of every shipped plan: the whole one, and where it begins with a number, number and rest alone."""
    known = {path.stem: path for path in files()}
    for path in files():
        number, _, rest = path.stem.partition("-")
        if number.isdigit() and rest:
            known |= {number: path, rest: path}
    return known


def find(plan: str | Path) -> Path:
    """The file of a plan: a file wins over a shipped plan of the same name."""
    path, known = Path(plan), names()
    if os.path.isfile(path):
        return path
    if str(plan) in known:
        return known[str(plan)]
    if os.path.exists(path):  # a directory, say: reading it tells what is wrong
        return path
    beside = [str(file) for pattern in ("*.yaml", "*.yml") for file in path.parent.glob(pattern)]
    raise PlanError(f"no file and no shipped plan is called {shown(str(plan))}; {did_you_mean(str(plan), [*known, *beside])}")


def get(plan: str | Path | Plan, *, fast: bool = False, models: Sequence[str] = (), **loading: Any) -> Plan:
    """A plan by its file or its shipped name, or one that is loaded; `loading` goes before what its models say of it."""
    if not isinstance(plan, Plan):
        plan = load(find(plan), fast=fast, models=[models] if isinstance(models, str) else models)
    elif fast or models:
        raise NeedleworkError("this plan is loaded already: give fast and models to the function that loads it, or give its path")
    return plan.loading(**loading)
