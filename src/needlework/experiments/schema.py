"""What may stand in a plan's YAML, as pydantic models. `plan.py` turns it into a Plan."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from needlework.errors import NeedleworkError, shown
from needlework.interventions.acts import Phase
from needlework.requests import MOST_TOKENS

NAME = re.compile(r"[\w.+-]{1,200}")
NAME_RULE = "use letters, digits and . _ + -, at most 200 of them"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Window = Literal["transformers", "deepmind"]
Kernels = Literal["fast", "stock"]
Count = Annotated[int, Field(ge=1, strict=True)]
NewTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]


def _seeds(value: Any) -> Any:
    """A number, a list of numbers, or a range such as 0..4."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,6})\.\.(\d{1,6})\s*", value)):
        return list(range(int(match[1]), int(match[2]) + 1))
    if isinstance(value, str):
        raise ValueError("write a number, a list such as [0, 1], or a range such as 0..4")
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Seeds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], BeforeValidator(_seeds), Field(min_length=1)]
Texts = Annotated[list[Annotated[str, Field(min_length=1, strict=True)]], BeforeValidator(_listed), Field(min_length=1)]


class Loading(Strict):
    """How a model is loaded: the keys of a plan's model, the options of the command line, the arguments of `nw.load`."""

    device: Annotated[str, Field(min_length=1)] = "cpu"
    dtype: Dtype = "float32"
    window: Window = "transformers"
    kernels: Kernels = "fast"

    def but(self, **given: Any) -> Loading:
        """The same with the values that are given (None: not given) instead of its own."""
        values = {key: str(value).removeprefix("torch.") for key, value in given.items() if value is not None}
        try:
            return Loading(**{**self.model_dump(), **values})
        except ValidationError as error:
            fault = error.errors()[0]
            raise NeedleworkError(f"{'.'.join(map(str, fault['loc']))}={fault['input']!r}: {fault['msg']}") from None


class ModelFile(Loading):
    """A model: a zoo name, a directory, a .gguf file or a hub id, and how to load it."""

    source: Annotated[str, Field(min_length=1, strict=True)]
    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")] | None = None
    revision: str | None = None

    @property
    def loading(self) -> Loading:
        return Loading(**{key: getattr(self, key) for key in Loading.model_fields})


def _model(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


def model_option(text: str) -> ModelFile:
    """What `--model` says: a source, or NAME=SOURCE. A path that holds a "=" itself is a source."""
    if not text:
        raise NeedleworkError("--model is empty; give a directory, a .gguf file, a hub id or a name from `needlework zoo`")
    name, equals, source = text.partition("=")
    if not equals or "/" in name or "\\" in name or os.path.exists(os.path.expanduser(text)):
        return ModelFile(source=text)
    if not NAME.fullmatch(name) or not source:
        wrong = f"{shown(name)} is no name; {NAME_RULE}" if source else "there is nothing after the '='"
        raise NeedleworkError(f"--model {shown(text)}: {wrong}; write --model NAME=PATH, or ./{text[:60]} for a path with a '='")
    return ModelFile(source=source, name=name)


Models = Annotated[list[Annotated[ModelFile, BeforeValidator(_model)]], BeforeValidator(_listed), Field(min_length=1)]
Tasks = Annotated[list[Any], BeforeValidator(_listed), Field(min_length=1)]  # checked by the tasks themselves


class Settings(Strict):
    """What an experiment may set, and the plan for all of them. None: the value from one level up."""

    models: Models | None = None
    seeds: Seeds | None = None
    boundary: Phase | None = None
    max_new_tokens: NewTokens | None = None
    limit: Count | None = None  # at most this many samples of each task and seed, spread evenly


class FastFile(Settings):
    """What replaces an experiment's own values with --fast."""

    tasks: Tasks | None = None
    interventions: Texts | None = None
    skip: bool = False


class ExperimentFile(Settings):
    about: str = ""
    tasks: Tasks
    interventions: Texts
    observe: bool = False
    fast: FastFile | None = None


class RankingFile(Strict):
    """An order of heads that a run records before it needs it, or that a file holds: `keep_heads(k=2, by=recorded('NAME'))`."""

    about: str = ""
    file: Annotated[str, Field(min_length=1, strict=True)] | None = (
        None  # that `needlework heads` wrote; nothing is recorded then
    )
    by: str = "needle_mass"  # what heads are ranked by, the most first; see heads/methods.py
    tasks: Tasks | None = None  # whose answers are watched, with nothing done to the model
    seeds: Seeds | None = None  # none that an experiment which uses it is judged on
    limit: Count | None = None


class PlanFile(Settings):
    name: str = ""
    about: str = ""
    rankings: dict[str, RankingFile] | None = None
    experiments: Annotated[dict[str, ExperimentFile], Field(min_length=1)]
    fast: Settings | None = None


def keys_at(place: tuple[str | int, ...]) -> set[str]:
    """The keys that may stand at a place of the file."""
    shape = tuple(part for part in place if not isinstance(part, int))
    if shape[-1:] == ("models",):
        return set(ModelFile.model_fields)
    if shape[:1] == ("rankings",) and len(shape) >= 2:
        return set(RankingFile.model_fields)
    if shape[:1] == ("experiments",) and len(shape) >= 2:
        return set((FastFile if shape[2:3] == ("fast",) else ExperimentFile).model_fields)
    return set((Settings if shape[:1] == ("fast",) else PlanFile).model_fields)
