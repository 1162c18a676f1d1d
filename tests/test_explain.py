"""`needlework explain` finds every name that users can write, in the pages that a clone has and that a wheel contains."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import needlework as nw
from needlework import explain
from needlework.analysis.verdicts import RULES, Word
from needlework.cli import app
from needlework.experiments.schema import ExperimentFile, FastFile, ModelFile, PlanFile, RankingFile
from needlework.heads.methods import all_methods
from needlework.interventions.acts import HEAD_SCORES
from needlework.interventions.base import _REGISTRY
from needlework.reports.figures import FIGURES
from needlework.results.rows import Observation, Row
from needlework.tasks import TASKS


def _shipped(registry: dict[str, type]) -> list[str]:
    return [name for name, cls in registry.items() if cls.__module__.startswith("needlework.")]


def test_every_intervention_task_method_and_rule_is_found() -> None:
    names = [*_shipped(_REGISTRY), *_shipped(TASKS), *all_methods(), *(f"rule {number}" for number in range(1, len(RULES) + 1))]
    names += ["observe", "logit_lens", "patch", "recurrent_contributions", "recurrent_mass"]
    assert len(names) > 40
    for name in names:
        assert all(entry.text for entry in explain.explain(name)), name


@pytest.mark.parametrize(
    "topic, page, says",
    [
        ("ablate_recurrent(site='conv')", "method", "the short convolution sees each token alone"),
        ("AblateRecurrent", "method", "the mixer sees each token alone"),
        ("keep_heads(k=2, phase='decode')", "method", "keep the k best"),
        ("niah", "plans", "needle in a haystack"),
        ("rule 4", "method", "needle omitted in decode"),
        ("margins", "store", "best minus second-best logit"),
        ("distractors", "plans", "further needles"),
    ],
)
def test_the_entry_is_the_one_that_is_meant(topic: str, page: str, says: str) -> None:
    assert any(entry.page == page and says in entry.text for entry in explain.explain(topic))


def test_every_public_name_is_explained() -> None:
    """Options, scores, plan keys, columns, figures, verdicts, claims, commands and their options, and what `nw` exports."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    shipped = [cls for cls in [*_REGISTRY.values(), *TASKS.values()] if cls.__module__.startswith("needlework.")]
    names = {
        "options": [field for cls in shipped for field in cls.model_fields],
        "head scores": HEAD_SCORES,
        "plan keys": [key for part in (PlanFile, ExperimentFile, RankingFile, ModelFile, FastFile) for key in part.model_fields],
        "columns": [field.name for row in (Row, Observation) for field in fields(row)],
        "figures": FIGURES,
        "verdicts": get_args(Word),
        "claims": [rule.claim for rule in RULES],
        "commands": [*commands, *(f"needlework {name}" for name in commands)],
        "options of commands": {
            option.strip("-")
            for command in commands.values()
            for parameter in command.params
            for option in parameter.opts
            if option.startswith("--") and option != "--help"
        },
        "pages": explain.REFERENCE,
        "Python": [name for name in nw.__all__ if callable(getattr(nw, name))],
    }
    for what, words in names.items():
        assert words
        for word in words:
            assert all(entry.text for entry in explain.explain(word)), f"{what}: {word}"


def test_an_option_is_explained_for_the_interventions_that_have_it() -> None:
    found = {entry.section: entry.text for entry in explain.explain("sinks") if entry.page == "interventions"}
    assert set(found) == {"keep_heads", "limit_context"}
    assert found["keep_heads"] == "Number of first tokens left out when heads are scored by their attention."


@pytest.mark.slow
def test_no_message_names_a_file_that_a_wheel_has_not() -> None:
    """Texts of the program name `needlework explain` instead: neither strings nor docstrings of what users can reach."""
    package = Path(nw.__file__).parent
    named = re.compile(r"\b(docs|examples|benchmarks)/\w|CONTRIBUTING\.md")
    found = []
    for file in package.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        about = ast.get_docstring(tree, clean=False)  # of the module: read in the source, where docs/ is
        found += [
            f"{file.relative_to(package)}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != about and named.search(node.value)
        ]
    assert not found
    shown = [entry.text for entry in explain.entries() if any(f"docs/{page}.md" in entry.text for page in explain.REFERENCE)]
    assert not shown


def test_arguments_select_their_own_row_only() -> None:
    assert len(explain.explain("ablate_recurrent(site='conv')")) == 1
    assert len(explain.explain("ablate_recurrent()")) > 2


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(nw.NeedleworkError, match=r"did you mean 'niah'"):
        explain.explain("nihah")
    shown = CliRunner().invoke(app, ["explain", "nihah"])
    assert shown.exit_code == 2
    with pytest.raises(nw.NeedleworkError, match=r"did you mean 'keep_heads'( or '\w+')+\?"):
        explain.explain("keepheds")


def test_the_command_prints_text_names_and_json() -> None:
    shown = CliRunner().invoke(app, ["explain", "copy_score"])
    assert shown.exit_code == 0
    assert "Wu et al. 2024" in " ".join(shown.output.split())
    listed = CliRunner().invoke(app, ["explain"])
    assert "KeepHeads" in listed.output
    assert "needle_mass" in listed.output
    (entry,) = json.loads(CliRunner().invoke(app, ["explain", "rule 7", "--json"]).output)
    assert entry["page"] == "method"
