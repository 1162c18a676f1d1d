"""A sample that needs several requests: one trial, one row, nothing of any part lost or taken for the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest

from needlework.experiments import run
from needlework.experiments.plan import Experiment, InterventionText, Model, NamedTask, Plan
from needlework.interventions import NONE
from needlework.receipts import NOTHING_TO_HIDE, Receipt, nothing_to_hide
from needlework.requests import Answer
from needlework.results import Store
from needlework.tasks.base import Item, Task

SHORT, LONG = (1, 2, 3), tuple(range(1, 10))


class Windows(Task):
    """A text in two windows, or two options after two contexts."""

    kind = "windows"
    mode = "perplexity"

    def items(self, tokenizer: Any, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        second = Item("w", "", LONG, "", "", options=((6, 7),))
        yield Item("w", "w", SHORT, "1 2 3", "", options=((4, 5),), also=(second,))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return {"parts": float(len(answer.option_logprobs)), "nll": -sum(answer.totals)}


class Contexts(Windows):
    kind = "contexts"
    mode = "choices"


@pytest.mark.parametrize("task", [Windows(), Contexts()], ids=lambda task: str(task.kind))
def test_one_row_holds_all_parts_in_order(task: Task, tmp_path: Path) -> None:
    experiment = Experiment(
        "x:1",
        "e",
        "",
        ("alpha",),
        (NamedTask("x:1", "t", task),),
        (InterventionText("x:1", "none"),),
        (0,),
        "decode",
        None,
        None,
        False,
    )
    plan = Plan(Path("x"), "p", "", "", {"alpha": Model("x:1", "alpha", "alpha")}, (experiment,))
    assert run.run(plan, tmp_path, source=fakes.FakeModels(), progress=False, tell=False).sound
    store = Store(tmp_path)
    (row,) = store.rows()
    store.close()
    expected = [
        [-fakes._number(prompt, str(NONE), token) for token in option] for prompt, option in ((SHORT, (4, 5)), (LONG, (6, 7)))
    ]
    assert row.prompt_tokens == len(LONG), "the longest of them"
    assert row.scores["parts"] == 2
    assert row.greedy == [True, True]
    if task.mode == "perplexity":
        assert row.logprobs == [*expected[0], *expected[1]]
        assert row.margins == [], "windows of a text are no options"
    else:
        assert row.logprobs == pytest.approx([sum(option) for option in expected])
        assert row.margins == pytest.approx([abs(sum(expected[0]) - sum(expected[1]))])
        assert row.facts["option_ids"] == [[4, 5], [6, 7]]


def test_what_is_true_of_one_part_is_not_said_of_all() -> None:
    idle = Answer(receipt=Receipt(notes=(f"{NOTHING_TO_HIDE}: no query had keys beyond the last 8",)))
    acted = Answer(receipt=Receipt({(0, "prefill"): {"keys_hidden": 9}}))
    assert not nothing_to_hide((idle + acted).receipt.to_dict())
    assert not nothing_to_hide((acted + idle).receipt.to_dict())
    assert (idle + idle).receipt.notes == idle.receipt.notes
    failed = Answer(finish="failed", error="broken")
    assert (acted + failed).finish == (failed + acted).finish == "failed"
