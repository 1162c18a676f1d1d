"""What silencing parts of a model does to it, for its card: measured as experiments are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from needlework.errors import ZooError
from needlework.experiments.plan import Experiment, Grid, Model, NamedTask, Plan
from needlework.experiments.run import run
from needlework.store import Row, Store
from needlework.tasks import make_task
from needlework.training.evaluate import Figure

CONDITIONS = {
    "none": "untouched",
    "ablate_attention()": "no attention heads",
    "keep_heads(fraction=0.15)": "15 % of the heads, by entropy",
    "keep_heads(fraction=0.15, by='random')": "15 % of the heads, at random",
    "ablate_recurrent()": "no recurrent memory",
}
PHASES = {
    "none": "untouched",
    "ablate_attention(phase='prefill')": "no attention heads while reading",
    "ablate_attention(phase='decode')": "no attention heads while answering",
}
DEFAULT_RELATION = "code"
ROOM = 40  # words that question and answer need around the context, at most

Effects = dict[str, dict[str, Figure]]  # intervention -> task -> its figure


def measure(
    folder: Path,
    longest: int,
    per_depth: int = 40,
    per_subject: int | None = None,
    seed: int = 0,
    progress: bool = False,
    relation: str = DEFAULT_RELATION,
) -> Effects:
    """Needles among three distractors and closed-book facts under every condition that this model has the parts for."""
    needle = {"lengths": [longest - ROOM], "depths": [0, 25, 50, 75, 100], "samples": per_depth, "distractors": 3}
    niah = {"kind": "niah", "relation": relation, **needle}
    cloze = {"kind": "cloze", "per_subject": per_subject}
    return _asked(folder, {"niah": niah, "cloze": cloze}, CONDITIONS, seed, progress)


def phases(folder: Path, longest: int, relation: str, per_depth: int = 200, seed: int = 0, progress: bool = False) -> Effects:
    """Needles found in one hop and in two, among three others, without attention in one phase or the other."""
    needle = {"lengths": [longest - ROOM], "depths": [0, 25, 50, 75, 100], "samples": per_depth, "distractors": 3}
    hops = {
        "one_hop": {"kind": "niah", "relation": relation, **needle},
        "two_hops": {"kind": "linked", "relation": relation, **needle},
    }
    return _asked(folder, hops, PHASES, seed, progress)


def _asked(folder: Path, tasks: dict[str, dict[str, Any]], conditions: dict[str, str], seed: int, progress: bool) -> Effects:
    named = tuple(NamedTask("card", name, make_task(settings)) for name, settings in tasks.items())
    grids = tuple(Grid("card", text) for text in conditions)
    experiment = Experiment("card", "card", "", ("card",), named, grids, (seed,), "decode", None, None, False)
    plan = Plan(Path("card"), "card", "", "", {"card": Model("card", "card", str(folder))}, (experiment,))
    with TemporaryDirectory(prefix="needlework-") as out:
        run(plan, out, progress=progress, tell=False, doctor="off")
        store = Store(out)
        try:
            return _figures(list(store.rows()), conditions, tasks)
        finally:
            store.close()


def _figures(rows: Sequence[Row], conditions: Iterable[str], tasks: Iterable[str]) -> Effects:
    """In the order of conditions and tasks: that of the rows is the engine's business."""
    failed = next((row for row in rows if row.finish == "failed"), None)
    if failed is not None:  # nothing was measured: not a wrong answer
        raise ZooError(f"{failed.intervention} could not be carried out: {failed.error}")
    correct: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        correct.setdefault(row.intervention, {}).setdefault(row.task, []).append(row.scores["correct"])
    return {
        text: {task: Figure(int(sum(values)), len(values)) for task in tasks for values in [correct[text][task]]}
        for text in conditions
        if text in correct  # a model without such a part: nothing to silence, nothing to say
    }
