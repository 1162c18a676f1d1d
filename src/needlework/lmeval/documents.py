"""lm-eval's documents as samples: load tasks and datasets, tokenize requests before a model is loaded, and score answers.

Datasets come from the Hugging Face hub, or from a local directory (`--data DIR`):

    DIR/test/anatomy_test.csv                     the original MMLU archive: question, four options, letter; no header
    DIR/anatomy/test-00000-of-00001.parquet       a copy of the hub's repository: a directory per configuration

Any other dataset is found by the name in its task: DIR/nyu-mll/glue/cola/validation-*.parquet, or DIR/glue/cola/...
Files of the configuration "default" may also lie in DIR/NAME/data or DIR/NAME.
lm-eval is imported inside functions because that takes seconds.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import PrivateAttr

from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions import Intervention
from needlework.lmeval import FOLDER
from needlework.model.files import first_line
from needlework.model.mixers import replaced_value
from needlework.requests import Answer, Request, check_phases, stop_tokens
from needlework.results import LM_EVAL, Row
from needlework.tasks.base import Ability, Item, Mode, Task, Tokenizer

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of a context and of its continuation
FEWSHOT_SEED = 1234  # lm-eval's default
MMLU = ("cais/mmlu", "hails/mmlu_no_train", "mmlu")
LETTERS = "ABCD"
_MODES: dict[str, Mode] = {"loglikelihood": "choices", "loglikelihood_rolling": "perplexity", "generate_until": "generate"}
_ABILITIES: dict[Mode, Ability] = {"choices": "knowledge", "perplexity": "perplexity", "generate": ""}
RETRIEVAL = ("babilong_qa", "fda", "swde", "squad_completion")  # first words of tasks that ask for something in the prompt
_NO_RESPONSE: dict[Mode, Any] = {"choices": (-math.inf, False), "perplexity": -math.inf, "generate": ""}
_FORMS = {  # GLUE task -> form of question in reports
    **dict.fromkeys(("cola", "sst2"), "acceptability"),
    **dict.fromkeys(("rte", "mnli", "mnli_mismatch", "qnli", "wnli"), "entailment"),
    **dict.fromkeys(("mrpc", "qqp"), "paraphrase"),
}
_CSV_SPLITS = {"dev": "dev", "validation": "val", "test": "test"}  # lm-eval's name -> the archive's name
_SPLIT_NAMES = {"val": "validation", "valid": "validation"}


# --- Tasks and their datasets ---


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


def load_tasks(names: Sequence[str], data: Path | None, length: str | None = None) -> Any:
    """Load lm-eval's tasks and groups (by names or files) with their datasets, from `data` or from the hub and its cache.

    `length` is that of the texts of tasks that have several (BABILong: "0k" to "128k").
    """
    for with_defaults in (False, True):  # indexing lm-eval's own tasks takes seconds: only if one of them is requested
        manager = _task_index(with_defaults, length)
        matches = {name: manager.match_tasks([name]) or [name] * Path(name).is_file() for name in names}
        if all(matches.values()):
            break
    for name in (name for name, found in matches.items() if not found):
        near = did_you_mean(name, manager.all_tasks)  # lm-eval has thousands of tasks: never list them all
        listing = "`needlework lm-eval ls tasks` lists lm-eval's; ours are mini-mmlu and mini-glue"
        raise NeedleworkError(f"unknown task {name!r}; {near if near.startswith('did') else listing}")
    with use_local_data(data), silence_lm_eval():
        try:
            return manager.load(list(dict.fromkeys(task for found in matches.values() for task in found)))
        except NeedleworkError:
            raise
        except Exception as error:  # hub and loaders raise many types; all mean missing data
            raise NeedleworkError(f"{', '.join(names)} cannot be loaded ({first_line(error)})") from None


@functools.cache
def _task_index(with_defaults: bool, length: str | None = None) -> Any:
    import lm_eval.tasks

    near = [Path(lm_eval.tasks.__file__).parent / name.removesuffix("_qa") for name in RETRIEVAL]  # without all others
    about: Any = {"max_seq_lengths": length} if length else None
    paths = [FOLDER, *([] if with_defaults else near)]
    return lm_eval.tasks.TaskManager(include_path=paths, include_defaults=with_defaults, metadata=about)


def use_local_data(folder: Path | None) -> AbstractContextManager[None]:
    """Patch `datasets.load_dataset` to look for datasets in this directory first, and to say how to get what cannot be had."""
    if folder is not None and not folder.is_dir():
        raise NeedleworkError(f"--data {folder}: there is no such directory")
    import datasets

    stock = datasets.load_dataset

    def load(path: str, name: str | None = None, split: str | None = None, **options: Any) -> Any:
        found = find_dataset(folder, path, name) if folder else None
        if found is not None and split is not None and split not in found:
            raise NeedleworkError(f"--data {folder}: {path} has no {split!r} (it has {', '.join(found)})")
        if found is not None:
            return found if split is None else found[split]
        try:
            return stock(path, name, split=split, **options)
        except Exception as error:  # hub and loaders raise many types; all mean missing data
            where = f"it is not in {folder} either" if folder else "if it is on your disk, give its directory with --data DIR"
            get = f"`hf download {path} --repo-type dataset --local-dir DIR/{Path(path).name}`, then --data DIR"
            wanted = f"{path} ({name})" if name else path
            raise NeedleworkError(
                f"the dataset {wanted} cannot be loaded ({first_line(error)}); {where}. To get it where there is a network: {get}"
            ) from None

    return replaced_value(vars(datasets), "load_dataset", load)


def find_dataset(folder: Path, path: str, name: str | None) -> Any:
    """Read a dataset from a local directory by its hub path and configuration name; None if it is not there."""
    from datasets import Dataset, DatasetDict, concatenate_datasets

    if path in MMLU and name:
        places, archive = [folder / place for place in ("", "data", "mmlu", "mmlu/data")], dict[str, Path]()
        for root, (split, short) in product(places, _CSV_SPLITS.items()):
            if (file := root / short / f"{name}_{short}.csv").is_file():
                archive.setdefault(split, file)
        if archive:
            return DatasetDict({split: Dataset.from_list(_read_mmlu_file(file, name)) for split, file in archive.items()})
    roots = [folder / path, folder / Path(path).name] + ([folder] if path in MMLU else [])
    for root in roots:
        for place in (root / (name or ""), root / "data" / (name or ""), *[root / "data", root] * (name == "default")):
            if splits := _files_by_split(place):
                tables = {split: [_read_table(file) for file in files] for split, files in splits.items()}
                return DatasetDict({split: concatenate_datasets(parts) for split, parts in tables.items()})
    return None


def _read_mmlu_file(file: Path, subject: str) -> list[dict[str, Any]]:
    """Read one split of one subject from the original MMLU archive."""
    docs = []
    with file.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate((row for row in csv.reader(lines) if row), 1):
            letter = row[-1].strip()
            if len(row) != 6 or len(letter) != 1 or letter not in LETTERS:
                raise NeedleworkError(
                    f"{file}, question {number}: expected a question, four options and a letter A to D, got {row}"
                )
            docs.append({"question": row[0], "subject": subject, "choices": row[1:5], "answer": LETTERS.index(letter)})
    return docs


def _files_by_split(place: Path) -> dict[str, list[Path]]:
    """Return a directory's files by split, e.g. test.parquet, test-00000-of-00002.parquet, test/anything.parquet."""
    for suffix in ("parquet", "jsonl", "json"):
        named = [(file.stem.split("-")[0], file) for file in sorted(place.glob(f"*.{suffix}"))]
        named = named or [(file.parent.name, file) for file in sorted(place.glob(f"*/*.{suffix}"))]
        splits: dict[str, list[Path]] = {}
        for split, file in named:
            splits.setdefault(_SPLIT_NAMES.get(split, split), []).append(file)
        if splits:
            return splits
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


# --- Documents and their tokenized requests ---


def check_scoring(intervention: Intervention) -> None:
    """Raise NeedleworkError for interventions in decode only: scoring is all prefill, so they would do nothing."""
    check_phases(Request((0, 0), intervention, options=((0,),)))


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
class Document:
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

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the requests. Equal documents of one task get different digests, because lm-eval counts both."""
        asked = [self.task.task_name, self.doc_id, self.pairs, [vars(one) for one in self.generations]]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The metadata for reports: subject, form, number of shots, options and chance level."""
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
        """Return the cluster for the bootstrap: questions on one fact, whatever their form, or on one text share a cluster."""
        doc = self.doc
        if doc.get("key") and doc.get("subject"):
            return f"{doc['subject']}/{doc['key']}"
        if text := doc.get("doc_id") or doc.get("file_name"):  # FDA and SWDE ask several questions about each text
            return f"{self.task.task_name}/{text}"
        return f"{doc['subject']}/{self.doc_id}" if doc.get("subject") and not doc.get("name") else self.name

    def prompts(self) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
        """Return (prompt, options) in tokens, in the order of lm-eval's requests; requests with one common prompt are merged."""
        pairs = [pair for windows in self.pairs for pair in windows]
        if len({context for context, _ in pairs}) == 1:
            return [(pairs[0][0], tuple(continuation for _, continuation in pairs))]
        return [(one.prompt, ()) for one in self.generations] or [(context, (answer,)) for context, answer in pairs]


def tokenize_documents(loaded: Any, lm: NeedleworkLM, settings: PromptSettings) -> list[Document]:
    """Build and tokenize the requests of all documents, once for all interventions."""
    from lm_eval.evaluator_utils import get_sample_size

    documents: list[Document] = []
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (settings.shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=settings.shots or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        task.build_all_requests(
            limit=get_sample_size(task, settings.limit),
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            chat_template=lm.apply_chat_template if settings.chat else None,
            tokenizer_name=lm.tokenizer_name if settings.chat else "",
        )
        ordered = sorted(task.instances, key=lambda instance: (instance.doc_id, instance.idx))
        for doc_id, instances in groupby(ordered, lambda instance: instance.doc_id):
            document = Document(task, doc_id, list(instances), _MODES[task.instances[0].request_type])
            for instance in document.instances:
                if document.mode == "generate":
                    document.generations.append(lm.encode_generation(*instance.args))
                else:
                    scored = document.mode == "choices"
                    document.pairs.append(lm.encode_pairs([instance]) if scored else lm.rolling_pairs(instance.args[0]))
            documents.append(document)
    for document in documents:
        if any(not continuation for windows in document.pairs for _, continuation in windows):
            raise NeedleworkError(
                f"{document.name}: an answer has no token of its own after its prompt, the tokenizer joins the two. lm-eval"
                " puts nothing between a chat template and an answer: the template must end with white space, or leave it out"
            )
    return documents


# --- The documents as a task, so that plans' runner executes them ---


class LmEvalTask(Task):
    """The documents of one lm-eval task, which have one mode: documents are samples, lm-eval's metrics are scores."""

    kind = LM_EVAL
    task: str  # name of the lm-eval task
    _documents: dict[str, Document] = PrivateAttr()  # by digest
    _lm: Any = PrivateAttr()
    _eos: frozenset[int] = PrivateAttr()

    @classmethod
    def of(cls, documents: Sequence[Document], lm: NeedleworkLM, eos: frozenset[int]) -> LmEvalTask:
        made = cls(task=documents[0].task.task_name)
        made._documents = {document.digest: document for document in documents}
        made._lm, made._eos = lm, eos
        return made

    @property
    def mode(self) -> Mode:  # type: ignore[override]
        return next(iter(self._documents.values())).mode

    @property
    def ability(self) -> Ability:  # type: ignore[override]
        return "retrieval" if self.task.startswith(RETRIEVAL) else _ABILITIES[self.mode]

    @property
    def chance(self) -> float:
        return float(next(iter(self._documents.values())).facts.get("chance", 0.0))

    def items(self, tokenizer: Tokenizer, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        for digest, document in self._documents.items():
            target, answer, ending = document.task.doc_to_target(document.doc), None, None
            options = document.facts.get("options", ())
            if document.mode == "choices" and isinstance(target, int) and 0 <= target < len(options):
                answer, target = target, options[target]
            if document.mode == "generate":
                asked = document.generations[0]
                ending = (asked.max_new_tokens, stop_tokens(self._eos, self._lm.tokens_with(asked.until)))
            (prompt, choices), *others = document.prompts()
            yield Item(
                id=document.name,
                cluster=document.cluster(),
                prompt=prompt,
                prompt_text=str(document.instances[0].args[0]),
                target=str(target),
                options=choices,
                answer=answer,
                facts=document.facts,
                ending=ending,
                stem=document.task.task_name if document.task.config.num_fewshot else "",
                digest=digest,
                also=tuple(Item(document.name, "", context, "", "", options=more) for context, more in others),
            )

    def said(self, item: Item, answer: Answer) -> str:
        if self.mode != "generate" or not answer.tokens:  # answers from a store have no tokens, and their text is cut already
            return answer.text
        return cast(str, self._lm.text(answer, self._documents[item.digest].generations[0].until))

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        document = self._documents[item.digest]
        return metrics(document, responses(document, answer.text, answer.totals, answer.greedy))


def responses(document: Document, text: str, totals: Sequence[float], greedy: Sequence[bool]) -> list[Any]:
    """Return an answer in lm-eval's format, one entry per request, by its mode.

    That is the generated text; (log-likelihood, greedy) of each option; or the log-likelihood of each text, the sum over its
    windows.
    """
    if document.mode == "generate":
        return [text]
    if document.mode == "choices":
        return list(zip(totals, greedy, strict=True))
    ends = accumulate((len(windows) for windows in document.pairs), initial=0)  # a long text has several windows
    return [sum(totals[start:end]) for start, end in pairwise(ends)]


def stored_responses(document: Document, row: Row) -> list[Any]:
    """Return the responses of a stored row. A failed row is scored as wrong; results.json has the number of failures."""
    if row.finish == "failed":
        return [_NO_RESPONSE[document.mode]] * len(document.instances)
    if document.mode == "perplexity":
        return [sum(row.logprobs)] if len(document.instances) == 1 else list(row.logprobs)
    return responses(document, row.output, row.logprobs, row.greedy)


def metrics(document: Document, responses: Sequence[Any]) -> dict[str, float]:
    """Compute lm-eval's metrics of one document; adds "correct": acc, exact match, contains, or whether the label is right."""
    for instance, response in zip(document.instances, responses, strict=True):
        instance.resps, instance.filtered_resps = [response], {}
    first = document.task._filters[0]
    first.apply(document.instances)
    results = document.task.process_results(document.doc, [i.filtered_resps[first.name] for i in document.instances])
    forget_responses(document)
    plain = (bool, int, float)
    numbers = {name: float(value) for name, value in results.items() if isinstance(value, plain)}
    numbers |= {name: float(value) for name, value in results.items() if hasattr(value, "item") and not hasattr(value, "__len__")}
    for name in ("acc", "exact_match", "contains"):
        if name in numbers:
            return {"correct": numbers[name], **numbers}
    labels = [value for value in results.values() if isinstance(value, tuple) and len(value) == 2]
    if document.mode == "choices" and labels:  # f1, mcc: (right label, predicted label)
        return {"correct": float(labels[0][0] == labels[0][1]), **numbers}
    return numbers


def forget_responses(document: Document) -> None:
    """Remove the responses from lm-eval's requests, which are used again for other interventions."""
    for instance in document.instances:
        instance.resps, instance.filtered_resps = [], {}
