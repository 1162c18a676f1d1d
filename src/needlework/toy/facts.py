"""Facts of the toy language, fixed for all documents and thus stored in the weights, and the samples that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needlework.toy import words as w
from needlework.toy.sample import Stream, ToySample, Words


@dataclass(frozen=True)
class FactSubject:
    """A group of facts: one value for each key, and templates with the key as {k}. The value follows a statement."""

    name: str
    keys: Words
    values: Words
    statements: tuple[str, ...]
    questions: tuple[str, ...]

    def options(self) -> Words:
        return tuple(dict.fromkeys(self.values))


def _subject(name: str, keys: Words, values: Words, statements: str, questions: str) -> FactSubject:
    """Assign a value to each key by a fixed shuffle; the values are used equally often, give or take one."""
    repeated = (values * (len(keys) // len(values) + 1))[: len(keys)]
    matched = tuple(Stream("facts", name).mixed(repeated))
    return FactSubject(name, keys, matched, tuple(statements.split("|")), tuple(questions.split("|")))


SUBJECTS: dict[str, FactSubject] = {
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

# Templates are split only once, because training generates hundreds of thousands of sentences from them.
_STATEMENTS = {s.name: [text.split() for text in s.statements] for s in SUBJECTS.values()}
_QUESTIONS = {s.name: [text.split() for text in s.questions] for s in SUBJECTS.values()}
_KEYS = {
    (s.name, value): [key for key, value_of_key in zip(s.keys, s.values, strict=True) if value_of_key == value]
    for s in SUBJECTS.values()
    for value in s.options()
}
_VALUE = {(s.name, key): value for s in SUBJECTS.values() for key, value in zip(s.keys, s.values, strict=True)}


def _fill(template: Sequence[str], key: str) -> list[str]:
    return [key if word == "{k}" else word for word in template]


def make_statement(stream: Stream, fact: tuple[str, str] | None = None) -> list[str]:
    """Return the words of a true statement with its full stop; the default is a random fact."""
    subject, key = fact or stream.pick(ALL_FACTS)
    return [*_fill(stream.pick(_STATEMENTS[subject]), key), _VALUE[subject, key], "."]


def _mix_options(stream: Stream, subject: str, right: str) -> list[str]:
    """Return the right value and three wrong ones of the same subject, in random order."""
    return stream.mixed([right, *stream.distinct([value for value in SUBJECTS[subject].options() if value != right], 3)])


def make_cloze(
    stream: Stream, *, fact: tuple[str, str] | None = None, asked: bool | None = None, before: Sequence[str] = ()
) -> ToySample:
    """Generate a cloze sample: an unfinished statement or, if `asked`, a question (None: random). The target is the value."""
    subject, key = fact or stream.pick(ALL_FACTS)
    as_question = stream.chance(0.5) if asked is None else asked
    if as_question:
        body = ["question", ":", *_fill(stream.pick(_QUESTIONS[subject]), key), "answer", ":"]
    else:
        body = _fill(stream.pick(_STATEMENTS[subject]), key)
    value = _VALUE[subject, key]
    options = _mix_options(stream, subject, value)
    return ToySample(
        task="cloze",
        prompt=(*before, *body),
        target=(value,),
        choices=tuple((option,) for option in options),
        answer=options.index(value),
        subject=subject,
        key=key,
        form="question" if as_question else "statement",
    )


def list_options(options: Sequence[str]) -> list[str]:
    """Return each option followed by its letter."""
    return [word for letter, option in zip(w.LETTERS, options, strict=False) for word in (option, letter)]


def _letter_sample(task: str, form: str, prompt: Words, right: int, subject: str, key: str | None = None) -> ToySample:
    """Return a sample whose options are the four letters."""
    return ToySample(
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


def make_letter_choice(stream: Stream, *, fact: tuple[str, str] | None = None, before: Sequence[str] = ()) -> ToySample:
    """Generate a question with four lettered options. The target is the letter, which is given in the context only."""
    subject, key = fact or stream.pick(ALL_FACTS)
    value = _VALUE[subject, key]
    options = _mix_options(stream, subject, value)
    right = options.index(value)
    body = [*list_options(options), "question", ":", *_fill(stream.pick(_QUESTIONS[subject]), key), "answer", ":"]
    return _letter_sample("letter", "letter", (*before, *body), right, subject, key)


def ask_by_name(option: str) -> list[str]:
    """Return the question for the word that follows `option` in a list."""
    return ["question", ":", "which", "one", "is", option, "?", "answer", ":"]


def make_letter_lines(stream: Stream, naming_share: float) -> list[tuple[list[str], Words]]:
    """Generate two to four lettered options and a question for each, as (words, answer) lines. For training only.

    One list with four questions teaches the look-up four times as fast as four lists with one question each.

    Args:
        stream: random generator.
        naming_share: probability that a question names the option itself, so that it needs no fact.
    """
    subject = stream.pick(SUBJECT_NAMES)
    options = stream.distinct(SUBJECTS[subject].options(), stream.between(2, 4))
    lines: list[tuple[list[str], Words]] = []
    for i in stream.mixed(range(len(options))):
        if stream.chance(naming_share):
            question = ask_by_name(options[i])
        else:
            key = stream.pick(_KEYS[subject, options[i]])
            question = ["question", ":", *_fill(stream.pick(_QUESTIONS[subject]), key), "answer", ":"]
        lines.append(([*(() if lines else list_options(options)), *question], (w.LETTERS[i],)))
    return lines


def make_letter_lookup(stream: Stream, *, before: Sequence[str] = ()) -> ToySample:
    """Generate a letter look-up that needs no fact, because the question names the option itself."""
    subject = stream.pick(SUBJECT_NAMES)
    options = stream.distinct(SUBJECTS[subject].options(), 4)
    right = stream.below(4)
    body = [*list_options(options), *ask_by_name(options[right])]
    return _letter_sample("letter_lookup", "lookup", (*before, *body), right, subject)
