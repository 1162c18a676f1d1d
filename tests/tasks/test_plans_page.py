"""docs/plans.md: every key of a plan and every field of every task stands there with its default; its example can be asked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from token_kinds import make

from needlework.experiments.plan import load
from needlework.experiments.schema import ExperimentFile, FastFile, ModelFile, PlanFile, RankingFile
from needlework.tasks import TASKS, Task
from needlework.tasks.niah import Other
from needlework.tasks.own_prompts import OwnPrompts, PromptLine
from needlework.tasks.retrieval import Retrieval

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text(encoding="utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^#+ (.+?)\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SCHEMA = {
    "The plan": PlanFile,
    "A model": ModelFile,
    "A ranking": RankingFile,
    "An experiment": ExperimentFile,
    "fast": FastFile,
    "Every task": Task,
    "Every retrieval task": Retrieval,
    "others": Other,
    "A line of the file": PromptLine,
}


def block(language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert match
    return match[1]


def rows(title: str) -> dict[str, str]:
    """Keys and defaults of a section's table."""
    cells = re.findall(r"^\| `(\w+)` \| (.+?) \|", SECTIONS[title], re.MULTILINE)
    assert len(dict(cells)) == len(cells), f"a key of {title!r} stands there twice"
    return {key: default.strip("`") for key, default in cells}


def fields(model: type[BaseModel]) -> dict[str, str]:
    return {key: "required" if info.is_required() else written(info.default) for key, info in model.model_fields.items()}


def written(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value or "''"
    return yaml.safe_dump(json.loads(json.dumps(value)), default_flow_style=True, width=1000).removesuffix("...\n").strip()


@pytest.mark.parametrize("title", SCHEMA)
def test_every_key_stands_there_with_its_default(title: str) -> None:
    inherited = fields(Task) if SCHEMA[title] is Retrieval else {}
    assert {**inherited, **rows(title)} == fields(SCHEMA[title])


@pytest.mark.parametrize("kind", sorted(kind for kind, cls in TASKS.items() if cls.__module__.startswith("needlework.")))
def test_every_field_of_every_task_stands_there_with_its_default(kind: str) -> None:
    (title,) = [title for title in SECTIONS if f"`{kind}`" in title]
    cls = TASKS[kind]
    common = rows("Every task") | (rows("Every retrieval task") if issubclass(cls, Retrieval) else {})
    own = rows(title)
    if kind == "prompts_choice":
        own.pop("match")  # the page says that only prompts has it
        assert "match" in OwnPrompts.model_fields
    assert common | own == fields(cls)


def test_every_task_that_the_page_names_is_there() -> None:
    assert {kind for title in SECTIONS for kind in re.findall(r"`(\w+)`", title)} <= set(TASKS)


def test_a_choice_has_the_fields_of_its_companion() -> None:
    for kind, cls in TASKS.items():
        if kind.endswith("_choice") and kind != "prompts_choice":
            assert fields(cls) == fields(TASKS[kind.removesuffix("_choice")]), kind


@pytest.mark.parametrize("fast", [False, True])
def test_the_example_is_a_plan_that_can_be_asked(fast: bool, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(block("yaml"), encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text(block("json"), encoding="utf-8")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("The harbour wall is quiet. The baker closed the shop. " * 60, encoding="utf-8")
    plan = load(tmp_path / "plan.yaml", fast=fast)
    assert [e.name for e in plan.experiments] == ["sweep", "choice", "own-questions"]
    assert plan.experiments[0].seeds == (0, 1)
    tokenizer = make("byte")
    for experiment in plan.experiments:
        for named in experiment.tasks:
            items = list(named.task.items(tokenizer, 0, None, None))
            assert all(item.spans["needle"] for item in items)
            if named.task.mode == "choices":
                assert all(item.facts["option_kinds"].count("absent") == 3 for item in items)
    assert named.task.ability == "retrieval"


def test_links_within_the_page_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= anchors
