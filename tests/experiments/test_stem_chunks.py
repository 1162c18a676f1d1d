"""Chunks of samples that share a beginning: it is read once in each, so there are few of them, and none is too large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from needlework.experiments import trials

ACTS, WEIGHTS = 5, 100
MOST_TRIALS, ENOUGH_TRIALS = 200, 10


def work(stems: dict[str, int], questions: int, question: int = 10) -> Any:
    """So many questions of each stem, every one under five interventions."""
    made = [
        SimpleNamespace(
            mode="choices",
            max_new_tokens=1,
            boundary="decode",
            stop=frozenset(),
            prompt_id=f"{stem}{i}",
            tokens=length + question + 1,
            item=SimpleNamespace(stem=stem if length else "", prompt=(7,) * length + (100 + i,) * question),
        )
        for stem, length in stems.items()
        for i in range(questions)
        for _ in range(ACTS)
    ]
    anatomy = SimpleNamespace(parameters=WEIGHTS)
    loaded = SimpleNamespace(loading=SimpleNamespace(device="cpu"))
    return SimpleNamespace(
        by_id=lambda: {str(n): [trial] for n, trial in enumerate(made)}, model=SimpleNamespace(anatomy=anatomy, model=loaded)
    )


def flops(tokens: float) -> float:
    return tokens * 2 * WEIGHTS * ACTS


def cut(some: Any, most: float, enough: float) -> list[list[Any]]:
    limits = {"CHUNK_TRIALS": MOST_TRIALS, "CHUNK_FLOPS": flops(most)}
    limits |= {"ENOUGH_TRIALS": ENOUGH_TRIALS, "ENOUGH_FLOPS": flops(enough)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(trials, name, value)
        made = list(trials.chunked(some))
    asked = [id(trial) for chunk in made for trial in chunk]
    assert sorted(asked) == sorted(id(same[0]) for same in some.by_id().values())
    for chunk in made:
        assert len(chunk) <= MOST_TRIALS
        assert all(sum(t.prompt_id == one.prompt_id for t in chunk) == ACTS for one in chunk), "a prompt is torn apart"
    return made


def test_a_beginning_is_a_small_part_of_its_chunk() -> None:
    """11 tokens of each question: 30 questions are few beside 100 tokens of examples, and 13 are enough beside 20."""
    made = cut(work({"law": 100}, 30), most=1e6, enough=120)
    assert len(made) == 1
    made = cut(work({"law": 20}, 30), most=1e6, enough=31)
    assert [len(chunk) // ACTS for chunk in made] == [13, 13, 4]  # 20 + 13 * 11 = 163: at last more than 8 * 20


def test_a_chunk_with_a_beginning_is_never_too_large() -> None:
    made = cut(work({"law": 100}, 30), most=100 + 5 * 11, enough=120)
    assert [len(chunk) // ACTS for chunk in made] == [5] * 6  # the examples are counted once in each


def test_another_subject_begins_anew() -> None:
    made = cut(work({"anatomy": 20, "law": 40}, 12), most=1e6, enough=31)
    names = [sorted({trial.item.stem for trial in chunk}) for chunk in made]
    assert names == [["anatomy"], ["law"]]


def test_without_beginnings_chunks_are_cut_as_ever() -> None:
    """Restated: as many as are enough, by both measures."""
    made = cut(work({"": 0}, 30), most=1e6, enough=50)
    assert [len(chunk) // ACTS for chunk in made] == [4] * 7 + [2]
