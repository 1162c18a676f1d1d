"""Pictures of heads: every map says what its colours mean, and curves of few samples can be told apart."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer

import cases
from needlework.heads import output
from needlework.heads.evaluation import RetrievalCurve
from needlework.heads.survey import Survey, SurveySettings
from needlework.interventions.ranking import Origin, Ranking
from needlework.stats import accuracy


@pytest.fixture(scope="module")
def survey() -> Survey:
    anatomy = cases.subject("llama").anatomy
    heads = anatomy.heads
    scored = Ranking.by_scores({head: 0.25 + i for i, head in enumerate(heads)})
    right = np.ones((3, 6))
    right[0, :4] = 0
    curves = {
        name: RetrievalCurve(name, len(heads), (0, 1, len(heads)), right, ("a", "b", "c") * 2)
        for name in ("one", "two", "random")
    }
    rankings = {"one": scored, "two": Ranking(order=heads)}
    return Survey(Origin(name="x"), anatomy, SurveySettings(), ["niah"], accuracy(right[0]), rankings, {}, curves)


def test_each_map_has_a_colour_bar_from_its_lowest_score_to_its_highest(survey: Survey) -> None:
    canvas = output.draw_score_maps(survey)
    canvas.draw_without_rendering()
    heads = [tick for ax in canvas.axes if ax.get_xlabel() == "head" for tick in ax.get_xticks()]
    assert all(tick == int(tick) for tick in heads)
    last = len(survey.anatomy.heads) - 1
    bars = [ax for ax in canvas.axes if ax.get_label() == "<colorbar>"]
    assert [[tick.get_text() for tick in bar.get_yticklabels()] for bar in bars] == [
        [f"{0.25:.2g}", f"{0.25 + last:.2g}"],
        [str(1 + last), "1"],
    ], "scores, and places where there are none"


def test_equal_curves_lie_side_by_side_with_the_intervals_of_their_points(survey: Survey) -> None:
    canvas = output.draw_curves(survey)
    canvas.draw_without_rendering()
    (ax,) = canvas.axes
    drawn = [one for one in ax.containers if isinstance(one, ErrorbarContainer)]
    assert len(drawn) == 3
    places = [bar.lines[0].get_transform().transform(bar.lines[0].get_xydata()) for bar in drawn]
    assert len({tuple(np.round(place[:, 0], 3)) for place in places}) == 3, "side by side"
    assert all(np.allclose(place[:, 1], places[0][:, 1]) for place in places), "and no other height"
    estimate = survey.curves["one"].at(0)
    (bars,) = drawn[0].lines[2]
    assert bars.get_segments()[0][:, 1].tolist() == pytest.approx([estimate.low, estimate.high])
    apart = np.ptp([place[1, 0] for place in places]) * 72 / canvas.dpi
    assert apart == pytest.approx(2 * output._BESIDE)
