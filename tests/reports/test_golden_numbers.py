"""The numbers of two stored runs, frozen to the digit: whatever is rearranged in the analysis, these do not change.

`python tests/reports/test_golden_numbers.py` writes them down again, which only a change of the method may need.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pytest
import synthetic

from needlework.analysis.model_trials import ModelTrials, by_model_and_boundary
from needlework.analysis.reader import load
from needlework.analysis.verdicts import verdicts
from needlework.stats import Estimate

FILE = Path(__file__).parent / "golden_numbers.json"
VERSION_2 = Path(__file__).parents[1] / "experiments" / "version2"
FORMS = ("cloze", "letter", "lookup", "judgement")


def written(value: Any) -> str:
    """A number with all its digits."""
    if isinstance(value, Estimate):
        return " ".join([*(repr(float(part)) for part in (value.value, value.low, value.high)), str(value.n), value.why]).strip()
    return str(value)


def numbers(trials: ModelTrials) -> Iterator[tuple[str, Any]]:
    """Everything that a page, a terminal or a verdict reads of one model under one boundary."""
    for c in trials.conditions:
        for layout in ("plain", "jrt", "question_first"):
            for mode in ("generate", "choices"):
                for inside in (True, False):
                    found = trials.accuracy(trials.retrieval(c.text, mode, layout, inside))
                    yield f"{c.text} | {mode} {layout} {inside}", found
        pairs = trials.retained(c.text)
        yield f"{c.text} | retained", pairs.raw
        for form in FORMS:
            known = trials.retained_knowledge(c.text, form)
            yield f"{c.text} | {form}", trials.accuracy(trials.knowledge(c.text, form))
            yield f"{c.text} | {form} retained", known.raw
            yield f"{c.text} | {form} corrected", known.corrected
    for way in ("entropy", "random", "ranking"):
        for kept, share in trials.retained_by_heads(way).items():
            yield f"{kept} heads by {way}", share
    for both in (False, True):
        for tokens, share in trials.limits(both):
            yield f"limit {tokens} {both}", share
        yield f"follows kv {both}", trials.follows_kv(both)
    yield "reading twice", trials.reading_twice()
    if (interaction := trials.interaction()) is not None:
        yield "interaction", interaction.contrast
        yield "retrieval gap", interaction.retrieval_gap
        yield "knowledge gap", interaction.knowledge_gap


def found(directory: Path) -> dict[str, Any]:
    frame = load([directory])
    shares = {
        f"{trials.model} {trials.boundary}": {
            name: written(value) for name, value in numbers(trials) if not isinstance(value, Estimate) or value.n
        }
        for trials in by_model_and_boundary(frame)
    }
    judged = [[v.model, v.claim, v.word, v.why, v.sentence, written(v.estimate)] for v in verdicts(frame)]
    counted = {"trials": frame.trials, "failed": frame.failed, "notes": frame.notes}
    return {"counted": counted, "verdicts": judged, "shares": shares}


def stored(name: str, folder: Path) -> Path:
    if name == "synthetic":
        return synthetic.write(folder / name, per_cell=2)
    shutil.copytree(VERSION_2, folder / name)
    return folder / name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["synthetic", "version2"])
def test_no_number_of_a_stored_run_changes(name: str, tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text(encoding="utf-8"))[name]
    now = json.loads(json.dumps(found(stored(name, tmp_path))))
    assert now["counted"] == expected["counted"]
    assert now["verdicts"] == expected["verdicts"]
    assert now["shares"] == expected["shares"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        content = {name: found(stored(name, Path(place))) for name in ("synthetic", "version2")}
    FILE.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
