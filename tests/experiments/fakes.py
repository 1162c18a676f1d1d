"""A model without torch: answers are a hash of the question, so that a run can be tested for what it keeps and loses."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from needlework import cli, tasks
from needlework.anatomy import Anatomy, AttentionPart, Layer, RecurrentPart
from needlework.errors import NeedleworkError
from needlework.experiments import run, trials
from needlework.experiments.models import ModelInfo, Observed
from needlework.experiments.plan import Model, load
from needlework.experiments.result import Result
from needlework.receipts import Receipt
from needlework.requests import Answer, Request
from needlework.results import LM_EVAL, Store, rows
from needlework.tasks.base import Item, Task

HEADS = 4


def anatomy(attention: int = 1, recurrent: int = 1, heads: int = HEADS) -> Anatomy:
    layers = [Layer(i, AttentionPart(f"a{i}", heads, heads, 8, 8, None, False, False, 100, 64), None) for i in range(attention)]
    layers += [Layer(attention + i, None, RecurrentPart(f"r{i}", "Mixer", 100, 64)) for i in range(recurrent)]
    return Anatomy("fake", "FakeForCausalLM", tuple(layers), 1000, 1000, 512, "transformers")


class FakeTokenizer:
    """Words are numbers below 1000, written as text."""

    def __call__(self, text: str, **_: Any) -> Mapping[str, Any]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


class FakeTask(Task):
    """Prompts of numbers; the needle is the second to fourth token."""

    kind = "fake"
    mode = "generate"
    samples: int = Field(4, ge=1)
    length: int = Field(8, ge=6, le=400)
    scorer: str = "length"

    def items(self, tokenizer: Any, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        if self.length == 13:
            raise NeedleworkError("13 is unlucky; choose another length")
        for i in range(self.samples):
            prompt = tuple((seed * 31 + i * 7 + j) % 1000 for j in range(self.length + i % 2))
            twin = (*prompt[:1], 999, *prompt[2:])
            yield Item(
                id=f"fake/{i}",
                cluster=f"fake/{i // 2}",
                prompt=prompt,
                prompt_text=tokenizer.decode(prompt),
                target=str(prompt[1]),
                spans={"needle": ((1, 4),)},
                options=((1,), (2, 3)),
                answer=0,
                twins={"twin": twin},
                twin_target="999",
                facts={"context_tokens": len(prompt)},
            )

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        if self.scorer == "broken":
            raise ZeroDivisionError("no scores today")
        odd = len(answer.text) % 2 == (self.scorer != "even")
        return {"correct": float(odd), "options": float(len(answer.option_logprobs))}


class FakeChoice(FakeTask):
    kind = "fake_choice"
    mode = "choices"


def make_task(spec: Mapping[str, Any]) -> Task:
    fields = dict(spec)
    kinds = {"fake": FakeTask, "fake_choice": FakeChoice}
    kind = fields.pop("kind")
    if kind not in kinds:
        raise NeedleworkError(f"unknown task kind {kind!r}; known: {', '.join(kinds)}")
    return kinds[kind](**fields)


@dataclass(frozen=True)
class FakeSeen:
    layer: int
    head: int
    needle_mass: float
    entropy: float
    copy_score: float
    sink_mass: float = 0.0
    sink_mass_of_best: float = 0.0


def _number(*parts: object) -> float:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") / 2**32


@dataclass
class FakeActor:
    """Answers depend on what else is in the call, as floats in a batch do: a resumed run must make the same calls."""

    pause: float = 0.0
    batchwise: bool = True
    poison: frozenset[tuple[int, ...]] = frozenset()
    asked: list[tuple[int, ...]] = field(default_factory=list)
    calls: int = 0

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        self.calls += 1
        batch = hashlib.sha256(repr([(r.prompt, str(r.intervention)) for r in requests]).encode()).hexdigest()
        for i in reversed(range(len(requests))):  # answers come in their own order
            request = requests[i]
            if request.options:
                time.sleep(self.pause)
                words = (request.prompt, str(request.intervention))
                values = tuple(tuple(-_number(*words, token) for token in option) for option in request.options)
                yield i, Answer(option_logprobs=values, greedy=(True,) * len(values))
                continue
            if request.prompt in self.poison:
                raise RuntimeError("poisoned")
            self.asked.append(request.prompt)
            time.sleep(self.pause)
            seed = _number(request.prompt, str(request.intervention), batch if self.batchwise else "")
            tokens = (int(seed * 1000),)
            receipt = Receipt({(0, "decode"): {"positions": 1}})
            yield i, Answer(tokens, (-seed,), (seed,), receipt, "stop", text=str(tokens[0]))

    def watch(self, requests: Sequence[Request], span: str) -> Observed:
        return Observed([FakeSeen(0, head, head / 10, 1.0, len(requests) / 100) for head in range(HEADS)])

    def versions(self) -> dict[str, str]:
        return {"needlework": "test"}


@dataclass
class Hungry(FakeActor):
    """The first one that is asked ends as the system ends who takes all of its memory: without a word."""

    marker: str = ""

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        for pair in super().answers(requests):
            yield pair
            if not os.path.exists(self.marker):
                Path(self.marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class FakeModels:
    actor: FakeActor = field(default_factory=FakeActor)
    weights: str = "w" * 32
    tokenizer_hash: str = "t" * 32
    shapes: Mapping[str, Anatomy] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    memory_bytes: int | None = None

    def inspect(self, model: Model) -> ModelInfo:
        if model.source == "missing":
            raise model.error("model 'missing': there is no such model")
        shape = self.shapes.get(model.name, anatomy())
        return ModelInfo(model, self.weights + model.name, self.tokenizer_hash, shape, FakeTokenizer(), frozenset({0}))

    def load(self, info: ModelInfo) -> FakeActor:
        self.loaded.append(info.name)
        return self.actor


PLAN = """
name: test
models: [alpha]
experiments:
  sweep:
    tasks: [{kind: fake, samples: 6}]
    interventions:
      - none
      - keep_heads(k=0..H, phase={'decode', 'both'})
    seeds: 0..1
  choice:
    tasks: [fake_choice]
    interventions: [none, ablate_attention()]
  look:
    tasks: [{kind: fake, samples: 6}]
    interventions: none
    observe: true
"""


def run_fakes(
    plan: Path, out: Path, source: FakeModels | None = None, *, fast: bool = False, models: Sequence[str] = (), **options: Any
) -> Result:
    """A plan of fake tasks, asked of fake models."""
    loaded = load(plan, fast=fast, models=models, make_task=make_task)
    return run.run(loaded, out, source=source or FakeModels(), progress=False, **options)


def main() -> None:
    """`fakes.py PLAN OUT PAUSE`: `needlework run` in a process of its own, to be killed."""
    plan, out, pause = sys.argv[1:4]
    trials.CHUNK_TRIALS = 16
    run.DiskModels = lambda _: FakeModels(FakeActor(float(pause)))  # type: ignore[assignment,misc]
    tasks.make_task = make_task
    cli.app(["run", plan, "--out", out])


def older_scores(store: Store) -> int:
    """How many rows that a plan asks for have scores of another version."""
    if store.meta("scores_version") in (None, rows.SCORES_VERSION):  # none: no task's row was ever written
        return 0
    older = "SELECT count(*) FROM trials WHERE asked AND kind != ? AND scoring NOT LIKE ?"
    return int(store.db.execute(older, (LM_EVAL, f"{rows.SCORES_VERSION}-%")).fetchone()[0])


if __name__ == "__main__":
    main()
