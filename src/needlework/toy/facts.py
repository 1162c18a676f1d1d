"""The fixed world of facts: the same in every document, so a model knows them from training or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needlework.toy import words as w
from needlework.toy.sample import Sample, Stream, Words


@dataclass(frozen=True)
class Subject:
    """A field of knowledge: each key has one value; templates hold {k}, and their value comes at the very end."""

    name: str
    keys: Words
    values: Words
    statements: tuple[str, ...]
    questions: tuple[str, ...]

    def options(self) -> Words:
        return tuple(dict.fromkeys(self.values))


def _matched(name: str, keys: Words, values: Words) -> Words:
    """A value for each key, each value used as equally often as the counts allow, by a shuffle fixed for all time."""
    repeated = (values * (len(keys) // len(values) + 1))[: len(keys)]
    return tuple(Stream("facts", name).mixed(repeated))


def _subject(name: str, keys: Words, values: Words, statements: str, questions: str) -> Subject:
    return Subject(name, keys, _matched(name, keys, values), tuple(statements.split("|")), tuple(questions.split("|")))


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        _subject(
            "geography",
            w.COUNTRIES,
            w.CITIES,
            "the capital of {k} is|people of {k} live in the city of",
            "what is the capital of {k} ?|which city is the capital of {k} ?",
        ),
        _subject(
            "history",
            w.CITIES,
            w.FOUNDERS,
            "the founder of {k} is|the city of {k} has the founder",
            "who is the founder of {k} ?|who founded the city of {k} ?",
        ),
        _subject(
            "cooking",
            w.COUNTRIES,
            w.DISHES,
            "people in {k} eat|in {k} people eat",
            "what does one eat in {k} ?|what is right to eat in {k} ?",
        ),
        _subject(
            "animals",
            w.ANIMALS,
            w.HABITATS,
            "the {k} lives in the|this {k} lives in a",
            "where does the {k} live ?|in which one does the {k} live ?",
        ),
        _subject(
            "trades",
            w.TRADES,
            w.TOOLS,
            "the {k} works with the|for work the {k} has a",
            "what does the {k} use for work ?|which one does the {k} work with ?",
        ),
        _subject(
            "stones",
            w.STONES,
            w.COLOURS,
            "the colour of {k} is|the one colour {k} has is",
            "what is the colour of {k} ?|which colour has {k} ?",
        ),
    )
}
SUBJECT_NAMES: Words = tuple(SUBJECTS)
ALL_FACTS: tuple[tuple[str, str], ...] = tuple((s.name, key) for s in SUBJECTS.values() for key in s.keys)

# Templates are split once: documents are made of hundreds of thousands of these.
_STATEMENTS = {s.name: [text.split() for text in s.statements] for s in SUBJECTS.values()}
_QUESTIONS = {s.name: [text.split() for text in s.questions] for s in SUBJECTS.values()}
_KEYS = {
    (s.name, value): [key for key, value_of_key in zip(s.keys, s.values, strict=True) if value_of_key == value]
    for s in SUBJECTS.values()
    for value in s.options()
}
_VALUE = {(s.name, key): value for s in SUBJECTS.values() for key, value in zip(s.keys, s.values, strict=True)}


def _filled(template: Sequence[str], key: str) -> list[str]:
    return [key if word == "{k}" else word for word in template]


def statement(stream: Stream, fact: tuple[str, str] | None = None) -> list[str]:
    """One true sentence with its full stop."""
    subject, key = fact or stream.pick(ALL_FACTS)
    return [*_filled(stream.pick(_STATEMENTS[subject]), key), _VALUE[subject, key], "."]


def _wrong_values(stream: Stream, subject: str, right: str, count: int) -> list[str]:
    return stream.distinct([value for value in SUBJECTS[subject].options() if value != right], count)


def cloze(
    stream: Stream, *, fact: tuple[str, str] | None = None, asked: bool | None = None, before: Sequence[str] = ()
) -> Sample:
    """A fact to complete: as an unfinished statement, or (asked) as a question. There is no letter to look up."""
    subject, key = fact or stream.pick(ALL_FACTS)
    as_question = stream.chance(0.5) if asked is None else asked
    if as_question:
        body = ["question", ":", *_filled(stream.pick(_QUESTIONS[subject]), key), "answer", ":"]
    else:
        body = _filled(stream.pick(_STATEMENTS[subject]), key)
    value = _VALUE[subject, key]
    options = stream.mixed([value, *_wrong_values(stream, subject, value, 3)])
    return Sample(
        task="cloze",
        prompt=(*before, *body),
        target=(value,),
        choices=tuple((option,) for option in options),
        answer=options.index(value),
        subject=subject,
        key=key,
        form="question" if as_question else "statement",
    )


def lettered(options: Sequence[str]) -> list[str]:
    return [word for letter, option in zip(w.LETTERS, options, strict=False) for word in (option, letter)]


def _letter_sample(task: str, form: str, prompt: Words, right: int, subject: str, key: str | None = None) -> Sample:
    """A question whose options are the four letters."""
    return Sample(
        task=task,
        prompt=prompt,
        target=(w.LETTERS[right],),
        choices=tuple((letter,) for letter in w.LETTERS),
        answer=right,
        distractors=tuple((letter,) for i, letter in enumerate(w.LETTERS) if i != right),
        subject=subject,
        key=key,
        form=form,
    )


def letter_choice(stream: Stream, *, fact: tuple[str, str] | None = None, before: Sequence[str] = ()) -> Sample:
    """The same facts with four lettered options: the answer is the letter, which stands in the context only."""
    subject, key = fact or stream.pick(ALL_FACTS)
    value = _VALUE[subject, key]
    options = stream.mixed([value, *_wrong_values(stream, subject, value, 3)])
    right = options.index(value)
    body = [*lettered(options), "question", ":", *_filled(stream.pick(_QUESTIONS[subject]), key), "answer", ":"]
    return _letter_sample("letter", "letter", (*before, *body), right, subject, key)


def naming(option: str) -> list[str]:
    """The question for what stands behind a word in a list."""
    return ["question", ":", "which", "one", "is", option, "?", "answer", ":"]


def letter_lines(stream: Stream, naming_share: float) -> list[tuple[list[str], Words]]:
    """Training only: two to four lettered options, then a question for each of them, as (words, answer) one after the other.

    One list asked four times teaches the look-up four times as fast as four lists asked once.
    """
    subject = stream.pick(SUBJECT_NAMES)
    options = stream.distinct(SUBJECTS[subject].options(), stream.between(2, 4))
    lines: list[tuple[list[str], Words]] = []
    for i in stream.mixed(range(len(options))):
        if stream.chance(naming_share):
            question = naming(options[i])
        else:
            key = stream.pick(_KEYS[subject, options[i]])
            question = ["question", ":", *_filled(stream.pick(_QUESTIONS[subject]), key), "answer", ":"]
        lines.append(([*(() if lines else lettered(options)), *question], (w.LETTERS[i],)))
    return lines


def letter_lookup(stream: Stream, *, before: Sequence[str] = ()) -> Sample:
    """Letter look-up with no knowledge in it: the question names the option itself."""
    subject = stream.pick(SUBJECT_NAMES)
    options = stream.distinct(SUBJECTS[subject].options(), 4)
    right = stream.below(4)
    body = [*lettered(options), *naming(options[right])]
    return _letter_sample("letter_lookup", "lookup", (*before, *body), right, subject)
