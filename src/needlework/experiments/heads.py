"""`nw.rank` and `nw.smallest_set`: rank the attention heads of a model on named tasks or on tasks of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.errors import NeedleworkError
from needlework.experiments.ray_executor import Cluster
from needlework.experiments.shipped import get
from needlework.heads import foreign
from needlework.heads.evaluation import SmallestSet
from needlework.heads.methods import Method, all_methods, find_methods
from needlework.heads.recurrent import RecurrentSide, recurrent_side
from needlework.heads.samples import NAMES, check_heads, draw_samples, measure_baseline, named_tasks
from needlework.heads.survey import ProgressSteps, Survey, SurveySettings, origin, rank_by, survey
from needlework.interventions.ranking import Ranking
from needlework.tasks.base import Task

if TYPE_CHECKING:
    from needlework.subject import Subject

Tasks = str | Path | Task | Sequence[Task]
ALL = "all"  # methods
CEILING, CEILING_HEADS = "greedy", 64  # greedy search over sets: an upper reference; by default for models of up to 64 heads


def tasks_of(task: Tasks, subject: Subject) -> list[Task]:
    """Return the tasks to rank heads on: `niah`, `recall`, given tasks, or the retrieval tasks of a plan."""
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
    kept = [task for task in tasks if task.ability == "retrieval" and task.mode == "generate"]
    if not kept:
        raise NeedleworkError(
            "no task here generates what stands in its prompt, so heads cannot be ranked by it; give --task niah or recall, or a"
            " plan with such a task (kinds niah, mqar, phone_book, copy)"
        )
    return kept


def check_methods(by: Sequence[str]) -> None:
    """Raise for unknown method names, before a model is loaded."""
    find_methods(name for name in by if name != ALL)


def methods_of(by: str | Sequence[str] | None, subject: Subject) -> list[Method]:
    """Return methods by name, or all; by default the cheap ones, plus greedy search for a small model."""
    names = [by] if isinstance(by, str) else list(by or ())
    if ALL in names:
        return list(all_methods().values())
    if names:
        return find_methods(names)
    small = len(subject.anatomy.heads) <= CEILING_HEADS
    return [m for m in all_methods().values() if m.kind in ("attention", "contribution") or (small and m.name == CEILING)]


def heads_of(
    subject: Subject,
    by: str | Sequence[str] | None = None,
    task: Tasks = "niah",
    settings: SurveySettings | None = None,
    *,
    files: Sequence[Path] = (),
    name: str = "",
    progress: bool = False,
) -> Survey:
    """Return the survey that `needlework heads` shows. `files` hold further rankings to evaluate with the computed ones."""
    methods = [] if files and not by else methods_of(by, subject)
    names = [*(method.name for method in methods), *(file.stem for file in files)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise NeedleworkError(f"two rankings are called {twice[0]!r}, after a method or a file; give a file another name")
    given = {file.stem: foreign.read(file, subject.anatomy) for file in files}
    return survey(subject, tasks_of(task, subject), methods, settings or SurveySettings(), given=given, name=name, shown=progress)


@contextmanager
def opened(model: str, cluster: Cluster | None, **loading: Any) -> Iterator[Subject]:
    """Open a model to rank heads of: loaded in this process, or on workers of a cluster."""
    if cluster is None:
        from needlework.subject import load

        yield load(model, **loading)
        return
    from needlework.experiments.remote import open_remote

    with open_remote(model, cluster, **loading) as subject:
        yield subject


def recurrent_side_of(subject: Subject, task: Tasks, samples: int, seed: int, progress: bool = False) -> RecurrentSide:
    """Return the analysis of `needlework heads --recurrent`, on the samples that heads would be ranked on."""
    drawn = draw_samples(subject, tasks_of(task, subject), samples, seed)
    with ProgressSteps(1, progress) as steps, steps.step("the recurrent side") as told:
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
    """Rank the model's attention heads from best to worst on `samples` samples of a retrieval task.

    The model without intervention must answer at least half of the samples.

    Returns:
        One ranking if `by` is the name of one method; a dict by method name for several methods or "all".
    """
    check_heads(subject)
    methods = methods_of(by, subject)
    drawn = draw_samples(subject, tasks_of(task, subject), samples, seed)
    with ProgressSteps(1 + len(methods), progress) as steps:
        with steps.step("asking the untouched model") as told:
            measure_baseline(subject, drawn, told)
        made, of = {}, origin(subject, name)
        for method in methods:
            with steps.step(f"ranking by {method.name}") as told:
                made[method.name], _ = rank_by(subject, method, drawn, seed, told, of)
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
    """Find the fewest heads that keep this share of retrieval accuracy with all other heads zeroed at every position.

    Heads are ranked by each method on `samples` samples. The ranking and the number of heads are selected on `held_out`
    other samples, and the selected set is evaluated on as many further samples.
    """
    settings = SurveySettings(samples, held_out, seed, keep, dynamic=False, retest=False, random_orders=0)
    found = survey(subject, tasks_of(task, subject), methods_of(by, subject), settings, shown=progress)
    assert found.smallest is not None
    return found.smallest
