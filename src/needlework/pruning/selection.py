"""Which heads stay: so many of a ranking, of one from a file or of one that is measured on the spot, or heads by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.errors import NeedleworkError, shown
from needlework.heads.methods import chosen
from needlework.heads.rank import Steps, origin, rank_by
from needlework.heads.samples import draw, named_tasks
from needlework.interventions.ranking import Ranking, as_heads

if TYPE_CHECKING:
    from needlework.subject import Subject

Keep = int | float | str | Path | Ranking | Sequence[tuple[int, int]]
METHOD = "needle_mass"  # the cheapest: one pass
RANKING_SAMPLES, RANKING_SEED = 100, 1  # figures are measured on another one (figures.py)
_NUMBER = r"\d+(?:\.\d+)?"
_SAY_HOW_MANY = "say how many of them stay, e.g. heads.json:10"
_HOW = "give a number of heads (10), a share of them (0.33), or a ranking, with or without a number: heads.json, heads.json:10"


@dataclass(frozen=True)
class Choice:
    """The heads that stay, and the ranking that says so."""

    heads: tuple[Head, ...]  # best first
    ranking: Ranking

    @property
    def said_by(self) -> str:
        ranking = self.ranking
        parts = (
            f"ranking by {ranking.method}" if ranking.method else "heads that were named",
            f"of {ranking.model.name}" if ranking.model.name else "",
            f"on {ranking.samples:,} samples of {ranking.task}" if ranking.samples else "",
            f"seed {ranking.seed}" if ranking.seed is not None else "",
        )
        return ", ".join(part for part in parts if part)


def choose(subject: Subject, keep: Keep, progress: bool = False) -> Choice:
    """The heads that stay of a model; an error for those that it has not, and for none or all of them."""
    ranking, count = _read(keep)
    every = subject.anatomy.heads
    if not every:
        raise NeedleworkError(f"{subject.anatomy.architecture} has no attention heads that could be pruned")
    named = not isinstance(keep, (Ranking, int, float)) and not _is_file(keep)
    if ranking is not None:
        if named and (unknown := [head for head in ranking.order if head not in set(every)]):
            raise NeedleworkError(
                f"{subject.anatomy.architecture} has no heads {' '.join(f'{head.layer}.{head.index}' for head in unknown[:5])},"
                " which are to stay; `needlework inspect` shows those that there are"
            )
        _check(ranking, subject.anatomy, subject.body.weights if ranking.model.weights else "")
    elif count is not None:
        _count(count, len(every))  # before anything is measured
        ranking = by_needle_mass(subject, progress)
    assert ranking is not None
    if count is None and len(ranking.order) == len(every):
        raise NeedleworkError(f"all {len(every)} heads are {'named: name fewer' if named else f'ranked: {_SAY_HOW_MANY}'}")
    number = len(ranking.order) if count is None else _count(count, len(every))
    if number > len(ranking.order):
        raise NeedleworkError(f"{number} heads are to stay, and the ranking file has {len(ranking.order)}")
    return Choice(ranking.top(number), ranking)


def _read(keep: Keep) -> tuple[Ranking | None, int | float | None]:
    if isinstance(keep, Ranking):
        return keep, None
    if isinstance(keep, bool) or keep is None:
        raise NeedleworkError(f"keep={keep!r} says no heads; {_HOW}")
    if isinstance(keep, (int, float)):
        return None, keep
    if not isinstance(keep, (str, Path)):
        return Ranking(order=as_heads(keep)), None
    text = str(keep).strip()
    if re.fullmatch(_NUMBER, text):
        return None, _number(text)
    if not _is_file(text):
        return Ranking.parse(text), None
    file, mark, number = text.rpartition(":")
    if mark and re.fullmatch(_NUMBER, number) and not Path(text).exists():
        return Ranking.load(file), _number(number)
    if not Path(text).is_file():
        raise NeedleworkError(f"--keep {shown(text)} is no file and no number; {_HOW}")
    return Ranking.load(text), None


def _is_file(keep: Keep) -> bool:
    """Neither heads in a list, nor by name: "2.0 2.5"."""
    return isinstance(keep, (str, Path)) and not re.fullmatch(r"\d+\.\d+(\s+\d+\.\d+)+", str(keep).strip())


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _count(count: int | float, heads: int) -> int:
    """How many heads a number or a share stands for."""
    if isinstance(count, float) and not 0 <= count <= 1:
        raise NeedleworkError(f"a share of {count:g} of the heads; shares lie between 0 and 1, numbers of heads are whole")
    number = count if isinstance(count, int) else heads_of_share(count, heads)
    if number <= 0:
        raise NeedleworkError(
            "no head would stay, and nothing could retrieve any more: `needlework ask MODEL PROMPT --intervene"
            " 'ablate_attention()'` measures that without a new model; keep at least one head"
        )
    if number > heads:
        raise NeedleworkError(f"{number} heads are to stay, and the model has {heads}")
    if number == heads:
        raise NeedleworkError(f"all {heads} heads would stay: nothing is to be cut; keep fewer")
    return number


def _check(ranking: Ranking, anatomy: Anatomy, weights: str) -> None:
    """It may rank some of the heads only; those must be there, and be this model's."""
    if not ranking.order:
        _count(0, len(anatomy.heads))
    missing = tuple(head for head in anatomy.heads if head not in set(ranking.order))
    ranking.model_copy(update={"order": (*ranking.order, *missing)}).check(anatomy, weights)


def by_needle_mass(subject: Subject, progress: bool = False) -> Ranking:
    """Heads by their attention on the needle while it is told: one pass over the answers of the untouched model."""
    samples = draw(subject, named_tasks("niah", subject), RANKING_SAMPLES, RANKING_SEED)
    (method,) = chosen([METHOD])
    with Steps(1, progress) as steps, steps.step("ranking heads") as tell:
        return rank_by(subject, method, samples, RANKING_SEED, tell, origin(subject)).ranking
