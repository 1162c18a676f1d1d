"""Spans are right by construction: decoding one gives its text, or there is an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_kinds import CHAT, make, shown

from needlework.errors import NeedleworkError
from needlework.tasks import make_task, prompts
from needlework.tasks.prompts import Piece, encode

SENTENCE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("layout", ["plain", "jrt", "question_first"])
def test_decoding_a_span_gives_the_needle(kind: str, bos: bool, chat: bool, layout: str) -> None:
    tokenizer = make(kind, bos, chat)
    spec = {"kind": "niah", "lengths": [330, 500], "depths": [0, 50, 100], "distractors": 1, "layout": layout}
    for item in make_task(spec).items(tokenizer, 0, None, None):
        copies = 2 if layout == "jrt" else 1
        assert shown(tokenizer, item, "needle") == [SENTENCE] * copies
        assert item.prompt_text.count(SENTENCE) == copies
        assert [i for i, t in enumerate(item.prompt) if t == tokenizer.bos_token_id] == ([0] if bos or chat else [])
        if kind == "word":  # the haystack holds words that this one does not know
            continue
        whole = tokenizer.decode(list(item.prompt), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert " ".join(whole.split()) == " ".join(item.prompt_text.replace("<s>", "").split())


def test_text_after_an_end_token_would_be_lost() -> None:
    assert make("byte", eos=True).eos_token_id not in encode(make("byte", eos=True), [Piece("one two")]).ids


def test_a_token_across_the_edge_is_split() -> None:
    tokenizer = make("byte")
    made = encode(tokenizer, [Piece("the gar"), Piece("den wall", ("needle",)), Piece("s")])
    ((start, end),) = made.spans["needle"]
    assert tokenizer.decode(list(made.ids[start:end])) == "den wall"
    assert tokenizer.decode(list(made.ids), skip_special_tokens=True) == "the garden walls"


def test_a_span_that_cannot_be_placed_says_why() -> None:
    with pytest.raises(NeedleworkError, match="ends inside a token"):
        encode(make("unigram"), [Piece("the gar"), Piece("den wall", ("needle",)), Piece("s")])
    with pytest.raises(NeedleworkError, match="does not know"):
        encode(make("word"), [Piece("the zzyzx", ("needle",))])
    with pytest.raises(NeedleworkError, match="is empty"):
        encode(make("byte"), [Piece("the "), Piece(" ", ("needle",))])
    with pytest.raises(NeedleworkError, match="fast tokenizer"):
        encode(_Slow(), [Piece("the wall", ("needle",))])


class _Slow:
    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        raise NotImplementedError

    def decode(self, ids: Any, **options: Any) -> str:
        return ""


def test_a_wrong_range_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prompts._Map.place
    monkeypatch.setattr(prompts._Map, "place", lambda *a: tuple(x - 1 for x in right(*a) or ()))
    with pytest.raises(NeedleworkError, match="decodes to"):
        encode(make("byte"), [Piece("walk to the old "), Piece("garden wall", ("needle",))])


def test_an_optional_span_is_left_out() -> None:
    made = encode(make("word"), [Piece("the "), Piece("day", ("value",)), Piece(". I")], optional=("value",))
    assert made.spans == {}


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ messages[0].content }}{{ messages[0].content }}", "2 times"),
        ("nothing", "0 times"),
        ("{{ messages[0].content | lower }}{{ 'CONTENTGOESHERE' }}", "chat template"),
        ("{{ messages[0].content | replace('one', 'two') }}", "changes the user's words"),
    ],
)
def test_a_chat_template_that_changes_words_is_refused(template: str, message: str) -> None:
    tokenizer = make("byte")
    tokenizer.chat_template = template
    try:
        with pytest.raises(NeedleworkError, match=message):
            prompts.in_chat(tokenizer, [Piece("one")])
    finally:
        tokenizer.chat_template = None
    with pytest.raises(NeedleworkError, match="no chat template"):
        prompts.in_chat(tokenizer, [Piece("one")])


def test_chat_prompts_are_what_the_template_makes() -> None:
    tokenizer = make("byte", bos=True, chat=True)
    pieces = prompts.in_chat(tokenizer, [Piece("one "), Piece("garden", ("needle",))])
    made = encode(tokenizer, pieces, special=False)
    turn = [{"role": "user", "content": "one garden"}]
    expected = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(made.ids) == list(expected)
    assert tokenizer.chat_template == CHAT


WORDS = st.lists(st.sampled_from(["garden", "wall.", "The", "(old)", "ü", "7", "so,"]), min_size=1, max_size=5).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(WORDS, WORDS, WORDS, st.sampled_from(["byte", "joined"]), st.sampled_from([" ", "\n\n", "  "]))
def test_any_needle_between_white_space_is_found(a: str, b: str, c: str, kind: str, gap: str) -> None:
    if kind == "joined":
        a, b, c = (text.replace("ü", "wall").replace("(old)", "old") for text in (a, b, c))
    tokenizer = make(kind)
    made = encode(tokenizer, [Piece(a + gap), Piece(b, ("needle",)), Piece(gap + c), Piece(gap), Piece(b, ("needle",))])
    shown = [tokenizer.decode(list(made.ids[s:e])).strip() for s, e in made.spans["needle"]]
    assert shown == [b, b]
    assert tokenizer.decode(list(made.ids), skip_special_tokens=True) == a + gap + b + gap + c + gap + b
