"""Identify the models of several runs: one label per identity, families of checkpoints, and their order in reports."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from needlework.terminal import plain

KINDS = ("hybrid", "attention only", "recurrent only", "")  # order in reports: subjects of the claims, then controls
IDENTITY = ("weights", "tokenizer", "dtype", "window_rule")  # two models that agree in these give the same outputs


@dataclass(frozen=True)
class Seen:
    """A model as recorded in one run's store."""

    directory: Path
    name: str
    about: dict[str, Any]

    @property
    def identity(self) -> tuple[str, ...]:
        """Values of IDENTITY; if the store lacks them, a model equals only itself in the same directory."""
        if not self.about.get("weights"):
            return ("unknown", str(self.directory.resolve()), self.name)
        return tuple(str(self.about.get(key)) for key in IDENTITY)


def labels(seen: Sequence[Seen]) -> list[str]:
    """Return one label per model: equal for equal identities, different for different ones."""
    first = _first(seen)
    label: dict[tuple[str, ...], str] = {}
    for name in dict.fromkeys(model.name for model in first.values()):
        same_name = [model for model in first.values() if model.name == name]
        for model, text in zip(same_name, _told_apart(display_name(name), same_name), strict=True):
            while text in label.values():  # the name of another model
                text += "*"
            label[model.identity] = text
    return [label[model.identity] for model in seen]


def renamed(seen: Sequence[Seen]) -> list[str]:
    """Return a note for each model that appears under two names."""
    first = _first(seen)
    pairs = dict.fromkeys((model.name, first[model.identity].name) for model in seen)
    return [
        f"{display_name(name)} is the same model as {display_name(other)} (weights, tokenizer, dtype and window rule):"
        f" shown as one, as {display_name(other)}."
        for name, other in pairs
        if name != other
    ]


def made_of(anatomy: dict[str, Any]) -> str:
    """Return the composition of a model by its layers, one of KINDS."""
    layers = anatomy.get("layers", [])
    attention, recurrent = (any(layer.get(part) for layer in layers) for part in ("attention", "recurrent"))
    return KINDS[0] if attention and recurrent else KINDS[1] if attention else KINDS[2] if recurrent else KINDS[3]


def families(seen: Sequence[Seen], label_of: Sequence[str]) -> list[list[str]]:
    """Group the labels of models to compare: those with the same name or the same layers. Single models are left out."""
    groups: list[tuple[set[str], list[str]]] = []
    for model, label in zip(seen, label_of, strict=True):
        anatomy = model.about.get("anatomy")
        traits = {f"name {model.name}"} | ({f"made {anatomy.get('architecture')} {anatomy.get('layers')}"} if anatomy else set())
        same = [group for group in groups if group[0] & traits]
        joined = [name for group in same for name in group[1]]
        groups = [group for group in groups if group not in same]
        groups.append((traits.union(*(group[0] for group in same)), list(dict.fromkeys([*joined, label]))))
    return [names for _, names in groups if len(names) > 1]


def in_order(models: dict[str, dict[str, Any]], related: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Sort models: hybrids before controls, checkpoints of one family together, else in order of appearance."""
    at = {label: i for i, label in enumerate(models)}
    first = {label: min(at[other] for other in family) for family in related for label in family}
    rank = {label: KINDS.index(made_of(about.get("anatomy") or {})) for label, about in models.items()}
    return dict(sorted(models.items(), key=lambda item: (rank[item[0]], first.get(item[0], at[item[0]]), at[item[0]])))


def ailing(seen: Sequence[Seen]) -> list[str]:
    """Return a warning for each model that failed checks of `needlework doctor`."""
    told = []
    for model in seen:
        failed = [check["law"] for check in (model.about.get("checkup") or {}).get("checks", ()) if check["outcome"] == "fail"]
        if failed:
            told.append(f"{model.name}: the doctor found that laws fail ({', '.join(failed)}): believe no number of this model.")
    return list(dict.fromkeys(told))


def _first(seen: Sequence[Seen]) -> dict[tuple[str, ...], Seen]:
    """Return the first model of each identity."""
    first: dict[tuple[str, ...], Seen] = {}
    for model in seen:
        first.setdefault(model.identity, model)
    return first


def _told_apart(name: str, models: Sequence[Seen]) -> list[str]:
    """Return labels for models of the same name, distinguished by dtype or window rule, else by run or model path."""
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
    """Return the shortest trailing parts of the paths that are all different."""
    parts = [path.parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        tails = ["/".join(part[-count:]) for part in parts]
        if len(set(tails)) == len(tails):
            return tails
    return ["/".join(part) for part in parts]


LONGEST = 64
_END = 12  # characters kept at the end of a shortened name: they often distinguish checkpoints ("...-step-1000")


@lru_cache(maxsize=10_000)
def display_name(text: str, longest: int = LONGEST) -> str:
    """Return a printable text of at most `longest` characters; a changed text gets a hash, so that names stay distinct."""
    printable = " ".join(plain(text).split())
    whole = text if printable == text else f"{printable} [{_mark(text)}]".strip()
    if len(whole) <= longest:
        return whole
    mark = f" … [{_mark(text)}] … "
    return printable[: longest - _END - len(mark)] + mark + printable[-_END:]


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:6]
