"""YAML that remembers its lines, so that every complaint about a file can say where."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from needlework.errors import NeedleworkError, check_plain, shown
from needlework.files import read_text

Place = tuple[str | int, ...]
_MOST_NODES = 100_000  # aliases can make a small file huge; no honest plan comes near
_DEEPEST = 40
_TOO_MUCH = "the file holds too much or is too deep; aliases may not point to what holds them"
_MOST_BYTES = 1_000_000  # of a file: longer texts belong into files of their own, which a plan names


class PlanError(NeedleworkError):
    """A plan that cannot be used; the message starts with file and line."""


@dataclass
class YamlFile:
    """The plain data of a YAML file, and the line of every value by its place."""

    path: Path
    text: str = ""
    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)

    def line(self, place: Place) -> int:
        """The line of a place, or of the nearest thing around it that is in the file."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)

    def error(self, place: Place, message: str) -> PlanError:
        return PlanError(f"{self.path}:{self.line(place)}: {message}")


def read(path: str | Path) -> YamlFile:
    """Read a file as plain data; any fault of reading or of YAML is a PlanError."""
    file = YamlFile(Path(path))
    try:
        text = read_text(path, "give the path of a plan file", most=_MOST_BYTES)
    except NeedleworkError as error:
        raise PlanError(str(error)) from None
    file.text = text
    try:
        node = yaml.compose(text, Loader=_Bounded)
        if node is None:
            raise PlanError(f"{path}:1: the file is empty; a plan needs at least models and experiments")
        _Reader(file).read(node)
    except yaml.MarkedYAMLError as error:
        mark = _mark(error)
        raise PlanError(f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {_problem(error, text)}") from None
    except yaml.YAMLError as error:  # a character that YAML forbids: it has a position, not a mark
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise PlanError(f"{path}:{line}: not valid YAML: {getattr(error, 'reason', error)}") from None
    return file


def _mark(error: yaml.MarkedYAMLError) -> Any:
    """Where the fault is: where a quote was opened, rather than the end of the file at which it is missed."""
    missed = "end of stream" in str(error.problem)
    return (error.context_mark if missed else None) or error.problem_mark or error.context_mark


def _problem(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = _mark(error)
    line = text.splitlines()[mark.line].strip() if mark and mark.line < len(text.splitlines()) else ""
    hint = "; text that starts with { must stand in quotes" if line.startswith(("- {", "{")) else ""
    return f"{error.problem or error.context}{hint}"


class _Bounded(yaml.SafeLoader):
    """Stops at what is too much or too deep while it reads, not afterwards: that would take minutes, or all of the stack."""

    depth = nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth, self.nodes = self.depth + 1, self.nodes + 1
        if self.depth > _DEEPEST or self.nodes > _MOST_NODES:
            raise yaml.MarkedYAMLError(problem=_TOO_MUCH, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Reader:
    """Builds the data of one file node by node."""

    def __init__(self, file: YamlFile) -> None:
        self.file = file
        self.nodes = 0
        self.loader = yaml.SafeLoader("")

    def read(self, node: yaml.Node) -> None:
        self.file.data = self._value(node, ())

    def _value(self, node: yaml.Node, place: Place) -> Any:
        self.nodes += 1
        self.file.lines.setdefault(place, node.start_mark.line + 1)
        if self.nodes > _MOST_NODES or len(place) > _DEEPEST:
            raise self.file.error(place, _TOO_MUCH)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*place, i)) for i, item in enumerate(node.value)]
        try:
            value = self.loader.construct_object(node, deep=True)
            check_plain(value)
            return value
        except NeedleworkError as error:
            raise self.file.error(place, str(error)) from None
        except Exception as error:  # a tag that does not fit its value: PyYAML's constructors raise whatever comes up
            reason = getattr(error, "problem", None) or (error if isinstance(error, ValueError) else f"it is no {node.tag}")
            raise self.file.error(place, f"cannot read the value {shown(node.value)}: {reason}") from None

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._value(key_node, (*place, "<key>"))
            self.file.lines.pop((*place, "<key>"), None)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise PlanError(f"{self.file.path}:{line}: the key {shown(key_node.value)} is not text; put it in quotes")
            if key in made:
                raise PlanError(f"{self.file.path}:{line}: the key {shown(key)} occurs twice; keep one")
            self.file.lines[(*place, key)] = line
            made[key] = self._value(value_node, (*place, key))
        return made
