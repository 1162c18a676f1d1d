"""Evaluation of general ability with lm-evaluation-harness. lm-eval is imported late because that takes seconds.

`tasks/` has mini-mmlu and mini-glue, lm-eval tasks in the toy language, written by `tests/lmeval/mini_tasks.py`. Groups, splits
and prompts follow the originals: knowledge by subject with lettered options (mini-mmlu) and as continuations (mini-mmlu-cloze,
like lm-eval's mmlu_continuation); acceptability, entailment and paraphrase (mini-glue). In mini_mmlu_lookup the question names
the answer, so that it tests only the look-up of the letter, without knowledge.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError

FOLDER = Path(__file__).parent / "tasks"


def require_lm_eval() -> None:
    """Raise NeedleworkError if lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise NeedleworkError("this needs lm-evaluation-harness: pip install 'needlework[lm-eval]'")


def dataset(form: str, subject: str = "", **_: Any) -> Any:
    """Return the dataset of one form of questions, for one subject or all; called by the tasks' YAML files."""
    from datasets import Dataset, DatasetDict

    splits = json.loads((FOLDER / "data" / f"{form}.json").read_text(encoding="utf-8"))
    return DatasetDict(
        {split: Dataset.from_list([doc for doc in docs if subject in ("", doc["subject"])]) for split, docs in splits.items()}
    )
