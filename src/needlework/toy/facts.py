"""Samples that need no recall: facts, fixed for all documents and thus stored in the weights, and yes-or-no judgements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needlework.toy import words as w
from needlework.toy.sample import Stream, ToySample, Words, WordSpan, fill_words

JUDGEMENTS = ("acceptability", "entailment", "paraphrase")  # as in GLUE


@dataclass(frozen=True)
class FactSubject:
    """A group of facts: one value for each key, and templates with the key as {k}. The value follows a statement."""

    name: str
    keys: Words
    values: Words
    statements: tuple[Words, ...]
    questions: tuple[Words, ...]

    def options(self) -> Words:
        return tuple(dict.fromkeys(self.values))

    def ask(self, stream: Stream, key: str) -> list[str]:
        return ["question", ":", *fill_words(stream.pick(self.questions), k=key), "answer", ":"]


SUBJECTS: dict[str, FactSubject] = {}
for _name, _fact in w.LANGUAGE["facts"].items():
    _keys, _values = w.CLASSES[_fact["keys"]], w.CLASSES[_fact["values"]]
    # Values are assigned by a fixed shuffle and used equally often, give or take one.
    _repeated = (_values * (len(_keys) // len(_values) + 1))[: len(_keys)]
    _texts = [tuple(tuple(text.split()) for text in _fact[kind]) for kind in ("statements", "questions")]
    SUBJECTS[_name] = FactSubject(_name, _keys, tuple(Stream("facts", _name).mixed(_repeated)), *_texts)
SUBJECT_NAMES: Words = tuple(SUBJECTS)
ALL_FACTS: tuple[tuple[str, str], ...] = tuple((s.name, key) for s in SUBJECTS.values() for key in s.keys)
_VALUE = {(s.name, key): value for s in SUBJECTS.values() for key, value in zip(s.keys, s.values, strict=True)}


def make_statement(stream: Stream, fact: tuple[str, str] | None = None) -> list[str]:
    """Return the words of a true statement with its full stop; the default is a random fact."""
    subject, key = fact or stream.pick(ALL_FACTS)
    return [*fill_words(stream.pick(SUBJECTS[subject].statements), k=key), _VALUE[subject, key], "."]


def _mix_options(stream: Stream, subject: str, right: str) -> list[str]:
    """Return the right value and three wrong ones of the same subject, in random order."""
    return stream.mixed([right, *stream.distinct([value for value in SUBJECTS[subject].options() if value != right], 3)])


def make_cloze(
    stream: Stream, *, fact: tuple[str, str] | None = None, asked: bool | None = None, before: Sequence[str] = ()
) -> ToySample:
    """Generate a cloze sample: an unfinished statement or, if `asked`, a question (None: random). The target is the value."""
    subject, key = fact or stream.pick(ALL_FACTS)
    as_question = stream.chance(0.5) if asked is None else asked
    known = SUBJECTS[subject]
    body = known.ask(stream, key) if as_question else fill_words(stream.pick(known.statements), k=key)
    value = _VALUE[subject, key]
    options = _mix_options(stream, subject, value)
    return ToySample(
        prompt=(*before, *body),
        target=(value,),
        choices=tuple((option,) for option in options),
        subject=subject,
        key=key,
        form="question" if as_question else "statement",
    )


def list_options(options: Sequence[str]) -> list[str]:
    """Return each option followed by its letter."""
    return [word for letter, option in zip(w.LETTERS, options, strict=False) for word in (option, letter)]


def _letter_sample(form: str, prompt: Words, right: int, subject: str, key: str | None = None) -> ToySample:
    """Return a sample whose options are the four letters."""
    letters = tuple((letter,) for letter in w.LETTERS)
    return ToySample(prompt=prompt, target=letters[right], choices=letters, subject=subject, key=key, form=form)


def make_letter_choice(stream: Stream, *, fact: tuple[str, str] | None = None, before: Sequence[str] = ()) -> ToySample:
    """Generate a question with four lettered options. The target is the letter, which is given in the context only."""
    subject, key = fact or stream.pick(ALL_FACTS)
    value = _VALUE[subject, key]
    options = _mix_options(stream, subject, value)
    prompt = (*before, *list_options(options), *SUBJECTS[subject].ask(stream, key))
    return _letter_sample("letter", prompt, options.index(value), subject, key)


def ask_by_name(option: str) -> list[str]:
    """Return the question for the word that follows `option` in a list."""
    return ["question", ":", "which", "one", "is", option, "?", "answer", ":"]


def make_letter_lookup(stream: Stream, *, before: Sequence[str] = ()) -> ToySample:
    """Generate a letter look-up that needs no fact, because the question names the option itself."""
    subject = stream.pick(SUBJECT_NAMES)
    options = stream.distinct(SUBJECTS[subject].options(), 4)
    right = stream.below(4)
    prompt = (*before, *list_options(options), *ask_by_name(options[right]))
    return _letter_sample("lookup", prompt, right, subject)


def make_letter_lines(stream: Stream, naming_share: float) -> list[tuple[list[str], Words]]:
    """Generate two to four lettered options and a question for each, as (words, answer) lines. For training only.

    One list with four questions teaches the look-up four times as fast as four lists with one question each. With the probability
    `naming_share`, a question names the option itself, so that it needs no fact.
    """
    subject = SUBJECTS[stream.pick(SUBJECT_NAMES)]
    options = stream.distinct(subject.options(), stream.between(2, 4))
    lines: list[tuple[list[str], Words]] = []
    for i in stream.mixed(range(len(options))):
        if stream.chance(naming_share):
            question = ask_by_name(options[i])
        else:
            keys = [key for key, value in zip(subject.keys, subject.values, strict=True) if value == options[i]]
            question = subject.ask(stream, stream.pick(keys))
        lines.append(([*(() if lines else list_options(options)), *question], (w.LETTERS[i],)))
    return lines


# --- Judgements ---

_SAME = {a: b for pair in w.SAME_VERBS for a, b in (pair, pair[::-1])}


def change_one_word(stream: Stream, clause: dict[str, Words]) -> dict[str, Words]:
    """Replace the verb or a noun by another word of its class that is no synonym, so that the meaning changes."""
    kinds = {"subject": w.PEOPLE, "verb": w.VERBS, "thing": w.THINGS, "place": w.PLACES}
    part = stream.pick(tuple(kinds))
    *before, last = clause[part]
    return {**clause, part: (*before, stream.pick([word for word in kinds[part] if word not in (last, _SAME.get(last))]))}


def make_judgement(stream: Stream, kind: str, *, before: Sequence[str] = ()) -> ToySample:
    """Generate a sample of one of JUDGEMENTS. `before` are the words of few-shot examples.

    acceptability: a sentence; "no": subject and verb or verb and object are swapped, or the object's determiner is moved.
    entailment: two sentences; "yes": the second only omits parts of the first; "no": one word was replaced as well.
    paraphrase: two sentences; "yes": the second has a synonymous verb and perhaps another order; "no": one word differs, too.
    """
    manner = (stream.pick(w.MANNERS),) if stream.chance(0.3) else ()
    look = (stream.pick(w.LOOKS),) if stream.chance(0.3) else ()
    clause: dict[str, Words] = {
        "subject": (stream.pick(w.DETERMINERS), *manner, stream.pick(w.PEOPLE)),
        "verb": (stream.pick(w.VERBS),),
        "thing": (stream.pick(w.DETERMINERS), *look, stream.pick(w.THINGS)),
        "place": (stream.pick(w.SIDES), "the", stream.pick(w.PLACES)),
        "time": stream.pick(w.TIMES) if stream.chance(0.4) else (),
    }
    subject, verb, thing, place, time = clause.values()
    yes = stream.chance(0.5)
    first = (*subject, *verb, *thing, *place, *time)
    if kind == "acceptability":
        swapped = (*verb, *subject, *thing), (*subject, *thing, *verb), (*subject, *verb, *thing[1:], thing[0])
        parts = [("judge", first if yes else (*stream.pick(swapped), *place, *time))]
    else:
        subject, verb, thing, other_place, time = (clause if yes else change_one_word(stream, clause)).values()
        if kind == "entailment":
            kept = other_place if other_place != place or stream.chance(0.5) else ()
            second = ("so", (*subject, *verb, *thing, *kept))
        else:
            core = (*subject, _SAME[verb[0]], *thing)
            orders = (*core, *other_place, *time), (*time, *core, *other_place), (*other_place, *core, *time)
            second = ("same", stream.pick(orders))
        parts = [("first", first), second]
    prompt, spans = list(before), []
    for name, (opening, words) in zip(("first", "second"), parts, strict=False):
        spans.append(WordSpan(name, len(prompt) + 2, len(prompt) + 2 + len(words)))
        prompt += [opening, ":", *words, "."]
    return ToySample(
        prompt=(*prompt, "answer", ":"),
        target=("yes" if yes else "no",),
        spans=tuple(spans),
        choices=(("no",), ("yes",)),
        subject=kind,
        form=kind,
    )
