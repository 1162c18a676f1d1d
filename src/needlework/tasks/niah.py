"""Needle in a haystack (niah): a sentence inserted at a given depth of a long text, and a question about it.

Lengths, depths, needle, question and scores are the paper's by default. With `style: paper`, its prompts are reproduced token for
token, too; otherwise a needle follows a sentence end, and each cell of the grid has its own haystack. A length is nominal:
`reserve_tokens` of it are reserved for question and answer. Zoo models get the toy language.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import prompts, toy
from needlework.tasks.base import (
    Item,
    Tokenizer,
    begins,
    choice_companion,
    graded,
    holds,
    prefix_errors,
    task,
    words_right,
)
from needlework.tasks.haystack import (
    ENGLISH,
    cut_haystack,
    fill_template,
    insert_needles,
    iterate_sentences,
    needle_pieces,
    read_tokens,
)
from needlework.tasks.prompts import Encoded, Piece, token_ids
from needlework.tasks.retrieval import FRAMES, Depths, Draft, Grid, Sizes, arranged
from needlework.toy import needles
from needlework.toy.sample import EVAL_SPLIT, Stream

# The paper's needle and prompt. OTHERS are similar needles about other cities, for distractors, wrong options and twins.
NEEDLE = "The best thing to do in {key} is {value}."
KEY, VALUE = "San Francisco", "eat a sandwich and sit in Dolores Park on a sunny day"
QUESTION = "What is the best thing to do in {key}?"
BASE_LEAD = "ANSWER: Here is the most relevant sentence in the context: "
CHAT_END = "Output the most relevant sentence in the context, word by word!"
GRADED = {"eat a sandwich": 1.0, "dolores park": 0.5, "sit in dolores park": 0.5, "on a sunny day": 1.0}
LENGTHS = (250, 677, 1105, 1532, 1959, 2387, 2814, 3241, 3669, 4096)
DEPTHS = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)
RESERVE = 200
TOY_LENGTHS = (64, 128, 192, 256)
QUESTION_WORDS = 24  # upper bound of the words of a toy prompt besides its context


class Other(BaseModel):
    """Key and value of another needle: a distractor in the context, or a wrong option or twin that is absent from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    key: str = ""
    value: str


OTHERS = tuple(Other(key=key, value=value) for key, value in ENGLISH["other_needles"].items())


class NiahCell(NamedTuple):
    """One sample of a grid of lengths and depths."""

    seed: int
    length: int
    depth: float
    i: int
    window: int | None

    @property
    def name(self) -> str:
        return f"length={self.length}/depth={self.depth:g}/{self.i}"

    def stream(self, *parts: str | int) -> Stream:
        return Stream("/".join(map(str, parts)), self.seed, self.length, f"{self.depth:g}", self.i)

    def facts(self) -> dict[str, Any]:
        return {"length_tokens": self.length, "depth_percent": self.depth}


@task
class Niah(Grid):
    """Needle in a haystack: generate the answer; scored by exact match and by graded points."""

    kind = "niah"
    usual_lengths = LENGTHS
    files: ClassVar[tuple[str, ...]] = ("haystack",)
    style: Literal["auto", "base", "chat", "paper"] = "auto"  # type: ignore[assignment]  # adds "paper"
    lengths: Sizes | None = None  # None: the paper's; for zoo models TOY_LENGTHS or what fits
    depths: Depths = DEPTHS
    reserve_tokens: int | None = Field(None, ge=0)  # None: 200; for zoo models 0, so that a length is that of the context
    distractors: int = Field(0, ge=0)  # needles about other keys in the context
    haystack: str | None = None  # glob pattern of text files; None: generated sentences
    haystack_per: Literal["cell", "sample"] = "cell"  # sample: all cells share one haystack, as in the paper
    needle: str = NEEDLE
    question: str = QUESTION
    key: str = KEY
    value: str = VALUE
    others: tuple[Other, ...] | None = None  # for distractors, wrong options and twins; None: OTHERS if the needle is the paper's
    graded: dict[str, float] | None = None  # points for parts of the needle; None: GRADED if the needle is the paper's
    relation: str = "code"  # toy: code, badge, hideout, gift or any; guessing a hideout or gift succeeds in 1 of 16
    quote: bool = False  # toy: ask for the whole sentence

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        is_toy = toy.resolve(self.world, tokenizer) == "toy"
        if self.style == "paper":
            per_cell = "haystack_per" in self.model_fields_set and self.haystack_per == "cell"
            wrong = {
                "is in English, and this model speaks the toy language: leave it out": is_toy,
                "hides one needle: leave distractors out": self.distractors > 0,
                "has the layouts plain and jrt": self.layout == "question_first",
                "has one text for all cells: leave haystack_per out": per_cell,
            }
            for why, applies in wrong.items():
                if applies:
                    raise NeedleworkError(f"{self.kind}: style: paper {why}")
        make = self._toy if is_toy else self._english
        new_tokens = self.ending(tokenizer)[0]
        lengths = self.lengths or LENGTHS
        if is_toy and self.lengths is None:
            copies = 2 if self.layout == "jrt" else 1
            most = TOY_LENGTHS[-1] if max_tokens is None else (max_tokens - self.toy_new_tokens) // copies - QUESTION_WORDS
            # max_tokens may exceed the length of the training documents
            lengths = TOY_LENGTHS if most >= TOY_LENGTHS[-1] else tuple(most * part // 4 for part in (1, 2, 3, 4))
        for length, depth, i in product(lengths, self.depths, range(self.samples)):
            yield self.fitted(make(tokenizer, NiahCell(seed, length, depth, i, window)), new_tokens, max_tokens)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        if item.facts["world"] == "toy":
            return _score_in_toy(item, answer)
        paper = (self.needle, self.key, self.value) == (NEEDLE, KEY, VALUE)
        parts = self.graded if self.graded is not None else GRADED if paper else {}
        exact = float(holds(answer.text, item.target))
        return {"correct": exact, "exact": exact, "graded": graded(answer.text, item.target, parts)}

    def _toy(self, tokenizer: Tokenizer, cell: NiahCell) -> Item:
        stream = cell.stream(EVAL_SPLIT, "niah")
        relation = stream.pick(needles.RELATION_NAMES) if self.relation == "any" else self.relation
        if relation not in needles.RELATIONS:
            known = ", ".join([*needles.RELATIONS, "any"])
            raise NeedleworkError(f"niah: unknown relation {relation!r}; choose one of {known}")
        size = cell.length - (self.reserve_tokens or 0)
        return _toy_item(self, tokenizer, cell, f"niah/{cell.name}", stream, size, relation=relation, quote=self.quote)

    def _english(self, tokenizer: Tokenizer, cell: NiahCell) -> Item:
        """Return an item in English. Its options are the needle's sentence with the true value or with another one."""
        others = self.others if self.others is not None else OTHERS if self.needle == NEEDLE else ()
        sentence = fill_template(self.needle, key=self.key, value=self.value)
        needle = needle_pieces(self.needle, key=self.key, value=self.value)
        shared = self.style == "paper" or self.haystack_per == "sample"
        hidden: Sequence[Other] = ()
        order = ""  # seed of the options' order; "": the item's id
        if self.style == "paper":
            before, after, order, facts = self._paper_context(tokenizer, cell, sentence)
            context = [Piece(before), *needle, Piece(after)]
            free = Stream("needles", order).mixed(others)
        else:
            stream = cell.stream("needles")
            drawn = stream.mixed(others)
            hidden, free = drawn[: self.distractors], drawn[self.distractors :]
            if len(hidden) < self.distractors:
                raise NeedleworkError(f"niah: {self.distractors} distractors need as many others; {len(drawn)} are given")
            sentences = [sentence, *(fill_template(self.needle, key=other.key, value=other.value) for other in hidden)]
            size = sum(len(token_ids(tokenizer, f" {text}")) for text in sentences)
            of_haystack = Stream("haystack", cell.seed, cell.i) if shared else cell.stream("haystack")
            source = iterate_sentences(self.haystack, of_haystack, start_anywhere=not shared or cell.i > 0)
            hay = cut_haystack(tokenizer, source, self._haystack_tokens(cell, size))
            slots = [hay.slot(cell.depth), *(stream.below(len(hay.ends)) for _ in hidden)]
            pieces = [needle]
            pieces += [needle_pieces(self.needle, "distractor", key=other.key, value=other.value) for other in hidden]
            context = insert_needles(hay, list(zip(slots, pieces, strict=True)))
            reached = hay.depth_percent(slots[0])
            facts = {"context_tokens": hay.tokens + size, "depth_reached_percent": reached, "needles": len(slots)}
        has_value = "{value}" in self.needle
        if has_value and len(free) < self.absent and self.mode == "choices":
            raise NeedleworkError(f"niah_choice: absent: {self.absent} needs as many more others; {len(free)} are left")
        draft = Draft(
            context=context,
            question=fill_template(self.question, key=self.key, value=self.value),
            target=sentence,
            lead=BASE_LEAD,
            instruction=CHAT_END,
            value=self.value,
            wrong=[other.value for other in hidden],
            absent=[other.value for other in free],
            option=fill_template(self.needle, key=self.key) if has_value else "",
            has_twin=has_value,
            facts={**cell.facts(), **facts},
        )
        cluster = f"niah/haystack={cell.i}" if shared else f"niah/{cell.name}"
        return self.drafted_item(tokenizer, draft, f"niah/{cell.name}", cluster, cell.window, order)

    def _paper_context(self, tokenizer: Any, cell: NiahCell, sentence: str) -> tuple[str, str, str, dict[str, Any]]:
        """Return the authors' text before and after the needle, a seed for the options, and facts about the item.

        All cells of a sample use the same haystack. The essay is tokenized and cut. The tokens of the needle between line breaks
        are inserted after the last "." token before the depth, at the beginning if there is none, and at depth 100 at the very
        end, even within a word. The result is decoded, put into the prompt as text, and tokenized again as a whole. A chat model
        gets the instruction once, after the last question.
        """
        needle = token_ids(tokenizer, f"\n{sentence}\n")
        size = self._haystack_tokens(cell, len(needle))
        anywhere = cell.i > 0
        source = iterate_sentences(self.haystack, Stream("haystack", cell.seed, cell.i), anywhere, appended=True)
        from_start = self.haystack is not None and not anywhere
        essay = read_tokens(tokenizer, source, size, keep_space=from_start)[1][:size]
        place = len(essay)
        if cell.depth != 100:
            stop = tokenizer.convert_tokens_to_ids(".")
            if stop is None or stop == getattr(tokenizer, "unk_token_id", None):
                raise NeedleworkError(
                    'style: paper puts needles after tokens that are ".", and this tokenizer has none; use style: base'
                )
            place = int(place * (cell.depth / 100))
            while place and essay[place - 1] != stop:
                place -= 1
        before, to_needle, whole = (
            str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
            for ids in (essay[:place], [*essay[:place], *needle], [*essay[:place], *needle, *essay[place:]])
        )
        if not (to_needle.startswith(before) and whole.startswith(to_needle)):
            raise NeedleworkError(
                "this tokenizer decodes tokens otherwise when others follow, so no needle can be placed; use style: base"
            )
        shown, after = to_needle[len(before) :], whole[len(to_needle) :]
        if shown.strip() != sentence:
            raise NeedleworkError(f"niah: this tokenizer makes {shown.strip()!r} of the needle; choose words that it keeps")
        start, end = shown.split(sentence)
        reached = 100 * place / size if size else 0.0
        facts = {"style": "paper", "context_tokens": size + len(needle), "depth_reached_percent": reached, "needles": 1}
        # The options are seeded by the context, so that cells or seeds with equal prompts have equal options.
        return before + start, end + after, f"{before}/{after}", facts

    def encode(self, tokenizer: Tokenizer, draft: Draft) -> Encoded:
        """Tokenize the prompt; in `style: paper` as a whole: tokens that contain needle and other text belong to the needle."""
        if self.style != "paper":
            return super().encode(tokenizer, draft)
        chat = prompts.has_chat(tokenizer)
        pieces = arranged(draft.context, draft.question, self.layout, FRAMES[draft.world])
        if chat:  # replace the last two pieces, the question and the blank line after it
            whole = prompts.in_chat(tokenizer, [*pieces[:-2], Piece(f"{draft.question} {CHAT_END}", ("question",))])
        else:
            whole = [*pieces, Piece(draft.lead)]
        return prompts.encode(tokenizer, whole, special=not chat, optional=("value", "question"), split=False)

    def _haystack_tokens(self, cell: NiahCell, size: int) -> int:
        """Return the tokens left for the haystack of a cell whose needles have `size` tokens."""
        reserve = RESERVE if self.reserve_tokens is None else self.reserve_tokens
        if cell.length - reserve < size:
            raise NeedleworkError(
                f"niah/{cell.name}: {cell.length} tokens less {reserve} kept free do not hold needles of {size} tokens; "
                "choose a greater length or a smaller reserve_tokens"
            )
        return cell.length - reserve - size


NiahChoice = choice_companion(Niah)


def _toy_item(
    task: Niah | Linked, tokenizer: Tokenizer, cell: NiahCell, name: str, stream: Stream, size: int, **options: Any
) -> Item:
    """Return an item in the toy language, with a context of `size` tokens. `options` are those of `needles.make_niah`."""
    with prefix_errors(name):
        sample = needles.make_niah(
            stream, context_tokens=size, distractors=task.distractors, depth_percent=cell.depth, layout=task.layout, **options
        )
    more = {"hops": task.hops} if isinstance(task, Linked) else {"depth_reached_percent": sample.depth_percent}
    facts = {**cell.facts(), **more}
    return toy.toy_item(tokenizer, sample, name, absent=task.absent, facts=facts, window=cell.window)


def _score_in_toy(item: Item, answer: Answer) -> dict[str, float]:
    exact = float(begins(answer.text, item.target))
    return {"correct": exact, "exact": exact, "graded": words_right(answer.text, item.target)}


@task
class Linked(Grid):
    """Multi-hop needle in the toy language: generate the value `hops` sentences from the queried name.

    Given "the secret code of loran is the code of mira", one look-up for loran in decode finds a name, not the value. A link can
    be resolved in prefill, so these needles depend on attention in prefill. Distractors have chains of the same length.
    """

    kind = "linked"
    lengths: Sizes = (128, 192)  # depths are those of the needle with the value; its links follow it
    hops: int = Field(2, ge=2)  # sentences from the queried name to its value
    relation: Literal["code", "badge", "hideout", "gift"] = "code"

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        toy.demand_toy(tokenizer, self.kind)
        new_tokens = self.ending(tokenizer)[0]
        for length, depth, i in product(self.lengths, self.depths, range(self.samples)):
            cell = NiahCell(seed, length, depth, i, window)
            stream, name = cell.stream(EVAL_SPLIT, "linked", self.hops), f"linked/hops={self.hops}/{cell.name}"
            item = _toy_item(self, tokenizer, cell, name, stream, length, relation=self.relation, hops=self.hops)
            yield self.fitted(item, new_tokens, max_tokens)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return _score_in_toy(item, answer)


LinkedChoice = choice_companion(Linked)
