"""`needlework eval`: lm-eval's tasks under several interventions, asked by the runner that asks plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.errors import NeedleworkError
from needlework.experiments.cluster import Cluster, WorkerModels
from needlework.experiments.models import LoadedModel, LoadedSubject, ModelInfo, ModelSource, look
from needlework.experiments.plan import Experiment, Grid, Model, NamedTask, Plan
from needlework.experiments.run import run
from needlework.experiments.schema import Loading
from needlework.interventions import Intervention, parse
from needlework.lmeval import demand_lm_eval
from needlework.lmeval import paper as preset
from needlework.lmeval.arguments import check_phases
from needlework.lmeval.documents import Documents, stored_responses
from needlework.lmeval.questions import Question, Shown, build, find_tasks, quiet, templates_once
from needlework.lmeval.retained import Line, Lookup, lines, lookups
from needlework.model.files import first_line
from needlework.receipts import nothing_to_hide
from needlework.store import Row, Store
from needlework.terminal import Sheet, plain

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

EXPERIMENT = "ability"


@dataclass(frozen=True)
class Summary:
    """What an evaluation found."""

    lines: list[Line]
    lookups: list[Lookup]
    files: list[Path]  # results.json of each intervention
    failed: int
    idle: list[str]  # interventions that hid nothing in any of their trials
    asked: int  # questions under an intervention that were asked now; the rest was there


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
    """Ask everything, or what a stopped evaluation left. Whatever is wrong is said before the model is loaded.

    `device`, `dtype`, `window` and `kernels` are as in `nw.load`, `cluster` as in `nw.run`.
    """
    demand_lm_eval()
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise NeedleworkError(f"limit={limit} is no number of questions; give 1 or more, or a share of them such as 0.1")
    acts = [parse(text) for text in interventions]
    for act in acts:
        check_phases(act)
    if not paper and not (tasks and acts):
        raise NeedleworkError("name at least one task and one intervention, e.g. --tasks mini-mmlu --intervene none; or --paper")
    loading = Loading().but(device=device, dtype=dtype, window=window, kernels=kernels)
    info = look(Model("eval", Path(str(model)).name, str(model), loading), elsewhere=cluster is not None)
    if paper:
        tasks, acts, shots = _paper(info, tasks, acts, shots)
    for act in acts:
        act.check(info.anatomy)  # a plan leaves out what a model has no parts for; here it was asked for by name
    loaded = find_tasks(tasks, None if data is None else Path(data))
    from needlework.lmeval.model import NeedleworkLM

    lm = NeedleworkLM(info.directory, memory_bytes=memory_bytes, **info.model.loading.model_dump())
    has_template = bool(getattr(info.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise NeedleworkError(f"{info.name} has no chat template; leave the chat option out")
    use_chat = has_template and paper if chat is None else chat
    shown = Shown(limit, shots, use_chat, use_chat)
    with templates_once():
        with quiet():
            try:
                questions = build(loaded, lm, shown)
            except (AssertionError, ValueError) as error:  # lm-eval's ways of refusing a number of shots, a limit, a template
                raise NeedleworkError(f"lm-eval cannot put these questions: {first_line(error)}") from None
        _check(questions)
        plan = _plan(info, tasks, list(dict.fromkeys(map(str, acts))), questions, lm)
        before = _answered(out)
        source: ModelSource = _HarnessModels(info, lm, memory_bytes)
        if cluster is not None:
            source = WorkerModels(memory_bytes, cluster, _lm_eval())
        run(plan, out, source=source, retry_failed=retry_failed, progress=progress, cluster=cluster)
        return _summary(Path(out), plan, info, questions, loaded, shown, before)


def _paper(
    info: ModelInfo, tasks: Sequence[str], acts: Sequence[Intervention], shots: int | None
) -> tuple[Sequence[str], list[Intervention], int | None]:
    from needlework.tasks.toy import is_toy

    toy = is_toy(info.tokenizer)
    texts = preset.interventions(info.anatomy)
    return (
        tasks or (preset.TOY_TASKS if toy else preset.TASKS),
        [*(parse(text) for text in texts), *acts],
        (0 if toy else preset.SHOTS) if shots is None else shots,
    )


def _check(questions: Sequence[Question]) -> None:
    for question in questions:
        if any(not continuation for windows in question.pairs for _, continuation in windows):
            raise NeedleworkError(
                f"{question.name}: an answer has no token of its own after its prompt, the tokenizer joins the two. lm-eval"
                " puts nothing between a chat template and an answer: the template must end with white space, or leave it out"
            )


def _plan(info: ModelInfo, tasks: Sequence[str], acts: Sequence[str], questions: Sequence[Question], lm: NeedleworkLM) -> Plan:
    """A plan like any other, whose tasks are lm-eval's. It adds to what the directory holds."""
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task.task_name, []).append(question)
    named = [NamedTask("eval", name, Documents.of(group, lm, info.eos)) for name, group in by_task.items()]
    experiment = Experiment(
        "eval",
        EXPERIMENT,
        "General ability: " + ", ".join(tasks),
        (info.name,),
        tuple(named),
        tuple(Grid("eval", text) for text in acts),
        (0,),
        "decode",
        None,
        None,
        False,
    )
    about = "General ability through lm-eval"
    return Plan(Path("eval"), "eval", about, "", {info.name: info.model}, (experiment,), adds=True)


class _HarnessModels:
    """The one model of an evaluation, loaded where lm-eval's rules for it are."""

    def __init__(self, info: ModelInfo, lm: NeedleworkLM, memory_bytes: int | None) -> None:
        self.info, self.lm, self.memory_bytes = info, lm, memory_bytes

    def look(self, model: Model) -> ModelInfo:
        return self.info

    def load(self, info: ModelInfo) -> LoadedModel:
        return _HarnessModel(self.lm.subject, info.model)


class _HarnessModel(LoadedSubject):
    def versions(self) -> dict[str, str]:
        return {**super().versions(), **_lm_eval()}


def _lm_eval() -> dict[str, str]:
    return {"lm_eval": version("lm_eval")}


def _answered(out: str | Path) -> set[tuple[str, str, str, str]]:
    try:
        store = Store(out)
    except NeedleworkError:  # nothing there yet, or nothing that can be read: the run will say so
        return set()
    try:
        return set(store.done())
    finally:
        store.close()


def _summary(
    folder: Path, plan: Plan, info: ModelInfo, questions: Sequence[Question], loaded: Any, shown: Shown, before: set[Any]
) -> Summary:
    texts = [grid.text for grid in plan.experiments[0].grids]
    wanted = {question.digest() for question in questions}
    store = Store(folder)
    try:
        own = store.rows("asked AND experiment = ? AND model = ?", (EXPERIMENT, info.name))
        rows = {(row.prompt_id, row.intervention): row for row in own if row.prompt_id in wanted and row.intervention in texts}
    finally:
        store.close()
    files = [_write_files(folder, info, text, questions, rows, loaded, shown) for text in texts]
    asked = sum((row.experiment, row.model, row.task, row.id) not in before for row in rows.values())
    kept = [rows[question.digest(), text] for text in texts for question in questions]
    failed = sum(row.finish == "failed" for row in kept)
    idle = [text for text in texts if all(nothing_to_hide(row.receipt) for row in kept if row.intervention == text)]
    return Summary(lines(kept, _groups(loaded)), lookups(kept), files, failed, idle, asked)


def _write_files(
    folder: Path,
    info: ModelInfo,
    text: str,
    questions: Sequence[Question],
    rows: dict[tuple[str, str], Row],
    loaded: Any,
    shown: Shown,
) -> Path:
    """lm-eval's result files of one intervention."""
    from needlework.lmeval import results

    own = [rows[question.digest(), text] for question in questions]
    answers: dict[int, Any] = {}
    for question, row in zip(questions, own, strict=True):
        answers |= zip(map(id, question.instances), stored_responses(question, row), strict=True)
    about = {
        "pretrained": info.model.source,
        "intervention": text,
        "dtype": info.model.loading.dtype,
        "failed": sum(row.finish == "failed" for row in own),
        **{f"{key}_sha": value for key, value in info.identity().items() if key in ("weights", "tokenizer")},
    }
    with quiet():
        aggregated = results.aggregate(loaded, questions, answers, shown)
    return results.write(results.place(folder, text), aggregated, about, shown)


def _groups(loaded: Any) -> dict[str, str]:
    """The outermost group of every task, or the task itself."""
    groups, children = loaded.get("groups") or {}, set()
    for members in (loaded.get("group_map") or {}).values():
        children |= set(members)
    homes = {name: name for name in loaded["tasks"]}
    for name, group in groups.items():
        if name not in children:
            homes |= {task.task_name: name for task in group.get_all_tasks()}
    return homes


def table(summary: Summary) -> Any:
    """The summary for a terminal."""
    from rich.text import Text

    columns = ("asked", "intervention", "right", "retained, raw", "retained, chance-corrected")
    shown = Sheet(columns, "general ability", words=columns)
    for line in summary.lines:
        names = Text(plain(line.name)), Text(plain(line.intervention))
        shown.add_row(*names, line.accuracy.text(), line.raw.text(), line.corrected.text())
    for one in summary.lookups:
        shown.add_row("part of the letter's loss that is its look-up", Text(plain(one.intervention)), "", "", one.part.text())
    return shown
