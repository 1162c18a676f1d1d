"""Laws of training documents: exact lengths, weights on answers alone, a pure function of seed and step."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest

from needlework.toy import facts, needles
from needlework.toy.sample import Stream
from needlework.toy.words import BOS, LETTERS, NAMES, PAD, VOCABULARY, WORD_ID
from needlework.training import documents
from needlework.training.documents import ITEM_KINDS, ITEM_SHARES, ROW_KINDS, DocumentMix

EVERY = DocumentMix(rows=dict.fromkeys(ROW_KINDS, 1.0), items=ITEM_SHARES, answer_weight=4.0)


def only(kind: str) -> DocumentMix:
    return DocumentMix(rows={kind: 1.0}, items=ITEM_SHARES, answer_weight=4.0)


@pytest.mark.parametrize("length", [48, 64, 97, 256, 1024, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_fit_their_length_and_hold_answers(kind: str, length: int) -> None:
    used = answered = 0
    for i in range(60):
        words, weights = documents.make_row(Stream("test", kind, i), length, only(kind))
        assert words[0] == BOS
        assert weights[0] == 0.0
        assert len(words) == len(weights) <= length
        assert not set(words) - set(VOCABULARY)
        used += len(words)
        answered += 4.0 in weights
    assert used > 0.75 * 60 * length
    assert answered > 50


def test_only_answers_have_the_answer_weight() -> None:
    for i in range(200):
        words, weights = documents.make_row(Stream("test", i), 160, EVERY)
        for j in range(1, len(words)):
            if weights[j] == 4.0 and weights[j - 1] != 4.0:  # an answer begins: after a colon, a key or a statement
                assert words[j - 1] == ":" or words[j - 1] in {*keys(), *statement_ends()}
            if weights[j - 1] == 4.0 and weights[j] != 4.0:
                assert words[j] in (".", *keys())


def keys() -> set[str]:
    """What a key-value list is asked for: names, or options."""
    return {*NAMES, *(option for subject in facts.SUBJECTS.values() for option in subject.options())}


def statement_ends() -> set[str]:
    ends = set()
    for subject in facts.SUBJECTS.values():
        for template in subject.statements:
            last = template[-1]
            ends |= set(subject.keys) if last == "{k}" else {last}
    return ends


def test_needle_rows_answer_what_the_context_says() -> None:
    for i in range(100):
        words, _ = documents.make_row(Stream("test", "truth", i), 200, only("sparse"))
        text = " ".join(words)
        for question in text.split("question : what is the secret code of ")[1:]:
            name, rest = question.split(" ? answer : ")[0], question.split(" ? ")[1]
            if rest.startswith("answer"):
                assert f"the secret code of {name} is {' '.join(rest.split()[2:5])}" in text


@pytest.mark.parametrize("length", [48, 64, 96, 256])
@pytest.mark.parametrize("layout", needles.LAYOUTS)
def test_rows_of_few_needles_ask_for_one_of_two_to_four_in_the_layout_that_they_are_called_by(layout: str, length: int) -> None:
    diet = DocumentMix(rows={f"few_{layout}": 1.0}, items=ITEM_SHARES, answer_weight=4.0, relations=("code",))
    seen = set()
    for i in range(60):
        words, weights = documents.make_row(Stream("test", "few", i), length, diet)
        text, answer = " ".join(words), [word for word, weight in zip(words, weights, strict=True) if weight == 4.0]
        copies = 2 if layout == "jrt" and length >= 96 else 1
        stated = re.findall(r"the secret code of (\w+) is (\d \d \d) \.", text)
        values = dict(stated)
        assert [*values.items()] * copies == stated
        asked = re.findall(r"question : (?:what is the secret code of|which secret code has) (\w+) \?", text)
        assert len(asked) == copies
        assert values[asked[0]].split() == answer
        first = layout == "question_first" or (layout == "jrt" and length < 80)
        assert (text.index("question") < text.index("context")) == first
        seen.add(len(values))
    assert seen == {2, 3, 4} if length == 256 else seen <= {2, 3, 4}


def test_lists_of_any_kind_meet_in_every_combination_and_are_answered_by_what_stands_behind_the_key() -> None:
    seen = set()
    for i in range(300):
        lines = needles.make_any_pairs(Stream("test", "any", i), 6)
        named = "question" in lines[0][0]
        listed = lines[0][0][:-9] if named else lines[0][0][2:-4]
        pairs = dict(zip(listed[::2], listed[1::2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == len(listed) // 2 >= 2
        for words, answer in lines:
            key = words[-4] if named else words[-1]
            assert answer == (pairs[key],)
            seen.add((named, key in NAMES, answer[0] in LETTERS))
    assert len(seen) == 8  # both ways to ask, names and options, letters and words


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    ids, weights = documents.make_batch(3, 7, 4, 96, EVERY)
    again, _ = documents.make_batch(3, 7, 4, 96, EVERY)
    assert ids.shape == weights.shape == (4, 96)
    assert np.array_equal(ids, again)
    assert not np.array_equal(ids, documents.make_batch(3, 8, 4, 96, EVERY)[0])
    assert not np.array_equal(ids, documents.make_batch(4, 7, 4, 96, EVERY)[0])
    assert len({row.tobytes() for row in ids}) == 4


def test_padding_weighs_nothing() -> None:
    ids, weights = documents.make_batch(0, 0, 64, 96, EVERY)
    pad = ids == WORD_ID[PAD]
    assert pad.any()
    assert not weights[pad].any()
    assert (weights[:, 1:][~pad[:, 1:]] > 0).all()


MARKS = {
    "sentence": " at the garden .",
    "statement": "lives in the",
    "cloze": "lives in the",
    "letter": " D question : ",
    "letter_lookup": "which one is",
    "acceptability": "judge :",
    "entailment": " so ",
    "paraphrase": " same ",
}


@pytest.mark.parametrize("kind", ITEM_KINDS)
def test_every_item_kind_comes_up(kind: str) -> None:
    diet = DocumentMix(rows={"short": 1.0}, items={kind: 1.0}, answer_weight=4.0)
    rows = [documents.make_row(Stream("test", i), 256, diet) for i in range(20)]
    text = " ".join(word for words, _ in rows for word in words)
    assert MARKS[kind] in text
    assert any(4.0 in weights for _, weights in rows) == (kind not in ("sentence", "statement"))


# Recipe hashes stand for the documents, too: where one of these changes, DATA_VERSION must.
DIGESTS = {
    "dense": "604e5cb4f974",
    "sparse": "4883aa9ecf67",
    "jrt": "f4ef917c24eb",
    "question_first": "59b3d119faa8",
    "pairs": "8cc3a156e45c",
    "any_pairs": "80a229eb697e",
    "phone": "e7b3f3777fa0",
    "copy": "77c38f25022d",
    "letters": "49dd00b4213b",
    "short": "b5c47387459c",
    "linked": "8ef6c6683c0d",
    "short_links": "8e8f2737593b",
    "variables": "e7b94578b8c8",
    "few_plain": "683b12550180",
    "few_jrt": "6affb72acc29",
    "few_question_first": "3eabcc2615c0",
    "hops": "ce17525a92c7",
}


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_documents_change_with_the_data_version_alone(kind: str) -> None:
    digest = hashlib.blake2b(digest_size=6)
    for step, length in ((0, 64), (1, 256)):
        ids, weights = documents.make_batch(0, step, 6, length, only(kind))
        digest.update(ids.tobytes() + weights.tobytes())
    assert documents.DATA_VERSION == 2
    assert digest.hexdigest() == DIGESTS[kind]


LINK = re.compile(r"^(\w+) hid the key with (\w+)(?: (\w+))?$")
PLAIN = re.compile(r"^(\w+) hid the key in the (\w+)$")


@pytest.mark.parametrize("said", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("names", [8, len(NAMES)])
def test_what_a_link_says_is_the_value_at_the_end_of_the_names(said: float, names: int) -> None:
    """Read anew, sentence by sentence: each link names someone before it, and a value that it says has an answer's weight."""
    diet = DocumentMix({"hops": 1.0}, ITEM_SHARES, 4.0, ("hideout",), names, said)
    links = told = linked_to_links = 0
    for i in range(40):
        words, weights = documents.make_row(Stream("test", "said", i), 128, diet)
        text, start, known, like = " ".join(words), 0, {}, set()
        for sentence in text.split(" . "):
            at, start = start, start + len(sentence.split()) + 1
            if "context :" in sentence:
                sentence, known, like = sentence.split("context : ")[1], {}, set()
            if found := PLAIN.match(sentence):
                known[found[1]] = found[2]
            elif found := LINK.match(sentence):
                links, told, linked_to_links = links + 1, told + bool(found[3]), linked_to_links + (found[2] in like)
                known[found[1]] = known[found[2]]
                like.add(found[1])
                if found[3]:
                    assert found[3] == known[found[2]]
                    assert weights[at + len(sentence.split()) - 1] == 4.0
            elif asked := re.search(r"key of (\w+) \? answer : (\w+)$", sentence):
                assert asked[2] == known[asked[1]]
        assert set(words) & set(NAMES) <= set(NAMES[:names])
    assert (linked_to_links > 3) == (said > 0)  # who does not say it is linked to a needle
    assert told == {0.0: 0, 1.0: links}.get(said, told)
    assert (0 < told < links) == (said == 0.5)


def test_where_a_link_that_does_not_say_its_value_leads_cannot_be_guessed_from_others() -> None:
    """Two links lead to one needle as often as chance has it, and every link is asked for or gives way to a needle."""
    diet = DocumentMix({"hops": 1.0}, ITEM_SHARES, 4.0, ("hideout",), len(NAMES), 0.0)
    alike = by_chance = documents_seen = gave_way = 0.0
    for i in range(300):
        words, _ = documents.make_row(Stream("test", "alike", i), 128, diet)
        for document in " ".join(words).split("context : ")[1:]:
            plain = re.findall(r"(\w+) hid the key in the", document)
            links = dict(re.findall(r"(\w+) hid the key with (\w+) \.", document))
            asked = re.findall(r"where is the key of (\w+)|where has (\w+) hid the key \?", document)
            names = {first or second for first, second in asked}
            assert len(asked) == len(names) == len(links) == len(plain)
            assert len(names - set(links)) <= 1
            gave_way += bool(names - set(links))
            documents_seen += 1
            if len(plain) > 1:
                first, second = list(links.values())[:2]
                alike += first == second
                by_chance += 1 / len(plain)
    assert abs(alike - by_chance) < 3 * by_chance**0.5
    assert abs(gave_way / documents_seen - documents.ONE_HOP_SHARE) < 0.1
