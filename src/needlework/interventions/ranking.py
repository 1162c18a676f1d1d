"""An order of heads, best first, from whatever measured it; or the name of one that a run has yet to record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from needlework.anatomy import Anatomy, Head
from needlework.errors import NeedleworkError, check_plain, shown
from needlework.files import read_text, whole

FORMAT, VERSION = "needlework ranking", 1
OF_TENSORS = "tensors:"  # begins the hash of a model that comes from no file
AND_CONFIG = "+"  # and what follows it is of its configuration; older files lack that
MOST_BYTES = 64 * 2**20  # of a file: a hundred times the largest model's
_CURE = "give a file that `needlework heads` or Ranking.save wrote"


def as_heads(value: Any, what: str = "head") -> list[Head]:
    """Heads (or what else has a layer and a number in it) from pairs of whole numbers."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise NeedleworkError(f"{what}s are a list of [layer, {what}] pairs, e.g. [[2, 0], [5, 11]], not {shown(value)}")
    heads = []
    for pair in value:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise NeedleworkError(f"a {what} is a pair [layer, {what}], e.g. [2, 0], not {shown(pair)}")
        if not all(isinstance(number, (int, float)) for number in pair):
            raise NeedleworkError(f"layer and {what} are whole numbers, e.g. [2, 0], not {shown(pair)}")
        heads.append(Head(*pair))
    return heads


class Recorded(BaseModel):
    """A ranking that a plan names and its run records before it is needed.

    `content` is a hash of what it is recorded from: with the model it decides the order, so that a trial has its id before
    the order is known. A plan's text leaves it out: `keep_heads(k=2, by=recorded('needle_mass'))`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    content: str = ""

    def text(self) -> str:
        return f"recorded({', '.join(repr(part) for part in (self.name, self.content) if part)})"


class Origin(BaseModel):
    """The model whose heads were ranked."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = ""
    architecture: str = ""
    weights: str = ""  # hash, as in stores; empty: not known


class Ranking(BaseModel):
    """Heads from best to worst. A value: it compares by order alone and has a text form that `parse` reads.

    What it was measured with travels along, into files and back: `save`, `load`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    order: tuple[Head, ...]
    scores: Mapping[Head, float] = {}  # more is better; of all heads of the order, or of none
    method: str = ""  # how: a name of `needlework heads --methods`, or whose file it was
    model: Origin = Origin()
    task: str = ""
    samples: int = 0
    seed: int | None = None
    evidence: Mapping[str, Any] = {}  # what else was counted, ready for JSON

    @field_validator("order", mode="before")
    @classmethod
    def _heads(cls, value: Any) -> tuple[Head, ...]:
        heads = tuple(as_heads(value))
        if len(set(heads)) != len(heads):
            raise NeedleworkError("ranking: a head occurs twice")
        return heads

    @field_validator("scores", mode="after")
    @classmethod
    def _finite(cls, value: Mapping[Head, float]) -> Mapping[Head, float]:
        if wrong := [head for head, score in value.items() if not math.isfinite(score)]:
            raise ValueError(f"the score of head {tuple(wrong[0])} is no finite number")
        return value

    def __init__(self, **fields: Any) -> None:
        check_plain(fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            fault = error.errors()[0]
            message = fault["msg"].removeprefix("Value error, ")
            raise NeedleworkError(f"ranking: {message.removeprefix('ranking: ')} (got {shown(fault['input'])})") from None
        if self.scores and set(self.scores) != set(self.order):
            raise NeedleworkError("ranking: scores are given for other heads than the order has; give one for each, or none")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranking) and self.order == other.order

    def __hash__(self) -> int:
        return hash(self.order)

    @classmethod
    def by_scores(cls, scores: Mapping[Head, float], **about: Any) -> Ranking:
        """The heads by their scores, most first; of equals the one that comes first in the model."""
        return cls(order=sorted(scores, key=lambda head: (-scores[head], head)), scores=scores, **about)

    def top(self, k: int) -> tuple[Head, ...]:
        """The k best heads."""
        if not 0 <= k <= len(self.order):
            raise NeedleworkError(f"ranking: {k} of {len(self.order)} heads; choose k from 0 to {len(self.order)}")
        return self.order[:k]

    def check(self, anatomy: Anatomy, weights: str = "") -> None:
        """Raise unless this ranks the heads of such a model, all of them, and, where both are known, of these very weights."""
        heads = set(anatomy.heads)
        if unknown := sorted(set(self.order) - heads):
            raise NeedleworkError(
                f"{self._named}: {anatomy.architecture} has no heads {[tuple(head) for head in unknown[:5]]}; attention layers"
                f" are {[layer.index for layer in anatomy.attention_layers]}, `needlework inspect` shows their heads"
            )
        if missing := sorted(heads - set(self.order)):
            raise NeedleworkError(
                f"{self._named} does not cover heads {[tuple(head) for head in missing[:5]]} of this model: rank it anew"
            )
        kinds = {name.startswith(OF_TENSORS) for name in (weights, self.model.weights)}  # those of files say nothing of tensors
        both = zip(weights.split(AND_CONFIG), self.model.weights.split(AND_CONFIG), strict=False)  # as far as both say it
        if weights and self.model.weights and len(kinds) == 1 and any(ours != theirs for ours, theirs in both):
            raise NeedleworkError(
                f"{self._named} is of other weights ({_short(self.model.weights)}, {self.model.architecture}) than this model has"
                f" ({_short(weights)}): rank it anew, or, if the order is meant for it all the same, give ranking.unsigned()"
            )

    def unsigned(self) -> Ranking:
        """The same without the model that it comes from: it may then be used on any model with these heads."""
        return self.model_copy(update={"model": Origin()})

    @property
    def _named(self) -> str:
        parts = ("the ranking", self.method and f"by {self.method}", self.model.name and f"of {self.model.name}")
        return " ".join(part for part in parts if part)

    def text(self) -> str:
        return "ranking('" + " ".join(f"{head.layer}.{head.index}" for head in self.order) + "')"

    @classmethod
    def parse(cls, text: str) -> Ranking:
        try:
            order = [Head(*(int(n) for n in word.split("."))) for word in text.split()]
        except (AttributeError, TypeError, ValueError):
            raise NeedleworkError(
                f"ranking: expected words such as '2.0 5.11' (layer.head, best first), got {shown(text)}"
            ) from None
        return cls(order=order)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: heads as [layer, head, score], best first."""
        heads = [[*head, *([self.scores[head]] if self.scores else [])] for head in self.order]
        about = {key: getattr(self, key) for key in ("method", "task", "samples", "seed")}
        model = self.model.model_dump()
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            **about,
            "heads": heads,
            "evidence": jsonable(self.evidence),
        }

    def save(self, path: Path | str) -> None:
        """Write a file that `load` reads: whole, or not at all."""
        lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in self.to_dict().items()]
        with whole(Path(path)) as file:
            file.write("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: Path | str) -> Ranking:
        """What `save` wrote; a NeedleworkError for whatever else is in the file."""
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, content: Any, where: str = "ranking") -> Ranking:
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise NeedleworkError(f"{where}: holds no ranking (its format is not {FORMAT!r}); {_CURE}")
        if content.get("version") != VERSION:
            raise NeedleworkError(
                f"{where}: is of version {shown(content.get('version'))}, this reads version {VERSION}; use a newer needlework"
            )
        fields = {key: value for key, value in content.items() if key not in ("format", "version", "heads")}
        heads = content.get("heads")
        try:
            rows = [tuple(row) for row in heads] if isinstance(heads, list) and all(isinstance(r, list) for r in heads) else None
            if rows is None or len({len(row) for row in rows}) > 1 or not all(len(row) in (2, 3) for row in rows):
                raise NeedleworkError("heads are a list of [layer, head, score] or of [layer, head]")
            order = as_heads([row[:2] for row in rows])
            scores = {head: row[2] for head, row in zip(order, rows, strict=True) if len(row) == 3}
            return cls(order=order, scores=scores, **fields)
        except (NeedleworkError, TypeError) as error:  # TypeError: a key that is no field's name
            raise NeedleworkError(f"{where}: {error}; {_CURE}") from None


def jsonable(value: Any) -> Any:
    """The same with null where a number is none: JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    return [jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_json(path: Path | str) -> Any:
    """What a JSON file holds, read with a limit."""
    try:
        return json.loads(read_text(path, _CURE, most=MOST_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, NeedleworkError):
            raise
        raise NeedleworkError(f"{path}: is no JSON ({str(error)[:100]}); {_CURE}") from None


def _short(weights: str) -> str:
    tensors, mark, config = weights.partition(AND_CONFIG)
    return tensors[:16] + mark + config[:4]
