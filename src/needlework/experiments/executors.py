"""Executors run batches of requests on a loaded model. The interface, and the executor for a model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from needlework.errors import NeedleworkError
from needlework.experiments.models import LoadedModel, ModelInfo, ModelSource
from needlework.requests import Answer, Request

TimedAnswer = tuple[int, Answer, float]  # index of the request, its answer, seconds since the answer before it


class NotSupported(NeedleworkError):
    """A model source lacks an optional method."""


@dataclass(eq=False)
class Batch:
    """Requests that one worker runs together or, if `method` is set, a call of that method of the loaded model."""

    requests: Sequence[Request] = ()
    method: str = ""
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class BatchResult:
    """Some answers of a batch, or the value of its call. `done` marks the last result of a batch.

    A result without answers that is not done only reports that the batch is still running.
    """

    batch: Batch
    answers: Sequence[TimedAnswer] = ()
    value: Any = None
    done: bool = True
    error: Exception | None = None  # why the batch ended before all answers were there


class Executor(Protocol):
    """A model that is loaded by one or many workers, which execute batches.

    To add an executor, implement these methods and a context manager that opens it (`OpenExecutor`).
    """

    def versions(self) -> dict[str, str]:
        """Return versions of software, device and dtype; they are equal for all workers."""

    def run(self, batches: Iterable[Batch]) -> Generator[BatchResult, None, None]:
        """Execute batches and yield results as they finish, in any order. Batches are consumed when a worker is free.

        Each batch is executed by one worker. Errors are yielded, not raised. Closing the generator drops the other batches.
        """

    def share(self, batch: Batch) -> float:
        """Return the progress of a running batch from 0 to 1. Thread-safe."""


class OpenExecutor(Protocol):
    """A function that opens an executor for one model, for at most `most` batches at a time."""

    def __call__(self, source: ModelSource, info: ModelInfo, most: int) -> AbstractContextManager[Executor]: ...


def run_call(executor: Executor, batch: Batch) -> Any:
    """Execute a batch with a method call and return its value; raise its error, if any."""
    with closing(executor.run([batch])) as results:
        (result,) = (result for result in results if result.done)
    if result.error is not None:
        raise result.error
    return result.value


class LocalExecutor:
    """An executor with the model in this process: batches run in order, and each answer is yielded when it is ready."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.versions = model.versions
        self._share: Callable[[], float] = getattr(model, "share", float)  # default: 0.0

    def run(self, batches: Iterable[Batch]) -> Generator[BatchResult, None, None]:
        for batch in batches:
            value, last = None, time.monotonic()
            try:
                if batch.method:
                    method: Callable[..., Any] | None = getattr(self.model, batch.method, None)
                    if method is None:
                        raise NotSupported(f"the source of this model has no {batch.method}(), which is needed here")
                    value = method(*batch.args)
                for i, answer in self.model.answers(batch.requests) if batch.requests else ():
                    last, seconds = time.monotonic(), time.monotonic() - last
                    yield BatchResult(batch, [(i, answer, seconds)], done=False)
            except Exception as error:
                yield BatchResult(batch, error=error)
            else:
                yield BatchResult(batch, value=value)

    def share(self, batch: Batch) -> float:
        return self._share()


def local_executor(source: ModelSource, info: ModelInfo, most: int) -> AbstractContextManager[Executor]:
    """Load the model in this process (an `OpenExecutor`)."""
    return nullcontext(LocalExecutor(source.load(info)))
