"""Others' files: Wu's scores and DuoAttention's gates, there and back, and what is none of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import cases
import needlework as nw
from needlework.anatomy import Anatomy
from needlework.heads import foreign
from needlework.interventions.ranking import Origin, Ranking


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    return cases.subject("jamba").anatomy  # attention beside recurrent layers, query heads that share keys


def ranking(anatomy: Anatomy) -> Ranking:
    return Ranking.by_scores({head: float((7 * i) % 5) for i, head in enumerate(anatomy.heads)}, method="m")


def test_wus_file_as_its_authors_read_it(tmp_path: Path, anatomy: Anatomy) -> None:
    heads = anatomy.heads
    content = {f"{h.layer}-{h.index}": [0.1 * i, 0.3 * i] for i, h in enumerate(heads)}
    (tmp_path / "llama.json").write_text(json.dumps(content) + "\n")
    found = foreign.read(tmp_path / "llama.json", anatomy)
    means = sorted(((float(np.mean(v)), [int(n) for n in k.split("-")]) for k, v in content.items()), reverse=True)
    assert [list(head) for head in found.order] == [head for _, head in means]
    assert found.scores[heads[1]] == pytest.approx(0.2)
    assert (found.method, found.samples) == ("wu:llama", 2)


def test_wu_there_and_back(tmp_path: Path, anatomy: Anatomy) -> None:
    mine = ranking(anatomy)
    foreign.write(mine, tmp_path / "x.json", "wu", anatomy)
    again = foreign.read(tmp_path / "x.json", anatomy)
    assert again == mine
    assert again.scores == mine.scores


def test_locos_file_as_its_authors_read_and_write_it(tmp_path: Path, anatomy: Anatomy) -> None:
    """Their `load_retrieval_heads`, restated: the scores of an envelope, heads by mean score; their writer adds intervals."""
    mine = Ranking.by_scores(ranking(anatomy).scores, method="locos", samples=9, task="niah", seed=4, model=Origin(name="m"))
    foreign.write(mine, tmp_path / "x.json", "locos", anatomy)
    content = json.loads((tmp_path / "x.json").read_text())
    means = sorted(content["scores"].items(), key=lambda item: np.mean(item[1]), reverse=True)
    assert [mine.scores[nw.Head(*map(int, name.split("-")))] for name, _ in means] == [mine.scores[h] for h in mine.order]
    assert foreign.read(tmp_path / "x.json", anatomy).scores == mine.scores
    theirs = {f"{h.layer}-{h.index}": [0.5 * i, -0.1 * i] for i, h in enumerate(anatomy.heads)}
    meta = {"method": "logit_contribution", "dataset": "nolima", "model": "m", "seed": 4, "num_trials_passed": 2}
    envelope = {"meta": meta, "scores": theirs, "trial_ids": ["a", "b"], "confidence_intervals": {"0-0": [0, 1]}}
    (tmp_path / "y.json").write_text(json.dumps(envelope))
    found = foreign.read(tmp_path / "y.json", anatomy)
    assert found.order == anatomy.heads[::-1]
    assert (found.method, found.samples, found.task, found.seed, found.model.name) == ("locos:y", 2, "nolima", 4, "m")


def test_gates_are_a_matrix_of_layers_by_key_heads(tmp_path: Path, anatomy: Anatomy) -> None:
    parts = list(anatomy.attention_parts())
    assert any(part.kv_heads < part.query_heads for _, part in parts)
    assert len(parts) < len(anatomy.layers)
    mine = ranking(anatomy)
    foreign.write(mine, tmp_path / "x.tsv", "duo", anatomy)
    gates = np.loadtxt(tmp_path / "x.tsv", delimiter="\t", ndmin=2)  # as DuoAttention reads it
    assert gates.shape == (len(anatomy.layers), parts[0][1].kv_heads)
    assert (gates.min() >= 0, gates.max()) == (True, 1.0)
    again = foreign.read(tmp_path / "x.tsv", anatomy)
    for layer, part in parts:
        size = part.query_heads // part.kv_heads
        for q in range(part.query_heads):
            assert again.scores[nw.Head(layer, q)] == pytest.approx(gates[layer, q // size])
        best = [max(mine.scores[nw.Head(layer, kv * size + i)] for i in range(size)) for kv in range(part.kv_heads)]
        assert np.argsort(best).tolist() == np.argsort(gates[layer], kind="stable").tolist() or len(set(best)) < len(best)
    foreign.write(again, tmp_path / "y.tsv", "duo", anatomy)
    assert foreign.read(tmp_path / "y.tsv", anatomy) == again


def test_kvpress_streams_the_heads_that_score_lowest(tmp_path: Path, anatomy: Anatomy) -> None:
    """What kvpress's DuoAttentionPress does with the file, restated: kvpress is no dependency (benchmarks/kvpress_duo.py).

    It takes the smallest entries of the whole matrix, and a layer's row is the one of its index in the model.
    """
    parts = dict(anatomy.attention_parts())
    scores = {head: float((7 * i) % 11) for i, head in enumerate(anatomy.heads)}
    foreign.write(Ranking.by_scores(scores), tmp_path / "x.tsv", "duo", anatomy)
    gates = np.clip(np.loadtxt(tmp_path / "x.tsv", dtype=float, delimiter="\t"), 0, 1)
    streaming = np.zeros(gates.shape, dtype=bool)
    streaming[np.unravel_index(np.argsort(gates, axis=None)[:2], gates.shape)] = True
    size = {layer: part.query_heads // part.kv_heads for layer, part in parts.items()}
    best = {(h.layer, h.index // size[h.layer]): 0.0 for h in anatomy.heads}
    for head, score in scores.items():
        place = (head.layer, head.index // size[head.layer])
        best[place] = max(best[place], score)
    lowest = sorted(best, key=lambda place: best[place])[:2]
    assert {(layer, kv) for layer in parts for kv in range(parts[layer].kv_heads) if streaming[layer][kv]} == set(lowest)
    assert not any(streaming[layer].any() for layer in range(len(anatomy.layers)) if layer not in parts)


def test_rows_of_attention_layers_alone_are_read_too(tmp_path: Path, anatomy: Anatomy) -> None:
    foreign.write(ranking(anatomy), tmp_path / "x.tsv", "duo", anatomy)
    lines = (tmp_path / "x.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "y.tsv").write_text("".join(lines[layer] for layer, _ in anatomy.attention_parts()))
    assert foreign.read(tmp_path / "x.tsv", anatomy).scores == foreign.read(tmp_path / "y.tsv", anatomy).scores


def test_our_own_file_is_read_too_and_other_models_heads_are_refused(tmp_path: Path, anatomy: Anatomy) -> None:
    ranking(anatomy).save(tmp_path / "mine.json")
    assert foreign.read(tmp_path / "mine.json", anatomy) == ranking(anatomy)
    with pytest.raises(nw.NeedleworkError, match="has no heads"):
        foreign.read(tmp_path / "mine.json", cases.subject("llama").anatomy)


@pytest.mark.parametrize(
    "name,text,says",
    [
        ("a.json", "{}", "neither a needlework ranking nor a JSON object"),
        ("a.json", "[1]", "neither"),
        ("a.json", '{"scores": {}}', "neither a needlework ranking"),
        ("a.json", '{"meta": 3, "scores": {"5-0": [1]}}', "does not cover|has no heads"),
        ("a.json", '{"1-2-3": [1]}', "is no head"),
        ("a.json", '{"x-2": [1]}', "is no head"),
        ("a.json", '{"1-2": []}', "has no scores"),
        ("a.json", '{"1-2": ["x"]}', "has no scores, or one that is no number"),
        ("a.json", '{"1-2": [NaN]}', "no number"),
        ("a.json", '{"01-2": [1], "1-2": [1]}', "occurs twice"),
        ("a.json", '{"0-0": [1]}', "has no heads|does not cover"),
        ("a.tsv", "1\t2\n", "has 1 lines"),
        ("a.tsv", "", "has 0 lines"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, anatomy: Anatomy, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(nw.NeedleworkError, match=says):
        foreign.read(tmp_path / name, anatomy)


def test_gates_that_do_not_fit_say_where(tmp_path: Path, anatomy: Anatomy) -> None:
    parts = list(anatomy.attention_parts())
    good = ["\t".join("0.5" for _ in range(part.kv_heads)) for _, part in parts]
    for wrong, says in (
        ("0.5", "a.tsv:1: 1 numbers"),
        (good[0].replace("0.5", "x"), "no number"),
        (good[0].replace("0.5", "nan"), "finite"),
    ):
        (tmp_path / "a.tsv").write_text("\n".join([wrong, *good[1:]]))
        with pytest.raises(nw.NeedleworkError, match=says):
            foreign.read(tmp_path / "a.tsv", anatomy)
    with pytest.raises(nw.NeedleworkError, match="no format 'csv'"):
        foreign.write(ranking(anatomy), tmp_path / "b", "csv", anatomy)
    assert not (tmp_path / "b").exists()
