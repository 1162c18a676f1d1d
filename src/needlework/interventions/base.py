"""Interventions as frozen values that `+` combines: base classes, registry, and their text form, which `parse` reads.

A text is one intervention, `keep_heads(k=2)`, or a sweep of several, `keep_heads(k=0..H, phase={'prefill', 'decode'})`.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoints, entry_points
from itertools import islice, product
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError, check_plain, did_you_mean, short_repr
from needlework.interventions.acts import Act, LoweringContext, Phase, draw
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
            if a.clashes(b) or b.clashes(a):
                both = f"two {a.name}" if a.name == b.name else f"{a.name} and {b.name}"
                raise NeedleworkError(
                    f"{both} meet in one phase and layer ({a}; {b}): merge them, or give them different phases or layers"
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


# --- Text: parsed by Python into an expression, of which nothing is executed ---

MOST_CHARACTERS = 250_000  # of one text; all texts that it expands to may have 100 times as many
MOST_BRACES = 100
# `from`, a field of SwapMemory, outside of strings: the text is parsed by Python, where it is a keyword.
_FROM = re.compile(r"""('(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?)|\bfrom\b""")


def parse(text: str) -> Intervention:
    """Return the intervention of a text: `parse(str(x)) == x`. Nothing in the text is executed.

    Raises:
        NeedleworkError: The text is invalid.
    """
    if text.strip() in ("none", ""):
        return NONE
    _check_size(text)
    tree = _tree(text)
    calls = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        calls.append(tree.right)
        tree = tree.left
    calls.append(tree)
    return combine([part for call in reversed(calls) for part in _part(call, text).parts])


def _tree(text: str) -> ast.expr:
    """Return the syntax tree of a text; raise if it is not an expression."""
    try:
        return ast.parse(_FROM.sub(lambda match: match[1] or "from_", text.strip()), mode="eval").body
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else error
        raise _bad(text, f"it does not read as calls joined by '+': {why}; write e.g. keep_heads(k=2)") from None
    except (MemoryError, RecursionError):  # limits of Python's parser
        raise _bad(text, "it has too many parts, or one inside the other too often") from None


def as_intervention(given: Intervention | str) -> Intervention:
    """Return the intervention given as a value or as its text."""
    if isinstance(given, str):
        return parse(given)
    if not isinstance(given, Intervention):
        raise NeedleworkError(f"{given!r} is no intervention; give one, nw.KeepHeads(2), or its text, 'keep_heads(2)'")
    return given


def _part(call: ast.expr, text: str) -> Intervention:
    if isinstance(call, ast.Name) and call.id == "none":
        return NONE
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _bad(text, f"expected name(key=value, ...), got {_source(call)}")
    known = registered()
    name = call.func.id
    if name not in known:
        raise _bad(text, f"unknown intervention {name!r}; {did_you_mean(name, known)} (one of your own: --plugin FILE)")
    cls = known[name]
    keys = {info.alias or key for key, info in cls.model_fields.items()}
    fields: dict[str, Any] = {}
    for keyword in call.keywords:
        key = (keyword.arg or "**").rstrip("_")
        if key not in keys:
            raise _bad(text, f"{name} has no {key!r}; {did_you_mean(key, keys)}")
        if key in fields:
            raise _bad(text, f"{name} is given {key!r} twice; which one is meant?")
        fields[key] = _value(keyword.value, text)
    return cls(*(_value(node, text) for node in call.args), **fields)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "recorded":
        words: list[Any] = [getattr(argument, "value", None) for argument in node.args]
        if node.keywords or len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
            raise _bad(text, "write recorded('name'), with a name of the plan's rankings")
        return Recorded(name=words[0], content="".join(words[1:]))
    ranks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ranking" and len(node.args) == 1
    try:
        value = ast.literal_eval(node.args[0] if ranks else node)  # type: ignore[attr-defined]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # of invalid or deeply nested text
        raise _bad(text, f"{_source(node)} is no plain value; write numbers, 'text' in quotes or [lists]") from None
    return Ranking.parse(value) if ranks else value


def _source(node: ast.expr) -> str:
    try:
        return short_repr(ast.unparse(node))
    except RecursionError:
        return "something too deep to be shown"


def _check_size(text: str) -> None:
    """Raise if a text is too long, which bounds time and memory of parsing, or cannot be stored."""
    if len(text) > MOST_CHARACTERS:
        raise _bad(text, f"it has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        check_plain(text)
    except NeedleworkError as error:
        raise _bad(text, str(error)) from None


def _bad(text: str, why: str) -> NeedleworkError:
    return NeedleworkError(f"cannot read the intervention {short_repr(text)}: {why}")


MOST = 10_000  # interventions from one text
SIZES = {"H": "query heads of a layer (the fewest of any layer)"}

ANY_LAYERS: Mapping[str, Sequence[int]] = {"attention": range(6), "recurrent": range(6)}
_NAMED_LAYERS = re.compile(r"\blayers\s*=\s*[a-z]")
_THIRDS = ("early", "middle", "late")
_LAYERS_HELP = "write layers=each, early, middle, late, random(NUMBER, SEED), or all_but(...) one of these"

_RANGE = re.compile(r"(?<![\w.])(-?\w+)\.\.(-?\w+)(?:\.\.(-?\w+))?(?![\w.])")
_SIZE = re.compile(r"(?<![\w.'\"])([A-Z])(?![\w.'\"(=])")
_QUOTED = re.compile(r"('[^']*'|\"[^\"]*\")")
_MARK = re.compile(r"""'[^']*'?|"[^"]*"?|[][(){},]""")  # text in quotes, a bracket or a comma
_CLOSES = {"(": ")", "[": "]", "{": "}"}


def expand(text: str, sizes: Mapping[str, int], layers: Mapping[str, Sequence[int]] = ANY_LAYERS) -> list[Intervention]:
    """Expand the braces, ranges and named layers of a text and return the distinct interventions, in the order written.

    Args:
        text: Such as `keep_heads(k=0..H)` or `ablate_attention(layers=each)`.
        sizes: Values of the names in `SIZES` for the model.
        layers: The model's layers of each side (attention, recurrent); by default those of an imaginary model.
    """
    _check_size(text)
    most = min(MOST, 100 * MOST_CHARACTERS // max(1, len(text)))
    each = _alternatives(text, sizes)
    first = next(each)
    for one in _with_layers(first, ANY_LAYERS)[:1]:
        parse(one)  # fail early, before all texts are expanded
    texts = [first, *islice(each, most)]
    if len(texts) > most:
        raise NeedleworkError(f"{short_repr(text)} stands for more than {most} interventions; narrow its ranges")
    texts = [one for written in texts for one in _with_layers(written, layers)]
    return list({str(intervention): intervention for intervention in map(parse, texts)}.values())


def check_ranges(text: str) -> None:
    """Raise if the text is invalid for any model; sizes are set large enough for every range."""
    written = [int(number) for number in re.findall(r"\d{1,9}", text)]
    expand(text, dict.fromkeys(SIZES, min(MOST, max(written, default=0) + 1)))


def _alternatives(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield texts without braces and ranges. Braces are expanded first: they may contain ranges, but not vice versa."""
    if text.count("{") > MOST_BRACES:
        raise NeedleworkError(f"{short_repr(text)} has more than {MOST_BRACES} braces; write several texts instead")
    waiting = [text]
    while waiting:
        one = waiting.pop()
        start = one.find("{")
        if start > 0 and _QUOTED.search(one, 0, start):  # skip braces in later quotes; those in the first are expanded
            start = next((mark.start() for mark in _MARK.finditer(one) if mark[0] == "{"), -1)
        if start < 0:
            yield from _ranges(one, sizes)
        else:
            end, options = _braces(one, start)
            waiting += [one[:start] + option + one[end:] for option in reversed(options)]


def _braces(text: str, start: int) -> tuple[int, list[str]]:
    """Return the end of the brace group that opens at `start`, and its comma-separated alternatives."""
    closers, options, last = "", [], start + 1
    for mark in _MARK.finditer(text, start):
        c, i = mark[0], mark.start()
        if c in _CLOSES:
            closers += _CLOSES[c]
        elif c in (",", "}") and len(closers) == 1:
            options.append(text[last:i].strip())
            last = i + 1
            if c == "}":
                if not all(options):
                    group = short_repr(text[start:last])
                    raise NeedleworkError(f"{short_repr(text)}: an alternative in {group} is empty; write none")
                return last, options
        elif c in _CLOSES.values():
            if c != closers[-1]:
                raise NeedleworkError(f"{short_repr(text)}: {closers[-1]!r} is missing before {short_repr(text[i:])}")
            closers = closers[:-1]
    raise NeedleworkError(f"{short_repr(text)}: a brace that opens is never closed")


def _ranges(text: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the texts for all values of the ranges in a text, with sizes (H) replaced by numbers."""
    pieces = _QUOTED.split(text)  # odd items are quoted and not expanded
    for i in range(0, len(pieces), 2):
        if match := _RANGE.search(pieces[i]):
            before = "".join(pieces[:i]) + pieces[i][: match.start()]
            after = pieces[i][match.end() :] + "".join(pieces[i + 1 :])
            first, last, step = (_whole(word, text, sizes) for word in (match[1], match[2], match[3] or "1"))
            if step < 1 or first > last:
                raise NeedleworkError(
                    f"{short_repr(text)}: the range {match[0]} is empty; begin with the smaller number, step at least 1"
                )
            for number in range(first, last + 1, step):
                yield from _ranges(f"{before}{number}{after}", sizes)
            return
        if ".." in pieces[i]:
            raise NeedleworkError(f"{short_repr(text)}: ranges need whole numbers: 0..16, 0..H, 0..16..4; list others: {{a, b}}")
        pieces[i] = _SIZE.sub(lambda m: str(_whole(m[1], text, sizes)), pieces[i])
    yield "".join(pieces)


def _whole(word: str, text: str, sizes: Mapping[str, int]) -> int:
    if re.fullmatch(r"-?\d{1,9}", word):
        return int(word)
    if word in sizes:
        return sizes[word]
    known = ", ".join(f"{name} ({meaning})" for name, meaning in SIZES.items())
    raise NeedleworkError(
        f"{short_repr(text)}: {short_repr(word)} is neither a whole number nor a size of the model; known: {known}"
    )


# --- Layers by name: `layers=each` stands for each layer of the intervention's side in turn ---


def thirds(layers: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the early, middle and late third of some layers; of two layers, the middle is empty."""
    ends = [round(i * len(layers) / 3) for i in range(4)]
    return {name: tuple(layers[ends[i] : ends[i + 1]]) for i, name in enumerate(_THIRDS)}


def _with_layers(text: str, layers: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the texts that a text with named layers stands for: one for each combination, none where a name is empty."""
    if not _NAMED_LAYERS.search(text):
        return [text]
    tree = _tree(text)
    fields, choices = [], []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        for field in call.keywords:
            if field.arg == "layers" and isinstance(field.value, (ast.Name, ast.Call)):
                name = getattr(call.func, "id", "")
                part = registered().get(name)
                side = part.side if part else "none"
                if side not in layers:
                    raise _bad(text, f"layers={_source(field.value)}: {name} has no layers of its own to name")
                fields.append(field)
                # A model without this side keeps a layer that it lacks: the intervention is refused or left out as such.
                choices.append(_layer_sets(field.value, tuple(layers[side]), text) if layers[side] else [(0,)])
    texts = []
    for chosen in product(*choices):
        for field, one in zip(fields, chosen, strict=True):
            field.value = ast.List([ast.Constant(layer) for layer in one], ast.Load())
        texts.append(ast.unparse(tree))
    return texts


def _layer_sets(node: ast.expr, layers: tuple[int, ...], text: str) -> list[tuple[int, ...]]:
    """Return the non-empty sets of layers that a name stands for; empty ones and all layers but none are left out."""
    name = node.id if isinstance(node, ast.Name) else getattr(getattr(node, "func", None), "id", "")
    arguments = node.args if isinstance(node, ast.Call) and not node.keywords else []
    if name == "each" and not arguments:
        return [(layer,) for layer in layers]
    if name in _THIRDS and not arguments:
        return [one for one in (thirds(layers)[name],) if one]
    if name == "all_but" and len(arguments) == 1:
        others = [tuple(x for x in layers if x not in left) for left in _layer_sets(arguments[0], layers, text)]
        return [one for one in others if one]
    if name == "random" and len(arguments) == 2:
        count, seed = (argument.value if isinstance(argument, ast.Constant) else None for argument in arguments)
        if isinstance(arguments[0], ast.Name) and arguments[0].id in _THIRDS:
            count = len(thirds(layers)[arguments[0].id])
        if isinstance(count, float) and 0 < count < 1:
            count = int(count * len(layers) + 0.5)
        if type(count) is int and type(seed) is int:
            drawn = sorted(layers, key=lambda layer: draw(seed, layer))[:count]
            return [tuple(sorted(drawn))] if 0 < count < len(layers) else []
    raise _bad(text, f"layers={_source(node)} is not known; {_LAYERS_HELP}")
