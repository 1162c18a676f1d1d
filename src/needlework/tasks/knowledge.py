"""What a model knows from training: facts of the toy world as cloze and as letter choice, and judgements.

The cloze has no answer letter to look up; the letter choice has, and so needs in-context retrieval on top of knowledge
(Bick et al. 2025). Both are asked about the same facts, so that their difference is the look-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from needlework.errors import NeedleworkError, did_you_mean
from needlework.requests import Answer
from needlework.tasks import toy
from needlework.tasks.base import Ability, Extent, Item, Mode, Task, Tokenizer, task
from needlework.tasks.scores import begins, choice
from needlework.toy import world
from needlework.toy.sample import Sample, Stream

MOST_SHOTS = 1000
SHOT_TOKENS = 32  # of a question with its answer, about
Form = Literal["statement", "question", "both"]


class Questions(Task):
    """Base: samples of the toy world, turned into items."""

    ability: ClassVar[Ability] = "knowledge"
    shots: int = Field(0, ge=0, le=MOST_SHOTS)  # answered questions of the same kind that come first

    def named_samples(self, seed: int) -> Iterator[tuple[str, Sample]]:
        """Every question with its name. Also what mini-mmlu and mini-glue are exported from."""
        raise TypeError(f"{type(self).__name__} must define named_samples()")

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        toy.demand_toy(tokenizer, self.kind)
        for name, sample in self.named_samples(seed):
            item = toy.toy_item(tokenizer, sample, name, absent=0, facts={"shots": self.shots}, window=window)
            if max_tokens is not None and len(item.prompt) + 1 > max_tokens:
                raise NeedleworkError(f"{name}: {len(item.prompt)} tokens, the model holds {max_tokens}; use fewer shots")
            yield item

    def count(self) -> int:
        """How many questions a seed has, at most."""
        raise TypeError(f"{type(self).__name__} must define count()")

    def extent(self) -> Extent:
        return Extent(self.count(), SHOT_TOKENS * (1 + self.shots))

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """All answers are one word."""
        return (self.max_new_tokens if "max_new_tokens" in self.model_fields_set else 1), self.stop


class Facts(Questions):
    """Base: one question for every fact of the chosen subjects."""

    subjects: tuple[str, ...] | None = None  # none: all
    per_subject: int | None = Field(None, ge=1)  # none: every fact
    rounds: int = Field(1, ge=1)  # every fact again, with another wording and other wrong options

    def named_samples(self, seed: int) -> Iterator[tuple[str, Sample]]:
        for subject in self._subjects():
            keys = Stream("subject", subject, seed).mixed(world.SUBJECTS[subject].keys)
            for key in sorted(keys[: self.per_subject]):
                for i in range(self.rounds):
                    # Not the kind: cloze, cloze_choice and letter draw apart, but their names tell the same fact.
                    name = f"{subject}/{key}/{i}"
                    stream = Stream(world.EVAL_SPLIT, self.kind.removesuffix("_choice"), name, seed)
                    yield f"{self.kind.removesuffix('_choice')}/{name}", self.asked(stream, (subject, key))

    def count(self) -> int:
        keys = [len(world.SUBJECTS[name].keys) for name in self.subjects or world.SUBJECT_NAMES if name in world.SUBJECTS]
        return self.rounds * sum(min(count, self.per_subject or count) for count in keys)

    def asked(self, stream: Stream, fact: tuple[str, str]) -> Sample:
        raise TypeError(f"{type(self).__name__} must define asked()")

    def shown(self, stream: Stream, fact: tuple[str, str]) -> tuple[str, str]:
        """A fact for an example: of the same subject, but never the one that is asked."""
        return fact[0], stream.pick([key for key in world.SUBJECTS[fact[0]].keys if key != fact[1]])

    def _subjects(self) -> Sequence[str]:
        wrong = [name for name in self.subjects or () if name not in world.SUBJECTS]
        if wrong:
            raise NeedleworkError(f"{self.kind}: unknown subject {wrong[0]!r}; {did_you_mean(wrong[0], list(world.SUBJECTS))}")
        return self.subjects or world.SUBJECT_NAMES


def answered(sample: Sample) -> list[str]:
    return [*sample.prompt, *sample.target, sample.stop]


class Chosen:
    """Mixed into tasks that are answered by the likeliest of an item's options; there are four unless a task says otherwise."""

    mode: ClassVar[Mode] = "choices"

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return choice(item, answer)

    @property
    def chance(self) -> float:
        return 0.25


@task
class Cloze(Facts):
    """Complete a fact; right if the first word of the answer is the value, out of the whole vocabulary."""

    kind = "cloze"
    mode: ClassVar[Mode] = "generate"
    form: Form = "both"  # an unfinished statement, a question, or either in turn

    def asked(self, stream: Stream, fact: tuple[str, str]) -> Sample:
        asked = None if self.form == "both" else self.form == "question"
        before: list[str] = []
        for _ in range(self.shots):
            before += answered(world.cloze(stream, fact=self.shown(stream, fact), asked=asked))
        return world.cloze(stream, fact=fact, asked=asked, before=before)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return {"correct": float(begins(answer.text, item.target))}


@task
class ClozeChoice(Chosen, Cloze):
    """The same questions as `cloze`: the likeliest of four values. `top1` is the cloze score, from the same pass."""

    kind = "cloze_choice"


@task
class Letter(Chosen, Facts):
    """Four lettered options, as in MMLU: the likeliest letter."""

    kind = "letter"

    def asked(self, stream: Stream, fact: tuple[str, str]) -> Sample:
        before: list[str] = []
        for _ in range(self.shots):
            before += answered(world.letter_choice(stream, fact=self.shown(stream, fact)))
        return world.letter_choice(stream, fact=fact, before=before)


@task
class LetterLookup(Chosen, Questions):
    """Letter look-up with no knowledge in it: the question names the option itself. What `letter` loses to retrieval."""

    kind = "letter_lookup"
    samples: int = Field(100, ge=1)

    def count(self) -> int:
        return self.samples

    def named_samples(self, seed: int) -> Iterator[tuple[str, Sample]]:
        for i in range(self.samples):
            stream = Stream(world.EVAL_SPLIT, self.kind, seed, i)
            before: list[str] = []
            for _ in range(self.shots):
                before += answered(world.letter_lookup(stream))
            yield f"{self.kind}/{i}", world.letter_lookup(stream, before=before)


@task
class Judgements(Chosen, Questions):
    """Yes or no, as in GLUE: is a sentence well formed, does one follow from another, do two say the same?"""

    kind = "judgements"
    judgements: tuple[Literal["acceptability", "entailment", "paraphrase"], ...] = world.JUDGEMENTS  # type: ignore[assignment]
    samples: int = Field(50, ge=1)  # of each

    def count(self) -> int:
        return len(self.judgements) * self.samples

    def named_samples(self, seed: int) -> Iterator[tuple[str, Sample]]:
        for kind in self.judgements:
            for i in range(self.samples):
                stream = Stream(world.EVAL_SPLIT, kind, seed, i)
                before: list[str] = []
                for _ in range(self.shots):
                    before += answered(world.judgement(stream, kind))
                yield f"{kind}/{i}", world.judgement(stream, kind, before=before)

    @property
    def chance(self) -> float:
        return 0.5
