"""Perplexity of text, split into recall tokens and the rest.

As in Zoology (Arora et al. 2023), a token is a recall token if the same bigram occurred earlier in the text, so that it could
have been copied from there. Zoology also excludes bigrams that are frequent in the training data; this is not possible here,
because the training data of a model are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Span
from needlework.requests import MOST_TOKENS, Answer
from needlework.tasks import haystack, toy
from needlework.tasks.base import Ability, Item, Mode, Task, TaskExtent, Tokenizer, task
from needlework.tasks.prompts import token_ids
from needlework.toy import needles
from needlework.toy.sample import EVAL_SPLIT, Stream

DEFAULT_TOKENS = 256
WORDS_PER_NEEDLE = 32  # words of a toy document for each needle, with its haystack, question and answer


def recall_mask(ids: Sequence[int]) -> list[bool]:
    """Return for each token but the first whether its bigram with the previous token occurred earlier in the text."""
    seen: set[tuple[int, int]] = set()
    mask = []
    for pair in pairwise(ids):
        mask.append(pair in seen)
        seen.add(pair)
    return mask


@task
class Perplexity(Task):
    """Mean negative log-likelihood in nats per token: of all tokens, recall tokens, the rest, and answers (toy only)."""

    kind = "perplexity"
    mode: ClassVar[Mode] = "perplexity"
    ability: ClassVar[Ability] = "perplexity"
    files: ClassVar[tuple[str, ...]] = ("text",)
    world: Literal["auto", "toy", "english"] = "auto"
    text: str | None = None  # glob pattern of text files; None: generated toy documents or English
    tokens: int | None = Field(None, ge=2, le=MOST_TOKENS)  # of each sample; None: 256, or max_tokens if that is less
    samples: int = Field(8, ge=1)

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        size = self.tokens or min(DEFAULT_TOKENS, max_tokens or DEFAULT_TOKENS)
        if max_tokens is not None and size > max_tokens:
            raise NeedleworkError(f"perplexity: tokens: {size} is more than the {max_tokens} that the model holds")
        in_toy = toy.resolve(self.world, tokenizer) == "toy" and self.text is None
        front = token_ids(tokenizer, "", special=True)  # BOS if there is one, without EOS
        if len(front) > 1 and front[-1] == getattr(tokenizer, "eos_token_id", None):
            front = front[:-1]
        for i in range(self.samples):
            name = f"perplexity/{i}"
            spans: dict[str, Span] = {}
            if in_toy:
                stream = Stream(EVAL_SPLIT, "perplexity", seed, i)
                relation = stream.pick(needles.RELATION_NAMES)
                hidden = needles.make_needles(stream, relation, max(1, min(12, size // WORDS_PER_NEEDLE)))
                asked = [(needle.question(stream.below(2)), needle.value) for needle in stream.mixed(hidden)]
                tail = sum(len(question) + len(value) + 3 for question, value in asked)
                least = sum(len(needle.sentence()) for needle in hidden)
                words = ["context", ":", *needles.hide_needles(stream, hidden, max(least, size - tail - 3)).words]
                answers = []
                for question, value in asked:
                    words += [*question, "answer", ":"]
                    answers.append((len(words), len(words) + len(value)))
                    words += [*value, "."]
                ids = toy.encoded(tokenizer, words)
                first = len(ids) - len(words)
                if inside := tuple((a + first, b + first) for a, b in answers if b + first <= size):
                    spans = {"answer": inside}
            else:
                source = haystack.iterate_sentences(self.text, Stream("perplexity", seed, i), start_anywhere=i > 0 or seed > 0)
                ids = (*front, *token_ids(tokenizer, haystack.cut_haystack(tokenizer, source, size).text))
            ids = ids[:size]
            facts = {"tokens": len(ids), "source": "toy" if in_toy else self.text or "english"}
            shown = tokenizer.decode(list(ids), skip_special_tokens=True)
            yield Item(id=name, cluster=name, prompt=ids, prompt_text=shown, target="", spans=spans, facts=facts)

    def extent(self) -> TaskExtent:
        return TaskExtent(self.samples, self.tokens or DEFAULT_TOKENS)

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
