"""`nw.rank` and `nw.smallest_set`: rank the attention heads of a model, in this process or on the workers of a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError, short_repr
from needlework.experiments.models import Batch, BatchResult, Executor, ModelInfo
from needlework.experiments.plan import Model, get
from needlework.experiments.ray_executor import Cluster, WorkerModels
from needlework.experiments.schema import Loading
from needlework.heads import foreign
from needlework.heads.compare import HeadComparison, compare_subjects
from needlework.heads.evaluation import SmallestSet
from needlework.heads.methods import Method, all_methods, find_methods
from needlework.heads.recurrent import RecurrentSide, recurrent_side
from needlework.heads.samples import NAMES, draw_samples, named_tasks
from needlework.heads.survey import ProgressSteps, Survey, SurveySettings, survey
from needlework.interventions.ranking import Ranking
from needlework.measure import Progress, SampleFunction
from needlework.model.load import blueprint
from needlework.requests import Answer, Request, prepare
from needlework.subject import Subject
from needlework.subject import load as load_subject
from needlework.tasks.base import Task

Tasks = str | Path | Task | Sequence[Task]
ALL = "all"  # methods
METHOD = "needle_mass"  # that checkpoints are compared by
CEILING, CEILING_HEADS = "greedy", 64  # greedy search over sets: an upper reference; by default for models of up to 64 heads

BATCH_REQUESTS = 64  # at least, except in the last batch: all requests of a prompt are in one batch
BATCH_SAMPLES = 16
MOST_WORKERS = 4096  # in effect no limit: as many as the cluster has room for
T = TypeVar("T")


def tasks_of(task: Tasks, subject: Subject) -> list[Task]:
    """Return the tasks to rank heads on: `niah`, `recall`, given tasks, or the retrieval tasks of a plan."""
    if isinstance(task, (str, Path)) and str(task) in NAMES:
        return named_tasks(str(task), subject)
    if isinstance(task, (str, Path)):
        if not os.path.exists(task) and (near := get_close_matches(str(task), NAMES, n=1)):
            raise NeedleworkError(
                f"--task {short_repr(str(task))} is neither a plan nor niah or recall; did you mean {near[0]!r}?"
            )
        every = [named.task for experiment in get(task).experiments for named in experiment.tasks]
        tasks = list({(one.kind, one.model_dump_json()): one for one in every}.values())
    else:
        tasks = [task] if isinstance(task, Task) else list(task)
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
def open_subject(model: str, cluster: Cluster | None, **loading: Any) -> Iterator[Subject]:
    """Open a model to rank heads of: loaded in this process, or on workers of a cluster; `loading` as in `nw.load`."""
    if cluster is None:
        yield load_subject(model, **loading)
        return
    source = WorkerModels(None, cluster)
    info = source.inspect(Model("--ray", Path(model).name, model, Loading().replace(**loading)))
    with cluster.connected() as connection, connection(source, info, cluster.workers or MOST_WORKERS) as executor:
        yield RemoteSubject(info, executor)


def recurrent_side_of(subject: Subject, task: Tasks, samples: int, seed: int, progress: bool = False) -> RecurrentSide:
    """Return the analysis of `needlework heads --recurrent`, on the samples that heads would be ranked on."""
    drawn = draw_samples(subject, tasks_of(task, subject), samples, seed)
    with ProgressSteps(1, progress) as steps, steps.step("the recurrent side") as report_progress:
        return recurrent_side(subject, [sample.item for sample in drawn], seed=seed, progress=report_progress)


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
    settings = SurveySettings(samples, seed=seed, judge=False, dynamic=False, retest=False)
    made = survey(subject, tasks_of(task, subject), methods_of(by, subject), settings, name=name, shown=progress).rankings
    return made[by] if isinstance(by, str) and by in made else made


def compare_heads(
    first: Subject | str | Path,
    second: Subject | str | Path,
    by: str = METHOD,
    *,
    task: Tasks = "niah",
    samples: int = 60,
    held_out: int = 120,
    seed: int = 0,
    progress: bool = False,
    **loading: Any,
) -> HeadComparison:
    """Compare the heads of two checkpoints: which of the best were kept, lost or moved, and whether Q/K are the cause.

    Heads are scored on the same `samples` samples. Retrieval is measured on `held_out` others: of both checkpoints, and of the
    second one with the query and key maps of the first, in all attention layers and for the lost heads' groups.
    """
    (method,) = find_methods([by])
    a, b = (x if isinstance(x, Subject) else load_subject(x, **loading) for x in (first, second))
    names = tuple("" if isinstance(x, Subject) else Path(x).name for x in (first, second))
    how: dict[str, Any] = {"samples": samples, "held_out": held_out, "seed": seed, "names": names, "shown": progress}
    return compare_subjects(a, b, tasks_of(task, a), method, **how)


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
        return answer  # workers have added its text

    def map_samples(self, function: SampleFunction[T], samples: Sequence[Any], progress: Progress, whole: bool) -> list[T]:
        """Apply a function to slices of the samples, or to all at once: see `measure.map_samples`."""
        size = max(1, len(samples)) if whole else BATCH_SAMPLES
        slices = [samples[start : start + size] for start in range(0, max(1, len(samples)), size)]
        batches = [Batch(method="apply", args=(function, part)) for part in slices]
        values: dict[Batch, T] = {}
        for result in _results(self._executor, batches):
            if result.done:
                values[result.batch] = result.value
            running = sum(self._executor.share(batch) for batch in batches if batch not in values)
            progress((len(values) + running) / len(batches))
        return [values[batch] for batch in batches]


def _results(executor: Executor, batches: Sequence[Batch]) -> Iterator[BatchResult]:
    """Execute batches and yield their results; raise the first error."""
    with closing(executor.run(batches)) as results:
        for result in results:
            if result.error is not None:
                raise result.error
            yield result


class _RemoteEngine:
    """An engine that sends requests to workers. Batches depend on the requests alone, not on the number of workers."""

    def __init__(self, executor: Executor, anatomy: Anatomy) -> None:
        self.executor, self.anatomy = executor, anatomy

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        for request in requests:
            prepare(request, self.anatomy)  # raises for invalid requests before anything is sent
        indices = {Batch([requests[i] for i in some]): some for some in _slices(requests)}
        for result in _results(self.executor, list(indices)):
            for i, answer, _ in result.answers:
                yield indices[result.batch][i], answer


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
