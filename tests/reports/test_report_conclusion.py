"""The first lines of a report: what was found, in plain words with n and interval."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

from needlework.analysis.evidence import NO_CONTEXT
from needlework.analysis.frame import Frame
from needlework.analysis.reader import load
from needlework.analysis.verdicts import Verdict, Word, verdicts
from needlework.reports.page import conclusions, headline
from needlework.results import Store


@pytest.fixture(scope="module")
def frame(run: Path) -> Frame:
    return load([run])


def judged_as(frame: Frame, *words: Word) -> list[Verdict]:
    """The verdicts on the first claim, with these words in place of theirs."""
    first = [v for v in verdicts(frame) if v.claim == "segregation"]
    return [replace(verdict, word=word) for verdict, word in zip(first, words, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words,said",
    [
        (("supported", "supported", "does not apply"), "In both models, attention does the retrieving"),
        (("supported", "inconclusive", "does not apply"), "Attention does the retrieving in 1 of 2 models"),
        (("supported", "not run", "does not apply"), "In tiny-griffin, attention does the retrieving"),
        (("not supported", "not run", "does not apply"), "In tiny-griffin, retrieval does not rest on attention alone"),
        (("not supported", "inconclusive", "does not apply"), "In 1 of 2 models, retrieval does not rest on attention alone"),
        (("inconclusive", "not testable", "does not apply"), "In both models, it is open whether attention does the retrieving"),
        (("not testable", "not testable", "does not apply"), "In both models, retrieval is too weak to test the claims"),
        (("not run", "not run", "not run"), "What interventions do to tiny-griffin, tiny-jamba, tiny-mamba"),
    ],
)
def test_the_headline_counts_the_models_of_the_first_claim(frame: Frame, words: tuple[Word, ...], said: str) -> None:
    assert headline(frame, judged_as(frame, *words)) == said


def test_each_model_has_the_numbers_that_decided_with_n_and_interval(frame: Frame) -> None:
    found = dict(conclusions(frame, verdicts(frame)))
    assert found["tiny-griffin"] == (
        "without heads, it finds 0 % of the needles [0, 10.2; n = 34]; with 1 of 4 heads (25 %) per layer, by entropy,"
        " it keeps 97 % of its retrieval [83.2, 106.5; n = 34]. 2 of 7 claims are supported."
    )
    assert "tiny-mamba" not in found, "no claim is about it"


@pytest.mark.slow
def test_the_opening_speaks_of_what_was_found_before_anything_else(page: Path) -> None:
    body = page.read_text(encoding="utf-8").split("<body>")[1]
    opening = re.sub(r"<[^>]*>", " ", body.split("<nav")[0]).replace("\u00a0", " ")
    assert "it finds 0 % of the needles [0, 10.2; n = 34]" in opening
    assert "seed" not in opening
    assert "trials" not in opening


def test_a_model_that_finds_too_little_has_that_for_a_conclusion(frame: Frame) -> None:
    weak = [replace(v, word="not testable", why="rule 1: untouched it finds 0 % [0, 10.2; n = 34]") for v in verdicts(frame)]
    mixed = [*weak[1:], *(v for v in verdicts(frame) if v.model == "tiny-jamba")]
    assert dict(conclusions(frame, weak))["tiny-griffin"] == "no claim can be tested: untouched it finds 0 % [0, 10.2; n = 34]."
    assert "can be tested" not in dict(conclusions(frame, mixed))["tiny-jamba"]


@pytest.mark.slow
def test_a_condition_of_a_claim_is_not_told_as_an_own_intervention(tmp_path: Path) -> None:
    model, own = "tiny-griffin", "ablate_attention(layers=[1], phase='decode')"
    folder = synthetic.write(tmp_path / "run", (model,))
    store = Store(folder)
    for text in (str(NO_CONTEXT), own):
        store.add([synthetic.trial(model, "more", sample, text) for sample in synthetic.needles(model, 4)])
    store.close()
    frame = load([folder])
    said = dict(conclusions(frame, verdicts(frame)))[model]
    assert own in said
    assert "expose_tokens" not in said
    assert "mode='only'" not in said
