"""`needlework plan` says how many samples the rules need and get, from the very trials that verdicts would be judged by."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_shipped_plans import works

from needlework.experiments.plan import load
from needlework.experiments.samples import samples, text

PLAN = """
models: [tiny-griffin, tiny-mamba]
experiments:
  one:
    models: [tiny-griffin]
    tasks:
      - {{kind: niah, lengths: [64], depths: [0, 50], samples: {samples}, distractors: 3}}
      - {{kind: niah_choice, lengths: [64], depths: [0, 50], samples: {choices}, distractors: 3, against: {against}}}
    interventions: [none, ablate_attention()]
  other:
    models: [tiny-mamba]
    tasks: [{{kind: niah, lengths: [64], depths: [50]}}]
    interventions: none
"""


def told(tmp_path: Path, count: int, choices: int, against: str = "context") -> list[str]:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.format(samples=count, choices=choices, against=against))
    plan = load(path)
    return text(samples(plan, works(plan)))


def test_the_condition_with_the_fewest_samples_counts(tmp_path: Path) -> None:
    lines = told(tmp_path, 110, 50)
    first = "rule 1, Attention does the retrieving: needs 217 samples; tiny-griffin 100, tiny-mamba does not apply"
    assert lines[0] == first
    assert len(lines) == 2
    assert lines[1].startswith("warning: rule 1 (Attention does the retrieving) reads 100 samples of tiny-griffin and needs 217")


def test_enough_is_no_warning(tmp_path: Path) -> None:
    assert len(told(tmp_path, 110, 110)) == 1


@pytest.mark.parametrize("against,needed", [("context", 217), ("all", 159)])
def test_what_is_needed_depends_on_the_chance_of_the_choice(tmp_path: Path, against: str, needed: int) -> None:
    assert f"needs {needed} samples" in told(tmp_path, 110, 110, against)[0]
