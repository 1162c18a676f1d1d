"""Needles in haystacks: values that are true in one document alone, hidden among other sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needlework.toy import words as w
from needlework.toy.facts import statement
from needlework.toy.sample import Sample, Span, Stream, Words

LAYOUTS = ("plain", "jrt", "question_first")
FACT_SHARE = 0.2  # of haystack sentences that state a fact of the fixed world
SHORTEST_SENTENCE = 6
ABSENT_VALUES = 3  # that a forced choice sets against the true one


@dataclass(frozen=True)
class Relation:
    """A kind of needle: sentence and questions hold {n}, the sentence's value of `length` words comes at its end.

    `link` says that {n} has what {m} has: who is asked for {n} must look twice.
    """

    name: str
    sentence: tuple[str, ...]
    link: tuple[str, ...]
    questions: tuple[tuple[str, ...], ...]
    values: Words
    length: int

    @property
    def most(self) -> int:
        """How many needles of this kind a document can hold so that enough values stay absent from it."""
        return int(len(self.values) ** self.length) - ABSENT_VALUES


def _relation(name: str, sentence: str, link: str, questions: str, values: Words, length: int) -> Relation:
    asked = tuple(tuple(question.split()) for question in questions.split("|"))
    return Relation(name, tuple(sentence.split()), tuple(link.split()), asked, values, length)


RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        _relation(
            "code",
            "the secret code of {n} is",
            "the secret code of {n} is the code of {m}",
            "what is the secret code of {n} ?|which secret code has {n} ?",
            w.DIGITS,
            3,
        ),
        _relation(
            "badge",
            "the badge of {n} is",
            "the badge of {n} is the badge of {m}",
            "what is the badge of {n} ?|which badge has {n} ?",
            w.COLOURS,
            2,
        ),
        _relation(
            "hideout",
            "{n} hid the key in the",
            "{n} hid the key with {m}",
            "where is the key of {n} ?|where has {n} hid the key ?",
            w.HIDEOUTS,
            1,
        ),
        _relation(
            "gift",
            "the gift for {n} is a",
            "the gift for {n} is the gift for {m}",
            "what is the gift for {n} ?|which gift gets {n} ?",
            w.GIFTS,
            1,
        ),
    )
}
RELATION_NAMES: Words = tuple(RELATIONS)


@dataclass(frozen=True, slots=True)
class Needle:
    """What holds of a name; with `like`, its sentence says whose value it is instead of the value; `said` adds the value."""

    relation: str
    name: str
    value: Words
    like: str = ""
    said: bool = False

    def sentence(self) -> list[str]:
        kind = RELATIONS[self.relation]
        if self.like:
            words = [{"{n}": self.name, "{m}": self.like}.get(word, word) for word in kind.link]
            return [*words, *(self.value if self.said else ()), "."]
        return [*(self.name if word == "{n}" else word for word in kind.sentence), *self.value, "."]

    def question(self, form: int) -> list[str]:
        forms = RELATIONS[self.relation].questions
        return ["question", ":", *(self.name if word == "{n}" else word for word in forms[form % len(forms)])]


def sentence(stream: Stream) -> list[str]:
    """A haystack sentence of 6 to 13 words. All parts are drawn apart, so no part tells of another."""
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


def haystack(stream: Stream, words: int) -> list[list[str]]:
    """Sentences of at most `words` words together, short of it by less than the shortest sentence."""
    sentences: list[list[str]] = []
    left = words
    while left >= SHORTEST_SENTENCE:
        new = statement(stream) if stream.chance(FACT_SHARE) else sentence(stream)
        if len(new) <= left:
            sentences.append(new)
            left -= len(new)
    return sentences


def value_of(stream: Stream, relation: str) -> Words:
    kind = RELATIONS[relation]
    return tuple(stream.pick(kind.values) for _ in range(kind.length))


def fresh_values(stream: Stream, relation: str, count: int, taken: Sequence[Words] = ()) -> list[Words]:
    """`count` values, different from each other and from those taken."""
    seen = set(taken)
    kind = RELATIONS[relation]
    if len(kind.values) ** kind.length - len(seen) < count:
        raise ValueError(f"relation {relation!r} has too few values for {count} more; ask for fewer needles")
    fresh: list[Words] = []
    while len(fresh) < count:
        value = value_of(stream, relation)
        if value not in seen:
            seen.add(value)
            fresh.append(value)
    return fresh


def needles(stream: Stream, relation: str, count: int, names: Sequence[str] = w.NAMES) -> list[Needle]:
    """Needles of one relation, about different names, with different values."""
    values = fresh_values(stream, relation, count)
    return [Needle(relation, name, v) for name, v in zip(stream.distinct(names, count), values, strict=True)]


@dataclass(frozen=True, slots=True)
class Scene:
    """A context with needles in it: `starts[i]` is the word where needle i begins."""

    words: Words
    needles: tuple[Needle, ...]
    starts: tuple[int, ...]
    depths: tuple[float, ...]


def scene(
    stream: Stream,
    hidden: Sequence[Needle],
    context_tokens: int,
    depth_percent: float | None = None,
    *,
    ordered: bool = False,
) -> Scene:
    """Hide needles in a haystack so that all together has at most `context_tokens` words.

    The first needle goes to `depth_percent` of the haystack, after the nearest sentence end before that point; the
    others (and the first, if no depth is given) go after sentence ends drawn at random. `ordered` keeps their order: the
    first goes where it goes, and those behind it, such as links to it, are drawn from what follows.
    """
    sentences = [needle.sentence() for needle in hidden]
    room = context_tokens - sum(map(len, sentences))
    if room < 0:
        raise ValueError(
            f"{len(hidden)} needles need {context_tokens - room} words, context_tokens is {context_tokens}: "
            "take fewer needles or a longer context"
        )
    hay = haystack(stream, room)
    slots = [stream.below(len(hay) + 1) for _ in hidden]
    if depth_percent is not None:
        wanted = sum(map(len, hay)) * depth_percent / 100
        slots[0], reached = 0, 0
        for straw in hay:
            reached += len(straw)
            if reached > wanted:
                break
            slots[0] += 1
    words: list[str] = []
    starts = [0] * len(hidden)
    order = stream.mixed(range(len(hidden)))
    if ordered:
        slots, order = _after_what_they_name(stream, hidden, slots, len(hay)), list(range(len(hidden)))
    for slot in range(len(hay) + 1):
        for i in order:
            if slots[i] == slot:
                starts[i] = len(words)
                words += sentences[i]
        if slot < len(hay):
            words += hay[slot]
    length = len(words)
    depths = tuple(100 * start / max(1, length - len(text)) for start, text in zip(starts, sentences, strict=True))
    return Scene(tuple(words), tuple(hidden), tuple(starts), depths)


def _after_what_they_name(stream: Stream, hidden: Sequence[Needle], slots: list[int], last: int) -> list[int]:
    """Slots in which every link stands behind the needle it names: such a link can be resolved while it is read."""
    place = {needle.name: slot for needle, slot in zip(hidden, slots, strict=True)}
    for needle in hidden:
        if needle.like and place[needle.name] < place[needle.like]:
            place[needle.name] = stream.between(place[needle.like], last)
    return [place[needle.name] for needle in hidden]


def chain(place: Scene, index: int) -> list[int]:
    """The needles that an answer about needle `index` rests on: its own, the one it names, and so on."""
    by_name = {(needle.relation, needle.name): i for i, needle in enumerate(place.needles)}
    found = [index]
    while like := place.needles[found[-1]].like:
        found.append(by_name[place.needles[index].relation, like])
    return found


def ask(
    stream: Stream,
    place: Scene,
    index: int = 0,
    *,
    layout: str = "plain",
    form: int = 0,
    quote: bool = False,
) -> Sample:
    """The question about needle `index` of a scene, in one of three layouts.

    plain: context, question, answer. jrt: context and question twice, then answer (both needle copies are spans).
    question_first: question, context, answer. With `quote` the answer is the needle's whole sentence.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    needle = place.needles[index]
    question = needle.question(form)
    context = ["context", ":", *place.words]
    block = [*question, *context] if layout == "question_first" else [*context, *question]
    blocks = [block, block] if layout == "jrt" else [block]
    text = needle.sentence()[:-1]
    lead = 2 + (len(question) if layout == "question_first" else 0)
    prompt: list[str] = []
    spans: list[Span] = []
    rests_on = chain(place, index)
    for words in blocks:
        for i in rests_on:
            start = len(prompt) + lead + place.starts[i]
            stop = start + len(place.needles[i].sentence()) - 1
            spans.append(Span("needle", start, stop))
        spans.append(Span("value", stop - len(needle.value), stop))
        prompt += words
    prompt += ["quote" if quote else "answer", ":"]
    stated = [n.value for n in place.needles if n.relation == needle.relation]
    return Sample(
        task="niah",
        prompt=tuple(prompt),
        target=tuple(text) if quote else needle.value,
        spans=tuple(spans),
        distractors=tuple(dict.fromkeys(v for v in stated if v != needle.value)),
        absent=tuple(fresh_values(stream, needle.relation, ABSENT_VALUES, stated)),
        relation=needle.relation,
        key=needle.name,
        form=f"{'quote' if quote else 'question'}-{form}",
        layout=layout,
        depth_percent=place.depths[rests_on[-1]],
        context_tokens=len(place.words),
    )


def niah(
    stream: Stream,
    *,
    context_tokens: int,
    distractors: int = 0,
    depth_percent: float | None = None,
    relation: str = "code",
    layout: str = "plain",
    quote: bool = False,
    hops: int = 1,
) -> Sample:
    """One needle in a haystack, with `distractors` more needles of the same relation about other names.

    With more than one hop, links follow each needle: its value is asked for by the name at the end of its links.
    """
    hidden = needles(stream, relation, 1 + distractors)
    if hops == 1:
        place = scene(stream, hidden, context_tokens, depth_percent)
        return ask(stream, place, layout=layout, form=stream.below(2), quote=quote)
    hidden = linked(stream, hidden, hops - 1)
    place = scene(stream, hidden, context_tokens, depth_percent, ordered=True)
    return ask(stream, place, len(hidden) - 1 - distractors, layout=layout, form=stream.below(2), quote=quote)


def linked(stream: Stream, hidden: Sequence[Needle], links: int) -> list[Needle]:
    """Needles, then a link to each of them, then a link to each of those, and so on."""
    spare = [name for name in w.NAMES if name not in {needle.name for needle in hidden}]
    names = iter(stream.distinct(spare, links * len(hidden)))
    chained, latest = list(hidden), list(hidden)
    for _ in range(links):
        latest = [Needle(needle.relation, next(names), needle.value, like=needle.name) for needle in latest]
        chained += latest
    return chained


def variables(stream: Stream, *, chains: int, hops: int, room: int) -> list[Sample]:
    """Codes handed on from name to name (RULER's variable tracking): who has this code? Each chain is asked in turn.

    All together has about `room` words. The answer names a whole chain, the end of it first: it is the hardest to find.
    """
    hidden = linked(stream, needles(stream, "code", chains), hops)
    asked = stream.mixed(range(chains))
    names = [[hidden[c + chains * hop].name for hop in range(hops, -1, -1)] for c in range(chains)]
    questions = [["question", ":", "who", "has", "the", "secret", "code", *needle.value, "?"] for needle in hidden[:chains]]
    spent = 2 + sum(len(questions[c]) + 2 + len(names[c]) + 1 for c in asked)
    place = scene(stream, hidden, max(room - spent, sum(len(needle.sentence()) for needle in hidden)), ordered=True)
    prompt = ["context", ":", *place.words]
    samples = []
    for c in asked:
        prompt += [*questions[c], "answer", ":"]
        spans = []
        for i in range(c, len(hidden), chains):
            start = 2 + place.starts[i]
            spans.append(Span("needle", start, start + len(hidden[i].sentence()) - 1))
        samples.append(
            Sample(
                task="variables",
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
