"""`nw.compare_heads`: words and ranks against plain loops, Q/K put from one model into another, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import needlework as nw
from cases import WITH_HEADS, apart, each, subject, tokens
from needlework.anatomy import Group, Head
from needlework.cli import app
from needlework.heads.compare import _compare, exchanged_query_key
from needlework.interventions.ranking import Origin
from tiny import build

LATENT = "cannot be exchanged alone"  # keys come from a map that values come from, too, or from more than maps
FUSED = ("kimi_linear", "bailing_hybrid", "glm5_next", "qwen4_exp", "zaya", "inkling", "zamba2")
QUERY_KEY = ("q_proj", "k_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm")


def with_other_query_key(name: str) -> nw.Subject:
    """The tiny model of an architecture with other maps to queries and keys, found by their names alone."""
    model = build(name)
    generator = torch.Generator().manual_seed(5)
    for path, parameter in model.named_parameters():
        if any(piece in QUERY_KEY for piece in path.split(".")) and "linear_attn" not in path:
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator)
    return nw.wrap(model)


@each(WITH_HEADS)
def test_with_the_other_s_query_and_key_maps_a_model_is_the_other(name: str) -> None:
    first, second, ids = subject(name), with_other_query_key(name), tokens(2, 12)
    if name in FUSED:
        with pytest.raises(nw.NeedleworkError, match=LATENT), exchanged_query_key(second, first):
            pass
        return
    theirs, before = first.logits(ids), second.logits(ids)
    gated = name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # their query maps compute a gate, too, which is not exchanged
    with exchanged_query_key(second, first):
        now = second.logits(ids)
    assert (apart(now, theirs) <= 1e-6) is not gated
    assert apart(before, theirs) > 0.01
    assert torch.equal(second.logits(ids), before)


def test_gates_in_query_maps_stay() -> None:
    first, second = subject("qwen3_next"), with_other_query_key("qwen3_next")
    layer, part = next(second.anatomy.attention_parts())
    ours, theirs = (x.model.get_submodule(part.path).q_proj.weight for x in (second, first))
    before = ours.detach().clone()
    with exchanged_query_key(second, first, {Group(layer, 1)}):
        now = ours.detach().clone()
    heads = [x.unflatten(0, (part.query_heads, 2, part.key_dim)) for x in (now, before, theirs.detach())]
    size = part.query_heads // part.kv_heads
    for head in range(part.query_heads):
        assert torch.equal(heads[0][head, 0], heads[2 if head // size == 1 else 1][head, 0])
        assert torch.equal(heads[0][head, 1], heads[1][head, 1])


def test_a_group_is_exchanged_alone() -> None:
    first, second = subject("jamba"), with_other_query_key("jamba")
    layer, part = list(second.anatomy.attention_parts())[1]
    ours, theirs = (x.model.get_submodule(part.path) for x in (second, first))
    before = {name: x.detach().clone() for name, x in second.model.named_parameters()}
    with exchanged_query_key(second, first, {Group(layer, 1)}):
        size = part.query_heads // part.kv_heads * part.key_dim
        for piece, rows in (("q_proj", slice(size, 2 * size)), ("k_proj", slice(part.key_dim, 2 * part.key_dim))):
            own = getattr(ours, piece).weight.detach()
            expected = before[f"{part.path}.{piece}.weight"].clone()
            expected[rows] = getattr(theirs, piece).weight.detach()[rows]
            assert torch.equal(own, expected)
        changed = {name for name, x in second.model.named_parameters() if not torch.equal(x, before[name])}
    assert changed == {f"{part.path}.q_proj.weight", f"{part.path}.k_proj.weight"}


def test_ranks_words_and_intervals_are_those_of_plain_loops() -> None:
    draw = np.random.default_rng(2)
    heads = tuple(Head(layer, i) for layer in (1, 4) for i in range(10))
    level = draw.normal(size=20)
    first = level + 0.3 * draw.normal(size=(40, 20))
    second = first + 0.1 * draw.normal(size=(40, 20))
    second[:, [int(np.argmax(level))]] -= 9  # the best head is lost
    second[:, [int(np.argmin(level))]] += 9  # the worst is new
    found = _compare([first, second], [str(i // 2) for i in range(40)], heads, (Origin(), Origin()), "m", "t")
    order = [sorted(heads, key=lambda h: (-scores.mean(0)[heads.index(h)], h)) for scores in (first, second)]
    assert found.best == 3  # 15 % of 20
    for x in found.heads:
        assert x.ranks == tuple(some.index(x.head) + 1 for some in order)
        among = [x.head in some[:3] for some in order]
        word = {(True, True): "kept", (True, False): "lost", (False, True): "new", (False, False): ""}[among[0], among[1]]
        assert x.word.partition(",")[0] == word
        assert ("moved" in x.word) == (word == "kept" and x.ranks[0] != x.ranks[1])
        assert all(low <= rank <= high for rank, (low, high) in zip(x.ranks, x.spans, strict=True))
        assert x.gap.low <= x.gap.value <= x.gap.high
    words = {x.head: (x.word, x.sure) for x in found.heads}
    assert words[heads[int(np.argmax(level))]] == ("lost", True)
    assert words[heads[int(np.argmin(level))]] == ("new", True)
    assert found.kept.value == len({*order[0][:3]} & {*order[1][:3]}) / 3
    same = _compare([first, first], list(map(str, range(40))), heads, (Origin(), Origin()), "m", "t")
    assert (same.kept.value, same.kept.low, same.agreement.value) == (1, 1, pytest.approx(1))
    assert {x.word for x in same.heads} == {"kept", ""}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-griffin with other query maps in all attention layers: it finds nothing, and nothing else is missing."""
    whole = nw.load("tiny-griffin")
    for _, part in whole.anatomy.attention_parts():
        weight = whole.model.get_submodule(part.path).q_proj.weight
        weight.data = weight.data.flip(0)
    folder = tmp_path_factory.mktemp("damaged") / "damaged"
    whole.model.save_pretrained(folder)
    whole.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_what_lost_queries_is_restored_by_them(damaged: Path, tmp_path: Path) -> None:
    words = [
        "heads",
        "tiny-griffin",
        "--against",
        damaged,
        "--samples",
        10,
        "--held-out",
        10,
        "--out",
        tmp_path / "out",
        "--json",
    ]
    done = CliRunner().invoke(app, list(map(str, words)))
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out/comparison.json").read_text())
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"comparison.html", "scores.svg"}
    assert (found["retrieval"]["first"]["value"], found["retrieval"]["all"]["value"]) == (1, 1)
    assert found["retrieval"]["second"]["value"] <= 0.2
    assert found["restored"]["all"]["value"] >= 0.8
    assert found["restored"]["all"]["low"] > 0.3
    assert "lost" in (tmp_path / "out/comparison.html").read_text()


@pytest.mark.slow
def test_tables_name_what_became_of_the_heads(damaged: Path) -> None:
    same = nw.compare_heads("tiny-griffin", "tiny-griffin", samples=5, held_out=5)
    best, cause = (table.to_markdown() for table in same.tables())
    assert "kept" in best
    assert "lost" not in best
    assert "the first" in best
    assert "lost heads" not in cause
    assert {"first", "second", "all"} == same.retrieval.keys()
    assert same.plot().get_xlabel() == "needle_mass in the first"


@pytest.mark.slow
def test_models_that_cannot_be_compared_are_refused(damaged: Path) -> None:
    for other, why in (("tiny-jamba", "heads or other layers"), ("tiny-mamba", "heads or other layers")):
        with pytest.raises(nw.NeedleworkError, match=why):
            nw.compare_heads("tiny-griffin", other, samples=5)
    with pytest.raises(nw.NeedleworkError, match="with nothing done to it the model retrieves"):
        nw.compare_heads(damaged, "tiny-griffin", samples=5)
    done = CliRunner().invoke(app, ["heads", "tiny-griffin", "--against", "tiny-jamba", "--recurrent"])
    assert (done.exit_code, "goes without" in " ".join(done.output.split())) == (2, True)
