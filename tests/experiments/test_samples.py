"""`needlework plan` says how many samples the rules need and get, from the very trials that verdicts would be judged by."""

from __future__ import annotations

from pathlib import Path

import fakes
import pytest
from test_shipped_plans import works
from token_kinds import make

from needlework.experiments.estimate import count_samples, samples_text
from needlework.experiments.models import ModelInfo
from needlework.experiments.plan import Model, Plan, load
from needlework.experiments.trials import Work, expand

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
    return samples_text(count_samples(plan, works(plan)))


def test_the_condition_with_the_fewest_samples_counts(tmp_path: Path) -> None:
    lines = told(tmp_path, 110, 50)
    first = "rule 1, Attention does the retrieving: needs 233 samples; tiny-griffin 100, tiny-mamba does not apply"
    assert lines[0] == first
    assert len(lines) == 2
    assert lines[1].startswith("warning: rule 1 (Attention does the retrieving) reads 100 samples of tiny-griffin and needs 233")


def test_enough_is_no_warning(tmp_path: Path) -> None:
    assert len(told(tmp_path, 120, 120)) == 1


PAPER = """
models: [english]
experiments:
  one:
    tasks:
      - {{kind: niah, style: paper, haystack: {essays}, lengths: [250, 320], samples: {samples}}}
      - {{kind: niah, name: again, style: paper, haystack: {essays}, lengths: [250, 320], samples: {samples}, absent: 1}}
    seeds: [0, 1]
    interventions: [none, keep_heads(k=2), ablate_attention()]
"""


def paper_work(tmp_path: Path, count: int) -> tuple[Plan, Work]:
    words = "".join(f"House {i} of the old town is quiet. " for i in range(400))
    (tmp_path / "essay.txt").write_text(words)
    (tmp_path / "plan.yaml").write_text(PAPER.format(essays=tmp_path / "essay.txt", samples=count))
    plan = load(tmp_path / "plan.yaml")
    return plan, expand(plan, ModelInfo(Model("x:1", "english", "e"), "e", "t", fakes.anatomy(heads=12), make("byte")))


def test_a_prompt_that_several_cells_seeds_and_tasks_make_is_asked_and_counted_once(tmp_path: Path) -> None:
    """Ten depths of short texts make few prompts, two seeds the same ones, and no generated answer reads `absent`."""
    plan, work = paper_work(tmp_path, 1)
    prompts = {trial.item.prompt for trial in work.trials}
    assert 1 < len(prompts) < 20
    assert len(work.by_id()) == 3 * len(prompts)
    few = next(one for one in count_samples(plan, [work]) if one.claim == "few_heads")
    assert few.given == len(prompts)


def test_a_single_haystack_is_warned_of(tmp_path: Path) -> None:
    plan, work = paper_work(tmp_path, 1)
    lines = [line for line in samples_text(count_samples(plan, [work])) if "one haystack: no interval over haystacks" in line]
    assert [line.partition(" reads ")[0] for line in lines] == ["warning: rule 2 (Few heads suffice)"]
    plan, work = paper_work(tmp_path, 2)
    assert not any("one haystack" in line for line in samples_text(count_samples(plan, [work])))


@pytest.mark.slow
@pytest.mark.parametrize("against,needed", [("context", 233), ("all", 174)])
def test_what_is_needed_depends_on_the_chance_of_the_choice(tmp_path: Path, against: str, needed: int) -> None:
    assert f"needs {needed} samples" in told(tmp_path, 110, 110, against)[0]
