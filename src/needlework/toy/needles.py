"""Samples that ask for something in the context: needles in a haystack, links between needles, lists and texts to copy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from needlework.toy import facts
from needlework.toy import words as w
from needlework.toy.sample import Stream, ToySample, Words, WordSpan, fill_words

LAYOUTS = ("plain", "jrt", "question_first")
FACT_SHARE = 0.2  # fraction of haystack sentences that state a fact of `toy.facts`
SHORTEST_SENTENCE = 6  # words of the shortest haystack sentence, with its full stop
ABSENT_VALUES = 3  # wrong options of a forced choice that do not occur in the context


@dataclass(frozen=True)
class Relation:
    """A kind of needle: templates of its sentence, link and questions ({n} is the name), and its possible values.

    A needle's sentence ends with a value of `length` words. A `link` sentence says that {n} has the same value as {m}, so that a
    question about {n} takes two look-ups.
    """

    name: str
    sentence: tuple[str, ...]
    link: tuple[str, ...]
    questions: tuple[tuple[str, ...], ...]
    values: Words
    length: int

    @property
    def most(self) -> int:
        """The largest number of needles in a document that leaves ABSENT_VALUES values unused."""
        return int(len(self.values) ** self.length) - ABSENT_VALUES


RELATIONS: dict[str, Relation] = {
    name: Relation(
        name,
        sentence=tuple(about["sentence"].split()),
        link=tuple(about["link"].split()),
        questions=tuple(tuple(question.split()) for question in about["questions"]),
        values=w.CLASSES[about["values"]],
        length=about["length"],
    )
    for name, about in w.LANGUAGE["needles"].items()
}
RELATION_NAMES: Words = tuple(RELATIONS)


@dataclass(frozen=True, slots=True)
class Needle:
    """A name and its value. With `like` it is a link: its sentence refers to that name; `said` appends the value to it."""

    relation: str
    name: str
    value: Words
    like: str = ""
    said: bool = False

    def sentence(self) -> list[str]:
        kind = RELATIONS[self.relation]
        words = fill_words(kind.link if self.like else kind.sentence, n=self.name, m=self.like)
        return [*words, *(self.value if self.said or not self.like else ()), "."]

    def question(self, form: int) -> list[str]:
        return ["question", ":", *fill_words(RELATIONS[self.relation].questions[form], n=self.name)]

    def answer(self, quote: bool = False) -> Words:
        """Return the value, or with `quote` the sentence without its full stop."""
        return tuple(self.sentence()[:-1]) if quote else self.value


def make_sentence(stream: Stream) -> list[str]:
    """Generate a haystack sentence of 6 to 13 words with its full stop. All parts are drawn independently."""
    words = [stream.pick(w.DETERMINERS)]
    if stream.chance(0.3):
        words.append(stream.pick(w.MANNERS))
    words += (stream.pick(w.PEOPLE), stream.pick(w.VERBS), stream.pick(w.DETERMINERS))
    if stream.chance(0.3):
        words.append(stream.pick(w.LOOKS))
    words.append(stream.pick(w.THINGS))
    if stream.chance(0.5):
        words += (stream.pick(w.SIDES), "the", stream.pick(w.PLACES))
    if stream.chance(0.3):
        words += stream.pick(w.TIMES)
    words.append(".")
    return words


def draw_values(stream: Stream, relation: str, count: int, taken: Sequence[Words] = ()) -> list[Words]:
    """Draw `count` values of a relation that differ from each other and from `taken`."""
    kind = RELATIONS[relation]
    if len(kind.values) ** kind.length - len(set(taken)) < count:
        raise ValueError(f"relation {relation!r} has too few values for {count} more; ask for fewer needles")
    return stream.unique(lambda: tuple(stream.pick(kind.values) for _ in range(kind.length)), count, taken)


def make_needles(stream: Stream, relation: str, count: int, names: Sequence[str] = w.NAMES) -> list[Needle]:
    """Generate needles of one relation with distinct names and distinct values."""
    values = draw_values(stream, relation, count)
    return [Needle(relation, name, v) for name, v in zip(stream.distinct(names, count), values, strict=True)]


@dataclass(frozen=True, slots=True)
class NeedleContext:
    """A haystack with needles: needle i begins at word `starts[i]`, at `depths[i]` percent of the context."""

    words: Words
    needles: tuple[Needle, ...]
    starts: tuple[int, ...]
    depths: tuple[float, ...]


def hide_needles(
    stream: Stream, hidden: Sequence[Needle], context_tokens: int, depth_percent: float | None = None, *, ordered: bool = False
) -> NeedleContext:
    """Generate a haystack and insert needles into it, with at most `context_tokens` words in total.

    Args:
        depth_percent: depth of the first needle, rounded down to a sentence end; None: random, as for the other needles.
        ordered: place every link behind the needle that it refers to, which also comes before it in `hidden`.
    """
    sentences = [needle.sentence() for needle in hidden]
    left = context_tokens - sum(map(len, sentences))
    if left < 0:
        raise ValueError(
            f"{len(hidden)} needles need {context_tokens - left} words, context_tokens is {context_tokens}: "
            "take fewer needles or a longer context"
        )
    hay: list[list[str]] = []
    while left >= SHORTEST_SENTENCE:
        new = facts.make_statement(stream) if stream.chance(FACT_SHARE) else make_sentence(stream)
        if len(new) <= left:
            hay.append(new)
            left -= len(new)
    slots = [stream.below(len(hay) + 1) for _ in hidden]
    if depth_percent is not None:
        slots[0] = bisect_right(list(accumulate(map(len, hay))), sum(map(len, hay)) * depth_percent / 100)
    words: list[str] = []
    starts = [0] * len(hidden)
    order = stream.mixed(range(len(hidden)))
    if ordered:  # every link follows the needle that it refers to, so that it can be resolved during prefill
        slot_of = {needle.name: slot for needle, slot in zip(hidden, slots, strict=True)}
        for needle in hidden:
            if needle.like and slot_of[needle.name] < slot_of[needle.like]:
                slot_of[needle.name] = stream.between(slot_of[needle.like], len(hay))
        slots, order = [slot_of[needle.name] for needle in hidden], list(range(len(hidden)))
    for slot in range(len(hay) + 1):
        for i in order:
            if slots[i] == slot:
                starts[i] = len(words)
                words += sentences[i]
        if slot < len(hay):
            words += hay[slot]
    depths = tuple(100 * start / max(1, len(words) - len(text)) for start, text in zip(starts, sentences, strict=True))
    return NeedleContext(tuple(words), tuple(hidden), tuple(starts), depths)


def ask_about(
    stream: Stream, place: NeedleContext, index: int = 0, *, layout: str = "plain", form: int = 0, quote: bool = False
) -> ToySample:
    """Return the sample that asks for the value of needle `index` of a context.

    Args:
        index: the needle to ask about; if it is a link, all needles of its chain become spans.
        layout: "plain": context, question; "jrt": context and question twice (both copies become spans); "question_first":
            question, context.
        form: index of the question's wording.
        quote: the target is the needle's whole sentence instead of its value.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    needle = place.needles[index]
    question = needle.question(form)
    context = ["context", ":", *place.words]
    block = [*question, *context] if layout == "question_first" else [*context, *question]
    blocks = [block, block] if layout == "jrt" else [block]
    lead = 2 + (len(question) if layout == "question_first" else 0)
    prompt: list[str] = []
    spans: list[WordSpan] = []
    by_name = {(other.relation, other.name): i for i, other in enumerate(place.needles)}
    chain = [index]  # the needle and, along its links, those that it refers to
    while like := place.needles[chain[-1]].like:
        chain.append(by_name[needle.relation, like])
    for words in blocks:
        for i in chain:
            start = len(prompt) + lead + place.starts[i]
            stop = start + len(place.needles[i].sentence()) - 1
            spans.append(WordSpan("needle", start, stop))
        spans.append(WordSpan("value", stop - len(needle.value), stop))
        prompt += words
    prompt += ["quote" if quote else "answer", ":"]
    stated = [n.value for n in place.needles if n.relation == needle.relation]
    return ToySample(
        prompt=tuple(prompt),
        target=needle.answer(quote),
        spans=tuple(spans),
        distractors=tuple(dict.fromkeys(v for v in stated if v != needle.value)),
        absent=tuple(draw_values(stream, needle.relation, ABSENT_VALUES, stated)),
        relation=needle.relation,
        key=needle.name,
        form=f"{'quote' if quote else 'question'}-{form}",
        layout=layout,
        depth_percent=place.depths[chain[-1]],
        context_tokens=len(place.words),
    )


def make_niah(
    stream: Stream,
    *,
    context_tokens: int,
    distractors: int = 0,
    depth_percent: float | None = None,
    relation: str = "code",
    layout: str = "plain",
    quote: bool = False,
    hops: int = 1,
) -> ToySample:
    """Generate a needle-in-a-haystack sample with `distractors` more needles of the same relation about other names.

    With `hops` > 1, a chain of `hops - 1` links follows every needle, and the question names the last link of the first chain.
    """
    plain = make_needles(stream, relation, 1 + distractors)
    hidden = add_links(stream, plain, (hops - 1) * len(plain))
    place = hide_needles(stream, hidden, context_tokens, depth_percent, ordered=hops > 1)
    return ask_about(stream, place, len(hidden) - 1 - distractors, layout=layout, form=stream.below(2), quote=quote)


def add_links(
    stream: Stream,
    plain: Sequence[Needle],
    links: int,
    choose: Callable[[list[Needle]], Needle] | None = None,  # returns which needle or earlier link the next link refers to
    names: Sequence[str] = w.NAMES,
    said: bool = False,  # whether links state their value
) -> list[Needle]:
    """Return the needles followed by links with names of their own.

    By default, the links form layers: one link to each needle, then one to each of these links, and so on.
    """
    hidden, taken = list(plain), {needle.name for needle in plain}
    for name in stream.distinct([name for name in names if name not in taken], links):
        other = choose(hidden) if choose else hidden[-len(plain)]
        hidden.append(Needle(other.relation, name, other.value, other.name, said))
    return hidden


def make_variable_chains(stream: Stream, *, chains: int, hops: int, words: int) -> list[ToySample]:
    """Generate chains of names that share a code (RULER's variable tracking), with one sample that asks for the names of each.

    Each prompt contains the questions and answers before it; the longest has about `words` words. The target lists a chain from
    its last link to its first needle, because the last link is the hardest to find.
    """
    hidden = add_links(stream, make_needles(stream, "code", chains), hops * chains)
    asked = stream.mixed(range(chains))
    names = [[hidden[c + chains * hop].name for hop in range(hops, -1, -1)] for c in range(chains)]
    questions = [["question", ":", "who", "has", "the", "secret", "code", *needle.value, "?"] for needle in hidden[:chains]]
    spent = 2 + sum(len(questions[c]) + 2 + len(names[c]) + 1 for c in asked)
    place = hide_needles(stream, hidden, max(words - spent, sum(len(needle.sentence()) for needle in hidden)), ordered=True)
    starts = list(enumerate(start + 2 for start in place.starts))
    prompt = ["context", ":", *place.words]
    samples = []
    for c in asked:
        prompt += [*questions[c], "answer", ":"]
        spans = [WordSpan("needle", at, at + len(hidden[i].sentence()) - 1) for i, at in starts if i % chains == c]
        samples.append(
            ToySample(
                prompt=tuple(prompt),
                target=tuple(names[c]),
                spans=tuple(spans),
                relation="code",
                key=" ".join(hidden[c].value),
                context_tokens=len(place.words),
            )
        )
        prompt += [*names[c], "."]
    return samples


# --- Lists and copies ---

PLAIN_WORDS: Words = (*w.THINGS, *w.PLACES, *w.LOOKS, *w.PEOPLE)


def _make_list(
    stream: Stream,
    frame: tuple[str, str, str],  # words before the list, after it, and of a question with the key as {k}
    entries: Mapping[str, Words],  # value of each key
    queries: int,  # number of keys to ask for
    absent: Callable[[], Sequence[Words]],  # returns values that are not in the list
    **fields: Any,  # further fields of the samples; `stop` ends every entry and answer
) -> list[ToySample]:
    """Generate a list and one sample for each query; prompts contain the earlier queries and answers."""
    opening, closing, question = (text.split() for text in frame)
    prompt, places = list(opening), {}
    for key, value in entries.items():
        places[key] = WordSpan("needle", len(prompt), len(prompt) + 1 + len(value))
        prompt += [key, *value, *fields["stop"]]
    size = len(prompt) - len(opening)
    prompt += closing
    samples = []
    for key in stream.distinct(list(entries), queries):
        prompt += fill_words(question, k=key)
        samples.append(
            ToySample(
                prompt=tuple(prompt),
                target=entries[key],
                spans=(places[key],),
                distractors=tuple(value for other, value in entries.items() if other != key),
                absent=tuple(absent()),
                key=key,
                context_tokens=size,
                **fields,
            )
        )
        prompt += [*entries[key], *fields["stop"]]
    return samples


def make_key_values(stream: Stream, pairs: int, queries: int = 1) -> list[ToySample]:
    """Generate a list of key-value pairs and one sample for each query."""
    keys, values = stream.distinct(w.NAMES, pairs), stream.distinct(PLAIN_WORDS, pairs)
    entries = {key: (value,) for key, value in zip(keys, values, strict=True)}
    spare = [(word,) for word in PLAIN_WORDS if word not in values]
    frame, about = ("pairs :", ". ask :", "{k}"), {"relation": "pair", "stop": ""}
    return _make_list(stream, frame, entries, queries, lambda: stream.distinct(spare, ABSENT_VALUES), **about)


def make_any_pairs(stream: Stream, most: int) -> list[tuple[list[str], Words]]:
    """Generate a key-value list with keys and values of varied word classes, as (words, answer) lines. For training only.

    Lists of names and plain words teach neither answer options as keys, nor letters as values, nor the question format of letter
    choices. Here all combinations occur.
    """
    options = [facts.SUBJECTS[subject].options() for subject in stream.distinct(facts.SUBJECT_NAMES, 2)]
    keys, values = stream.pick((w.NAMES, options[0])), stream.pick((PLAIN_WORDS, w.LETTERS, options[1]))
    pairs = stream.between(2, min(most, len(keys), len(values)))
    listed = list(zip(stream.distinct(keys, pairs), stream.distinct(values, pairs), strict=True))
    named = stream.chance(0.5)
    words = [word for pair in listed for word in pair]
    words = words if named else ["pairs", ":", *words, ".", "ask", ":"]
    lines: list[tuple[list[str], Words]] = []
    # With replacement: if every key were queried once, the last answers would follow by elimination.
    for key, value in (stream.pick(listed) for _ in range(min(pairs, 4))):
        lines.append(([*words, *(facts.ask_by_name(key) if named else [key])], (value,)))
        words = ["."] if named else []
    return lines


def make_phone_book(stream: Stream, entries: int, queries: int = 1) -> list[ToySample]:
    """Generate a list of names with four-digit numbers and one sample for each query."""
    names = stream.distinct(w.NAMES, entries)
    numbers = stream.unique(lambda: tuple(stream.pick(w.DIGITS) for _ in range(4)), entries + ABSENT_VALUES)
    book, absent = dict(zip(names, numbers, strict=False)), numbers[entries:]
    frame = "phone book :", "", "question : what is the phone number of {k} ? answer :"
    return _make_list(stream, frame, book, queries, lambda: absent, relation="phone", stop=".")


def make_copy(stream: Stream, length: int) -> ToySample:
    """Generate a sample that asks to repeat `length` random words."""
    text = tuple(stream.pick(PLAIN_WORDS) for _ in range(length))
    return ToySample(
        prompt=("copy", ":", *text, ".", "again", ":"),
        target=text,
        spans=(WordSpan("needle", 2, 2 + length),),
        context_tokens=length,
    )
