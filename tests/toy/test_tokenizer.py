"""The tokenizer beside each model: one word, one token, one BOS, and the text comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from needlework.toy import needles, tokenizer
from needlework.toy.sample import Stream
from needlework.toy.words import BOS, UNK, VOCABULARY, WORD_ID


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> object:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.build().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_ids_are_the_vocabulary(loaded) -> None:  # type: ignore[no-untyped-def]
    assert loaded.get_vocab() == WORD_ID
    assert len(loaded) == len(tokenizer.build())
    assert [loaded.pad_token, loaded.bos_token, loaded.eos_token, loaded.unk_token] == list(VOCABULARY[:4])


def test_decode_gives_the_text_back(loaded) -> None:  # type: ignore[no-untyped-def]
    for i in range(40):
        sample = needles.make_niah(Stream("test", i), context_tokens=80, distractors=2)
        ids = loaded(sample.text)["input_ids"]
        assert ids == [WORD_ID[word] for word in (BOS, *sample.prompt)]
        assert loaded.decode(ids, skip_special_tokens=True) == sample.text
        span = sample.named("needle")[0]
        start, stop = span.start + 1, span.stop + 1  # BOS stands before the first word
        assert loaded.decode(ids[start:stop]) == " ".join(sample.prompt[span.start : span.stop])


def test_every_word_comes_back_alone(loaded) -> None:  # type: ignore[no-untyped-def]
    for word in VOCABULARY[4:]:
        assert loaded.decode(loaded(word)["input_ids"], skip_special_tokens=True) == word


def test_an_unknown_word_is_unk_and_bos_can_be_left_out(loaded) -> None:  # type: ignore[no-untyped-def]
    assert loaded("zeppelin")["input_ids"] == [WORD_ID[BOS], WORD_ID[UNK]]
    assert loaded("the king", add_special_tokens=False)["input_ids"] == [WORD_ID["the"], WORD_ID["king"]]
