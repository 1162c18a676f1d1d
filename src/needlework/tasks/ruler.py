"""RULER's retrieval family at any length, written from its definitions (Hsieh and others, 2024).

single: one needle. multikey: more needles about other keys (`keys: full`: nothing but needles). multivalue: one key with
several values. multiquery: several keys are asked. variables: values handed on from name to name. common_words and
frequent_words: a list of words, and which of them occur most often (a fixed share each; a Zipf law).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import toy
from needlework.tasks.base import Extent, Item, Mode, Tokenizer, task
from needlework.tasks.haystack import gather, sentences, weave
from needlework.tasks.prompts import Piece, token_ids
from needlework.tasks.retrieval import Chosen, Draft, Retrieval, Sizes
from needlework.tasks.ruler_language import LANGUAGES, Language
from needlework.tasks.ruler_riddles import (
    SPARE,
    Riddle,
    common_counts,
    needle_riddles,
    variable_riddle,
    word_riddle,
    zipf_counts,
)
from needlework.tasks.scores import begins, share_found
from needlework.toy.sample import Stream

Variant = Literal["single", "multikey", "multivalue", "multiquery", "variables", "common_words", "frequent_words"]
LENGTHS = {"english": (512, 1024, 2048, 4096), "toy": (64, 128, 192)}
RESERVE = {"english": 128, "toy": 0}
MOST_OPTIONS = 7  # of values that stand in the context


@task
class Ruler(Retrieval):
    """Generate the answer; `correct` if all targets occur in it, `found` is their share (RULER's own score)."""

    kind = "ruler"
    mode: ClassVar[Mode] = "generate"
    files: ClassVar[tuple[str, ...]] = ("haystack",)
    variant: Variant = "single"
    lengths: Sizes | None = None
    reserve_tokens: int | None = Field(None, ge=0)  # of each length, for question and answer
    keys: PositiveInt | Literal["full"] = 3  # other needles; not in single
    values: int = Field(4, ge=2)  # of the asked key, in multivalue
    queries: int = Field(4, ge=2)  # asked keys, in multiquery
    chains: int = Field(2, ge=1)  # of variables
    hops: int = Field(4, ge=1)  # hand-overs in each chain
    top: int = Field(3, ge=1)  # words to name
    zipf: float = Field(2.0, gt=0)
    haystack: str | None = None

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

    def extent(self) -> Extent:
        lengths = self.lengths or LENGTHS["english"]
        asked = self.queries if self.variant == "multiquery" else 1
        return Extent(len(lengths) * self.samples * asked, max(lengths))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        targets = item.facts["targets"]
        if len(targets) == 1 and item.facts["world"] == "toy":
            share = float(begins(answer.text, targets[0]))
        else:
            share = share_found(answer.text, targets)
        return {"correct": float(share == 1), "found": share}

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """An answer of several parts does not end at the first full stop."""
        several = self.variant not in ("single", "multikey", "multiquery")
        return (self.max_new_tokens, self.stop) if several else super().ending(tokenizer)

    def in_context(self) -> int:
        """How many options of the choice stand in the context."""
        keys = MOST_OPTIONS if self.keys == "full" else self.keys
        counts = {
            "single": 0,
            "multiquery": keys + self.queries - 1,
            "variables": (self.chains - 1) * (self.hops + 1),
        }
        return SPARE if self.variant.endswith("_words") else min(MOST_OPTIONS, counts.get(self.variant, keys))

    def _riddles(self, stream: Stream, language: Language, keys: int) -> list[Riddle]:
        if self.variant == "variables":
            return [variable_riddle(stream, language, self.chains, self.hops)]
        asked = self.queries if self.variant == "multiquery" else 1
        values = self.values if self.variant == "multivalue" else 1
        return needle_riddles(stream, language, asked, values, 0 if self.variant == "single" else keys)

    def _needles(self, stream: Stream, language: Language, tokenizer: Tokenizer, room: int) -> list[Draft]:
        example = language.needle.format(key=language.keys[0], value=language.number(stream))
        full = self.keys == "full"
        fill = min(room // (len(token_ids(tokenizer, " " + example)) + 1), len(language.keys) - self.queries) - 1
        if full and fill < MOST_OPTIONS:
            raise NeedleworkError(f"{room} tokens hold fewer than {MOST_OPTIONS + 1} needles; use a greater length")
        riddles = self._riddles(stream, language, fill if self.keys == "full" else self.keys)
        used = sum(len(token_ids(tokenizer, " " + sentence.text)) for sentence in riddles[0].hidden)
        if used > room:
            raise NeedleworkError(f"the needles need {used} tokens, there are {room}; use a greater length or fewer needles")
        built_in = self.haystack is None or language.world == "toy"
        source = language.sentences(stream) if built_in else sentences(self.haystack, stream, start_anywhere=True)
        hay = gather(tokenizer, source, 0 if full else room - used, whole=language.world == "toy")
        slots = [stream.below(len(hay.ends)) for _ in riddles[0].hidden]
        order = slots if not riddles[0].ordered else sorted(slots)
        drafts = []
        for riddle in riddles:
            context = weave(hay, [(slot, sentence.pieces()) for slot, sentence in zip(order, riddle.hidden, strict=True)])
            drafts.append(self._draft(language, riddle, context, hay.tokens + used))
        return drafts

    def _words(self, stream: Stream, language: Language, tokenizer: Tokenizer, room: int) -> list[Draft]:
        common = self.variant == "common_words"
        pool = stream.mixed(language.words if common else language.rare)
        absent, pool = pool[:SPARE], pool[SPARE:]
        words, tokens = room, room + 1
        while tokens > room:  # words differ in tokens: fewer of them until all fit
            words = min(words - 1, words * room // tokens)
            counts = common_counts(pool, self.top, words) if common else zipf_counts(pool, self.top, words, self.zipf)
            tokens = sum(count * len(token_ids(tokenizer, language.join + word)) for word, count in counts.items())
        riddle, context = word_riddle(stream, language, counts, self.top, absent)
        return [self._draft(language, riddle, context, tokens)]

    def _draft(self, language: Language, riddle: Riddle, context: Sequence[Piece], tokens: int) -> Draft:
        options = [("true", riddle.targets[0]), *(("context", text) for text in riddle.wrong[: self.in_context()])]
        options += [("absent", text) for text in riddle.absent[: self.absent]]
        toy_words = language.world == "toy"
        return Draft(
            context=context,
            question=riddle.question,
            target=" ".join(riddle.targets) if toy_words else language.listed(riddle.targets),
            lead=language.lead,
            instruction="Answer with nothing but what is asked for.",
            options=options,
            facts={"context_tokens": tokens, "needles": len(riddle.hidden), "targets": list(riddle.targets)},
            world=language.world,
            value=riddle.targets[0] if len(riddle.targets) == 1 else "",
            spare=riddle.absent,
        )


@task
class RulerChoice(Chosen, Ruler):
    """The same items as `ruler`: the first target against other values."""

    kind = "ruler_choice"

    @property
    def chance(self) -> float:
        return self.chance_among(self.in_context())
