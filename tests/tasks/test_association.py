"""Needles that share no content word with the question, in one sentence or in two parts."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from nltk.stem.porter import PorterStemmer
from token_kinds import make, shown

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import make_task
from needlework.tasks.association import WORLDS
from needlework.tasks.haystack import ENGLISH, fill_template
from needlework.toy.facts import SUBJECTS

STOP = re.compile(
    r"^(an?|the|of|in|on|to|is|has|have|been|was|were|who|whose|what|which|with|by|from|just|for|and|or|does|do|did|it|that)$"
)
TOPICS = [(world, topic) for world, known in WORLDS.items() for topic in known["topics"]]


def stems(text: str) -> set[str]:
    """The content words of a text, case-folded and without endings."""
    words = re.findall(r"\w+", text.casefold())
    return {PorterStemmer().stem(word) for word in words if not STOP.match(word)}


def pairs_of(world: str, topic: str) -> dict[str, str]:
    if world == "toy":
        return dict(zip(SUBJECTS[topic].values, SUBJECTS[topic].keys, strict=True))
    return dict(WORLDS[world]["topics"][topic]["pairs"])


def items(tokenizer: Any, **spec: Any) -> list[Any]:
    lengths = {} if hasattr(tokenizer, "get_vocab") and "loran" in str(tokenizer.get_vocab()) else {"lengths": [900]}
    return list(make_task({"kind": "association", "samples": 3, **lengths, **spec}).items(tokenizer, 0, 50, None))


def test_stems() -> None:
    assert stems("The farmers were farming, in Venice!") == {"farmer", "farm", "venic"}


@pytest.mark.parametrize(("world", "topic"), TOPICS)
def test_no_content_word_of_the_question_is_in_a_needle(world: str, topic: str) -> None:
    """Compare every question with every sentence of its topic, the needles of other persons included."""
    known = WORLDS[world]["topics"][topic]
    pairs = pairs_of(world, topic)
    assert len(set(pairs.values())) == len(pairs) >= 10
    links = WORLDS[world].get("links", "vorom")
    sentences = [fill_template(text, clue=clue, link=links) for clue in pairs for text in (known["needle"], *known["parts"])]
    told = stems(" ".join(sentences).replace("{value}", ""))
    for clue, question in product(pairs, known["association"]):
        asked = stems(fill_template(question, asked=pairs[clue]))
        assert asked - told == asked != set(), (question, asked & told)
        if world == "english":  # nor in the haystack
            assert not asked & stems(
                " ".join(
                    str(part)
                    for name, part in ENGLISH.items()
                    if name not in ("nouns", "first_names", "last_names", "other_needles")
                )
            )
    for question in known["letter"]:
        assert stems(question) - {"clue", "person"} <= stems(" ".join((known["needle"], *known["parts"]))) | {"one"}


@pytest.mark.slow
@pytest.mark.parametrize("world", ["toy", "byte"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layout", ["plain", "jrt"])
def test_what_is_asked_and_hidden(world: str, parts: int, layout: str, toy: Any) -> None:
    tokenizer = toy if world == "toy" else make(world)
    found = items(tokenizer, parts=parts, layout=layout)
    assert found == items(tokenizer, parts=parts, layout=layout)
    assert {item.facts["topic"] for item in found} == set(WORLDS[found[0].facts["world"]]["topics"])
    for item in found:
        known = WORLDS[item.facts["world"]]["topics"][item.facts["topic"]]
        sentences = shown(tokenizer, item, "needle")
        assert len(sentences) == parts * (2 if layout == "jrt" else 1)
        templates = known["parts"] if parts == 2 else [known["needle"]]
        for template in templates:  # the span covers every part
            before, _, after = re.sub(r"\{(clue|link)\}", "{value}", template).replace("{value}", "\0", 1).partition("\0")
            assert any(text.startswith(before) and after.split("{")[0].strip() in text for text in sentences)
        assert any(item.target in text for text in sentences)
        assert set(shown(tokenizer, item, "value")) <= {item.target}
        question = shown(tokenizer, item, "question")[-1]
        assert not stems(question) & set().union(*map(stems, sentences))
        first = item.spans["needle"][-parts][0]
        assert item.facts["in_window"] == (len(item.prompt) - first <= 50)


def solve(sentences: list[str], parts: list[str], clue: str) -> tuple[set[str], set[str]]:
    """Persons who are known to be at the clue, and persons of whom nothing is said: by equal links alone."""
    patterns = [re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(text)) + "$") for text in parts]
    found = [[match for text in sentences if (match := pattern.match(text))] for pattern in patterns]
    place = {match["link"]: match["clue"] for match in found[1]}
    home = {match["value"]: match["link"] for match in found[0]}
    return {who for who, link in home.items() if place.get(link) == clue}, {
        who for who, link in home.items() if link not in place
    }


@pytest.mark.parametrize("world", ["toy", "byte"])
@pytest.mark.parametrize("distractors", [1, 3])
def test_neither_half_tells_the_answer_alone(world: str, distractors: int, toy: Any) -> None:
    tokenizer = toy if world == "toy" else make(world)
    for item in items(tokenizer, parts=2, distractors=distractors):
        topic = item.facts["topic"]
        parts = WORLDS[item.facts["world"]]["topics"][topic]["parts"]
        question = shown(tokenizer, item, "question")[-1]
        pairs = pairs_of(item.facts["world"], topic)
        (clue,) = [
            c
            for c, asked in pairs.items()
            if f" {asked}" in question and not any(asked in a and asked != a for a in pairs.values())
        ]
        needle = shown(tokenizer, item, "needle")
        sentences = [*needle, *shown(tokenizer, item, "distractor")]
        assert solve(sentences, parts, clue)[0] == {item.target}
        for half in needle:
            known, open_ = solve([text for text in sentences if text != half], parts, clue)
            assert not known
            assert open_ == ({item.target, item.facts["others"][-1]} if item.target not in half else {item.facts["others"][-1]})


def test_parts_stand_at_two_depths(toy: Any) -> None:
    gaps = []
    for item in items(toy, parts=2, lengths=[192]):
        (first, _), (second, _) = item.spans["needle"]
        gaps.append((second - first) / item.facts["context_tokens"])
    assert min(gaps) > 0.25


def test_the_letter_changes_the_question_alone(toy: Any) -> None:
    for tokenizer, parts in product((toy, make("byte")), (1, 2)):
        pairs = zip(items(tokenizer, parts=parts), items(tokenizer, parts=parts, ask="letter"), strict=True)
        for asked, letter in pairs:
            end = asked.spans["question"][0][0]
            assert asked.prompt[:end] == letter.prompt[:end]
            assert asked.prompt != letter.prompt
            assert (asked.target, asked.cluster) == (letter.target, letter.cluster)
            question = shown(tokenizer, letter, "question")[-1]
            assert stems(question) & stems(" ".join(shown(tokenizer, letter, "needle")))


def test_the_one_right_name_is_the_answer(toy: Any) -> None:
    task = make_task({"kind": "association"})
    item = next(task.items(toy, 0, None, None))
    other = item.facts["others"][0]
    right = {item.target: 1.0, f"it is {item.target.upper()}.": 1.0, f"{item.target} and {other}": 0.0, other: 0.0, "": 0.0}
    for text, correct in right.items():
        assert task.score(item, Answer(text=text)) == {"correct": correct}


def test_guessing_is_right_as_often_as_chance_says(toy: Any) -> None:
    task = make_task({"kind": "association_choice", "samples": 80, "lengths": [64], "against": "context"})
    found = list(task.items(toy, 0, None, None))
    assert task.chance == 0.25
    first = [item.facts["options"][item.answer] == min([item.target, *item.facts["others"]]) for item in found]
    assert 0.19 < sum(first) / len(first) < 0.31
    assert all(item.facts["option_kinds"].count("context") == 3 for item in found)


def test_twins_name_another_person(toy: Any) -> None:
    for item in items(toy, parts=2):
        changed = [i for i, (a, b) in enumerate(zip(item.prompt, item.twins["twin"], strict=True)) if a != b]
        assert changed == [item.spans["value"][0][0]]
        assert item.twin_target not in (item.target, *item.facts["others"])


def test_too_short_a_length_is_refused(toy: Any) -> None:
    with pytest.raises(NeedleworkError, match=r"association/.*length=30.*: the needles need \d+ tokens, 30 are left"):
        items(toy, lengths=[30], parts=2)
