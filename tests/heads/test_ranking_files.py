"""Rankings as files: what is written is read, other models' orders are refused, and nothing but the order makes two unlike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cases
import needlework as nw
from needlework.interventions.ranking import Origin, Ranking
from needlework.pruning.prune import parse_others, prune_subject

HEADS = [nw.Head(2, 1), nw.Head(2, 0), nw.Head(5, 0)]
WHOLE = Ranking.by_scores(
    {nw.Head(2, 0): 0.25, nw.Head(2, 1): 0.5, nw.Head(5, 0): -1e-9},
    method="copy_score",
    model=Origin(name="m", architecture="A", weights="w"),
    task="niah",
    samples=7,
    seed=3,
    evidence={"intervals": {"2.0": [0.1, 0.3]}, "note": "é"},
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    WHOLE.save(tmp_path / "r.json")
    again = Ranking.load(tmp_path / "r.json")
    assert again.model_dump() == WHOLE.model_dump()
    assert list(again.order) == HEADS
    assert again.scores[nw.Head(5, 0)] == -1e-9
    Ranking(order=HEADS).save(tmp_path / "r.json")
    assert Ranking.load(tmp_path / "r.json").model_dump() == Ranking(order=HEADS).model_dump()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_rankings_are_equal_by_order_alone() -> None:
    plain = Ranking(order=HEADS)
    assert plain == WHOLE
    assert hash(plain) == hash(WHOLE)
    assert plain != Ranking(order=HEADS[::-1])
    assert nw.parse(str(nw.KeepHeads(k=1, by=WHOLE))) == nw.KeepHeads(k=1, by=plain)
    assert len({nw.KeepHeads(k=1, by=WHOLE), nw.KeepHeads(k=1, by=plain)}) == 1


def test_equal_scores_stand_in_the_order_of_the_model() -> None:
    assert Ranking.by_scores({nw.Head(5, 0): 1.0, nw.Head(2, 1): 1.0, nw.Head(2, 0): 2.0}).order == ((2, 0), (2, 1), (5, 0))


@pytest.mark.parametrize(
    "change,says",
    [
        ({"format": "x"}, "holds no ranking"),
        ({"version": 2}, "is of version 2, this reads version 1"),
        ({"heads": [[2, 0, 1.0], [2, 0, 0.5]]}, "a head occurs twice"),
        ({"heads": [[2, 0, 1.0], [2, 1]]}, "a list of"),
        ({"heads": [[2, 0, "x"]]}, "valid number"),
        ({"heads": [["a", 0]]}, "whole numbers"),
        ({"heads": {"2.0": 1}}, "a list of"),
        ({"samples": "many"}, "valid integer"),
        ({"extra": 1}, "Extra inputs"),
        ({"model": 5}, "ranking:"),
        ({"order": []}, "order"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**WHOLE.to_dict(), **change}))
    with pytest.raises(nw.NeedleworkError, match=says) as raised:
        Ranking.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "text,says", [("", "no JSON"), ("[" * 100_000, "no JSON"), ("[]", "holds no ranking"), ("\udcff", "UTF-8")]
)
def test_what_is_no_json_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "r.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(nw.NeedleworkError, match=says):
        Ranking.load(tmp_path / "r.json")
    with pytest.raises(nw.NeedleworkError, match="cannot be read"):
        Ranking.load(tmp_path / "none.json")


def test_scores_are_finite_and_of_all_heads() -> None:
    with pytest.raises(nw.NeedleworkError, match="no finite number"):
        Ranking.by_scores({nw.Head(2, 0): float("nan")})
    with pytest.raises(nw.NeedleworkError, match="other heads"):
        Ranking(order=HEADS, scores={nw.Head(2, 0): 1.0})
    with pytest.raises(nw.NeedleworkError, match="choose k from 0 to 3"):
        WHOLE.top(4)


def test_a_ranking_of_another_model_is_refused() -> None:
    subject = cases.subject("jamba")
    heads, weights = subject.anatomy.heads, subject.body.weights
    Ranking(order=heads, model=Origin(weights=weights)).check(subject.anatomy, weights)
    with pytest.raises(nw.NeedleworkError, match=r"has no heads \[\(99, 0\)\]"):
        Ranking(order=[*heads, (99, 0)]).check(subject.anatomy)
    with pytest.raises(nw.NeedleworkError, match="does not cover heads"):
        Ranking(order=heads[1:]).check(subject.anatomy)


def test_other_weights_are_refused_before_any_compute_and_can_be_overruled() -> None:
    subject = cases.subject("jamba")
    other = Ranking(order=subject.anatomy.heads, model=Origin(name="x", weights="tensors:" + "0" * 32), method="m")
    act = nw.KeepHeads(k=1, by=other)
    for ask in (lambda: subject.generate([cases.PROMPT], act), lambda: subject.logits([cases.PROMPT], act)):
        with pytest.raises(nw.NeedleworkError, match=r"by m of x is of other weights .* ranking\.unsigned\(\)"):
            ask()
    mine = other.model_copy(update={"model": Origin(weights=subject.body.weights)})
    expected = subject.generate([cases.PROMPT], nw.KeepHeads(k=1, by=other.unsigned()), max_new_tokens=2)
    assert subject.generate([cases.PROMPT], nw.KeepHeads(k=1, by=mine), max_new_tokens=2) == expected


def test_a_model_from_a_file_is_known_by_its_file_and_one_in_memory_by_its_tensors(tmp_path: Path) -> None:
    from needlework.model.files import weights_hash

    model = cases.build("llama")
    model.save_pretrained(tmp_path)
    loaded = nw.load(tmp_path)
    assert loaded.body.weights == weights_hash(tmp_path)
    wrapped = nw.wrap(model).body.weights
    assert wrapped == nw.wrap(cases.build("llama")).body.weights
    next(model.parameters()).data[0, 0] += 1
    assert nw.wrap(model).body.weights != wrapped


def test_a_model_in_memory_is_known_by_its_configuration_too_and_older_rankings_stay_good() -> None:
    model = cases.build("llama")
    weights = nw.wrap(model).body.weights
    model.config.transformers_version, model.config._name_or_path = "9.9", "elsewhere"
    assert nw.wrap(model).body.weights == weights, "names and versions change no answer"
    model.config.rms_norm_eps *= 10
    subject = nw.wrap(model)
    assert subject.body.weights != weights
    heads, (tensors, _) = subject.anatomy.heads, weights.split("+")
    with pytest.raises(nw.NeedleworkError, match="is of other weights"):
        Ranking(order=heads, model=Origin(weights=weights)).check(subject.anatomy, subject.body.weights)
    Ranking(order=heads, model=Origin(weights=tensors)).check(subject.anatomy, subject.body.weights)  # it knew no more
    with pytest.raises(nw.NeedleworkError, match="is of other weights"):
        Ranking(order=heads, model=Origin(weights=tensors[:-1] + "x")).check(subject.anatomy, subject.body.weights)


def test_heads_that_are_not_there_are_refused_in_keep_heads() -> None:
    subject = cases.subject("llama")
    with pytest.raises(nw.NeedleworkError, match=r"the ranking has heads \[\(7, 3\)\], which LlamaForCausalLM has not"):
        subject.generate([cases.PROMPT], nw.KeepHeads(k=1, by=Ranking(order=[*subject.anatomy.heads, (7, 3)])))


def test_what_is_no_number_in_the_evidence_is_null_in_the_file(tmp_path: Path) -> None:
    Ranking(order=HEADS, evidence={"a": [float("nan"), 1.0], "b": {"c": float("inf")}}).save(tmp_path / "r.json")
    assert Ranking.load(tmp_path / "r.json").evidence == {"a": [None, 1.0], "b": {"c": None}}


def test_hashes_of_files_and_of_tensors_are_not_held_against_each_other(tmp_path: Path) -> None:
    subject = cases.subject("llama")
    of_files = Ranking(order=subject.anatomy.heads, model=Origin(weights="0" * 32))
    assert subject.body.weights.startswith("tensors:")  # it comes from no file
    of_files.check(subject.anatomy, subject.body.weights)
    streaming = prune_subject(subject, (nw.Head(0, 3),), parse_others("window=4,sinks=1")).subject
    assert streaming.body.weights != subject.body.weights, "the same tensors, of which the configuration makes another model"
    of_tensors = Ranking(order=subject.anatomy.heads, model=Origin(weights="tensors:0"))
    with pytest.raises(nw.NeedleworkError, match="is of other weights"):
        of_tensors.check(subject.anatomy, subject.body.weights)
