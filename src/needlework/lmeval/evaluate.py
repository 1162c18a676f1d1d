"""Run lm-eval's tasks under several interventions (`needlework eval`), with the runner that also executes plans.

Multiple choice by letter needs the letter to be retrieved from the prompt in addition to the knowledge; a cloze does not.
With R the chance-corrected retained share, (R_cloze - R_letter) / (1 - R_letter) is the part of the loss in letter choice
that is not a loss of knowledge.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework import stats
from needlework.analysis.model_trials import Pairs
from needlework.anatomy import heads_of_share
from needlework.errors import NeedleworkError, did_you_mean
from needlework.experiments.models import CachedModels, ModelInfo
from needlework.experiments.plan import Experiment, InterventionText, Model, NamedTask, Plan
from needlework.experiments.ray_executor import Cluster, WorkerModels
from needlework.experiments.run import run
from needlework.experiments.schema import Loading
from needlework.files import file_name
from needlework.interventions import Intervention, parse
from needlework.lmeval import require_lm_eval
from needlework.lmeval.documents import (
    Document,
    LmEvalTask,
    PromptSettings,
    check_scoring,
    forget_responses,
    load_tasks,
    silence_lm_eval,
    stored_responses,
    tokenize_documents,
)
from needlework.model.files import first_line
from needlework.receipts import nothing_to_hide
from needlework.results import Row, Store
from needlework.results.export import write_files
from needlework.stats import NOTHING, Estimate
from needlework.tables import Table

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

EXPERIMENT = "ability"
BOOTSTRAPS = 100  # of lm-eval, for metrics without a closed-form error (f1, mcc); our intervals come from the store's rows
# The paper's preset: MMLU and GLUE with 0, 3, 4, 5 and 32 of 32 heads kept, and five examples.
PAPER_TASKS, PAPER_SHOTS = ("mmlu", "glue"), 5
PAPER_KEPT, PAPER_HEADS = (0, 3, 4, 5, 32), 32
# Presets of retrieval tasks in lm-eval, asked under the interventions that the claims are about.
PRESETS = {
    "babilong": ("babilong_longctx",),
    "fda": ("fda",),
    "swde": ("swde",),
    "squad-completion": ("squad_completion",),
}
PRESET_ACTS = (
    "none",
    "ablate_attention()",
    "ablate_attention(phase='prefill')",
    "ablate_attention(phase='decode')",
    "keep_heads(fraction=0.15)",
    "keep_heads(fraction=0.15, by='random')",
)
TOY_TASKS = ("mini-mmlu", "mini-mmlu-cloze", "mini_mmlu_lookup", "mini-glue")  # zero-shot: toy models saw no examples


BASELINE = "none"
NO_BASELINE = replace(NOTHING, why="no baseline: ask none, too")


@dataclass(frozen=True)
class Line:
    """Results of one task or group under one intervention."""

    name: str  # of the task or its outermost group
    intervention: str
    accuracy: Estimate
    raw: Estimate  # retained share of the baseline
    corrected: Estimate  # chance-corrected retained share


@dataclass(frozen=True)
class Summary:
    """The result of an evaluation."""

    lines: list[Line]
    lookups: dict[str, Estimate]  # by intervention: the part of the loss in letter choice that is due to the letter look-up
    files: list[Path]  # results.json of each intervention
    failed: int
    idle: list[str]  # interventions that masked nothing in any trial

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        lines = [
            {"task": line.name, "intervention": line.intervention}
            | {name: getattr(line, name).to_dict() for name in ("accuracy", "raw", "corrected")}
            for line in self.lines
        ]
        lookups = {text: part.to_dict() for text, part in self.lookups.items()}
        return {"lines": lines, "lookups": lookups, "files": list(map(str, self.files)), "failed": self.failed, "idle": self.idle}


def evaluate(
    model: str | Path,
    tasks: Sequence[str],
    interventions: Sequence[str],
    out: str | Path,
    *,
    data: str | Path | None = None,
    paper: bool = False,
    preset: str | None = None,
    length: str | None = None,
    limit: float | None = None,
    shots: int | None = None,
    chat: bool | None = None,
    memory_bytes: int | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    cluster: Cluster | None = None,
    **loading: Any,
) -> Summary:
    """Evaluate lm-eval tasks under each intervention; resumes an interrupted evaluation.

    Wrong arguments are reported before the model is loaded.

    Args:
        tasks: Names of lm-eval tasks or groups, or task files.
        interventions: Texts of interventions.
        out: Directory of the run; rows of other evaluations in it are kept.
        data: Directory with the tasks' datasets, for use without the Hugging Face hub.
        paper: Use the paper's preset: its numbers of heads, and its tasks and shots where none are given.
        preset: One of PRESETS: its tasks, and PRESET_ACTS as far as they apply to the model where no interventions are given.
        length: Length of the texts of BABILong, "0k" to "128k".
        limit: Number of questions per task, or a fraction of them.
        shots: Number of few-shot examples, instead of the task's own.
        chat: Use the chat template; by default only with `paper`, if the model has one.
        memory_bytes, retry_failed, progress, cluster: As in `nw.run`.
        loading: `device`, `dtype`, `window` and `kernels`, as in `nw.load`.

    Raises:
        NeedleworkError: Unknown tasks, missing data, or an intervention that does not apply to the model or to scoring.
    """
    require_lm_eval()
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise NeedleworkError(f"limit={limit} is no number of questions; give 1 or more, or a share of them such as 0.1")
    acts = [parse(text) for text in interventions]
    if preset is not None:
        if preset not in PRESETS:
            raise NeedleworkError(f"unknown preset {preset!r}; {did_you_mean(preset, PRESETS)}")
        tasks = [*PRESETS[preset], *tasks]
    if length and not any(name.startswith("babilong") for name in tasks):
        raise NeedleworkError(f"length={length}: only the tasks of BABILong have lengths; use --preset babilong")
    if not paper and not (tasks and (acts or preset)):
        raise NeedleworkError(
            "name at least one task and one intervention, e.g. --tasks mini-mmlu --intervene none; or --paper or --preset"
        )
    versions = {"lm_eval": version("lm_eval")}
    source = WorkerModels(memory_bytes, cluster, versions) if cluster else CachedModels(memory_bytes, versions)
    info = source.inspect(Model("eval", Path(str(model)).name, str(model), Loading().replace(**loading)))
    if paper:
        tasks, acts, shots = _apply_preset(info, tasks, acts, shots)
    if preset is not None and not acts:
        acts = [act for act in map(parse, PRESET_ACTS) if _applies(act, info)]
    for act in acts:
        act.check(info.anatomy)  # plans skip interventions that a model has no layers for; here it is an error
    loaded = load_tasks(tasks, None if data is None else Path(data), length)
    from needlework.lmeval.model import NeedleworkLM

    lm = NeedleworkLM(info.directory, **info.model.loading.model_dump())  # only encodes and decodes: the run loads the weights
    has_template = bool(getattr(info.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise NeedleworkError(f"{info.name} has no chat template; leave the chat option out")
    settings = PromptSettings(limit, shots, has_template and paper if chat is None else chat)
    from lm_eval import utils

    # lm-eval compiles its Jinja templates for each document, which takes longer than a small model's forward.
    utils.env.from_string = functools.lru_cache(maxsize=256)(utils.env.from_string)  # type: ignore[method-assign]
    with ExitStack() as stack:
        stack.callback(delattr, utils.env, "from_string")  # restores the class's method
        with silence_lm_eval():
            try:
                documents = tokenize_documents(loaded, lm, settings)
            except NeedleworkError:
                raise
            except (AssertionError, ValueError) as error:  # how lm-eval rejects shots, limits or templates
                raise NeedleworkError(f"lm-eval cannot put these questions: {first_line(error)}") from None
        if any(document.mode != "generate" for document in documents):
            for act in acts:
                check_scoring(act)
        texts = list(dict.fromkeys(map(str, acts)))
        plan = _make_plan(info, tasks, texts, documents, lm)
        run(plan, out, source=source, retry_failed=retry_failed, progress=progress, cluster=cluster)
        return _summarise(Path(out), info, texts, documents, loaded, settings)


def _applies(act: Intervention, info: ModelInfo) -> bool:
    with suppress(NeedleworkError):
        act.check(info.anatomy)
        return True
    return False


def _apply_preset(
    info: ModelInfo, tasks: Sequence[str], acts: Sequence[Intervention], shots: int | None
) -> tuple[Sequence[str], list[Intervention], int | None]:
    """Return tasks, interventions and shots of the paper's preset, its numbers of heads scaled to those of the model.

    Given tasks and shots win, given interventions are added.
    """
    from needlework.tasks.toy import is_toy

    heads = min((part.query_heads for _, part in info.anatomy.attention_parts()), default=0)
    if not heads:
        has = f"--paper keeps attention heads, and {info.anatomy.architecture} has none"
        raise NeedleworkError(f"{has}; name interventions yourself")
    kept = dict.fromkeys(heads_of_share(k / PAPER_HEADS, heads) for k in PAPER_KEPT)
    preset = [parse(text) for text in ("none", *(f"keep_heads(k={k})" for k in kept))]
    default_tasks, default_shots = (TOY_TASKS, 0) if is_toy(info.tokenizer) else (PAPER_TASKS, PAPER_SHOTS)
    return tasks or default_tasks, [*preset, *acts], default_shots if shots is None else shots


def _make_plan(
    info: ModelInfo, tasks: Sequence[str], texts: Sequence[str], documents: Sequence[Document], lm: NeedleworkLM
) -> Plan:
    """Return a plan whose tasks are lm-eval's; it adds rows to the directory instead of replacing its plan."""
    by_task: dict[str, list[Document]] = {}
    for document in documents:
        by_task.setdefault(document.task.task_name, []).append(document)
    experiment = Experiment(
        "eval",
        EXPERIMENT,
        "General ability: " + ", ".join(tasks),
        (info.name,),
        tuple(NamedTask("eval", name, LmEvalTask.of(group, lm, info.eos)) for name, group in by_task.items()),
        tuple(InterventionText("eval", text) for text in texts),
        (0,),
        "decode",
        None,
        None,
        False,
    )
    about = "General ability through lm-eval"
    return Plan(Path("eval"), "eval", about, "", {info.name: info.model}, (experiment,), adds=True)


def _summarise(
    folder: Path, info: ModelInfo, texts: Sequence[str], documents: Sequence[Document], loaded: Any, settings: PromptSettings
) -> Summary:
    """Read this evaluation's rows from the store, let lm-eval compute its results from them, and compute retained shares.

    The results under each intervention are written as `lm_eval --log_samples` writes them.
    """
    from lm_eval.evaluator import evaluate as lm_evaluate
    from lm_eval.utils import handle_non_serializable

    from needlework.lmeval.model import ReplayLM

    with closing(Store(folder)) as store:
        own = store.rows("asked AND experiment = ? AND model = ?", (EXPERIMENT, info.name))
        found = {(row.intervention, row.prompt_id): row for row in own}
    rows = {text: [found[text, document.digest] for document in documents] for text in texts}
    chat = {"apply_chat_template": settings.chat, "fewshot_as_multiturn": settings.chat}
    options: dict[str, Any] = {"limit": settings.limit, "bootstrap_iters": BOOTSTRAPS, **chat}
    files = []
    for text, answered in rows.items():
        answers: dict[int, Any] = {}
        for document, row in zip(documents, answered, strict=True):
            answers |= zip(map(id, document.instances), stored_responses(document, row), strict=True)
            forget_responses(document)
        with ExitStack() as stack, silence_lm_eval():
            for task in loaded["tasks"].values():  # keeps lm-eval from building the requests again for each intervention
                task.build_all_requests = lambda **_: None
                stack.callback(delattr, task, "build_all_requests")  # restores the class's method
            results: dict[str, Any] = lm_evaluate(lm=ReplayLM(answers), task_dict=loaded, log_samples=True, **options)
        config = {
            "model": "needlework",
            "model_args": {"pretrained": info.model.source, "intervention": text, "dtype": info.model.loading.dtype},
            "failed": sum(row.finish == "failed" for row in answered),
            **{f"{key}_sha": value for key, value in info.identity().items() if key in ("weights", "tokenizer")},
            **options,
        }
        samples = results.pop("samples")
        results |= {"config": config, "date": time.time()}
        files.append(write_files(folder / "lm-eval" / file_name(text), results, samples, handle_non_serializable)[0])
    homes = {name: name for name in loaded["tasks"]}
    children = {name for members in (loaded.get("group_map") or {}).values() for name in members}
    for name, group in (loaded.get("groups") or {}).items():
        if name not in children:  # an outermost group: its tasks are reported under its name
            homes |= {task.task_name: name for task in group.get_all_tasks()}
    kept = [row for answered in rows.values() for row in answered]
    return Summary(
        retained_lines(kept, homes),
        lookups(kept),
        files,
        failed=sum(row.finish == "failed" for row in kept),
        idle=[text for text, answered in rows.items() if all(nothing_to_hide(row.receipt) for row in answered)],
    )


# --- Retained shares, and the part of a loss that is due to the letter look-up ---


def retained_lines(trials: Sequence[Row], home: dict[str, str]) -> list[Line]:
    """Return accuracy and retained shares for every (name, intervention), paired with the baseline by question.

    Failed rows are left out. `home` has the name under which each task is reported.
    """
    scored: dict[tuple[str, str], dict[str, Row]] = {}
    for trial in trials:
        if trial.finish != "failed" and "correct" in trial.scores:
            scored.setdefault((home[trial.task], trial.intervention), {})[f"{trial.task}/{trial.prompt_id}"] = trial
    made = []
    for (name, text), after in scored.items():
        before = scored.get((name, BASELINE), {})
        both = [key for key in after if key in before]
        right, base = (np.asarray([rows[key].scores["correct"] for key in both]) for rows in (after, before))
        chance = float(np.mean([after[key].facts.get("chance", 0.0) for key in both])) if both else 0.0
        pairs = Pairs(right, base, np.asarray([after[key].cluster for key in both]), chance)
        shares = (pairs.raw, pairs.corrected) if both else (NO_BASELINE, NO_BASELINE)
        made.append(Line(name, text, stats.accuracy([t.scores["correct"] for t in after.values()]), *shares))
    return made


def lookups(trials: Sequence[Row]) -> dict[str, Estimate]:
    """Return the part due to the letter look-up for every intervention with letter and cloze questions on the same facts."""
    found: dict[tuple[str, str], dict[str, Row]] = {}  # (form, intervention) -> fact -> row
    for trial in trials:
        form = str(trial.facts.get("form"))
        if trial.finish != "failed":
            form = "cloze" if form in ("statement", "question") else form
            found.setdefault((form, trial.intervention), {})[trial.cluster] = trial
    parts = {}
    for text in (text for form, text in found if form == "letter" and text != BASELINE):
        columns = [found.get(key, {}) for key in product(("letter", "cloze"), (text, BASELINE))]
        if all(columns):
            parts[text] = _lookup_part(columns)
    return parts


def _lookup_part(columns: Sequence[dict[str, Row]]) -> Estimate:
    """Estimate (R_cloze - R_letter) / (1 - R_letter), where letter choice lost something, with a bootstrap over facts.

    Args:
        columns: Fact -> row, of letter after, letter before, cloze after, cloze before.
    """
    facts = sorted(set.intersection(*(set(column) for column in columns)))
    if not facts:
        return NOTHING
    values = np.asarray([[column[fact].scores["correct"] for fact in facts] for column in columns])
    chance = np.asarray([[column[fact].facts.get("chance", 0.0) for fact in facts] for column in columns]).mean(1)
    totals = stats.resample(stats.cluster_sums(facts, list(values)))
    above = np.vstack([values.mean(1), totals[:, :4] / totals[:, 4:]]) - chance  # [1 + draws, 4]
    letter, cloze = (above[:, ::2] / np.where(above[:, 1::2] > 0, above[:, 1::2], np.nan)).T
    lost = np.where(letter < 1, 1 - letter, np.nan)
    value, shares = (cloze - letter)[0] / lost[0], ((cloze - letter) / lost)[1:]
    shares = shares[np.isfinite(shares)]
    if not math.isfinite(value) or not len(shares):
        return Estimate(math.nan, math.nan, math.nan, len(facts), "the letter lost nothing, or there was nothing to lose")
    return Estimate(float(value), *stats.interval(shares), len(facts))


def table(summary: Summary) -> Table:
    """Return a summary as a table."""
    shown = Table(("asked", "intervention", "right", "retained, raw", "retained, chance-corrected"), caption="general ability")
    for line in summary.lines:
        shown.add_row(line.name, line.intervention, line.accuracy.text(), line.raw.text(), line.corrected.text())
    for text, part in summary.lookups.items():
        shown.add_row("part of the letter's loss that is its look-up", text, "", "", part.text())
    return shown
