"""Recipes: everything that decides what a zoo model becomes. The hash of a recipe names the training it describes."""

from __future__ import annotations

import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from needlework.errors import ZooError, did_you_mean
from needlework.toy.needles import RELATION_NAMES
from needlework.toy.words import NAMES
from needlework.training.documents import DATA_VERSION, ITEM_KINDS, ITEM_SHARES, ROW_KINDS
from needlework.training.rows import Diet

Share = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
SHORTEST_ROW = 48  # the longest single item of a short row must have room
TRAINING = ("stages", "items", "answer_weight", "batch_tokens", "steps", "optimiser")  # all but the model and its seed
SHORTEST_LONGEST = 128  # cards ask for a needle among eight others, and read four of them twice


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _known(shares: dict[str, float], known: tuple[str, ...], what: str) -> dict[str, float]:
    for key in shares:
        if key not in known:
            raise ValueError(f"unknown {what} {key!r}: {did_you_mean(key, known)}")
    if sum(shares.values()) <= 0:
        raise ValueError(f"the shares of {what} must not all be 0")
    return shares


def _rising(ends: list[float], what: str) -> None:
    if ends != sorted(set(ends)) or ends[-1] != 1.0:
        raise ValueError(f"`until` of the {what} must rise and end at 1.0")


class Stage(_Strict):
    """One part of the curriculum: up to share `until` of all steps, rows have one of `lengths` and these kinds.

    `relations` are the kinds of needle. Retrieval emerges sooner when the first stage has one kind only.
    `attention_dropout` is the ordinary one: each attention weight of each head is left out with this probability, instead
    of the one that `config` says. Of rows of the kind "hops", `names` is how many names they are about (a look-up by name
    emerges far sooner among few), `said` the share of documents whose links say their value.
    """

    until: Annotated[float, Field(gt=0, le=1)]
    lengths: Annotated[list[Annotated[int, Field(ge=SHORTEST_ROW)]], Field(min_length=1)]
    rows: dict[str, Share]
    relations: Annotated[list[str], Field(min_length=1)] = list(RELATION_NAMES)
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    names: Annotated[int, Field(ge=4, le=len(NAMES))] | None = None
    said: Annotated[float, Field(ge=0, le=1)] | None = None

    @field_validator("relations")
    @classmethod
    def _relations_known(cls, names: list[str]) -> list[str]:
        _known(dict.fromkeys(names, 1.0), RELATION_NAMES, "relation")
        return names

    @field_validator("rows")
    @classmethod
    def _rows_known(cls, shares: dict[str, float]) -> dict[str, float]:
        return _known(shares, ROW_KINDS, "row kind")


class Cycle(_Strict):
    """One warm-up and fall of the learning rate, up to share `until` of all steps, from `peak` times the optimiser's peak."""

    until: Annotated[float, Field(gt=0, le=1)]
    peak: Annotated[float, Field(gt=0, le=1)] = 1.0


class Optimiser(_Strict):
    """AdamW with linear warm-up and a cosine down to `final_lr_share` of the peak, once or in `cycles`.

    A cycle starts with a fresh optimiser: a recipe that is made longer by one leaves its first part as it was, bit for bit.
    With `matrix_lr`, linear maps inside the model are trained by Muon at that peak, all else by AdamW at `lr`.
    """

    lr: Annotated[float, Field(gt=0)]
    matrix_lr: Annotated[float, Field(gt=0)] | None = None
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    warmup_steps: Annotated[int, Field(ge=1)] = 100
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    clip: Annotated[float, Field(gt=0)] = 1.0
    cycles: Annotated[list[Cycle], Field(min_length=1)] = [Cycle(until=1.0)]

    @field_validator("cycles")
    @classmethod
    def _cycles_in_order(cls, cycles: list[Cycle]) -> list[Cycle]:
        _rising([cycle.until for cycle in cycles], "cycles")
        return cycles


class Recipe(_Strict):
    """A model class of transformers, its configuration, its data and its optimiser.

    `config` is handed to the class's own configuration; vocabulary size and special token ids are filled in.
    `initial_std` sets how large parameters start, by a part of their name; the class decides about all others. Where all
    start at 1/sqrt(width), attention and feed-forward layers write ten times as much into the residual stream as embeddings
    and convolutions do, and tokens are lost in it. `initial_range` does the same for vectors: their entries start evenly
    spaced between two ends (a state-space layer's `dt_bias`, say, which decides how far back each of its heads can see).
    Training is done on one thread unless `threads` says otherwise: sums depend on the thread count, weights too.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    about: str = ""
    architecture: str
    config: dict[str, Any]
    initial_std: dict[str, Annotated[float, Field(gt=0)]] = {}
    initial_range: dict[str, tuple[float, float]] = {}
    stages: Annotated[list[Stage], Field(min_length=1)]
    items: dict[str, Share] = Field(default_factory=lambda: dict(ITEM_SHARES))
    answer_weight: Annotated[float, Field(gt=0)] = 4.0
    batch_tokens: Annotated[int, Field(ge=SHORTEST_ROW)]
    steps: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    threads: Annotated[int, Field(ge=1)] = 1
    optimiser: Optimiser

    @field_validator("items")
    @classmethod
    def _items_known(cls, shares: dict[str, float]) -> dict[str, float]:
        return _known(shares, ITEM_KINDS, "item kind")

    @model_validator(mode="after")
    def _stages_in_order(self) -> Recipe:
        _rising([stage.until for stage in self.stages], "stages")
        if self.longest < SHORTEST_LONGEST:
            raise ValueError(f"the longest rows must have at least {SHORTEST_LONGEST} tokens: the card's figures need that room")
        if self.batch_tokens < self.longest:
            raise ValueError(f"batch_tokens must be at least the longest row, {self.longest}")
        return self

    @property
    def longest(self) -> int:
        """The longest training document, in tokens."""
        return max(length for stage in self.stages for length in stage.lengths)

    def stage_at(self, step: int) -> Stage:
        share = step / self.steps
        return next((stage for stage in self.stages if share < stage.until), self.stages[-1])

    def cycle_at(self, step: int) -> tuple[int, int, float]:
        """First step, end and peak of the cycle that a step lies in."""
        start = 0
        for cycle in self.optimiser.cycles:
            end = round(cycle.until * self.steps)
            if step < end:
                break
            start = end
        return start, end, cycle.peak

    def diet(self, stage: Stage) -> Diet:
        own = {key: value for key in ("names", "said") if (value := getattr(stage, key)) is not None}
        return Diet(stage.rows, self.items, self.answer_weight, tuple(stage.relations), **own)

    def changed(self, *, steps: int | None = None, seed: int | None = None) -> Recipe:
        """The same recipe with other steps or seed: another training, so another hash."""
        new = {key: value for key, value in (("steps", steps), ("seed", seed)) if value is not None}
        return checked({**self.model_dump(), **new}, f"recipe {self.name}")

    def hash(self) -> str:
        """12 hex digits over all that decides the weights; the name and the description do not."""
        content = {**self.model_dump(mode="json", exclude={"name", "about"}), "data_version": DATA_VERSION}
        for unsaid in ("initial_std", "initial_range"):  # says nothing, so it names nothing
            if not content[unsaid]:
                del content[unsaid]
        for stage in content["stages"]:
            for unsaid in ("attention_dropout", "names", "said"):
                if stage[unsaid] is None:
                    del stage[unsaid]
        if self.optimiser.matrix_lr is None:
            del content["optimiser"]["matrix_lr"]
        if self.optimiser.cycles == [Cycle(until=1.0)]:
            del content["optimiser"]["cycles"]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)


_MODELS: dict[str, type[BaseModel]] = {"stages": Stage, "optimiser": Optimiser}


def _explain(error: ValidationError, source: str) -> ZooError:
    lines = []
    for problem in error.errors():
        where = ".".join(map(str, problem["loc"])) or "recipe"
        if problem["type"] == "extra_forbidden":
            owner = _MODELS.get(str(problem["loc"][0]), Recipe) if len(problem["loc"]) > 1 else Recipe
            lines.append(f"unknown key {where!r}: {did_you_mean(str(problem['loc'][-1]), owner.model_fields)}")
        else:
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
    return ZooError(f"{source}: " + "; ".join(lines))


def _with_training(content: dict[Any, Any], source: str) -> dict[Any, Any]:
    """`trained_like: NAME` stands for what that built-in recipe says of its training; what a recipe says itself goes first."""
    if "trained_like" not in content:
        return content
    own = {key: value for key, value in content.items() if key != "trained_like"}
    name = content["trained_like"]
    if name not in builtin():
        raise ZooError(f"{source}: trained_like names no built-in recipe: {did_you_mean(str(name), builtin())}")
    return {**find(name).model_dump(include=set(TRAINING)), **own}


def checked(content: Any, source: str) -> Recipe:
    if not isinstance(content, dict):
        raise ZooError(f"{source}: a recipe is a mapping of keys to values; see an existing one for its shape")
    try:
        return Recipe.model_validate(_with_training(content, source))
    except ValidationError as error:
        raise _explain(error, source) from None


class _Yaml(yaml.SafeLoader):
    """Safe YAML in which 1e-6 is a number, as people expect; PyYAML takes it for text unless it is written 1.0e-6."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read(path: Path) -> Recipe:
    """A recipe from a YAML file of your own."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Yaml)
    except OSError as error:
        raise ZooError(f"cannot read recipe {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ZooError(f"{path} is not valid YAML: {error}") from None
    return checked(content, str(path))


def builtin() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    folder = resources.files("needlework.zoo") / "recipe_files"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def find(name_or_path: str | Path) -> Recipe:
    """A built-in recipe by name, or your own by the path of its YAML file."""
    text = str(name_or_path)
    if text in builtin():
        entry = resources.files("needlework.zoo") / "recipe_files" / f"{text}.yaml"
        return checked(yaml.safe_load(entry.read_text(encoding="utf-8")), f"recipe {text}")
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        return read(Path(text))
    raise ZooError(
        f"unknown recipe {text!r}: {did_you_mean(text, builtin())} (or give the path of a recipe file ending in .yaml)"
    )
