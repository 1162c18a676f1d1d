"""Needles that share no content word with the question, in one sentence or in two parts at two depths.

After NoLiMa (arXiv 2502.05167): the question names a city, the needle a building that stands in it, so the needle is found by
what the model knows and not by equal words. `ask: letter` asks in the needle's own words, as a control. With `parts: 2` one
sentence says who, and another says what: neither tells the answer alone. Zoo models are asked by facts of the toy language.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, Literal

from pydantic import Field

from needlework.errors import NeedleworkError
from needlework.files import package_yaml
from needlework.requests import Answer
from needlework.tasks import toy
from needlework.tasks.base import Item, Tokenizer, choice_companion, holds, prefix_errors, task
from needlework.tasks.haystack import FIRST_NAMES, cut_haystack, fill_template, insert_needles, iterate_sentences, needle_pieces
from needlework.tasks.prompts import Piece, token_ids
from needlework.tasks.retrieval import Draft, Grid, Sizes
from needlework.tasks.ruler import LANGUAGES, SPARE
from needlework.toy.facts import SUBJECTS
from needlework.toy.sample import EVAL_SPLIT, Stream
from needlework.toy.words import NAMES

WORLDS: Mapping[str, Any] = package_yaml(__file__, "associations.yaml")


@task
class Association(Grid):
    """A person is asked for by what the needle implies, and the answer is the person's name."""

    kind = "association"
    usual_lengths = WORLDS["english"]["lengths"]
    files: ClassVar[tuple[str, ...]] = ("haystack",)
    ask: Literal["association", "letter"] = "association"  # letter: the question repeats the needle's words
    parts: int = Field(1, ge=1, le=2)  # sentences of a needle
    lengths: Sizes | None = None  # None: 300, 600 and 1200 tokens; for zoo models 64, 128 and 192
    # depths are those of the first part; the second is half of the context away
    distractors: int = Field(3, ge=1, le=9)  # needles about other persons
    reserve_tokens: int | None = Field(None, ge=0)  # of each length, for question and answer; None: 128; for zoo models 0
    haystack: str | None = None  # glob pattern of text files; None: generated sentences

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        world = toy.resolve(self.world, tokenizer)
        new_tokens = self.ending(tokenizer)[0]
        lengths = self.lengths or WORLDS[world].get("lengths") or LANGUAGES[world].lengths
        for length, depth, i in product(lengths, self.depths, range(self.samples)):
            cell = f"length={length}/depth={depth:g}/{i}"
            name = f"association/{self.ask}/parts={self.parts}/{cell}"
            with prefix_errors(name):
                draft = self._draft(tokenizer, Stream(EVAL_SPLIT, "association", seed, cell), world, length, depth)
            item = self.drafted_item(tokenizer, draft, name, f"association/{cell}", window)
            first = item.spans["needle"][-self.parts][0]  # the whole needle has to be in the window
            in_window = window is None or len(item.prompt) - first <= window
            item = replace(item, facts={**item.facts, "in_window": in_window})
            yield self.fitted(item, new_tokens, max_tokens)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        """Return whether the answer names the right person and no other one of the context."""
        named = [name for name in (item.target, *item.facts["others"]) if holds(answer.text, name)]
        return {"correct": float(named == [item.target])}

    def _draft(self, tokenizer: Tokenizer, stream: Stream, world: str, length: int, depth: float) -> Draft:
        """Return one sample. Names, clues, links and haystack are the same for every `ask`, and haystacks for both `parts`."""
        language, known = LANGUAGES[world], WORLDS[world]
        topic_name = stream.pick(list(known["topics"]))
        topic = known["topics"][topic_name]
        pairs = (
            topic["pairs"] if "pairs" in topic else dict(zip(SUBJECTS[topic_name].values, SUBJECTS[topic_name].keys, strict=True))
        )
        clues = stream.distinct(list(pairs), 1 + self.distractors)
        names = stream.distinct(FIRST_NAMES if world == "english" else NAMES, 2 * (1 + self.distractors) + SPARE)
        persons, absent, others = names[: len(clues)], names[len(clues) : -len(clues)], names[-len(clues) :]
        links = stream.distinct(known["links"].split(", "), len(clues)) if "links" in known else others
        sentences: list[tuple[int, list[Piece]]] = []  # (person, sentence)
        for who, words in enumerate(zip(persons, clues, links, strict=True)):
            filled = dict(zip(("value", "clue", "link"), words, strict=True))
            templates = [topic["needle"]] if self.parts == 1 else topic["parts"]
            if self.parts == 2 and who == self.distractors:
                templates = templates[:1]  # nothing is said about this person, so that the answer cannot be found by elimination
            sentences += [(who, needle_pieces(text, "distractor" if who else "needle", **filled)) for text in templates]
        used = sum(len(token_ids(tokenizer, " " + "".join(piece.text for piece in pieces))) for _, pieces in sentences)
        room = length - (language.reserve if self.reserve_tokens is None else self.reserve_tokens) - used
        if room < 0:
            raise NeedleworkError(f"the needles need {used} tokens, {room + used} are left for them; use a greater length")
        built_in = self.haystack is None or world == "toy"
        source = language.sentences(stream) if built_in else iterate_sentences(self.haystack, stream, start_anywhere=True)
        hay = cut_haystack(tokenizer, source, room, whole=world == "toy")
        depths = (depth, (depth + 50) % 100)
        slots = [hay.slot(depths[i]) if not who else stream.below(len(hay.ends)) for i, (who, _) in enumerate(sentences)]
        questions = topic[self.ask]
        return Draft(
            context=insert_needles(hay, [(slot, pieces) for slot, (_, pieces) in zip(slots, sentences, strict=True)]),
            question=fill_template(questions[min(self.parts, len(questions)) - 1], clue=clues[0], asked=pairs[clues[0]]),
            target=persons[0],
            lead=language.lead,
            instruction="Answer with the first name of this person and nothing else.",
            value=persons[0],
            wrong=persons[1:],
            absent=absent,
            facts={
                "length_tokens": length,
                "depth_percent": depth,
                "context_tokens": hay.tokens + used,
                "needles": len(clues),
                "topic": topic_name,
                "others": persons[1:],
            },
            world=world,
        )


AssociationChoice = choice_companion(Association)
