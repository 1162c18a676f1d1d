"""RULER's retrieval and aggregation tasks at any length, implemented from their definitions (Hsieh et al. 2024).

single: one needle. multikey: distractors about other keys (`keys: full`: needles instead of a haystack). multivalue: one key with
several values. multiquery: several queried keys. variables: variable tracking along chains of assignments. common_words and
frequent_words: the most frequent words of a list (fixed frequencies; a Zipf distribution).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise, product
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import toy
from needlework.tasks.base import Item, TaskExtent, Tokenizer, begins, choice_companion, prefix_errors, share_found, task
from needlework.tasks.haystack import (
    NOUNS,
    cut_haystack,
    fill_template,
    generate_sentences,
    insert_needles,
    iterate_sentences,
    needle_pieces,
)
from needlework.tasks.prompts import Piece, token_ids
from needlework.tasks.retrieval import MOST_OPTIONS, Draft, Retrieval, Sizes, draw_distinct
from needlework.toy import words as w
from needlework.toy.needles import PLAIN_WORDS, make_sentence
from needlework.toy.sample import Stream

Variant = Literal["single", "multikey", "multivalue", "multiquery", "variables", "common_words", "frequent_words"]
SPARE = 3  # wrong options that do not occur in the context
COMMON_TIMES = 10  # minimum ratio of the frequencies of common and other words


# Invented words, so that only counting helps.
_RARE = tuple(map("".join, product(("bro", "fli", "ka", "mu", "ste", "zo"), ("dra", "lo", "ni", "pu"), ("k", "m", "x"))))


@dataclass(frozen=True)
class Language:
    """Vocabulary and templates of the prompts, by default in English; templates contain {key}, {value}, {other} or {count}."""

    world: str = "english"
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    reserve: int = 128  # tokens of each length, for question and answer
    keys: tuple[str, ...] = NOUNS
    words: tuple[str, ...] = NOUNS  # for common_words
    rare: tuple[str, ...] = _RARE  # for frequent_words
    needle: str = "The locker number for the {key} is {value}."
    question: str = "What is the locker number for the {key}? If there are several, give all of them."
    questions: str = "What are the locker numbers for the {key}?"  # several keys; "": one question after the other
    given: str = "The {key} was given the number {value}."
    copied: str = "The {key} was given the same number as the {other}."
    who: str = "Which things were given the number {value}, directly or through others? Name all of them."
    most: str = "Which {count} words occur most often in the list above?"
    lead: str = "ANSWER: "
    number: Callable[[Stream], str] = lambda stream: str(stream.between(10000, 99999))
    sentences: Callable[[Stream], Iterator[str]] = generate_sentences


def _join_words(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else words[0]


ENGLISH = Language()
TOY = Language(
    world="toy",
    lengths=(64, 128, 192),
    reserve=0,
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
    number=lambda stream: " ".join(stream.pick(w.DIGITS) for _ in range(3)),
    sentences=lambda stream: (" " * (i > 0) + " ".join(make_sentence(stream)) for i in count()),
)
LANGUAGES = {"english": ENGLISH, "toy": TOY}


Hidden = list[list[Piece]]  # sentences to insert


@task
class Ruler(Retrieval):
    """RULER by generation: `found` is the fraction of targets in the answer (RULER's score), `correct` requires all."""

    kind = "ruler"
    files: ClassVar[tuple[str, ...]] = ("haystack",)
    variant: Variant = "single"
    lengths: Sizes | None = None
    reserve_tokens: int | None = Field(None, ge=0)  # of each length, for question and answer; None: 128; for zoo models 0
    keys: PositiveInt | Literal["full"] = 3  # needles about other keys, except in single
    values: int = Field(4, ge=2)  # of the queried key, in multivalue
    queries: int = Field(4, ge=2)  # queried keys, in multiquery
    chains: int = Field(2, ge=1)  # in variables
    hops: int = Field(4, ge=1)  # assignments from name to name in each chain
    top: int = Field(3, ge=1)  # most frequent words that are asked for
    zipf: float = Field(2.0, gt=0)  # exponent, in frequent_words
    haystack: str | None = None  # glob pattern of text files; None: generated sentences

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        language = LANGUAGES[toy.resolve(self.world, tokenizer)]
        new_tokens = self.ending(tokenizer)[0]
        make = self._words if self.variant.endswith("_words") else self._needles
        for length, i in product(self.lengths or language.lengths, range(self.samples)):
            stream = Stream("eval", "ruler", self.variant, seed, length, i)
            name = f"ruler/{self.variant}/length={length}/{i}"
            reserve = language.reserve if self.reserve_tokens is None else self.reserve_tokens
            with prefix_errors(name):
                drafts = make(stream, language, tokenizer, length - reserve)
            for j, draft in enumerate(drafts):
                facts = {**draft.facts, "length_tokens": length, "variant": self.variant}
                named = f"{name}/query={j}" if len(drafts) > 1 else name
                item = self.drafted_item(tokenizer, replace(draft, facts=facts), named, name, window)
                yield self.fitted(item, new_tokens, max_tokens)

    def extent(self) -> TaskExtent:
        lengths = self.lengths or ENGLISH.lengths
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
        keys = MOST_OPTIONS if self.keys == "full" else self.keys
        counts = {"single": 0, "multiquery": keys + self.queries - 1, "variables": (self.chains - 1) * (self.hops + 1)}
        return SPARE if self.variant.endswith("_words") else min(MOST_OPTIONS, counts.get(self.variant, keys))

    def _needles(self, stream: Stream, language: Language, tokenizer: Tokenizer, limit: int) -> list[Draft]:
        example = fill_template(language.needle, key=language.keys[0], value=language.number(stream))
        full = self.keys == "full"
        fill = min(limit // (len(token_ids(tokenizer, " " + example)) + 1), len(language.keys) - self.queries) - 1
        if full and fill < MOST_OPTIONS:
            raise NeedleworkError(f"{limit} tokens hold fewer than {MOST_OPTIONS + 1} needles; use a greater length")
        if self.variant == "variables":
            questions = [self._variable_question(stream, language)]
        else:
            others = 0 if self.variant == "single" else fill if self.keys == "full" else self.keys
            questions = self._needle_questions(stream, language, others)
        sentences = ["".join(piece.text for piece in sentence) for sentence in questions[0][0]]
        used = sum(len(token_ids(tokenizer, f" {sentence}")) for sentence in sentences)
        if used > limit:
            raise NeedleworkError(f"the needles need {used} tokens, there are {limit}; use a greater length or fewer needles")
        built_in = self.haystack is None or language.world == "toy"
        source = language.sentences(stream) if built_in else iterate_sentences(self.haystack, stream, start_anywhere=True)
        hay = cut_haystack(tokenizer, source, 0 if full else limit - used, whole=language.world == "toy")
        slots = [stream.below(len(hay.ends)) for _ in sentences]
        if self.variant == "variables":
            slots.sort()  # assignments keep their order
        facts = {"context_tokens": hay.tokens + used, "needles": len(sentences)}
        contexts = (insert_needles(hay, list(zip(slots, hidden, strict=True))) for hidden, _ in questions)
        return [replace(q, context=c, facts={**facts, **q.facts}) for c, (_, q) in zip(contexts, questions, strict=True)]

    def _needle_questions(self, stream: Stream, language: Language, others: int) -> list[tuple[Hidden, Draft]]:
        """Return the questions for one or several keys, among `others` keys with one value each.

        English has one question for several keys. The toy language has one question per key, which contains the questions and
        answers before it, as in the training documents of zoo models.
        """
        asked = self.queries if self.variant == "multiquery" else 1
        values = self.values if self.variant == "multivalue" else 1
        keys = draw_distinct(stream, language.keys, asked + others, "keys", "ask for fewer")
        numbers = stream.unique(partial(language.number, stream), asked * values + others + SPARE)
        own, wrong, absent = numbers[: asked * values], numbers[asked * values : -SPARE], numbers[-SPARE:]
        owners = [key for key in keys[:asked] for _ in range(values)] + keys[asked:]

        def hide(needles: range) -> Hidden:
            """Return all sentences, of which these are needles and the others distractors."""
            names = ["needle" if i in needles else "distractor" for i in range(len(owners))]
            sentences = zip(names, owners, numbers, strict=False)
            return [needle_pieces(language.needle, name, key=key, value=number) for name, key, number in sentences]

        if asked == 1 or language.questions:
            template = language.question if asked == 1 else language.questions
            question = template.format(key=_join_words(keys[:asked]))
            wrong = [*(own[values:] if asked > 1 else ()), *wrong]
            return [(hide(range(len(own))), _draft(language, question, own, wrong, absent))]
        questions, before = [], ""
        for i, number in enumerate(own):
            question = before + language.question.format(key=keys[i])
            others_own = [value for value in own if value != number]
            questions.append((hide(range(i, i + 1)), _draft(language, question, [number], [*others_own, *wrong], absent)))
            before = f"{question} {language.lead} {number} . question : "
        return questions

    def _variable_question(self, stream: Stream, language: Language) -> tuple[Hidden, Draft]:
        """Return the question for the names of the first of several chains of assignments; its sentences are the needles."""
        length = self.hops + 1
        keys = draw_distinct(stream, language.keys, self.chains * length + SPARE, "names", "ask for fewer")
        numbers = stream.unique(partial(language.number, stream), self.chains)
        chains = [keys[c * length : (c + 1) * length] for c in range(self.chains)]
        sentences = []
        for c, (number, names) in enumerate(zip(numbers, chains, strict=True)):
            span = "needle" if c == 0 else "distractor"
            steps = [needle_pieces(language.given, span, "key", key=names[0], value=number)]
            steps += [needle_pieces(language.copied, span, "key", key=b, other=a) for a, b in pairwise(names)]
            sentences.append(iter(steps))
        hidden = [next(sentences[c]) for c in stream.mixed([c for c in range(self.chains) for _ in range(length)])]
        wrong = stream.mixed([name for names in chains[1:] for name in names])
        return hidden, _draft(language, language.who.format(value=numbers[0]), chains[0][::-1], wrong, keys[-SPARE:])

    def _words(self, stream: Stream, language: Language, tokenizer: Tokenizer, limit: int) -> list[Draft]:
        common = self.variant == "common_words"
        pool = stream.mixed(language.words if common else language.rare)
        absent, pool = pool[:SPARE], pool[SPARE:]
        words, tokens = limit, limit + 1
        while tokens > limit:  # words have different token counts: reduce the number until all fit
            words = min(words - 1, words * limit // tokens)
            counts = common_counts(pool, self.top, words) if common else zipf_counts(pool, self.top, words, self.zipf)
            tokens = sum(count * len(token_ids(tokenizer, f" {word}")) for word, count in counts.items())
        targets, others = list(counts)[: self.top], list(counts)[self.top :]
        listed = stream.mixed([word for word, count in counts.items() for _ in range(count)])
        pieces = [piece for word in listed for piece in (Piece(word, ("needle",) if word in targets else ()), Piece(" "))]
        draft = _draft(language, language.most.format(count=self.top), targets, stream.mixed(others), absent)
        return [replace(draft, context=pieces[:-1], facts={"context_tokens": tokens, "needles": 0, **draft.facts})]


def _draft(language: Language, question: str, targets: Sequence[str], wrong: Sequence[str], absent: Sequence[str]) -> Draft:
    """Return a draft without its context. The first target is the right option of the choice task."""
    return Draft(
        context=(),
        question=question,
        target=" ".join(targets) if language.world == "toy" else _join_words(targets),
        lead=language.lead,
        value=targets[0],
        wrong=wrong,
        absent=absent,
        has_twin=len(targets) == 1,
        facts={"targets": list(targets)},
        world=language.world,
    )


RulerChoice = choice_companion(Ruler)


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
