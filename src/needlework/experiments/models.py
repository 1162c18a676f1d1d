"""Models of a run: their metadata before weights are loaded, the loaded model, and the executors that run batches on it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError, short_repr
from needlework.experiments.plan import Model
from needlework.heads.methods import find_methods
from needlework.interventions import Ranking
from needlework.measure import SampleFunction
from needlework.model.files import fetch, read_tokenizer, tokenizer_hash, weights_hash
from needlework.requests import Answer, Prepared, Request, failed_answer, prepare, stop_tokens
from needlework.tasks.base import Item
from needlework.tasks.prompts import token_ids

if TYPE_CHECKING:
    from needlework.checks import Checkup
    from needlework.engine.budget import Costs
    from needlework.observation import HeadRow, LayerRow
    from needlework.subject import Subject

T = TypeVar("T")


@dataclass(frozen=True)
class ModelInfo:
    """Metadata of one model, without weights. The hashes `weights` and `tokenizer_hash` go into trial ids."""

    model: Model
    weights: str
    tokenizer_hash: str
    anatomy: Anatomy
    tokenizer: Any
    eos: frozenset[int] = frozenset()
    directory: str = ""  # where it is loaded from
    costs: Costs | None = None  # memory and FLOPs of prompts and answers

    @property
    def name(self) -> str:
        return self.model.name

    def stops(self, text: str | None) -> frozenset[int]:
        """Return the token ids that end an answer: the model's EOS and those of the task's stop text."""
        return stop_tokens(self.eos, () if text is None else (text,), partial(token_ids, self.tokenizer))

    def identity(self) -> dict[str, str]:
        """Return what identifies the model in a store; rows of a model with another identity are refused."""
        return {
            "weights": self.weights,
            "tokenizer": self.tokenizer_hash,
            "dtype": self.model.loading.dtype,
            "window_rule": self.anatomy.window_rule,
        }


def model_sizes(anatomy: Anatomy) -> dict[str, int]:
    """Return the values of the letters in a plan's ranges: H is the smallest number of query heads of a layer."""
    return {"H": min((part.query_heads for _, part in anatomy.attention_parts()), default=0)}


def side_layers(anatomy: Anatomy) -> dict[str, tuple[int, ...]]:
    """Return the layers of each side, which names of layers in a plan's interventions stand for."""
    sides = {"attention": anatomy.attention_layers, "recurrent": anatomy.recurrent_layers}
    return {side: tuple(layer.index for layer in layers) for side, layers in sides.items()}


def locate(model: Model) -> Path:
    """Return the directory or .gguf file of a path, a zoo name or a hub id (downloaded, or from the hub's cache)."""
    from needlework import zoo

    here = Path(model.source).expanduser()
    if os.path.isdir(here) or os.path.isfile(here):
        return here
    if model.source in zoo.names() or "/" not in model.source:
        return zoo.path(model.source)  # raises with the nearest name
    if here.is_absolute() or model.source.startswith((".", "~")) or model.source.count("/") > 1:
        hint = "give a model directory, a .gguf file, a zoo name or a hub id"
        raise NeedleworkError(f"there is no {short_repr(model.source)}; {hint}")
    return fetch(model.source, model.revision)


class Observed(NamedTuple):
    """What was observed: the statistics of every head, and what every layer adds to the residual stream of prompts."""

    heads: Sequence[HeadRow]
    layers: Sequence[LayerRow] = ()


class LoadedModel(Protocol):
    """A model that yields answers as they finish, and statistics of heads and layers (`watch`).

    Optional methods: `share` returns the progress of the current call from 0 to 1; `rank` computes rankings that need more
    than the statistics of `watch`.
    """

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]: ...
    def watch(self, requests: Sequence[Request], span: str) -> Observed: ...
    def versions(self) -> dict[str, str]: ...


class ModelSource(Protocol):
    """A provider of models: `look` is called for all models first, then they are loaded one at a time."""

    memory_bytes: int | None  # limit for caches, states and activations

    def inspect(self, model: Model) -> ModelInfo: ...
    def load(self, info: ModelInfo) -> LoadedModel: ...


class DiskModels:
    """Models from disk or from the hub; `loaded_remotely`: other machines load them. Rows get `more_versions` beside our own."""

    def __init__(
        self,
        memory_bytes: int | None = None,
        loaded_remotely: bool = False,
        more_versions: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.memory_bytes, self.loaded_remotely, self.more_versions = memory_bytes, loaded_remotely, dict(more_versions)

    def anatomy(self, model: Model) -> Anatomy | None:
        """Return a model's anatomy from its configuration alone; None if it has none that is readable: `look` says why."""
        from needlework import zoo
        from needlework.model.load import blueprint

        with suppress(NeedleworkError):
            return blueprint(zoo.resolve(model.source), model.loading.window, revision=model.revision).anatomy
        return None

    def inspect(self, model: Model) -> ModelInfo:
        """Inspect a model on disk: tokenizer, anatomy, hashes and costs, without loading weights."""
        from needlework.engine.budget import Costs
        from needlework.model.load import blueprint, convert_gguf, own_dtype, torch_device, torch_dtype

        try:
            if not self.loaded_remotely:  # its device need not exist here
                torch_device(model.loading.device)
            place = locate(model)
            if model.loading.dtype == "auto":  # rows name a concrete dtype
                model = replace(model, loading=model.loading.replace(dtype=own_dtype(place)))
            folder = convert_gguf(place) if place.is_file() else place
            weights, words = weights_hash(place), tokenizer_hash(place)
            value_bytes = torch_dtype(model.loading.dtype).itemsize
            body = blueprint(folder, model.loading.window)
            tokenizer = read_tokenizer(folder)
            if tokenizer is None:
                hint = "save it there with tokenizer.save_pretrained(...)"
                raise NeedleworkError(f"{place} is without a tokenizer, and tasks need one; {hint}")
            eos = None
            for name in ("generation_config.json", "config.json"):  # the same precedence as in transformers
                with suppress(OSError, ValueError, RecursionError, AttributeError):
                    eos = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
                if eos is not None:
                    break
            stops = frozenset() if eos is None else stop_tokens(eos)
        except NeedleworkError as error:
            raise model.error(f"model {short_repr(model.name)}: {error}") from None
        return ModelInfo(model, weights, words, body.anatomy, tokenizer, stops, str(place), Costs.of(body, value_bytes))

    def load(self, info: ModelInfo) -> LoadedModel:
        from needlework.subject import load

        subject = load(info.directory, memory_bytes=self.memory_bytes, **info.model.loading.model_dump())
        return LoadedSubject(subject, info.model, self.more_versions)


class CachedModels(DiskModels):
    """Models that stay loaded, for several runs in this process; they must fit into memory together."""

    def __init__(self, memory_bytes: int | None = None, more_versions: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(memory_bytes, more_versions=more_versions)
        self._infos: dict[Model, ModelInfo] = {}
        self._loaded: dict[Model, LoadedModel] = {}
        self.samples: dict[Any, Any] = {}  # those of all plans that were expanded: see `trials.expand_all`

    def anatomy(self, model: Model) -> Anatomy | None:
        return self._infos[model].anatomy if model in self._infos else super().anatomy(model)

    def inspect(self, model: Model) -> ModelInfo:
        if model not in self._infos:
            self._infos[model] = super().inspect(model)
        return self._infos[model]

    def load(self, info: ModelInfo) -> LoadedModel:
        if info.model not in self._loaded:
            self._loaded[info.model] = super().load(info)
        return self._loaded[info.model]

    def subject(self, name: str) -> Subject:
        """Return a model of this name, which is loaded if no run did that."""
        from needlework.subject import load

        loaded = next((one for model, one in self._loaded.items() if model.name == name), None)
        return loaded.subject if isinstance(loaded, LoadedSubject) else load(name)


class PublicModels(DiskModels):
    """Models for estimates: also presets, of which only the public configuration is known.

    Their prompts are made with the toy tokenizer, since their own is not available; lengths that a plan sets still hold.
    """

    def inspect(self, model: Model) -> ModelInfo:
        from needlework.engine.budget import Costs
        from needlework.model.files import presets
        from needlework.model.load import blueprint, torch_dtype
        from needlework.toy.tokenizer import build

        if model.source not in presets():
            return super().inspect(model)
        dtype = "bfloat16" if model.loading.dtype == "auto" else model.loading.dtype
        body = blueprint(model.source, model.loading.window)
        costs = Costs.of(body, torch_dtype(dtype).itemsize)
        loading = model.loading.replace(dtype=dtype)
        return ModelInfo(replace(model, loading=loading), model.source, "toy", body.anatomy, build(), costs=costs)


class LoadedSubject:
    """A Subject with the interface of `LoadedModel`."""

    def __init__(self, subject: Subject, model: Model, more_versions: Mapping[str, str] = MappingProxyType({})) -> None:
        self.subject, self.model, self.more_versions = subject, model, more_versions
        self._share: float | None = None  # progress of a running `apply`

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Yield (index, answer) for each request; an invalid request gives a failed answer."""
        prepared: dict[int, Prepared] = {}
        for i, request in enumerate(requests):
            try:
                prepared[i] = prepare(request, self.subject.anatomy)
            except NeedleworkError as error:
                yield i, failed_answer(error)
        indices = list(prepared)
        for i, answer in self.subject.engine.run(list(prepared.values())):
            yield indices[i], self.subject.with_text(answer)

    def apply(self, function: SampleFunction[T], samples: Sequence[Any]) -> T:
        """Apply a function to samples: see `measure.map_samples`. Meanwhile, `share` returns its progress."""
        try:
            return function(self.subject, samples, partial(setattr, self, "_share"))
        finally:
            self._share = None

    def share(self) -> float:
        return self.subject.engine.share if self._share is None else self._share

    def watch(self, requests: Sequence[Request], span: str) -> Observed:
        """Run requests and return statistics of every head and layer; `span` is where attention mass is summed."""
        from needlework.observation import HeadObserver

        body = self.subject.body
        depth = 0 if body.layers is None else len(body.layers)
        observer = HeadObserver(span, depth=depth)  # the span may be missing: plans also record tasks without a needle
        with body.observed_by(observer):
            self.subject.answer(requests)
        return Observed(observer.table(), observer.layers())

    def rank(self, by: str, items: Sequence[Item], seed: int) -> Ranking:
        """Rank all heads with a method that needs the model itself."""
        (method,) = find_methods([by])
        scores = method.score(self.subject, items, seed=seed, progress=lambda share: None).values
        heads = self.subject.anatomy.heads
        return Ranking.by_scores({head: float(score) for head, score in zip(heads, scores, strict=True)})

    def checkup(self, quick: bool) -> Checkup:
        from needlework.checks.doctor import doctor

        try:
            return doctor(self.subject, quick=quick, report=partial(setattr, self, "_share"))
        finally:
            self._share = None

    def versions(self) -> dict[str, str]:
        import torch
        import transformers

        from needlework import __version__

        return {
            "needlework": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": str(self.subject.body.device),
            "dtype": self.model.loading.dtype,
            "kernels": self.subject.body.kernels,
            **self.more_versions,
        }


# --- Executors: who runs batches of requests on a loaded model ---

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
