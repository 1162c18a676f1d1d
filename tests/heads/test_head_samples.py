"""The right answer in tokens: as an item offers it, as it follows the prompt, or alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from stock_heads import samples, stock

import cases
import needlework as nw
from needlework.heads.samples import answer_tokens, select_correct
from needlework.tasks.base import Item


class Pieces:
    """A tokenizer as SentencePiece's: words hold the space before them, and a text alone begins with one."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        pieces = re.findall(r" ?\w+|\W", " " + text)
        return {"input_ids": [1] * add_special_tokens + [sum(map(ord, piece)) for piece in pieces]}


class Asked:
    tokenizer = Pieces()


def _item(text: str, target: str, special: bool = True, **fields: Any) -> Item:
    return Item("a", "a", tuple(Pieces()(text, special)["input_ids"]), text, target, **fields)


@pytest.mark.parametrize("special", [True, False])
def test_a_target_is_tokenized_where_it_stands(special: bool) -> None:
    """Behind a colon its first word has no space in front; alone, or behind a prompt that has other tokens, it has one."""
    item = _item("code:", "7 3", special)
    assert answer_tokens(Asked(), item) == (ord("7"), ord(" ") + ord("3"))  # type: ignore[arg-type]
    chat = replace(item, prompt=(5, *item.prompt))
    assert answer_tokens(Asked(), chat) == (ord(" ") + ord("7"), ord(" ") + ord("3"))  # type: ignore[arg-type]


def test_the_right_option_is_the_answer() -> None:
    item = _item("a", "b", options=((4, 5), (6, 7)), answer=1)
    assert answer_tokens(Asked(), item) == (6, 7)  # type: ignore[arg-type]


def test_without_options_and_tokenizer_there_is_no_answer() -> None:
    with pytest.raises(nw.NeedleworkError, match="not known in tokens"):
        answer_tokens(cases.subject("jamba"), Item("a", "a", (1, 2), "", "b"))


def test_right_is_what_the_model_would_say_and_its_log_p_is_the_stock_model_s() -> None:
    items = samples("jamba")
    found = select_correct(cases.subject("jamba"), items)
    assert [(q.place, q.answer) for q in found] == [(i, item.options[0]) for i, item in enumerate(items)]
    for question, item in zip(found, items, strict=True):
        assert question.log_p == pytest.approx(stock("jamba").log_p(item.prompt, item.options[0]), abs=1e-4)
