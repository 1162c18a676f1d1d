"""Training documents: rows of one length, made of the same Samples that tasks ask, with answers weighted.

A row is a pure function of (seed, step, row number), so a resumed training sees the data it would have seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from needlework.toy import facts, judgements, recall
from needlework.toy import words as w
from needlework.toy.needles import (
    LAYOUTS,
    RELATIONS,
    Needle,
    ask,
    fresh_values,
    needles,
    scene,
    sentence,
)
from needlework.toy.sample import TRAIN_SPLIT, Sample, Stream
from needlework.training import links
from needlework.training.rows import Diet, Row

# Part of every recipe hash: raise it when the documents of a given (seed, step) change.
DATA_VERSION = 2

# Kinds of row: how a whole document is laid out.
ROW_KINDS = (
    "dense",
    "sparse",
    "jrt",
    "question_first",
    "pairs",
    "any_pairs",
    "phone",
    "copy",
    "letters",
    "short",
    "linked",
    "short_links",
    "variables",
    "few_plain",
    "few_jrt",
    "few_question_first",
    "hops",
)
# Kinds of item in a "short" row: many small texts one after the other.
ITEM_KINDS = ("sentence", "statement", "cloze", "letter", "letter_lookup", *judgements.KINDS)
ITEM_SHARES = {
    "sentence": 1.0,
    "statement": 2.0,
    "cloze": 4.0,
    "letter": 5.0,
    "letter_lookup": 2.0,
    "acceptability": 1.0,
    "entailment": 1.0,
    "paraphrase": 1.0,
}
SHORTEST_ITEM = 8
LINKED_NEEDLE_WORDS = 28  # the same with links, which are a little longer
DENSE_NEEDLE_WORDS = 24  # one needle sentence and one question with its answer, on average, and some haystack
MOST_PAIRS = 40
LIST_FRAME = 6  # words of a key-value list that are not keys or values
SHORTEST_LIST = LIST_FRAME + 8
SHORTEST_ANY_PAIRS = LIST_FRAME + 10  # two pairs, named in a question of nine words with one answer
FEW, MOST_FEW = "few_", 4  # rows of two to four needles of one kind, in the layout that follows
NEEDLE_WORDS = max(len(kind.sentence) + kind.length + 1 for kind in RELATIONS.values())
SHORTEST_QUESTION_FIRST = 48  # any needle, its question, its answer in either form, some haystack
SHORTEST_LETTERS = 32  # four options and one question with its answer
NAMING_SHARE = 0.4
QUOTE_SHARE = 0.15
ONE_RELATION_SHARE = 0.7


def _hidden(stream: Stream, count: int, relations: tuple[str, ...]) -> list[Needle]:
    """Needles for one document: mostly of one relation; else mixed, and then one name may hold several values.

    At most one for each name, and fewer of a relation that has few values: a long document has more haystack instead.
    """
    count = min(count, len(w.NAMES))
    if stream.chance(ONE_RELATION_SHARE):
        kinds = [stream.pick(relations)] * count
        names = stream.distinct(w.NAMES, count)
    else:
        kinds = [stream.pick(relations) for _ in range(count)]
        names = [stream.pick(w.NAMES) for _ in range(count)]
    hidden: dict[tuple[str, str], Needle] = {}
    for kind, name in zip(kinds, names, strict=True):
        taken = [needle.value for needle in hidden.values() if needle.relation == kind]
        if len(taken) < RELATIONS[kind].most:
            hidden[kind, name] = Needle(kind, name, fresh_values(stream, kind, 1, taken)[0])
    return list(hidden.values())


def _needle_row(stream: Stream, row: Row, kind: str, relations: tuple[str, ...]) -> None:
    layout = kind if kind in LAYOUTS else "plain"
    copies = 2 if layout == "jrt" else 1
    room = row.room // copies
    most = max(1, (room - 6) // (LINKED_NEEDLE_WORDS if kind == "linked" else DENSE_NEEDLE_WORDS))
    count = most if kind in ("dense", "linked") else min(most, stream.pick((1, 2, 3, 4, 6, 9)))
    hidden = links.with_links(stream, count, relations) if kind == "linked" else _hidden(stream, count, relations)
    asked = stream.mixed(range(len(hidden)))
    if kind not in ("dense", "linked"):
        asked = asked[:4]
    forms = [(stream.below(2), stream.chance(0 if kind == "linked" else QUOTE_SHARE)) for _ in asked]
    blocks = [
        (hidden[i].question(form), tuple(hidden[i].sentence()[:-1]) if quote else hidden[i].value)
        for i, (form, quote) in zip(asked, forms, strict=True)
    ]
    later = sum(len(question) + 2 + len(answer) + 1 for question, answer in blocks[1:])
    first = copies * (2 + len(blocks[0][0])) + 2 + len(blocks[0][1]) + 1
    context = (row.room - first - later) // copies
    room = max(context, sum(len(needle.sentence()) for needle in hidden))
    place = scene(stream, hidden, room, ordered=kind == "linked")
    row.add_sample(ask(stream, place, asked[0], layout=layout, form=forms[0][0], quote=forms[0][1]))
    for (question, answer), (_, quote) in zip(blocks[1:], forms[1:], strict=True):
        row.add([*question, "quote" if quote else "answer", ":"])
        row.add_answer(answer, ".")


def _question_first_row(stream: Stream, row: Row, relations: tuple[str, ...]) -> None:
    """Mostly several short documents, each with its question in front: one long one has a single answer to learn from."""
    while row.room >= SHORTEST_QUESTION_FIRST or len(row.words) == 1:
        room = min(row.room, stream.pick((48, 64, 96, row.length)))
        hidden = _hidden(stream, stream.between(1, min(6, room // DENSE_NEEDLE_WORDS + 1)), relations)
        form, quote = stream.below(2), stream.chance(QUOTE_SHARE)
        asked = stream.pick(hidden)
        answer = len(asked.sentence() if quote else asked.value) + 1
        context = room - len(asked.question(form)) - 4 - answer
        while sum(len(needle.sentence()) for needle in hidden) > context:
            hidden.remove(next(needle for needle in hidden if needle != asked))
        place = scene(stream, hidden, context)
        row.add_sample(ask(stream, place, hidden.index(asked), layout="question_first", form=form, quote=quote))


def _few_row(stream: Stream, row: Row, layout: str, relations: tuple[str, ...]) -> None:
    """One document of two to four needles of one kind, and one question: in the shortest there is next to nothing else.

    A recurrent model without attention first has to learn that a name which it holds opens its memory for what follows it in the
    text; one needle alone teaches it to keep any value, and many to guess. Where two readings of two needles have no room, the
    question comes first instead.
    """
    relation, form = stream.pick(relations), stream.below(2)
    kind = RELATIONS[relation]
    room, frame = row.room - 2 - kind.length - 1, 2 + len(kind.questions[form]) + 2
    if layout == "jrt" and room // 2 - frame < 2 * NEEDLE_WORDS:
        layout = "question_first"
    context = room // (2 if layout == "jrt" else 1) - frame
    count = max(2, min(stream.between(2, MOST_FEW), context // NEEDLE_WORDS))
    hidden = needles(stream, relation, count)
    place = scene(stream, hidden, max(context, sum(len(needle.sentence()) for needle in hidden)))
    row.add_sample(ask(stream, place, stream.below(count), layout=layout, form=form))


def _pairs_row(stream: Stream, row: Row) -> None:
    while row.room >= SHORTEST_LIST:
        # Short lists are the common ones: with two or three keys the right one is found by chance often enough
        # for look-up by key to be learnt at all; long lists alone taught nothing.
        longest = min(MOST_PAIRS, (row.room - LIST_FRAME) // 4)
        pairs = stream.between(2, stream.between(2, longest))
        row.add_series(recall.key_values(stream, pairs, pairs))
        row.add((".",))


def _any_pairs_row(stream: Stream, row: Row) -> None:
    while row.room >= SHORTEST_ANY_PAIRS:
        row.add_lines(recall.any_pairs(stream, (row.room - LIST_FRAME) // 4), "")
        row.add((".",))


def _recall_row(stream: Stream, row: Row, kind: str, items: dict[str, float]) -> None:
    """A phone book or a text to copy; what room is left is filled with small texts."""
    if kind == "phone":
        entries = max(1, stream.between(1, min(len(w.NAMES), (row.room - 4) // 22)))
        row.add_series(recall.phone_book(stream, entries, max(1, min(entries, (row.room - 4 - 6 * entries) // 17))))
    else:
        row.add_sample(recall.copying(stream, stream.between(4, min(60, (row.room - 6) // 2))))
    _short_row(stream, row, items)


def _item(stream: Stream, kind: str) -> Sample | list[str]:
    if kind == "sentence":
        return sentence(stream)
    if kind == "statement":
        return facts.statement(stream)
    if kind == "cloze":
        return facts.cloze(stream)
    if kind == "letter":
        return facts.letter_choice(stream)
    if kind == "letter_lookup":
        return facts.letter_lookup(stream)
    return judgements.judgement(stream, kind)


def _letter_row(stream: Stream, row: Row, items: dict[str, float]) -> None:
    """Lists of two to four lettered options, each asked for all of its letters, by naming the option or by a fact."""
    while row.room >= SHORTEST_LETTERS:
        row.add_lines(facts.letter_lines(stream, NAMING_SHARE), ".")
    _short_row(stream, row, items)


def _short_row(stream: Stream, row: Row, items: dict[str, float]) -> None:
    """Fill the rest of a row with small texts; the last few words may stay empty."""
    misses = 0
    while row.room >= SHORTEST_ITEM and misses < 4:
        item = _item(stream, stream.weighted(items))
        if isinstance(item, Sample):
            if len(item.prompt) + len(item.target) + 1 > row.room:
                misses += 1
                continue
            row.add_sample(item)
        elif len(item) <= row.room:
            row.add(item)


def row(stream: Stream, length: int, diet: Diet) -> tuple[list[str], list[float]]:
    """One document of at most `length` words, BOS included, and the loss weight of predicting each of them; cut at the length."""
    kind = stream.weighted(diet.rows)
    document = Row(length, diet.answer_weight)
    if kind == "short":
        _short_row(stream, document, diet.items)
    elif kind == "question_first":
        _question_first_row(stream, document, diet.relations)
    elif kind.startswith(FEW):
        _few_row(stream, document, kind.removeprefix(FEW), diet.relations)
    elif kind == "letters":
        _letter_row(stream, document, diet.items)
    elif kind == "pairs":
        _pairs_row(stream, document)
    elif kind == "any_pairs":
        _any_pairs_row(stream, document)
    elif kind == "short_links":
        links.short_links_row(stream, document, diet.relations)
    elif kind == "hops":
        links.hops_row(stream, document, diet)
    elif kind == "variables":
        links.variables_row(stream, document)
    elif kind in ("phone", "copy"):
        _recall_row(stream, document, kind, diet.items)
    else:
        _needle_row(stream, document, kind, diet.relations)
    return document.words[:length], document.weights[:length]


def batch(seed: int, step: int, rows: int, length: int, diet: Diet) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and loss weights of one training step, [rows, length] each; padding has weight 0."""
    ids = np.full((rows, length), w.WORD_ID[w.PAD], dtype=np.int64)
    weights = np.zeros((rows, length), dtype=np.float32)
    for i in range(rows):
        words, row_weights = row(Stream(TRAIN_SPLIT, seed, step, i), length, diet)
        ids[i, : len(words)] = [w.WORD_ID[word] for word in words]
        weights[i, : len(words)] = row_weights
    return ids, weights
