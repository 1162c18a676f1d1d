"""A subject whose model workers hold: requests go to them in units, other work in pieces, and it looks like one here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from needlework.errors import NeedleworkError
from needlework.experiments.cluster import Cluster
from needlework.experiments.crew import Unit
from needlework.experiments.foreman import Foreman, WorkerLost
from needlework.experiments.models import ModelInfo
from needlework.experiments.plan import Model
from needlework.experiments.schema import Loading
from needlework.heads.pieces import Piece, Progress
from needlework.model.load import blueprint
from needlework.requests import Answer, Request
from needlework.subject import Subject

UNIT_REQUESTS = 64  # whole prompts, so that some more of the last one may follow
PIECE_SAMPLES = 16
T = TypeVar("T")


@contextmanager
def distant(model: str, cluster: Cluster, **loading: Any) -> Iterator[DistantSubject]:
    """A model on a cluster, by its name in the zoo, its directory or hub id; `loading` as in `nw.load`."""
    source = cluster.models()
    info = source.look(Model("--ray", Path(model).name, model, Loading().but(**loading)))
    with cluster.joined() as hall, hall(source, info, units=cluster.workers or MOST_WORKERS) as crew:
        assert isinstance(crew, Foreman)
        yield DistantSubject(info, crew)


MOST_WORKERS = 4096  # as many as there is room for


class DistantSubject(Subject):
    """Tokenizer, anatomy and shapes are here; weights and states are not: whoever reaches for them meets no values."""

    def __init__(self, info: ModelInfo, crew: Foreman) -> None:
        body = blueprint(info.directory, info.model.loading.window)
        body.source = Path(info.directory)
        body.model.generation_config.eos_token_id = sorted(info.eos)
        super().__init__(body, info.tokenizer)
        self.engine = _Engine(crew)  # type: ignore[assignment]
        self._crew = crew

    def with_text(self, answer: Answer) -> Answer:
        """Workers have said it already."""
        return answer

    def done(self, piece: Piece[T], samples: Sequence[Any], progress: Progress, cut: bool) -> list[T]:
        """What came of a piece on each slice of the samples, in their order; uncut, on all of them."""
        size = PIECE_SAMPLES if cut else max(1, len(samples))
        slices = [samples[start : start + size] for start in range(0, max(1, len(samples)), size)]
        with _told():
            return self._crew.do(piece, slices, progress)


@dataclass(eq=False)
class _Slice(Unit):
    places: Sequence[int]  # of its requests among all


class _Engine:
    """Answers of workers. What a unit holds depends on the requests alone, not on who is there."""

    def __init__(self, crew: Foreman) -> None:
        self.crew = crew

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        units = deque(_Slice([requests[i] for i in places], places) for places in _slices(requests))
        with closing(self.crew.ask(lambda: units.popleft() if units else None)) as replies:
            for reply in replies:
                assert isinstance(reply.unit, _Slice)
                if reply.error is not None:
                    with _told():
                        raise reply.error
                for i, answer, _ in reply.answers:
                    yield reply.unit.places[i], answer


def _slices(requests: Sequence[Request]) -> Iterable[list[int]]:
    """All requests of a prompt stay together, and so do prompts of like length."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        by_prompt.setdefault(request.prompt, []).append(i)
    places: list[int] = []
    for same in sorted(by_prompt.values(), key=lambda same: len(requests[same[0]].prompt)):
        places += same
        if len(places) >= UNIT_REQUESTS:
            yield places
            places = []
    if places:
        yield places


@contextmanager
def _told() -> Iterator[None]:
    """What a worker refused is refused here in the same words; what ended worker after worker is said to have."""
    try:
        yield
    except WorkerLost as lost:
        raise NeedleworkError(f"{lost}; if memory ran out, take fewer workers or larger nodes") from None
    except Exception as error:
        if type(error).__name__ == NeedleworkError.__name__:  # its class was lost on the way
            raise NeedleworkError(str(error)) from None
        raise
