"""`style: paper` is the authors' prompt, token for token: their rule is written out here again, from the protocol's words."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from token_kinds import make, shown

from needlework.errors import NeedleworkError
from needlework.experiments.trials import item_digest
from needlework.tasks import haystack, make_task
from needlework.toy.sample import Stream

SENTENCE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "What is the best thing to do in San Francisco?"
LENGTHS = [250, 677, 1105, 1532, 1959, 2387, 2814, 3241, 3669, 4096]
DEPTHS = [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
KINDS = ("byte", "joined", "unigram")  # byte-level BPE; BPE without word borders and Unigram, as SentencePiece makes them


@pytest.fixture(scope="module")
def essays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files; the first alone is longer than any prompt, and has "." inside of tokens and words, too."""
    folder = tmp_path_factory.mktemp("essays")
    sentences = list(islice(haystack.generate_sentences(Stream("essays")), 1400))
    sentences[5::7] = [f"{sentence}\n" for sentence in sentences[5::7]]
    (folder / "a.txt").write_text("".join(sentences).strip() + "\n")
    (folder / "b.txt").write_text("The other essay is never reached. " * 30)
    return folder


def encoded(tokenizer: Any, words: str) -> list[int]:
    return list(tokenizer(words, add_special_tokens=False)["input_ids"])


def authors_prompt(tokenizer: Any, essay: list[int], length: int, depth: int, twice: bool, chat: bool) -> list[int]:
    needle = encoded(tokenizer, "\n" + SENTENCE + "\n")
    tokens = essay[: length - 200 - len(needle)]
    if depth == 100:
        tokens = tokens + needle
    else:
        head = tokens[: int(len(tokens) * (depth / 100))]
        while head and tokenizer.convert_ids_to_tokens(head[-1]) != ".":
            head = head[:-1]
        tokens = head + needle + tokens[len(head) :]
    context = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    block = f"CONTEXT: {context}\n\nQUESTION: {QUESTION}"
    prompt = f"{block}\n\n{block}" if twice else block
    if chat:
        prompt += " Output the most relevant sentence in the context, word by word!"
        return list(encoded(tokenizer, tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False)))
    return list(tokenizer(f"{prompt}\n\nANSWER: Here is the most relevant sentence in the context: ")["input_ids"])


def items(tokenizer: Any, essays: Path, **spec: Any) -> list[Any]:
    return list(
        make_task({"kind": "niah", "style": "paper", "haystack": f"{essays}/*.txt", **spec}).items(tokenizer, 0, None, None)
    )


def test_files_are_appended_one_to_the_other_as_they_are(tmp_path: Path) -> None:
    """No blank line between two files, no white space taken away, and over again from the first when they run out."""
    (tmp_path / "a.txt").write_text("  One walks a lot. It ends with this.")
    (tmp_path / "b.txt").write_text("May 2021There's a second essay. It is short.\n")
    essay = (tmp_path / "a.txt").read_text() + (tmp_path / "b.txt").read_text()
    tokenizer = make("byte")
    cells = items(tokenizer, tmp_path, lengths=[LENGTHS[1]])
    assert all("this.May 2021There's" in item.prompt_text.replace(f"\n{SENTENCE}\n", "") for item in cells)
    for item, depth in zip(cells, DEPTHS, strict=True):
        assert list(item.prompt) == authors_prompt(tokenizer, encoded(tokenizer, essay * 60), LENGTHS[1], depth, False, False)


def test_in_chat_the_instruction_stands_once_at_the_very_end(essays: Path) -> None:
    tokenizer = make("byte", chat=True)
    essay = encoded(tokenizer, (essays / "a.txt").read_text())
    for item in items(tokenizer, essays, layout="jrt", lengths=LENGTHS[:3]):
        assert item.prompt_text.count("word by word!") == 1
        cell = item.facts["length_tokens"], item.facts["depth_percent"]
        assert list(item.prompt) == authors_prompt(tokenizer, essay, *cell, True, True)


@pytest.mark.parametrize("kind", ["niah", "niah_choice"])
def test_cells_and_seeds_that_make_one_prompt_ask_one_question(kind: str, essays: Path) -> None:
    """At length 250 ten depths make few prompts: whatever a trial's id is made of must be equal for equal prompts."""
    tokenizer = make("byte")
    spec = {"kind": kind, "style": "paper", "haystack": f"{essays}/*.txt", "lengths": [250]}
    found = [item for seed in (0, 1) for item in make_task(spec).items(tokenizer, seed, None, None)]
    assert len({item.prompt for item in found}) < 10
    assert len({item_digest(item) for item in found}) == len({item.prompt for item in found})


@pytest.mark.parametrize("layout", ["plain", pytest.param("jrt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chat", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_grid_is_the_authors(kind: str, chat: bool, layout: str, essays: Path) -> None:
    tokenizer = make(kind, chat=chat)
    essay = encoded(tokenizer, (essays / "a.txt").read_text().strip())
    found = items(tokenizer, essays, layout=layout)
    cells = [(length, depth) for length in LENGTHS for depth in DEPTHS]
    assert [(item.facts["length_tokens"], item.facts["depth_percent"]) for item in found] == cells
    for item, (length, depth) in zip(found, cells, strict=True):
        assert list(item.prompt) == authors_prompt(tokenizer, essay, length, depth, layout == "jrt", chat), (length, depth)
        assert len(item.spans["needle"]) == (2 if layout == "jrt" else 1)
        for words in shown(tokenizer, item, "needle"):
            assert SENTENCE in words if "needle" in item.facts.get("wider_spans", ()) else words == SENTENCE
    assert len({item.cluster for item in found}) == 1
    if kind != "joined":  # where few tokens hold more than one word, the depths differ
        assert len({item.prompt for item in found}) > 80
    assert found[19].facts["depth_reached_percent"] == 100


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_very_end_a_word_may_be_cut(kind: str, essays: Path) -> None:
    last = items(make(kind), essays, lengths=list(range(400, 440)), depths=[100])
    before = [item.prompt_text.split("\n" + SENTENCE)[0].rstrip(" ")[-1] for item in last]  # the dummy prefix of Unigram
    assert any(letter.isalpha() for letter in before)
    assert all(f"{SENTENCE}\n\n\nQUESTION" in item.prompt_text for item in last)


def test_other_styles_are_not_the_papers(essays: Path) -> None:
    tokenizer = make("byte")
    essay = encoded(tokenizer, (essays / "a.txt").read_text().strip())
    spec = {"lengths": [677], "haystack_per": "sample", "style": "base"}
    for item in items(tokenizer, essays, **spec):
        assert list(item.prompt) != authors_prompt(tokenizer, essay, 677, item.facts["depth_percent"], False, False)


def test_the_chat_question_stands_on_one_line(essays: Path) -> None:
    (item,) = items(make("byte", chat=True), essays, lengths=[400], depths=[0])
    assert item.prompt_text.startswith(f"<s>[user] CONTEXT: \n{SENTENCE}\n")
    end = f"\n\nQUESTION: {QUESTION} Output the most relevant sentence in the context, word by word! [end][bot]"
    assert item.prompt_text.endswith(end)


def test_a_token_that_holds_needle_and_other_words_is_told() -> None:
    """Without a split the span takes in the whole token, and the item says so."""
    from needlework.tasks.prompts import Piece, encode

    tokenizer = make("byte")
    pieces = [Piece("the harb"), Piece("our wall", ("needle",)), Piece(" is quiet.")]
    whole = encode(tokenizer, pieces, split=False)
    assert list(whole.ids) == list(tokenizer("the harbour wall is quiet.")["input_ids"])
    (start, end) = whole.spans["needle"][0]
    covered = tokenizer.decode(list(whole.ids[start:end]))
    assert "our wall" in covered
    assert (whole.wider == ("needle",)) == (covered.strip() != "our wall")
    assert encode(tokenizer, pieces).wider == ()


def test_the_companion_and_twins_ask_the_same(essays: Path) -> None:
    spec = {"lengths": [500], "depths": [0, 56, 100], "style": "paper", "haystack": f"{essays}/*.txt"}
    spoken, chosen = (list(make_task({"kind": k, **spec}).items(make("byte"), 0, None, None)) for k in ("niah", "niah_choice"))
    assert spoken == chosen
    assert len(spoken[0].options) == 4
    other = {"value": "sit in Dolores Park and eat a sandwich on a sunny day"}
    (item,) = items(make("byte"), essays, lengths=[500], depths=[56], twins=True, others=[other], absent=0)
    assert len(item.twins["twin"]) == len(item.prompt)
    assert f"\nThe best thing to do in San Francisco is {other['value']}.\n" in make("byte").decode(list(item.twins["twin"]))


@pytest.mark.parametrize(
    "spec, told",
    [
        ({"distractors": 1}, "hides one needle"),
        ({"layout": "question_first"}, "plain and jrt"),
        ({"haystack_per": "cell"}, "one text for all cells"),
    ],
)
def test_what_the_paper_does_not_have_is_refused(spec: dict[str, Any], told: str, essays: Path) -> None:
    with pytest.raises(NeedleworkError, match=told):
        items(make("byte"), essays, **spec)


def test_models_that_cannot_be_asked_so_are_refused(essays: Path, toy: Any) -> None:
    with pytest.raises(NeedleworkError, match="toy language"):
        items(toy, essays)
    with pytest.raises(NeedleworkError, match="this tokenizer has none"):
        items(make("word"), essays)
    with pytest.raises(NeedleworkError, match="style"):
        make_task({"kind": "ruler", "style": "paper"})
