"""Run lm-eval's tasks under several interventions (`needlework eval`), with the runner that also executes plans."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.anatomy import Anatomy, heads_of_share
from needlework.errors import NeedleworkError
from needlework.experiments.models import LoadedModel, LoadedSubject, ModelInfo, ModelSource, look
from needlework.experiments.plan import Experiment, Grid, Model, NamedTask, Plan
from needlework.experiments.ray_executor import Cluster, WorkerModels
from needlework.experiments.run import run
from needlework.experiments.schema import Loading
from needlework.files import file_name
from needlework.interventions import Intervention, parse
from needlework.lmeval import require_lm_eval
from needlework.lmeval.documents import Documents, stored_responses
from needlework.lmeval.questions import (
    PromptSettings,
    Question,
    build_questions,
    cache_templates,
    check_phases,
    load_tasks,
    silence_lm_eval,
)
from needlework.lmeval.retained import Line, Lookup, lines, lookups
from needlework.model.files import first_line
from needlework.receipts import nothing_to_hide
from needlework.results import Row, Store
from needlework.results.export import write_files
from needlework.tables import Table

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

EXPERIMENT = "ability"
BOOTSTRAPS = 100  # of lm-eval, for metrics without a closed-form error (f1, mcc); our intervals come from the store's rows
# The paper's preset: MMLU and GLUE with 0, 3, 4, 5 and 32 of 32 heads kept, and five examples.
PAPER_TASKS, PAPER_SHOTS = ("mmlu", "glue"), 5
PAPER_KEPT, PAPER_HEADS = (0, 3, 4, 5, 32), 32
TOY_TASKS = ("mini-mmlu", "mini-mmlu-cloze", "mini_mmlu_lookup", "mini-glue")  # zero-shot: toy models saw no examples


@dataclass(frozen=True)
class Summary:
    """The result of an evaluation."""

    lines: list[Line]
    lookups: list[Lookup]
    files: list[Path]  # results.json of each intervention
    failed: int
    idle: list[str]  # interventions that masked nothing in any trial
    asked: int  # trials run now; the others were in the store


def evaluate(
    model: str | Path,
    tasks: Sequence[str],
    interventions: Sequence[str],
    out: str | Path,
    *,
    data: str | Path | None = None,
    paper: bool = False,
    limit: float | None = None,
    shots: int | None = None,
    chat: bool | None = None,
    device: str | None = None,
    dtype: Any = None,
    window: str | None = None,
    kernels: str | None = None,
    memory_bytes: int | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    cluster: Cluster | None = None,
) -> Summary:
    """Evaluate lm-eval tasks under each intervention; resumes an interrupted evaluation.

    Wrong arguments are reported before the model is loaded.

    Args:
        tasks: Names of lm-eval tasks or groups, or task files.
        interventions: Texts of interventions.
        out: Directory of the run; rows of other evaluations in it are kept.
        data: Directory with the tasks' datasets, for use without the Hugging Face hub.
        paper: Use the paper's preset: its numbers of heads, and its tasks and shots where none are given.
        limit: Number of questions per task, or a fraction of them.
        shots: Number of few-shot examples, instead of the task's own.
        chat: Use the chat template; by default only with `paper`, if the model has one.
        device, dtype, window, kernels: As in `nw.load`.
        cluster: As in `nw.run`.

    Raises:
        NeedleworkError: Unknown tasks, missing data, or an intervention that does not apply to the model or to scoring.
    """
    require_lm_eval()
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise NeedleworkError(f"limit={limit} is no number of questions; give 1 or more, or a share of them such as 0.1")
    acts = [parse(text) for text in interventions]
    for act in acts:
        check_phases(act)
    if not paper and not (tasks and acts):
        raise NeedleworkError("name at least one task and one intervention, e.g. --tasks mini-mmlu --intervene none; or --paper")
    loading = Loading().replace(device=device, dtype=dtype, window=window, kernels=kernels)
    info = look(Model("eval", Path(str(model)).name, str(model), loading), elsewhere=cluster is not None)
    if paper:
        tasks, acts, shots = _apply_preset(info, tasks, acts, shots)
    for act in acts:
        act.check(info.anatomy)  # plans skip interventions that a model has no layers for; here it is an error
    loaded = load_tasks(tasks, None if data is None else Path(data))
    from needlework.lmeval.model import NeedleworkLM

    lm = NeedleworkLM(info.directory, memory_bytes=memory_bytes, **info.model.loading.model_dump())
    settings = PromptSettings(limit, shots, _use_chat(info, chat, paper))
    with cache_templates():
        with silence_lm_eval():
            try:
                questions = build_questions(loaded, lm, settings)
            except NeedleworkError:
                raise
            except (AssertionError, ValueError) as error:  # how lm-eval rejects shots, limits or templates
                raise NeedleworkError(f"lm-eval cannot put these questions: {first_line(error)}") from None
        texts = list(dict.fromkeys(map(str, acts)))
        before = _stored_trials(out)
        source: ModelSource = _HarnessModels(info, lm, memory_bytes)
        if cluster is not None:
            source = WorkerModels(memory_bytes, cluster, _lm_eval_version())
        plan = _make_plan(info, tasks, texts, questions, lm)
        run(plan, out, source=source, retry_failed=retry_failed, progress=progress, cluster=cluster)
        return _summarise(Path(out), info, texts, questions, loaded, settings, before)


def _apply_preset(
    info: ModelInfo, tasks: Sequence[str], acts: Sequence[Intervention], shots: int | None
) -> tuple[Sequence[str], list[Intervention], int | None]:
    """Return tasks, interventions and shots of the paper's preset; given tasks and shots win, given interventions are added."""
    from needlework.tasks.toy import is_toy

    toy = is_toy(info.tokenizer)
    preset = [parse(text) for text in paper_interventions(info.anatomy)]
    default_shots = 0 if toy else PAPER_SHOTS
    return tasks or (TOY_TASKS if toy else PAPER_TASKS), [*preset, *acts], default_shots if shots is None else shots


def paper_interventions(anatomy: Anatomy) -> list[str]:
    """Return the paper's interventions: none, and 0, 3, 4, 5, 32 of 32 heads kept, scaled to the model's number of heads."""
    heads = min((part.query_heads for _, part in anatomy.attention_parts()), default=0)
    if not heads:
        raise NeedleworkError(f"--paper keeps attention heads, and {anatomy.architecture} has none; name interventions yourself")
    kept = dict.fromkeys(heads_of_share(k / PAPER_HEADS, heads) for k in PAPER_KEPT)
    return ["none", *(f"keep_heads(k={k})" for k in kept)]


def _use_chat(info: ModelInfo, chat: bool | None, paper: bool) -> bool:
    has_template = bool(getattr(info.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise NeedleworkError(f"{info.name} has no chat template; leave the chat option out")
    return has_template and paper if chat is None else chat


def _make_plan(
    info: ModelInfo, tasks: Sequence[str], texts: Sequence[str], questions: Sequence[Question], lm: NeedleworkLM
) -> Plan:
    """Return a plan whose tasks are lm-eval's; it adds rows to the directory instead of replacing its plan."""
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task.task_name, []).append(question)
    experiment = Experiment(
        "eval",
        EXPERIMENT,
        "General ability: " + ", ".join(tasks),
        (info.name,),
        tuple(NamedTask("eval", name, Documents.of(group, lm, info.eos)) for name, group in by_task.items()),
        tuple(Grid("eval", text) for text in texts),
        (0,),
        "decode",
        None,
        None,
        False,
    )
    about = "General ability through lm-eval"
    return Plan(Path("eval"), "eval", about, "", {info.name: info.model}, (experiment,), adds=True)


@dataclass
class _HarnessModels:
    """Model source of an evaluation: its single model, loaded through NeedleworkLM."""

    info: ModelInfo
    lm: NeedleworkLM
    memory_bytes: int | None

    def look(self, model: Model) -> ModelInfo:
        return self.info

    def load(self, info: ModelInfo) -> LoadedModel:
        return _HarnessModel(self.lm.subject, info.model)


class _HarnessModel(LoadedSubject):
    def versions(self) -> dict[str, str]:
        return {**super().versions(), **_lm_eval_version()}


def _lm_eval_version() -> dict[str, str]:
    return {"lm_eval": version("lm_eval")}


def _stored_trials(out: str | Path) -> set[tuple[str, str, str, str]]:
    """Return the keys of the trials in a directory; empty if it has no readable store."""
    try:
        store = Store(out)
    except NeedleworkError:
        return set()
    try:
        return set(store.done())
    finally:
        store.close()


def _summarise(
    folder: Path,
    info: ModelInfo,
    texts: Sequence[str],
    questions: Sequence[Question],
    loaded: Any,
    settings: PromptSettings,
    before: set[Any],
) -> Summary:
    """Read this evaluation's rows from the store, write lm-eval's result files and compute retained shares."""
    store = Store(folder)
    try:
        own = store.rows("asked AND experiment = ? AND model = ?", (EXPERIMENT, info.name))
        found = {(row.intervention, row.prompt_id): row for row in own}
    finally:
        store.close()
    rows = {text: [found[text, question.digest()] for question in questions] for text in texts}
    files = []
    for text, answered in rows.items():
        with silence_lm_eval():
            results = _compute_results(loaded, questions, answered, settings)
        files.append(_write_results(folder, results, info, text, answered, settings))
    kept = [row for answered in rows.values() for row in answered]
    return Summary(
        lines(kept, _outermost_groups(loaded)),
        lookups(kept),
        files,
        failed=sum(row.finish == "failed" for row in kept),
        idle=[text for text, answered in rows.items() if all(nothing_to_hide(row.receipt) for row in answered)],
        asked=len({(row.experiment, row.model, row.task, row.id) for row in kept} - before),
    )


def _compute_results(loaded: Any, questions: Sequence[Question], rows: Sequence[Row], settings: PromptSettings) -> dict[str, Any]:
    """Compute lm-eval's results from the stored answers under one intervention."""
    from lm_eval.evaluator import evaluate as lm_evaluate

    from needlework.lmeval.model import ReplayLM

    answers: dict[int, Any] = {}
    for question, row in zip(questions, rows, strict=True):
        answers |= zip(map(id, question.instances), stored_responses(question, row), strict=True)
        for instance in question.instances:
            instance.resps, instance.filtered_resps = [], {}
    with _keep_requests(loaded["tasks"].values()):
        results: dict[str, Any] = lm_evaluate(
            lm=ReplayLM(answers),
            task_dict=loaded,
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=True,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
        )
    return results


@contextmanager
def _keep_requests(tasks: Any) -> Iterator[None]:
    """Prevent lm-eval from rebuilding the tasks' requests, which are built once for all interventions."""
    with ExitStack() as stack:
        for task in tasks:
            task.build_all_requests = lambda **_: None
            stack.callback(delattr, task, "build_all_requests")  # restores the class's method
        yield


def _write_results(
    out: Path, results: dict[str, Any], info: ModelInfo, text: str, rows: Sequence[Row], settings: PromptSettings
) -> Path:
    """Write results.json and samples_TASK.jsonl of one intervention in the format of `lm_eval --log_samples`."""
    from lm_eval.utils import handle_non_serializable

    config = {
        "model": "needlework",
        "model_args": {"pretrained": info.model.source, "intervention": text, "dtype": info.model.loading.dtype},
        "failed": sum(row.finish == "failed" for row in rows),
        **{f"{key}_sha": value for key, value in info.identity().items() if key in ("weights", "tokenizer")},
        "limit": settings.limit,
        "bootstrap_iters": BOOTSTRAPS,
        "apply_chat_template": settings.chat,
        "fewshot_as_multiturn": settings.chat,
    }
    samples = results.pop("samples")
    results |= {"config": config, "date": time.time()}
    return write_files(out / "lm-eval" / file_name(text), results, samples, handle_non_serializable)[0]


def _outermost_groups(loaded: Any) -> dict[str, str]:
    """Return for every task its outermost group, or its own name if it has none."""
    groups, children = loaded.get("groups") or {}, set()
    for members in (loaded.get("group_map") or {}).values():
        children |= set(members)
    homes = {name: name for name in loaded["tasks"]}
    for name, group in groups.items():
        if name not in children:
            homes |= {task.task_name: name for task in group.get_all_tasks()}
    return homes


def table(summary: Summary) -> Table:
    """Return a summary as a table."""
    shown = Table(("asked", "intervention", "right", "retained, raw", "retained, chance-corrected"), caption="general ability")
    for line in summary.lines:
        shown.add_row(line.name, line.intervention, line.accuracy.text(), line.raw.text(), line.corrected.text())
    for one in summary.lookups:
        shown.add_row("part of the letter's loss that is its look-up", one.intervention, "", "", one.part.text())
    return shown
