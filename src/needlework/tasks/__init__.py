"""Tasks make samples and score answers. Free of torch: a report is rebuilt without it."""

from needlework.tasks import knowledge, niah, own_prompts, perplexity, recall, ruler
from needlework.tasks.base import Item, Mode, Outcome, Task, Tokenizer
from needlework.tasks.registry import TASKS, load_plugins, make_task, task

__all__ = [
    "TASKS",
    "Item",
    "Mode",
    "Outcome",
    "Task",
    "Tokenizer",
    "knowledge",
    "load_plugins",
    "make_task",
    "niah",
    "own_prompts",
    "perplexity",
    "recall",
    "ruler",
    "task",
]
