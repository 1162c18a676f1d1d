"""Knowledge tasks of the toy language: facts as cloze and as letter choice, letter look-up, and yes-or-no judgements.

The letter choice needs in-context retrieval of the letter in addition to knowledge (Bick et al. 2025); the cloze does not. Both
ask for the same facts, so that their scores can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from needlework.errors import NeedleworkError, did_you_mean
from needlework.requests import Answer
from needlework.tasks import toy
from needlework.tasks.base import Ability, Item, Mode, Task, TaskExtent, Tokenizer, task
from needlework.tasks.scores import begins, choice
from needlework.toy import facts
from needlework.toy.judgements import KINDS, make_judgement
from needlework.toy.sample import EVAL_SPLIT, Stream, ToySample

MOST_SHOTS = 1000
SHOT_TOKENS = 32  # approximate size of a question with its answer
Form = Literal["statement", "question", "both"]


class Questions(Task):
    """Base class of the knowledge tasks: turns samples of the toy language into items."""

    ability: ClassVar[Ability] = "knowledge"
    shots: int = Field(0, ge=0, le=MOST_SHOTS)  # few-shot examples before the question

    def named_samples(self, seed: int) -> Iterator[tuple[str, ToySample]]:
        """Yield (item id, sample) of one seed. mini-mmlu and mini-glue are exported from these."""
        raise TypeError(f"{type(self).__name__} must define named_samples()")

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        toy.demand_toy(tokenizer, self.kind)
        for name, sample in self.named_samples(seed):
            item = toy.toy_item(tokenizer, sample, name, absent=0, facts={"shots": self.shots}, window=window)
            if max_tokens is not None and len(item.prompt) + 1 > max_tokens:
                raise NeedleworkError(f"{name}: {len(item.prompt)} tokens, the model holds {max_tokens}; use fewer shots")
            yield item

    def count(self) -> int:
        """Return the largest number of questions of one seed."""
        raise TypeError(f"{type(self).__name__} must define count()")

    def examples(self, make: Callable[[], ToySample]) -> list[str]:
        """Return the words of `shots` few-shot examples with their answers."""
        samples = (make() for _ in range(self.shots))
        return [word for sample in samples for word in (*sample.prompt, *sample.target, sample.stop)]

    def extent(self) -> TaskExtent:
        return TaskExtent(self.count(), SHOT_TOKENS * (1 + self.shots))

    def ending(self, tokenizer: Tokenizer) -> tuple[int, str | None]:
        """Return one new token by default, as every answer is one word."""
        return (self.max_new_tokens if "max_new_tokens" in self.model_fields_set else 1), self.stop


class Facts(Questions):
    """Base class of tasks with one question for each fact of the chosen subjects."""

    subjects: tuple[str, ...] | None = None  # None: all
    per_subject: int | None = Field(None, ge=1)  # None: all facts
    rounds: int = Field(1, ge=1)  # questions for each fact, with different wording and wrong options

    def named_samples(self, seed: int) -> Iterator[tuple[str, ToySample]]:
        for subject in self._subjects():
            keys = Stream("subject", subject, seed).mixed(facts.SUBJECTS[subject].keys)
            for key in sorted(keys[: self.per_subject]):
                for i in range(self.rounds):
                    # cloze and cloze_choice share ids and samples; `letter` draws its own, about the same facts.
                    name = f"{subject}/{key}/{i}"
                    stream = Stream(EVAL_SPLIT, self.kind.removesuffix("_choice"), name, seed)
                    yield f"{self.kind.removesuffix('_choice')}/{name}", self.ask(stream, (subject, key))

    def count(self) -> int:
        keys = [len(facts.SUBJECTS[name].keys) for name in self.subjects or facts.SUBJECT_NAMES if name in facts.SUBJECTS]
        return self.rounds * sum(min(count, self.per_subject or count) for count in keys)

    def ask(self, stream: Stream, fact: tuple[str, str]) -> ToySample:
        """Generate the sample for a fact (subject, key)."""
        raise TypeError(f"{type(self).__name__} must define ask()")

    def pick_other(self, stream: Stream, fact: tuple[str, str]) -> tuple[str, str]:
        """Pick another fact of the same subject for a few-shot example."""
        return fact[0], stream.pick([key for key in facts.SUBJECTS[fact[0]].keys if key != fact[1]])

    def _subjects(self) -> Sequence[str]:
        wrong = [name for name in self.subjects or () if name not in facts.SUBJECTS]
        if wrong:
            raise NeedleworkError(f"{self.kind}: unknown subject {wrong[0]!r}; {did_you_mean(wrong[0], list(facts.SUBJECTS))}")
        return self.subjects or facts.SUBJECT_NAMES


class ChoiceMixin:
    """Mixin that scores the log-likelihood of an item's options, four unless a task overrides `chance`."""

    mode: ClassVar[Mode] = "choices"

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return choice(item, answer)

    @property
    def chance(self) -> float:
        return 0.25


@task
class Cloze(Facts):
    """Complete a fact by generation; correct if the answer begins with the value."""

    kind = "cloze"
    mode: ClassVar[Mode] = "generate"
    form: Form = "both"  # of the prompt; both: drawn at random for each sample

    def ask(self, stream: Stream, fact: tuple[str, str]) -> ToySample:
        asked = None if self.form == "both" else self.form == "question"
        before = self.examples(lambda: facts.make_cloze(stream, fact=self.pick_other(stream, fact), asked=asked))
        return facts.make_cloze(stream, fact=fact, asked=asked, before=before)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return {"correct": float(begins(answer.text, item.target))}


@task
class ClozeChoice(ChoiceMixin, Cloze):
    """The samples of `cloze` as a choice between four values. `top1` equals the score of `cloze`."""

    kind = "cloze_choice"


@task
class Letter(ChoiceMixin, Facts):
    """A choice between four lettered options, as in MMLU."""

    kind = "letter"

    def ask(self, stream: Stream, fact: tuple[str, str]) -> ToySample:
        before = self.examples(lambda: facts.make_letter_choice(stream, fact=self.pick_other(stream, fact)))
        return facts.make_letter_choice(stream, fact=fact, before=before)


@task
class LetterLookup(ChoiceMixin, Questions):
    """Letter look-up without knowledge, as the question names the option: a control for the retrieval in `letter`."""

    kind = "letter_lookup"
    samples: int = Field(100, ge=1)

    def count(self) -> int:
        return self.samples

    def named_samples(self, seed: int) -> Iterator[tuple[str, ToySample]]:
        for i in range(self.samples):
            stream = Stream(EVAL_SPLIT, self.kind, seed, i)
            before = self.examples(partial(facts.make_letter_lookup, stream))
            yield f"{self.kind}/{i}", facts.make_letter_lookup(stream, before=before)


@task
class Judgements(ChoiceMixin, Questions):
    """Yes-or-no choices, as in GLUE: acceptability, entailment and paraphrase."""

    kind = "judgements"
    judgements: tuple[Literal["acceptability", "entailment", "paraphrase"], ...] = KINDS  # type: ignore[assignment]
    samples: int = Field(50, ge=1)  # of each kind of judgement

    def count(self) -> int:
        return len(self.judgements) * self.samples

    def named_samples(self, seed: int) -> Iterator[tuple[str, ToySample]]:
        for kind in self.judgements:
            for i in range(self.samples):
                stream = Stream(EVAL_SPLIT, kind, seed, i)
                before = self.examples(partial(make_judgement, stream, kind))
                yield f"{kind}/{i}", make_judgement(stream, kind, before=before)

    @property
    def chance(self) -> float:
        return 0.5
