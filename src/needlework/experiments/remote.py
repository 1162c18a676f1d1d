"""RemoteSubject: a Subject whose model is on the workers of an executor, for head rankings on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from needlework.anatomy import Anatomy
from needlework.experiments.executors import Batch, Executor
from needlework.experiments.models import ModelInfo
from needlework.experiments.plan import Model
from needlework.experiments.ray_executor import Cluster
from needlework.experiments.schema import Loading
from needlework.measure import Progress, SampleFunction
from needlework.model.load import blueprint
from needlework.requests import Answer, Request, prepare
from needlework.subject import Subject

BATCH_REQUESTS = 64  # at least, except in the last batch: all requests of a prompt are in one batch
BATCH_SAMPLES = 16
MOST_WORKERS = 4096  # in effect no limit: as many as the cluster has room for
T = TypeVar("T")


@contextmanager
def open_remote(model: str, cluster: Cluster, **loading: Any) -> Iterator[RemoteSubject]:
    """Open a model on a cluster, given by zoo name, directory or hub id; `loading` as in `nw.load`."""
    source = cluster.models()
    info = source.look(Model("--ray", Path(model).name, model, Loading().replace(**loading)))
    with cluster.connected() as connection, connection(source, info, cluster.workers or MOST_WORKERS) as executor:
        yield RemoteSubject(info, executor)


class RemoteSubject(Subject):
    """A Subject with tokenizer and anatomy in this process and weights on the meta device; workers run its requests."""

    def __init__(self, info: ModelInfo, executor: Executor) -> None:
        body = blueprint(info.directory, info.model.loading.window)
        body.source = Path(info.directory)
        body.model.generation_config.eos_token_id = sorted(info.eos)
        super().__init__(body, info.tokenizer)
        self.engine = _RemoteEngine(executor, body.anatomy)  # type: ignore[assignment]
        self._executor = executor

    def with_text(self, answer: Answer) -> Answer:
        """Return the answer unchanged: workers have added its text."""
        return answer

    def map_samples(self, function: SampleFunction[T], samples: Sequence[Any], progress: Progress, whole: bool) -> list[T]:
        """Apply a function to slices of the samples, or to all at once: see `measure.map_samples`."""
        size = max(1, len(samples)) if whole else BATCH_SAMPLES
        slices = [samples[start : start + size] for start in range(0, max(1, len(samples)), size)]
        batches = [Batch(method="apply", args=(function, part)) for part in slices]
        values: dict[Batch, T] = {}
        with closing(self._executor.run(batches)) as results:
            for result in results:
                if result.error is not None:
                    raise result.error
                if result.done:
                    values[result.batch] = result.value
                running = sum(self._executor.share(batch) for batch in batches if batch not in values)
                progress((len(values) + running) / len(batches))
        return [values[batch] for batch in batches]


@dataclass(eq=False)
class _RequestBatch(Batch):
    indices: Sequence[int] = ()  # of its requests in the whole list


class _RemoteEngine:
    """An engine that sends requests to workers. Batches depend on the requests alone, not on the number of workers."""

    def __init__(self, executor: Executor, anatomy: Anatomy) -> None:
        self.executor, self.anatomy = executor, anatomy

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        for request in requests:
            prepare(request, self.anatomy)  # raises for invalid requests before anything is sent
        batches = [_RequestBatch([requests[i] for i in some], indices=some) for some in _slices(requests)]
        with closing(self.executor.run(batches)) as results:
            for result in results:
                assert isinstance(result.batch, _RequestBatch)
                if result.error is not None:
                    raise result.error
                for i, answer, _ in result.answers:
                    yield result.batch.indices[i], answer


def _slices(requests: Sequence[Request]) -> Iterable[list[int]]:
    """Yield the request indices of each batch: all requests of a prompt together, prompts sorted by length."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        by_prompt.setdefault(request.prompt, []).append(i)
    indices: list[int] = []
    for same in sorted(by_prompt.values(), key=lambda same: len(requests[same[0]].prompt)):
        indices += same
        if len(indices) >= BATCH_REQUESTS:
            yield indices
            indices = []
    if indices:
        yield indices
