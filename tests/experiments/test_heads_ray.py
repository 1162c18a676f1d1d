"""`needlework heads` on workers: the rankings and numbers of one process, whoever dies while they are made."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ray import FakeRay
from test_ray import Nodes, nodes, until  # noqa: F401
from typer.testing import CliRunner

import needlework as nw
from needlework.cli import app
from needlework.errors import NeedleworkError
from needlework.experiments import heads, ray_executor
from needlework.experiments.ray_executor import Cluster
from needlework.heads.causal import greedy
from needlework.heads.contribution import learned
from needlework.heads.observers import AttentionSums, join_observers
from needlework.heads.survey import SurveySettings, origin
from needlework.interventions.ranking import Ranking
from needlework.requests import Request

MODEL = "tiny-griffin-small"
CHEAP = ["copy_score", "question_mass", "entropy", "locos", "gradient"]


def same(a: Any, b: Any, at: str = "") -> None:
    """Equal but for the last bits of numbers."""
    if isinstance(a, float) and isinstance(b, (int, float)):
        assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5), (at, a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b), at
        for key in a:
            same(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for i, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{at}/{i}")
    else:
        assert a == b, (at, a, b)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def here(one_thread: None) -> nw.Subject:
    return nw.load(MODEL)


@contextmanager
def workers(monkeypatch: pytest.MonkeyPatch, here: nw.Subject, **options: Any) -> Iterator[tuple[nw.Subject, FakeRay]]:
    """A remote subject whose workers are objects in this process, with the model that is here; some of them die."""
    ray = FakeRay(**options)
    monkeypatch.setattr(heads, "BATCH_REQUESTS", 8)
    monkeypatch.setattr(heads, "BATCH_SAMPLES", 4)
    monkeypatch.setattr("needlework.subject.load", lambda *_, **__: here)
    monkeypatch.setattr(ray_executor, "node_id", lambda: "")
    monkeypatch.setattr(ray_executor, "import_ray", lambda: ray)
    monkeypatch.setattr(ray_executor, "TICK", 0.0)
    with heads.open_subject(MODEL, Cluster()) as subject:
        yield subject, ray


def seldom(worker: int, call: int, method: str) -> bool:
    """Two workers die at what they are given after some calls."""
    return worker in (1, 2) and call >= 4 and method in ("requests", "apply")


@pytest.mark.slow
def test_a_survey_by_workers_of_whom_some_die_is_that_of_one_process(here: nw.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SurveySettings(samples=6, held_out=6, random_orders=1)
    alone = heads.heads_of(here, CHEAP, "niah", settings)
    with workers(monkeypatch, here, dies=seldom) as (subject, pool):
        spread = heads.heads_of(subject, CHEAP, "niah", settings)
    same(alone.to_dict(), spread.to_dict())
    assert len(pool.workers) == 5, "two died, and others took their place"
    assert pool.most > 1, "several worked at the same time"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["leave_one_out", "add_one_in_decode", "patching"])
def test_each_way_to_rank_is_put_together_as_in_one_process(
    method: str, here: nw.Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = nw.rank(here, method, samples=6)
    with workers(monkeypatch, here) as (subject, fake):
        spread = nw.rank(subject, method, samples=6)
    assert isinstance(alone, Ranking)
    assert isinstance(spread, Ranking)
    same(alone.to_dict(), spread.to_dict())
    assert len(fake.handed) >= 3, "the untouched model and the method are asked in units"


@pytest.mark.slow
@pytest.mark.parametrize("score", [partial(learned, steps=2), partial(greedy, budget=60)])
def test_what_decides_step_by_step_is_done_by_one_worker(score: Any, here: nw.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [sample.item for sample in heads.draw_samples(here, heads.tasks_of("niah", here), 5, 0)]
    told: list[float] = []
    alone = score(here, items, seed=0, progress=lambda share: None)
    with workers(monkeypatch, here) as (subject, fake):
        spread = score(subject, items, seed=0, progress=told.append)
    assert (alone.values == spread.values).all()
    same(dict(alone.evidence), dict(spread.evidence))
    assert told[-1] == 1.0
    assert not fake.handed, "nothing is asked from here"


@pytest.mark.slow
def test_the_recurrent_side_goes_to_workers_too(here: nw.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = heads.recurrent_side_of(here, "niah", 4, 0)
    with workers(monkeypatch, here) as (subject, _):
        same(alone.to_dict(), heads.recurrent_side_of(subject, "niah", 4, 0).to_dict())


def test_a_batch_holds_all_requests_of_its_prompts_in_the_order_of_their_length() -> None:
    prompts = [(1, 2, 3), (4, 5), (1, 2, 3), (6, 7), (8,)] * 20
    cut = list(heads._slices([Request(prompt) for prompt in prompts]))
    assert sorted(i for places in cut for i in places) == list(range(100))
    assert [len(places) for places in cut] == [80, 20] or max(map(len, cut)) < heads.BATCH_REQUESTS + 40
    assert all(len({n for n, places in enumerate(cut) if any(prompts[i] == p for i in places)}) == 1 for p in set(prompts))
    lengths = [len(prompts[i]) for places in cut for i in places]
    assert lengths == sorted(lengths)


def test_samples_and_the_names_of_rankings_are_those_of_the_loaded_model(
    here: nw.Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with workers(monkeypatch, here) as (subject, _):
        for task in ("niah", "recall"):
            drawn = [heads.draw_samples(one, heads.tasks_of(task, one), 4, 0) for one in (here, subject)]
            assert drawn[0] == drawn[1], "prompts, and what ends an answer"
        assert origin(subject) == origin(here)


def test_what_nobody_waits_for_any_more_answers_no_later_question(here: nw.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ([Request((1, start + i, 6), max_new_tokens=2) for i in range(30)] for start in (20, 60))
    expected = [answer.tokens for answer in here.answer(second)]
    with workers(monkeypatch, here) as (subject, fake):
        begun = subject.engine.run(first)
        next(begun)
        begun.close()
        assert any(method == "execute" for _, method, _ in fake.running.values()), "workers are still at it"
        answers = dict(subject.engine.run(second))
    assert [answers[i].tokens for i in range(30)] == expected


def test_slices_are_put_together_in_the_order_of_their_samples() -> None:
    slices = []
    for count, value in ((2, 1.0), (1, 5.0)):
        look = AttentionSums(count)
        look.sums[0, "queries"] = torch.full((count, 3), value, dtype=torch.float64)
        slices.append(look)
    slices[1].sums[4, "copies"] = torch.full((1, 2), 7.0, dtype=torch.float64)
    whole = join_observers(slices)
    assert whole.count == 3
    assert whole.all_heads("queries").tolist() == [[1] * 3, [1] * 3, [5] * 3]
    assert whole.all_heads("copies").tolist() == [[0, 0], [0, 0], [7, 7]], "a slice that names it not has none"


def test_what_workers_refuse_is_refused_in_their_words(here: nw.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        workers(monkeypatch, here) as (subject, _),
        pytest.raises(NeedleworkError, match=r"layers \[99\] are no attention layers"),
    ):
        list(subject.engine.run([Request((1, 2, 3), "ablate_attention(layers=[99])")]))
    doomed = workers(monkeypatch, here, dies=lambda worker, call, method: method == "apply")
    with doomed as (subject, _), pytest.raises(NeedleworkError, match=r"ended 3 workers.*take fewer workers or larger nodes"):
        nw.rank(subject, "copy_score", samples=4)


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, ["heads", MODEL, "--ray"])
    assert done.exit_code == 2
    assert "pip install 'needlework[ray]'" in done.output


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_changes_no_ranking(nodes: Nodes, tmp_path: Path, one_thread: None) -> None:  # noqa: F811
    words = [MODEL, "--by", "copy_score", "--by", "leave_one_out", "--samples", "20", "--held-out", "20"]
    out, alone = tmp_path / "out", tmp_path / "alone"
    command = [sys.executable, "-m", "needlework", "heads", *words]
    process = subprocess.Popen(
        [*command, "--out", str(out), "--ray", nodes.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.kill(until(process, nodes.workers)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    assert b"a worker was lost" in said, said
    done = CliRunner().invoke(app, ["heads", *words, "--out", str(alone)])
    assert done.exit_code == 0, done.output
    files = sorted(path.name for path in alone.glob("*.json"))
    assert len(files) == 3
    for name in files:
        same(json.loads((alone / name).read_text()), json.loads((out / name).read_text()), name)
