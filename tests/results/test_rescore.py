"""Scores are a function of what a row keeps: computed again they are the very same, for every kind of task."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakes
import pytest
from test_run import go, table
from typer.testing import CliRunner

from needlework.cli import app
from needlework.errors import NeedleworkError
from needlework.experiments import run
from needlework.experiments.models import ModelInfo
from needlework.experiments.plan import Model
from needlework.receipts import Receipt
from needlework.requests import Answer, Request
from needlework.results import Store
from needlework.results.rows import rescore, scoring, stored_item
from needlework.tasks import base as rules
from needlework.tasks import make_task
from needlework.tasks.base import TASKS

SMALL: dict[str, dict[str, Any]] = {  # what makes a kind's samples few and short
    **{key: {"lengths": [48], "depths": [0, 50, 100], "samples": 2, "distractors": 1} for key in ("niah", "niah_choice")},
    **{key: {"lengths": [256], "depths": [0, 100], "samples": 2} for key in ("association", "association_choice")},
    **{key: {"lengths": [96], "depths": [0, 100], "samples": 3, "distractors": 1} for key in ("linked", "linked_choice")},
    **{key: {"lengths": [64], "samples": 4} for key in ("ruler", "ruler_choice")},
    **{key: {"file": "prompts.jsonl"} for key in ("prompts", "prompts_choice")},
    **{key: {"sizes": [8]} for key in ("mqar", "mqar_choice", "phone_book", "phone_book_choice", "copy", "copy_choice")},
    **{key: {"subjects": ["animals"]} for key in ("cloze", "cloze_choice", "letter")},
    **{key: {"samples": 6} for key in ("letter_lookup", "judgements")},
    "perplexity": {"samples": 3, "tokens": 40},
}


@dataclass
class Knowing(fakes.FakeActor):
    """Says what stands at the needle's value, or something else."""

    tokenizer: Any = None

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        if requests[0].options:
            yield from super().answers(requests)
            return
        for i, request in enumerate(requests):
            seed = fakes._number(request.prompt, str(request.intervention))
            spans = request.spans.get("value") or request.spans.get("needle") or ((1, 3),)
            ids = request.prompt[slice(*spans[-1])] if seed < 0.5 else request.prompt[:3]
            yield i, Answer(ids, (-seed,), (seed,), Receipt(), "stop", text=self.tokenizer.decode(list(ids)) + ".</b>")


@dataclass
class ToyModels(fakes.FakeModels):
    """Speaks the toy language."""

    def inspect(self, model: Model) -> ModelInfo:
        from needlework.toy import tokenizer

        toy = tokenizer.build()
        self.actor = Knowing(tokenizer=toy)
        return ModelInfo(model, "w" * 32, "t" * 32, fakes.anatomy(), toy, frozenset({0}))


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    tasks = [{"kind": kind, **SMALL[kind]} for kind in TASKS if not kind.startswith("fake")]
    tasks += [
        {"kind": "niah_choice", "name": f"against-{against}", **SMALL["niah_choice"], "against": against}
        for against in ("context", "absent")
    ]
    needle, question = "the secret code of loran is 4 7 1 .", "question : what is the secret code of loran ? answer :"
    own = {"prompt": f"{needle} the old king sees a boat . {question}", "target": "4 7 1", "needle": needle}
    (folder / "prompts.jsonl").write_text(json.dumps({**own, "options": ["4 7 1", "2 9 9"]}) + "\n")
    acts = ["none", "ablate_attention()", "ablate_recurrent()"]
    plan = {"models": ["alpha"], "experiments": {"all": {"tasks": tasks, "interventions": acts}}}
    (folder / "plan.yaml").write_text(json.dumps(plan))
    assert run.run(folder / "plan.yaml", folder / "out", source=ToyModels(), progress=False).sound
    return folder / "out"


def test_every_kind_is_tried(all_kinds: Path) -> None:
    store = Store(all_kinds)
    kinds = dict(store.db.execute("SELECT kind, count(*) FROM trials GROUP BY 1"))
    assert kinds.keys() == {kind for kind in TASKS if not kind.startswith("fake")}
    rights = store.db.execute("SELECT task, avg(json_extract(scores, '$.correct')) FROM trials GROUP BY 1").fetchall()
    judged = [share for task, share in rights if task not in ("perplexity", "cloze")]
    assert sum(0 < share < 1 for share in judged) > len(judged) * 0.7, "scores that are all alike would show nothing"
    store.close()


def test_scores_computed_again_are_those_of_the_run(all_kinds: Path) -> None:
    before = table(all_kinds)
    store = Store(all_kinds)
    again = rescore(store)
    assert (again.changed, again.kept, again.rows) == (0, 0, len(before))
    assert table(all_kinds) == before
    store.db.execute("UPDATE trials SET scores = '{}', scoring = ''")
    again = rescore(store)
    assert (again.changed, again.kept) == (len(before), 0)
    store.close()
    assert table(all_kinds) == before


def test_no_model_tokenizer_or_torch_is_needed(all_kinds: Path) -> None:
    code = (
        "import sys; from needlework.cli import app\n"
        f"app(['rescore', {str(all_kinds)!r}], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[-2].startswith("0 of ")
    assert said[-2].endswith(" rows have new scores")
    assert said[-1] == "[]"


def test_a_store_of_older_scores_is_told_and_mended(all_kinds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = table(all_kinds)
    store = Store(all_kinds)
    assert fakes.older_scores(store) == 0
    task = make_task({"kind": "niah"})
    old = scoring(task)
    for module in ("needlework.results.rows", "needlework.tasks.base"):
        monkeypatch.setattr(f"{module}.SCORES_VERSION", 99)
    assert scoring(task) != old
    assert fakes.older_scores(store) == len(before)
    monkeypatch.setattr(rules, "plain", lambda text: text)  # a rule that changes what is found
    again = rescore(store)
    assert 0 < again.changed < again.rows
    assert fakes.older_scores(store) == 0
    monkeypatch.undo()
    assert fakes.older_scores(store) == len(before)
    assert rescore(store).changed == again.changed
    store.close()
    assert table(all_kinds) == before


@pytest.mark.slow
def test_the_command_says_how_many_changed(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "fake", fakes.FakeTask)
    out = tmp_path / "out"
    go(plan_file, out)
    store = Store(out)
    store.db.execute("UPDATE trials SET scores = '{}' WHERE experiment = 'look'")
    store.db.execute("UPDATE trials SET scoring = ''")
    store.set_meta("scores_version", 1)
    assert fakes.older_scores(store) == 146
    store.close()
    shown = CliRunner().invoke(app, ["rescore", str(out)])
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[-1] == "6 of 146 rows have new scores"
    assert "8 rows could not be scored and keep what they have, for instance fake_choice: unknown task kind" in shown.stderr
    assert fakes.older_scores(Store(out)) == 8, "what could not be scored is still told"
    counts = json.loads(CliRunner().invoke(app, ["rescore", str(out), "--json"]).stdout)
    assert (counts["rows"], counts["changed"], counts["kept"]) == (146, 0, 8)
    assert CliRunner().invoke(app, ["rescore", str(tmp_path / "nowhere")]).exit_code == 2
    assert not (tmp_path / "nowhere").exists()


def test_answers_that_a_task_could_not_score_are_scored_when_it_can(plan_file: Path, tmp_path: Path) -> None:
    """In the command, with a task that was mended; and in a run, where its options were."""
    go(plan_file, tmp_path / "good")
    broken = fakes.PLAN.replace("{kind: fake, samples: 6}", "{kind: fake, samples: 6, scorer: broken}")
    plan_file.write_text(broken)
    go(plan_file, tmp_path / "out", code=1)
    assert all(row.output and row.finish == "failed" for row in Store(tmp_path / "out").rows("task = 'fake'"))

    class Mended(fakes.FakeTask):
        def score(self, item: Any, outcome: Any) -> dict[str, float]:
            return fakes.FakeTask(samples=6).score(item, outcome)

    def make(spec: Any) -> Any:
        fields = {name: value for name, value in spec.items() if name != "kind"}
        return Mended(**fields) if spec["kind"] == "fake" else fakes.make_task(spec)

    store = Store(tmp_path / "out")
    assert rescore(store, make).changed == 138
    rows = {row.id: row for row in store.rows("task = 'fake' AND experiment = 'sweep'")}
    store.close()
    good = {row.id: row for row in Store(tmp_path / "good").rows("task = 'fake' AND experiment = 'sweep'")}
    assert {i: (row.scores, row.finish, row.error, row.facts) for i, row in rows.items()} == {
        i: (row.scores, row.finish, row.error, row.facts) for i, row in good.items()
    }

    go(plan_file, tmp_path / "again", code=1)
    plan_file.write_text(fakes.PLAN)
    assert go(plan_file, tmp_path / "again").loaded == []
    assert table(tmp_path / "again") == table(tmp_path / "good")


def test_a_score_that_reads_what_no_row_keeps_fails_instead_of_being_another(plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "out")
    store = Store(tmp_path / "out")
    item = stored_item(next(store.rows("task = 'fake'")))
    for read in (len, list, lambda prompt: prompt[0], lambda prompt: 3 in prompt, lambda prompt: prompt == ()):
        with pytest.raises(NeedleworkError, match="does not keep its prompt's tokens"):
            read(item.prompt)

    class Counting(fakes.FakeTask):
        def score(self, item: Any, outcome: Any) -> dict[str, float]:
            return {"correct": float(len(item.prompt))}

    before = table(tmp_path / "out")
    again = rescore(store, lambda spec: Counting(samples=6) if spec["kind"] == "fake" else fakes.FakeChoice())
    assert (again.kept, again.changed) == (138, 0)
    assert "does not keep" in again.why
    store.close()
    assert table(tmp_path / "out") == before
