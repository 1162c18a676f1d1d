"""Which layers retrieval needs: the figure's numbers are those of its trials, and the sentence says no more than they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from typer.testing import CliRunner

from needlework.analysis.frame import Frame
from needlework.analysis.layers import LayerAblations
from needlework.analysis.model_trials import ModelTrials
from needlework.analysis.reader import load
from needlework.analysis.verdicts import verdicts
from needlework.cli import app
from needlework.reports.browser import Browser
from needlework.reports.figures import make_figure
from needlework.reports.page import conclusions, headline, write_report
from needlework.reports.panels import Dots, HeatMap
from needlework.results import Row, Store

MODEL = "tiny-griffin"  # attention in layers 2 and 5 of 6
OFF = "ablate_attention(layers={})"
MIXER = "ablate_recurrent(layers={}, site='block')"
ONE_SUFFICES = {OFF.format([2]): 0.1, OFF.format([5]): 1.0, "ablate_attention()": 0.0, MIXER.format([0]): 1.0}
THIRDS = {MIXER.format([1, 3]): 0.5, MIXER.format([0, 4]): 0.25}


def stored(folder: Path, found: dict[str, float], untouched: float = 1.0) -> tuple[Frame, list[Row]]:
    """A run in which these shares of 102 needles are found under these interventions, of perplexity e^(2 + what is lost)."""
    samples = list(synthetic.needles(MODEL, 6))
    inside = [sample for sample in samples if sample.facts["in_window"]]
    rows = []
    for text, share in {"none": untouched, **found}.items():
        for i, sample in enumerate(inside):
            right = i < round(share * len(inside))
            rows.append(replace(synthetic.trial(MODEL, "layers", sample, text), scores={"correct": float(right)}))
        for i, sample in enumerate(synthetic.texts(5)):
            scores = {"nll": 2.0 + i + (1 - share), "tokens": 10.0 + i}
            rows.append(replace(synthetic.trial(MODEL, "layers", sample, text), scores=scores))
    store = Store(folder, create=True)
    synthetic.sign(store, {MODEL: {"anatomy": synthetic.anatomy(MODEL), "weights": "w"}})
    store.add(rows)
    store.close()
    return load([folder]), rows


def test_what_layers_add_is_drawn_as_it_was_recorded(tmp_path: Path) -> None:
    stored(tmp_path, ONE_SUFFICES)
    store, keys = Store(tmp_path), ("layer", "phase", "tokens", "added", "attention", "recurrent")
    values = [(0, "prefill", 70, 1.5, None, 0.5), (1, "prefill", 70, 2.0, 0.25, None)]
    rows = [dict(zip(keys, row, strict=True)) for row in values]
    fewer = [{**row, "tokens": 7, "added": 9.0} for row in rows]
    for task, some in (("niah", rows), ("small", fewer), ("none", [])):
        store.note_recording(("layers", MODEL, task), "hash", some)
    store.close()
    panel = panels(load([tmp_path]))[-1]
    assert isinstance(panel, HeatMap)
    assert "Added to the residual stream" in panel.title
    assert (panel.rows, panel.cols, panel.top) == (["whole layer", "attention", "recurrent mixer"], ["0", "1"], 2.0)
    shown = [[cell and cell.y.value for cell in line] for line in panel.cells]
    assert shown == [[1.5, 2.0], [None, 0.25], [0.5, None]]
    assert "200 %, n = 70" in panel.table().to_text()


def panels(frame: Frame) -> list[HeatMap | Dots]:
    return list(make_figure("layers", frame, Browser(frame)).panels)  # type: ignore[arg-type]


def test_cells_are_the_accuracies_of_their_layers(tmp_path: Path) -> None:
    frame, rows = stored(tmp_path, ONE_SUFFICES)
    needles, likelihood, _ = panels(frame)
    assert isinstance(needles, HeatMap)
    assert isinstance(likelihood, HeatMap)
    assert needles.rows == ["attention off", "no other attention", "recurrent mixer off"]
    assert needles.cols == ["0", "1", "2", "3", "4", "5"]

    def counted(text: str, score: str) -> list[float]:
        return [row.scores[score] for row in rows if row.intervention == text and score in row.scores]

    lines = dict(zip(needles.rows, needles.cells, strict=True))
    at = {(row, str(layer)): cell for row, line in lines.items() for layer, cell in enumerate(line)}
    for (row, col), text in {
        ("attention off", "2"): OFF.format([2]),
        ("no other attention", "5"): OFF.format([2]),
        ("attention off", "5"): OFF.format([5]),
        ("recurrent mixer off", "0"): MIXER.format([0]),
    }.items():
        cell = at.pop((row, col))
        assert cell is not None
        assert (cell.y.value, cell.y.n) == (np.mean(counted(text, "correct")), len(counted(text, "correct")))
    assert at.pop(("no other attention", "2")) is not None
    assert set(at.values()) == {None}
    lost = likelihood.cells[0][2]
    assert lost is not None
    assert lost.y.value == pytest.approx(np.exp(-0.9))  # 0.9 nats a token are lost, in every text


def test_thirds_stand_beside_as_many_other_layers(tmp_path: Path) -> None:
    frame, _ = stored(tmp_path, {**ONE_SUFFICES, **THIRDS})
    dots = panels(frame)[-1]
    assert isinstance(dots, Dots)
    assert {dot.label: round(dot.y.value, 2) for dot in dots.dots} == {
        "attention: early third (2)": 0.1,
        "attention: late third (5)": 1.0,
        "recurrent: early third (0)": 1.0,
        "recurrent: middle third (1, 3)": 0.5,
        "recurrent: 2 of 4, 1 other set": 0.25,
    }


@pytest.mark.parametrize(
    ("found", "untouched", "says"),
    [
        (ONE_SUFFICES, 1.0, ["1 of 2 attention layers (layer 2) suffices", "(2 of 2 such sets tried)", "without layer 2, 9.8 %"]),
        (
            {OFF.format([2]): 0.5, OFF.format([5]): 0.6},
            1.0,
            ["none of 2 smaller sets of its 2", "with layer 2, ", "without layer 5, "],
        ),
        ({OFF.format([2]): 1.0, "ablate_attention()": 1.0}, 1.0, ["0 of 2 attention layers (none) suffice "]),
        (ONE_SUFFICES, 0.5, ["not testable: untouched, it finds 50 %"]),
        ({"ablate_attention()": 0.0}, 1.0, []),
        ({MIXER.format([0]): 0.0}, 1.0, []),
    ],
)
def test_the_sentence(tmp_path: Path, found: dict[str, float], untouched: float, says: Sequence[str]) -> None:
    frame, _ = stored(tmp_path, found, untouched)
    sentence = LayerAblations(ModelTrials(frame, MODEL)).sentence()
    assert bool(sentence) == bool(says)
    assert [part for part in says if part not in sentence] == []
    if says:
        assert "n = 102" in sentence, "with its number of samples"
        assert sentence in dict(conclusions(frame, verdicts(frame)))[MODEL]


@pytest.mark.parametrize(
    ("found", "untouched", "says"),
    [
        (ONE_SUFFICES, 1.0, f"In {MODEL}, 1 of 2 attention layers suffices for retrieval"),
        ({OFF.format([2]): 0.5}, 1.0, f"In {MODEL}, no smaller set of attention layers that was tried suffices for retrieval"),
        ({"ablate_attention()": 0.0, OFF.format([2]): 1.0}, 0.5, f"In {MODEL}, retrieval is too weak to test the claims"),
        ({"ablate_attention()": 0.0}, 1.0, f"In {MODEL}, it is open whether attention does the retrieving"),
        ({OFF.format([2]): 1.0}, 0.5, f"What interventions do to {MODEL}"),
    ],
)
def test_the_headline_is_by_layers_where_no_claim_is_decided(
    tmp_path: Path, found: dict[str, float], untouched: float, says: str
) -> None:
    frame, _ = stored(tmp_path, found, untouched)
    assert headline(frame, verdicts(frame)) == says


@pytest.mark.slow
def test_the_figure_of_the_headline_is_open_and_the_command_says_what_it_says(tmp_path: Path) -> None:
    stored(tmp_path, ONE_SUFFICES)
    written = write_report(tmp_path, pictures=False)
    html = written.path.read_text(encoding="utf-8")
    opened = [part for part in html.split("<section")[1:] if '<details class="part" open>' in part]
    assert [part.split('"')[1] for part in opened] == ["layers"]
    assert f"<h1>{written.headline}</h1>" in html
    said = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert " ".join(said.output.split()).startswith(" ".join(written.text().split()))
