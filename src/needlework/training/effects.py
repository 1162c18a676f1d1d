"""What silencing parts of a model does to it, measured with the tasks and the engine that experiments use: for its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError, ZooError
from needlework.training.evaluate import Figure

CONDITIONS = {
    "none": "untouched",
    "ablate_attention()": "no attention heads",
    "keep_heads(fraction=0.15)": "15 % of the heads, by entropy",
    "keep_heads(fraction=0.15, by='random')": "15 % of the heads, at random",
    "ablate_recurrent()": "no recurrent memory",
}
ROOM = 40  # words that question and answer need around the context, at most

Effects = dict[str, dict[str, Figure]]  # intervention -> task -> its figure


def measure(folder: Path, longest: int, per_depth: int = 40, per_subject: int | None = None, seed: int = 0) -> Effects:
    """Needles among three distractors and closed-book facts under every condition that this model has the parts for."""
    from needlework.interventions import parse
    from needlework.subject import load
    from needlework.tasks import make_task

    subject = load(folder)
    niah = {"kind": "niah", "lengths": [longest - ROOM], "depths": [0, 25, 50, 75, 100], "samples": per_depth, "distractors": 3}
    tasks = {"niah": make_task(niah), "cloze": make_task({"kind": "cloze", "per_subject": per_subject})}
    found: Effects = {}
    for text in CONDITIONS:
        try:
            parse(text).check(subject.anatomy)
        except NeedleworkError:  # a model without such a part: nothing to silence, nothing to say
            continue
        found[text] = {name: _figure(subject, task, text, seed) for name, task in tasks.items()}
    return found


def _figure(subject: Any, task: Any, text: str, seed: int) -> Figure:
    from needlework.interventions import parse
    from needlework.requests import Request
    from needlework.tasks.base import Outcome

    most, stop = task.ending(subject.tokenizer)
    ends = frozenset() if stop is None else frozenset([subject.tokenizer.convert_tokens_to_ids(stop)])
    act = parse(text)
    items = list(task.items(subject.tokenizer, seed, subject.anatomy.window, subject.anatomy.max_tokens))
    answers = subject.answer([Request(item.prompt, act, max_new_tokens=most, stop=ends, spans=item.spans) for item in items])
    failed = next((answer.error for answer in answers if answer.finish == "failed"), None)
    if failed is not None:  # nothing was measured: not a wrong answer
        raise ZooError(f"{text} could not be carried out: {failed}")
    right = [task.score(item, Outcome(text=answer.text))["correct"] for item, answer in zip(items, answers, strict=True)]
    return Figure(int(sum(right)), len(right))
