"""All kinds of task by the name that plans use. Packages add theirs through the entry point group `needlework.tasks`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError

from needlework.errors import NeedleworkError, did_you_mean
from needlework.tasks.base import Task

GROUP = "needlework.tasks"
TASKS: dict[str, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def task(cls: T) -> T:
    """Make a task known under its `kind`. Two tasks of one kind are an error."""
    if not isinstance(getattr(cls, "kind", None), str) or not isinstance(getattr(cls, "mode", None), str):
        raise TypeError(f"{cls.__name__} must set kind and mode")
    known = TASKS.setdefault(cls.kind, cls)
    if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"task kind {cls.kind!r} is already taken by {known.__module__}.{known.__qualname__}")
    TASKS[cls.kind] = cls
    return cls


def load_plugins() -> None:
    """Import what other packages offer; an entry point names a Task class."""
    for entry in entry_points(group=GROUP):
        if entry.name not in TASKS:
            try:
                task(entry.load())
            except Exception as error:
                raise NeedleworkError(f"task plug-in {entry.name!r} ({entry.value}) cannot be loaded: {error}") from error


def make_task(spec: Mapping[str, Any]) -> Task:
    """A task from a plan's mapping: `kind` and the fields of that kind."""
    if not isinstance(spec, Mapping):
        raise NeedleworkError(f"a task is a mapping with a kind, such as {{kind: niah}}; got {spec!r}")
    fields = dict(spec)
    kind = fields.pop("kind", None)
    if kind is None:
        near = get_close_matches("kind", list(map(str, fields)), 1, 0.6)
        wrote = f" (you wrote {near[0]!r})" if near else ""
        raise NeedleworkError(f"a task needs a kind{wrote}; known: {', '.join(sorted(TASKS))}")
    if not isinstance(kind, str):
        raise NeedleworkError(f"a task's kind is a word; got {kind!r}")
    if kind not in TASKS:
        load_plugins()
    if kind not in TASKS:
        raise NeedleworkError(f"unknown task kind {kind!r}; {did_you_mean(kind, list(TASKS))}")
    cls = TASKS[kind]
    try:
        return cls(**fields)
    except ValidationError as error:
        raise NeedleworkError(f"task {kind!r}: {_told(error, cls)}") from None
    except TypeError as error:  # a key that is no word
        raise NeedleworkError(f"task {kind!r}: {error}") from None


def _told(error: ValidationError, cls: type[Task]) -> str:
    messages = []
    for one in error.errors():
        where = ".".join(map(str, one["loc"]))
        if one["type"] == "extra_forbidden" and len(one["loc"]) == 1:
            messages.append(f"unknown key {where!r}; {did_you_mean(where, list(cls.model_fields))}")
        else:
            messages.append(f"{where}: {one['msg']}".removeprefix(": "))
    return "; ".join(messages)
