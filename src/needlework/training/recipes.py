"""Recipes of zoo models: architecture, data, curriculum and optimiser. The hash of a recipe identifies a training."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from needlework.errors import ZooError, did_you_mean
from needlework.toy.needles import RELATION_NAMES
from needlework.toy.words import NAMES
from needlework.training.documents import DATA_VERSION, ITEM_KINDS, ITEM_SHARES, ROW_KINDS, DocumentMix

Share = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
RECIPE_FILES = "zoo/recipe_files"
SHORTEST_ROW = 48  # the longest item of a short row must fit
TRAINING = ("stages", "items", "answer_weight", "batch_tokens", "steps", "optimiser")  # keys that `trained_like` copies
SHORTEST_LONGEST = 128  # card prompts hold nine needles, or four of them twice (jrt)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _one_of(known: tuple[str, ...], what: str) -> AfterValidator:
    """Return a validator of names; its error has the nearest known name."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: {did_you_mean(name, known)}")
        return name

    return AfterValidator(check)


def _some_positive(shares: dict[str, float]) -> dict[str, float]:
    if sum(shares.values()) <= 0:
        raise ValueError("the shares must not all be 0")
    return shares


def _rising(parts: list[Any]) -> list[Any]:
    ends = [part.until for part in parts]
    if ends != sorted(set(ends)) or ends[-1] != 1.0:
        raise ValueError("`until` must rise and end at 1.0")
    return parts


Relation = Annotated[str, _one_of(RELATION_NAMES, "relation")]
Rows = Annotated[dict[Annotated[str, _one_of(ROW_KINDS, "row kind")], Share], AfterValidator(_some_positive)]
Items = Annotated[dict[Annotated[str, _one_of(ITEM_KINDS, "item kind")], Share], AfterValidator(_some_positive)]


class Stage(_Strict):
    """One stage of the curriculum, up to the share `until` of all steps."""

    until: Annotated[float, Field(gt=0, le=1)]
    lengths: Annotated[list[Annotated[int, Field(ge=SHORTEST_ROW)]], Field(min_length=1)]  # tokens; one is drawn for each step
    rows: Rows  # shares of row kinds
    # Kinds of needle; retrieval emerges sooner if the first stage has only one.
    relations: Annotated[list[Relation], Field(min_length=1)] = list(RELATION_NAMES)
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None  # instead of the value in `config`
    names: Annotated[int, Field(ge=4, le=len(NAMES))] | None = None  # of "hops" rows; with few, look-up emerges much sooner
    said: Annotated[float, Field(ge=0, le=1)] | None = None  # share of "hops" documents whose links state their value


class Cycle(_Strict):
    """One cycle of warm-up and cosine decay, up to the share `until` of all steps, at `peak` times the peak learning rate."""

    until: Annotated[float, Field(gt=0, le=1)]
    peak: Annotated[float, Field(gt=0, le=1)] = 1.0


class Optimiser(_Strict):
    """AdamW with linear warm-up and cosine decay to `final_lr_share` of the peak, once or in `cycles`.

    Each cycle resets the optimiser's state, so that a recipe can be extended by a cycle without changing its first part. With
    `matrix_lr`, linear layers except the output head are trained by Muon with that peak learning rate, all other parameters by
    AdamW with `lr`.
    """

    lr: Annotated[float, Field(gt=0)]
    matrix_lr: Annotated[float, Field(gt=0)] | None = None
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    warmup_steps: Annotated[int, Field(ge=1)] = 100
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    clip: Annotated[float, Field(gt=0)] = 1.0
    cycles: Annotated[list[Cycle], Field(min_length=1), AfterValidator(_rising)] = [Cycle(until=1.0)]


class Recipe(_Strict):
    """Complete description of a training."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    about: str = ""
    architecture: str  # model class of transformers
    config: dict[str, Any]  # arguments of its configuration; vocabulary size and special token ids are filled in
    # Part of a parameter name -> initial standard deviation of matching matrices; others keep the class's initialisation. With
    # 1/sqrt(width) for all, attention and feed-forward layers write ten times as much to the residual stream as embeddings and
    # convolutions, and token information is lost.
    initial_std: dict[str, Annotated[float, Field(gt=0)]] = {}
    # Part of a parameter name -> ends between which the entries of matching vectors are evenly spaced, e.g. `dt_bias` of a
    # state-space layer, which sets how far back each of its heads remembers.
    initial_range: dict[str, tuple[float, float]] = {}
    stages: Annotated[list[Stage], Field(min_length=1), AfterValidator(_rising)]
    items: Items = Field(default_factory=lambda: dict(ITEM_SHARES))
    answer_weight: Annotated[float, Field(gt=0)] = 4.0  # of answer tokens in the loss; other tokens have 1
    batch_tokens: Annotated[int, Field(ge=SHORTEST_ROW)]
    steps: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    threads: Annotated[int, Field(ge=1)] = 1  # of the CPU; floating-point sums, and thus weights, depend on their number
    optimiser: Optimiser

    @model_validator(mode="after")
    def _check_longest(self) -> Recipe:
        if self.longest < SHORTEST_LONGEST:
            raise ValueError(f"the longest rows must have at least {SHORTEST_LONGEST} tokens: the card's figures need them")
        if self.batch_tokens < self.longest:
            raise ValueError(f"batch_tokens must be at least the longest row, {self.longest}")
        return self

    @property
    def longest(self) -> int:
        """Number of tokens of the longest training document."""
        return max(length for stage in self.stages for length in stage.lengths)

    def stage_at(self, step: int) -> Stage:
        share = step / self.steps
        return next((stage for stage in self.stages if share < stage.until), self.stages[-1])

    def cycle_at(self, step: int) -> tuple[int, int, float]:
        """Return first step, end (exclusive) and relative peak of the cycle that contains a step."""
        ends = [0, *(round(cycle.until * self.steps) for cycle in self.optimiser.cycles)]
        i = bisect_right(ends, min(step, self.steps - 1))
        return ends[i - 1], ends[i], self.optimiser.cycles[i - 1].peak

    def document_mix(self, stage: Stage) -> DocumentMix:
        own = {key: value for key in ("names", "said") if (value := getattr(stage, key)) is not None}
        return DocumentMix(stage.rows, self.items, self.answer_weight, tuple(stage.relations), **own)

    def changed(self, *, steps: int | None = None, seed: int | None = None) -> Recipe:
        """Return the recipe with other steps or another seed; its hash differs."""
        new = {key: value for key, value in (("steps", steps), ("seed", seed)) if value is not None}
        return validate_recipe({**self.model_dump(), **new}, f"recipe {self.name}")

    def hash(self) -> str:
        """Return 12 hex digits over everything that determines the weights, i.e. all but name and description."""
        content = {**self.model_dump(mode="json", exclude={"name", "about"}), "data_version": DATA_VERSION}
        # Left out while unset: recipes from before these keys keep their hash.
        late: list[tuple[dict[str, Any], tuple[str, ...]]] = [
            (content, ("initial_std", "initial_range")),
            (content["optimiser"], ("matrix_lr", "cycles")),
        ]
        late += [(stage, ("attention_dropout", "names", "said")) for stage in content["stages"]]
        for part, keys in late:
            for key in keys:
                if part[key] in (None, {}, [{"until": 1.0, "peak": 1.0}]):
                    del part[key]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)


_NESTED: dict[str, type[BaseModel]] = {"stages": Stage, "optimiser": Optimiser}


def explain(error: ValidationError, source: str, model: type[BaseModel]) -> ZooError:
    """Return an error that names `source` and all faults in the content of a model."""
    lines = []
    for fault in error.errors():
        place = [str(part) for part in fault["loc"]]
        where = ".".join(place) or "recipe"
        if fault["type"] == "extra_forbidden":
            owner = _NESTED.get(place[0], model) if len(place) > 1 else model
            lines.append(f"unknown key {where!r}: {did_you_mean(place[-1], owner.model_fields)}")
        else:
            lines.append(f"{where}: {fault['msg'].removeprefix('Value error, ')}")
    return ZooError(f"{source}: " + "; ".join(lines))


def validate_recipe(content: Any, source: str) -> Recipe:
    """Return the recipe with this content; raise an error that names `source` and all faults.

    `trained_like: NAME` stands for the training keys of that built-in recipe; keys of the recipe itself take precedence.
    """
    if not isinstance(content, dict):
        raise ZooError(f"{source}: a recipe is a mapping of keys to values; see an existing one for its shape")
    if "trained_like" in content:
        own = {key: value for key, value in content.items() if key != "trained_like"}
        name = content["trained_like"]
        if name not in builtin_recipes():
            raise ZooError(f"{source}: trained_like names no built-in recipe: {did_you_mean(str(name), builtin_recipes())}")
        content = {**find_recipe(name).model_dump(include=set(TRAINING)), **own}
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise explain(error, source, Recipe) from None


class _Yaml(yaml.SafeLoader):
    """Safe YAML loader that reads 1e-6 as a number; PyYAML reads it as text unless it is written 1.0e-6."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a YAML file."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Yaml)
    except OSError as error:
        raise ZooError(f"cannot read recipe {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ZooError(f"{path} is not valid YAML: {error}") from None
    return validate_recipe(content, str(path))


def shipped_files(folder: str) -> dict[str, Path]:
    """Return the YAML files in a directory of the package, by name. The package must be installed as plain files."""
    files = (Path(str(resources.files("needlework"))) / folder).glob("*.yaml")
    return dict(sorted((path.stem, path) for path in files))


def find_file(what: str, name_or_path: str | Path, shipped: Mapping[str, Path]) -> Path:
    """Return the file of a built-in recipe or study by name, or the path of a YAML file."""
    text = str(name_or_path)
    if text in shipped:
        return shipped[text]
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        return Path(text)
    hint = did_you_mean(text, shipped)
    raise ZooError(f"unknown {what} {text!r}: {hint} (or give the path of a {what} file ending in .yaml)")


def builtin_recipes() -> tuple[str, ...]:
    """Return the names of the recipes in the package."""
    return tuple(shipped_files(RECIPE_FILES))


def find_recipe(name_or_path: str | Path) -> Recipe:
    """Return a built-in recipe by name, or read one from the path of a YAML file."""
    return read_recipe(find_file("recipe", name_or_path, shipped_files(RECIPE_FILES)))
