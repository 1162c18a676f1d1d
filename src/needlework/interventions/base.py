"""Base classes and registry of interventions: frozen values that `+` combines and `str()` and `parse()` round-trip."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoints, entry_points
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError, check_plain, short_repr
from needlework.interventions.acts import Act, LoweringContext, Phase
from needlework.interventions.ranking import Ranking, Recorded

When = Literal["prefill", "decode", "both"]


def _sorted_layers(value: Any) -> Any:
    if value is None or isinstance(value, str) or not isinstance(value, Iterable):
        return value
    try:
        layers = tuple(sorted(set(value)))
    except TypeError:  # values of types that do not compare
        raise ValueError("layers are whole numbers, e.g. [2, 5]") from None
    if not layers:
        raise ValueError("an empty list names no layer; leave layers out to act on all")
    return layers


Layers = Annotated[tuple[int, ...] | None, BeforeValidator(_sorted_layers)]


class Intervention(BaseModel):
    """Base class of interventions. The empty one, `NONE`, does nothing; its text is "none".

    Attributes:
        name: Its name in text forms.
        side: What it acts on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    name: ClassVar[str] = "none"
    side: ClassVar[Literal["attention", "recurrent", "memory", "none"]] = "none"

    def __init__(self, /, *values: Any, **fields: Any) -> None:
        """Assign positional values to the intervention's own fields in order: `KeepHeads(2)` is `KeepHeads(k=2)`."""
        own = [key for key in type(self).model_fields if key not in Part.model_fields] if values else []
        if len(values) > len(own):
            raise NeedleworkError(f"{self.name}: {len(values)} values without names; it has {', '.join(own) or 'no fields'}")
        for key, value in zip(own, values, strict=False):
            if {key, key.rstrip("_")} & fields.keys():
                raise NeedleworkError(f"{self.name} is given {key.rstrip('_')!r} twice; which one is meant?")
            fields[key] = value
        try:
            check_plain(fields)
        except NeedleworkError as error:
            raise NeedleworkError(f"{self.name}: {error}") from None
        try:
            super().__init__(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "value"
            message = first["msg"].removeprefix("Value error, ")
            raise NeedleworkError(f"{type(self).name}: {where}: {message} (got {short_repr(first['input'])})") from None

    @property
    def parts(self) -> tuple[Part, ...]:
        return ()

    def __add__(self, other: Intervention) -> Intervention:
        return combine(self.parts + other.parts)

    def check(self, anatomy: Anatomy) -> None:
        """Raise if this cannot act on such a model; needs no prompt, so that it can run before any compute."""
        for part in self.parts:
            part.check(anatomy)

    def lower_for_phase(self, context: LoweringContext, phase: Phase) -> list[Act]:
        """Return the acts of all parts in one phase of one prompt."""
        return [act for part in self.parts if part.phase in (phase, "both") for act in part.lower(context)]

    def __str__(self) -> str:
        return " + ".join(part.text() for part in self.parts) or "none"

    def __repr__(self) -> str:
        return str(self)


NONE = Intervention()


class Part(Intervention):
    """A single intervention. To add one, subclass this, decorate it with `@register` and define `lower`.

    Attributes:
        phase: When it acts: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all layers of its side.
        side: What it acts on: "attention", "recurrent" or "memory" (the cache).
        name: Its name in text forms: the class name in snake case.
    """

    phase: When = "both"
    layers: Layers = None

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self,)

    @property
    def revision(self) -> int:
        """Version of the text's meaning: increased when it changes, so that older stored answers are not reused."""
        return 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept `stands_for(scene)`, the name of `lower` up to 0.6, with a DeprecationWarning."""
        super().__init_subclass__(**kwargs)
        older = cls.__dict__.get("stands_for")
        if older is not None and "lower" not in cls.__dict__:
            message = f"{cls.__name__}.stands_for(scene) is lower(context) now; the old name goes with the next minor version"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            cls.lower = older  # type: ignore[method-assign]

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        """Return the acts of this intervention on one prompt. Subclasses define it."""
        raise TypeError(f"{type(self).__name__} does not say which acts it stands for: define lower(self, context)")

    def where(self, anatomy: Anatomy) -> tuple[int, ...]:
        """Return the layers this acts on: `layers`, or all of its side."""
        own = anatomy.recurrent_layers if self.side == "recurrent" else anatomy.attention_layers
        return self.layers if self.layers is not None else tuple(layer.index for layer in own)

    def check(self, anatomy: Anatomy) -> None:
        if self.side not in ("attention", "recurrent"):
            return
        own = {x.index for x in (anatomy.recurrent_layers if self.side == "recurrent" else anatomy.attention_layers)}
        if not own:
            reason = anatomy.no_mixer_reason if self.side == "recurrent" else ""
            raise NeedleworkError(
                f"{self}: {anatomy.architecture} has no separate {self.side} layers"
                + (f" ({reason})" if reason else "")
                + "; choose an intervention on the side it has"
            )
        wrong = sorted({*self.where(anatomy), *(self.layers or ())} - own)
        if wrong:
            raise NeedleworkError(
                f"{self}: layers {wrong} are no {self.side} layers of {anatomy.architecture}; choose from {sorted(own)}"
            )

    def clashes(self, other: Part) -> bool:
        """Return whether two parts cannot be combined: by default, if both have one type and share a phase and a layer."""
        phases_meet = self.phase == other.phase or "both" in (self.phase, other.phase)
        layers_meet = self.layers is None or other.layers is None or bool(set(self.layers) & set(other.layers))
        return type(self) is type(other) and phases_meet and layers_meet

    def text(self) -> str:
        fields = []
        for key, info in type(self).model_fields.items():
            value = getattr(self, key)
            if value != info.default:
                fields.append(f"{info.alias or key}={_literal(value)}")
        return f"{self.name}({', '.join(fields)})"


class Composite(Intervention):
    """Several parts applied together, made by `+`; the order of the operands does not matter."""

    members: tuple[Any, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.members


def combine(parts: Sequence[Part]) -> Intervention:
    """Combine parts into one intervention, in a canonical order.

    Raises:
        NeedleworkError: Two parts clash, such as two of one type in one phase and layer.
    """
    ordered = sorted(parts, key=str)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if a.clashes(b):
                raise NeedleworkError(
                    f"two {a.name} meet in one phase and layer ({a}; {b}): merge them, or give them different phases or layers"
                )
    if not ordered:
        return NONE
    return ordered[0] if len(ordered) == 1 else Composite(members=tuple(ordered))


_REGISTRY: dict[str, type[Part]] = {}
P = TypeVar("P", bound=type[Part])


def register(cls: P) -> P:
    """Register an intervention class under its snake-case name, for `parse` and plans. Use as a decorator.

    A name that is taken by another class is refused, because texts in plans and stores must keep their meaning.
    """
    cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    known = _REGISTRY.get(cls.name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"intervention {cls.name!r} is already taken by {known.__module__}.{known.__qualname__}; rename yours")
    _REGISTRY[cls.name] = cls
    return cls


def registered() -> dict[str, type[Part]]:
    """Return all interventions by name, including installed plug-ins (entry point group `needlework.interventions`)."""
    for point in _plug_ins():
        if point.name not in _REGISTRY:
            register(point.load())
    return dict(_REGISTRY)


@functools.cache
def _plug_ins() -> EntryPoints:
    """Return the entry points of installed plug-ins; cached, since it reads the metadata of every installed package."""
    return entry_points(group="needlework.interventions")


def _literal(value: Any) -> str:
    if isinstance(value, (Ranking, Recorded)):
        return value.text()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return repr(value)
