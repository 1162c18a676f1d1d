"""Find shipped plans by name: `02-head-sparsification`, `02` and `head-sparsification` are the same plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError, did_you_mean, short_repr
from needlework.experiments.plan import Plan, load
from needlework.experiments.schema import PlanError


def files() -> list[Path]:
    """Return the plan files in order. The package must be installed as plain files, not as an archive."""
    return sorted((Path(str(resources.files("needlework"))) / "plans").glob("*.yaml"))


def catalog() -> dict[str, Plan]:
    """Load all shipped plans, by full name."""
    return {path.stem: load(path) for path in files()}


def names() -> dict[str, Path]:
    """Return all names of shipped plans: the full name and, where it starts with a number, the number and the rest."""
    known = {path.stem: path for path in files()}
    for path in files():
        number, _, rest = path.stem.partition("-")
        if number.isdigit() and rest:
            known |= {number: path, rest: path}
    return known


def find(plan: str | Path) -> Path:
    """Return the file of a plan; a file has precedence over a shipped plan of the same name."""
    path, known = Path(plan), names()
    if os.path.isfile(path):
        return path
    if str(plan) in known:
        return known[str(plan)]
    if os.path.exists(path):  # e.g. a directory: reading it raises the right error
        return path
    beside = [str(file) for pattern in ("*.yaml", "*.yml") for file in path.parent.glob(pattern)]
    raise PlanError(
        f"no file and no shipped plan is called {short_repr(str(plan))}; {did_you_mean(str(plan), [*known, *beside])}"
    )


def get(plan: str | Path | Plan, *, fast: bool = False, models: Sequence[str] = (), **loading: Any) -> Plan:
    """Load a plan by file or shipped name, or take a loaded one; `loading` overrides the settings of its models."""
    if not isinstance(plan, Plan):
        plan = load(find(plan), fast=fast, models=[models] if isinstance(models, str) else models)
    elif fast or models:
        raise NeedleworkError("this plan is loaded already: give fast and models to the function that loads it, or give its path")
    return plan.loading(**loading)
