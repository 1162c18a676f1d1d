"""`needlework explain` finds every name that users can write, in the pages that a clone has and that a wheel contains."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import needlework as nw
from needlework import explain
from needlework.analysis.verdicts import RULES
from needlework.cli import app
from needlework.heads.methods import all_methods
from needlework.interventions.base import _REGISTRY
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


def test_arguments_select_their_own_row_only() -> None:
    assert len(explain.explain("ablate_recurrent(site='conv')")) == 1
    assert len(explain.explain("ablate_recurrent()")) > 2


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(nw.NeedleworkError, match=r"did you mean 'niah'"):
        explain.explain("nihah")
    shown = CliRunner().invoke(app, ["explain", "nihah"])
    assert shown.exit_code == 2


def test_the_command_prints_text_names_and_json() -> None:
    shown = CliRunner().invoke(app, ["explain", "copy_score"])
    assert shown.exit_code == 0
    assert "Wu et al. 2024" in " ".join(shown.output.split())
    listed = CliRunner().invoke(app, ["explain"])
    assert "KeepHeads" in listed.output
    assert "needle_mass" in listed.output
    (entry,) = json.loads(CliRunner().invoke(app, ["explain", "rule 7", "--json"]).output)
    assert entry["page"] == "docs/method.md"
