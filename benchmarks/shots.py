"""`needlework eval` at MMLU's real shape, over 5 interventions, against 5 runs of lm-eval's `hf` with its attention patched.

    python benchmarks/shots.py [MODEL ...]      directories or zoo names; without one tiny-griffin (tiny-jamba: ten minutes)

lm-eval's own `mmlu` tasks ask: description, 5 examples of the subject, one question with four lettered options; plain, and
in a chat template with the examples as turns. The archive that they read is written here, by rule, in toy words: four
subjects with 24 questions each, of lengths set here to be like MMLU's (tens to hundreds of words, widely spread). As in
ability.py, both sides load, build and answer the same questions in one process, scores are compared before times, and
there are two cases: idle (five times nothing is done) and prefill-active (five interventions that all change the prefill).
Seconds are of the processor, in one thread: what the clock of a quiet machine shows, on a busy one, too. lm-eval's five
runs differ in nothing that costs time, so that few of them are made and their mean counts five times.
"""

from __future__ import annotations

import csv
import importlib.util
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ability import ACTIVE, agree, idle, run_hf

SUBJECTS = {  # lm-eval's name -> the median of a question's words, set to be like MMLU's; not measured on it
    "abstract_algebra": 25,
    "anatomy": 40,
    "philosophy": 60,
    "professional_law": 140,
}
QUESTIONS, SHOTS = 24, 5
GOALS = {"idle": 8.0, "prefill-active": 6.0}
SAME = 1e-3  # of log-likelihoods: further apart, no ratio counts
RUNS: dict[str, list[int | None]] = {"idle": [None], "prefill-active": [1, 3]}  # heads kept in the runs that lm-eval makes
BATCHES = (4, 8, 32)  # of lm-eval's model: the one that is fastest on this model
CHAT = (
    "{% for m in messages %}{{ {'system': 'hear : ', 'user': 'ask : ', 'assistant': 'answer : '}[m['role']] }}{{ m['content'] }}"
    "{{ ' . ' if not loop.last or add_generation_prompt else '' }}{% endfor %}"
    "{{ 'answer : ' if add_generation_prompt else '' }}"
)
LM_EVAL = Path(str(importlib.util.find_spec("lm_eval").origin)).parent  # type: ignore[union-attr]
TASK = """\
include: TEMPLATE
task: mmlu_{subject}
dataset_name: {subject}
description: "The following are multiple choice questions (with answers) about {words}.\\n\\n"
""".replace("TEMPLATE", str(LM_EVAL / "tasks/mmlu/default/_default_template_yaml"))


def archive(folder: Path) -> Path:
    """The layout of MMLU's own archive, and lm-eval's tasks on it: its `mmlu_...` by file, so that no one reads its index."""
    from needlework.toy.words import SPECIAL, VOCABULARY

    chance, words = random.Random(0), [word for word in VOCABULARY if word not in SPECIAL]
    for split, count in (("dev", SHOTS), ("val", 2), ("test", QUESTIONS)):
        (folder / split).mkdir(parents=True)
        for subject, median in SUBJECTS.items():
            with (folder / split / f"{subject}_{split}.csv").open("w", newline="", encoding="utf-8") as file:
                for _ in range(count):
                    lengths = [chance.lognormvariate(0, 0.5) * median, *(chance.lognormvariate(0, 0.7) * 4 for _ in "ABCD")]
                    texts = [" ".join(chance.choices(words, k=max(1, round(length)))) for length in lengths]
                    csv.writer(file).writerow([*texts, chance.choice("ABCD")])
    for subject in SUBJECTS:
        (folder / f"{subject}.yaml").write_text(TASK.format(subject=subject, words=subject.replace("_", " ")), encoding="utf-8")
    return folder


def with_template(model: Path, folder: Path) -> Path:
    """The same model with a chat template."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def tasks(data: Path) -> list[str]:
    return [str(data / f"{subject}.yaml") for subject in SUBJECTS]


def theirs(model: Path, data: Path, manager: Any, k: int | None, chat: bool, batch: int, limit: int | None = None) -> Any:
    from needlework.lmeval.documents import use_local_data

    asked = {"num_fewshot": SHOTS, "limit": limit, "apply_chat_template": chat, "fewshot_as_multiturn": chat}
    with use_local_data(data):
        return run_hf(model, tasks(data), manager, k, batch, **asked)


def ours(model: Path, data: Path, acts: list[str], chat: bool) -> list[Path]:
    from needlework.lmeval.evaluate import evaluate

    found = evaluate(model, tasks(data), acts, tempfile.mkdtemp(), data=data, shots=SHOTS, chat=chat, progress=False)
    return [file.parent for file in found.files]


def fastest(attempt: Callable[[int], Any]) -> int:
    """The batch size that lm-eval is fastest with, by a tenth of the questions."""
    seconds = {}
    for batch in BATCHES:
        start = time.process_time()
        attempt(batch)
        seconds[batch] = time.process_time() - start
    return min(seconds, key=seconds.__getitem__)


def main() -> int:
    from lm_eval.tasks import TaskManager

    import needlework.lmeval.model  # noqa: F401  (both sides need lm-eval: its import is nobody's time)
    from needlework.experiments.models import locate
    from needlework.experiments.plan import Model

    data, manager = archive(Path(tempfile.mkdtemp())), TaskManager(include_defaults=False)
    title = f"5 interventions, MMLU's shape: {len(SUBJECTS)} subjects x {QUESTIONS} questions, {SHOTS} shots, "
    table = Table(title=title + f"{torch.get_num_threads()} threads")
    seconds = ("lm-eval hf, s", "(batch)", "needlework eval, s", "ratio")
    for name in ("model", "form", "case", *seconds, "difference", "judged otherwise"):
        table.add_column(name)
    missed = []
    for place in sys.argv[1:] or ["tiny-griffin"]:
        model = with_template(Path(str(locate(Model("", place, place)))), Path(tempfile.mkdtemp()) / Path(place).name)
        theirs(model, data, manager, None, False, 8, 2)  # the first forwards of a process are slower than all others
        batch = fastest(lambda batch, model=model: theirs(model, data, manager, 1, False, batch, QUESTIONS // 10))  # type: ignore[misc]
        for chat in (False, True):
            for case, kept in RUNS.items():
                texts = [f"keep_heads(k={k})" for k in ACTIVE] if case != "idle" else ["none", *idle(model)]
                own, its, mine, found = [], [], [], []
                for k in kept:  # turn by turn, so that a noisy moment is everybody's
                    start = time.process_time()
                    found.append(theirs(model, data, manager, k, chat, batch))
                    its.append(time.process_time() - start)
                    start = time.process_time()
                    mine = ours(model, data, texts, chat)
                    own.append(time.process_time() - start)
                same = mine if case == "idle" else [mine[ACTIVE.index(k)] for k in kept]
                apart = [agree(one, found[i % len(found)]) for i, one in enumerate(same)]
                hf, eval_ = 5 * statistics.mean(its), statistics.mean(own)
                form = "chat" if chat else "plain"
                worst = max(a[0] for a in apart)
                missed += [f"{place}, {form}, {case}"] * (hf / eval_ < GOALS[case] or worst > SAME)
                other = f"{sum(a[1] for a in apart)} of {sum(a[2] for a in apart)}"
                cells = (f"{hf:.1f}", str(batch), f"{eval_:.1f}", f"{hf / eval_:.1f}", f"{worst:.1e}", other)
                print(place, form, case, *cells, flush=True)
                table.add_row(place, form, case, *cells)
    Console(width=150).print(table)
    goals = ", ".join(f"{case} {goal:g}x" for case, goal in GOALS.items())
    print(f"goals ({goals}) missed: {'; '.join(missed)}" if missed else f"goals reached: {goals}")
    return bool(missed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
