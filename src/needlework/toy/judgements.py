"""Yes-or-no judgements: is a sentence well formed, does one follow from another, do two say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needlework.toy import words as w
from needlework.toy.sample import Sample, Span, Stream, Words

KINDS = ("acceptability", "entailment", "paraphrase")
_SAME = {a: b for pair in w.SAME_VERBS for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class Clause:
    """A sentence in parts, so that it can be said otherwise, said shorter, or made false."""

    subject: Words
    verb: str
    thing: Words
    place: Words
    time: Words

    def words(self) -> Words:
        return (*self.subject, self.verb, *self.thing, *self.place, *self.time)


def clause(stream: Stream) -> Clause:
    manner = (stream.pick(w.MANNERS),) if stream.chance(0.3) else ()
    look = (stream.pick(w.LOOKS),) if stream.chance(0.3) else ()
    return Clause(
        subject=(stream.pick(w.DETERMINERS), *manner, stream.pick(w.PEOPLE)),
        verb=stream.pick(w.VERBS),
        thing=(stream.pick(w.DETERMINERS), *look, stream.pick(w.THINGS)),
        place=(stream.pick(w.SIDES), "the", stream.pick(w.PLACES)),
        time=stream.pick(w.TIMES) if stream.chance(0.4) else (),
    )


def _other(stream: Stream, items: Sequence[str], not_this: str) -> str:
    return stream.pick([item for item in items if item != not_this])


def changed(stream: Stream, c: Clause) -> Clause:
    """The same clause with one content word replaced by another of its kind: no longer the same claim."""
    part = stream.below(4)
    if part == 0:
        return Clause((*c.subject[:-1], _other(stream, w.PEOPLE, c.subject[-1])), c.verb, c.thing, c.place, c.time)
    if part == 1:
        verbs = [verb for verb in w.VERBS if verb != _SAME[c.verb]]
        return Clause(c.subject, _other(stream, verbs, c.verb), c.thing, c.place, c.time)
    if part == 2:
        return Clause(c.subject, c.verb, (*c.thing[:-1], _other(stream, w.THINGS, c.thing[-1])), c.place, c.time)
    return Clause(c.subject, c.verb, c.thing, (*c.place[:-1], _other(stream, w.PLACES, c.place[-1])), c.time)


def _verdict(task: str, prompt: Sequence[str], yes: bool, before: Sequence[str], spans: Sequence[Span]) -> Sample:
    moved = tuple(Span(s.name, s.start + len(before), s.stop + len(before)) for s in spans)
    return Sample(
        task=task,
        prompt=(*before, *prompt, "answer", ":"),
        target=("yes" if yes else "no",),
        spans=moved,
        choices=(("no",), ("yes",)),
        answer=int(yes),
        subject=task,
        form=task,
    )


def acceptability(stream: Stream, *, before: Sequence[str] = ()) -> Sample:
    """Bad sentences have two neighbours in the wrong order: subject and verb, verb and object, or a noun and what precedes it."""
    c = clause(stream)
    yes = stream.chance(0.5)
    text = c.words()
    if not yes:
        rest = (*c.place, *c.time)
        text = stream.pick(
            [
                (c.verb, *c.subject, *c.thing, *rest),
                (*c.subject, *c.thing, c.verb, *rest),
                (*c.subject, c.verb, *c.thing[1:], c.thing[0], *rest),
            ]
        )
    prompt = ["judge", ":", *text, "."]
    return _verdict("acceptability", prompt, yes, before, [Span("first", 2, 2 + len(text))])


def _two(task: str, link: Sequence[str], a: Words, b: Words, yes: bool, before: Sequence[str]) -> Sample:
    prompt = ["first", ":", *a, ".", *link, ":", *b, "."]
    second = 2 + len(a) + 1 + len(link) + 1
    spans = [Span("first", 2, 2 + len(a)), Span("second", second, second + len(b))]
    return _verdict(task, prompt, yes, before, spans)


def entailment(stream: Stream, *, before: Sequence[str] = ()) -> Sample:
    """The second sentence follows when it only leaves parts out; it does not when a word was changed."""
    c = clause(stream)
    yes = stream.chance(0.5)
    d = c if yes else changed(stream, c)
    place = d.place if d.place != c.place or stream.chance(0.5) else ()
    return _two("entailment", ["so"], c.words(), (*d.subject, d.verb, *d.thing, *place), yes, before)


def paraphrase(stream: Stream, *, before: Sequence[str] = ()) -> Sample:
    """The second sentence uses the verb's twin and may say time or place first; or one word was changed as well."""
    c = clause(stream)
    yes = stream.chance(0.5)
    d = c if yes else changed(stream, c)
    verb = _SAME[d.verb]
    core = (*d.subject, verb, *d.thing)
    text = stream.pick([(*core, *d.place, *d.time), (*d.time, *core, *d.place), (*d.place, *core, *d.time)])
    return _two("paraphrase", ["same"], c.words(), text, yes, before)


def judgement(stream: Stream, kind: str, *, before: Sequence[str] = ()) -> Sample:
    makers = {"acceptability": acceptability, "entailment": entailment, "paraphrase": paraphrase}
    return makers[kind](stream, before=before)
