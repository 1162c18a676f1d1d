"""Work that needs the model itself and not only its answers: done here in one go, or a slice of samples each by workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from needlework.subject import Subject

T = TypeVar("T")
Progress = Callable[[float], None]
Piece = Callable[["Subject", Sequence[Any], Progress], T]  # some samples, and what came of them; it may cross processes


@runtime_checkable
class Spread(Protocol):
    """A subject whose model is held by others: they do pieces, and answer requests through its engine."""

    def done(self, piece: Piece[T], samples: Sequence[Any], progress: Progress, cut: bool) -> list[T]: ...


def in_pieces(subject: Subject, piece: Piece[T], samples: Sequence[Any], progress: Progress) -> list[T]:
    """What came of each slice of the samples, in their order; here there is one slice."""
    return (
        subject.done(piece, samples, progress, cut=True) if isinstance(subject, Spread) else [piece(subject, samples, progress)]
    )


def in_one_piece(subject: Subject, piece: Piece[T], samples: Sequence[Any], progress: Progress) -> T:
    """All samples at once, by whoever holds the model: for what cannot be put together from slices."""
    if isinstance(subject, Spread):
        (whole,) = subject.done(piece, samples, progress, cut=False)
        return whole
    return piece(subject, samples, progress)
