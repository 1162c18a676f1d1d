"""Which models of several runs are the same one, how each is called (one label for each identity), and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needlework.report.names import shown

KINDS = ("hybrid", "attention only", "recurrent only", "")  # in this order: what the claims are about, then controls
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
        for model, text in zip(same_name, _told_apart(shown(name), same_name), strict=True):
            while text in label.values():  # another model is really called so
                text += "*"
            label[model.identity] = text
    return [label[model.identity] for model in seen]


def renamed(seen: Sequence[Seen]) -> list[str]:
    """Where one model goes by two names, in words."""
    first = _first(seen)
    pairs = dict.fromkeys((model.name, first[model.identity].name) for model in seen)
    return [
        f"{shown(name)} is the same model as {shown(other)} (weights, tokenizer, dtype and window rule): shown as one, as"
        f" {shown(other)}."
        for name, other in pairs
        if name != other
    ]


def made_of(anatomy: dict[str, Any]) -> str:
    """One of KINDS."""
    layers = anatomy.get("layers", [])
    attention, recurrent = (any(layer.get(part) for layer in layers) for part in ("attention", "recurrent"))
    return KINDS[0] if attention and recurrent else KINDS[1] if attention else KINDS[2] if recurrent else KINDS[3]


def families(seen: Sequence[Seen], label_of: Sequence[str]) -> list[list[str]]:
    """Labels of models that are to be compared: of one name, or made of the same layers. Of each such group two and more."""
    groups: list[tuple[set[str], list[str]]] = []
    for model, label in zip(seen, label_of, strict=True):
        anatomy = model.about.get("anatomy")
        traits = {f"name {model.name}"} | ({f"made {anatomy.get('architecture')} {anatomy['layers']}"} if anatomy else set())
        same = [group for group in groups if group[0] & traits]
        joined = [name for group in same for name in group[1]]
        groups = [group for group in groups if group not in same]
        groups.append((traits.union(*(group[0] for group in same)), list(dict.fromkeys([*joined, label]))))
    return [names for _, names in groups if len(names) > 1]


def in_order(models: dict[str, dict[str, Any]], related: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Hybrids before controls, checkpoints of one family beside each other, else as they were met."""
    at = {label: i for i, label in enumerate(models)}
    first = {label: min(at[other] for other in family) for family in related for label in family}
    rank = {label: KINDS.index(made_of(about.get("anatomy") or {})) for label, about in models.items()}
    return dict(sorted(models.items(), key=lambda item: (rank[item[0]], first.get(item[0], at[item[0]]), at[item[0]])))


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
