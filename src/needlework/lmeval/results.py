"""lm-eval's own result files, one directory per intervention, made by lm-eval from answers that are already there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.utils import handle_non_serializable

from needlework.files import file_name, whole
from needlework.lmeval.questions import Question, Shown

BOOTSTRAPS = 100  # for the few metrics without a formula (f1, mcc): the store's rows serve for real intervals


class Replay(LM):
    """A model that has answered already."""

    def __init__(self, answers: Mapping[int, Any]) -> None:
        super().__init__()
        self.answers = answers  # id of lm-eval's request -> its answer

    @property
    def tokenizer_name(self) -> str:
        """lm-eval names its cache of requests by it; ours were built before."""
        return ""

    def _all(self, requests: Sequence[Any]) -> list[Any]:
        return [self.answers[id(request)] for request in requests]

    def loglikelihood(self, requests: Sequence[Any]) -> list[Any]:
        return self._all(requests)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[Any]:
        return self._all(requests)

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        return self._all(requests)


def place(out: Path, intervention: str) -> Path:
    """A directory for each intervention: readable, and never the same for two."""
    return out / "lm-eval" / file_name(intervention)


def aggregate(loaded: Any, questions: Sequence[Question], answers: Mapping[int, Any], shown: Shown) -> dict[str, Any]:
    """lm-eval's results for one intervention."""
    for question in questions:
        for instance in question.instances:
            instance.resps, instance.filtered_resps = [], {}
    with _built_already(loaded["tasks"].values()):
        results: dict[str, Any] = evaluate(
            lm=Replay(answers),
            task_dict=loaded,
            limit=shown.limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=True,
            apply_chat_template=shown.chat,
            fewshot_as_multiturn=shown.multiturn,
        )
    return results


@contextmanager
def _built_already(tasks: Iterable[Any]) -> Iterator[None]:
    """Requests were built once, for all interventions: while open, tasks keep what they have."""
    with ExitStack() as stack:
        for task in tasks:
            task.build_all_requests = lambda **_: None
            stack.callback(delattr, task, "build_all_requests")  # the class's own is there again
        yield


def write(folder: Path, results: dict[str, Any], about: Mapping[str, Any], shown: Shown) -> Path:
    """results.json and samples_TASK.jsonl, as `lm_eval --log_samples` leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = results.pop("samples")
    dump: Callable[[Any], str] = lambda value: json.dumps(value, default=handle_non_serializable, ensure_ascii=False)  # noqa: E731
    for task, task_samples in samples.items():
        with whole(folder / f"samples_{file_name(task)}.jsonl") as file:
            file.writelines(dump(sample) + "\n" for sample in task_samples)
    config = {
        "model": "needlework",
        "model_args": {key: about[key] for key in ("pretrained", "intervention", "dtype")},
        **{key: value for key, value in about.items() if key not in ("pretrained", "intervention", "dtype")},
        "limit": shown.limit,
        "bootstrap_iters": BOOTSTRAPS,
        "apply_chat_template": shown.chat,
        "fewshot_as_multiturn": shown.multiturn,
    }
    path = folder / "results.json"
    with whole(path) as file:
        file.write(json.dumps({**results, "config": config, "date": time.time()}, indent=1, default=handle_non_serializable))
    return path
