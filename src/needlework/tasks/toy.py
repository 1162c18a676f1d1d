"""Samples of the toy language as items, and the tasks that only exist in it: facts, letter look-up and judgements.

Every word is one token, so that spans are always exact. Cloze and letter choice ask for the same facts, so that their scores can
be compared: the letter choice needs in-context retrieval of the letter in addition to knowledge (Bick et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from needlework.errors import NeedleworkError, did_you_mean
from needlework.requests import Answer
from needlework.tasks.base import Ability, ChoiceMixin, Item, Mode, Task, TaskExtent, Tokenizer, begins, choice_companion, task
from needlework.tasks.prompts import Encoded, make_item, token_ids
from needlework.toy import facts
from needlework.toy.sample import EVAL_SPLIT, Stream, ToySample
from needlework.toy.words import WORD_ID
from needlework.toy.words import is_toy as is_toy

STOP = "."  # ends an answer in the toy language
MOST_SHOTS = 1000
SHOT_TOKENS = 32  # approximate size of a question with its answer


def resolve(world: str, tokenizer: Tokenizer) -> str:
    """Return "toy" or "english" for this tokenizer; raise NeedleworkError if the task's `world` field demands the other."""
    toy = is_toy(tokenizer)
    if world == "toy" and not toy:
        raise NeedleworkError("world: toy needs a zoo model; this tokenizer does not speak the toy language")
    if world == "english" and toy:
        raise NeedleworkError("world: english needs a model that knows English; this one speaks the toy language")
    return "toy" if toy else "english"


def demand_toy(tokenizer: Tokenizer, kind: str) -> None:
    if not is_toy(tokenizer):
        raise NeedleworkError(
            f"task {kind!r} asks about the toy world, which only zoo models know; "
            "for real models use `needlework eval MODEL --tasks mmlu`"
        )


def encoded(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[int, ...]:
    """Return the token ids of toy words with BOS; raise NeedleworkError for unknown words."""
    ids = token_ids(tokenizer, " ".join(words), special=True)
    expected = tuple(WORD_ID.get(word, -1) for word in words)
    if ids[len(ids) - len(words) :] != expected:
        wrong = [word for word in words if word not in WORD_ID]
        raise NeedleworkError(f"not a text of the toy language: {' '.join(wrong or words)[:60]!r}")
    return ids


def toy_item(
    tokenizer: Tokenizer,
    sample: ToySample,
    name: str,
    *,
    cluster: str = "",
    absent: int = 3,
    in_context: int | None = None,  # most wrong options that occur in the context; None: all
    facts: Mapping[str, Any] = MappingProxyType({}),
    window: int | None = None,
) -> Item:
    """Return the item of a sample, with options for a forced choice and a twin where the sample has absent values."""
    prompt = encoded(tokenizer, sample.prompt)
    front = len(prompt) - len(sample.prompt)
    # The value in the target: all of its words, or the last ones of a quoted sentence.
    length = len(sample.absent[0]) if sample.absent else len(sample.target)
    lead, value = sample.target[: len(sample.target) - length], sample.target[len(sample.target) - length :]
    places = [(span.stop - length, span.stop) for span in sample.named("needle")]
    if any(sample.prompt[start:stop] != value for start, stop in places):
        places = []  # a needle that does not end with the value
    ranges = {span.name: [(s.start, s.stop) for s in sample.named(span.name)] for span in sample.spans}
    if places:
        ranges.setdefault("value", places)
    spans = {name: tuple((start + front, stop + front) for start, stop in places) for name, places in ranges.items()}
    names = ("subject", "relation", "key", "form", "layout", "depth_percent", "context_tokens")
    known = {name: getattr(sample, name) for name in names if getattr(sample, name) is not None} | {"world": "toy"}
    if "needle" in spans:
        known["needles"] = 1 + len(sample.distractors)
    twin = None
    if sample.absent and places:  # the first absent value instead of the true one
        words = list(sample.prompt)
        for start, stop in places:
            words[start:stop] = sample.absent[0]
        twin = encoded(tokenizer, words), " ".join((*lead, *sample.absent[0]))
    if sample.choices:
        options = [("true" if words == sample.target else "other", words) for words in sample.choices]
    elif len(sample.absent) < absent:
        raise NeedleworkError(f"absent: {absent} is more than the {len(sample.absent)} values that can be offered")
    else:
        others = Stream("distractors", name).mixed(sample.distractors)[:in_context]
        options = [("true", sample.target), *(("context", (*lead, *other)) for other in others)]
        options += [("absent", (*lead, *other)) for other in sample.absent[:absent]]
        options = Stream("options", name).mixed(options) if len(options) > 1 else []
    return make_item(
        tokenizer,
        name,
        Encoded(prompt, sample.text, spans),
        " ".join(sample.target),
        [(kind, " ".join(words)) for kind, words in options],
        known,
        window,
        cluster=cluster,
        twin=twin,
        more=facts,
    )


# --- Tasks ---


class Questions(Task):
    """Base class of the knowledge tasks: turns samples of the toy language into items."""

    ability: ClassVar[Ability] = "knowledge"
    options: ClassVar[int] = 4  # of the tasks that score options
    shots: int = Field(0, ge=0, le=MOST_SHOTS)  # few-shot examples before the question

    def topics(self, seed: int) -> Iterator[tuple[str, str, Any]]:
        """Yield for each question of one seed: the item's id, the seed of its stream, and the topic."""
        raise TypeError(f"{type(self).__name__} must define topics()")

    def count(self) -> int:
        """Return the number of questions of one seed."""
        raise TypeError(f"{type(self).__name__} must define count()")

    def make(self, stream: Stream, topic: Any, before: Sequence[str] = ()) -> ToySample:
        """Generate a sample about a topic, such as a fact, after the words of few-shot examples."""
        raise TypeError(f"{type(self).__name__} must define make()")

    def example_topic(self, stream: Stream, topic: Any) -> Any:
        """Return the topic of a few-shot example for a question about `topic`."""
        return topic

    def named_samples(self, seed: int) -> Iterator[tuple[str, ToySample]]:
        """Yield (item id, sample) of one seed. mini-mmlu and mini-glue are exported from these."""
        for name, stream_seed, topic in self.topics(seed):
            stream, words = Stream(EVAL_SPLIT, stream_seed), list[str]()
            for _ in range(self.shots):
                shown = self.make(stream, self.example_topic(stream, topic))
                words += (*shown.prompt, *shown.target, shown.stop)
            yield name, self.make(stream, topic, words)

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        demand_toy(tokenizer, self.kind)
        for name, sample in self.named_samples(seed):
            item = toy_item(tokenizer, sample, name, absent=0, facts={"shots": self.shots}, window=window)
            yield self.fitted(item, 1, max_tokens, "use fewer shots")

    def extent(self) -> TaskExtent:
        return TaskExtent(self.count(), SHOT_TOKENS * (1 + self.shots))

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """Return one new token by default, as every answer is one word."""
        return (self.max_new_tokens if "max_new_tokens" in self.model_fields_set else 1), self.stop

    @property
    def chance(self) -> float:
        return 1 / self.options if self.mode == "choices" else 0.0


def _check_subject(name: str) -> str:
    if name not in facts.SUBJECTS:
        raise ValueError(f"unknown subject {name!r}; {did_you_mean(name, facts.SUBJECTS)}")
    return name


class Facts(Questions):
    """Base class of tasks with one question for each fact (subject, key) of the chosen subjects."""

    subjects: tuple[Annotated[str, AfterValidator(_check_subject)], ...] | None = None  # None: all
    per_subject: int | None = Field(None, ge=1)  # None: all facts
    rounds: int = Field(1, ge=1)  # questions for each fact, with different wording and wrong options

    def topics(self, seed: int) -> Iterator[tuple[str, str, Any]]:
        for subject in self.subjects or facts.SUBJECT_NAMES:
            keys = Stream("subject", subject, seed).mixed(facts.SUBJECTS[subject].keys)
            for key, i in product(sorted(keys[: self.per_subject]), range(self.rounds)):
                name = f"{self.kind.removesuffix('_choice')}/{subject}/{key}/{i}"  # cloze and cloze_choice share ids and samples
                yield name, f"{name}/{seed}", (subject, key)

    def count(self) -> int:
        keys = [len(facts.SUBJECTS[name].keys[: self.per_subject]) for name in self.subjects or facts.SUBJECT_NAMES]
        return self.rounds * sum(keys)

    def example_topic(self, stream: Stream, topic: tuple[str, str]) -> tuple[str, str]:
        """Return another fact of the same subject."""
        return topic[0], stream.pick([key for key in facts.SUBJECTS[topic[0]].keys if key != topic[1]])


@task
class Cloze(Facts):
    """Complete a fact by generation; correct if the answer begins with the value."""

    kind = "cloze"
    mode: ClassVar[Mode] = "generate"
    form: Literal["statement", "question", "both"] = "both"  # of the prompt; both: drawn at random for each sample

    def make(self, stream: Stream, topic: tuple[str, str], before: Sequence[str] = ()) -> ToySample:
        asked = None if self.form == "both" else self.form == "question"
        return facts.make_cloze(stream, fact=topic, asked=asked, before=before)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return {"correct": float(begins(answer.text, item.target))}


# A choice between four values; its score `top1` equals the score of `cloze`.
ClozeChoice = choice_companion(Cloze)


@task
class Letter(ChoiceMixin, Facts):
    """A choice between four lettered options, as in MMLU."""

    kind = "letter"

    def make(self, stream: Stream, topic: tuple[str, str], before: Sequence[str] = ()) -> ToySample:
        return facts.make_letter_choice(stream, fact=topic, before=before)


@task
class LetterLookup(ChoiceMixin, Questions):
    """Letter look-up without knowledge, as the question names the option: a control for the retrieval in `letter`."""

    kind = "letter_lookup"
    samples: int = Field(100, ge=1)

    def make(self, stream: Stream, topic: None, before: Sequence[str] = ()) -> ToySample:
        return facts.make_letter_lookup(stream, before=before)

    def topics(self, seed: int) -> Iterator[tuple[str, str, Any]]:
        return ((f"{self.kind}/{i}", f"{self.kind}/{seed}/{i}", None) for i in range(self.samples))

    def count(self) -> int:
        return self.samples


@task
class Judgements(ChoiceMixin, Questions):
    """Yes-or-no choices, as in GLUE: acceptability, entailment and paraphrase."""

    kind = "judgements"
    options = 2
    judgements: tuple[Literal["acceptability", "entailment", "paraphrase"], ...] = facts.JUDGEMENTS  # type: ignore[assignment]
    samples: int = Field(50, ge=1)  # of each kind of judgement

    def make(self, stream: Stream, topic: str, before: Sequence[str] = ()) -> ToySample:
        return facts.make_judgement(stream, topic, before=before)

    def topics(self, seed: int) -> Iterator[tuple[str, str, Any]]:
        return ((f"{kind}/{i}", f"{kind}/{seed}/{i}", kind) for kind in self.judgements for i in range(self.samples))

    def count(self) -> int:
        return len(self.judgements) * self.samples
