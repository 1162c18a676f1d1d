"""Schema of a plan's YAML, and a YAML reader that keeps the line of every value. `plan.py` builds the Plan."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from needlework.errors import NeedleworkError, check_plain, short_repr
from needlework.files import read_text
from needlework.interventions.acts import Phase
from needlework.requests import MOST_TOKENS

Place = tuple[str | int, ...]
_MOST_NODES = 100_000  # aliases can make a small file huge; real plans have far fewer
_DEEPEST = 40
_TOO_MUCH = "the file holds too much or is too deep; aliases may not point to what holds them"
_MOST_BYTES = 1_000_000  # of a plan file; long texts belong in separate files that the plan names


class PlanError(NeedleworkError):
    """An error in a plan; the message starts with file and line where they are known."""


@dataclass
class YamlFile:
    """Plain data of a YAML file, and the line of every value by its place (a path of keys and indices)."""

    path: Path
    text: str = ""
    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)

    def line(self, place: Place) -> int:
        """Return the line of a place, or of its nearest parent that is in the file."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)

    def error(self, place: Place, message: str) -> PlanError:
        return PlanError(f"{self.path}:{self.line(place)}: {message}")


def read(path: str | Path) -> YamlFile:
    """Read a YAML file as plain data; raise PlanError if it cannot be read or parsed."""
    try:
        text = read_text(path, "give the path of a plan file", most=_MOST_BYTES)
    except NeedleworkError as error:
        raise PlanError(str(error)) from None
    file = YamlFile(Path(path), text)
    try:
        node = yaml.compose(text, Loader=_Bounded)
        if node is None:
            raise PlanError(f"{path}:1: the file is empty; a plan needs at least models and experiments")
        file.data = _Reader(file).read(node)
    except yaml.MarkedYAMLError as error:
        # An unclosed quote is reported where it was opened, not at the end of the file.
        missed = "end of stream" in str(error.problem)
        mark = (error.context_mark if missed else None) or error.problem_mark or error.context_mark
        at = mark.line if mark else 0
        brace = "".join(text.splitlines()[at : at + 1]).strip().startswith(("- {", "{"))
        hint = "; text that starts with { must stand in quotes" if brace else ""
        raise PlanError(f"{path}:{at + 1}: not valid YAML: {error.problem or error.context}{hint}") from None
    except yaml.YAMLError as error:  # a forbidden character: the error has a position instead of a mark
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise PlanError(f"{path}:{line}: not valid YAML: {getattr(error, 'reason', error)}") from None
    return file


class _Bounded(yaml.SafeLoader):
    """A YAML loader that raises while parsing if a file is too large or too deep, instead of taking minutes."""

    depth = nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth, self.nodes = self.depth + 1, self.nodes + 1
        if self.depth > _DEEPEST or self.nodes > _MOST_NODES:
            raise yaml.MarkedYAMLError(problem=_TOO_MUCH, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Reader:
    """Converter of YAML nodes into plain data; fills `YamlFile.lines`."""

    def __init__(self, file: YamlFile) -> None:
        self.file, self.nodes, self.loader = file, 0, yaml.SafeLoader("")

    def read(self, node: yaml.Node, place: Place = ()) -> Any:
        self.nodes += 1
        self.file.lines.setdefault(place, node.start_mark.line + 1)
        if self.nodes > _MOST_NODES or len(place) > _DEEPEST:  # aliases are counted each time
            raise self.file.error(place, _TOO_MUCH)
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*place, i)) for i, item in enumerate(node.value)]
        try:
            value = self.loader.construct_object(node, deep=True)
            check_plain(value)
            return value
        except NeedleworkError as error:
            raise self.file.error(place, str(error)) from None
        except Exception as error:  # PyYAML raises many types for a tag that does not fit its value
            reason = getattr(error, "problem", None) or (error if isinstance(error, ValueError) else f"it is no {node.tag}")
            raise self.file.error(place, f"cannot read the value {short_repr(node.value)}: {reason}") from None

    def _read_mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.read(key_node, (*place, "<key>"))
            self.file.lines.pop((*place, "<key>"), None)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise PlanError(f"{self.file.path}:{line}: the key {short_repr(key_node.value)} is not text; put it in quotes")
            if key in made:
                raise PlanError(f"{self.file.path}:{line}: the key {short_repr(key)} occurs twice; keep one")
            self.file.lines[(*place, key)] = line
            made[key] = self.read(value_node, (*place, key))
        return made


NAME = re.compile(r"[\w.+-]{1,200}")
NAME_RULE = "use letters, digits and . _ + -, at most 200 of them"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Window = Literal["transformers", "deepmind"]
Kernels = Literal["fast", "stock"]
Count = Annotated[int, Field(ge=1, strict=True)]
NewTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]


def _seeds(value: Any) -> Any:
    """Convert a number or a range such as 0..4 into a list; leave other values to pydantic."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,6})\.\.(\d{1,6})\s*", value)):
        return list(range(int(match[1]), int(match[2]) + 1))
    if isinstance(value, str):
        raise ValueError("write a number, a list such as [0, 1], or a range such as 0..4")
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


class Strict(BaseModel):
    """Base of the schema: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Seeds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], BeforeValidator(_seeds), Field(min_length=1)]
Texts = Annotated[list[Annotated[str, Field(min_length=1, strict=True)]], BeforeValidator(_listed), Field(min_length=1)]


class Loading(Strict):
    """Options for loading a model: keys in a plan, options of the command line, arguments of `nw.load`."""

    device: Annotated[str, Field(min_length=1)] = "cpu"
    dtype: Dtype = "float32"
    window: Window = "transformers"
    kernels: Kernels = "fast"

    def replace(self, **given: Any) -> Loading:
        """Return a copy with the given values; None keeps the present one."""
        values = {key: str(value).removeprefix("torch.") for key, value in given.items() if value is not None}
        try:
            return Loading(**{**self.model_dump(), **values})
        except ValidationError as error:
            fault = error.errors()[0]
            raise NeedleworkError(f"{'.'.join(map(str, fault['loc']))}={fault['input']!r}: {fault['msg']}") from None


class ModelFile(Loading):
    """A model entry: source (zoo name, directory, .gguf file or hub id) and loading options."""

    source: Annotated[str, Field(min_length=1, strict=True)]
    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")] | None = None
    revision: str | None = None

    @property
    def loading(self) -> Loading:
        return Loading(**{key: getattr(self, key) for key in Loading.model_fields})


def model_option(text: str) -> ModelFile:
    """Parse the value of `--model`: SOURCE or NAME=SOURCE. A path may contain "=" if it exists or has a "/" before it."""
    if not text:
        raise NeedleworkError("--model is empty; give a directory, a .gguf file, a hub id or a name from `needlework zoo`")
    name, equals, source = text.partition("=")
    if not equals or "/" in name or "\\" in name or os.path.exists(os.path.expanduser(text)):
        return ModelFile(source=text)
    if not NAME.fullmatch(name) or not source:
        wrong = f"{short_repr(name)} is no name; {NAME_RULE}" if source else "there is nothing after the '='"
        raise NeedleworkError(
            f"--model {short_repr(text)}: {wrong}; write --model NAME=PATH, or ./{text[:60]} for a path with a '='"
        )
    return ModelFile(source=source, name=name)


Models = Annotated[
    list[Annotated[ModelFile, BeforeValidator(lambda value: {"source": value} if isinstance(value, str) else value)]],
    BeforeValidator(_listed),
    Field(min_length=1),
]
Tasks = Annotated[list[Any], BeforeValidator(_listed), Field(min_length=1)]  # validated by the task classes


class PlanSettings(Strict):
    """PlanSettings of an experiment, or of the plan for all experiments. None: inherited from the plan."""

    models: Models | None = None
    seeds: Seeds | None = None
    boundary: Phase | None = None
    max_new_tokens: NewTokens | None = None
    limit: Count | None = None  # samples per task and seed, evenly spaced


class FastFile(PlanSettings):
    """Values that replace those of an experiment with --fast."""

    tasks: Tasks | None = None
    interventions: Texts | None = None
    skip: bool = False


class ExperimentFile(PlanSettings):
    """An experiment entry."""

    about: str = ""
    tasks: Tasks
    interventions: Texts
    observe: bool = False
    fast: FastFile | None = None


class RankingFile(Strict):
    """A head ranking, computed by the run or read from a file, for `keep_heads(k=2, by=recorded('NAME'))`."""

    about: str = ""
    file: Annotated[str, Field(min_length=1, strict=True)] | None = None  # of `needlework heads`; excludes the keys below
    by: str = "needle_mass"  # ranking method, highest score first; see heads/methods.py
    tasks: Tasks | None = None  # observed without an intervention
    seeds: Seeds | None = None  # must differ from the seeds of experiments that use the ranking
    limit: Count | None = None


class PlanFile(PlanSettings):
    """A whole plan file."""

    name: str = ""
    about: str = ""
    rankings: dict[str, RankingFile] | None = None
    experiments: Annotated[dict[str, ExperimentFile], Field(min_length=1)]
    fast: PlanSettings | None = None


def keys_at(place: tuple[str | int, ...]) -> set[str]:
    """Return the keys that are allowed at a place of the file."""
    shape = tuple(part for part in place if not isinstance(part, int))
    if shape[-1:] == ("models",):
        return set(ModelFile.model_fields)
    if shape[:1] == ("rankings",) and len(shape) >= 2:
        return set(RankingFile.model_fields)
    if shape[:1] == ("experiments",) and len(shape) >= 2:
        return set((FastFile if shape[2:3] == ("fast",) else ExperimentFile).model_fields)
    return set((PlanSettings if shape[:1] == ("fast",) else PlanFile).model_fields)
