from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from token_kinds import make, scored

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import make_task
from needlework.toy import facts

CHOICES = ("cloze_choice", "letter", "letter_lookup", "judgements")


def items(tokenizer: Any, kind: str, seed: int = 0, **spec: Any) -> list[Any]:
    return list(make_task({"kind": kind, **spec}).items(tokenizer, seed, None, None))


@pytest.mark.parametrize("kind", ["cloze", "cloze_choice", "letter"])
@pytest.mark.parametrize("shots", [0, 2])
def test_every_fact_is_asked_once(toy: Any, kind: str, shots: int) -> None:
    found = items(toy, kind, shots=shots)
    assert {(item.facts["subject"], item.facts["key"]) for item in found} == set(facts.ALL_FACTS)
    assert len(found) == len(facts.ALL_FACTS) == len({item.id for item in found})
    for item in found:
        subject = facts.SUBJECTS[item.facts["subject"]]
        right = subject.values[subject.keys.index(item.facts["key"])]
        assert item.facts["options"][item.answer] == item.target
        if kind == "letter":
            assert item.prompt_text.endswith("answer :")
            listed = item.prompt_text[: item.prompt_text.rindex("question")].split()[-8:]  # four options, each with its letter
            assert listed[listed.index(right) + 1] == item.target
        else:
            assert item.target == right
        if shots:
            assert item.prompt_text.split().count(item.facts["key"]) == 1
            assert item.prompt_text.count(" . ") == shots


def test_cloze_and_its_choice_are_one_question(toy: Any) -> None:
    assert items(toy, "cloze") == items(toy, "cloze_choice")
    assert {i.facts["form"] for i in items(toy, "cloze")} == {"statement", "question"}
    assert {i.facts["form"] for i in items(toy, "cloze", form="statement")} == {"statement"}


def test_subjects_rounds_and_seeds(toy: Any) -> None:
    some = items(toy, "letter", subjects=["stones", "animals"], per_subject=5, rounds=2)
    assert Counter(item.facts["subject"] for item in some) == {"stones": 10, "animals": 10}
    assert some == items(toy, "letter", subjects=["stones", "animals"], per_subject=5, rounds=2)
    assert some != items(toy, "letter", 1, subjects=["stones", "animals"], per_subject=5, rounds=2)
    with pytest.raises(NeedleworkError, match="did you mean 'stones'"):
        items(toy, "letter", subjects=["stone"])


@pytest.mark.parametrize("kind", CHOICES)
def test_choices_are_fair(toy: Any, kind: str) -> None:
    task = make_task({"kind": kind, **({"samples": 100} if kind in ("judgements", "letter_lookup") else {"rounds": 2})})
    found = list(task.items(toy, 0, None, None))
    answers = Counter(item.answer for item in found)
    n = len(found[0].options)
    assert task.chance == 1 / n
    assert all(abs(count / len(found) - 1 / n) < 0.1 for count in answers.values())
    for item in found[:20]:
        logs = [-2.0] * n
        logs[item.answer] = -1.0
        greedy = tuple(i == item.answer for i in range(n))
        scores = task.score(item, scored(tuple(logs), greedy=greedy))
        assert scores["correct"] == scores["top1"] == 1
        logs[item.answer] = -3.0
        assert task.score(item, scored(tuple(logs)))["correct"] == 0


def test_cloze_is_scored_over_the_whole_vocabulary(toy: Any) -> None:
    task = make_task({"kind": "cloze"})
    item = next(task.items(toy, 0, None, None))
    assert task.score(item, Answer(text=item.target)) == {"correct": 1}
    assert task.score(item, Answer(text="the " + item.target)) == {"correct": 0}
    assert task.ending(toy) == (1, None)


def test_judgements_can_be_chosen(toy: Any) -> None:
    found = items(toy, "judgements", judgements=["paraphrase"], samples=7)
    assert {item.facts["subject"] for item in found} == {"paraphrase"}
    assert len(found) == 7


def test_real_models_are_sent_elsewhere() -> None:
    with pytest.raises(NeedleworkError, match="needlework eval"):
        items(make("byte"), "cloze")


def test_a_wrong_number_of_scores_is_refused(toy: Any) -> None:
    with pytest.raises(NeedleworkError, match="4 options but 2"):
        make_task({"kind": "letter"}).score(items(toy, "letter")[0], scored((0.0, 0.0)))
