"""Rankings of heads, best first, with their file format; or the name of a ranking that a run has yet to record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.errors import NeedleworkError, check_plain, short_repr
from needlework.files import atomic_write, read_text

if TYPE_CHECKING:
    import pandas

FORMAT, VERSION = "needlework ranking", 1
OF_TENSORS = "tensors:"  # prefix of the weights hash of a model that was not loaded from files
AND_CONFIG = "+"  # separates the hash of the weights from that of the configuration, which older files lack
MOST_BYTES = 64 * 2**20  # of a ranking file: a hundred times that of the largest model
_CURE = "give a file that `needlework heads` or Ranking.save wrote"


def as_heads(value: Any, what: str = "head") -> list[Head]:
    """Return heads, or recurrent groups (`what="group"`), from pairs of [layer, index]; raise for other values."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise NeedleworkError(f"{what}s are a list of [layer, {what}] pairs, e.g. [[2, 0], [5, 11]], not {short_repr(value)}")
    heads = []
    for pair in value:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise NeedleworkError(f"a {what} is a pair [layer, {what}], e.g. [2, 0], not {short_repr(pair)}")
        if not all(isinstance(number, (int, float)) for number in pair):
            raise NeedleworkError(f"layer and {what} are whole numbers, e.g. [2, 0], not {short_repr(pair)}")
        heads.append(Head(*pair))
    return heads


class Recorded(BaseModel):
    """A reference to a ranking that a plan names and its run records before it is needed.

    `content` is a hash of the inputs of the recording. Together with the model it determines the order, so that trials have ids
    before the order is known. Texts in plans omit it: `keep_heads(k=2, by=recorded('needle_mass'))`.
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
    weights: str = ""  # hash of the weights, as in stores; empty if unknown


class Ranking(BaseModel):
    """Heads from best to worst, with metadata about how they were ranked.

    Rankings compare by order alone. `text` and `parse` convert the order only; `save` and `load` keep the metadata too.

    Attributes:
        order: All heads, best first.
        scores: Score of each head, higher is better; empty if only the order is known.
        method: A name of `needlework heads --methods`, or the source of an imported file.
        model: Name, architecture and weights hash of the model whose heads were ranked.
        task: Kinds of the tasks that the samples were from.
        samples: Number of samples.
        seed: Seed of the samples.
        evidence: Further measurements, ready for JSON; `intervals` has the 95 % interval of each score.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    order: tuple[Head, ...]
    scores: Mapping[Head, float] = {}
    method: str = ""
    model: Origin = Origin()
    task: str = ""
    samples: int = 0
    seed: int | None = None
    evidence: Mapping[str, Any] = {}

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
            raise NeedleworkError(f"ranking: {message.removeprefix('ranking: ')} (got {short_repr(fault['input'])})") from None
        if self.scores and set(self.scores) != set(self.order):
            raise NeedleworkError("ranking: scores are given for other heads than the order has; give one for each, or none")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranking) and self.order == other.order

    def __hash__(self) -> int:
        return hash(self.order)

    @classmethod
    def by_scores(cls, scores: Mapping[Head, float], **about: Any) -> Ranking:
        """Return the ranking of heads by score, highest first; ties go to the head that comes first in the model."""
        return cls(order=sorted(scores, key=lambda head: (-scores[head], head)), scores=scores, **about)

    def frame(self) -> pandas.DataFrame:
        """Return one row per head, best first: place, layer, head, score, and the bounds of its 95 % interval if known."""
        import pandas

        rows: list[dict[str, Any]] = [{"place": i, "layer": h.layer, "head": h.index} for i, h in enumerate(self.order, 1)]
        intervals = self.evidence.get("intervals") or {}
        for row, head in zip(rows, self.order, strict=True):
            if self.scores:
                row["score"] = self.scores[head]
            if bounds := intervals.get(f"{head.layer}.{head.index}"):
                row["low"], row["high"] = bounds
        return pandas.DataFrame(rows)

    def plot(self, ax: Any = None, *, best: int | None = None) -> Any:
        """Draw the scores as a heat map of layers by heads (places, if there are no scores), and return the matplotlib axes.

        Args:
            ax: Axes to draw into; by default those of a new figure.
            best: Number of best heads that are marked by a dot; by default 15 % of the heads.
        """
        from needlework.plots import draw_head_map, head_axes

        values = self.scores or {head: float(-i) for i, head in enumerate(self.order)}
        ax = head_axes(ax, values)
        draw_head_map(ax, values, self.top(heads_of_share(0.15, len(self.order)) if best is None else best), not self.scores)
        ax.set_title(" ".join(part for part in (self.model.name, self.method) if part))
        return ax

    def _repr_html_(self) -> str:
        from needlework.tables import Table

        return Table.from_frame(self.frame(), f"{self._named} ({len(self.order)} heads)", most=10).to_html()

    @property
    def _named(self) -> str:
        parts = ("the ranking", self.method and f"by {self.method}", self.model.name and f"of {self.model.name}")
        return " ".join(part for part in parts if part)

    def top(self, k: int) -> tuple[Head, ...]:
        """Return the k best heads."""
        if not 0 <= k <= len(self.order):
            raise NeedleworkError(f"ranking: {k} of {len(self.order)} heads; choose k from 0 to {len(self.order)}")
        return self.order[:k]

    def check(self, anatomy: Anatomy, weights: str = "") -> None:
        """Raise unless this ranks exactly the heads of a model and, if both hashes are known, was measured on its weights."""
        named = self._named
        heads = set(anatomy.heads)
        if unknown := sorted(set(self.order) - heads):
            raise NeedleworkError(
                f"{named}: {anatomy.architecture} has no heads {[tuple(head) for head in unknown[:5]]}; attention layers"
                f" are {[layer.index for layer in anatomy.attention_layers]}, `needlework inspect` shows their heads"
            )
        if missing := sorted(heads - set(self.order)):
            raise NeedleworkError(
                f"{named} does not cover heads {[tuple(head) for head in missing[:5]]} of this model: rank it anew"
            )
        kinds = {name.startswith(OF_TENSORS) for name in (weights, self.model.weights)}  # file and tensor hashes do not compare
        both = zip(weights.split(AND_CONFIG), self.model.weights.split(AND_CONFIG), strict=False)  # the config if both have it
        if weights and self.model.weights and len(kinds) == 1 and any(ours != theirs for ours, theirs in both):
            splits = (text.partition(AND_CONFIG) for text in (self.model.weights, weights))
            measured_on, given = (tensors[:16] + mark + config[:4] for tensors, mark, config in splits)
            raise NeedleworkError(
                f"{named} is of other weights ({measured_on}, {self.model.architecture}) than this model has ({given}): rank it"
                " anew, or, if the order is meant for it all the same, give ranking.unsigned()"
            )

    def unsigned(self) -> Ranking:
        """Return the ranking without its model of origin, so that it can be used on any model with these heads."""
        return self.model_copy(update={"model": Origin()})

    def text(self) -> str:
        return "ranking('" + " ".join(f"{head.layer}.{head.index}" for head in self.order) + "')"

    @classmethod
    def parse(cls, text: str) -> Ranking:
        """Read an order such as "2.0 5.11" (layer.head, best first)."""
        try:
            order = [Head(*(int(n) for n in word.split("."))) for word in text.split()]
        except (AttributeError, TypeError, ValueError):
            given = short_repr(text)
            raise NeedleworkError(f"ranking: expected words such as '2.0 5.11' (layer.head, best first), got {given}") from None
        return cls(order=order)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; heads are [layer, head, score], or [layer, head] without scores, best first."""
        heads = [[*head, *([self.scores[head]] if self.scores else [])] for head in self.order]
        about = {"model": self.model.model_dump(), **self.model_dump(include={"method", "task", "samples", "seed"})}
        return {"format": FORMAT, "version": VERSION, **about, "heads": heads, "evidence": jsonable(self.evidence)}

    def save(self, path: Path | str) -> None:
        """Write a file that `load` reads, atomically."""
        lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in self.to_dict().items()]
        with atomic_write(Path(path)) as file:
            file.write("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: Path | str) -> Ranking:
        """Read a file that `save` wrote; raise NeedleworkError for any other content."""
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, content: Any, where: str = "ranking") -> Ranking:
        """Return the ranking that `to_dict` wrote; `where` names the source in errors."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise NeedleworkError(f"{where}: holds no ranking (its format is not {FORMAT!r}); {_CURE}")
        if content.get("version") != VERSION:
            version = short_repr(content.get("version"))
            raise NeedleworkError(f"{where}: is of version {version}, this reads version {VERSION}; use a newer needlework")
        fields = {key: value for key, value in content.items() if key not in ("format", "version", "heads")}
        heads = content.get("heads")
        try:
            rows = [tuple(row) for row in heads] if isinstance(heads, list) and all(isinstance(r, list) for r in heads) else None
            if rows is None or len({len(row) for row in rows}) > 1 or not all(len(row) in (2, 3) for row in rows):
                raise NeedleworkError("heads are a list of [layer, head, score] or of [layer, head]")
            order = as_heads([row[:2] for row in rows])
            scores = {head: row[2] for head, row in zip(order, rows, strict=True) if len(row) == 3}
            return cls(order=order, scores=scores, **fields)
        except (NeedleworkError, TypeError) as error:  # TypeError: a key that is given already, such as order
            raise NeedleworkError(f"{where}: {error}; {_CURE}") from None


def jsonable(value: Any) -> Any:
    """Return a copy with None for NaN and infinite numbers, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    return [jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_json(path: Path | str) -> Any:
    """Read a JSON file of at most MOST_BYTES bytes; raise NeedleworkError if it is larger or invalid."""
    try:
        return json.loads(read_text(path, _CURE, most=MOST_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, NeedleworkError):
            raise
        raise NeedleworkError(f"{path}: is no JSON ({str(error)[:100]}); {_CURE}") from None
