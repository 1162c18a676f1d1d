"""`nw.patch`: what it accepts, refuses and returns. That its patches are right is shown in laws/test_patches.py."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

import cases
import needlework as nw
from needlework.measure import make_samples
from needlework.tasks.base import Item, make_task
from test_notebook_views import has_picture

CLEAN, CORRUPT, SPANS = cases.TWIN, cases.PROMPT, cases.SPANS
ANSWERS = ((40,), (41,))


def answers(name: str = "jamba") -> Any:
    """One-token answers that this random model tells apart."""
    logits = cases.subject(name).logits([CLEAN, CORRUPT])[:, -1]
    gap = logits[0] - logits[1]
    return (int(gap.argmax()),), (int(gap.argmin()),)


def patch(*args: Any, **named: Any) -> nw.Patching:
    return nw.patch(cases.subject("jamba"), CLEAN, CORRUPT, *args, **{"answers": answers(), **named})


def items(subject: nw.Subject, samples: int = 2) -> list[Item]:
    task = make_task({"kind": "niah", "lengths": (64,), "depths": (0, 50), "samples": samples})
    return [sample.item for sample in make_samples(subject, task, 0)]


def test_by_default_both_sides_of_a_hybrid_are_patched() -> None:
    anatomy = cases.subject("jamba").anatomy
    table = patch()
    expected = [("attention", x.index) for x in anatomy.attention_layers] + [
        ("mixers", x.index) for x in anatomy.recurrent_layers
    ]
    assert [(row.site, row.layer) for row in table.rows] == expected
    assert {row.at for row in table.rows} == {"all"}


def test_each_token_is_a_column() -> None:
    table = patch("layers", at="each", layers=[0, 5])
    assert len(table.rows) == 2 * len(CORRUPT)
    share = table.frame().pivot(index="layer", columns="at", values="share")
    same = [str(i) for i, (a, b) in enumerate(zip(CLEAN, CORRUPT, strict=True)) if a == b]
    assert np.abs(share.loc[0, same[:3]]).max() < 1e-6  # before the prompts differ, there is nothing to patch in
    assert share.loc[5, str(len(CORRUPT) - 1)] == pytest.approx(1, abs=1e-4)  # the last token of the last layer has it all
    last = patch("layers", at=-1, layers=[5])
    assert last.rows[0].share.value == pytest.approx(share.loc[5, str(len(CORRUPT) - 1)], abs=1e-4)


def test_memory_of_a_layer_is_a_swap_of_it() -> None:
    subject, pair = cases.subject("jamba"), answers()
    table = patch(["kv", "recurrent"])
    for row in table.rows:
        swap = nw.SwapMemory(half=row.site, layers=[row.layer], from_=CLEAN)  # type: ignore[call-arg, arg-type]
        asked = [nw.Request(CORRUPT, swap, 1, forced=answer) for answer in pair]
        first, second = (answer.logprobs[0] for answer in subject.answer(asked))
        value = table.corrupt + row.share.value * (table.clean - table.corrupt)
        assert value == pytest.approx(first - second, abs=1e-4)
        assert row.at == "prompt"


def test_keys_of_single_tokens_are_patched() -> None:
    """Keys and values before the prompts differ are the same in both; those of all tokens are the layer's half."""
    table = patch("kv", at="each")
    share = table.frame().pivot(index="layer", columns="at", values="share")
    assert share.shape == (2, len(CORRUPT) - 1)  # the last token is read after memory is swapped
    assert np.abs(share[["0", "1", "2"]].to_numpy()).max() < 1e-6
    assert np.abs(share[["3", "4", "5"]].to_numpy()).max() > 1e-3
    both = patch("kv", at=["all", "needle", "rest"], spans={**SPANS, "rest": ((0, 11),)})
    by_place = both.frame().pivot(index="layer", columns="at", values="share")
    assert by_place["rest"].to_numpy() == pytest.approx(by_place["prompt"].to_numpy(), abs=1e-5)
    assert np.abs((by_place["needle"] - by_place["prompt"]).to_numpy()).max() > 1e-3
    assert has_picture(table.plot())


def test_pairs_give_intervals_over_clusters() -> None:
    pairs = [CLEAN, (*CLEAN[:5], 77, *CLEAN[6:]), (*CLEAN[:3], 60, *CLEAN[4:])]
    table = nw.patch(cases.subject("jamba"), pairs, [CORRUPT] * 3, "mixers", answers=[answers()] * 3)
    alone = [nw.patch(cases.subject("jamba"), one, CORRUPT, "mixers", answers=answers()) for one in pairs]
    for i, row in enumerate(table.rows):
        gains = [one.rows[i].share.value * (one.clean - one.corrupt) for one in alone]
        assert row.share.value == pytest.approx(sum(gains) / sum(one.clean - one.corrupt for one in alone), abs=1e-4)
        assert row.share.low <= row.share.value <= row.share.high
        assert row.share.n == 3
        assert (alone[0].rows[i].share.low, alone[0].rows[i].share.why) == (-math.inf, "one pair: no interval")
    assert any(row.share.low < row.share.high for row in table.rows)


def test_an_item_brings_its_twin_answers_and_spans() -> None:
    """And what the paper claims of hybrids holds: the answer is in the keys of one layer and in no recurrent state."""
    subject = nw.load("tiny-jamba")
    some = items(subject)
    table = nw.patch(subject, some, sites=["kv", "recurrent"])
    assert table.pairs == len(some) == 4
    assert table.clean > 10
    assert table.corrupt < -10
    share = {(row.site, row.layer): row.share.value for row in table.rows}
    assert share["kv", 2] > 0.9
    assert all(abs(value) < 0.1 for key, value in share.items() if key != ("kv", 2))
    assert table.best(1)[0].name == "kv 2"
    value = nw.patch(subject, some[0], sites="layers", at=["value", "needle", "decode"])
    assert [row.at for row in value.rows[::6]] == ["value", "needle", "decode"]
    assert value.rows[0].share.value > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-griffin", "tiny-jamba"])
def test_the_gradient_ranks_sites_as_exact_patching_does(name: str) -> None:
    subject = nw.load(name)
    some = items(subject)
    for sites, least in (("heads", 0.9), (["attention", "mixers", "layers"], 0.5)):
        exact, cheap = (nw.patch(subject, some, sites=sites, method=method) for method in ("exact", "gradient"))  # type: ignore[arg-type]
        assert cheap.agreement(exact) == exact.agreement(cheap) > least
        assert cheap.clean == pytest.approx(exact.clean, abs=1e-3)
        assert cheap.corrupt == pytest.approx(exact.corrupt, abs=1e-3)


def test_without_answers_they_are_what_the_model_says() -> None:
    subject = cases.subject("llama")
    said = [tuple(answer.tokens) for answer in subject.generate([CLEAN, CORRUPT], max_new_tokens=1)]
    if said[0] == said[1]:
        with pytest.raises(nw.NeedleworkError, match="have the same answer"):
            nw.patch(subject, CLEAN, CORRUPT)
    else:
        assert nw.patch(subject, CLEAN, CORRUPT).to_dict() == nw.patch(subject, CLEAN, CORRUPT, answers=said).to_dict()


def test_the_logit_metric_reads_the_first_tokens_that_differ() -> None:
    (a,), (b,) = answers()
    whole = patch("mixers", answers=((a, 5), (b, 6)), metric="logit")
    assert whole.rows == patch("mixers").rows
    logits = cases.subject("jamba").logits([CLEAN])[0, -1]
    assert whole.clean == pytest.approx(float(logits[a] - logits[b]), abs=1e-4)


def test_views() -> None:
    table = patch(["heads", "layers"])
    frame = table.frame()
    assert list(frame.columns) == ["site", "layer", "head", "at", "share", "low", "high", "n"]
    assert len(frame) == len(table.rows)
    assert frame["head"].isna().sum() == len(cases.subject("jamba").anatomy.layers)
    assert "restored share" in table._repr_html_()
    assert table._repr_html_().count("<tr>") == len(table.rows) + 1
    plain = json.loads(json.dumps(table.to_dict()))
    assert plain["rows"][0] == {"site": "heads", "layer": 2, "head": 0, "at": "all", **table.rows[0].share.to_dict()}
    assert (plain["method"], plain["metric"], plain["pairs"]) == ("exact", "log_p", 1)
    ax = table.plot()
    assert has_picture(ax)
    assert ax.images[0].get_array().shape == (2, 4)
    each = patch("layers", at="each")
    ax = each.plot(site="layers")
    grid = ax.images[0].get_array()
    assert grid.shape == (6, len(CORRUPT))
    assert grid[5, 4] == each.frame().query("layer == 5 and at == '4'")["share"].item()
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(i) for i in range(len(CORRUPT))]
    with pytest.raises(nw.NeedleworkError, match="did you mean 'layers'"):
        each.plot(site="layer")
    with pytest.raises(nw.NeedleworkError, match="one place"):
        patch("heads", at=["all", "decode"]).plot()
    with pytest.raises(nw.NeedleworkError, match="no sites in common"):
        each.agreement(table)


LONGER = (5, *CLEAN)


@pytest.mark.parametrize(
    "named, message",
    [
        ({"sites": "head"}, "sites='head' is not known; did you mean 'heads'"),
        ({"sites": []}, "give at least one site"),
        ({"metric": "p"}, "metric='p' is not known"),
        ({"method": "fast"}, "method='fast' is not known"),
        ({"sites": "kv", "method": "gradient"}, "kv is memory: use method='exact'"),
        ({"sites": "kv", "at": "decode"}, "kv is patched after the prompt: leave `at` out, or name tokens of the prompt"),
        ({"sites": "kv", "at": -1}, r"before those at \[11\] are read; name earlier tokens"),
        (
            {"sites": "kv", "at": "needle", "spans": SPANS, "clean_spans": {"needle": ((2, 5),)}},
            "keys depend on their position, and the span 'needle' begins elsewhere in the clean prompt",
        ),
        ({"sites": ["kv", "recurrent"], "at": "needle", "spans": SPANS}, "a recurrent state is one for all tokens.*patch mixers"),
        ({"clean": LONGER}, r"13 tokens and the corrupt one 12.*prompts of one length, at='decode', or the name of a span"),
        ({"clean": LONGER, "sites": "recurrent"}, "prompts of one length"),
        ({"at": "nedle", "spans": SPANS}, "the corrupt prompt has no span 'nedle'; did you mean 'needle'"),
        (
            {"at": "needle", "spans": SPANS, "clean_spans": {"needle": ((3, 5),)}},
            "2 tokens in the clean prompt and 3 in the corrupt",
        ),
        ({"at": 12}, "at=12 lies outside the prompt of 12 tokens"),
        ({"at": []}, "names no place"),
        ({"layers": [9]}, r"layers \[9\] of JambaForCausalLM have no attention; choose from \[2, 5\]"),
        ({"corrupt": None}, "give a corrupt prompt"),
        ({"answers": ((4,), (4,))}, "have the same answer"),
        ({"answers": (4,)}, "must be a pair"),
        ({"answers": ((400,), (4,))}, "token id 400 is outside the vocabulary"),
        ({"corrupt": CLEAN}, "nothing to restore"),
        ({"clean": [CLEAN, CLEAN], "corrupt": [CORRUPT], "answers": [ANSWERS, ANSWERS]}, "2 clean prompts, 1 corrupt ones"),
    ],
)
def test_what_cannot_be_patched_is_refused(named: dict[str, Any], message: str) -> None:
    given = {"clean": CLEAN, "corrupt": CORRUPT, "sites": "attention", "answers": answers(), **named}
    with pytest.raises(nw.NeedleworkError, match=message):
        nw.patch(cases.subject("jamba"), **given)


def test_sites_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(nw.NeedleworkError, match="LlamaForCausalLM has no mixers"):
        nw.patch(cases.subject("llama"), CLEAN, CORRUPT, "mixers", answers=ANSWERS)
    with pytest.raises(nw.NeedleworkError, match="MambaForCausalLM has no heads"):
        nw.patch(cases.subject("mamba"), CLEAN, CORRUPT, "heads", answers=ANSWERS)
