"""The state of the page: its prompt and its intervention as JSON and as needlework's own values, and the states of its tour.

An intervention travels as a list of parts, `{"name": "keep_heads", "k": 2, "by": "entropy", "phase": "decode"}`: fields that have
their default are left out, heads are [layer, head] pairs, and a ranking is `{"ranking": [[layer, head], ...]}`: see
static/intervention.schema.json. static/intervention.js converts to and from text in the browser. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError, short_repr
from needlework.interventions.base import Intervention, Part, When, combine, registered
from needlework.interventions.ranking import Ranking, as_heads

# The parts that the page's controls stand for, with the fields that it may set.
FIELDS: dict[str, tuple[str, ...]] = {
    "keep_heads": ("phase", "layers", "k", "by", "seed"),
    "ablate_heads": ("phase", "layers", "heads"),
    "ablate_attention": ("phase", "layers", "site"),
    "ablate_recurrent": ("phase", "layers", "site"),
    "ablate_recurrent_groups": ("phase", "layers", "groups"),
    "expose_tokens": ("phase", "layers", "mode", "renormalize"),
    "limit_context": ("phase", "layers", "tokens", "sinks"),
    "swap_memory": ("half",),
}
MOST_PARTS = 32
MOST_CHARACTERS = 200_000  # of a prompt; the server refuses larger bodies before it reads them
MOST_NEW_TOKENS = 64


class PromptState(BaseModel):
    """The prompt of the page; static/provider.js describes its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    before: str = Field("", max_length=MOST_CHARACTERS)
    needle: str = Field("", max_length=MOST_CHARACTERS)
    after: str = Field("", max_length=MOST_CHARACTERS)
    question: str = Field("", max_length=MOST_CHARACTERS)
    twin: str = Field("", max_length=MOST_CHARACTERS)
    options: tuple[str, ...] = Field((), max_length=16, strict=False)
    target: str = Field("", max_length=MOST_CHARACTERS)
    special: bool = True
    label: str = Field("", max_length=200)

    def pieces(self) -> list[tuple[str, bool]]:
        """Return the texts that make up the prompt and whether each is the needle; a space where two would touch."""
        pieces: list[tuple[str, bool]] = []
        for name in ("before", "needle", "after", "question"):
            text = getattr(self, name)
            if text and pieces and not (pieces[-1][0][-1].isspace() or text[0].isspace()):
                pieces.append((" ", False))
            if text:
                pieces.append((text, name == "needle"))
        return pieces

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces())

    def of_twin(self) -> PromptState:
        """Return the prompt whose needle is the twin's."""
        return self.model_copy(update={"needle": self.twin})


class RequestState(BaseModel):
    """What the page asks: a prompt under an intervention."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    prompt: PromptState
    parts: tuple[dict[str, Any], ...] = Field((), max_length=MOST_PARTS, strict=False)
    max_new_tokens: int = Field(12, ge=1, le=MOST_NEW_TOKENS)

    @cached_property
    def intervention(self) -> Intervention:
        return intervention_of(self.parts)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Requests with equal keys have equal answers."""
        return self.prompt, str(self.intervention), self.max_new_tokens


def read_request(content: Any) -> RequestState:
    """Return the request of a JSON value; raise NeedleworkError if it is none."""
    try:
        return RequestState.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise NeedleworkError(f"{where}: {first['msg']} (got {short_repr(first['input'])})") from None


def intervention_of(parts: Sequence[Mapping[str, Any]]) -> Intervention:
    """Return the intervention of a list of parts.

    Raises:
        NeedleworkError: A part is not one of the page's, or its fields are invalid.
    """
    return combine([_part(part) for part in parts])


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the canonical text of a list of parts."""
    return str(intervention_of(parts))


def _part(given: Mapping[str, Any]) -> Part:
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise NeedleworkError(f"{short_repr(given)} is no part of an intervention; it needs a name and fields")
    fields = dict(given)
    name = fields.pop("name")
    if name not in FIELDS:
        raise NeedleworkError(f"the page has no part {short_repr(name)}; it has {', '.join(FIELDS)}")
    if unknown := [key for key in fields if key not in FIELDS[name]]:
        raise NeedleworkError(f"{name} has no field {short_repr(unknown[0])} on the page; it has {', '.join(FIELDS[name])}")
    if "phase" in fields and fields["phase"] not in get_args(When):
        raise NeedleworkError(f"{name}: phase is prefill, decode or both, not {short_repr(fields['phase'])}")
    if isinstance(by := fields.get("by"), Mapping):
        fields["by"] = Ranking(order=tuple(as_heads(by.get("ranking"))))
    return registered()[name](**fields)


@dataclass(frozen=True)
class Story:
    """One state of the tour."""

    id: str
    title: str
    sentence: str
    parts: Sequence[dict[str, Any]]
    missing: str = ""  # why this model cannot show it

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "parts": list(self.parts)}


def stories(anatomy: Anatomy) -> list[Story]:
    """Return the tour for a model; stories that it has no parts for say so."""
    few = min(2, min((part.query_heads for _, part in anatomy.attention_parts()), default=2))
    number, heads = {1: ("one", "head"), 2: ("two", "heads")}[few]
    told = [
        Story("untouched", "Untouched", "Nothing is changed: the model reads the text and finds the needle, if it can.", []),
        Story(
            "no-heads",
            "No heads",
            "Every attention head is off: if attention retrieves the value, the answer keeps its form and loses the value.",
            [{"name": "ablate_attention"}],
        ),
        Story(
            "few-heads",
            f"{number.capitalize()} {heads}",
            f"In every layer, each token keeps the {number} {heads} with the sharpest attention: in some models this suffices.",
            [{"name": "keep_heads", "k": few}],
        ),
        Story(
            "random-heads",
            f"{number.capitalize()} random {heads}",
            "The same number of heads stays on, but chosen at random: if the answer is as good, the choice did not matter.",
            [{"name": "keep_heads", "k": few, "by": "random"}],
        ),
        Story(
            "hidden-answering",
            "Hidden while answering",
            "Attention cannot see the needle while the model answers: a model that looks back at it now gives a wrong value.",
            [{"name": "expose_tokens", "phase": "decode", "mode": "omit"}],
        ),
        Story(
            "hidden-reading",
            "Hidden while reading",
            "Attention cannot see the needle while the model reads, but can when it answers: looking back is often enough.",
            [{"name": "expose_tokens", "phase": "prefill", "mode": "omit"}],
        ),
        Story(
            "no-recurrence",
            "No recurrence",
            "The recurrent layers lose their memory of earlier tokens: attention is unchanged, but the text often falls apart.",
            [{"name": "ablate_recurrent"}],
        ),
        Story(
            "swapped",
            "Memory swapped",
            "Before it answers, the model gets the keys and values of a twin prompt with another value: if it retrieves with"
            " attention, it answers with that value.",
            [{"name": "swap_memory", "half": "kv"}],
        ),
    ]
    for i, story in enumerate(told):
        try:
            intervention_of(story.parts).check(anatomy)
        except NeedleworkError:
            side = "recurrent layers that it could do without" if story.id == "no-recurrence" else "attention"
            told[i] = replace(story, missing=f"{anatomy.architecture} has no {side}")
    return told
