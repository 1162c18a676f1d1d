"""One thread, no chatter, and the table of the matrix at the end of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

# No clock decides about a test: on a busy machine anything may take long.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("no clock")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use a browser or a cluster as serial."""
    for item in items:
        if {"chromium", "nodes"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.serial)


@pytest.fixture(autouse=True)
def _same_random_start() -> None:
    torch.manual_seed(0)


@pytest.fixture
def registries() -> Iterator[None]:
    """Interventions, head scores and tasks that a test registers are gone after it."""
    from needlework.interventions import acts, base
    from needlework.tasks import TASKS

    known: tuple[dict[str, Any], ...] = (base._REGISTRY, acts.HEAD_SCORES, TASKS)
    before = [dict(table) for table in known]
    yield
    for table, kept in zip(known, before, strict=True):
        table.clear()
        table.update(kept)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Every cell of architectures x interventions: the laws hold, it is refused and why, or it failed."""
    cells: dict[tuple[str, str], str] = {}
    layouts: Counter[str] = Counter()
    compared, offered = 0, 0
    for kind in ("passed", "failed"):
        for report in terminalreporter.stats.get(kind, ()):
            found = dict(getattr(report, "user_properties", ()))
            if "cell" in found and report.when == "call":
                cells[tuple(found["cell"])] = found.get("verdict", "holds") if kind == "passed" else "failed"
            if "layout" in found and report.when == "call":
                layouts[found.get("verdict", "hold") if kind == "passed" else "failed"] += 1
            if "compared" in found:
                compared, offered = compared + found["compared"][0], offered + found["compared"][1]
    write = terminalreporter.write_line
    if offered:
        write(f"brute-force reference: {compared} tokens compared, {offered - compared} skipped because of near ties")
    if layouts:
        counts = ", ".join(f"{layouts[x]} {x}" for x in ("hold", "refused", "failed"))
        write(f"families x layouts as published: {layouts.total()} checkpoints: {counts}")
    if not cells:
        return
    import cases

    names = [name for name in cases.ALL if any(name == cell[0] for cell in cells)]
    columns = [which for which in cases.INTERVENTIONS if any(which == cell[1] for cell in cells)]
    reasons = [x for x in dict.fromkeys(cells.values()) if x not in ("holds", "failed")]
    sign = {"holds": ".", "failed": "!"} | {reason: "abcdefghijk"[i] for i, reason in enumerate(reasons)}
    write("")
    write("architectures x interventions (. the laws hold, ! failed, a letter: refused)")
    for i, which in enumerate(columns):
        write(f"{'':18}{'| ' * i}{which}")
    for name in names:
        write(f"{name:18}" + " ".join(sign.get(cells.get((name, which), ""), " ") for which in columns))
    counts = Counter("refused" if x in reasons else x for x in cells.values())
    for reason in reasons:
        write(f"  {sign[reason]} refused: {reason}")
    total = ", ".join(f"{counts[x]} {x}" for x in ("holds", "refused", "failed"))
    write(f"{len(cells)} cells: {total}")
