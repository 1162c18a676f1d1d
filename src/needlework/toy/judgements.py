"""Yes-or-no samples of the toy language, as in GLUE: acceptability, entailment and paraphrase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from needlework.toy import words as w
from needlework.toy.sample import Stream, ToySample, Words, WordSpan

KINDS = ("acceptability", "entailment", "paraphrase")
_SAME = {a: b for pair in w.SAME_VERBS for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class SentenceParts:
    """The constituents of a sentence, so that they can be reordered, omitted or replaced."""

    subject: Words
    verb: str
    thing: Words
    place: Words
    time: Words

    def words(self) -> Words:
        return (*self.subject, self.verb, *self.thing, *self.place, *self.time)


def make_clause(stream: Stream) -> SentenceParts:
    manner = (stream.pick(w.MANNERS),) if stream.chance(0.3) else ()
    look = (stream.pick(w.LOOKS),) if stream.chance(0.3) else ()
    return SentenceParts(
        subject=(stream.pick(w.DETERMINERS), *manner, stream.pick(w.PEOPLE)),
        verb=stream.pick(w.VERBS),
        thing=(stream.pick(w.DETERMINERS), *look, stream.pick(w.THINGS)),
        place=(stream.pick(w.SIDES), "the", stream.pick(w.PLACES)),
        time=stream.pick(w.TIMES) if stream.chance(0.4) else (),
    )


def change_one_word(stream: Stream, c: SentenceParts) -> SentenceParts:
    """Replace the verb or a noun by another word of its class that is no synonym, so that the meaning changes."""
    part = stream.pick(("subject", "verb", "thing", "place"))
    if part == "verb":
        return replace(c, verb=stream.pick([verb for verb in w.VERBS if verb not in (c.verb, _SAME[c.verb])]))
    *before, last = getattr(c, part)
    nouns = {"subject": w.PEOPLE, "thing": w.THINGS, "place": w.PLACES}[part]
    words: dict[str, Any] = {part: (*before, stream.pick([noun for noun in nouns if noun != last]))}
    return replace(c, **words)


def _yes_no_sample(task: str, prompt: Sequence[str], yes: bool, before: Sequence[str], spans: Sequence[WordSpan]) -> ToySample:
    moved = tuple(WordSpan(s.name, s.start + len(before), s.stop + len(before)) for s in spans)
    return ToySample(
        task=task,
        prompt=(*before, *prompt, "answer", ":"),
        target=("yes" if yes else "no",),
        spans=moved,
        choices=(("no",), ("yes",)),
        answer=int(yes),
        subject=task,
        form=task,
    )


def _make_acceptability(stream: Stream, *, before: Sequence[str] = ()) -> ToySample:
    """Generate a sentence; "no": subject and verb or verb and object are swapped, or the object's determiner is moved."""
    c = make_clause(stream)
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
    return _yes_no_sample("acceptability", prompt, yes, before, [WordSpan("first", 2, 2 + len(text))])


def _pair_sample(task: str, link: Sequence[str], a: Words, b: Words, yes: bool, before: Sequence[str]) -> ToySample:
    prompt = ["first", ":", *a, ".", *link, ":", *b, "."]
    second = 2 + len(a) + 1 + len(link) + 1
    spans = [WordSpan("first", 2, 2 + len(a)), WordSpan("second", second, second + len(b))]
    return _yes_no_sample(task, prompt, yes, before, spans)


def _make_entailment(stream: Stream, *, before: Sequence[str] = ()) -> ToySample:
    """Generate two sentences; "yes": the second only omits parts of the first; "no": one word was replaced as well."""
    c = make_clause(stream)
    yes = stream.chance(0.5)
    d = c if yes else change_one_word(stream, c)
    place = d.place if d.place != c.place or stream.chance(0.5) else ()
    return _pair_sample("entailment", ["so"], c.words(), (*d.subject, d.verb, *d.thing, *place), yes, before)


def _make_paraphrase(stream: Stream, *, before: Sequence[str] = ()) -> ToySample:
    """Generate two sentences; "yes": the second has a synonymous verb and perhaps another order; "no": one word differs, too."""
    c = make_clause(stream)
    yes = stream.chance(0.5)
    d = c if yes else change_one_word(stream, c)
    verb = _SAME[d.verb]
    core = (*d.subject, verb, *d.thing)
    text = stream.pick([(*core, *d.place, *d.time), (*d.time, *core, *d.place), (*d.place, *core, *d.time)])
    return _pair_sample("paraphrase", ["same"], c.words(), text, yes, before)


def make_judgement(stream: Stream, kind: str, *, before: Sequence[str] = ()) -> ToySample:
    """Generate a sample of one of KINDS. `before` are the words of few-shot examples."""
    makers = {"acceptability": _make_acceptability, "entailment": _make_entailment, "paraphrase": _make_paraphrase}
    return makers[kind](stream, before=before)
