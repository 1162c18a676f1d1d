"""Tasks, which generate samples and score answers. They do not import torch, so that reports can be rebuilt without it."""

from needlework.tasks import association, niah, own_prompts, perplexity, retrieval, ruler, toy
from needlework.tasks.base import TASKS, Item, Mode, Task, Tokenizer, load_plugins, make_task, task

__all__ = [
    "TASKS",
    "Item",
    "Mode",
    "Task",
    "Tokenizer",
    "association",
    "load_plugins",
    "make_task",
    "niah",
    "own_prompts",
    "perplexity",
    "retrieval",
    "ruler",
    "task",
    "toy",
]
