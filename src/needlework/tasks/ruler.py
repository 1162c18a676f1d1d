"""RULER's retrieval and aggregation tasks at any length, implemented from their definitions (Hsieh et al. 2024).

single: one needle. multikey: distractors about other keys (`keys: full`: needles instead of a haystack). multivalue: one key with
several values. multiquery: several queried keys. variables: variable tracking along chains of assignments. common_words and
frequent_words: the most frequent words of a list (fixed frequencies; a Zipf distribution).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import english, toy
from needlework.tasks.base import Item, Mode, TaskExtent, Tokenizer, task
from needlework.tasks.haystack import cut_haystack, insert_needles, iterate_sentences
from needlework.tasks.prompts import Piece, token_ids
from needlework.tasks.retrieval import Draft, Retrieval, Sizes, choice_companion, draw_distinct
from needlework.tasks.scores import begins, share_found
from needlework.toy import words as w
from needlework.toy.needles import make_sentence
from needlework.toy.recall import PLAIN_WORDS
from needlework.toy.sample import Stream

Variant = Literal["single", "multikey", "multivalue", "multiquery", "variables", "common_words", "frequent_words"]
LENGTHS = {"english": (512, 1024, 2048, 4096), "toy": (64, 128, 192)}
RESERVE = {"english": 128, "toy": 0}
MOST_OPTIONS = 7  # wrong options that occur in the context
SPARE = 3  # wrong options that do not
COMMON_TIMES = 10  # minimum ratio of the frequencies of common and other words


@task
class Ruler(Retrieval):
    """RULER by generation: `found` is the fraction of targets in the answer (RULER's score), `correct` requires all."""

    kind = "ruler"
    mode: ClassVar[Mode] = "generate"
    files: ClassVar[tuple[str, ...]] = ("haystack",)
    variant: Variant = "single"
    lengths: Sizes | None = None
    reserve_tokens: int | None = Field(None, ge=0)  # of each length, for question and answer; None: RESERVE
    keys: PositiveInt | Literal["full"] = 3  # needles about other keys, except in single
    values: int = Field(4, ge=2)  # of the queried key, in multivalue
    queries: int = Field(4, ge=2)  # queried keys, in multiquery
    chains: int = Field(2, ge=1)  # in variables
    hops: int = Field(4, ge=1)  # assignments from name to name in each chain
    top: int = Field(3, ge=1)  # most frequent words that are asked for
    zipf: float = Field(2.0, gt=0)  # exponent, in frequent_words
    haystack: str | None = None  # glob pattern of text files; None: generated sentences

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        world = toy.resolve(self.world, tokenizer)
        language = LANGUAGES[world]
        new_tokens = self.ending(tokenizer)[0]
        for length, i in product(self.lengths or LENGTHS[world], range(self.samples)):
            stream = Stream("eval", "ruler", self.variant, seed, length, i)
            name = f"ruler/{self.variant}/length={length}/{i}"
            reserve = RESERVE[world] if self.reserve_tokens is None else self.reserve_tokens
            room = length - reserve
            make = self._words if self.variant.endswith("_words") else self._needles
            try:
                drafts = make(stream, language, tokenizer, room)
            except NeedleworkError as error:
                raise NeedleworkError(f"{name}: {error}") from None
            for j, draft in enumerate(drafts):
                facts = {**draft.facts, "length_tokens": length, "variant": self.variant}
                named = f"{name}/query={j}" if len(drafts) > 1 else name
                item = self.drafted_item(tokenizer, replace(draft, facts=facts), named, name, window)
                yield self.fitted(item, new_tokens, max_tokens)

    def extent(self) -> TaskExtent:
        lengths = self.lengths or LENGTHS["english"]
        asked = self.queries if self.variant == "multiquery" else 1
        return TaskExtent(len(lengths) * self.samples * asked, max(lengths))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        targets = item.facts["targets"]
        if len(targets) == 1 and item.facts["world"] == "toy":
            share = float(begins(answer.text, targets[0]))
        else:
            share = share_found(answer.text, targets)
        return {"correct": float(share == 1), "found": share}

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """Return max_new_tokens and the stop text; answers with several targets do not end at a full stop."""
        several = self.variant not in ("single", "multikey", "multiquery")
        return (self.max_new_tokens, self.stop) if several else super().ending(tokenizer)

    def in_context(self) -> int:
        """Return the number of wrong options that occur in the context."""
        keys = MOST_OPTIONS if self.keys == "full" else self.keys
        counts = {
            "single": 0,
            "multiquery": keys + self.queries - 1,
            "variables": (self.chains - 1) * (self.hops + 1),
        }
        return SPARE if self.variant.endswith("_words") else min(MOST_OPTIONS, counts.get(self.variant, keys))

    def _make_questions(self, stream: Stream, language: Language, keys: int) -> list[RulerQuestion]:
        if self.variant == "variables":
            return [make_variable_question(stream, language, self.chains, self.hops)]
        asked = self.queries if self.variant == "multiquery" else 1
        values = self.values if self.variant == "multivalue" else 1
        return make_needle_questions(stream, language, asked, values, 0 if self.variant == "single" else keys)

    def _needles(self, stream: Stream, language: Language, tokenizer: Tokenizer, room: int) -> list[Draft]:
        example = language.needle.format(key=language.keys[0], value=language.number(stream))
        full = self.keys == "full"
        fill = min(room // (len(token_ids(tokenizer, " " + example)) + 1), len(language.keys) - self.queries) - 1
        if full and fill < MOST_OPTIONS:
            raise NeedleworkError(f"{room} tokens hold fewer than {MOST_OPTIONS + 1} needles; use a greater length")
        questions = self._make_questions(stream, language, fill if self.keys == "full" else self.keys)
        used = sum(len(token_ids(tokenizer, " " + sentence.text)) for sentence in questions[0].hidden)
        if used > room:
            raise NeedleworkError(f"the needles need {used} tokens, there are {room}; use a greater length or fewer needles")
        built_in = self.haystack is None or language.world == "toy"
        source = language.sentences(stream) if built_in else iterate_sentences(self.haystack, stream, start_anywhere=True)
        hay = cut_haystack(tokenizer, source, 0 if full else room - used, whole=language.world == "toy")
        slots = [stream.below(len(hay.ends)) for _ in questions[0].hidden]
        order = slots if not questions[0].ordered else sorted(slots)
        drafts = []
        for question in questions:
            context = insert_needles(
                hay, [(slot, sentence.pieces()) for slot, sentence in zip(order, question.hidden, strict=True)]
            )
            drafts.append(self._draft(language, question, context, hay.tokens + used))
        return drafts

    def _words(self, stream: Stream, language: Language, tokenizer: Tokenizer, room: int) -> list[Draft]:
        common = self.variant == "common_words"
        pool = stream.mixed(language.words if common else language.rare)
        absent, pool = pool[:SPARE], pool[SPARE:]
        words, tokens = room, room + 1
        while tokens > room:  # words have different token counts: reduce the number until all fit
            words = min(words - 1, words * room // tokens)
            counts = common_counts(pool, self.top, words) if common else zipf_counts(pool, self.top, words, self.zipf)
            tokens = sum(count * len(token_ids(tokenizer, language.join + word)) for word, count in counts.items())
        question, context = make_word_question(stream, language, counts, self.top, absent)
        return [self._draft(language, question, context, tokens)]

    def _draft(self, language: Language, question: RulerQuestion, context: Sequence[Piece], tokens: int) -> Draft:
        options = [("true", question.targets[0]), *(("context", text) for text in question.wrong[: self.in_context()])]
        options += [("absent", text) for text in question.absent[: self.absent]]
        toy_words = language.world == "toy"
        return Draft(
            context=context,
            question=question.text,
            target=" ".join(question.targets) if toy_words else language.listed(question.targets),
            lead=language.lead,
            instruction="Answer with nothing but what is asked for.",
            options=options,
            facts={"context_tokens": tokens, "needles": len(question.hidden), "targets": list(question.targets)},
            world=language.world,
            value=question.targets[0] if len(question.targets) == 1 else "",
            spare=question.absent,
        )


RulerChoice = choice_companion(Ruler)


# --- Languages ---

# Invented words for frequent_words, so that only counting helps.
COINED = tuple(
    a + b + c for a, b, c in product(("bro", "fli", "ka", "mu", "ste", "zo"), ("dra", "lo", "ni", "pu"), ("k", "m", "x"))
)


@dataclass(frozen=True)
class Language:
    """Vocabulary and templates of the prompts; templates contain {key}, {value}, {other} or {count}."""

    world: str
    keys: tuple[str, ...]
    words: tuple[str, ...]  # for common_words
    rare: tuple[str, ...]  # for frequent_words
    needle: str
    question: str
    questions: str  # several keys in one question; "": one question after the other
    given: str  # assigns a value to a name
    copied: str  # assigns the value of another name
    who: str  # asks for the names with a value
    most: str  # asks for the {count} most frequent words
    lead: str
    join: str  # separates the words of a list
    number: Callable[[Stream], str]
    sentences: Callable[[Stream], Iterator[str]]

    def numbers(self, stream: Stream, count: int) -> list[str]:
        """Draw `count` distinct values."""
        values: dict[str, None] = {}
        while len(values) < count:
            values[self.number(stream)] = None
        return list(values)

    def listed(self, keys: Sequence[str]) -> str:
        return ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]


def _toy_sentences(stream: Stream) -> Iterator[str]:
    yield " ".join(make_sentence(stream))
    while True:
        yield " " + " ".join(make_sentence(stream))


ENGLISH = Language(
    world="english",
    keys=english.NOUNS,
    words=english.NOUNS,
    rare=COINED,
    needle="The locker number for the {key} is {value}.",
    question="What is the locker number for the {key}? If there are several, give all of them.",
    questions="What are the locker numbers for the {key}?",
    given="The {key} was given the number {value}.",
    copied="The {key} was given the same number as the {other}.",
    who="Which things were given the number {value}, directly or through others? Name all of them.",
    most="Which {count} words occur most often in the list above?",
    lead="ANSWER: ",
    join=" ",
    number=lambda stream: str(stream.between(10000, 99999)),
    sentences=english.sentences,
)
TOY = Language(
    world="toy",
    keys=w.NAMES,
    words=PLAIN_WORDS,
    rare=PLAIN_WORDS,
    needle="the secret code of {key} is {value} .",
    question="what is the secret code of {key} ?",
    questions="",
    given="the secret code of {key} is {value} .",
    copied="the secret code of {key} is the code of {other} .",
    who="who has the secret code {value} ?",
    most="which word is in the context again and again ?",
    lead="answer :",
    join=" ",
    number=lambda stream: " ".join(stream.pick(w.DIGITS) for _ in range(3)),
    sentences=_toy_sentences,
)
LANGUAGES = {"english": ENGLISH, "toy": TOY}


# --- Questions, as text ---


@dataclass(frozen=True)
class HiddenSentence:
    """A sentence to insert, split around its value."""

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
class RulerQuestion:
    """Sentences to insert, question and targets as text. The first target is the right option of the choice task."""

    hidden: Sequence[HiddenSentence]
    text: str
    targets: Sequence[str]
    wrong: Sequence[str]  # wrong options that occur in the context
    absent: Sequence[str]
    ordered: bool = False  # whether the sentences must keep their order


def _mark(template: str, mark: str, marked: str, **words: str) -> HiddenSentence:
    before, _, after = template.partition("{" + mark + "}")
    return HiddenSentence(before.format(**words), marked, after.format(**words))


def make_needle_questions(stream: Stream, language: Language, asked: int, values: int, others: int) -> list[RulerQuestion]:
    """Generate the questions for `asked` keys with `values` values each, among `others` keys with one value each.

    English has one question for several keys. The toy language has one question per key, which contains the questions and
    answers before it, as in the training documents of zoo models.
    """
    keys = draw_distinct(stream, language.keys, asked + others, "keys", "ask for fewer")
    numbers = language.numbers(stream, asked * values + others + SPARE)
    needles = [_mark(language.needle, "value", numbers[i], key=keys[i // values]) for i in range(asked * values)]
    rest = numbers[asked * values :]
    more = [_mark(language.needle, "value", number, key=key) for number, key in zip(rest, keys[asked:], strict=False)]
    wrong, absent = rest[:others], rest[others:]
    own = numbers[: asked * values]
    if asked == 1 or language.questions:
        template = language.question if asked == 1 else language.questions
        question = template.format(key=language.listed(keys[:asked]))
        hidden = [*(replace(needle, name="needle") for needle in needles), *more]
        return [RulerQuestion(hidden, question, own, [*(own[values:] if asked > 1 else ()), *wrong], absent)]
    questions, before = [], ""
    for i in range(asked):
        hidden = [*(replace(n, name="needle" if j == i else "distractor") for j, n in enumerate(needles)), *more]
        question = before + language.question.format(key=keys[i])
        questions.append(RulerQuestion(hidden, question, [own[i]], [*(v for v in own if v != own[i]), *wrong], absent))
        before = f"{question} {language.lead} {own[i]} . question : "
    return questions


def make_variable_question(stream: Stream, language: Language, chains: int, hops: int) -> RulerQuestion:
    """Generate chains of assignments and the question for the names of the first chain, whose sentences are the needles."""
    length = hops + 1
    keys = draw_distinct(stream, language.keys, chains * length + SPARE, "names", "ask for fewer")
    numbers = language.numbers(stream, chains)
    chosen = [keys[c * length : (c + 1) * length] for c in range(chains)]
    sentences: list[list[HiddenSentence]] = []
    for number, names in zip(numbers, chosen, strict=True):
        steps = [_mark(language.given, "key", names[0], value=number)]
        steps += [_mark(language.copied, "key", b, other=a) for a, b in pairwise(names)]
        sentences.append(steps)
    sentences[0] = [replace(step, name="needle") for step in sentences[0]]
    turns = stream.mixed([c for c in range(chains) for _ in range(length)])
    waiting = [iter(steps) for steps in sentences]
    hidden = [next(waiting[c]) for c in turns]
    wrong = stream.mixed([name for names in chosen[1:] for name in names])
    return RulerQuestion(hidden, language.who.format(value=numbers[0]), chosen[0][::-1], wrong, keys[-SPARE:], ordered=True)


def common_counts(pool: Sequence[str], top: int, words: int) -> dict[str, int]:
    """Return word counts: `top` words at least COMMON_TIMES times as frequent as others, at most `words` in total."""
    times = max(1, words // (top * COMMON_TIMES + len(pool) - top))
    others = min(len(pool) - top, words // times - top * COMMON_TIMES)
    if others < SPARE:
        raise NeedleworkError(f"{words} words are too few for {top} common ones; use a greater length or a smaller top")
    common = (words - times * others) // top
    return {word: common if i < top else times for i, word in enumerate(pool[: top + others])}


def zipf_counts(pool: Sequence[str], top: int, words: int, power: float) -> dict[str, int]:
    """Return word counts proportional to rank ** -power; the first `top` words are more frequent than all others."""
    shares = [k**-power for k in range(1, len(pool) + 1)]
    counts = {word: round(words * share / sum(shares)) for word, share in zip(pool, shares, strict=True)}
    counts = {word: count for word, count in counts.items() if count}
    ranked = [*counts.values(), 0]
    if len(counts) < top + SPARE or ranked[top - 1] <= ranked[top]:
        raise NeedleworkError(f"{words} words are too few to tell the {top} most frequent; use a greater length")
    return counts


def make_word_question(
    stream: Stream, language: Language, counts: dict[str, int], top: int, absent: Sequence[str]
) -> tuple[RulerQuestion, list[Piece]]:
    """Return the question for the first `top` words of `counts` and the shuffled list, in which each of them is a needle."""
    targets = list(counts)[:top]
    listed = stream.mixed([word for word, count in counts.items() for _ in range(count)])
    pieces: list[Piece] = []
    for word in listed:
        pieces += [Piece(word, ("needle",) if word in targets else ()), Piece(language.join)]
    wrong = stream.mixed(list(counts)[top:])
    return RulerQuestion((), language.most.format(count=top), targets, wrong, absent), pieces[:-1]
