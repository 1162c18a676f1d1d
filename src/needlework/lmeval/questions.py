"""lm-eval's tasks as questions: what each document asks, in tokens, before any model is loaded."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.errors import NeedleworkError, did_you_mean
from needlework.lmeval.arguments import Generation, Pair
from needlework.lmeval.data import offered
from needlework.lmeval.mini import FOLDER
from needlework.tasks.base import Mode

if TYPE_CHECKING:
    from needlework.lmeval.model import NeedleworkLM

FEWSHOT_SEED = 1234  # lm-eval's own
_MODES: dict[str, Mode] = {"loglikelihood": "choices", "loglikelihood_rolling": "perplexity", "generate_until": "generate"}
_JUDGEMENTS = {  # GLUE by what is judged
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


@dataclass(frozen=True)
class Shown:
    """How a question is put: lm-eval's settings of the same names."""

    limit: float | None = None
    shots: int | None = None  # none: what the task says
    chat: bool = False
    multiturn: bool = False


@dataclass
class Question:
    """One document of a task, and everything that must be asked to score it."""

    task: Any  # lm-eval's
    doc_id: int
    instances: list[Any]  # lm-eval's requests
    mode: Mode
    pairs: list[list[Pair]] = field(default_factory=list)  # of each request; a long text has several windows
    generations: list[Generation] = field(default_factory=list)

    @property
    def doc(self) -> Mapping[str, Any]:
        return self.instances[0].doc  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        return str(self.doc.get("name") or f"{self.task.task_name}/{self.doc_id}")

    def digest(self) -> str:
        """A hash of all that is asked. Two equal documents of one task are two questions, as they are to lm-eval."""
        asked = [self.task.task_name, self.doc_id, self.pairs, [vars(one) for one in self.generations]]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]

    def facts(self) -> dict[str, Any]:
        """What a report wants to know: subject, how it is asked, and what guessing gives."""
        doc, task = self.doc, str(self.task.task_name)
        facts: dict[str, Any] = {"subject": str(doc.get("subject") or task), "shots": self.task.config.num_fewshot or 0}
        if self.mode != "choices":
            return facts
        options = [str(instance.args[1]).strip() for instance in self.instances]
        letters = all(len(option) == 1 and option.isalpha() for option in options)
        facts |= {"form": str(doc.get("form") or _JUDGEMENTS.get(task) or ("letter" if letters else "cloze"))}
        if len(options) > 1:
            facts |= {"chance": 1 / len(options), "options": options}
        return facts

    def cluster(self) -> str:
        """Questions about one fact, however it is asked, belong together."""
        doc = self.doc
        if doc.get("key"):
            return f"{doc['subject']}/{doc['key']}"
        return f"{doc['subject']}/{self.doc_id}" if doc.get("subject") and not doc.get("name") else self.name


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval shows a bar for every task and every metric; one bar of ours is enough. Errors are raised, not printed."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def templates_once() -> Iterator[None]:
    """lm-eval compiles a template again for every document, which takes longer than a small model's answer to it."""
    from lm_eval import utils

    utils.env.from_string = functools.lru_cache(maxsize=256)(utils.env.from_string)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del utils.env.from_string  # the class's own is there again


def find_tasks(names: Sequence[str], data: Path | None) -> Any:
    """lm-eval's tasks and groups by name, with their data. Unknown names and missing data are errors."""
    manager = _manager(names)
    wanted: list[str] = []
    for name in names:
        matches = manager.match_tasks([name]) or ([name] if Path(name).is_file() else [])
        if not matches:
            raise NeedleworkError(f"unknown task {name!r}; {_near(name, manager.all_tasks)}")
        wanted += matches
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    with offered(data), quiet():
        try:
            loaded = manager.load(list(dict.fromkeys(wanted)))
        except NeedleworkError:
            raise
        except Exception as error:  # the hub and the loader raise many kinds; all mean that the data cannot be had
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            where = f"is not in {data} either" if data else "may lie on your disk: give its directory with --data DIR"
            raise NeedleworkError(f"the data of {', '.join(names)} cannot be had ({first}); it {where}") from None
    return loaded


def _near(name: str, known: Sequence[str]) -> str:
    """lm-eval has thousands of tasks: the nearest, or where to see them, but never all."""
    nearest = did_you_mean(name, known)
    return (
        nearest
        if nearest.startswith("did")
        else "`needlework lm-eval ls tasks` lists lm-eval's; ours are mini-mmlu and mini-glue"
    )


def _manager(names: Sequence[str]) -> Any:
    """Reading all of lm-eval's own tasks takes seconds: only if one of them is asked for by name."""
    ours = _index(False)
    return ours if all(ours.match_tasks([name]) or Path(name).is_file() for name in names) else _index(True)


@functools.cache
def _index(with_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(FOLDER), include_defaults=with_defaults)


def build(loaded: Any, lm: NeedleworkLM, shown: Shown) -> list[Question]:
    """Every question of the tasks, in tokens. Requests are built once, whatever number of interventions they serve."""
    from lm_eval.evaluator_utils import get_sample_size

    questions: list[Question] = []
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if shown.shots is not None and own != 0:
            task.set_config(key="num_fewshot", value=shown.shots)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        task.build_all_requests(
            limit=get_sample_size(task, shown.limit),
            apply_chat_template=shown.chat,
            fewshot_as_multiturn=shown.multiturn,
            chat_template=lm.apply_chat_template if shown.chat else None,
            tokenizer_name=lm.tokenizer_name if shown.chat else "",
        )
        questions += _questions(task, lm)
    return questions


def _questions(task: Any, lm: NeedleworkLM) -> Iterator[Question]:
    by_doc: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_doc.setdefault(instance.doc_id, []).append(instance)
    scored = [i for i in task.instances if i.request_type == "loglikelihood"]
    pairs = dict(zip(map(id, scored), lm.pairs(scored), strict=True)) if scored else {}
    for doc_id, instances in by_doc.items():
        instances.sort(key=lambda instance: instance.idx)
        question = Question(task, doc_id, instances, _MODES[instances[0].request_type])
        for instance in instances:
            if question.mode == "generate":
                question.generations.append(lm.generation(*instance.args))
            else:
                rolling = question.mode == "perplexity"
                question.pairs.append(lm.windows(instance.args[0]) if rolling else [pairs[id(instance)]])
        yield question
