"""Needles that name another needle: "the secret code of loran is the code of mira", asked for loran.

One look-up while answering finds where the value is to be found, not the value. What the first look-up is good for can be done
while reading, so these are the needles that attention in prefill matters for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import ClassVar, Literal

from pydantic import Field

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import toy
from needlework.tasks.base import Extent, Item, Mode, Tokenizer, task
from needlework.tasks.niah import Depths
from needlework.tasks.retrieval import Chosen, Retrieval, Sizes
from needlework.tasks.scores import begins, words_right
from needlework.toy import world as toy_world
from needlework.toy.sample import Stream


@task
class Linked(Retrieval):
    """Generate the value that stands `hops` sentences away from the asked name; as many links lead to each distractor."""

    kind = "linked"
    mode: ClassVar[Mode] = "generate"
    lengths: Sizes = (128, 192)
    depths: Depths = (0, 25, 50, 75, 100)  # of the value; its links follow behind it
    distractors: int = Field(3, ge=0)
    hops: int = Field(2, ge=2)  # sentences from the asked name to its value
    relation: Literal["code", "badge", "hideout", "gift"] = "code"

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        toy.demand_toy(tokenizer, self.kind)
        new_tokens = self.ending(tokenizer)[0]
        for length, depth, i in product(self.lengths, self.depths, range(self.samples)):
            name = f"linked/hops={self.hops}/length={length}/depth={depth:g}/{i}"
            stream = Stream(toy_world.EVAL_SPLIT, "linked", self.hops, seed, length, f"{depth:g}", i)
            try:
                sample = toy_world.niah(
                    stream,
                    context_tokens=length,
                    distractors=self.distractors,
                    depth_percent=depth,
                    relation=self.relation,
                    layout=self.layout,
                    hops=self.hops,
                )
            except ValueError as error:
                raise NeedleworkError(f"{name}: {error}") from None
            facts = {"length_tokens": length, "depth_percent": depth, "hops": self.hops}
            item = toy.toy_item(tokenizer, sample, name, absent=self.absent, facts=facts, window=window)
            yield self.fitted(item, new_tokens, max_tokens)

    def extent(self) -> Extent:
        return Extent(len(self.lengths) * len(self.depths) * self.samples, max(self.lengths))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        exact = float(begins(answer.text, item.target))
        return {"correct": exact, "exact": exact, "graded": words_right(answer.text, item.target)}


@task
class LinkedChoice(Chosen, Linked):
    """The same items as `linked`: which value does the model think the likelier one?"""

    kind = "linked_choice"

    @property
    def chance(self) -> float:
        return self.chance_among(self.distractors)
