"""`python tests/experiments/golden.py MODEL ...`: run the shipped plans in their fast form and record what they find.

The record is what `test_golden.py` holds later runs against: every verdict, and for every experiment, task and intervention
how many trials there are and how many were right.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from needlework.analysis.reader import load
from needlework.analysis.verdicts import verdicts
from needlework.experiments import run
from needlework.results import Store

PLANS = sorted((Path(__file__).parents[2] / "plans").glob("[01]*.yaml"))
FOLDER = Path(__file__).parent / "golden"


def find(model: str, out: Path) -> dict[str, Any]:
    """Verdicts and counts of all plans on one model."""
    places = []
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for plan in PLANS:
        place = out / plan.stem
        assert run.run(plan, place, fast=True, models=[model], progress=False).sound
        places.append(place)
        store = Store(place)
        for trial in store.rows():
            key = f"{plan.stem} | {trial.experiment} | {trial.task} | {trial.intervention}"
            counts[key][0] += int(trial.scores.get("correct", 0))
            counts[key][1] += 1
        store.close()
    words = {verdict.claim: verdict.word for verdict in verdicts(load(places))}
    return {"verdicts": words, "counts": dict(sorted(counts.items()))}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            found = find(name, Path(folder))
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(name, found["verdicts"])
