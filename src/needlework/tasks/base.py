"""What a task is (it makes Items and scores answers), and the table of all kinds of task.

Plans name a kind; other packages add theirs through the entry point group `needlework.tasks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions.acts import Span
from needlework.requests import MOST_TOKENS, Answer

Mode = Literal["generate", "choices", "perplexity"]
# What a task asks for: something that stands in the prompt, something that was learnt in training, text as such; or none
# of these, in which case its scores are shown and no claim is judged by them.
Ability = Literal["retrieval", "knowledge", "perplexity", ""]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that tasks use."""

    def __call__(self, text: str, **options: Any) -> Mapping[str, Any]: ...
    def decode(self, ids: Any, **options: Any) -> str: ...


@dataclass(frozen=True)
class Item:
    """One sample in tokens, ready to be asked. The same item is asked under every intervention."""

    id: str  # unique within the task and seed, e.g. "niah/length=677/depth=33/2"
    cluster: str  # samples that share a haystack share a cluster: bootstraps resample clusters, not samples
    prompt: tuple[int, ...]
    prompt_text: str
    target: str  # the right answer, as text
    spans: Mapping[str, Span] = field(default_factory=dict)  # token ranges; decoding one gives exactly its text
    options: tuple[tuple[int, ...], ...] = ()  # continuations to be scored, the right one at `answer`
    answer: int | None = None
    twins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # prompts of the same length with another needle
    twin_target: str = ""  # what the twin's prompt would be answered with
    facts: Mapping[str, Any] = field(default_factory=dict)  # context_tokens, depth_percent, in_window, subject, layout ...
    ending: tuple[int, frozenset[int]] | None = None  # most new tokens and what stops them, where each sample has its own
    stem: str = ""  # samples that begin alike are asked together, so that the beginning is read once
    digest: str = ""  # what identifies it in trial ids; by default its tokens, spans, twins and options
    also: tuple[Item, ...] = ()  # further prompts of the same sample: their options come after its own


class Extent(NamedTuple):
    """How much a task makes of one seed, at most."""

    samples: int
    tokens: int  # of one prompt, about


class Task(BaseModel):
    """Base of all tasks. Fields are what a plan may set; unknown ones are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[str]  # the name that plans use
    mode: ClassVar[Mode]
    ability: ClassVar[Ability] = ""  # a subclass may make it a property: then the task's own fields decide
    files: ClassVar[tuple[str, ...]] = ()  # fields that name files (or patterns of them): in a plan, from where the plan is
    max_new_tokens: int = Field(default=40, le=MOST_TOKENS)
    stop: str | None = None  # a text of one token that ends an answer

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        """All samples for one seed, always the same ones in the same order."""
        raise TypeError(f"{type(self).__name__} must define items()")

    def extent(self) -> Extent | None:
        """How much `items` would make, told without making it: too much is refused. None: that is not known."""
        return None

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        """Named scores of one answer; "correct" (0 or 1) is always among them, except for perplexity.

        They depend on the item, the answer and the task's fields alone, so that `needlework rescore` can compute them
        again. A row keeps the prompt's text but its tokens in mode perplexity only, options in mode choices only, no twins.
        """
        raise TypeError(f"{type(self).__name__} must define score()")

    def check(self) -> None:
        """Raise for what can be wrong before any model is looked at, such as a file of data."""

    def said(self, item: Item, answer: Answer) -> str:
        """What a model said, as it is stored and scored."""
        return answer.text

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """The most tokens an answer may have, and the text of one token that ends it, for this tokenizer."""
        return self.max_new_tokens, self.stop

    def fitted(self, item: Item, new_tokens: int, max_tokens: int | None, cure: str = "choose a shorter length") -> Item:
        """The item, if the model can hold its prompt and answer."""
        longest = max(map(len, item.options), default=0) if self.mode == "choices" else new_tokens
        if max_tokens is not None and len(item.prompt) + longest > max_tokens:
            raise NeedleworkError(
                f"{item.id}: the prompt has {len(item.prompt)} tokens and the answer up to {longest}, "
                f"but the model holds {max_tokens}; {cure}"
            )
        return item

    @property
    def chance(self) -> float:
        """The share of "correct" that guessing reaches."""
        return 0.0


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
        raise NeedleworkError(f"task {kind!r}: {_explained(error, cls)}") from None
    except TypeError as error:  # a key that is no word
        raise NeedleworkError(f"task {kind!r}: {error}") from None


def _explained(error: ValidationError, cls: type[Task]) -> str:
    messages = []
    for problem in error.errors():
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            messages.append(f"unknown key {where!r}; {did_you_mean(where, list(cls.model_fields))}")
        else:
            messages.append(f"{where}: {problem['msg']}".removeprefix(": "))
    return "; ".join(messages)
