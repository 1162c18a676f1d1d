"""Two checkpoints compared: paired differences for every claim, heads kept, lost and moved, and clear refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

import needlework as nw
from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import ModelTrials
from needlework.analysis.reader import load
from needlework.analysis.verdicts import verdicts
from needlework.reports.comparison import (
    MOST_CHANGES,
    change_tables,
    claim_tables,
    findings,
    head_tables,
    headline,
    pair_models,
    records,
)
from needlework.reports.page import write_report
from needlework.results import Observation, Store
from needlework.stats import gain


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints: the second answers every third needle wrong without heads off, and other heads look at the needle."""
    folder = tmp_path_factory.mktemp("pair")
    runs = [synthetic.write(folder / name, ("tiny-griffin",), per_cell=1) for name in ("a", "b")]
    store = Store(runs[1])
    about = store.meta("models")
    about["tiny-griffin"]["weights"] = "retrained"
    store.set_meta("models", about)
    store.db.execute("UPDATE trials SET scores = json_set(scores, '$.correct', 0.0) WHERE rowid % 3 = 0 AND mode = 'generate'")
    store.db.execute("DELETE FROM observations")
    mass = {(2, 1): 0.9, (5, 3): 0.8}
    heads = [(layer, head) for layer in (2, 5) for head in range(4)]
    store.add([Observation("recording", "tiny-griffin", "niah", *h, 75, mass.get(h, 0.01), 1.0, 0.1) for h in heads])
    store.close()
    return runs


@pytest.mark.slow
def test_differences_are_paired_by_sample(pair: list[Path]) -> None:
    frame = load(pair)
    pair_models(frame, pair[0])
    assert frame.families == [["tiny-griffin", "tiny-griffin (b)"]]
    (table,) = claim_tables(frame, verdicts(frame))
    first = dict(zip(table.columns, table.rows[0], strict=True))
    before, after = (ModelTrials(frame, model) for model in frame.families[0])
    pairs = before.pairs(after.retrieval("none"), before.retrieval("none"))
    expected = gain(pairs.after, pairs.before, pairs.clusters)
    assert expected.value < -0.2
    assert first[""] == "untouched: retrieval"
    assert str(first["difference, points"]).startswith(f"{100 * expected.value:+.1f} [{100 * expected.low:+.1f}, ")
    assert {"no heads: forced choice", "kv half swapped: own answer"} <= {str(row[0]) for row in table.rows}
    ((model, words),) = findings(frame)
    assert model == "tiny-griffin (b)"
    assert words.startswith("against tiny-griffin, ")


@pytest.mark.slow
def test_the_base_may_be_either_run_or_a_model(pair: list[Path]) -> None:
    for against, base in (
        (pair[1], "tiny-griffin (b)"),
        ("tiny-griffin (b)", "tiny-griffin (b)"),
        ("tiny-griffin", "tiny-griffin"),
    ):
        frame = load(pair)
        pair_models(frame, against)
        assert frame.families[0][0] == base


def test_heads_are_kept_lost_and_new(pair: list[Path]) -> None:
    frame = load(pair)
    pair_models(frame, pair[0])
    (table,) = head_tables(frame)
    found = {str(row[0]): row[1:] for row in table.rows}
    assert len(found) >= 1
    ranks = {model: {h: w.mass[h][0] for h in w.mass} for w in frame.observations for model in [w.model]}
    best = {model: max(mass, key=lambda head: mass[head]) for model, mass in ranks.items()}
    kept = best["tiny-griffin"] == best["tiny-griffin (b)"]
    assert ("kept" in {str(row[-1]) for row in table.rows}) == kept
    assert found[".".join(map(str, best["tiny-griffin (b)"]))][1] == "1"


@pytest.mark.slow
def test_what_cannot_be_paired_is_refused(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(nw.NeedleworkError, match="neither one of these runs nor a model in them: tiny-griffin"):
        nw.report(pair, tmp_path, against="other")
    with pytest.raises(nw.NeedleworkError, match="nothing to compare with tiny-griffin"):
        nw.report(pair[0], tmp_path, against="tiny-griffin")
    store = Store(pair[1])
    rows = [replace(row, sample=f"new {row.sample}") for row in store.rows()]
    other = Store(tmp_path / "other", create=True)
    for name in ("models", "semantics_version", "scores_version"):
        other.set_meta(name, store.meta(name))
    other.add(rows)
    other.close()
    store.close()
    with pytest.raises(nw.NeedleworkError, match="answered no sample in common: run the same plan on both"):
        nw.report([pair[0], tmp_path / "other"], tmp_path, against=pair[0])


@pytest.mark.slow
def test_the_page_opens_with_what_changed(pair: list[Path], tmp_path: Path) -> None:
    text = nw.report(pair, tmp_path, against=pair[0]).read_text(encoding="utf-8")
    assert text.split("<nav")[0].count("against tiny-griffin, ") == 1
    assert "tiny-griffin (b) against tiny-griffin" in text.split('id="comparison"')[1].split("</section>")[0]


@pytest.mark.slow
def test_the_conclusion_is_about_the_difference_and_details_are_folded(pair: list[Path], tmp_path: Path) -> None:
    written = write_report(pair, tmp_path, pair[0], pictures=False)
    assert written.headline == headline(_paired(pair))
    assert re.fullmatch(r"tiny-griffin \(b\) loses [\d.]+ points of .+ against tiny-griffin", written.headline)
    text = written.path.read_text(encoding="utf-8")
    assert f"<h1>{written.headline}</h1>" in text
    assert text.index('id="comparison"') < text.index('id="findings"')
    first, folded = text.split('id="comparison"')[1].split("</section>")[0].split("<details>", 1)
    (changes,) = change_tables(_paired(pair), [])
    assert all(f'<th scope="row">{row[0]}</th>' in first for row in changes.rows)
    assert first.count("<tr>") == len(changes.rows) + 1 < folded.count("<tr>")


def test_changes_exclude_zero_and_are_ordered_by_size(pair: list[Path]) -> None:
    frame = _paired(pair)
    every = {record["what"]: record["difference"] for record in records(frame)}
    (table,) = change_tables(frame, [])
    shown = [str(row[0]) for row in table.rows]
    sure = [what for what, gap in every.items() if gap["high"] < 0 or gap["low"] > 0]
    assert 0 < len(sure) < len(every)
    assert set(shown) <= set(sure)
    assert len(shown) == min(len(sure), MOST_CHANGES)
    assert shown == sorted(shown, key=lambda what: -abs(every[what]["value"]))


@pytest.mark.slow
def test_equal_runs_have_no_change(tmp_path: Path) -> None:
    runs = [synthetic.write(tmp_path / name, ("tiny-griffin",), per_cell=1) for name in ("a", "b")]
    store = Store(runs[1])
    about = store.meta("models")
    about["tiny-griffin"]["weights"] = "a copy"
    store.set_meta("models", about)
    store.close()
    frame = _paired(runs)
    assert change_tables(frame, []) == []
    assert headline(frame) == "tiny-griffin (b) and tiny-griffin: no paired difference is beyond its 95 % interval"


def _paired(runs: list[Path]) -> Frame:
    frame = load(runs)
    pair_models(frame, runs[0])
    return frame


def test_a_model_without_common_samples_is_left_out_and_named(pair: list[Path], tmp_path: Path) -> None:
    source = Store(pair[1])
    about = source.meta("models")["tiny-griffin"]
    stranger = Store(tmp_path / "stranger", create=True)
    stranger.set_meta("models", {"stranger": {**about, "weights": "others"}})
    for name in ("semantics_version", "scores_version"):
        stranger.set_meta(name, source.meta(name))
    stranger.add([replace(row, model="stranger", sample=f"new {row.sample}") for row in source.rows()])
    stranger.close()
    source.close()
    frame = _paired([*pair, tmp_path / "stranger"])
    assert frame.families == [["tiny-griffin", "tiny-griffin (b)"]]
    assert "stranger and tiny-griffin answered no sample in common and are not compared." in frame.notes
