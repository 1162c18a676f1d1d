"""Answers as real models write them: what says the needle counts as found, whatever stands around and between its words."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import pytest

from needlework.requests import Answer
from needlework.tasks import make_task
from needlework.tasks.base import Item, begins, holds, plain

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
BARE = NEEDLE.removesuffix(".")


def item(target: str = NEEDLE) -> Item:
    return Item("x", "x", (), "", target, facts={"world": "english"})


def scores(text: str, **options: Any) -> dict[str, float]:
    return make_task({"kind": "niah", **options}).score(item(), Answer(text=text))


@pytest.mark.parametrize(
    "answer",
    [
        f"<blockquote>{BARE}.</blockquote>",
        f"{BARE}.The next sentence follows at once.",
        f"{BARE}.<end_of_turn>",
        f"{BARE}<|im_end|>",
        f"ANSWER:{NEEDLE}",
        f"1.{NEEDLE}",
        f"**{BARE}**",
        f"__{BARE}__",
        f'"{BARE}"—that is it',
        f"‘{BARE}’",
        f"“{BARE}…”",
        f"- {BARE}–as the text says",
        f"Sentence:\n{BARE.replace(' ', chr(10), 3)}\n",
        NEEDLE.upper(),
        NEEDLE.replace(" ", "_"),
        NEEDLE.replace(" ", "\u00a0"),
        "▁" + NEEDLE.replace(" ", "▁"),  # a tokenizer's own space
        NEEDLE.replace("sunny day", "sunny, day").replace("and sit", "-- and sit"),
    ],
)
def test_the_needle_is_found_in_whatever_dress(answer: str) -> None:
    assert scores(answer) == {"correct": 1, "exact": 1, "graded": 5}


@pytest.mark.parametrize(
    "answer",
    [
        BARE + "s.",
        BARE.replace("eat a", "eata"),
        BARE.replace("Dolores Park", "Dolores"),
        "xThe" + BARE.removeprefix("The"),
        " ".join(reversed(BARE.split())),
        "",
        "<>.,_-",
    ],
)
def test_what_does_not_say_it_is_not_found(answer: str) -> None:
    assert scores(answer)["exact"] == 0


def test_words_with_marks_inside_are_themselves_however_they_are_written() -> None:
    assert holds("She said: I don’t know!", "I don't know")
    assert holds("a well—known fact", "well-known")
    assert holds("die STRASSE.", "die Straße")
    assert begins("_ZX-12_: yes", "zx 12")
    assert not holds("dont", "don't")  # both are read alike, so only the letters can differ
    assert plain("day.</blockquote>") == "day blockquote"


def by_hand(text: str) -> list[str]:
    """Words without a regular expression: a letter or digit belongs to a word, anything else ends one."""
    words, word = [], ""
    for mark in text.casefold() + " ":
        if unicodedata.category(mark)[0] in "LN":
            word += mark
        elif word:
            words.append(word)
            word = ""
    return words


def papers_grade(text: str) -> float:
    """Five for the whole needle; else 1 for the sandwich, 0.5 for the park, 0.5 more for sitting in it, 1 for the day."""

    def says(part: str) -> bool:
        said, wanted = by_hand(text), by_hand(part)
        return any(said[i : i + len(wanted)] == wanted for i in range(len(said)))

    if says(NEEDLE):
        return 5
    return says("eat a sandwich") + 0.5 * says("Dolores Park") + 0.5 * says("sit in Dolores Park") + says("on a sunny day")


def test_graded_points_are_the_papers() -> None:
    """Answers torn to pieces at random, put together with marks as models set them."""
    draw = random.Random(0)
    words = NEEDLE.split()
    seen = set()
    for _ in range(400):
        start, end = sorted(draw.sample(range(len(words) + 1), 2))
        part = words[start:end] if draw.random() < 0.9 else words
        if draw.random() < 0.3:
            part = [word for word in part if draw.random() < 0.9]
        gap = draw.choice([" ", "  ", "_", "\n", ". ", ".", "</b> <b>", "—", "’ ‘"])
        text = draw.choice(["", "ANSWER:", "<q>", "1."]) + gap.join(part) + draw.choice(["", ".", ".</q>", ".The", "<eos>", "s"])
        points = papers_grade(text)
        assert scores(text)["graded"] == points, text
        assert scores(text)["exact"] == (points == 5), text
        seen.add(points)
    assert seen >= {0, 0.5, 1, 1.5, 2, 3, 5}
