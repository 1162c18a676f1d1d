"""Training documents in which a name leads to another one: what holds of it is found by looking twice."""

from __future__ import annotations

from needlework.toy import words as w
from needlework.toy.needles import RELATIONS, Needle, Relation, ask, linked, needles, scene, variables
from needlework.toy.sample import Stream, Words
from needlework.training.rows import Diet, Row

VARIABLE_WORDS = 22  # one sentence of a chain and its part of the question, which all of the chain share
SHORTEST_LINKS = 64  # two needles, a link to each, and one question with its answer
LINK_TO_LINK_SHARE = 0.5  # of links that say their value: those that may lead to a link
ONE_HOP_SHARE = 0.3  # of documents that ask for links that do not say their value: those that ask for a needle, too


def with_links(stream: Stream, count: int, relations: tuple[str, ...]) -> list[Needle]:
    """Needles of one relation, and links to them or to links: what a name has is found in at most three sentences."""
    relation = stream.pick(relations)
    count = max(2, min(count, len(w.NAMES), 2 * RELATIONS[relation].most))
    plain = stream.between(max(1, count // 3), max(1, min(2 * count // 3, RELATIONS[relation].most)))
    hidden = needles(stream, relation, plain)
    spare = [name for name in w.NAMES if name not in {needle.name for needle in hidden}]
    far: set[str] = set()  # names that two links lead away from their value
    for name in stream.distinct(spare, count - plain):
        other = stream.pick([needle for needle in hidden if needle.name not in far])
        hidden.append(Needle(relation, name, other.value, like=other.name))
        if other.like:
            far.add(name)
    return hidden


def variables_row(stream: Stream, row: Row) -> None:
    """Codes handed on from name to name, and all names that have a code asked for, as in RULER's variable tracking."""
    hops = stream.between(1, 2 if row.room >= 3 * VARIABLE_WORDS else 1)
    chains = max(1, min(4, (row.room - 12) // ((hops + 1) * VARIABLE_WORDS)))
    row.add_series(variables(stream, chains=chains, hops=hops, room=row.room))


def short_links_row(stream: Stream, row: Row, relations: tuple[str, ...]) -> None:
    """Several short documents of two or three values and as many names that are linked to them, which alone are asked for.

    In a long one the right value is one of many and half of the questions need no link: looking twice is hardly ever rewarded.
    """
    while row.room >= SHORTEST_LINKS or len(row.words) == 1:
        room = min(row.room, stream.pick((SHORTEST_LINKS, 80, 96, 128)))
        plain = 1 if room < SHORTEST_LINKS else 2 if room < 80 else stream.between(2, 3)
        hidden = linked(stream, needles(stream, stream.pick(relations), plain), 1)
        asked = stream.mixed(range(plain, 2 * plain))[: max(1, room // 48)]
        forms = [stream.below(2) for _ in asked]
        questions = [hidden[i].question(form) for i, form in zip(asked, forms, strict=True)]
        spent = 2 + sum(len(question) + 3 + len(hidden[0].value) for question in questions)
        sentences = sum(len(needle.sentence()) for needle in hidden)
        place = scene(stream, hidden, max(sentences, room - spent), ordered=True)
        row.add_sample(ask(stream, place, asked[0], form=forms[0]))
        for i, question in zip(asked[1:], questions[1:], strict=True):
            row.add([*question, "answer", ":"])
            row.add_answer(hidden[i].value, ".")


def hops_row(stream: Stream, row: Row, diet: Diet) -> None:
    """Documents of links that say the value behind the name they give, in the middle of the text, or of links that do not.

    What is said next has to be looked up while the link is read: so the first of two look-ups has a reward of its own. Where it
    is not said, all links are asked for, and where one leads cannot be guessed from another.
    """
    names = w.NAMES[: diet.names]
    while row.room >= SHORTEST_LINKS or len(row.words) == 1:
        room = min(row.room, stream.pick((SHORTEST_LINKS, 96, row.length)))
        says = stream.chance(diet.said)
        kind = RELATIONS[stream.pick(diet.relations)]
        a_question = 4 + max(map(len, kind.questions)) + kind.length + 1
        plain, links, questions = (_saying if says else _silent)(stream, kind, room - 2, a_question, len(names))
        hidden = _chained(stream, needles(stream, kind.name, plain, names), names, links, says)
        asked = [(i, stream.below(2)) for i in stream.mixed(range(0 if says else plain, len(hidden)))[:questions]]
        if not says and stream.chance(ONE_HOP_SHARE):
            asked[0] = (stream.below(plain), asked[0][1])
        sentences = sum(len(needle.sentence()) for needle in hidden)
        place = scene(stream, hidden, max(sentences, room - 2 - len(asked) * a_question), ordered=True)
        start = len(row.words) + 2
        row.add_sample(ask(stream, place, asked[0][0], form=asked[0][1]))
        for needle, at in zip(hidden, place.starts, strict=True):
            if needle.said:
                end = start + at + len(needle.sentence()) - 1
                row.weights[end - kind.length : end] = [row.answer_weight] * kind.length
        for i, form in asked[1:]:
            row.add([*hidden[i].question(form), "answer", ":"])
            row.add_answer(hidden[i].value, ".")


def _saying(stream: Stream, kind: Relation, room: int, a_question: int, names: int) -> tuple[int, int, int]:
    """How many needles, links that say their value, and questions: mostly links, because each of them is an answer."""
    a_plain, a_link = (len(text) + kind.length + 1 for text in (kind.sentence, kind.link))
    fewest = 1 if room < SHORTEST_LINKS - 2 else 2
    questions = 1 if room < 94 else stream.between(1, 3)
    left = room - questions * a_question - fewest * a_plain
    most = max(1, min(left // a_link, names // 2))
    links = stream.between(min(2, most), most)
    plain = fewest + stream.below(max(0, left - links * a_link) // a_plain + 1)
    return min(plain, names - links, kind.most), links, questions


def _silent(stream: Stream, kind: Relation, room: int, a_question: int, names: int) -> tuple[int, int, int]:
    """As many needles as links that do not say their value, and as questions."""
    a_plain, a_link = len(kind.sentence) + kind.length + 1, len(kind.link) + 1
    most = max(1, min(room // (a_plain + a_link + a_question), names // 2, kind.most))
    count = stream.between(min(2, most), most)
    return count, count, count


def _chained(stream: Stream, plain: list[Needle], names: Words, links: int, said: bool) -> list[Needle]:
    """Needles, and links to any of them; links that say their value lead to earlier links, too."""
    spare = [name for name in names if name not in {needle.name for needle in plain}]
    hidden = list(plain)
    for name in stream.distinct(spare, links):
        other = stream.pick(hidden if said and stream.chance(LINK_TO_LINK_SHARE) else plain)
        hidden.append(Needle(other.relation, name, other.value, like=other.name, said=said))
    return hidden
