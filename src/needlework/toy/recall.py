"""Recall samples of the toy language: key-value lists (multi-query associative recall), phone books and copying."""

from __future__ import annotations

from needlework.toy import facts
from needlework.toy import words as w
from needlework.toy.sample import Stream, ToySample, Words, WordSpan

PLAIN_WORDS: Words = (*w.THINGS, *w.PLACES, *w.LOOKS, *w.PEOPLE)


def make_key_values(stream: Stream, pairs: int, queries: int = 1) -> list[ToySample]:
    """Generate a list of key-value pairs and one sample for each query; prompts contain the earlier queries and answers."""
    keys = stream.distinct(w.NAMES, pairs)
    values = stream.distinct(PLAIN_WORDS, pairs)
    prompt = ["pairs", ":"]
    spans = []
    for key, value in zip(keys, values, strict=True):
        spans.append(WordSpan("needle", len(prompt), len(prompt) + 2))
        prompt += [key, value]
    prompt += [".", "ask", ":"]
    spare = [word for word in PLAIN_WORDS if word not in values]
    samples = []
    for i in stream.distinct(range(pairs), queries):
        prompt.append(keys[i])
        samples.append(
            ToySample(
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
    """Generate a list of names with four-digit numbers and one sample for each query; prompts contain the earlier answers."""
    names = stream.distinct(w.NAMES, entries)
    numbers: list[Words] = []
    while len(numbers) < entries + 3:
        number = tuple(stream.pick(w.DIGITS) for _ in range(4))
        if number not in numbers:
            numbers.append(number)
    prompt = ["phone", "book", ":"]
    spans = []
    for name, number in zip(names, numbers, strict=False):
        spans.append(WordSpan("needle", len(prompt), len(prompt) + 5))
        prompt += [name, *number, "."]
    samples = []
    for i in stream.distinct(range(entries), queries):
        prompt += ["question", ":", "what", "is", "the", "phone", "number", "of", names[i], "?", "answer", ":"]
        samples.append(
            ToySample(
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


def make_copy(stream: Stream, length: int) -> ToySample:
    """Generate a sample that asks to repeat `length` random words."""
    text = tuple(stream.pick(PLAIN_WORDS) for _ in range(length))
    return ToySample(
        task="copy",
        prompt=("copy", ":", *text, ".", "again", ":"),
        target=text,
        spans=(WordSpan("needle", 2, 2 + length),),
        context_tokens=length,
    )
