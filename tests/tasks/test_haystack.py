from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_kinds import make

from needlework.errors import NeedleworkError
from needlework.tasks import haystack
from needlework.tasks.prompts import Piece, token_ids
from needlework.toy.sample import Stream


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("Beta one. Beta two! Beta three?")
    (tmp_path / "a.txt").write_text('Alpha one is 3.5 long. He said "yes." Then\nhe left')
    (tmp_path / "c.md").write_text("Not this.")
    return tmp_path


def test_files_come_in_the_order_of_their_names(texts: Path) -> None:
    found = haystack.read_sentences(f"{texts}/*.txt")
    assert "".join(found).split("\n\n") == [
        "",
        'Alpha one is 3.5 long. He said "yes." Then\nhe left',
        "Beta one. Beta two! Beta three?",
    ]
    assert [s.strip() for s in found[:3]] == ["Alpha one is 3.5 long.", 'He said "yes."', "Then\nhe left"]


def test_files_begin_again_when_they_run_out(texts: Path) -> None:
    endless = haystack.iterate_sentences(f"{texts}/*.txt", Stream("x"), start_anywhere=False)
    assert [s.strip() for s in islice(endless, 8)][-2:] == ["Alpha one is 3.5 long.", 'He said "yes."']


def test_bad_sources_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(NeedleworkError, match="no file matches"):
        haystack.read_sentences(f"{tmp_path}/*.txt")
    (tmp_path / "empty.txt").write_text("  ")
    with pytest.raises(NeedleworkError, match="all empty"):
        haystack.read_sentences(f"{tmp_path}/*.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait.")
    with pytest.raises(NeedleworkError, match="UTF-8"):
        haystack.read_sentences(f"{tmp_path}/latin.*")


@given(st.text(alphabet="ab.!?\"') \n", max_size=60))
def test_sentences_joined_again_are_the_text(text: str) -> None:
    assert "".join(haystack.split_sentences(text)) == text


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(0, 600), depth=st.floats(0, 100), seed=st.integers(0, 9), kind=st.sampled_from(["byte", "unigram"]))
def test_a_needle_goes_in_after_the_nearest_sentence_end(tokens: int, depth: float, seed: int, kind: str) -> None:
    tokenizer = make(kind)
    hay = haystack.cut_haystack(tokenizer, haystack.generate_sentences(Stream("hay", seed)), tokens)
    assert len(token_ids(tokenizer, hay.text)) == hay.tokens == tokens
    slot = hay.slot(depth)
    assert hay.depth_percent(slot) <= depth
    assert slot == len(hay.ends) - 1 or hay.depth_percent(slot + 1) > depth
    text = "".join(piece.text for piece in haystack.insert_needles(hay, [(slot, [Piece("NEEDLE.")])]))
    assert text.replace(" NEEDLE.", "").replace("NEEDLE. ", "").replace("NEEDLE.", "") == hay.text
    before = text.split("NEEDLE.")[0]
    assert before == "" or re.search(r"[.!?] $", before)


def test_whole_sentences_when_asked() -> None:
    hay = haystack.cut_haystack(make("byte"), haystack.generate_sentences(Stream("hay")), 200, whole=True)
    assert hay.text.endswith(".")
    assert 150 < hay.tokens <= 200


def test_built_in_sentences_depend_on_the_seed_alone() -> None:
    first, again, other = ("".join(islice(haystack.generate_sentences(Stream("s", n)), 50)) for n in (1, 1, 2))
    assert first == again != other
    assert len(set(islice(haystack.generate_sentences(Stream("s")), 2000))) > 1500


def test_a_tokenizer_that_knows_no_word_is_an_error_and_no_endless_loop() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True))
    mute = PreTrainedTokenizerFast(tokenizer_object=core)
    with pytest.raises(NeedleworkError, match="only 1 tokens, and more text makes no more"):
        haystack.cut_haystack(mute, haystack.generate_sentences(Stream("x")), 64)
