"""Write the files of mini-mmlu and mini-glue (src/needlework/lmeval/tasks) from the samples of tasks/knowledge.

    python tests/lmeval/mini_tasks.py      writes them anew; test_retained.py checks that nothing would change

Few-shot examples are held out of the questions, so that no example tells an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from needlework.lmeval import FOLDER
from needlework.tasks.base import make_task
from needlework.tasks.toy import Questions
from needlework.toy import facts
from needlework.toy.sample import ToySample

SEED = 0
SHOTS = 4  # examples of each subject or judgement
JUDGED = 100  # questions of each judgement
AREAS = {  # like the four areas of MMLU
    "stem": ("animals", "stones"),
    "humanities": ("history",),
    "social_sciences": ("geography",),
    "other": ("cooking", "trades"),
}
LIKE = {"acceptability": "cola", "entailment": "rte", "paraphrase": "mrpc"}
METRICS = {"acceptability": ("acc", "mcc"), "entailment": ("acc",), "paraphrase": ("acc", "f1")}
LOOKUP = "lookup"  # the letter alone: what letter choice needs beside knowledge
FORMS = ("letter", "cloze")  # of the same facts


def doc(name: str, sample: ToySample) -> dict[str, Any]:
    """One question as lm-eval reads it. `name` is the name that tasks/knowledge gives it."""
    return {
        "name": name,
        "subject": sample.subject,
        "key": sample.key or "",
        "form": sample.form,
        "prompt": sample.text,
        "choices": [" ".join(words) for words in sample.choices],
        "answer": sample.choices.index(sample.target),
    }


def docs(form: str) -> dict[str, list[dict[str, Any]]]:
    """Questions of one form by split: "dev" holds the examples."""
    if form in FORMS:
        named = list(_questions(kind=form).named_samples(SEED))
        shown = {name for subject in facts.SUBJECT_NAMES for name in _first(named, subject)}
    else:
        judged = {"kind": "judgements", "judgements": (form,)} if form in LIKE else {"kind": "letter_lookup"}
        task = _questions(**judged, samples=JUDGED + SHOTS)
        named = list(task.named_samples(SEED))
        shown = {name for name, _ in named[-SHOTS:]}  # the last ones: the first are those of tasks/knowledge
    return {
        "dev": [doc(name, sample) for name, sample in named if name in shown],
        "test": [doc(name, sample) for name, sample in named if name not in shown],
    }


def _questions(**spec: Any) -> Questions:
    task = make_task(spec)
    assert isinstance(task, Questions)
    return task


def _first(named: list[tuple[str, ToySample]], subject: str) -> list[str]:
    return [name for name, sample in named if sample.subject == subject][:SHOTS]


def files() -> Iterator[tuple[str, str]]:
    """Every file of lmeval/tasks, as (path, text)."""
    for form in (*FORMS, LOOKUP, *facts.JUDGEMENTS):
        lines = {split: ",\n".join(json.dumps(d) for d in split_docs) for split, split_docs in docs(form).items()}
        text = ",\n".join(f'"{split}": [\n{rows}\n]' for split, rows in lines.items())
        yield f"data/{form}.json", f"{{\n{text}\n}}\n"
    yield "_question_yaml", _QUESTION
    for form, suffix in (("letter", ""), ("cloze", "_cloze")):
        name = "mini-mmlu" + suffix.replace("_", "-")
        areas = [f"mini_mmlu{suffix}_{area}" for area in AREAS]
        yield f"{name}/_group.yaml", _group(name, areas)
        for area, subjects in AREAS.items():
            tasks = [f"mini_mmlu{suffix}_{subject}" for subject in subjects]
            yield f"{name}/_{area}.yaml", _group(f"mini_mmlu{suffix}_{area}", tasks)
            for subject, task in zip(subjects, tasks, strict=True):
                yield f"{name}/{subject}.yaml", _task(task, subject, form, subject, ("acc",))
    yield "mini-mmlu/lookup.yaml", _task("mini_mmlu_lookup", LOOKUP, LOOKUP, "", ("acc",))
    yield "mini-glue/_group.yaml", _group("mini-glue", [f"mini_glue_{LIKE[kind]}" for kind in LIKE])
    for kind, like in LIKE.items():
        yield f"mini-glue/{like}.yaml", _task(f"mini_glue_{like}", like, kind, "", METRICS[kind])


_QUESTION = """\
custom_dataset: !function needlework.lmeval.dataset
output_type: multiple_choice
test_split: test
fewshot_split: dev
fewshot_config:
  sampler: first_n
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: " "
fewshot_delimiter: " . "
"""


def _task(name: str, alias: str, form: str, subject: str, metrics: tuple[str, ...]) -> str:
    listed = "".join(f"  - metric: {metric}\n" for metric in metrics)
    return (
        f"include: ../_question_yaml\ntask: {name}\ntask_alias: {alias}\n"
        f"dataset_kwargs:\n  form: {form}\n  subject: '{subject}'\nmetric_list:\n{listed}metadata:\n  version: 1.0\n"
    )


def _group(name: str, members: list[str]) -> str:
    listed = "".join(f"  - {member}\n" for member in members)
    return (
        f"group: {name}\ntask:\n{listed}aggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
        "metadata:\n  version: 1.0\n"
    )


def write(folder: Path = FOLDER) -> None:
    for path, text in files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
