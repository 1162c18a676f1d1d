"""`nw.prune` and `needlework prune`: which heads stay, what is refused, what the directory and its card hold."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import needlework as nw
from cases import subject
from needlework.cli import app
from needlework.measure import make_samples, measure
from needlework.pruning import card, prune
from needlework.pruning.prune import choose, uniform_heads

ORDER = "0.1 2.3 1.0 3.2 0.0 2.0"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    subject("llama").model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.output


def test_a_directory_and_its_card(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    code, text = run("prune", llama, "--keep", ORDER, "--out", out, "--samples", 0, "--json")
    record = json.loads(text)
    assert code == 0
    assert record["heads"] == {"before": 16, "kept": 6, "zero": 0, "after": 6}
    assert record["layers"]["2"] == {"kept": [0, 3], "before": [4, 2], "after": [2, 2], "streaming_kv_heads": []}
    assert record == json.loads((out / "pruning.json").read_text())
    card = (out / "README.md").read_text()
    assert "10 of its 16 attention heads were taken out" in card
    assert "Nothing was measured" in card
    assert nw.load(out).anatomy.parameters < nw.load(llama).anatomy.parameters
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    code, text = run("prune", llama, "--keep", ORDER, "--out", out, "--samples", 0)
    assert code == 2
    assert "nothing is overwritten" in text.replace("\n", " ")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "small"]


def test_bad_input_is_told_and_exits_with_2(llama: Path, tmp_path: Path) -> None:
    wrong = {
        "0": "ablate_attention",
        "0.0": "ablate_attention",
        "17": "the model has 16",
        "16": "nothing is to be cut",
        "1.5": "shares lie between 0 and 1",
        "0.1 9.9": "has no heads",
        "nowhere.json:3": "cannot be read",
        "nothing": "is no file and no number",
        "5": "no tokenizer",  # a ranking would have to be measured
    }
    for keep, why in wrong.items():
        code, text = run("prune", llama, "--keep", keep, "--out", tmp_path / "small", "--samples", 0)
        assert (code, why in " ".join(text.split())) == (2, True), (keep, text)
    code, text = run("prune", llama, "--keep", ORDER, "--others", "window=0", "--out", tmp_path / "small")
    assert code == 2
    assert "window=64,sinks=4" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_rankings_of_other_models_are_refused(llama: Path) -> None:
    whole = nw.load(llama)
    of = {"model": {"name": "other", "architecture": "LlamaForCausalLM", "weights": "0" * 32}}
    signed = nw.Ranking.parse(ORDER).model_dump() | of
    with pytest.raises(nw.NeedleworkError, match="other weights"):
        choose(whole, nw.Ranking(**signed))
    assert choose(whole, nw.Ranking(**signed).unsigned()).heads == nw.Ranking.parse(ORDER).order
    with pytest.raises(nw.NeedleworkError, match="has no heads"):
        choose(whole, [(0, 0), (7, 1)])


def test_so_many_of_a_ranking(llama: Path, tmp_path: Path) -> None:
    whole = nw.load(llama)
    ranking = nw.Ranking(
        order=whole.anatomy.heads[::-1], method="mine", samples=9, task="niah", model={"weights": whole.body.weights}
    )
    ranking.save(tmp_path / "all.json")
    nw.Ranking(order=ranking.order[:5]).save(tmp_path / "five.json")
    assert choose(whole, f"{tmp_path}/all.json:3").heads == ranking.order[:3]
    assert choose(whole, f"{tmp_path}/all.json:0.25").heads == ranking.order[:4]
    assert choose(whole, tmp_path / "five.json").heads == ranking.order[:5]
    assert choose(whole, f"{tmp_path}/all.json:3").source == "ranking by mine, on 9 samples of niah"
    for keep, why in ((tmp_path / "all.json", "say how many"), (f"{tmp_path}/five.json:6", "the ranking file has 5")):
        with pytest.raises(nw.NeedleworkError, match=why):
            choose(whole, keep)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(["llama", "jamba", "recurrent_gemma", "kimi_linear"]))
def test_uniform_heads_are_the_best_whole_groups_of_each_layer(data: st.DataObject, name: str) -> None:
    anatomy = subject(name).anatomy
    order = data.draw(st.permutations(list(anatomy.heads)))
    number = data.draw(st.integers(1, len(order)))
    kept = uniform_heads(order, anatomy, number)
    assert list(kept) == [head for head in order if head in kept]
    fewest = 0  # the next smaller equal numbers would be too few
    for layer, part in anatomy.attention_parts():
        size = part.query_heads // part.kv_heads if part.kv_heads > 1 else 1
        units = [{h for h in anatomy.heads if h.layer == layer and h.index // size == i} for i in range(part.query_heads // size)]
        stay = [unit for unit in units if unit <= set(kept)]
        assert set().union(*stay) == {head for head in kept if head.layer == layer}
        fewest += len(units[0]) * (len(stay) - 1)
        assert max(min(map(order.index, unit)) for unit in stay) < min(
            (min(map(order.index, unit)) for unit in units if unit not in stay), default=len(order)
        )
    assert fewest < number <= len(kept)


def test_uniform_is_refused_where_it_makes_no_sense(llama: Path, tmp_path: Path) -> None:
    for words, why in (
        (("--keep", ORDER), "a ranking of all heads"),
        (("--keep", "15"), "are all 16 heads; keep fewer"),
        (("--keep", "8", "--others", "window=8"), "has no streaming heads"),
    ):
        code, text = run("prune", llama, *words, "--uniform", "--out", tmp_path / "small", "--samples", 0)
        assert (code, why in " ".join(text.split())) == (2, True), text


def test_heads_that_were_named_are_not_called_a_ranking(llama: Path) -> None:
    whole = nw.load(llama)
    every = " ".join(f"{head.layer}.{head.index}" for head in whole.anatomy.heads)
    named = [(0, 0), (9, 9)]
    for keep, why in (
        ("0.0 9.9", "has no heads 9.9, which are"),
        (named, "has no heads 9.9"),
        (every, "heads are named: name fewer"),
    ):
        with pytest.raises(nw.NeedleworkError, match=why) as told:
            choose(whole, keep)
        assert "ranking" not in str(told.value)


def test_what_is_pruned_already_and_what_is_quantised_is_refused(llama: Path, tmp_path: Path) -> None:
    small = nw.prune(llama, "0.1 2.3", tmp_path / "small", samples=0)
    with pytest.raises(nw.NeedleworkError, match="before"):
        nw.prune(small.subject, [(0, 0)], tmp_path / "smaller", samples=0)
    whole = nw.load(llama)
    whole.model.config.quantization_config = {"bits": 4}
    with pytest.raises(nw.NeedleworkError, match="quantised"):
        nw.prune(whole, ORDER, tmp_path / "four", samples=0)
    whole = nw.load(llama)
    whole.body.source = Path("model.gguf")
    with pytest.raises(nw.NeedleworkError, match="GGUF"):
        nw.prune(whole, ORDER, tmp_path / "five", samples=0)


@pytest.mark.slow
def test_tiny_griffin_on_the_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranked, cut, measured and described: six of twenty heads find the needles, and the figures are those of the models."""
    monkeypatch.setattr(prune, "RANKING_SAMPLES", 10)
    monkeypatch.setattr(card, "REPEATS", 1)
    monkeypatch.setattr(card, "TEXTS", 2)
    monkeypatch.setattr(prune, "costs", partial(card.costs, tokens=64))
    done = nw.prune("tiny-griffin", 0.3, tmp_path / "griffin", samples=20)
    needles, facts, texts = done.record["figures"]
    assert [row["ability"] for row in (needles, facts, texts)] == ["retrieval", "knowledge", "perplexity"]
    assert (needles["n"], needles["before"]["value"]) == (20, 1.0)
    assert needles["after"]["value"] >= 0.9
    again = make_samples(done.subject, card.needle_task(done.subject, 20), card.FIGURES_SEED)
    assert needles["after"]["value"] == measure(done.subject, again).values("correct").mean()
    costs = done.record["costs"]
    assert costs["after"]["parameters"] == done.subject.anatomy.parameters < costs["before"]["parameters"]
    assert done.record["loads_with"] == "needlework"
    assert (
        "ranking by needle_mass, of tiny-griffin, on 10 samples of niah, seed 1" in (tmp_path / "griffin/README.md").read_text()
    )
