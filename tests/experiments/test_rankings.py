"""Rankings that a plan names: recorded once for a model, on other samples than those judged, and part of a trial's identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fakes
import pytest

import needlework as nw
from needlework.errors import NeedleworkError
from needlework.experiments import run
from needlework.experiments.models import Observed
from needlework.experiments.plan import load
from needlework.experiments.trials import expand
from needlework.interventions.builtin import with_rankings
from needlework.interventions.ranking import Ranking, Recorded
from needlework.requests import Request
from needlework.results import Store

PLAN = """
models: [alpha]
rankings:
  mass:
    tasks: [{kind: fake, samples: 3}]
    seeds: [7]
experiments:
  few:
    tasks: [{kind: fake, samples: 4}]
    interventions: ["none", "keep_heads(k={1, 2}, by=recorded('mass'))"]
"""


@dataclass
class Actor(fakes.FakeActor):
    """Remembers what it was asked to watch, and which acts it was given."""

    watched: list[list[Request]] = field(default_factory=list)
    acts: set[str] = field(default_factory=set)

    def answers(self, requests: Sequence[Request]):  # type: ignore[no-untyped-def]
        self.acts |= {str(request.intervention) for request in requests}
        yield from super().answers(requests)

    def watch(self, requests: Sequence[Request], span: str) -> Observed:
        self.watched.append(list(requests))
        masses = (0.1, 0.4, 0.4, 0.3)
        return Observed([fakes.FakeSeen(0, head, mass, 1.0, 0.0, head / 10, head / 20) for head, mass in enumerate(masses)])


def written(tmp_path: Path, text: str = PLAN) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def asked(tmp_path: Path, text: str = PLAN, out: str = "out") -> tuple[Actor, Store]:
    actor = Actor()
    fakes.run_fakes(written(tmp_path, text), tmp_path / out, fakes.FakeModels(actor))
    return actor, Store(tmp_path / out)


def texts(plan: Path) -> list[str]:
    work = expand(
        load(plan, make_task=fakes.make_task), fakes.FakeModels().inspect(load(plan, make_task=fakes.make_task).models["alpha"])
    )
    return list(dict.fromkeys(str(trial.intervention) for trial in work.trials))


def test_heads_are_kept_in_the_order_that_was_recorded(tmp_path: Path) -> None:
    actor, store = asked(tmp_path)
    order = "ranking('0.1 0.2 0.3 0.0')"  # ties go to the lower head
    assert actor.acts == {"none", f"keep_heads(k=1, by={order})", f"keep_heads(k=2, by={order})"}
    (made,) = store.meta("rankings")["alpha"].values()
    assert (made["name"], made["by"], made["order"], made["samples"]) == ("mass", "needle_mass", "0.1 0.2 0.3 0.0", 3)
    assert made["sinks"] == {"0": [0.0, 0.1, 0.2, 0.3]}
    assert [len(requests) for requests in actor.watched] == [3]
    assert {str(request.intervention) for request in actor.watched[0]} == {"none"}


def test_rows_carry_the_ranking_by_name_and_content(tmp_path: Path) -> None:
    _, store = asked(tmp_path)
    (content,) = store.meta("rankings")["alpha"]
    kept = {row.intervention for row in store.rows()} - {"none"}
    assert kept == {f"keep_heads(k={k}, by=recorded('mass', '{content}'))" for k in (1, 2)}
    assert kept == {str(nw.parse(text)) for text in kept}


def test_what_a_ranking_is_recorded_from_is_part_of_the_trials_identity(tmp_path: Path) -> None:
    before = texts(written(tmp_path))
    for changed in ("seeds: [8]", "seeds: [7]\n    by: copy_score", "seeds: [7]\n    limit: 2"):
        assert texts(written(tmp_path, PLAN.replace("seeds: [7]", changed)))[1:] != before[1:]
    assert texts(written(tmp_path, PLAN.replace("rankings:", "rankings: # a remark"))) == before


def test_a_run_that_goes_on_records_nothing_again(tmp_path: Path) -> None:
    _, store = asked(tmp_path)
    before = store.meta("rankings")
    store.db.execute("DELETE FROM trials WHERE intervention != 'none'")
    store.close()
    actor, store = asked(tmp_path)
    assert (actor.watched, store.meta("rankings")) == ([], before)
    assert len(actor.acts) == 3


@pytest.mark.parametrize(
    "before,after,says",
    [
        ("recorded('mass')", "recorded('mess')", "no ranking 'mess' in this plan; did you mean 'mass'"),
        ("seeds: [7]", "seeds: [0, 7]", "recorded on seed 0, which is judged here"),
        ("seeds: [7]", "seeds: [7]\n    by: luck", "not ranked by 'luck'; known: "),
        ("seeds: [7]", "seeds: [7]\n    by: copy_scores", "not ranked by 'copy_scores'; did you mean 'copy_score'?"),
        ("  mass:\n    tasks: [{kind: fake", "  mass:\n    tasks: [{kind: fake_choice", "generates nothing"),
        ("    seeds: [7]\n", "", "'seeds' is missing in rankings.mass"),
        ("    seeds: [7]\n", "    seeds: [7]\n    sample: 2\n", "unknown key 'sample'"),
        ("recorded('mass')", "recorded(mass)", "write recorded('name')"),
    ],
)
def test_what_cannot_be_ranked_is_refused_before_anything_is_asked(tmp_path: Path, before: str, after: str, says: str) -> None:
    assert before in PLAN
    source = fakes.FakeModels()
    with pytest.raises(NeedleworkError, match=r"plan\.yaml:") as raised:
        fakes.run_fakes(written(tmp_path, PLAN.replace(before, after)), tmp_path / "out", source)
    assert says in str(raised.value)
    assert source.loaded == []


def test_a_ranking_that_is_not_recorded_never_acts() -> None:
    waiting = nw.parse("keep_heads(k=1, by=recorded('mass'))")
    model = fakes.FakeModels().inspect(run.get("02", models=["alpha"]).models["alpha"])
    request = Request((1, 2, 3), waiting)
    with pytest.raises(NeedleworkError, match="'mass' is not recorded yet"):
        nw_prepare(request, model.anatomy)
    known = with_rankings(waiting, {Recorded(name="mass"): Ranking(order=tuple(model.anatomy.heads))})
    assert "ranking('0.0 0.1 0.2 0.3')" in str(known)
    nw_prepare(Request((1, 2, 3), known), model.anatomy)


def nw_prepare(request: Request, anatomy: nw.Anatomy) -> object:
    from needlework.requests import prepare

    return prepare(request, anatomy)


FILED = PLAN.replace("    tasks: [{kind: fake, samples: 3}]\n    seeds: [7]\n", "    file: mine.json\n")


def filed(tmp_path: Path, **about: object) -> Ranking:
    ranking = Ranking(order=[(0, 2), (0, 0), (0, 3), (0, 1)], **about)
    ranking.save(tmp_path / "mine.json")
    return ranking


def test_a_ranking_from_a_file_is_used_and_nothing_is_recorded(tmp_path: Path) -> None:
    order = filed(tmp_path, seed=9).text()
    actor, store = asked(tmp_path, FILED)
    assert actor.acts == {"none", f"keep_heads(k=1, by={order})", f"keep_heads(k=2, by={order})"}
    assert actor.watched == []
    (made,) = store.meta("rankings")["alpha"].values()
    assert (made["name"], made["order"]) == ("mass", "0.2 0.0 0.3 0.1")  # the store keeps what its rows went by
    assert all("recorded('mass', '" in row.intervention for row in store.rows() if row.intervention != "none")


def test_another_order_in_the_file_is_another_trial(tmp_path: Path) -> None:
    filed(tmp_path)
    before = texts(written(tmp_path, FILED))
    filed(tmp_path, method="other", samples=5)
    assert texts(written(tmp_path, FILED)) == before  # the order alone decides
    Ranking(order=[(0, 0), (0, 1), (0, 2), (0, 3)]).save(tmp_path / "mine.json")
    assert texts(written(tmp_path, FILED))[1:] != before[1:]


@pytest.mark.parametrize(
    "before,after,about,says",
    [
        ("mine.json", "yours.json", {}, "cannot be read"),
        ("mine.json", "plan.yaml", {}, "is no JSON"),
        ("file: mine.json", "file: mine.json\n    seeds: [7]", {}, "comes from a file, so leave 'seeds' out"),
        ("", "", {"seed": 0}, "recorded on seed 0, which is judged here"),
        ("", "", {"model": {"weights": "abc"}}, "is of other weights"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, before: str, after: str, about: dict[str, object], says: str) -> None:
    filed(tmp_path, **about)
    source = fakes.FakeModels()
    with pytest.raises(NeedleworkError, match=r"plan\.yaml:") as raised:
        fakes.run_fakes(written(tmp_path, FILED.replace(before, after)), tmp_path / "out", source)
    assert says in str(raised.value)
    assert source.loaded == []


def test_a_ranking_that_sums_cannot_give_is_asked_of_the_model(tmp_path: Path) -> None:
    class Ranks(Actor):
        def rank(self, by: str, items: list[object], seed: int) -> Ranking:
            assert (by, len(items), seed) == ("question_mass", 3, 7)
            assert all(item.ending for item in items)  # type: ignore[attr-defined]
            return Ranking(order=[(0, 3), (0, 2), (0, 1), (0, 0)])

    actor = Ranks()
    plan = written(tmp_path, PLAN.replace("seeds: [7]", "seeds: [7]\n    by: question_mass"))
    fakes.run_fakes(plan, tmp_path / "out", fakes.FakeModels(actor))
    (made,) = Store(tmp_path / "out").meta("rankings")["alpha"].values()
    assert (made["by"], made["order"]) == ("question_mass", "0.3 0.2 0.1 0.0")
    assert "keep_heads(k=1, by=ranking('0.3 0.2 0.1 0.0'))" in actor.acts
