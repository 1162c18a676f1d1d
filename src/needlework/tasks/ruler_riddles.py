"""RULER's riddles: what is hidden, what is asked, what is right and what is wrong. No tokens here, only text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from needlework.errors import NeedleworkError
from needlework.tasks.prompts import Piece
from needlework.tasks.retrieval import different
from needlework.tasks.ruler_language import Language
from needlework.toy.sample import Stream

SPARE = 3  # values that stand nowhere in the context
COMMON_TIMES = 10  # a common word occurs so many times as often as any other


@dataclass(frozen=True)
class Hidden:
    """A sentence to hide, with its value marked."""

    before: str
    value: str
    after: str
    name: str = "distractor"

    def pieces(self) -> list[Piece]:
        inside = (self.name, "value") if self.name == "needle" else (self.name,)
        parts = [Piece(self.before, (self.name,)), Piece(self.value, inside), Piece(self.after, (self.name,))]
        return [part for part in parts if part.text]

    @property
    def text(self) -> str:
        return self.before + self.value + self.after


@dataclass(frozen=True)
class Riddle:
    """The first target is the one that is offered as the right option."""

    hidden: Sequence[Hidden]
    question: str
    targets: Sequence[str]
    wrong: Sequence[str]  # stand in the context
    absent: Sequence[str]
    ordered: bool = False  # the sentences must keep their order


def _sentence(template: str, mark: str, marked: str, **words: str) -> Hidden:
    before, _, after = template.partition("{" + mark + "}")
    return Hidden(before.format(**words), marked, after.format(**words))


def needle_riddles(stream: Stream, language: Language, asked: int, values: int, others: int) -> list[Riddle]:
    """`asked` keys with `values` values each, among `others` keys with one value each.

    Several keys are one question in English. In the toy language they are asked one after the other, each riddle with
    the answers to those before it, as in the documents that zoo models were trained on.
    """
    keys = different(stream, language.keys, asked + others, "keys", "ask for fewer")
    numbers = language.numbers(stream, asked * values + others + SPARE)
    needles = [_sentence(language.needle, "value", numbers[i], key=keys[i // values]) for i in range(asked * values)]
    rest = numbers[asked * values :]
    more = [_sentence(language.needle, "value", number, key=key) for number, key in zip(rest, keys[asked:], strict=False)]
    wrong, absent = rest[:others], rest[others:]
    own = numbers[: asked * values]
    if asked == 1 or language.questions:
        template = language.question if asked == 1 else language.questions
        question = template.format(key=language.listed(keys[:asked]))
        hidden = [*(replace(needle, name="needle") for needle in needles), *more]
        return [Riddle(hidden, question, own, [*(own[values:] if asked > 1 else ()), *wrong], absent)]
    riddles, before = [], ""
    for i in range(asked):
        hidden = [*(replace(n, name="needle" if j == i else "distractor") for j, n in enumerate(needles)), *more]
        question = before + language.question.format(key=keys[i])
        riddles.append(Riddle(hidden, question, [own[i]], [*(v for v in own if v != own[i]), *wrong], absent))
        before = f"{question} {language.lead} {own[i]} . question : "
    return riddles


def variable_riddle(stream: Stream, language: Language, chains: int, hops: int) -> Riddle:
    """Chains of names that hand one value on; which names have the first chain's value? All sentences of it are needles."""
    length = hops + 1
    keys = different(stream, language.keys, chains * length + SPARE, "names", "ask for fewer")
    numbers = language.numbers(stream, chains)
    chosen = [keys[c * length : (c + 1) * length] for c in range(chains)]
    sentences: list[list[Hidden]] = []
    for number, names in zip(numbers, chosen, strict=True):
        steps = [_sentence(language.given, "key", names[0], value=number)]
        steps += [_sentence(language.copied, "key", b, other=a) for a, b in pairwise(names)]
        sentences.append(steps)
    sentences[0] = [replace(step, name="needle") for step in sentences[0]]
    turns = stream.mixed([c for c in range(chains) for _ in range(length)])
    waiting = [iter(steps) for steps in sentences]
    hidden = [next(waiting[c]) for c in turns]
    wrong = stream.mixed([name for names in chosen[1:] for name in names])
    return Riddle(hidden, language.who.format(value=numbers[0]), chosen[0][::-1], wrong, keys[-SPARE:], ordered=True)


def common_counts(pool: Sequence[str], top: int, words: int) -> dict[str, int]:
    """`top` words that occur at least ten times as often as any of the others, `words` in all or a few less."""
    times = max(1, words // (top * COMMON_TIMES + len(pool) - top))
    others = min(len(pool) - top, words // times - top * COMMON_TIMES)
    if others < SPARE:
        raise NeedleworkError(f"{words} words are too few for {top} common ones; use a greater length or a smaller top")
    common = (words - times * others) // top
    return {word: common if i < top else times for i, word in enumerate(pool[: top + others])}


def zipf_counts(pool: Sequence[str], top: int, words: int, power: float) -> dict[str, int]:
    """Word k occurs in proportion to k ** -power; the first `top` differ from all that follow."""
    shares = [k**-power for k in range(1, len(pool) + 1)]
    counts = {word: round(words * share / sum(shares)) for word, share in zip(pool, shares, strict=True)}
    counts = {word: count for word, count in counts.items() if count}
    ranked = [*counts.values(), 0]
    if len(counts) < top + SPARE or ranked[top - 1] <= ranked[top]:
        raise NeedleworkError(f"{words} words are too few to tell the {top} most frequent; use a greater length")
    return counts


def word_riddle(
    stream: Stream, language: Language, counts: dict[str, int], top: int, absent: Sequence[str]
) -> tuple[Riddle, list[Piece]]:
    """A list of words in random order; the first `top` of `counts` are the answer, and every one of them is a needle."""
    targets = list(counts)[:top]
    listed = stream.mixed([word for word, count in counts.items() for _ in range(count)])
    pieces: list[Piece] = []
    for word in listed:
        pieces += [Piece(word, ("needle",) if word in targets else ()), Piece(language.join)]
    wrong = stream.mixed(list(counts)[top:])
    return Riddle((), language.most.format(count=top), targets, wrong, absent), pieces[:-1]
