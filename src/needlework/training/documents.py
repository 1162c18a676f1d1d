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
from needlework.toy.needles import RELATION_NAMES, RELATIONS, Needle, NeedleContext, ask_about, hide_needles, make_needles
from needlework.toy.sample import TRAIN_SPLIT, Stream, ToySample, Words

# Part of every recipe hash: increment it when the documents of a given (seed, step) change.
DATA_VERSION = 2

Question = tuple[int, int, bool]  # index of a needle, form of the question, whether to quote the whole sentence
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
    def left(self) -> int:
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

    def add_lines(self, lines: list[tuple[list[str], Words]], stop: str) -> None:
        """Add pairs of words and answer in order, as long as they fit."""
        for words, answer in lines:
            if len(words) + len(answer) + 1 > self.left:
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
            hidden[kind, name] = Needle(kind, name, needles.draw_values(stream, kind, 1, taken)[0])
    return list(hidden.values())


def _context_size(size: int, hidden: Sequence[Needle], asked: Sequence[Question], copies: int = 1) -> int:
    """Return how many words of a document are left for each copy of the context; the first question is repeated with it."""
    questions = [len(hidden[i].question(form)) + 2 for i, form, _ in asked]
    answers = sum(len(hidden[i].answer(quote)) + 1 for i, _, quote in asked)
    return (size - 2 - sum(questions) - answers - (copies - 1) * questions[0]) // copies


def _add_document(
    stream: Stream,
    row: TrainingRow,
    hidden: Sequence[Needle],
    asked: Sequence[Question],
    context: int,
    layout: str = "plain",
    ordered: bool = False,
) -> NeedleContext:
    """Add a haystack of about `context` words with these needles, and questions about them with their answers."""
    place = hide_needles(stream, hidden, max(context, sum(len(needle.sentence()) for needle in hidden)), ordered=ordered)
    (first, form, quote), *others = asked
    row.add_samples(ask_about(stream, place, first, layout=layout, form=form, quote=quote))
    for i, form, quote in others:
        row.add([*hidden[i].question(form), "quote" if quote else "answer", ":"])
        row.add_answer(hidden[i].answer(quote))
    return place


def _add_needles(stream: Stream, row: TrainingRow, mix: DocumentMix, kind: str) -> None:
    """Add one document that fills the row, with questions about several of its needles."""
    linked, layout = kind == "linked", kind if kind in needles.LAYOUTS else "plain"
    copies = 2 if layout == "jrt" else 1
    most = max(1, (row.left // copies - 6) // (LINKED_NEEDLE_WORDS if linked else DENSE_NEEDLE_WORDS))
    count = most if kind in ("dense", "linked") else min(most, stream.pick((1, 2, 3, 4, 6, 9)))
    hidden = (_make_linked_needles if linked else _draw_needles)(stream, count, mix.relations)
    chosen = stream.mixed(range(len(hidden)))
    chosen = chosen if kind in ("dense", "linked") else chosen[:4]
    asked = [(i, stream.below(2), stream.chance(0 if linked else QUOTE_SHARE)) for i in chosen]
    _add_document(stream, row, hidden, asked, _context_size(row.left, hidden, asked, copies), layout, ordered=linked)


def _add_question_first(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Fill a row with documents whose question comes first; most are short, because a long one has only one answer."""
    while row.left >= SHORTEST_QUESTION_FIRST or len(row.words) == 1:
        size = min(row.left, stream.pick((48, 64, 96, row.length)))
        hidden = _draw_needles(stream, stream.between(1, min(6, size // DENSE_NEEDLE_WORDS + 1)), mix.relations)
        form, quote = stream.below(2), stream.chance(QUOTE_SHARE)
        needle = stream.pick(hidden)
        context = _context_size(size, [needle], [(0, form, quote)]) - quote  # one word is not used: other data than version 2
        while sum(len(other.sentence()) for other in hidden) > context:
            hidden.remove(next(other for other in hidden if other != needle))
        _add_document(stream, row, hidden, [(hidden.index(needle), form, quote)], context, "question_first")


def _add_few_needles(stream: Stream, row: TrainingRow, mix: DocumentMix, layout: str) -> None:
    """Add one document with two to four needles of one kind and one question.

    A recurrent model without attention first has to learn to store what follows the name that it was given; with a single needle
    it learns to store any value, with many it learns to guess. Where two copies of two needles do not fit ("jrt"), the question
    comes first instead.
    """
    relation, form = stream.pick(mix.relations), stream.below(2)
    question = [(0, form, False)]
    example = [Needle(relation, w.NAMES[0], RELATIONS[relation].values[:1] * RELATIONS[relation].length)]
    if layout == "jrt" and _context_size(row.left, example, question, 2) < 2 * NEEDLE_WORDS:
        layout = "question_first"
    context = _context_size(row.left, example, question, 2 if layout == "jrt" else 1)
    count = max(2, min(stream.between(2, MOST_FEW), context // NEEDLE_WORDS))
    hidden = make_needles(stream, relation, count)
    place = hide_needles(stream, hidden, max(context, sum(len(needle.sentence()) for needle in hidden)))
    row.add_samples(ask_about(stream, place, stream.below(count), layout=layout, form=form))


def _add_pairs(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    while row.left >= SHORTEST_LIST:
        # Most lists are short: with two or three keys, chance is correct often enough for look-up by key to be learnt.
        # Training on long lists only did not learn it.
        longest = min(MOST_PAIRS, (row.left - LIST_FRAME) // 4)
        pairs = stream.between(2, stream.between(2, longest))
        row.add_samples(*needles.make_key_values(stream, pairs, pairs))
        row.add((".",))


def _add_any_pairs(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    while row.left >= SHORTEST_ANY_PAIRS:
        row.add_lines(needles.make_any_pairs(stream, (row.left - LIST_FRAME) // 4), "")
        row.add((".",))


def _add_phone_book(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    entries = max(1, stream.between(1, min(len(w.NAMES), (row.left - 4) // 22)))
    row.add_samples(*needles.make_phone_book(stream, entries, max(1, min(entries, (row.left - 4 - 6 * entries) // 17))))
    _add_short_items(stream, row, mix)


def _add_copy(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    row.add_samples(needles.make_copy(stream, stream.between(4, min(60, (row.left - 6) // 2))))
    _add_short_items(stream, row, mix)


def _add_letters(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Add lists of two to four lettered options with a question for each letter, which names the option or a fact about it."""
    while row.left >= SHORTEST_LETTERS:
        row.add_lines(facts.make_letter_lines(stream, NAMING_SHARE), ".")
    _add_short_items(stream, row, mix)


def _add_short_items(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Fill the rest of a row with short items; the last few words may stay padding."""
    misses = 0
    while row.left >= SHORTEST_ITEM and misses < 4:
        make, _ = _ITEMS[stream.weighted(mix.items)]
        item = make(stream)
        if not isinstance(item, ToySample):
            row.add(item if len(item) <= row.left else ())
        elif len(item.prompt) + len(item.target) + 1 <= row.left:
            row.add_samples(item)
        else:
            misses += 1


# --- Documents with links from one name to another ---


def _make_linked_needles(stream: Stream, count: int, relations: tuple[str, ...]) -> list[Needle]:
    """Return needles of one relation, and links to them or to other links; a value is at most two links away from a name."""
    relation = stream.pick(relations)
    count = max(2, min(count, len(w.NAMES), 2 * RELATIONS[relation].most))
    plain = stream.between(max(1, count // 3), max(1, min(2 * count // 3, RELATIONS[relation].most)))

    def choose(hidden: list[Needle]) -> Needle:
        links = {needle.name for needle in hidden if needle.like}
        return stream.pick([needle for needle in hidden if needle.like not in links])

    return needles.add_links(stream, make_needles(stream, relation, plain), count - plain, choose)


def _add_variables(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Add chains of names that share a code, and ask for all names with a code, as in RULER's variable tracking."""
    hops = stream.between(1, 2 if row.left >= 3 * VARIABLE_WORDS else 1)
    chains = max(1, min(4, (row.left - 12) // ((hops + 1) * VARIABLE_WORDS)))
    row.add_samples(*needles.make_variable_chains(stream, chains=chains, hops=hops, words=row.left))


def _add_short_links(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Fill a row with short documents of up to three needles and a link to each; questions are about the links only.

    In long documents the correct value is one of many and half of the questions need no link, so that two-step look-up is
    hardly ever rewarded.
    """
    while row.left >= SHORTEST_LINKS or len(row.words) == 1:
        size = min(row.left, stream.pick((SHORTEST_LINKS, 80, 96, 128)))
        plain = 1 if size < SHORTEST_LINKS else 2 if size < 80 else stream.between(2, 3)
        hidden = needles.add_links(stream, make_needles(stream, stream.pick(mix.relations), plain), plain)
        chosen = stream.mixed(range(plain, 2 * plain))[: max(1, size // 48)]
        asked = [(i, stream.below(2), False) for i in chosen]
        _add_document(stream, row, hidden, asked, _context_size(size, hidden, asked), ordered=True)


def _add_hops(stream: Stream, row: TrainingRow, mix: DocumentMix) -> None:
    """Fill a row with documents of links that state their value in the text, or of links that do not.

    A stated value is weighted as an answer: the model has to look it up while it processes the link, which trains the first of
    two look-ups separately. There are mostly such links, and they may refer to earlier links. Without stated values, there are
    as many needles and questions as links.
    """
    names = w.NAMES[: mix.names]
    while row.left >= SHORTEST_LINKS or len(row.words) == 1:
        size = min(row.left, stream.pick((SHORTEST_LINKS, 96, row.length)))
        says = stream.chance(mix.said)
        kind = RELATIONS[stream.pick(mix.relations)]
        a_question = 4 + max(map(len, kind.questions)) + kind.length + 1
        a_plain, a_link = len(kind.sentence) + kind.length + 1, len(kind.link) + 1 + (kind.length if says else 0)
        if says:
            fewest = 1 if size < SHORTEST_LINKS else 2
            questions = 1 if size < 96 else stream.between(1, 3)
            left = size - 2 - questions * a_question - fewest * a_plain
            most = max(1, min(left // a_link, len(names) // 2))
            links = stream.between(min(2, most), most)
            plain = fewest + stream.below(max(0, left - links * a_link) // a_plain + 1)
            plain = min(plain, len(names) - links, kind.most)
        else:
            most = max(1, min((size - 2) // (a_plain + a_link + a_question), len(names) // 2, kind.most))
            plain = links = questions = stream.between(min(2, most), most)
        shown = make_needles(stream, kind.name, plain, names)

        def choose(hidden: list[Needle], says: bool = says, shown: list[Needle] = shown) -> Needle:
            return stream.pick(hidden if says and stream.chance(LINK_TO_LINK_SHARE) else shown)

        hidden = needles.add_links(stream, shown, links, choose, names, says)
        asked = [(i, stream.below(2), False) for i in stream.mixed(range(0 if says else plain, len(hidden)))[:questions]]
        if not says and stream.chance(ONE_HOP_SHARE):
            asked[0] = (stream.below(plain), *asked[0][1:])
        start = len(row.words) + 2
        place = _add_document(stream, row, hidden, asked, size - 2 - len(asked) * a_question, ordered=True)
        for needle, at in zip(hidden, place.starts, strict=True):
            if needle.said:
                end = start + at + len(needle.sentence()) - 1
                row.weights[end - kind.length : end] = [row.answer_weight] * kind.length


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
