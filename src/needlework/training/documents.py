"""Generate training documents: rows of one length, built from the same samples as the tasks, with answers weighted in the loss.

A row is a pure function of (seed, step, row number), so a resumed training gets the same data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from needlework.toy import facts, judgements, recall
from needlework.toy import words as w
from needlework.toy.needles import (
    LAYOUTS,
    RELATION_NAMES,
    RELATIONS,
    Needle,
    Relation,
    add_links,
    ask_about,
    draw_values,
    hide_needles,
    make_needles,
    make_sentence,
    make_variable_chains,
)
from needlework.toy.sample import TRAIN_SPLIT, Stream, ToySample, Words

# Part of every recipe hash: increment it when the documents of a given (seed, step) change.
DATA_VERSION = 2

# Kinds of row: the layout of a whole document.
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
# Kinds of item in a "short" row, which is a sequence of short texts.
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
LINKED_NEEDLE_WORDS = 28  # as DENSE_NEEDLE_WORDS, for links, which are longer
DENSE_NEEDLE_WORDS = 24  # mean length of a needle sentence and a question with its answer, and some haystack
MOST_PAIRS = 40
LIST_FRAME = 6  # words of a key-value list besides keys and values
SHORTEST_LIST = LIST_FRAME + 8
SHORTEST_ANY_PAIRS = LIST_FRAME + 10  # two pairs, and a question of nine words with one answer
FEW, MOST_FEW = "few_", 4  # prefix of rows of two to four needles, before the name of their layout
NEEDLE_WORDS = max(len(kind.sentence) + kind.length + 1 for kind in RELATIONS.values())
SHORTEST_QUESTION_FIRST = 48  # one needle of any kind, its question, its answer (value or quote), some haystack
SHORTEST_LETTERS = 32  # four options and one question with its answer
NAMING_SHARE = 0.4
QUOTE_SHARE = 0.15
ONE_RELATION_SHARE = 0.7
VARIABLE_WORDS = 22  # one sentence of a chain and its share of the chain's question
SHORTEST_LINKS = 64  # two needles, a link to each, and one question with its answer
LINK_TO_LINK_SHARE = 0.5  # share of the links with a stated value that may refer to any needle or link
ONE_HOP_SHARE = 0.3  # share of the documents without stated values that also ask about a plain needle


@dataclass(frozen=True)
class DocumentMix:
    """Composition of a stage's documents: shares of row kinds, shares of items in short rows, loss weight of answers."""

    rows: dict[str, float]
    items: dict[str, float]
    answer_weight: float
    relations: tuple[str, ...] = RELATION_NAMES
    names: int = len(w.NAMES)  # number of names that "hops" documents use
    said: float = 0.5  # share of the "hops" documents whose links state the value of the name they refer to


class TrainingRow:
    """A training row under construction: words and their loss weights, up to a fixed length."""

    def __init__(self, length: int, answer_weight: float) -> None:
        self.length = length
        self.answer_weight = answer_weight
        self.words: list[str] = [w.BOS]
        self.weights: list[float] = [0.0]

    @property
    def room(self) -> int:
        return self.length - len(self.words)

    def add(self, words: list[str] | tuple[str, ...], weight: float = 1.0) -> None:
        self.words += words
        self.weights += [weight] * len(words)

    def add_answer(self, target: tuple[str, ...], stop: str) -> None:
        self.add(target, self.answer_weight)
        if stop:
            self.add((stop,))

    def add_sample(self, sample: ToySample) -> None:
        self.add(sample.prompt)
        self.add_answer(sample.target, sample.stop)

    def add_series(self, samples: list[ToySample]) -> None:
        """Add samples each of whose prompts continues the previous sample."""
        start = len(self.words)
        for sample in samples:
            self.add(sample.prompt[len(self.words) - start :])
            self.add_answer(sample.target, sample.stop)

    def add_lines(self, lines: list[tuple[list[str], Words]], stop: str) -> None:
        """Add pairs of words and answer in order, as long as they fit."""
        for words, answer in lines:
            if len(words) + len(answer) + 1 > self.room:
                break
            self.add(words)
            self.add_answer(answer, stop)


def _draw_needles(stream: Stream, count: int, relations: tuple[str, ...]) -> list[Needle]:
    """Draw at most `count` needles for one document, mostly of one relation, otherwise of mixed relations.

    A name has at most one needle of each relation. A relation with few values has fewer needles; the haystack fills the rest.
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
            hidden[kind, name] = Needle(kind, name, draw_values(stream, kind, 1, taken)[0])
    return list(hidden.values())


def _add_needles(stream: Stream, row: TrainingRow, kind: str, relations: tuple[str, ...]) -> None:
    layout = kind if kind in LAYOUTS else "plain"
    copies = 2 if layout == "jrt" else 1
    room = row.room // copies
    most = max(1, (room - 6) // (LINKED_NEEDLE_WORDS if kind == "linked" else DENSE_NEEDLE_WORDS))
    count = most if kind in ("dense", "linked") else min(most, stream.pick((1, 2, 3, 4, 6, 9)))
    hidden = _make_linked_needles(stream, count, relations) if kind == "linked" else _draw_needles(stream, count, relations)
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
    place = hide_needles(stream, hidden, room, ordered=kind == "linked")
    row.add_sample(ask_about(stream, place, asked[0], layout=layout, form=forms[0][0], quote=forms[0][1]))
    for (question, answer), (_, quote) in zip(blocks[1:], forms[1:], strict=True):
        row.add([*question, "quote" if quote else "answer", ":"])
        row.add_answer(answer, ".")


def _add_question_first(stream: Stream, row: TrainingRow, relations: tuple[str, ...]) -> None:
    """Fill a row with documents whose question comes first; most are short, because a long one has only one answer."""
    while row.room >= SHORTEST_QUESTION_FIRST or len(row.words) == 1:
        room = min(row.room, stream.pick((48, 64, 96, row.length)))
        hidden = _draw_needles(stream, stream.between(1, min(6, room // DENSE_NEEDLE_WORDS + 1)), relations)
        form, quote = stream.below(2), stream.chance(QUOTE_SHARE)
        asked = stream.pick(hidden)
        answer = len(asked.sentence() if quote else asked.value) + 1
        context = room - len(asked.question(form)) - 4 - answer
        while sum(len(needle.sentence()) for needle in hidden) > context:
            hidden.remove(next(needle for needle in hidden if needle != asked))
        place = hide_needles(stream, hidden, context)
        row.add_sample(ask_about(stream, place, hidden.index(asked), layout="question_first", form=form, quote=quote))


def _add_few_needles(stream: Stream, row: TrainingRow, layout: str, relations: tuple[str, ...]) -> None:
    """Add one document with two to four needles of one kind and one question.

    A recurrent model without attention first has to learn to store what follows the name that it was given; with a single needle
    it learns to store any value, with many it learns to guess. Where two copies of two needles do not fit ("jrt"), the question
    comes first instead.
    """
    relation, form = stream.pick(relations), stream.below(2)
    kind = RELATIONS[relation]
    room, frame = row.room - 2 - kind.length - 1, 2 + len(kind.questions[form]) + 2
    if layout == "jrt" and room // 2 - frame < 2 * NEEDLE_WORDS:
        layout = "question_first"
    context = room // (2 if layout == "jrt" else 1) - frame
    count = max(2, min(stream.between(2, MOST_FEW), context // NEEDLE_WORDS))
    hidden = make_needles(stream, relation, count)
    place = hide_needles(stream, hidden, max(context, sum(len(needle.sentence()) for needle in hidden)))
    row.add_sample(ask_about(stream, place, stream.below(count), layout=layout, form=form))


def _add_pairs(stream: Stream, row: TrainingRow) -> None:
    while row.room >= SHORTEST_LIST:
        # Most lists are short: with two or three keys, chance is correct often enough for look-up by key to be learnt.
        # Training on long lists only did not learn it.
        longest = min(MOST_PAIRS, (row.room - LIST_FRAME) // 4)
        pairs = stream.between(2, stream.between(2, longest))
        row.add_series(recall.make_key_values(stream, pairs, pairs))
        row.add((".",))


def _add_any_pairs(stream: Stream, row: TrainingRow) -> None:
    while row.room >= SHORTEST_ANY_PAIRS:
        row.add_lines(recall.make_any_pairs(stream, (row.room - LIST_FRAME) // 4), "")
        row.add((".",))


def _add_recall(stream: Stream, row: TrainingRow, kind: str, items: dict[str, float]) -> None:
    """Add a phone book or a text to copy, and fill the rest of the row with short items."""
    if kind == "phone":
        entries = max(1, stream.between(1, min(len(w.NAMES), (row.room - 4) // 22)))
        row.add_series(recall.make_phone_book(stream, entries, max(1, min(entries, (row.room - 4 - 6 * entries) // 17))))
    else:
        row.add_sample(recall.make_copy(stream, stream.between(4, min(60, (row.room - 6) // 2))))
    _add_short_items(stream, row, items)


def _make_item(stream: Stream, kind: str) -> ToySample | list[str]:
    if kind == "sentence":
        return make_sentence(stream)
    if kind == "statement":
        return facts.make_statement(stream)
    if kind == "cloze":
        return facts.make_cloze(stream)
    if kind == "letter":
        return facts.make_letter_choice(stream)
    if kind == "letter_lookup":
        return facts.make_letter_lookup(stream)
    return judgements.make_judgement(stream, kind)


def _add_letters(stream: Stream, row: TrainingRow, items: dict[str, float]) -> None:
    """Add lists of two to four lettered options with a question for each letter, which names the option or a fact about it."""
    while row.room >= SHORTEST_LETTERS:
        row.add_lines(facts.make_letter_lines(stream, NAMING_SHARE), ".")
    _add_short_items(stream, row, items)


def _add_short_items(stream: Stream, row: TrainingRow, items: dict[str, float]) -> None:
    """Fill the rest of a row with short items; the last few words may stay padding."""
    misses = 0
    while row.room >= SHORTEST_ITEM and misses < 4:
        item = _make_item(stream, stream.weighted(items))
        if isinstance(item, ToySample):
            if len(item.prompt) + len(item.target) + 1 > row.room:
                misses += 1
                continue
            row.add_sample(item)
        elif len(item) <= row.room:
            row.add(item)


# --- Documents with links from one name to another ---


def _make_linked_needles(stream: Stream, count: int, relations: tuple[str, ...]) -> list[Needle]:
    """Return needles of one relation, and links to them or to other links; a value is at most two links away from a name."""
    relation = stream.pick(relations)
    count = max(2, min(count, len(w.NAMES), 2 * RELATIONS[relation].most))
    plain = stream.between(max(1, count // 3), max(1, min(2 * count // 3, RELATIONS[relation].most)))
    hidden = make_needles(stream, relation, plain)
    spare = [name for name in w.NAMES if name not in {needle.name for needle in hidden}]
    far: set[str] = set()  # names that are two links away from their value
    for name in stream.distinct(spare, count - plain):
        other = stream.pick([needle for needle in hidden if needle.name not in far])
        hidden.append(Needle(relation, name, other.value, like=other.name))
        if other.like:
            far.add(name)
    return hidden


def _add_variables(stream: Stream, row: TrainingRow) -> None:
    """Add chains of names that share a code, and ask for all names with a code, as in RULER's variable tracking."""
    hops = stream.between(1, 2 if row.room >= 3 * VARIABLE_WORDS else 1)
    chains = max(1, min(4, (row.room - 12) // ((hops + 1) * VARIABLE_WORDS)))
    row.add_series(make_variable_chains(stream, chains=chains, hops=hops, room=row.room))


def _add_short_links(stream: Stream, row: TrainingRow, relations: tuple[str, ...]) -> None:
    """Fill a row with short documents of up to three needles and a link to each; questions are about the links only.

    In long documents the correct value is one of many and half of the questions need no link, so that two-step look-up is
    hardly ever rewarded.
    """
    while row.room >= SHORTEST_LINKS or len(row.words) == 1:
        room = min(row.room, stream.pick((SHORTEST_LINKS, 80, 96, 128)))
        plain = 1 if room < SHORTEST_LINKS else 2 if room < 80 else stream.between(2, 3)
        hidden = add_links(stream, make_needles(stream, stream.pick(relations), plain), 1)
        asked = stream.mixed(range(plain, 2 * plain))[: max(1, room // 48)]
        forms = [stream.below(2) for _ in asked]
        questions = [hidden[i].question(form) for i, form in zip(asked, forms, strict=True)]
        spent = 2 + sum(len(question) + 3 + len(hidden[0].value) for question in questions)
        sentences = sum(len(needle.sentence()) for needle in hidden)
        place = hide_needles(stream, hidden, max(sentences, room - spent), ordered=True)
        row.add_sample(ask_about(stream, place, asked[0], form=forms[0]))
        for i, question in zip(asked[1:], questions[1:], strict=True):
            row.add([*question, "answer", ":"])
            row.add_answer(hidden[i].value, ".")


def _add_hops(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Fill a row with documents of links that state their value in the text, or of links that do not.

    A stated value is weighted as an answer: the model has to look it up while it processes the link, which trains the first of
    two look-ups separately. Without stated values, there are as many questions as links.
    """
    names = w.NAMES[: mix.names]
    while row.room >= SHORTEST_LINKS or len(row.words) == 1:
        room = min(row.room, stream.pick((SHORTEST_LINKS, 96, row.length)))
        says = stream.chance(mix.said)
        kind = RELATIONS[stream.pick(mix.relations)]
        a_question = 4 + max(map(len, kind.questions)) + kind.length + 1
        choose_sizes = _size_with_values if says else _size_without_values
        plain, links, questions = choose_sizes(stream, kind, room - 2, a_question, len(names))
        hidden = _link_needles(stream, make_needles(stream, kind.name, plain, names), names, links, says)
        asked = [(i, stream.below(2)) for i in stream.mixed(range(0 if says else plain, len(hidden)))[:questions]]
        if not says and stream.chance(ONE_HOP_SHARE):
            asked[0] = (stream.below(plain), asked[0][1])
        sentences = sum(len(needle.sentence()) for needle in hidden)
        place = hide_needles(stream, hidden, max(sentences, room - 2 - len(asked) * a_question), ordered=True)
        start = len(row.words) + 2
        row.add_sample(ask_about(stream, place, asked[0][0], form=asked[0][1]))
        for needle, at in zip(hidden, place.starts, strict=True):
            if needle.said:
                end = start + at + len(needle.sentence()) - 1
                row.weights[end - kind.length : end] = [row.answer_weight] * kind.length
        for i, form in asked[1:]:
            row.add([*hidden[i].question(form), "answer", ":"])
            row.add_answer(hidden[i].value, ".")


def _size_with_values(stream: Stream, kind: Relation, room: int, a_question: int, names: int) -> tuple[int, int, int]:
    """Return numbers of needles, links with stated values and questions; mostly links, because each trains as an answer."""
    a_plain, a_link = (len(text) + kind.length + 1 for text in (kind.sentence, kind.link))
    fewest = 1 if room < SHORTEST_LINKS - 2 else 2
    questions = 1 if room < 94 else stream.between(1, 3)
    left = room - questions * a_question - fewest * a_plain
    most = max(1, min(left // a_link, names // 2))
    links = stream.between(min(2, most), most)
    plain = fewest + stream.below(max(0, left - links * a_link) // a_plain + 1)
    return min(plain, names - links, kind.most), links, questions


def _size_without_values(stream: Stream, kind: Relation, room: int, a_question: int, names: int) -> tuple[int, int, int]:
    """Return equal numbers of needles, links without stated values and questions."""
    a_plain, a_link = len(kind.sentence) + kind.length + 1, len(kind.link) + 1
    most = max(1, min(room // (a_plain + a_link + a_question), names // 2, kind.most))
    count = stream.between(min(2, most), most)
    return count, count, count


def _link_needles(stream: Stream, plain: list[Needle], names: Words, links: int, said: bool) -> list[Needle]:
    """Return the needles and links to them; links with a stated value may also refer to earlier links."""
    spare = [name for name in names if name not in {needle.name for needle in plain}]
    hidden = list(plain)
    for name in stream.distinct(spare, links):
        other = stream.pick(hidden if said and stream.chance(LINK_TO_LINK_SHARE) else plain)
        hidden.append(Needle(other.relation, name, other.value, like=other.name, said=said))
    return hidden


# --- Rows and batches ---


def make_row(stream: Stream, length: int, mix: DocumentMix) -> tuple[list[str], list[float]]:
    """Return the words of one row, BOS first and truncated to `length`, and the loss weight of predicting each word."""
    kind = stream.weighted(mix.rows)
    document = TrainingRow(length, mix.answer_weight)
    if kind == "short":
        _add_short_items(stream, document, mix.items)
    elif kind == "question_first":
        _add_question_first(stream, document, mix.relations)
    elif kind.startswith(FEW):
        _add_few_needles(stream, document, kind.removeprefix(FEW), mix.relations)
    elif kind == "letters":
        _add_letters(stream, document, mix.items)
    elif kind == "pairs":
        _add_pairs(stream, document)
    elif kind == "any_pairs":
        _add_any_pairs(stream, document)
    elif kind == "short_links":
        _add_short_links(stream, document, mix.relations)
    elif kind == "hops":
        _add_hops(stream, document, mix)
    elif kind == "variables":
        _add_variables(stream, document)
    elif kind in ("phone", "copy"):
        _add_recall(stream, document, kind, mix.items)
    else:
        _add_needles(stream, document, kind, mix.relations)
    return document.words[:length], document.weights[:length]


def make_batch(seed: int, step: int, rows: int, length: int, mix: DocumentMix) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return token ids and loss weights of one training step, [rows, length] each; padding has weight 0."""
    ids = np.full((rows, length), w.WORD_ID[w.PAD], dtype=np.int64)
    weights = np.zeros((rows, length), dtype=np.float32)
    for i in range(rows):
        words, row_weights = make_row(Stream(TRAIN_SPLIT, seed, step, i), length, mix)
        ids[i, : len(words)] = [w.WORD_ID[word] for word in words]
        weights[i, : len(words)] = row_weights
    return ids, weights
