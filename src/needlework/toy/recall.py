"""Recall in the toy language: key-value lists (multi-query associative recall), phone books and copying."""

from __future__ import annotations

from needlework.toy import facts
from needlework.toy import words as w
from needlework.toy.sample import Sample, Span, Stream, Words

PLAIN_WORDS: Words = (*w.THINGS, *w.PLACES, *w.LOOKS, *w.PEOPLE)


def key_values(stream: Stream, pairs: int, queries: int = 1) -> list[Sample]:
    """One list of pairs, asked for `queries` of its keys one after the other: each prompt holds those before it."""
    keys = stream.distinct(w.NAMES, pairs)
    values = stream.distinct(PLAIN_WORDS, pairs)
    prompt = ["pairs", ":"]
    spans = []
    for key, value in zip(keys, values, strict=True):
        spans.append(Span("needle", len(prompt), len(prompt) + 2))
        prompt += [key, value]
    prompt += [".", "ask", ":"]
    spare = [word for word in PLAIN_WORDS if word not in values]
    samples = []
    for i in stream.distinct(range(pairs), queries):
        prompt.append(keys[i])
        samples.append(
            Sample(
                task="recall",
                prompt=tuple(prompt),
                target=(values[i],),
                spans=(spans[i],),
                distractors=tuple((value,) for j, value in enumerate(values) if j != i),
                absent=tuple((value,) for value in stream.distinct(spare, 3)),
                relation="pair",
                key=keys[i],
                context_tokens=2 * pairs,
                stop="",
            )
        )
        prompt.append(values[i])
    return samples


def any_pairs(stream: Stream, most: int) -> list[tuple[list[str], Words]]:
    """Training only: a key-value list of any kinds of word, asked as lists are or as letters are; (words, answer) in turn.

    Names with words alone teach a look-up of names and words: neither an option as key nor a letter as value follows from
    it, nor another way to ask. Here they meet in every combination, so each is learnt beside others that are known.
    """
    options = [facts.SUBJECTS[subject].options() for subject in stream.distinct(facts.SUBJECT_NAMES, 2)]
    keys, values = stream.pick((w.NAMES, options[0])), stream.pick((PLAIN_WORDS, w.LETTERS, options[1]))
    pairs = stream.between(2, min(most, len(keys), len(values)))
    listed = list(zip(stream.distinct(keys, pairs), stream.distinct(values, pairs), strict=True))
    named = stream.chance(0.5)
    words = [word for pair in listed for word in pair]
    words = words if named else ["pairs", ":", *words, ".", "ask", ":"]
    lines: list[tuple[list[str], Words]] = []
    # With replacement: asked once each, the last ones are found by leaving out the others.
    for key, value in (stream.pick(listed) for _ in range(min(pairs, 4))):
        lines.append(([*words, *(facts.naming(key) if named else [key])], (value,)))
        words = ["."] if named else []
    return lines


def phone_book(stream: Stream, entries: int, queries: int = 1) -> list[Sample]:
    """A list of names and numbers of four digits; later prompts hold the earlier questions and answers."""
    names = stream.distinct(w.NAMES, entries)
    numbers: list[Words] = []
    while len(numbers) < entries + 3:
        number = tuple(stream.pick(w.DIGITS) for _ in range(4))
        if number not in numbers:
            numbers.append(number)
    prompt = ["phone", "book", ":"]
    spans = []
    for name, number in zip(names, numbers, strict=False):
        spans.append(Span("needle", len(prompt), len(prompt) + 5))
        prompt += [name, *number, "."]
    samples = []
    for i in stream.distinct(range(entries), queries):
        prompt += ["question", ":", "what", "is", "the", "phone", "number", "of", names[i], "?", "answer", ":"]
        samples.append(
            Sample(
                task="phone_book",
                prompt=tuple(prompt),
                target=numbers[i],
                spans=(spans[i],),
                distractors=tuple(number for j, number in enumerate(numbers[:entries]) if j != i),
                absent=tuple(numbers[entries:]),
                relation="phone",
                key=names[i],
                context_tokens=6 * entries,
            )
        )
        prompt += [*numbers[i], "."]
    return samples


def copying(stream: Stream, length: int) -> Sample:
    """Say the same words again."""
    text = tuple(stream.pick(PLAIN_WORDS) for _ in range(length))
    return Sample(
        task="copy",
        prompt=("copy", ":", *text, ".", "again", ":"),
        target=text,
        spans=(Span("needle", 2, 2 + length),),
        context_tokens=length,
    )
