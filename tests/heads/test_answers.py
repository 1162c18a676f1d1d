"""The right answer in tokens: as an item offers it, as it follows the prompt, or alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stock_heads import samples, stock

import cases
import needlework as nw
from needlework.heads.answers import answer_tokens, questions
from needlework.tasks.base import Item


class Joining:
    """A tokenizer of one token for each word, the space before it included; it puts 1 in front where it is asked to."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        words = [word for word in text.replace(" ", "| ").split("|") if word]
        return {"input_ids": [1] * add_special_tokens + [sum(map(ord, word)) for word in words]}


class Asked:
    tokenizer = Joining()


def _item(text: str, target: str, special: bool = True, **fields: Any) -> Item:
    return Item("a", "a", tuple(Joining()(text, special)["input_ids"]), text, target, **fields)


@pytest.mark.parametrize("special", [True, False])
def test_a_target_is_tokenized_where_it_stands(special: bool) -> None:
    """Behind the prompt its first word has a space in front, alone it has none."""
    item = _item("the code is", " 1 3 0", special)
    assert answer_tokens(Asked(), item) == tuple(Joining()(" 1 3 0", False)["input_ids"])  # type: ignore[arg-type]
    assert answer_tokens(Asked(), replace(item, target="x y")) == tuple(Joining()("x y", False)["input_ids"])  # type: ignore[arg-type]


def test_the_right_option_is_the_answer() -> None:
    item = _item("a", "b", options=((4, 5), (6, 7)), answer=1)
    assert answer_tokens(Asked(), item) == (6, 7)  # type: ignore[arg-type]


def test_without_options_and_tokenizer_there_is_no_answer() -> None:
    with pytest.raises(nw.NeedleworkError, match="not known in tokens"):
        answer_tokens(cases.subject("jamba"), Item("a", "a", (1, 2), "", "b"))


def test_right_is_what_the_model_would_say_and_its_log_p_is_the_stock_model_s() -> None:
    items = samples("jamba")
    found = questions(cases.subject("jamba"), items)
    assert [(q.place, q.answer) for q in found] == [(i, item.options[0]) for i, item in enumerate(items)]
    for question, item in zip(found, items, strict=True):
        assert question.log_p == pytest.approx(stock("jamba").log_p(item.prompt, item.options[0]), abs=1e-4)
