"""The models of a run: what is known of each before its weights are loaded, and the loaded model that answers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError, shown
from needlework.experiments.plan import Model
from needlework.heads.methods import Seen, chosen
from needlework.heads.pieces import Piece
from needlework.interventions import Ranking
from needlework.model.files import fetch, read_tokenizer, tokenizer_hash, weights_hash
from needlework.requests import Answer, Request, stop_tokens
from needlework.tasks.base import Item
from needlework.tasks.prompts import token_ids

if TYPE_CHECKING:
    from needlework.checkup.findings import Checkup
    from needlework.engine.budget import Costs
    from needlework.subject import Subject

T = TypeVar("T")


@dataclass(frozen=True)
class ModelInfo:
    """One model of a run. `weights` and `tokenizer_hash` say which; everything a trial's id needs is here."""

    model: Model
    weights: str
    tokenizer_hash: str
    anatomy: Anatomy
    tokenizer: Any
    eos: frozenset[int] = frozenset()
    directory: str = ""  # where it is loaded from
    costs: Costs | None = None  # what prompts and answers take of it

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def sizes(self) -> dict[str, int]:
        """What the letters in a plan's ranges stand for."""
        heads = [part.query_heads for _, part in self.anatomy.attention_parts()]
        return {"H": min(heads, default=0)}

    def stops(self, text: str | None) -> frozenset[int]:
        """Token ids that end an answer: the model's own, and the task's stop."""
        return stop_tokens(self.eos, () if text is None else (text,), partial(token_ids, self.tokenizer))

    def identity(self) -> dict[str, str]:
        """What a store remembers, and compares before it takes more trials."""
        return {
            "weights": self.weights,
            "tokenizer": self.tokenizer_hash,
            "dtype": self.model.loading.dtype,
            "window_rule": self.anatomy.window_rule,
        }


def look(model: Model, elsewhere: bool = False) -> ModelInfo:
    """Look at a model on disk. Needs transformers for the tokenizer and torch for the anatomy, but loads no weights.

    `elsewhere`: other machines will load it, which may have devices that this one lacks.
    """
    from needlework.engine.budget import Costs
    from needlework.model.load import blueprint, torch_device, torch_dtype
    from needlework.subject import own_dtype

    try:
        if not elsewhere:
            torch_device(model.loading.device)
        place = locate(model)
        if model.loading.dtype == "auto":  # rows are of one type: from here on, the model says which
            model = replace(model, loading=model.loading.but(dtype=own_dtype(place)))
        folder, gguf = (place.parent, place.name) if place.is_file() else (place, "")
        weights, words = weights_hash(place), tokenizer_hash(place)
        value_bytes = torch_dtype(model.loading.dtype).itemsize
        body = blueprint(place, model.loading.window)
        eos = _eos(folder)
        tokenizer = read_tokenizer(folder, gguf)
        if tokenizer is None:
            raise NeedleworkError(
                f"{place} is without a tokenizer, and tasks need one; save it there with tokenizer.save_pretrained(...)"
            )
    except NeedleworkError as error:
        raise model.error(f"model {shown(model.name)}: {error}") from None
    return ModelInfo(model, weights, words, body.anatomy, tokenizer, eos, str(place), Costs.of(body, value_bytes))


def locate(model: Model) -> Path:
    """The directory or .gguf file of a model: a path, a zoo name, or a hub id (fetched, or found in the hub's cache)."""
    from needlework import zoo

    here = Path(model.source).expanduser()
    if os.path.isdir(here) or os.path.isfile(here):
        return here
    if model.source in zoo.names() or "/" not in model.source:
        return zoo.path(model.source)  # raises with the nearest name
    if here.is_absolute() or model.source.startswith((".", "~")) or model.source.count("/") > 1:
        raise NeedleworkError(f"there is no {shown(model.source)}; give a model directory, a .gguf file, a zoo name or a hub id")
    return fetch(model.source, model.revision)


def _eos(folder: Path) -> frozenset[int]:
    """As transformers does: the generation configuration's, else the model configuration's."""
    for name in ("generation_config.json", "config.json"):
        try:
            ends = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, RecursionError, AttributeError):
            continue
        if ends is not None:
            return stop_tokens(ends)
    return frozenset()


class LoadedModel(Protocol):
    """It answers requests as they finish, and lets its attention be watched.

    A method `share`, if it has one, says how much of what it was last asked is done, from 0 to 1: progress between answers.
    A method `rank` is asked for rankings that cannot be had from what `watch` sums up.
    """

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]: ...
    def watch(self, requests: Sequence[Request], span: str) -> Sequence[Seen]: ...
    def versions(self) -> dict[str, str]: ...


class ModelSource(Protocol):
    """Where a run's models come from: looked at first, all of them, and loaded one at a time."""

    memory_bytes: int | None  # most that prompts and answers may take

    def look(self, model: Model) -> ModelInfo: ...
    def load(self, info: ModelInfo) -> LoadedModel: ...


class DiskModels:
    """Models from disk or hub."""

    def __init__(self, memory_bytes: int | None = None) -> None:
        self.memory_bytes = memory_bytes

    def look(self, model: Model) -> ModelInfo:
        return look(model)

    def load(self, info: ModelInfo) -> LoadedModel:
        from needlework.subject import load

        subject = load(info.directory, memory_bytes=self.memory_bytes, **info.model.loading.model_dump())
        return LoadedSubject(subject, info.model)


class PublicModels(DiskModels):
    """For looking only: the paper's models are known by their public configurations alone.

    Prompts for them are made in the toy language, since their tokenizers are not here; where a plan says how long prompts
    are, they have as many tokens.
    """

    def __init__(self, elsewhere: bool = False) -> None:
        super().__init__()
        self.elsewhere = elsewhere

    def look(self, model: Model) -> ModelInfo:
        from needlework.engine.budget import Costs
        from needlework.model.load import blueprint, torch_dtype
        from needlework.model.presets import PRESETS
        from needlework.toy.tokenizer import build

        if model.source not in PRESETS:
            return look(model, self.elsewhere)
        dtype = "bfloat16" if model.loading.dtype == "auto" else model.loading.dtype
        body = blueprint(model.source, model.loading.window)
        costs = Costs.of(body, torch_dtype(dtype).itemsize)
        loading = model.loading.but(dtype=dtype)
        return ModelInfo(replace(model, loading=loading), model.source, "toy", body.anatomy, build(), costs=costs)


class LoadedSubject:
    """A Subject as a run sees it."""

    def __init__(self, subject: Subject, model: Model) -> None:
        self.subject, self.model = subject, model
        self._share: float | None = None  # of a piece that is under way

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        for i, answer in self.subject.engine.run(requests):
            yield i, self.subject.with_text(answer)

    def do(self, piece: Piece[T], samples: Sequence[Any]) -> T:
        """Work on samples that needs the model itself; while it lasts, it says how much of it is done."""

        def progress(share: float) -> None:
            self._share = share

        try:
            return piece(self.subject, samples, progress)
        finally:
            self._share = None

    def share(self) -> float:
        return self.subject.engine.share if self._share is None else self._share

    def watch(self, requests: Sequence[Request], span: str) -> Sequence[Seen]:
        from needlework.observation import observe

        with observe(self.subject, span=span) as watch:
            self.subject.answer(requests)
        return watch.table()

    def rank(self, by: str, items: Sequence[Item], seed: int) -> Ranking:
        (method,) = chosen([by])
        scores = method.score(self.subject, items, seed=seed, progress=lambda share: None).values
        heads = self.subject.anatomy.heads
        return Ranking.by_scores({head: float(score) for head, score in zip(heads, scores, strict=True)})

    def checkup(self, quick: bool) -> Checkup:
        from needlework.checkup.doctor import doctor

        return doctor(self.subject, quick=quick)

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
        }
