"""The paper's needle in a haystack: one sentence hidden at a depth of a long text, and a question about it.

Lengths, depths, needle, question and scores are the paper's by default; its very prompts are those of `style: paper`, which
`tasks/paper_prompt.py` makes. By default a needle stands after the end of a sentence, as any other sentence does, and each cell
has a text of its own. A length is nominal: `reserve_tokens` of it are kept free for question and answer. Zoo models are asked
in the toy language.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import paper_prompt, toy
from needlework.tasks.base import Extent, Item, Mode, Tokenizer, task
from needlework.tasks.haystack import Haystack, essay, gather, sentences, weave
from needlework.tasks.prompts import Encoded, Piece, token_ids
from needlework.tasks.retrieval import BASE_LEAD, CHAT_END, Chosen, Draft, Retrieval, Sizes
from needlework.tasks.scores import begins, graded, holds, words_right
from needlework.toy import world as toy_world
from needlework.toy.sample import Stream

# The paper's needle, and needles like it about other cities for distractors, wrong options and twins.
NEEDLE = "The best thing to do in {key} is {value}."
KEY, VALUE = "San Francisco", "eat a sandwich and sit in Dolores Park on a sunny day"
QUESTION = "What is the best thing to do in {key}?"
GRADED = {"eat a sandwich": 1.0, "dolores park": 0.5, "sit in dolores park": 0.5, "on a sunny day": 1.0}
LENGTHS = (250, 677, 1105, 1532, 1959, 2387, 2814, 3241, 3669, 4096)
DEPTHS = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)
Depths = Annotated[tuple[Annotated[float, Field(ge=0, le=100)], ...], Field(min_length=1)]
RESERVE = 200
TOY_LENGTHS = (64, 128, 192, 256)
QUESTION_ROOM = 24  # words around the context of a toy prompt, at most


class Other(BaseModel):
    """Another needle of the same kind: put into the context as a distractor, or offered as an option only."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    key: str = ""
    value: str


OTHERS = tuple(
    Other(key=key, value=value)
    for key, value in (
        ("Chicago", "climb a tower and look over the lake on a windy day"),
        ("Lisbon", "ride a tram and drink coffee in the old town on a warm morning"),
        ("Toronto", "rent a boat and row around the islands on a quiet afternoon"),
        ("Vienna", "hear an opera and walk in the palace garden on a mild evening"),
        ("Nairobi", "watch the lions and camp beside the river on a clear night"),
        ("Oslo", "take a sauna and swim in the cold harbour on a bright day"),
        ("Kyoto", "visit a temple and sit under the maple trees on a foggy morning"),
        ("Lima", "eat grilled fish and watch the surfers on a cloudy day"),
        ("Dublin", "hear a fiddle and talk to strangers in a pub on a rainy night"),
        ("Sydney", "take a ferry and have a picnic on the beach on a hot day"),
        ("Cairo", "buy some spices and float down the river on a golden evening"),
        ("Prague", "cross the bridge and feed the swans on a snowy morning"),
    )
)


def filled(template: str, key: str, value: str) -> str:
    return template.replace("{key}", key).replace("{value}", value)


@task
class Niah(Retrieval):
    """Needle in a haystack: generate the answer; exact and graded scores."""

    kind = "niah"
    mode: ClassVar[Mode] = "generate"
    files: ClassVar[tuple[str, ...]] = ("haystack",)
    style: Literal["auto", "base", "chat", "paper"] = "auto"  # type: ignore[assignment]  # the others, and one of its own
    lengths: Sizes | None = None  # the paper's; for zoo models what fits
    depths: Depths = DEPTHS
    reserve_tokens: int | None = Field(None, ge=0)  # 200; zoo models: 0, a length is then the context's
    distractors: int = Field(0, ge=0)  # more needles of the same kind, about other keys
    haystack: str | None = None  # pattern of text files; none: built-in sentences
    haystack_per: Literal["cell", "sample"] = "cell"  # sample: all cells share one text, as in the paper
    needle: str = NEEDLE
    question: str = QUESTION
    key: str = KEY
    value: str = VALUE
    others: tuple[Other, ...] | None = None  # other keys and values for distractors, options and twins
    graded: dict[str, float] | None = None  # points for parts; the paper's for the paper's needle
    relation: str = "code"  # toy world: code, badge, hideout, gift, or any of them. A hideout is guessed in 1 trial of 16
    quote: bool = False  # toy world: ask for the whole sentence

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        is_toy = toy.resolve(self.world, tokenizer) == "toy"
        if self.style == "paper":
            self._check_paper(is_toy)
        make = self._toy if is_toy else self._paper if self.style == "paper" else self._english
        new_tokens = self.ending(tokenizer)[0]
        for length, depth, i in product(self._lengths(is_toy, max_tokens), self.depths, range(self.samples)):
            cell = Cell(seed, length, depth, i, window)
            yield self.fitted(make(tokenizer, cell), new_tokens, max_tokens)

    def extent(self) -> Extent:
        lengths = self.lengths or LENGTHS
        return Extent(len(lengths) * len(self.depths) * self.samples, max(lengths))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        if item.facts["world"] == "toy":
            exact = float(begins(answer.text, item.target))
            return {"correct": exact, "exact": exact, "graded": words_right(answer.text, item.target)}
        paper = (self.needle, self.key, self.value) == (NEEDLE, KEY, VALUE)
        parts = self.graded if self.graded is not None else GRADED if paper else {}
        exact = float(holds(answer.text, item.target))
        return {"correct": exact, "exact": exact, "graded": graded(answer.text, item.target, parts)}

    def _lengths(self, is_toy: bool, max_tokens: int | None) -> tuple[int, ...]:
        if self.lengths is not None:
            return self.lengths
        if not is_toy:
            return LENGTHS
        copies = 2 if self.layout == "jrt" else 1
        most = TOY_LENGTHS[-1] if max_tokens is None else (max_tokens - self.toy_new_tokens) // copies - QUESTION_ROOM
        if most >= TOY_LENGTHS[-1]:  # what a model could hold says nothing of how long its training documents were
            return TOY_LENGTHS
        return tuple(most * part // 4 for part in (1, 2, 3, 4))

    def _toy(self, tokenizer: Tokenizer, cell: Cell) -> Item:
        stream = cell.stream(toy_world.EVAL_SPLIT, "niah")
        relation = stream.pick(toy_world.RELATION_NAMES) if self.relation == "any" else self.relation
        if relation not in toy_world.RELATIONS:
            known = ", ".join([*toy_world.RELATIONS, "any"])
            raise NeedleworkError(f"niah: unknown relation {relation!r}; choose one of {known}")
        try:
            sample = toy_world.niah(
                stream,
                context_tokens=cell.length - (self.reserve_tokens or 0),
                distractors=self.distractors,
                depth_percent=cell.depth,
                relation=relation,
                layout=self.layout,
                quote=self.quote,
            )
        except ValueError as error:
            raise NeedleworkError(f"{cell.name}: {error}") from None
        facts = {**cell.facts(), "depth_reached_percent": sample.depth_percent}
        return toy.toy_item(tokenizer, sample, cell.name, absent=self.absent, facts=facts, window=cell.window)

    def _english(self, tokenizer: Tokenizer, cell: Cell) -> Item:
        stream = cell.stream("needles")
        others = stream.mixed(self._others())
        hidden, free = others[: self.distractors], others[self.distractors :]
        if len(hidden) < self.distractors:
            raise NeedleworkError(f"niah: {self.distractors} distractors need as many others; {len(others)} are given")
        hay, size = self._hay(tokenizer, cell, hidden)
        slots = [hay.slot(cell.depth), *(stream.below(len(hay.ends)) for _ in hidden)]
        facts = {
            **cell.facts(),
            "context_tokens": hay.tokens + size,
            "depth_reached_percent": hay.depth_percent(slots[0]),
            "needles": len(slots),
        }

        distractors = [self._pieces(other.key, other.value, "distractor") for other in hidden]
        needles = [self._pieces(self.key, self.value, "needle"), *distractors]
        draft = Draft(
            context=weave(hay, list(zip(slots, needles, strict=True))),
            question=filled(self.question, self.key, self.value),
            target=filled(self.needle, self.key, self.value),
            lead=BASE_LEAD,
            instruction=CHAT_END,
            options=self._options(hidden, free),
            facts=facts,
            value=self.value if "{value}" in self.needle else "",
            spare=[other.value for other in free],
        )
        cluster = f"niah/haystack={cell.i}" if self.haystack_per == "sample" else cell.name
        return self.drafted_item(tokenizer, draft, cell.name, cluster, cell.window)

    def _paper(self, tokenizer: Tokenizer, cell: Cell) -> Item:
        """The authors' own prompt: all cells of a sample begin with the same words."""
        sentence = filled(self.needle, self.key, self.value)
        needle = paper_prompt.needle_ids(tokenizer, sentence)
        room = self._room(cell, len(needle))
        source = sentences(self.haystack, Stream("haystack", cell.seed, cell.i), start_anywhere=cell.i > 0)
        words = essay(tokenizer, source, room)
        hidden = paper_prompt.hide(tokenizer, words, needle, cell.depth)
        if hidden.needle.strip() != sentence:
            raise NeedleworkError(
                f"niah: this tokenizer makes {hidden.needle.strip()!r} of the needle; choose words that it keeps"
            )
        start, end = hidden.needle.split(sentence)
        free = cell.stream("needles").mixed(self._others())
        draft = Draft(
            context=[Piece(hidden.before + start), *self._pieces(self.key, self.value, "needle"), Piece(end + hidden.after)],
            question=filled(self.question, self.key, self.value),
            target=sentence,
            lead=BASE_LEAD,
            instruction=CHAT_END,
            options=self._options((), free),
            facts={
                **cell.facts(),
                "style": "paper",
                "context_tokens": room + len(needle),
                "depth_reached_percent": 100 * hidden.place / room if room else 0.0,
                "needles": 1,
            },
            value=self.value if "{value}" in self.needle else "",
            spare=[other.value for other in free],
        )
        return self.drafted_item(tokenizer, draft, cell.name, f"niah/haystack={cell.i}", cell.window)

    def _check_paper(self, is_toy: bool) -> None:
        wrong = {
            "is in English, and this model speaks the toy language: leave it out": is_toy,
            "hides one needle: leave distractors out": self.distractors > 0,
            "has the layouts plain and jrt": self.layout == "question_first",
            "has one text for all cells: leave haystack_per out": "haystack_per" in self.model_fields_set
            and self.haystack_per == "cell",
        }
        for why, holds_here in wrong.items():
            if holds_here:
                raise NeedleworkError(f"{self.kind}: style: paper {why}")

    def encode(self, tokenizer: Tokenizer, draft: Draft) -> Encoded:
        if self.style == "paper":
            return paper_prompt.encode(tokenizer, draft, self.layout)
        return super().encode(tokenizer, draft)

    def _room(self, cell: Cell, size: int) -> int:
        """Tokens of haystack in a cell, beside needles of this size."""
        reserve = RESERVE if self.reserve_tokens is None else self.reserve_tokens
        if cell.length - reserve < size:
            raise NeedleworkError(
                f"{cell.name}: {cell.length} tokens less {reserve} kept free do not hold needles of {size} tokens; "
                "choose a greater length or a smaller reserve_tokens"
            )
        return cell.length - reserve - size

    def _hay(self, tokenizer: Tokenizer, cell: Cell, hidden: Sequence[Other]) -> tuple[Haystack, int]:
        """The haystack of a cell, and the tokens that its needles take from it."""
        needles = [(self.key, self.value), *((other.key, other.value) for other in hidden)]
        size = sum(len(token_ids(tokenizer, " " + filled(self.needle, *needle))) for needle in needles)
        room = self._room(cell, size)
        shared = self.haystack_per == "sample"
        stream = Stream("haystack", cell.seed, cell.i) if shared else cell.stream("haystack")
        source = sentences(self.haystack, stream, start_anywhere=not shared or cell.i > 0)
        return gather(tokenizer, source, room), size

    def _others(self) -> tuple[Other, ...]:
        """The needles given, or the built-in ones for the built-in sentence."""
        if self.others is not None:
            return self.others
        return OTHERS if self.needle == NEEDLE else ()

    def _pieces(self, key: str, value: str, name: str) -> list[Piece]:
        before, placeholder, after = self.needle.partition("{value}")
        parts = [Piece(filled(before, key, value), (name,))]
        if placeholder:
            inside = (name, "value") if name == "needle" else (name,)
            parts += [Piece(value, inside), Piece(filled(after, key, value), (name,))]
        return [part for part in parts if part.text]

    def _options(self, hidden: Sequence[Other], free: Sequence[Other]) -> list[tuple[str, str]]:
        """Whole sentences about the asked key: the beginning is the same in all, so the value decides."""
        if "{value}" not in self.needle:
            return []
        values = [("true", self.value), *(("context", other.value) for other in hidden)]
        values += [("absent", other.value) for other in free[: self.absent]]
        if len(free) < self.absent and self.mode == "choices":
            raise NeedleworkError(f"niah_choice: absent: {self.absent} needs as many more others; {len(free)} are left")
        return [(kind, filled(self.needle, self.key, value)) for kind, value in values]


@task
class NiahChoice(Chosen, Niah):
    """The same items as `niah`: which value does the model think the likelier one?"""

    kind = "niah_choice"

    @property
    def chance(self) -> float:
        return self.chance_among(self.distractors)


class Cell(NamedTuple):
    """One place of the grid."""

    seed: int
    length: int
    depth: float
    i: int
    window: int | None

    @property
    def name(self) -> str:
        return f"niah/length={self.length}/depth={self.depth:g}/{self.i}"

    def stream(self, *parts: str) -> Stream:
        return Stream("/".join(parts), self.seed, self.length, f"{self.depth:g}", self.i)

    def facts(self) -> dict[str, Any]:
        return {"length_tokens": self.length, "depth_percent": self.depth}
