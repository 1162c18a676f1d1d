"""What is pooled into one number and what is not: each case once went wrong, with these very counts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

import needlework as nw
from needlework.analysis.evidence import collect, helped_by_reading_twice
from needlework.analysis.frame import ALL, Frame, Pick
from needlework.analysis.model_trials import ModelTrials, by_boundary
from needlework.analysis.reader import load
from needlework.analysis.verdicts import Verdict, verdicts
from needlework.reports import report, summary
from needlework.reports.browser import Browser
from needlework.reports.figures import FIGURES, make_figure
from needlework.reports.tables import other_tasks, scores
from needlework.results import Row, Store
from needlework.stats import wilson

MODEL = "tiny-griffin"
OFF = "ablate_attention()"


def row(i: int, right: bool, text: str = "none", **fields: Any) -> Row:
    """The i-th needle, found or not; unlike trials have unlike ids, as in a real store."""
    facts = {"layout": "plain", "in_window": True, "length_tokens": 64, "depth_percent": 50, "twin_target": "jade four"}
    facts |= {"world": "toy", "chance": 0.25} | fields.pop("facts", {})
    chosen = {
        "experiment": "one",
        "task": "niah",
        "kind": "niah",
        "ability": "retrieval",
        "mode": "generate",
        "boundary": "decode",
        **fields,
    }
    what = [text, chosen["boundary"], chosen["mode"], chosen.get("prompt_id", i), i]
    return Row(
        **{
            "id": json.dumps(what),
            "model": MODEL,
            "sample": f"niah/{i}",
            "cluster": f"niah/{i}",
            "seed": 0,
            "intervention": text,
            "prompt": "a needle",
            "prompt_tokens": 2,
            "target": "amber nine",
            "output": "amber nine ." if right else "jade four .",
            "finish": "stop",
            "error": "",
            "seconds": 0.0,
            "facts": facts,
            "scores": {"correct": float(right)},
            "prompt_id": f"prompt {i}",
            **chosen,
        }
    )


def rows(right: int, n: int, text: str = "none", **fields: Any) -> Iterator[Row]:
    return (row(i, i < right, text, **fields) for i in range(n))


def store(directory: Path, trials: Sequence[Row], experiments: Any = None, **about: Any) -> Path:
    made = Store(directory, create=True)
    synthetic.sign(made, {MODEL: {"anatomy": synthetic.anatomy(MODEL), "weights": "w", **about}})
    if experiments:
        made.set_meta("experiments", experiments)
    made.add(trials)
    made.close()
    return directory


def verdict(frame: Frame, claim: str) -> Verdict:
    return next(v for v in verdicts(frame) if v.claim == claim)


def numbers(frame: Frame) -> list[str]:
    """Every share of every figure's table, as text."""
    figures = [make_figure(name, frame, Browser(frame)) for name in FIGURES]
    return [cell for figure in figures for panel in figure.panels for line in panel.table().rows for cell in line[1:]]


def test_a_pick_says_every_field_of_a_group(run: Path) -> None:
    names = [f.name for f in fields(Pick)]
    assert load([run]).groups.columns.tolist() == names
    with pytest.raises(TypeError, match="boundary"):
        Pick(**{name: ALL for name in names if name != "boundary"})  # type: ignore[arg-type]


# A. The kind of a task decides, not its name.


def test_needle_tasks_of_any_name_are_judged_together(tmp_path: Path) -> None:
    trials = [
        row(i, True, text, task=name, prompt_id=f"{name} {i}")
        for name in ("niah", "far", "letter-needles")
        for i in range(5)
        for text in ("none", OFF)
    ]
    judged = verdict(load([store(tmp_path, trials)]), "segregation")
    assert (judged.estimate.n, judged.estimate.value) == (15, 1.0)
    assert "(Tasks: niah, far, letter-needles.)" in judged.sentence


def test_a_task_of_no_known_ability_is_shown_apart_and_judged_by_no_rule(tmp_path: Path) -> None:
    own = {"task": "niah-like", "kind": "haiku", "ability": ""}
    store(tmp_path, [*rows(9, 10, **own), *rows(2, 10, OFF, **own)])
    frame = load([tmp_path])
    assert {v.word for v in verdicts(frame)} == {"not run"}
    assert not any("needles" in v.sentence for v in verdicts(frame))
    assert [line[1:] for line in other_tasks(frame).rows] == [
        ["niah-like", "none", "90 % [59.6, 98.2], n = 10"],
        ["niah-like", OFF, "20 % [5.7, 51], n = 10"],
    ]
    assert scores(frame).rows == []
    assert "<h3>Other tasks</h3>" in report([tmp_path], pictures=False).read_text(encoding="utf-8")


def test_an_own_retrieval_task_stands_in_where_no_needle_was_asked(tmp_path: Path) -> None:
    own = {"task": "fetch", "kind": "fetching", "ability": "retrieval"}
    judged = verdict(load([store(tmp_path / "a", [*rows(90, 90, **own), *rows(0, 90, OFF, **own)])]), "segregation")
    assert (judged.estimate.n, "(Tasks: fetch.)" in judged.sentence) == (90, True)
    two = [*rows(90, 90, **own), *rows(0, 90, OFF, **own), *rows(90, 90, OFF, kind="copying", task="copy")]
    assert verdict(load([store(tmp_path / "b", two)]), "segregation").word == "not run"  # unlike kinds are not pooled


def test_a_baseline_vouches_only_for_the_tasks_that_it_was_asked_in(tmp_path: Path) -> None:
    far = [*rows(10, 100, task="far"), *rows(0, 100, OFF, task="far")]
    far = [replace(t, prompt_id=f"far {t.sample}", id=f"far {t.id}") for t in far]
    frame = load([store(tmp_path, [*rows(900, 900, task="near"), *far])])
    assert wilson(910, 1000).low > 0.8  # both together would do
    judged = verdict(frame, "segregation")
    assert (judged.word, "untouched it finds 10 % of the needles" in judged.sentence) == ("not testable", True)


def test_needles_of_unlike_settings_have_maps_of_their_own(tmp_path: Path) -> None:
    def about(distractors: int, samples: int) -> dict[str, Any]:
        return {"tasks": {"niah": {"options": {"distractors": distractors, "samples": samples}}}}

    experiments = {"one": about(0, 1), "two": about(8, 1), "three": about(8, 5)}
    trials = [*rows(10, 10), *rows(2, 10, experiment="two", prompt_id="8"), *rows(4, 4, experiment="three", prompt_id="3")]
    trials = [replace(t, id=f"{t.experiment} {t.id}", prompt_id=f"{t.experiment} {t.sample}") for t in trials]
    frame = load([store(tmp_path, trials, experiments)])
    grids = {panel.title: panel.cells[0][0].y for panel in make_figure("needles", frame, Browser(frame)).panels}  # type: ignore[union-attr]
    assert grids == {"all 4 heads, distractors 0": wilson(10, 10), "all 4 heads, distractors 8": wilson(6, 14)}
    of_model = ModelTrials(frame, MODEL)
    assert of_model.accuracy(of_model.retrieval("none")) == wilson(16, 24)  # a claim speaks of needles


def test_one_answer_in_two_tasks_counts_once(tmp_path: Path) -> None:
    trials = [*rows(8, 10), *rows(8, 10, task="near", experiment="two")]
    frame = load([store(tmp_path, trials)])
    assert len(frame.data) == 20
    of_model = ModelTrials(frame, MODEL)
    assert of_model.accuracy(of_model.retrieval("none")) == wilson(8, 10)


# B (a). The boundary.


def test_boundaries_are_shown_apart(tmp_path: Path) -> None:
    text = "keep_heads(phase='decode', k=0)"
    trials = []
    for boundary, right in (("decode", 3), ("prefill", 75)):
        trials += [*rows(75, 75, boundary=boundary, experiment=boundary)]
        trials += [*rows(right, 75, text, boundary=boundary, experiment=boundary)]
    frame = load([store(tmp_path, trials)])
    decode, prefill = by_boundary(frame, MODEL)
    assert (decode.boundary, prefill.boundary) == ("decode", "prefill")
    assert decode.accuracy(decode.retrieval(text)) == wilson(3, 75)  # 4 %
    assert prefill.accuracy(prefill.retrieval(text)) == wilson(75, 75)
    assert decode.accuracy(decode.retrieval("none")).n == 75
    assert decode.retained(text).raw.value == pytest.approx(0.04)
    assert prefill.retained(text).raw.value == 1.0
    shown = {line[1]: line[2] for line in scores(frame).rows}
    assert shown["no heads, decode only"] == "4 % [1.4, 11.1], n = 75"
    assert shown["no heads, decode only, boundary: prefill"] == "100 % [95.1, 100], n = 75"
    assert not any("n = 150" in cell for cell in numbers(frame))
    assert any("n = 75" in cell for cell in numbers(frame))


def test_verdicts_are_judged_with_the_last_prompt_token_in_decode_where_that_was_run(tmp_path: Path) -> None:
    trials = [*rows(100, 100), *rows(100, 100, boundary="prefill"), *rows(0, 100, OFF), *rows(100, 100, OFF, boundary="prefill")]
    omit = "expose_tokens(phase='decode', mode='omit')"
    trials += [*rows(0, 100, omit, boundary="prefill")]
    frame = load([store(tmp_path, trials)])
    assert verdict(frame, "segregation").estimate == wilson(0, 100)
    assert "oundary" not in verdict(frame, "segregation").sentence
    exposure = verdict(frame, "exposure")  # run under the other boundary only: judged there, and said
    assert (exposure.word, exposure.estimate.n) == ("supported", 100)
    assert exposure.sentence.endswith("(Boundary: prefill.)")


# B (b). The window.


def test_the_memory_verdict_counts_needles_inside_the_window(tmp_path: Path) -> None:
    trials = list(rows(40, 40))
    for half in ("kv", "recurrent"):
        text = f"swap_memory(half={half!r})"
        inside, outside = (half == "recurrent", half == "kv")  # inside it follows the KV cache, outside never
        trials += [row(i, inside, text, prompt_id=f"in {i}") for i in range(20)]
        trials += [row(i, outside, text, prompt_id=f"out {i}", facts={"in_window": False}) for i in range(20)]
    judged = verdict(load([store(tmp_path, trials)]), "memory")
    assert (judged.word, judged.estimate) == ("supported", wilson(40, 40))
    assert "Needles out of the window do not count here: 0 % of those answers [0, 8.8; n = 40] follow it." in judged.sentence


# B (c). Sinks.


def test_a_limit_with_sinks_is_another_axis(tmp_path: Path) -> None:
    def limit(tokens: int, sinks: str = "") -> str:
        return f"limit_context(phase='prefill', tokens={tokens}{sinks})"

    trials = [*rows(80, 80), *rows(80, 80, limit(1, ", sinks=128")), *rows(2, 80, limit(8)), *rows(80, 80, limit(64))]
    frame = load([store(tmp_path, trials)])
    judged = verdict(frame, "context")
    assert judged.sentence.startswith("64 tokens in sight while reading are the fewest that suffice")
    assert (judged.word, "with 8 tokens" in judged.sentence) == ("not run", True)  # limits are the graded version beside a claim
    titles = [panel.title for panel in make_figure("context", frame, Browser(frame)).panels]
    assert titles == ["One limit at a time", "One limit at a time, with the first 128 tokens in sight"]


def test_what_no_figure_places_is_listed_by_its_text(tmp_path: Path) -> None:
    text = "ablate_heads(heads=[[2, 1]])"
    store(tmp_path, [*rows(80, 80), *rows(20, 80, text)])
    frame = load([tmp_path])
    assert [line[1:3] for line in scores(frame, lambda trials: trials.unplaced).rows] == [[text, "25 % [16.8, 35.5], n = 80"]]
    assert "Retrieval under other interventions" in report([tmp_path], pictures=False).read_text(encoding="utf-8")


# B (d). Which model.


def _model(directory: Path, right: int, **about: Any) -> Path:
    return store(directory, [replace(t, id=f"{about} {t.id}") for t in rows(right, 10)], **about)


def _shares(frame: Frame) -> dict[str, str]:
    return {line[0]: line[2].split(" [")[0] for line in scores(frame).rows}


def test_three_checkpoints_of_one_name_are_three_models(tmp_path: Path) -> None:
    runs = [_model(tmp_path / name / "run", right, weights=name) for name, right in (("x", 5), ("y", 10), ("z", 0))]
    assert _shares(load(runs)) == {MODEL: "50 %", f"{MODEL} (y/run)": "100 %", f"{MODEL} (z/run)": "0 %"}


@pytest.mark.parametrize(
    "what,labels",
    [("dtype", ("float32", "bfloat16")), ("window_rule", ("transformers", "deepmind")), ("tokenizer", ("a", "b"))],
)
def test_whatever_changes_answers_makes_another_model(tmp_path: Path, what: str, labels: tuple[str, str]) -> None:
    runs = [_model(tmp_path / name, right, **{what: name}) for name, right in zip(labels, (10, 0), strict=True)]
    first, second = labels
    expected = {
        "dtype": [f"{MODEL} ({first})", f"{MODEL} ({second})"],
        "window_rule": [f"{MODEL} (window: {first})", f"{MODEL} (window: {second})"],
        "tokenizer": [MODEL, f"{MODEL} ({second})"],
    }[what]
    assert _shares(load(runs)) == dict(zip(expected, ("100 %", "0 %"), strict=True))


def test_one_model_in_two_directories_is_one_and_its_trials_count_once(tmp_path: Path) -> None:
    runs = [store(tmp_path / name, list(rows(7, 10))) for name in ("a", "b")]
    frame = load(runs)
    assert list(frame.models) == [MODEL]
    assert (len(frame.data), frame.trials) == (10, 20)


def test_one_model_under_two_names_is_said(tmp_path: Path) -> None:
    first, second = (store(tmp_path / name, list(rows(7, 10))) for name in ("a", "b"))
    other = Store(second)
    other.set_meta("models", {"mine": other.meta("models")[MODEL]})
    other.db.execute("UPDATE trials SET model = 'mine'")
    other.close()
    frame = load([first, second])
    assert (list(frame.models), len(frame.data)) == ([MODEL], 10)
    assert frame.notes == [
        f"mine is the same model as {MODEL} (weights, tokenizer, dtype and window rule): shown as one, as {MODEL}."
    ]


def test_the_same_answer_under_another_scoring_is_not_the_same_row(tmp_path: Path) -> None:
    own = {"task": "pick", "kind": "niah_choice", "mode": "choices", "boundary": ""}
    experiments = {name: {"tasks": {"pick": {"options": {"against": name}}}} for name in ("all", "context")}
    trials = [*rows(2, 10, **own, experiment="all", scoring="a"), *rows(9, 10, **own, experiment="context", scoring="c")]
    frame = load([store(tmp_path, trials, experiments)])
    assert len(frame.data) == 20
    of_model = ModelTrials(frame, MODEL)
    assert of_model.accuracy(of_model.retrieval("none", "choices")) == wilson(9, 10)  # one way of scoring is judged: no n of 20


def test_equal_groups_with_unlike_scorings_keep_their_rows(tmp_path: Path) -> None:
    trials = [*rows(2, 10, scoring="a"), *rows(9, 10, scoring="b", experiment="two")]
    assert len(load([store(tmp_path, trials)]).data) == 20


def test_stores_of_unlike_semantics_are_not_put_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from needlework.errors import NeedleworkError

    old, new = (store(tmp_path / name, list(rows(7, 10))) for name in ("old", "new"))
    changed = Store(old)
    changed.set_meta("semantics_version", 1)
    changed.close()
    with pytest.raises(NeedleworkError, match=r"old: 1, .*new: 2.*report them one by one"):
        load([old, new])
    text = report([old], pictures=False).read_text(encoding="utf-8")
    assert "is of semantics version 1, this needlework of version 2" in text
    assert "is of semantics version 1" in capsys.readouterr().err
    report([new], pictures=False)
    assert capsys.readouterr().err == ""


# C. What is left out, and said.


def _said(directory: Path) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary([directory]))
    return console.export_text()


def test_rows_that_the_plan_no_longer_asks_for_are_left_out_and_said(tmp_path: Path) -> None:
    old = [replace(t, asked=0, experiment="before") for t in rows(37, 37)]
    store(tmp_path, [*rows(1, 10), *old])
    frame = load([tmp_path])
    of_model = ModelTrials(frame, MODEL)
    assert of_model.accuracy(of_model.retrieval("none")) == wilson(1, 10)
    words = "37 rows of an earlier version of the plan are left out."
    assert words in report([tmp_path], pictures=False).read_text(encoding="utf-8")
    assert words in _said(tmp_path)


def test_a_limit_that_hid_nothing_is_left_out_and_said(tmp_path: Path) -> None:
    text = "limit_context(phase='prefill', tokens=64)"
    idle = {"notes": ["nothing to hide: the prompt has 40 tokens"]}
    acted = list(rows(10, 80, text))
    trials = [replace(t, receipt=idle, scores={"correct": 1.0}) if i >= 50 else t for i, t in enumerate(acted)]
    frame = load([store(tmp_path, [*rows(80, 80), *trials])])
    assert collect(ModelTrials(frame, MODEL), "").context.limits == [(64, wilson(10, 50))]
    words = "30 trials are left out: a part of their intervention had nothing to hide."
    assert words in report([tmp_path], pictures=False).read_text(encoding="utf-8")
    assert words in _said(tmp_path)


@pytest.mark.parametrize("version", [None, 1])
def test_scores_of_an_older_version_are_said(tmp_path: Path, version: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    changed = Store(store(tmp_path, list(rows(7, 10))))
    changed.set_meta("scores_version", version)
    changed.close()
    text = report([tmp_path], pictures=False).read_text(encoding="utf-8")
    assert f"scores of an older version: needlework rescore {tmp_path}" in text
    assert "needlework rescore" in capsys.readouterr().err
    assert "scores of an older version" in _said(tmp_path)


# D, F. What is said of a number.


def test_shares_of_heads_are_the_true_ones(tmp_path: Path) -> None:
    frame = load([store(tmp_path, [*rows(80, 80), *rows(80, 80, "keep_heads(k=1)")])])
    assert [line[1] for line in scores(frame).rows] == ["untouched", "1 of 4 heads (25 %)"]
    assert "With 1 of 4 heads (25 %) per layer, by entropy" in verdict(frame, "few_heads").sentence
    assert "15 % of the heads" not in _said(tmp_path)


@pytest.mark.parametrize(
    "heads,tried,kept",
    [(16, (1, 2, 3, 4), 2), (32, (2, 4, 5, 8), 5), (32, (2, 4, 8), 4), (10, (1, 2, 4), 2), (4, (1, 2), 1), (16, (8,), 0)],
)
def test_few_heads_are_judged_at_the_share_nearest_to_15_percent(
    heads: int, tried: tuple[int, ...], kept: int, tmp_path: Path
) -> None:
    trials = [*rows(80, 80), *(one for k in tried for one in rows(80, 80, f"keep_heads(k={k})"))]
    anatomy = synthetic.anatomy(MODEL)
    for layer in anatomy["layers"]:
        if layer.get("attention"):
            layer["attention"]["query_heads"] = heads
    evidence = collect(ModelTrials(load([store(tmp_path, trials, anatomy=anatomy)]), MODEL), "")
    assert (evidence.few_kept, evidence.few.n) == (kept, 80 if kept else 0)  # half of the heads are not few


def test_curves_of_heads_stand_beside_each_other_and_are_not_pooled(tmp_path: Path) -> None:
    ranked = "keep_heads(k=1, by=recorded('needle_mass', 'abc'))"
    trials = [
        *rows(80, 80),
        *rows(10, 80, "keep_heads(k=1)"),
        *rows(20, 80, "keep_heads(k=1, sinks=1)"),
        *rows(30, 80, ranked),
        *rows(40, 80, "keep_heads(k=1, by=ranking('0.1 0.0'))"),
        *(one for seed in range(2) for one in rows(4, 80, f"keep_heads(k=1, by='random', seed={seed})")),
    ]
    run = store(tmp_path, trials)
    made = Store(run)
    sinks = {"sinks": {"0": [0.1, 0.5]}, "sinks_by_entropy": {"0": [0.4, 0.3]}}
    made.set_meta(
        "rankings", {MODEL: {"abc": {"name": "needle_mass", "by": "needle_mass", "order": "0.1 0.0", "samples": 9, **sinks}}}
    )
    made.close()
    curves = collect(ModelTrials(load([run]), MODEL), "").curves
    assert [(curve.label, curve.at(1).value, curve.at(1).n, curve.sinks.get(1)) for curve in curves] == [
        ("by entropy", 10 / 80, 80, 0.4),
        ("by entropy without the first token", 20 / 80, 80, None),
        ("by needle mass on other samples", 30 / 80, 80, 0.5),
        ("by a ranking", 40 / 80, 80, None),
        ("at random", 4 / 80, 160, pytest.approx(0.3)),
    ]


def test_context_is_judged_from_both_phases_together(tmp_path: Path) -> None:
    reading, answering = "ablate_attention(phase='prefill')", "expose_tokens('only', phase='decode')"
    trials = [*rows(320, 320), *rows(320, 320, reading), *rows(319, 320, answering), *rows(9, 320, f"{answering} + {reading}")]
    judged = verdict(load([store(tmp_path, trials)]), "context")
    assert judged.word == "supported"
    assert [point.estimate.value for point in judged.points] == [1.0, 319 / 320, 9 / 320]


def test_needles_of_two_hops_are_judged_by_no_rule(tmp_path: Path) -> None:
    experiments = {"one": {"tasks": {"niah": {"options": {"distractors": 3}}, "far": {"options": {"hops": 2}}}}}
    far = {"task": "far", "facts": {"hops": 2}}
    trials = [*rows(80, 80), *rows(0, 80, OFF)]
    trials += [row(i, True, text, prompt_id=f"far {i}", **far) for i in range(90) for text in ("none", OFF)]
    judged = verdict(load([store(tmp_path, trials, experiments)]), "segregation")
    assert judged.estimate == wilson(0, 80)


READING, ANSWERING = "ablate_attention(phase='prefill')", "ablate_attention(phase='decode')"


def hops_run(tmp_path: Path) -> Path:
    """One hop by hideouts and by codes, two hops and three by hideouts, untouched and with heads off in a phase."""
    options = {"niah": {"relation": "hideout"}, "codes": {"relation": "code"}}
    options |= {f"far{hops}": {"relation": "hideout", "hops": hops} for hops in (2, 3)}
    experiments = {"one": {"tasks": {name: {"options": written} for name, written in options.items()}}}
    right = {"none": (80, 10, 76, 40), READING: (79, 10, 8, 4), ANSWERING: (2, 0, 3, 0)}
    trials = []
    for text, counts in right.items():
        for (name, written), count in zip(options.items(), counts, strict=True):
            fields = {"task": name, "kind": "linked" if "hops" in written else "niah"}
            trials += [row(i, i < count, text, prompt_id=f"{name} {i}", **fields) for i in range(80)]
    return store(tmp_path, trials, experiments)


def test_hops_are_told_apart_phase_by_phase_and_one_hop_is_asked_of_the_same_relation(tmp_path: Path) -> None:
    frame = load([hops_run(tmp_path)])
    (panel,) = make_figure("hops", frame, Browser(frame)).panels
    found = {dot.label: dot.y for dot in panel.dots}
    rights = {"untouched": (80, 76, 40), "no heads while reading": (79, 8, 4), "no heads while answering": (2, 3, 0)}
    names = ("one hop", "two hops", "three hops")
    wanted = {f"{label}: {name}": n for label, counts in rights.items() for name, n in zip(names, counts, strict=True)}
    assert found == {label: wilson(n, 80) for label, n in wanted.items()}
    assert ModelTrials(frame, MODEL).accuracy(ModelTrials(frame, MODEL).of_form("4 hops", "none")).n == 0


def test_the_terminal_and_the_page_show_hops_by_phase(tmp_path: Path) -> None:
    directory = hops_run(tmp_path)
    text = _said(directory)
    assert re.search(r"no heads while reading +98.8\s%\sn=80 +10\s%\sn=80 +not testable", text), "40 of 80 are found untouched"
    page = report([directory], pictures=False).read_text()
    assert 'id="hops"' in page
    assert "no heads while reading: two hops" in page


def associations_run(tmp_path: Path) -> Path:
    """Needles asked by association and by the letter, in one and in two parts; only the letter is found untouched."""
    options = {f"{ask}{parts}": {"ask": ask, "parts": parts} for parts in (1, 2) for ask in ("association", "letter")}
    experiments = {"one": {"tasks": {name: {"options": written} for name, written in options.items()}}}
    right = {"none": (20, 80, 5, 78), OFF: (1, 0, 2, 3), "expose_tokens('omit', phase='decode')": (4, 6, 7, 8)}
    trials = []
    for text, counts in right.items():
        for name, count in zip(options, counts, strict=True):
            fields = {"task": name, "kind": "association"}
            trials += [row(i, i < count, text, prompt_id=f"{name} {i}", **fields) for i in range(80)]
    return store(tmp_path, trials, experiments)


def test_needles_by_association_are_judged_alone_and_too_few_found_are_not_testable(tmp_path: Path) -> None:
    directory = associations_run(tmp_path)
    frame = load([directory])
    judged = verdict(frame, "segregation")
    assert (judged.word, judged.estimate) == ("not testable", wilson(1, 80))
    assert "untouched it finds 25 %" in judged.why
    (panel,) = make_figure("hops", frame, Browser(frame)).panels
    found = {dot.label: dot.y for dot in panel.dots}
    names = ("by the letter", "by association", "by the letter, two parts", "by association, two parts")
    rights = {"untouched": (80, 20, 78, 5), "no heads": (0, 1, 3, 2), "needle hidden while answering": (6, 4, 8, 7)}
    assert found == {
        f"{label}: {name}": wilson(n, 80) for label, counts in rights.items() for name, n in zip(names, counts, strict=True)
    }
    text = _said(directory)
    assert re.search(r"no heads +0\s%\sn=80 +not\stestable +3.8\s%\sn=80 +not\stestable", text)
    assert "not testable Attention does the retrieving: untouched it finds less than 80 %" in " ".join(text.split())


@pytest.mark.slow
def test_without_tasks_of_more_hops_there_is_no_figure_of_them(run: Path) -> None:
    frame = load([run])
    assert not make_figure("hops", frame, Browser(frame)).panels
    assert "Heads off in one phase" not in _said(run)


def test_reading_twice_is_compared_needle_by_needle_in_one_task(tmp_path: Path) -> None:
    twice = {"task": "niah_jrt", "facts": {"layout": "jrt"}}
    jrt = [row(i, i < 60, prompt_id=f"jrt {i}", **twice) for i in range(80)]
    gain = ModelTrials(load([store(tmp_path / "a", [*rows(40, 80), *jrt])]), MODEL).reading_twice()
    assert (gain.value, gain.n) == (0.25, 80)
    assert 0.1 < gain.low < 0.25
    experiments = {"one": {"tasks": {"niah": {"options": {"distractors": 8}}, "niah_jrt": {"options": {"distractors": 3}}}}}
    assert ModelTrials(load([store(tmp_path / "b", [*rows(40, 80), *jrt], experiments)]), MODEL).reading_twice().n == 0


def test_a_gain_of_ten_points_or_less_is_no_proof_that_the_prompt_can_work(tmp_path: Path) -> None:
    for name, right, helps in (("a", 60, True), ("b", 50, False)):
        jrt = [row(i, i < right, prompt_id=f"jrt {i}", task="niah_jrt", facts={"layout": "jrt"}) for i in range(80)]
        frame = load([store(tmp_path / name, [*rows(40, 80), *jrt])])
        assert bool(helped_by_reading_twice(frame)) == helps
        assert ModelTrials(frame, MODEL).reading_twice().low > 0


def test_every_share_in_the_terminal_has_its_n(run: Path) -> None:
    text = _said(run).split("Claims of the paper")[0].replace("\u00a0", " ")
    shares = re.findall(r"[\d.]+ %( n=[\d,]+)?", re.sub(r"\([\d.]+ %\)|95 % intervals", "", text))
    assert len(shares) > 20
    assert all(shares)
    assert len(re.findall(r"\[[\d.]+, [\d.]+\]", text)) == len(shares), "and its interval"


# G. A score of one's own is a score like the others.


@pytest.mark.usefixtures("registries")
def test_heads_chosen_by_a_score_of_ones_own_are_judged_and_drawn(tmp_path: Path) -> None:
    text, other = "keep_heads(k={}, by='brightest')", "keep_heads(k=2, by='random')"
    trials = [*rows(80, 80), *rows(79, 80, text.format(1)), *rows(80, 80, text.format(2)), *rows(9, 80, other)]
    frame = load([store(tmp_path, trials)])
    assert verdict(frame, "few_heads").word == "not run"  # a score of nobody: its trials are listed by their text
    assert len(scores(frame, lambda trials: trials.unplaced).rows) == 2

    @nw.head_score(needs="outputs")
    def brightest(outputs: Any) -> Any:
        return outputs.amax(-1)

    judged = verdict(frame, "few_heads")
    assert (judged.estimate.n, judged.estimate.value) == (80, 79 / 80)
    assert "With 1 of 4 heads (25 %) per layer, by brightest, it keeps 98.8 %" in judged.sentence
    curve = make_figure("heads", frame, Browser(frame)).panels[0].series[0]  # type: ignore[union-attr]
    assert (curve.label, [point.x for point in curve.points]) == ("by brightest, every position", [0.25, 0.5, 1.0])
    titles = [panel.title for panel in make_figure("needles", frame, Browser(frame)).panels]
    assert titles == ["1 of 4 heads, by brightest", "2 of 4 heads, by brightest", "all 4 heads"]


@pytest.mark.usefixtures("registries")
def test_the_built_in_scores_are_preferred_to_ones_own(tmp_path: Path) -> None:
    @nw.head_score()
    def sharpest(p: Any, log_p: Any) -> Any:
        return p.amax(-1)

    trials = [*rows(80, 80), *rows(80, 80, "keep_heads(k=1, by='sharpest')"), *rows(40, 80, "keep_heads(k=1, by='norm')")]
    frame = load([store(tmp_path, trials)])
    assert "by norm" in verdict(frame, "few_heads").sentence
    assert [c.way for c in ModelTrials(frame, MODEL).conditions] == ["", "sharpest", "norm"]
