"""The base class of tasks (Task), their tokenized samples (Item), the registry of task kinds, and the scores of answers.

Plans name a task by its kind. Other packages register tasks through the entry point group `needlework.tasks`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions.acts import Phase, Span
from needlework.interventions.base import NONE, Intervention
from needlework.requests import MOST_TOKENS, Answer, Request, sample_key

Mode = Literal["generate", "choices", "perplexity"]
Ending = tuple[int, frozenset[int]]  # maximum of new tokens, and the token ids that end an answer
# What a task measures: retrieval from the prompt, knowledge from training, or language modelling. The scores of tasks with ""
# are reported, but no verdict uses them.
Ability = Literal["retrieval", "knowledge", "perplexity", ""]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that tasks use."""

    def __call__(self, text: str, **options: Any) -> Mapping[str, Any]: ...
    def decode(self, ids: Any, **options: Any) -> str: ...


@dataclass(frozen=True)
class Item:
    """One tokenized sample of a task. Every intervention runs on the same items."""

    id: str  # unique within the task and seed, e.g. "niah/length=677/depth=33/2"
    cluster: str  # unit of the bootstrap: samples that share a haystack share a cluster
    prompt: tuple[int, ...]
    prompt_text: str
    target: str  # text of the right answer
    spans: Mapping[str, Span] = field(default_factory=dict)  # half-open token ranges by name, such as "needle"
    options: tuple[tuple[int, ...], ...] = ()  # tokens of the continuations to score; the right one is at index `answer`
    answer: int | None = None
    twins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # counterfactual prompts of equal length
    twin_target: str = ""  # text of the right answer to the twin
    facts: Mapping[str, Any] = field(default_factory=dict)  # context_tokens, depth_percent, in_window, subject, layout ...
    ending: Ending | None = None  # max_new_tokens and stop tokens of this sample; None: the task's
    stem: str = ""  # samples of one stem share a prefix and are batched together, so that it is prefilled once
    digest: str = ""  # identifies the sample in trial ids; "": a hash of tokens, spans, twins and options
    also: tuple[Item, ...] = ()  # further prompts of this sample; their options follow its own

    def requests(
        self, mode: Mode, intervention: Intervention = NONE, ending: Ending | None = None, boundary: Phase = "decode"
    ) -> list[Request]:
        """Return the requests of this sample: one, and one more for each of its further prompts (`also`), in order.

        Args:
            mode: "generate" continues the prompt, "choices" scores the item's options after it, "perplexity" scores the options,
                or the whole text from its second token on if there are none.
            intervention: What is done to the model.
            ending: Maximum of new tokens and the token ids that end an answer; needed to generate.
            boundary: The phase that processes the last prompt token.
        """
        if mode == "generate" and ending is None:
            raise NeedleworkError(
                f"{self.id}: what ends an answer is not known; set item.ending, or make samples by make_samples()"
            )
        how: dict[str, Any] = {} if ending is None else {"max_new_tokens": ending[0], "stop": ending[1]}
        requests = []
        for one in (self, *self.also):
            whole_text = mode == "perplexity" and not one.options
            options = () if mode == "generate" else (one.prompt[1:],) if whole_text else one.options
            requests.append(
                Request(
                    prompt=one.prompt[:1] if whole_text else one.prompt,
                    intervention=intervention,
                    spans={} if whole_text else one.spans,
                    twins=one.twins,
                    boundary=boundary,
                    sample=sample_key(one.prompt),  # hash of the whole text, also where only its first token is the prompt
                    options=options,
                    **how,
                )
            )
        return requests


class TaskExtent(NamedTuple):
    """Upper bound of the samples of a task for one seed, and the approximate size of a prompt."""

    samples: int
    tokens: int  # of one prompt, approximately


class Task(BaseModel):
    """Base class of all tasks. Its fields are the keys that a plan may set; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[str]  # the name that plans use
    mode: ClassVar[Mode]
    ability: ClassVar[Ability] = ""  # a subclass may override it with a property that depends on its fields
    files: ClassVar[tuple[str, ...]] = ()  # fields with paths or glob patterns; a plan's are relative to the plan
    max_new_tokens: int = Field(default=40, le=MOST_TOKENS)
    stop: str | None = None  # text of the token that ends an answer

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        """Yield all samples of one seed, deterministically.

        Args:
            tokenizer: the model's tokenizer.
            seed: seed of all random draws.
            window: tokens of the model's sliding attention window; None: unlimited.
            max_tokens: tokens of prompt and answer that the model can hold; None: unlimited.
        """
        raise TypeError(f"{type(self).__name__} must define items()")

    def extent(self) -> TaskExtent | None:
        """Return the size of `items` without generating them, so that plans that are too large fail early. None: unknown."""
        return None

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        """Return the scores of one answer by name. "correct" (0 or 1) is required, except in mode perplexity.

        Scores may depend only on the item, the answer and the task's fields, so that `needlework rescore` can recompute them.
        Items from a store have no twins; they have prompt tokens in mode perplexity only, and options in mode choices only.
        """
        raise TypeError(f"{type(self).__name__} must define score()")

    def check(self) -> None:
        """Raise NeedleworkError for errors that can be found without a model, such as in a data file."""

    def said(self, item: Item, answer: Answer) -> str:
        """Return the text of an answer as it is stored and scored."""
        return answer.text

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """Return max_new_tokens and the text of the stop token (None: only EOS) for this tokenizer."""
        return self.max_new_tokens, self.stop

    def fitted(self, item: Item, new_tokens: int, max_tokens: int | None, hint: str = "choose a shorter length") -> Item:
        """Return the item; raise NeedleworkError if the model cannot hold its prompt and answer."""
        longest = max(map(len, item.options), default=0) if self.mode == "choices" else new_tokens
        if max_tokens is not None and len(item.prompt) + longest > max_tokens:
            raise NeedleworkError(
                f"{item.id}: the prompt has {len(item.prompt)} tokens and the answer up to {longest}, "
                f"but the model holds {max_tokens}; {hint}"
            )
        return item

    @property
    def chance(self) -> float:
        """Expected "correct" of random guessing."""
        return 0.0


@contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Raise errors of this block as NeedleworkError with `where` before the message."""
    try:
        yield
    except ValueError as error:
        raise NeedleworkError(f"{where}: {error}") from None


GROUP = "needlework.tasks"
TASKS: dict[str, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def task(cls: T) -> T:
    """Register a task class under its `kind` (decorator). Raise TypeError if another class has this kind."""
    if not isinstance(getattr(cls, "kind", None), str) or not isinstance(getattr(cls, "mode", None), str):
        raise TypeError(f"{cls.__name__} must set kind and mode")
    known = TASKS.setdefault(cls.kind, cls)
    if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"task kind {cls.kind!r} is already taken by {known.__module__}.{known.__qualname__}")
    TASKS[cls.kind] = cls
    return cls


def load_plugins() -> None:
    """Register the Task classes that other packages declare as entry points."""
    for entry in entry_points(group=GROUP):
        if entry.name not in TASKS:
            try:
                task(entry.load())
            except Exception as error:
                raise NeedleworkError(f"task plug-in {entry.name!r} ({entry.value}) cannot be loaded: {error}") from error


def describe_fault(fault: ErrorDetails, model: type[BaseModel]) -> str:
    """Return the message for one error of pydantic, with a hint if the model has no such key."""
    where = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        return f"unknown key {where!r}; {did_you_mean(where, model.model_fields)}"
    return f"{where}: {fault['msg']}".removeprefix(": ")


def make_task(spec: Mapping[str, Any]) -> Task:
    """Return the task of a plan's mapping, which has `kind` and fields of that kind."""
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
        raise NeedleworkError(
            f"unknown task kind {kind!r}; {did_you_mean(kind, list(TASKS))} (a kind of your own: --plugin FILE)"
        )
    cls = TASKS[kind]
    try:
        return cls(**fields)
    except ValidationError as error:
        messages = [describe_fault(fault, cls) for fault in error.errors()]
        raise NeedleworkError(f"task {kind!r}: {'; '.join(messages)}") from None
    except TypeError as error:  # a key that is no string
        raise NeedleworkError(f"task {kind!r}: {error}") from None


# --- Scores of one answer. Case and punctuation are ignored ---

# Incremented when the same answer gets a different score; `needlework rescore` recomputes the scores of stored answers.
# Version 2: punctuation separates words. Version 1 deleted it, so that "day.The" was one word.
SCORES_VERSION = 2
WHOLE = 5.0  # points for the whole needle


def plain(text: str) -> str:
    """Return the case-folded words of a text. Punctuation and symbols separate words: "day.</b>The" is "day b the"."""
    return " ".join(re.sub(r"[\W_]+", " ", text.casefold()).split())


def holds(text: str, part: str) -> bool:
    """Return whether the words of `part` occur consecutively in `text`."""
    return f" {plain(part)} " in f" {plain(text)} "


def begins(text: str, target: str) -> bool:
    """Return whether the first words of `text` are the target."""
    return f"{plain(text)} ".startswith(f"{plain(target)} ")


def equals(text: str, target: str) -> bool:
    """Return whether the words of `text` are exactly the target."""
    return plain(text) == plain(target)


def graded(text: str, needle: str, parts: Mapping[str, float]) -> float:
    """Return 5 if the text contains the whole needle, else the sum of points of the parts it contains, at most 5."""
    if holds(text, needle):
        return WHOLE
    return min(WHOLE, sum(points for part, points in parts.items() if holds(text, part)))


def words_right(text: str, target: str) -> float:
    """Return 5 times the fraction of the target's words that the answer has at the same position."""
    said, wanted = plain(text).split(), plain(target).split()
    return WHOLE * sum(a == b for a, b in zip(said, wanted, strict=False)) / max(1, len(wanted))


def share_found(text: str, targets: Sequence[str]) -> float:
    """Return the fraction of targets that occur anywhere in the answer."""
    return sum(holds(text, target) for target in targets) / len(targets)


def choice(item: Item, answer: Answer, against: str = "all") -> dict[str, float]:
    """Score a forced choice by the log-likelihood of the options. Ties go to the first option; the right one's index is random.

    Returns:
        "correct": whether the right option is the most likely one of those that `against` selects (default: all);
        "correct_context": among it and the wrong options in the prompt (binding); "correct_absent": among it and those that are
        not in the prompt (presence); "correct_per_token": among all by log-likelihood per token; "margin": log-likelihood in nats
        minus that of the best wrong option of all; "top1": whether greedy decoding would generate it.
    """
    if item.answer is None or len(answer.totals) != len(item.options):
        raise NeedleworkError(
            f"{item.id} has {len(item.options)} options but {len(answer.totals)} log-likelihoods; ask for it in mode choices"
        )
    logs, right, kinds = answer.totals, item.answer, item.facts.get("option_kinds", ())
    sets: dict[str, Sequence[int]] = {"all": range(len(logs))}  # or the right option with the wrong ones of one kind
    sets |= {name: [i for i, k in enumerate(kinds) if k in ("true", name)] for name in ("context", "absent") if name in kinds}
    scores = {f"correct_{name}": _first_best(logs, among, right) for name, among in sets.items()}
    scores["correct"] = scores.pop("correct_all") if against == "all" else scores[f"correct_{against}"]
    if all(item.options):  # rows of old stores have no tokens of their options
        per_token = [value / len(option) for value, option in zip(logs, item.options, strict=True)]
        scores["correct_per_token"] = _first_best(per_token, range(len(logs)), right)
    scores["margin"] = logs[right] - max(value for i, value in enumerate(logs) if i != right)
    if answer.greedy:
        scores["top1"] = float(answer.greedy[right])
    return scores


def _first_best(logs: Sequence[float], among: Sequence[int], right: int) -> float:
    return float(max(among, key=lambda i: logs[i]) == right)


class ChoiceMixin:
    """Score the log-likelihood of an item's options instead of generating. Against which options: the task's `against`."""

    mode: ClassVar[Mode] = "choices"

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return choice(item, answer, getattr(self, "against", "all"))


def choice_companion(base: type[Task]) -> type[Task]:
    """Register and return the task `<kind>_choice`, which scores the log-likelihood of the options of the same items.

    Assign it to `<Name>Choice` in the module of the task, so that it can be pickled.
    """
    about = f"The same items as `{base.kind}`: the most likely option is the answer."
    fields = {"kind": f"{base.kind}_choice", "__module__": base.__module__, "__doc__": about}
    return task(cast(type[Task], type(f"{base.__name__}Choice", (ChoiceMixin, base), fields)))
