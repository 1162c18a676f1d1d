"""A store of version 1, made by the needlework of that time (tests/run/version1), opens, goes on and is counted rightly."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest

from needlework.experiments import run
from needlework.experiments.models import DiskModels, ModelInfo
from needlework.experiments.plan import Model
from needlework.rescoring import rescore
from needlework.store import Row, Store

HERE = Path(__file__).parent / "version1"
WEIGHTS = "26cf30cb0b6e909c19b83f2890d68a89"  # of the tiny-griffin that the store was made with
ROWS = 28


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copy(HERE / "run.sqlite", tmp_path)
    return tmp_path


def old_rows() -> dict[tuple[str, ...], dict[str, Any]]:
    """What version 1 wrote, read without needlework."""
    db = sqlite3.connect(f"file:{HERE / 'run.sqlite'}?immutable=1", uri=True)
    db.row_factory = sqlite3.Row
    rows = {(r["experiment"], r["model"], r["task"], r["id"]): dict(r) for r in db.execute("SELECT * FROM trials")}
    db.close()
    assert len(rows) == ROWS
    assert "kind" not in next(iter(rows.values()))
    return rows


def new_rows(store: Store) -> dict[tuple[str, ...], Row]:
    return {(t.experiment, t.model, t.task, t.id): t for t in store.rows()}


def test_rows_say_what_version_2_says(old: Path) -> None:
    store = Store(old)
    rows = new_rows(store)
    assert store.meta("schema_version") == 2
    assert store.meta("migrated_from") == 1
    kinds = {(t.experiment, t.task): (t.kind, t.ability, t.boundary) for t in rows.values()}
    assert kinds == {
        ("needles", "letter-needles"): ("niah", "retrieval", "decode"),
        ("needles", "niah_choice"): ("niah_choice", "retrieval", ""),
        ("prefill", "niah"): ("niah", "retrieval", "prefill"),
        ("knowledge", "cloze_choice"): ("cloze_choice", "knowledge", ""),
        ("knowledge", "perplexity"): ("perplexity", "perplexity", ""),
    }
    assert {t.asked for t in rows.values()} == {1}
    assert {t.scoring for t in rows.values()} == {""}
    assert fakes.older_scores(store) == ROWS
    for key, was in old_rows().items():
        assert rows[key].scores == json.loads(was["scores"])
        assert rows[key].output == was["output"]
        if rows[key].greedy:
            assert rows[key].greedy.index(True) == rows[key].facts["answer_option"]
            assert rows[key].scores["top1"] == 1
    assert any(t.greedy for t in rows.values())
    store.close()


def test_a_migrated_store_is_rescored_and_keeps_what_it_cannot_know(old: Path) -> None:
    store = Store(old)
    done = rescore(store)
    assert (done.rows, done.kept, done.changed) == (ROWS, 0, 0), "punctuation never mattered in the toy language"
    rows = new_rows(store)
    for key, was in old_rows().items():
        assert rows[key].scores == json.loads(was["scores"])
    assert fakes.older_scores(store) == 0
    store.db.execute("UPDATE trials SET scores = json_set(scores, '$.correct', 7) WHERE mode != 'perplexity'")
    assert rescore(store).changed == ROWS - 4, "what can be computed is computed"
    assert {key: t.scores for key, t in new_rows(store).items()} == {key: t.scores for key, t in rows.items()}
    store.close()


class Unloaded(DiskModels):
    """Models that are looked at only."""

    def look(self, model: Model) -> ModelInfo:
        """The model of today, under the weights that the store was made with: no answer is asked of it."""
        return replace(super().look(model), weights=WEIGHTS)

    def load(self, seen: Any) -> Any:
        pytest.fail("something was asked again")


def test_a_run_of_version_1_goes_on_and_asks_nothing_again(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.run(HERE / "plan.yaml", old, source=Unloaded(), progress=False).sound
    assert f"{ROWS} rows were scored anew" in capsys.readouterr().err
    store = Store(old)
    rows = new_rows(store)
    assert rows.keys() == old_rows().keys()
    for key, was in old_rows().items():
        assert rows[key].scores == json.loads(was["scores"])
        assert rows[key].logprobs == json.loads(was["logprobs"])
    assert fakes.older_scores(store) == 0
    assert store.meta("migrated_from") is None
    assert rescore(store).changed == 0
    assert len(store.observations()) == 32, "recordings of the same samples are kept"
    store.close()


def test_rows_of_an_edited_plan_are_told_apart_when_it_is_run(old: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    text = (HERE / "plan.yaml").read_text()
    plan.write_text(text.replace("depths: [0, 100], samples: 2", "depths: [0, 100]"))
    assert run.run(plan, old, source=Unloaded(), progress=False).sound
    store = Store(old)
    counts = dict(store.db.execute("SELECT asked, count(*) FROM trials GROUP BY 1"))
    assert counts == {0: 4, 1: ROWS - 4}
    store.close()


def test_rows_that_no_plan_can_ask_for_are_told_apart_at_once(old: Path) -> None:
    """A task that is gone from the plan, another seed, a model that the experiment no longer has; but lm-eval has no plan."""
    db = sqlite3.connect(old / "run.sqlite")
    db.execute("UPDATE trials SET task = 'gone' WHERE task = 'perplexity'")
    db.execute("UPDATE trials SET seed = 7 WHERE task = 'cloze_choice'")
    db.execute("UPDATE trials SET model = 'other' WHERE task = 'niah'")
    db.execute("UPDATE trials SET experiment = 'ability', model = 'other', seed = 3 WHERE task = 'niah_choice'")
    (text,) = db.execute("SELECT value FROM meta WHERE key = 'experiments'").fetchone()
    experiments = json.loads(text)
    experiments["ability"] = {**experiments["needles"], "tasks": {"mini": {"kind": "lm-eval", "mode": "choices"}}}
    db.execute("UPDATE meta SET value = ? WHERE key = 'experiments'", (json.dumps(experiments),))
    db.execute("""UPDATE trials SET facts = json_set(facts, '$.greedy', json('[true, false]')) WHERE experiment = 'ability'""")
    db.commit()
    db.close()
    rows = new_rows(Store(old)).values()
    assert {(t.task, t.asked) for t in rows} == {
        ("gone", 0),
        ("cloze_choice", 0),
        ("niah", 0),
        ("letter-needles", 1),
        ("niah_choice", 1),
    }
    theirs = [t for t in rows if t.experiment == "ability"]
    assert {(t.kind, t.ability, tuple(t.greedy)) for t in theirs} == {("lm-eval", "knowledge", (True, False))}


def test_a_recording_whose_samples_are_not_sure_is_made_again(old: Path) -> None:
    """An edited plan of version 1 left rows of other samples beside those that were recorded, or they would be the same."""
    shutil.copytree(old, old / "sure")
    assert [row[:3] for row in Store(old / "sure").meta("recorded")] == [["prefill", "tiny-griffin", "niah"]]
    db = sqlite3.connect(old / "run.sqlite")
    db.execute("UPDATE observations SET samples = 5")
    db.commit()
    db.close()
    assert Store(old).meta("recorded") == []


def test_a_store_that_may_not_be_written_is_read_from_a_copy(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlework.store.database.writable", lambda path: False)
    before = (old / "run.sqlite").read_bytes()
    store = Store(old)
    assert len(new_rows(store)) == ROWS
    assert store.meta("schema_version") == 2
    place = Path(store.db.execute("PRAGMA database_list").fetchone()[2])
    store.close()
    assert (old / "run.sqlite").read_bytes() == before
    assert sorted(path.name for path in old.iterdir()) == ["run.sqlite"]
    assert place.parent != old
    assert not place.exists()


def test_what_breaks_off_leaves_a_store_of_version_1(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needlework.store import migration

    def dies(db: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(migration, "_recordings", dies)
    with pytest.raises(KeyboardInterrupt):
        Store(old)
    monkeypatch.undo()
    assert len(new_rows(Store(old))) == ROWS
