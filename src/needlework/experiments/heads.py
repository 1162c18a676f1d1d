"""`nw.rank` and `nw.smallest_set`: heads of a loaded model, ranked on tasks that go by name or come from a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.errors import NeedleworkError
from needlework.experiments.cluster import Cluster
from needlework.experiments.shipped import get
from needlework.heads import foreign
from needlework.heads.judging import SmallestSet
from needlework.heads.methods import Method, chosen, table
from needlework.heads.rank import Steps, origin, rank_by
from needlework.heads.recurrent import recurrent_side
from needlework.heads.recurrent_values import RecurrentSide
from needlework.heads.samples import NAMES, check_heads, draw, named_tasks, retrieval_tasks, untouched
from needlework.heads.survey import Settings, Survey, survey
from needlework.interventions.ranking import Ranking
from needlework.tasks.base import Task

if TYPE_CHECKING:
    from needlework.subject import Subject

Tasks = str | Path | Task | Sequence[Task]
ALL = "all"  # methods
CEILING, CEILING_HEADS = "greedy", 64  # a search over sets: what a ranking could be at best; of larger models only if asked for


def tasks_of(task: Tasks, subject: Subject) -> list[Task]:
    """The tasks that heads are ranked on: `niah`, `recall`, a task or several, or those of a plan that ask for what they hide."""
    if isinstance(task, Task):
        return _retrieving([task])
    if not isinstance(task, (str, Path)):
        return _retrieving(list(task))
    if str(task) in NAMES:
        return named_tasks(str(task), subject)
    plan = get(task)
    every = [named.task for experiment in plan.experiments for named in experiment.tasks]
    return _retrieving(list({(one.kind, one.model_dump_json()): one for one in every}.values()))


def _retrieving(tasks: list[Task]) -> list[Task]:
    kept = retrieval_tasks(tasks)
    if not kept:
        raise NeedleworkError(
            "no task here generates what stands in its prompt, so heads cannot be ranked by it; give --task niah or recall, or a"
            " plan with such a task (kinds niah, mqar, phone_book, copy)"
        )
    return kept


def check_methods(by: Sequence[str]) -> None:
    """Refuse what is no method, before a model is loaded for it."""
    chosen(name for name in by if name != ALL)


def methods_of(by: str | Sequence[str] | None, subject: Subject) -> list[Method]:
    """Methods by name; `all`; by default those that cost little, and greedy search as a ceiling for a small model."""
    names = [by] if isinstance(by, str) else list(by or ())
    if ALL in names:
        return list(table().values())
    if names:
        return chosen(names)
    small = len(subject.anatomy.heads) <= CEILING_HEADS
    return [m for m in table().values() if m.kind in ("attention", "contribution") or (small and m.name == CEILING)]


def heads_of(
    subject: Subject,
    by: str | Sequence[str] | None = None,
    task: Tasks = "niah",
    settings: Settings | None = None,
    *,
    files: Sequence[Path] = (),
    name: str = "",
    progress: bool = False,
) -> Survey:
    """Everything that `needlework heads` finds out. `files` hold rankings to be judged beside those that are made now."""
    methods = [] if files and not by else methods_of(by, subject)
    names = [*(method.name for method in methods), *(file.stem for file in files)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise NeedleworkError(f"two rankings are called {twice[0]!r}, after a method or a file; give a file another name")
    given = {file.stem: foreign.read(file, subject.anatomy) for file in files}
    return survey(subject, tasks_of(task, subject), methods, settings or Settings(), given=given, name=name, shown=progress)


@contextmanager
def opened(model: str, cluster: Cluster | None, **loading: Any) -> Iterator[Subject]:
    """The model that heads are ranked of: loaded here, or held by workers of a cluster."""
    if cluster is None:
        from needlework.subject import load

        yield load(model, **loading)
        return
    from needlework.experiments.distant import distant

    with distant(model, cluster, **loading) as subject:
        yield subject


def recurrent_side_of(subject: Subject, task: Tasks, samples: int, seed: int, progress: bool = False) -> RecurrentSide:
    """What `needlework heads --recurrent` finds out: the recurrent side, on the samples that heads would be ranked on."""
    drawn = draw(subject, tasks_of(task, subject), samples, seed)
    with Steps(1, progress) as steps, steps.step("the recurrent side") as told:
        return recurrent_side(subject, [sample.item for sample in drawn], seed=seed, progress=told)


def rank(
    subject: Subject,
    by: str | Sequence[str] = "copy_score",
    *,
    task: Tasks = "niah",
    samples: int = 60,
    seed: int = 0,
    name: str = "",
    progress: bool = False,
) -> Ranking | dict[str, Ranking]:
    """The model's attention heads from best to worst: one ranking for one method, by name for several (or "all").

    They are ranked on `samples` samples of a retrieval task, of which the untouched model must answer at least half.
    """
    check_heads(subject)
    methods = methods_of(by, subject)
    drawn = draw(subject, tasks_of(task, subject), samples, seed)
    with Steps(1 + len(methods), progress) as steps:
        with steps.step("asking the untouched model") as told:
            untouched(subject, drawn, told)
        made, of = {}, origin(subject, name)
        for method in methods:
            with steps.step(f"ranking by {method.name}") as told:
                made[method.name] = rank_by(subject, method, drawn, seed, told, of).ranking
    return made[by] if isinstance(by, str) and by in made else made


def smallest_set(
    subject: Subject,
    keep: float = 0.99,
    *,
    by: str | Sequence[str] | None = None,
    task: Tasks = "niah",
    samples: int = 60,
    held_out: int = 120,
    seed: int = 0,
    progress: bool = False,
) -> SmallestSet:
    """The fewest heads that keep this share of retrieval, at every position and with all other heads silent.

    Heads are ranked by each method; the best ranking and the number of heads are chosen on `held_out` other samples, and
    what that set keeps is measured on as many again.
    """
    settings = Settings(samples, held_out, seed, keep, dynamic=False, retest=False, random_orders=0)
    found = survey(subject, tasks_of(task, subject), methods_of(by, subject), settings, shown=progress)
    assert found.smallest is not None
    return found.smallest
