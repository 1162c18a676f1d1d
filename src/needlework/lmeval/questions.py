"""Load lm-eval's tasks and datasets, and tokenize the requests of each document before a model is loaded.

Datasets come from the Hugging Face hub, or from a local directory (`--data DIR`):

    DIR/test/anatomy_test.csv                     the original MMLU archive: question, four options, letter; no header
    DIR/anatomy/test-00000-of-00001.parquet       a copy of the hub's repository: a directory per configuration

Any other dataset is found by the name in its task: DIR/nyu-mll/glue/cola/validation-*.parquet, or DIR/glue/cola/...
lm-eval is imported inside functions because that takes seconds.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions import Intervention
from needlework.lmeval.mini import FOLDER
from needlework.tasks.base import Mode

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a context and of its continuation
FEWSHOT_SEED = 1234  # lm-eval's default
MMLU = ("cais/mmlu", "hails/mmlu_no_train", "mmlu")
LETTERS = "ABCD"
_MODES: dict[str, Mode] = {"loglikelihood": "choices", "loglikelihood_rolling": "perplexity", "generate_until": "generate"}
_FORMS = {  # GLUE task -> form of question in reports
    "cola": "acceptability",
    "sst2": "acceptability",
    "rte": "entailment",
    "mnli": "entailment",
    "mnli_mismatch": "entailment",
    "qnli": "entailment",
    "wnli": "entailment",
    "mrpc": "paraphrase",
    "qqp": "paraphrase",
}
_CSV_SPLITS = {"dev": "dev", "validation": "val", "test": "test"}  # lm-eval's name -> the archive's name
_SPLIT_NAMES = {"val": "validation", "valid": "validation"}
_FORMATS = ("parquet", "jsonl", "json")


@dataclass(frozen=True)
class PromptSettings:
    """lm-eval's settings for building prompts."""

    limit: float | None = None  # number of questions per task, or a fraction
    shots: int | None = None  # number of few-shot examples; None: the task's own
    chat: bool = False  # use the chat template, with examples as earlier turns


@dataclass(frozen=True)
class Generation:
    """A tokenized generation request."""

    prompt: tuple[int, ...]
    until: tuple[str, ...]  # stop strings
    max_new_tokens: int


@dataclass
class Question:
    """One document of an lm-eval task with its tokenized requests."""

    task: Any  # lm-eval's task object
    doc_id: int
    instances: list[Any]  # lm-eval's requests
    mode: Mode
    pairs: list[list[Pair]] = field(default_factory=list)  # per request; a long text has several windows
    generations: list[Generation] = field(default_factory=list)

    @property
    def doc(self) -> dict[str, Any]:
        return self.instances[0].doc  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        return str(self.doc.get("name") or f"{self.task.task_name}/{self.doc_id}")

    def digest(self) -> str:
        """Hash the requests. Equal documents of one task get different digests, because lm-eval counts both."""
        asked = [self.task.task_name, self.doc_id, self.pairs, [vars(one) for one in self.generations]]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]

    def facts(self) -> dict[str, Any]:
        """Return the metadata for reports: subject, form, number of shots, options and chance level."""
        doc, task = self.doc, str(self.task.task_name)
        facts: dict[str, Any] = {"subject": str(doc.get("subject") or task), "shots": self.task.config.num_fewshot or 0}
        if self.mode != "choices":
            return facts
        options = [str(instance.args[1]).strip() for instance in self.instances]
        letters = all(len(option) == 1 and option.isalpha() for option in options)
        facts |= {"form": str(doc.get("form") or _FORMS.get(task) or ("letter" if letters else "cloze"))}
        if len(options) > 1:
            facts |= {"chance": 1 / len(options), "options": options}
        return facts

    def cluster(self) -> str:
        """Return the cluster for the bootstrap: all questions on one fact, whatever their form, share a cluster."""
        doc = self.doc
        if doc.get("key"):
            return f"{doc['subject']}/{doc['key']}"
        return f"{doc['subject']}/{self.doc_id}" if doc.get("subject") and not doc.get("name") else self.name


def check_phases(intervention: Intervention) -> None:
    """Raise NeedleworkError for interventions in decode only: scoring is all prefill, so they would do nothing."""
    for part in intervention.parts:
        if part.phase == "decode":
            raise NeedleworkError(
                f"{part} acts in decode only, but log-likelihoods are prefill at every position: use phase='prefill' or"
                " phase='both'"
            )
        if part.side == "memory":
            raise NeedleworkError(f"{part} swaps memory between prefill and decode; scoring has no decode")


@contextmanager
def silence_lm_eval() -> Iterator[None]:
    """Hide lm-eval's logging and progress bars; errors are still raised."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def cache_templates() -> Iterator[None]:
    """Cache compiled Jinja templates: lm-eval compiles them per document, which takes longer than a small model's forward."""
    from lm_eval import utils

    utils.env.from_string = functools.lru_cache(maxsize=256)(utils.env.from_string)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del utils.env.from_string  # restores the class's method


def load_tasks(names: Sequence[str], data: Path | None) -> Any:
    """Load lm-eval's tasks and groups with their datasets.

    Raises:
        NeedleworkError: An unknown name, or a dataset that cannot be loaded.
    """
    manager = _task_index(False)  # indexing lm-eval's own tasks takes seconds: only if one of them is requested
    if not all(manager.match_tasks([name]) or Path(name).is_file() for name in names):
        manager = _task_index(True)
    wanted: list[str] = []
    for name in names:
        matches = manager.match_tasks([name]) or ([name] if Path(name).is_file() else [])
        if not matches:
            near = did_you_mean(name, manager.all_tasks)  # lm-eval has thousands of tasks: never list them all
            listing = "`needlework lm-eval ls tasks` lists lm-eval's; ours are mini-mmlu and mini-glue"
            raise NeedleworkError(f"unknown task {name!r}; {near if near.startswith('did') else listing}")
        wanted += matches
    with use_local_data(data), silence_lm_eval():
        try:
            return manager.load(list(dict.fromkeys(wanted)))
        except NeedleworkError:
            raise
        except Exception as error:  # hub and loaders raise many types; all mean missing data
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            where = f"is not in {data} either" if data else "may lie on your disk: give its directory with --data DIR"
            raise NeedleworkError(f"the data of {', '.join(names)} cannot be had ({first}); it {where}") from None


@functools.cache
def _task_index(with_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(FOLDER), include_defaults=with_defaults)


def build_questions(loaded: Any, lm: NeedleworkLM, settings: PromptSettings) -> list[Question]:
    """Build and tokenize the requests of all documents, once for all interventions."""
    from lm_eval.evaluator_utils import get_sample_size

    questions: list[Question] = []
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if settings.shots is not None and own != 0:
            task.set_config(key="num_fewshot", value=settings.shots)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        task.build_all_requests(
            limit=get_sample_size(task, settings.limit),
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            chat_template=lm.apply_chat_template if settings.chat else None,
            tokenizer_name=lm.tokenizer_name if settings.chat else "",
        )
        questions += _questions_of_task(task, lm)
    for question in questions:
        if any(not continuation for windows in question.pairs for _, continuation in windows):
            raise NeedleworkError(
                f"{question.name}: an answer has no token of its own after its prompt, the tokenizer joins the two. lm-eval"
                " puts nothing between a chat template and an answer: the template must end with white space, or leave it out"
            )
    return questions


def _questions_of_task(task: Any, lm: NeedleworkLM) -> Iterator[Question]:
    by_doc: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_doc.setdefault(instance.doc_id, []).append(instance)
    scored = [i for i in task.instances if i.request_type == "loglikelihood"]
    pairs = dict(zip(map(id, scored), lm.encode_pairs(scored), strict=True)) if scored else {}
    for doc_id, instances in by_doc.items():
        instances.sort(key=lambda instance: instance.idx)
        question = Question(task, doc_id, instances, _MODES[instances[0].request_type])
        for instance in instances:
            if question.mode == "generate":
                question.generations.append(lm.encode_generation(*instance.args))
            else:
                rolling = question.mode == "perplexity"
                question.pairs.append(lm.rolling_pairs(instance.args[0]) if rolling else [pairs[id(instance)]])
        yield question


@contextmanager
def use_local_data(folder: Path | None) -> Iterator[None]:
    """Patch `datasets.load_dataset` to look for datasets in this directory first."""
    if folder is None:
        yield
        return
    if not folder.is_dir():
        raise NeedleworkError(f"--data {folder}: there is no such directory")
    import datasets

    stock = datasets.load_dataset

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        return find_dataset(folder, path, name) or stock(path, name, **options)

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = stock


def find_dataset(folder: Path, path: str, name: str | None) -> Any:
    """Read a dataset from a local directory by its hub path and configuration name; None if it is not there."""
    from datasets import DatasetDict, concatenate_datasets

    if path in MMLU and name and (archive := _read_mmlu_archive(folder, name)):
        return DatasetDict(archive)
    roots = [folder / path, folder / Path(path).name] + ([folder] if path in MMLU else [])
    for root in roots:
        for place in (root / (name or ""), root / "data" / (name or "")):
            if splits := _files_by_split(place):
                tables = {split: [_read_table(file) for file in files] for split, files in splits.items()}
                return DatasetDict({split: concatenate_datasets(parts) for split, parts in tables.items()})
    return None


def _read_mmlu_archive(folder: Path, subject: str) -> dict[str, Any]:
    """Read the splits of one subject from the original MMLU archive; empty if it is not there."""
    from datasets import Dataset

    splits: dict[str, Any] = {}
    for root in (folder, folder / "data", folder / "mmlu", folder / "mmlu" / "data"):
        for split, short in _CSV_SPLITS.items():
            file = root / short / f"{subject}_{short}.csv"
            if file.is_file() and split not in splits:
                splits[split] = Dataset.from_list(list(_read_mmlu_file(file, subject)))
    return splits


def _read_mmlu_file(file: Path, subject: str) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate((row for row in csv.reader(lines) if row), 1):
            letter = row[-1].strip()
            if len(row) != 6 or len(letter) != 1 or letter not in LETTERS:
                raise NeedleworkError(
                    f"{file}, question {number}: expected a question, four options and a letter A to D, got {row}"
                )
            yield {"question": row[0], "subject": subject, "choices": row[1:5], "answer": LETTERS.index(letter)}


def _files_by_split(place: Path) -> dict[str, list[Path]]:
    """Return a directory's files by split, e.g. test.parquet, test-00000-of-00002.parquet, test/anything.parquet."""
    for suffix in _FORMATS:
        files_of: dict[str, list[Path]] = {}
        for file in sorted(place.glob(f"*.{suffix}")):
            files_of.setdefault(file.stem.split("-")[0], []).append(file)
        for file in sorted(place.glob(f"*/*.{suffix}")) if not files_of else ():
            files_of.setdefault(file.parent.name, []).append(file)
        if files_of:
            return {_SPLIT_NAMES.get(split, split): files for split, files in files_of.items()}
    return {}


def _read_table(file: Path) -> Any:
    """Read one data file; unlike `load_dataset`, this does not copy it into a cache."""
    import pandas
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    try:
        if file.suffix == ".parquet":
            return Dataset(pyarrow.parquet.read_table(file))
        return Dataset.from_pandas(pandas.read_json(file, lines=file.suffix == ".jsonl"))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise NeedleworkError(f"{file} cannot be read: {error}") from None
