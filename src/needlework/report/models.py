"""Which models of several runs are the same one, and how each is called: one label for each identity, never shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDENTITY = ("weights", "tokenizer", "dtype", "window_rule")  # what makes two models answer differently


@dataclass(frozen=True)
class Seen:
    """A model as one run's store knows it."""

    directory: Path
    name: str
    about: dict[str, Any]

    @property
    def identity(self) -> tuple[str, ...]:
        """Of a store that does not say, nothing is known but that it is the same directory's."""
        if not self.about.get("weights"):
            return ("unknown", str(self.directory.resolve()), self.name)
        return tuple(str(self.about.get(key)) for key in IDENTITY)


def labels(seen: Sequence[Seen]) -> list[str]:
    """A label for each: the same for one identity, and different ones for two."""
    first = _first(seen)
    label: dict[tuple[str, ...], str] = {}
    for name in dict.fromkeys(model.name for model in first.values()):
        same_name = [model for model in first.values() if model.name == name]
        for model, text in zip(same_name, _told_apart(name, same_name), strict=True):
            while text in label.values():  # another model is really called so
                text += "*"
            label[model.identity] = text
    return [label[model.identity] for model in seen]


def renamed(seen: Sequence[Seen]) -> list[str]:
    """Where one model goes by two names, in words."""
    first = _first(seen)
    pairs = dict.fromkeys((model.name, first[model.identity].name) for model in seen)
    return [
        f"{name} is the same model as {other} (weights, tokenizer, dtype and window rule): shown as one, as {other}."
        for name, other in pairs
        if name != other
    ]


def ailing(seen: Sequence[Seen]) -> list[str]:
    """Models of which the doctor found that a law fails, in words."""
    told = []
    for model in seen:
        failed = [check["law"] for check in model.about.get("checkup", {}).get("checks", ()) if check["outcome"] == "fail"]
        if failed:
            told.append(f"{model.name}: the doctor found that laws fail ({', '.join(failed)}): believe no number of this model.")
    return list(dict.fromkeys(told))


def _first(seen: Sequence[Seen]) -> dict[tuple[str, ...], Seen]:
    """Of each identity the one that was met first."""
    first: dict[tuple[str, ...], Seen] = {}
    for model in seen:
        first.setdefault(model.identity, model)
    return first


def _told_apart(name: str, models: Sequence[Seen]) -> list[str]:
    """The name and what tells them apart: precision or window rule, else where the run or the model lies."""
    if len(models) == 1:
        return [name]
    for fact in ("dtype", "window_rule"):
        values = [str(model.about.get(fact)) for model in models]
        if len(set(values)) == len(values):
            return [f"{name} ({value if fact == 'dtype' else f'window: {value}'})" for value in values]
    places: tuple[Callable[[Seen], Path], ...] = (
        lambda model: model.directory.resolve(),
        lambda model: Path(str(model.about.get("source", ""))),
    )
    for place in places:
        tails = _tails([place(model) for model in models])
        if len(set(tails)) == len(tails):
            return [name, *(f"{name} ({tail})" for tail in tails[1:])]
    return [f"{name} ({i})" for i in range(1, len(models) + 1)]


def _tails(paths: Iterable[Path]) -> list[str]:
    """As much of the end of each path as tells it from the others."""
    parts = [path.parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        tails = ["/".join(part[-count:]) for part in parts]
        if len(set(tails)) == len(tails):
            return tails
    return ["/".join(part) for part in parts]
