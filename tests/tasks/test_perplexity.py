from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_kinds import make

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import Item, make_task
from needlework.tasks.perplexity import recall_mask


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_recall_tokens_by_their_definition(ids: list[int]) -> None:
    slow = [any(ids[j - 1 : j + 1] == ids[i - 1 : i + 1] for j in range(1, i)) for i in range(1, len(ids))]
    assert recall_mask(ids) == slow


def test_scores() -> None:
    item = Item("x", "x", (1, 2, 3, 1, 2, 4), "", "", spans={"answer": ((2, 4),)})
    scores = make_task({"kind": "perplexity"}).score(item, Answer(option_logprobs=((-1.0, -2.0, -3.0, -4.0, -5.0),)))
    assert scores == {
        "nll": 3,
        "nll_recall": 4,
        "nll_rest": 11 / 4,
        "nll_answer": 2.5,
        "tokens": 5,
        "tokens_recall": 1,
        "tokens_rest": 4,
        "tokens_answer": 2,
    }
    with pytest.raises(NeedleworkError, match="all but the first"):
        make_task({"kind": "perplexity"}).score(item, Answer(option_logprobs=((-1.0,),)))


def test_a_slice_without_tokens_has_no_mean() -> None:
    scores = make_task({"kind": "perplexity"}).score(Item("x", "x", (1, 2), "", ""), Answer(option_logprobs=((-1.0,),)))
    assert scores == {"nll": 1, "nll_rest": 1, "tokens": 1, "tokens_recall": 0, "tokens_rest": 1, "tokens_answer": 0}


def test_toy_documents(toy: Any) -> None:
    found = list(make_task({"kind": "perplexity", "tokens": 200, "samples": 5}).items(toy, 0, None, 512))
    assert [len(item.prompt) for item in found] == pytest.approx([200] * 5, abs=8)
    for item in found:
        assert item.prompt[0] == toy.bos_token_id
        text = toy.decode(list(item.prompt), skip_special_tokens=True)
        for a, b in item.spans["answer"]:
            value = toy.decode(list(item.prompt[a:b]))
            assert text.count(f" {value} .") >= 2
            assert toy.decode(list(item.prompt[a - 2 : a])) == "answer :"
    assert len({item.prompt for item in found}) == 5


def test_the_users_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The old clock is quiet. The garden wall was sold. " * 20)
    spec = {"kind": "perplexity", "text": f"{tmp_path}/*.txt", "tokens": 50, "samples": 3}
    tokenizer = make("byte")
    found = list(make_task(spec).items(tokenizer, 0, None, None))
    assert [len(item.prompt) for item in found] == [50] * 3
    assert found[0].prompt[0] == tokenizer.bos_token_id
    assert found[0].prompt_text.startswith("The old clock is quiet. The garden")
    assert found[0].facts["source"].endswith("*.txt")


def test_sizes(toy: Any) -> None:
    task = make_task({"kind": "perplexity"})
    assert len(next(task.items(make("byte"), 0, None, 64)).prompt) == 64
    with pytest.raises(NeedleworkError, match="more than the 64"):
        next(make_task({"kind": "perplexity", "tokens": 65}).items(toy, 0, None, 64))
