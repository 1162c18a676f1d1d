"""How well a model predicts text, and how much of that is recall.

Zoology's slice (Arora et al. 2023): a token is a recall token when the same two tokens stood one after the other earlier
in the text, so that it could have been looked up there. The slice here is of the text alone: Zoology also leaves out
pairs that are frequent in the training data, which a tool for any model cannot know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import ClassVar, Literal

from pydantic import Field

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Span
from needlework.requests import MOST_TOKENS, Answer
from needlework.tasks import haystack, toy
from needlework.tasks.base import Ability, Extent, Item, Mode, Task, Tokenizer, task
from needlework.tasks.prompts import token_ids
from needlework.toy import world as toy_world
from needlework.toy.sample import Stream

DEFAULT_TOKENS = 256
WORDS_PER_NEEDLE = 32  # of a toy document: some haystack, the needle, and its question with the answer


def recall_mask(ids: Sequence[int]) -> list[bool]:
    """For each token but the first: did it follow the same token before, earlier in this text?"""
    seen: set[tuple[int, int]] = set()
    mask = []
    for pair in pairwise(ids):
        mask.append(pair in seen)
        seen.add(pair)
    return mask


@task
class Perplexity(Task):
    """Mean negative log-likelihood in nats per token, of all tokens, of recall tokens and of the rest."""

    kind = "perplexity"
    mode: ClassVar[Mode] = "perplexity"
    ability: ClassVar[Ability] = "perplexity"
    files: ClassVar[tuple[str, ...]] = ("text",)
    world: Literal["auto", "toy", "english"] = "auto"
    text: str | None = None  # pattern of text files; none: toy-world documents or built-in English
    tokens: int | None = Field(None, ge=2, le=MOST_TOKENS)  # of each sample; none: 256, or what the model holds if that is less
    samples: int = Field(8, ge=1)

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        size = self.tokens or min(DEFAULT_TOKENS, max_tokens or DEFAULT_TOKENS)
        if max_tokens is not None and size > max_tokens:
            raise NeedleworkError(f"perplexity: tokens: {size} is more than the {max_tokens} that the model holds")
        in_toy = toy.resolve(self.world, tokenizer) == "toy" and self.text is None
        texts = self._toy(tokenizer, seed, size) if in_toy else self._written(tokenizer, seed, size)
        for i, (ids, spans) in enumerate(islice(texts, self.samples)):
            name = f"perplexity/{i}"
            facts = {"tokens": len(ids), "source": "toy" if in_toy else self.text or "english"}
            shown = tokenizer.decode(list(ids), skip_special_tokens=True)
            yield Item(id=name, cluster=name, prompt=ids, prompt_text=shown, target="", spans=spans, facts=facts)

    def extent(self) -> Extent:
        return Extent(self.samples, self.tokens or DEFAULT_TOKENS)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        logs = answer.option_logprobs[0]
        if len(logs) != len(item.prompt) - 1:
            raise NeedleworkError(
                f"{item.id}: {len(logs)} log-probabilities for {len(item.prompt)} tokens; all but the first are scored"
            )
        recall = recall_mask(item.prompt)
        answers = {p for start, end in item.spans.get("answer", ()) for p in range(start, end)}
        parts = {
            "nll": list(logs),
            "nll_recall": [value for value, hit in zip(logs, recall, strict=True) if hit],
            "nll_rest": [value for value, hit in zip(logs, recall, strict=True) if not hit],
            "nll_answer": [value for i, value in enumerate(logs, 1) if i in answers],
        }
        scores = {name: -sum(values) / len(values) for name, values in parts.items() if values}
        counts = {name.replace("nll", "tokens"): float(len(values)) for name, values in parts.items()}
        return {**scores, **counts}

    def _written(self, tokenizer: Tokenizer, seed: int, size: int) -> Iterator[tuple[tuple[int, ...], dict[str, Span]]]:
        """Stretches of the user's text from seeded places, or of built-in sentences, each with BOS if there is one."""
        front = token_ids(tokenizer, "", special=True)
        end = getattr(tokenizer, "eos_token_id", None)
        front = front[:-1] if front and front[-1] == end and len(front) > 1 else front
        for i in range(self.samples):
            source = haystack.sentences(self.text, Stream("perplexity", seed, i), start_anywhere=i > 0 or seed > 0)
            hay = haystack.gather(tokenizer, source, size)
            yield (*front, *token_ids(tokenizer, hay.text))[:size], {}

    def _toy(self, tokenizer: Tokenizer, seed: int, size: int) -> Iterator[tuple[tuple[int, ...], dict[str, Span]]]:
        """Documents in which every needle is asked for: context, then questions with right answers (span "answer")."""
        for i in range(self.samples):
            stream = Stream(toy_world.EVAL_SPLIT, "perplexity", seed, i)
            words, answers = toy_document(stream, size)
            ids = toy.encoded(tokenizer, words)
            front = len(ids) - len(words)
            spans = tuple((a + front, b + front) for a, b in answers if b + front <= size)
            yield ids[:size], {"answer": spans} if spans else {}


def toy_document(stream: Stream, size: int) -> tuple[list[str], list[tuple[int, int]]]:
    """About `size` words: a context with needles, then all of them asked; and where the answers stand."""
    relation = stream.pick(toy_world.RELATION_NAMES)
    hidden = toy_world.needles(stream, relation, max(1, min(12, size // WORDS_PER_NEEDLE)))
    asked = [(needle.question(stream.below(2)), needle) for needle in stream.mixed(hidden)]
    tail = sum(len(question) + len(needle.value) + 3 for question, needle in asked)
    least = sum(len(needle.sentence()) for needle in hidden)
    place = toy_world.scene(stream, hidden, max(least, size - tail - 3))
    words, answers = ["context", ":", *place.words], []
    for question, needle in asked:
        words += [*question, "answer", ":"]
        answers.append((len(words), len(words) + len(needle.value)))
        words += [*needle.value, "."]
    return words, answers
