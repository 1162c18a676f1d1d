"""Tasks make samples and score answers. Free of torch: a report is rebuilt without it."""

from typing import Any

from needlework.tasks import knowledge, linked, niah, own_prompts, perplexity, recall, ruler
from needlework.tasks.base import TASKS, Item, Mode, Task, Tokenizer, load_plugins, make_task, task

__all__ = [
    "TASKS",
    "Item",
    "Mode",
    "Task",
    "Tokenizer",
    "knowledge",
    "linked",
    "load_plugins",
    "make_task",
    "niah",
    "own_prompts",
    "perplexity",
    "recall",
    "ruler",
    "task",
]


def __getattr__(name: str) -> Any:
    if name == "Outcome":  # until 0.2
        import warnings

        from needlework.requests import Answer

        warnings.warn("needlework.tasks.Outcome is needlework.Answer now", DeprecationWarning, stacklevel=2)
        return Answer
    raise AttributeError(f"module 'needlework.tasks' has no attribute {name!r}")
