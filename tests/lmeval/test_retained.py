"""Retained shares and the look-up's part, on made-up rows whose answers are known; and what the shipped tasks hold."""

from __future__ import annotations

import mini_tasks as mini
import pytest

from needlework.lmeval.evaluate import lookups, retained_lines
from needlework.results import Row


def trial(form: str, fact: int, act: str, correct: bool) -> Row:
    return Row(
        id=f"{form}{fact}{act}",
        experiment="ability",
        model="m",
        task=form,
        sample=f"{form}/{fact}",
        cluster=str(fact),
        seed=0,
        intervention=act,
        mode="choices",
        prompt="",
        prompt_tokens=1,
        target="",
        output="",
        finish="scored",
        error="",
        seconds=0,
        facts={"form": form, "chance": 0.25},
        scores={"correct": float(correct)},
        prompt_id=f"{form}{fact}",
    )


ROWS = [
    trial(form, fact, act, right)
    for fact in range(100)
    for form, act, right in [
        ("letter", "none", fact < 85),
        ("letter", "cut", fact < 40),
        ("cloze", "none", fact < 85),
        ("cloze", "cut", fact < 70),
    ]
]


def test_retained_raw_and_above_chance() -> None:
    found = {(line.name, line.intervention): line for line in retained_lines(ROWS, {"letter": "letter", "cloze": "cloze"})}
    letter = found["letter", "cut"]
    assert letter.raw.value == pytest.approx(40 / 85)
    assert letter.corrected.value == pytest.approx((0.40 - 0.25) / (0.85 - 0.25))
    assert letter.corrected.low < letter.corrected.value < letter.corrected.high
    assert found["letter", "none"].raw.value == 1


def test_a_baseline_of_nothing_says_so_with_its_n() -> None:
    rows = [trial("letter", fact, act, False) for fact in range(4) for act in ("none", "cut")]
    _, cut = retained_lines(rows, {"letter": "letter"})
    assert cut.raw.text() == "baseline 0 %: nothing to retain, n = 4"
    assert cut.corrected.text() == "baseline 0 %, chance 25 %: nothing to retain, n = 4"
    (alone,) = retained_lines(rows[1::2], {"letter": "letter"})
    assert alone.raw.text() == "no baseline: ask none, too"
    more = [*rows, *(trial("cloze", fact, act, False) for fact in range(4) for act in ("none", "cut"))]
    assert lookups(more)["cut"].text() == "the letter lost nothing, or there was nothing to lose, n = 4"


def test_the_part_of_the_letters_loss_that_is_its_look_up() -> None:
    (part,) = lookups(ROWS).values()
    letter, cloze = 0.15 / 0.60, 0.45 / 0.60
    assert part.value == pytest.approx((cloze - letter) / (1 - letter))
    assert part.low < part.value < part.high
    assert part.n == 100


def test_failed_rows_count_nowhere() -> None:
    broken = [*ROWS, Row(**{**vars(trial("letter", 500, "cut", True)), "finish": "failed"})]
    assert retained_lines(broken, {"letter": "letter", "cloze": "cloze"}) == retained_lines(
        ROWS, {"letter": "letter", "cloze": "cloze"}
    )


def test_the_shipped_tasks_are_what_the_toy_world_gives() -> None:
    for path, text in mini.files():
        assert (mini.FOLDER / path).read_text(encoding="utf-8") == text, f"{path}: run python tests/lmeval/mini_tasks.py"
    shipped = {str(p.relative_to(mini.FOLDER)) for p in mini.FOLDER.rglob("*") if p.is_file() and "__pycache__" not in str(p)}
    assert shipped == {path for path, _ in mini.files()}


def test_examples_never_tell_an_answer() -> None:
    for form in ("letter", "cloze"):
        found = mini.docs(form)
        told = {(d["subject"], d["key"]) for d in found["dev"]}
        assert not told & {(d["subject"], d["key"]) for d in found["test"]}
        assert len(found["dev"]) == 6 * mini.SHOTS
    assert [d["key"] for d in mini.docs("letter")["test"]] == [d["key"] for d in mini.docs("cloze")["test"]]
