"""Generate training documents: rows of one length, built from the same samples as the tasks, with answers weighted in the loss.

A row is a pure function of (seed, step, row number), so a resumed training gets the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from needlework.toy import facts, needles
from needlework.toy import words as w
from needlework.toy.needles import RELATION_NAMES, RELATIONS, Needle, ask_about, hide_needles, make_needles
from needlework.toy.sample import TRAIN_SPLIT, Stream, ToySample, Words

# Part of every recipe hash: increment it when the documents of a given (seed, step) change.
DATA_VERSION = 2

# Kinds of item in a "short" row, which is a sequence of short texts: a maker, and the default share.
_ITEMS: dict[str, tuple[Callable[[Stream], ToySample | list[str]], float]] = {
    "sentence": (needles.make_sentence, 1.0),
    "statement": (facts.make_statement, 2.0),
    "cloze": (facts.make_cloze, 4.0),
    "letter": (facts.make_letter_choice, 5.0),
    "letter_lookup": (facts.make_letter_lookup, 2.0),
    **{kind: (partial(facts.make_judgement, kind=kind), 1.0) for kind in facts.JUDGEMENTS},
}
ITEM_KINDS = tuple(_ITEMS)
ITEM_SHARES = {kind: share for kind, (_, share) in _ITEMS.items()}
SHORTEST_ITEM = 8
LINKED_NEEDLE_WORDS = 28  # as DENSE_NEEDLE_WORDS, for links, which are longer
DENSE_NEEDLE_WORDS = 24  # mean length of a needle sentence and a question with its answer, and some haystack
MOST_PAIRS = 40
LIST_FRAME = 6  # words of a key-value list besides keys and values
SHORTEST_LIST = LIST_FRAME + 8
SHORTEST_ANY_PAIRS = LIST_FRAME + 10  # two pairs, and a question of nine words with one answer
MOST_FEW = 4  # needles of a "few_..." row
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

    def add(self, words: Sequence[str], weight: float = 1.0) -> None:
        self.words += words
        self.weights += [weight] * len(words)

    def add_answer(self, target: Sequence[str], stop: str = ".") -> None:
        self.add(target, self.answer_weight)
        self.add((stop,) if stop else ())

    def add_samples(self, *samples: ToySample) -> None:
        """Add samples each of whose prompts continues the previous sample."""
        start = len(self.words)
        for sample in samples:
            self.add(sample.prompt[len(self.words) - start :])
            self.add_answer(sample.target, sample.stop)

    def add_question(self, needle: Needle, form: int, quote: bool = False) -> None:
        """Add a further question about the context of the previous sample, with its answer."""
        self.add([*needle.question(form), "quote" if quote else "answer", ":"])
        self.add_answer(_answer(needle, quote))

    def add_lines(self, lines: list[tuple[list[str], Words]], stop: str) -> None:
        """Add pairs of words and answer in order, as long as they fit."""
        for words, answer in lines:
            if len(words) + len(answer) + 1 > self.room:
                break
            self.add(words)
            self.add_answer(answer, stop)


def _answer(needle: Needle, quote: bool) -> Sequence[str]:
    return needle.sentence()[:-1] if quote else needle.value


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
            hidden[kind, name] = Needle(kind, name, needles.draw_values(stream, kind, 1, taken)[0])
    return list(hidden.values())


def _add_needles(stream: Stream, row: TrainingRow, mix: DocumentMix, kind: str) -> None:
    """Add one document that fills the row, with questions about several of its needles."""
    linked, layout = kind == "linked", kind if kind in needles.LAYOUTS else "plain"
    copies = 2 if layout == "jrt" else 1
    most = max(1, (row.room // copies - 6) // (LINKED_NEEDLE_WORDS if linked else DENSE_NEEDLE_WORDS))
    count = most if kind in ("dense", "linked") else min(most, stream.pick((1, 2, 3, 4, 6, 9)))
    hidden = _make_linked_needles(stream, count, mix.relations) if linked else _draw_needles(stream, count, mix.relations)
    chosen = stream.mixed(range(len(hidden)))
    chosen = chosen if kind in ("dense", "linked") else chosen[:4]
    asked = [(i, stream.below(2), stream.chance(0 if linked else QUOTE_SHARE)) for i in chosen]
    sizes = [(len(hidden[i].question(form)) + 2, len(_answer(hidden[i], quote)) + 1) for i, form, quote in asked]
    later = sum(map(sum, sizes[1:]))
    context = (row.room - copies * sizes[0][0] - 2 - sizes[0][1] - later) // copies
    place = hide_needles(stream, hidden, max(context, _count_words(hidden)), ordered=linked)
    first, form, quote = asked[0]
    row.add_samples(ask_about(stream, place, first, layout=layout, form=form, quote=quote))
    for i, form, quote in asked[1:]:
        row.add_question(hidden[i], form, quote)


def _count_words(hidden: list[Needle]) -> int:
    return sum(len(needle.sentence()) for needle in hidden)


def _add_question_first(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Fill a row with documents whose question comes first; most are short, because a long one has only one answer."""
    while row.room >= SHORTEST_QUESTION_FIRST or len(row.words) == 1:
        room = min(row.room, stream.pick((48, 64, 96, row.length)))
        hidden = _draw_needles(stream, stream.between(1, min(6, room // DENSE_NEEDLE_WORDS + 1)), mix.relations)
        form, quote = stream.below(2), stream.chance(QUOTE_SHARE)
        asked = stream.pick(hidden)
        context = room - len(asked.question(form)) - 5 - len(asked.sentence() if quote else asked.value)
        while _count_words(hidden) > context:
            hidden.remove(next(needle for needle in hidden if needle != asked))
        place = hide_needles(stream, hidden, context)
        row.add_samples(ask_about(stream, place, hidden.index(asked), layout="question_first", form=form, quote=quote))


def _add_few_needles(stream: Stream, row: TrainingRow, mix: DocumentMix, layout: str) -> None:
    """Add one document with two to four needles of one kind and one question.

    A recurrent model without attention first has to learn to store what follows the name that it was given; with a single needle
    it learns to store any value, with many it learns to guess. Where two copies of two needles do not fit ("jrt"), the question
    comes first instead.
    """
    relation, form = stream.pick(mix.relations), stream.below(2)
    kind = RELATIONS[relation]
    room, frame = row.room - 2 - kind.length - 1, 2 + len(kind.questions[form]) + 2
    if layout == "jrt" and room // 2 - frame < 2 * NEEDLE_WORDS:
        layout = "question_first"
    context = room // (2 if layout == "jrt" else 1) - frame
    count = max(2, min(stream.between(2, MOST_FEW), context // NEEDLE_WORDS))
    hidden = make_needles(stream, relation, count)
    place = hide_needles(stream, hidden, max(context, _count_words(hidden)))
    row.add_samples(ask_about(stream, place, stream.below(count), layout=layout, form=form))


def _add_pairs(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    while row.room >= SHORTEST_LIST:
        # Most lists are short: with two or three keys, chance is correct often enough for look-up by key to be learnt.
        # Training on long lists only did not learn it.
        longest = min(MOST_PAIRS, (row.room - LIST_FRAME) // 4)
        pairs = stream.between(2, stream.between(2, longest))
        row.add_samples(*needles.make_key_values(stream, pairs, pairs))
        row.add((".",))


def _add_any_pairs(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    while row.room >= SHORTEST_ANY_PAIRS:
        row.add_lines(needles.make_any_pairs(stream, (row.room - LIST_FRAME) // 4), "")
        row.add((".",))


def _add_phone_book(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    entries = max(1, stream.between(1, min(len(w.NAMES), (row.room - 4) // 22)))
    row.add_samples(*needles.make_phone_book(stream, entries, max(1, min(entries, (row.room - 4 - 6 * entries) // 17))))
    _add_short_items(stream, row, mix)


def _add_copy(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    row.add_samples(needles.make_copy(stream, stream.between(4, min(60, (row.room - 6) // 2))))
    _add_short_items(stream, row, mix)


def _add_letters(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Add lists of two to four lettered options with a question for each letter, which names the option or a fact about it."""
    while row.room >= SHORTEST_LETTERS:
        row.add_lines(facts.make_letter_lines(stream, NAMING_SHARE), ".")
    _add_short_items(stream, row, mix)


def _add_short_items(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Fill the rest of a row with short items; the last few words may stay padding."""
    misses = 0
    while row.room >= SHORTEST_ITEM and misses < 4:
        make, _ = _ITEMS[stream.weighted(mix.items)]
        item = make(stream)
        if not isinstance(item, ToySample):
            row.add(item if len(item) <= row.room else ())
        elif len(item.prompt) + len(item.target) + 1 <= row.room:
            row.add_samples(item)
        else:
            misses += 1


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


def _add_variables(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Add chains of names that share a code, and ask for all names with a code, as in RULER's variable tracking."""
    hops = stream.between(1, 2 if row.room >= 3 * VARIABLE_WORDS else 1)
    chains = max(1, min(4, (row.room - 12) // ((hops + 1) * VARIABLE_WORDS)))
    row.add_samples(*needles.make_variable_chains(stream, chains=chains, hops=hops, room=row.room))


def _add_short_links(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Fill a row with short documents of up to three needles and a link to each; questions are about the links only.

    In long documents the correct value is one of many and half of the questions need no link, so that two-step look-up is
    hardly ever rewarded.
    """
    while row.room >= SHORTEST_LINKS or len(row.words) == 1:
        room = min(row.room, stream.pick((SHORTEST_LINKS, 80, 96, 128)))
        plain = 1 if room < SHORTEST_LINKS else 2 if room < 80 else stream.between(2, 3)
        hidden = needles.add_links(stream, make_needles(stream, stream.pick(mix.relations), plain), 1)
        asked = stream.mixed(range(plain, 2 * plain))[: max(1, room // 48)]
        questions = [(hidden[i], stream.below(2)) for i in asked]
        spent = 2 + sum(len(needle.question(form)) + 3 + len(needle.value) for needle, form in questions)
        place = hide_needles(stream, hidden, max(_count_words(hidden), room - spent), ordered=True)
        row.add_samples(ask_about(stream, place, asked[0], form=questions[0][1]))
        for needle, form in questions[1:]:
            row.add_question(needle, form)


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
        context = max(_count_words(hidden), room - 2 - len(asked) * a_question)
        place = hide_needles(stream, hidden, context, ordered=True)
        start = len(row.words) + 2
        row.add_samples(ask_about(stream, place, asked[0][0], form=asked[0][1]))
        for needle, at in zip(hidden, place.starts, strict=True):
            if needle.said:
                end = start + at + len(needle.sentence()) - 1
                row.weights[end - kind.length : end] = [row.answer_weight] * kind.length
        for i, form in asked[1:]:
            row.add_question(hidden[i], form)


def _size_with_values(stream: Stream, kind: needles.Relation, room: int, a_question: int, names: int) -> tuple[int, int, int]:
    """Return numbers of needles, links with stated values and questions; mostly links, because each trains as an answer."""
    a_plain, a_link = (len(text) + kind.length + 1 for text in (kind.sentence, kind.link))
    fewest = 1 if room < SHORTEST_LINKS - 2 else 2
    questions = 1 if room < 94 else stream.between(1, 3)
    left = room - questions * a_question - fewest * a_plain
    most = max(1, min(left // a_link, names // 2))
    links = stream.between(min(2, most), most)
    plain = fewest + stream.below(max(0, left - links * a_link) // a_plain + 1)
    return min(plain, names - links, kind.most), links, questions


def _size_without_values(stream: Stream, kind: needles.Relation, room: int, a_question: int, names: int) -> tuple[int, int, int]:
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


# Kinds of row, i.e. layouts of a whole document, and the functions that fill a row.
_ROWS: dict[str, Callable[[Stream, TrainingRow, DocumentMix], None]] = {
    **{kind: partial(_add_needles, kind=kind) for kind in ("dense", "sparse", "jrt")},
    "question_first": _add_question_first,
    "pairs": _add_pairs,
    "any_pairs": _add_any_pairs,
    "phone": _add_phone_book,
    "copy": _add_copy,
    "letters": _add_letters,
    "short": _add_short_items,
    "linked": partial(_add_needles, kind="linked"),
    "short_links": _add_short_links,
    "variables": _add_variables,
    **{f"few_{layout}": partial(_add_few_needles, layout=layout) for layout in needles.LAYOUTS},
    "hops": _add_hops,
}
ROW_KINDS = tuple(_ROWS)


def make_row(stream: Stream, length: int, mix: DocumentMix) -> tuple[list[str], list[float]]:
    """Return the words of one row, BOS first and truncated to `length`, and the loss weight of predicting each word."""
    fill, row = _ROWS[stream.weighted(mix.rows)], TrainingRow(length, mix.answer_weight)
    fill(stream, row, mix)
    return row.words[:length], row.weights[:length]


def make_batch(seed: int, step: int, rows: int, length: int, mix: DocumentMix) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return token ids and loss weights of one training step, [rows, length] each; padding has weight 0."""
    ids = np.full((rows, length), w.WORD_ID[w.PAD], dtype=np.int64)
    weights = np.zeros((rows, length), dtype=np.float32)
    for i in range(rows):
        words, row_weights = make_row(Stream(TRAIN_SPLIT, seed, step, i), length, mix)
        ids[i, : len(words)] = [w.WORD_ID[word] for word in words]
        weights[i, : len(words)] = row_weights
    return ids, weights
