"""Effective attention of recurrent mixers, and its blocking, against loops in float64 inside the stock model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
import needlework as nw
from needlework.recurrence import LayerContributions
from recurrences import Own, stock_convolutions, stock_scans
from test_notebook_views import has_picture

WITH_STATE = tuple(name for name in cases.WITH_MIXER if name not in cases.NO_STATE)
WITH_CONVOLUTION = tuple(name for name in cases.WITH_MIXER if name not in cases.NO_CONVOLUTION)
SPAN = tuple(position for start, end in cases.SPANS["needle"] for position in range(start, end))


def stock_logits(subject: nw.Subject) -> Tensor:
    """One forward of transformers' own code, without a cache."""
    with torch.no_grad():
        logits: Tensor = subject.model(input_ids=torch.tensor([cases.PROMPT]), use_cache=False).logits
    return logits


def unchanged(layer: int, own: Tensor, output: Tensor) -> Tensor:
    return output


def without(sources: Collection[int], queries: Callable[[int], bool] = lambda i: True, channels: Any = slice(None)) -> Any:
    """The outputs minus what the sources contribute to later tokens."""

    def change(layer: int, own: Tensor, output: Tensor) -> Tensor:
        output = output.double()
        for i in range(len(output)):
            for j in sources:
                if j < i and queries(i):
                    output[i, channels] -= own[i, j, channels]
        return output

    return change


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max())


def compare(subject: nw.Subject, own: Own, outputs: dict[int, Tensor], **asked: Any) -> None:
    found = nw.recurrent_contributions(subject, cases.PROMPT, **asked)
    assert [part.layer for part in found.layers] == sorted(own)
    for turn, part in enumerate(found.layers):
        # Inputs of deeper layers differ by the rounding of the layers below them.
        tolerance = 1e-5 if turn == 0 else 5e-5
        assert apart(part.vectors, own[part.layer]) < tolerance
        assert apart(part.output, outputs[part.layer]) < tolerance


@cases.each(WITH_STATE)
def test_contributions_are_those_of_loops_in_float64_and_add_up_to_the_stock_scans_own_output(name: str) -> None:
    subject = cases.subject(name)
    outputs: dict[int, list[Tensor]] = {}

    def collect(layer: int, own: Tensor, output: Tensor) -> Tensor:
        outputs.setdefault(layer, []).append(output)
        return output

    with stock_scans(subject, collect) as own:
        stock_logits(subject)
    compare(subject, own, {layer: torch.cat(pieces, -1) for layer, pieces in outputs.items()})


@cases.each(WITH_CONVOLUTION)
def test_contributions_through_the_convolution_add_up_to_its_output_before_the_activation(name: str) -> None:
    subject = cases.subject(name)
    outputs: dict[int, Tensor] = {}
    with stock_convolutions(subject, lambda layer, own, output: outputs.setdefault(layer, output)) as own:
        stock_logits(subject)
    compare(subject, own, outputs, site="conv")


def test_both_together_go_through_the_convolution_of_rglru() -> None:
    """With frozen gates, every token's own share of the convolution is scanned by itself."""
    subject = cases.subject("recurrent_gemma")
    outputs: dict[int, Tensor] = {}
    with (
        stock_convolutions(subject, lambda layer, own, output: outputs.setdefault(layer, output)) as shares,
        stock_scans(subject, unchanged) as scans,
    ):
        stock_logits(subject)
    for part in nw.recurrent_contributions(subject, cases.PROMPT, site="memory").layers:
        part_of = shares[part.layer] / outputs[part.layer].double()[:, None]  # [convolved token, source, channels]
        wanted = torch.einsum("ikc,kjc->ijc", scans[part.layer], part_of)
        assert apart(part.vectors, wanted) < 5e-5
        assert apart(part.output, scans[part.layer].sum(1)) < 5e-5
        assert part.constant is not None  # the bias belongs to no token
        assert part.constant.abs().max() > 1e-3


@cases.each(WITH_STATE)
def test_a_blocked_span_is_its_contributions_subtracted_in_the_stock_model(name: str) -> None:
    subject = cases.subject(name)
    blocked = subject.logits([cases.PROMPT], nw.BlockRecurrent(), spans=cases.SPANS)
    with stock_scans(subject, without(SPAN)):
        wanted = stock_logits(subject)
    assert cases.apart(blocked, wanted) < cases.between_routes(name)
    assert cases.apart(blocked, subject.logits([cases.PROMPT])) > 1e-2


@cases.each(WITH_CONVOLUTION)
def test_a_span_blocked_in_the_convolution_is_its_taps_subtracted(name: str) -> None:
    subject = cases.subject(name)
    blocked = subject.logits([cases.PROMPT], nw.BlockRecurrent(site="conv"), spans=cases.SPANS)
    with stock_convolutions(subject, without(SPAN)):
        wanted = stock_logits(subject)
    assert cases.apart(blocked, wanted) < cases.between_routes(name)


@cases.each(("jamba", "recurrent_gemma", "lfm2", "falcon_h1"))
def test_a_pair_of_tokens_is_blocked_in_the_convolution(name: str) -> None:
    subject = cases.subject(name)
    act = nw.parse("block_recurrent(to=[4, 5], from=[6], site='conv')")
    blocked = subject.logits([cases.PROMPT], act)
    with stock_convolutions(subject, without((4, 5), lambda i: i == 6)):
        wanted = stock_logits(subject)
    assert cases.apart(blocked, wanted) < cases.between_routes(name)
    assert cases.apart(blocked, subject.logits([cases.PROMPT], nw.BlockRecurrent(to=(4, 5), site="conv"))) > 1e-3


@cases.each(("jamba", "recurrent_gemma"))
def test_what_several_parts_block_adds_up(name: str) -> None:
    subject = cases.subject(name)
    layer = subject.anatomy.recurrent_layers[0].index
    pairs = nw.parse("block_recurrent(to=[4], from=[6], site='conv') + block_recurrent(to=[6, 7], from=[8], site='conv')")
    blocked = subject.logits([cases.PROMPT], pairs)

    def change(layer: int, own: Tensor, output: Tensor) -> Tensor:
        changed: Tensor = without((6, 7), lambda i: i == 8)(layer, own, without((4,), lambda i: i == 6)(layer, own, output))
        return changed

    with stock_convolutions(subject, change):
        wanted = stock_logits(subject)
    assert cases.apart(blocked, wanted) < cases.between_routes(name)
    groups = [nw.BlockRecurrent(to=SPAN, groups=[(layer, i)]) for i in (0, 1)]
    together = subject.logits([cases.PROMPT], groups[0] + groups[1])
    assert (
        cases.apart(together, subject.logits([cases.PROMPT], nw.BlockRecurrent(to=SPAN, groups=[(layer, 0), (layer, 1)]))) < 1e-5
    )


@cases.each(("jamba", "recurrent_gemma", "zamba", "falcon_h1", "qwen3_next", "minimax"))
def test_single_groups_are_blocked(name: str) -> None:
    subject = cases.subject(name)
    (layer, part), count = next(subject.anatomy.recurrent_parts()), 0
    last = part.groups - 1
    act = nw.BlockRecurrent(to=SPAN, groups=[(layer, last)])
    channels: list[int] = list(range(last * part.group_width, part.groups * part.group_width))
    seen: list[int] = []

    def change(at: int, own: Tensor, output: Tensor) -> Tensor:
        nonlocal count
        if at != layer:
            return output
        offset = sum(seen)  # zamba scans head by head
        seen.append(output.shape[-1])
        here = [c - offset for c in channels if 0 <= c - offset < output.shape[-1]]
        changed: Tensor = without(SPAN, channels=here)(at, own, output) if here else output
        return changed

    with stock_scans(subject, change):
        wanted = stock_logits(subject)
    assert cases.apart(subject.logits([cases.PROMPT], act), wanted) < cases.between_routes(name)


@pytest.mark.slow
@cases.each(("jamba", "recurrent_gemma", "mamba2", "lfm2"))
@pytest.mark.parametrize("kernels", ["fast", "stock"])
def test_rows_and_layers_keep_to_themselves(name: str, kernels: str) -> None:
    """Blocks of several kinds in one batch, read in prefill and decoded: each as if it were alone."""
    subject = cases.subject(name, kernels)
    layer = subject.anatomy.recurrent_layers[1].index
    state = [nw.BlockRecurrent(to=(2, 3)), nw.BlockRecurrent(to=(11,), layers=(layer,)), nw.AblateRecurrent()]
    conv = [nw.BlockRecurrent(to=(2, 11), site="conv"), nw.BlockRecurrent(to=(2,), from_=(3, 4), site="conv")]
    some = [nw.NONE, *(() if name in cases.NO_STATE else (*state, state[0] + conv[0])), *conv]
    together = subject.generate([cases.PROMPT] * len(some), interventions=some, max_new_tokens=4)
    for act, answer in zip(some, together, strict=True):
        alone = subject.generate([cases.PROMPT], act, max_new_tokens=4)[0]
        assert alone.error == "" == answer.error
        assert alone.tokens == answer.tokens
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
        assert alone.receipt == answer.receipt


@cases.each(("jamba", "recurrent_gemma"))
def test_receipts_count_blocked_tokens_and_pairs(name: str) -> None:
    subject = cases.subject(name)
    acts = [nw.BlockRecurrent(to=(2, 3)), nw.BlockRecurrent(to=(2,), site="conv"), nw.BlockRecurrent(to=(11,), site="conv")]
    state, conv, last = subject.generate([cases.PROMPT] * 3, interventions=acts, max_new_tokens=3)
    for layer, part in subject.anatomy.recurrent_parts():
        assert state.receipt.total("writes_blocked", "prefill", layer) == 2
        assert conv.receipt.total("taps_blocked", "prefill", layer) == part.taps - 1
        assert last.receipt.total("taps_blocked", layer=layer) == 2  # of the last prompt token, for the two that follow it


def contributions() -> LayerContributions:
    """Two groups of two channels, three tokens; the second token's contribution to the third is minus half of the first's."""
    weights = torch.ones(3, 3).tril()[..., None].expand(3, 3, 4)
    values = torch.tensor([[2.0, 0, 1, 0], [-1.0, 0, 1, 0], [0.0, 0, 2, 0]])
    return LayerContributions(1, "state", "Mamba-2", weights, values, None, 2)


def test_mass_projects_on_the_sum_and_share_compares_norms() -> None:
    part = contributions()
    assert part.measured("mass")[0, 2].tolist() == [2.0, -1.0, 0.0]
    assert part.measured("share")[0, 2].tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert part.measured("mass")[1, 2].tolist() == [0.25, 0.25, 0.5]
    assert part.measured("mass")[:, 0, 1:].abs().max() == 0
    for how in ("mass", "share"):
        assert part.measured(how).sum(2) == pytest.approx(torch.ones(2, 3))  # type: ignore[arg-type]


def test_a_notebook_shows_contributions() -> None:
    subject = cases.subject("jamba")
    found = nw.recurrent_contributions(subject, cases.PROMPT, layers=[0, 3], spans=cases.SPANS)
    frame = found.frame()
    groups = dict(subject.anatomy.recurrent_parts())[0].groups
    assert len(frame) == 2 * groups * 12 * 13 / 2
    one = frame.query("layer == 3 and group == 2 and query == 7")
    assert one["mass"].tolist() == pytest.approx(found[3].measured()[2, 7, :8].tolist())
    assert one["share"].sum() == pytest.approx(1)
    ax = found.plot(3, 2)
    assert ax.images[0].get_array()[7, 4] == pytest.approx(float(found[3].measured()[2, 7, 4]))
    assert has_picture(ax)
    assert "Mamba-1" in found._repr_html_()
    for wrong, why in (((1,), "layers \\[0, 3\\], not of 1"), ((3, 99), "groups 0 to")):
        with pytest.raises(nw.NeedleworkError, match=why):
            found.plot(*wrong)
    with pytest.raises(nw.NeedleworkError, match="did you mean 'mass'"):
        found.plot(3, of="mas")  # type: ignore[arg-type]


@cases.each(("jamba", "recurrent_gemma"))
def test_the_mass_of_a_span_is_summed_over_prompts(name: str) -> None:
    subject = cases.subject(name)
    prompts, spans = [cases.PROMPT, cases.TWIN], [cases.SPANS, {"needle": ((0, 2),), "question": ((8, 10),)}]
    seen = nw.recurrent_mass(subject, prompts, spans)
    frame = seen.frame()
    assert list(frame[["layer", "group"]].sort_values(["layer", "group"]).itertuples(index=False, name=None)) == [
        tuple(group) for group in subject.anatomy.groups
    ]
    by_hand = []
    for prompt, sources in zip(prompts, (SPAN, (0, 1)), strict=True):
        parts = nw.recurrent_contributions(subject, prompt).layers
        by_hand.append(torch.cat([part.measured("mass")[:, 11, list(sources)].sum(1) for part in parts]))
    assert seen.masses == pytest.approx(torch.stack(by_hand).numpy(), abs=1e-5)
    assert seen.even == pytest.approx([3 / 12, 2 / 12])
    top = frame.iloc[0]
    assert top["low"] <= top["mass"] <= top["high"]
    assert has_picture(seen.plot())
    assert "<table>" in seen._repr_html_()
    asked = nw.recurrent_mass(subject, prompts[1:], spans[1:], at="question", layers=[0])
    part = nw.recurrent_contributions(subject, cases.TWIN, layers=[0]).layers[0]
    assert asked.shares[0] == pytest.approx(part.measured("share")[:, 8:10, :2].sum(2).mean(1).numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "asked", "why"),
    [
        *((name, {}, reason) for name, reason in cases.NO_MIXER.items()),
        ("jamba", {"layers": [2]}, r"layers \[2\] are no recurrent layers of JambaForCausalLM; choose from \[0, 1, 3, 4\]"),
        ("jamba", {"site": "memory"}, "an activation lies between"),
        ("jamba", {"site": "stat"}, "did you mean 'state'"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(name: str, asked: Any, why: str) -> None:
    with pytest.raises(nw.NeedleworkError, match=why):
        nw.recurrent_contributions(cases.subject(name), cases.PROMPT, **asked)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("block_recurrent(from='needle')", "from goes with site='conv'"),
        ("block_recurrent(site='conv', groups=[[0, 1]])", "groups go with site='state'"),
        ("block_recurrent(phase='prefill')", "drop phase"),
        ("block_recurrent(to=[20])", "outside the prompt of 12 tokens"),
        ("block_recurrent(to='nedle')", "no span 'nedle'"),
        ("block_recurrent(groups=[[0, 99]])", "no such groups"),
        ("block_recurrent(layers=[2])", "are no recurrent layers"),
        ("block_recurrent(to=[3], from=[9], site='conv')", "reaches back 3 tokens"),
        ("block_recurrent() + block_recurrent()", "two block_recurrent meet"),
        ("block_recurrent() + ablate_recurrent()", "ablate_recurrent and block_recurrent meet"),
    ],
)
def test_blocks_that_cannot_be_meant_are_refused(text: str, why: str) -> None:
    subject = cases.subject("jamba")
    with pytest.raises(nw.NeedleworkError, match=why):
        subject.logits([cases.PROMPT], text, spans=cases.SPANS)


def test_a_block_without_later_tokens_fails_its_trial() -> None:
    subject = cases.subject("jamba")
    (answer,) = subject.choices([cases.PROMPT], [[(5,), (6,)]], "block_recurrent(to=[11], site='conv')")
    assert "taps_blocked is 0" in answer.error


def test_an_unknown_recurrence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlework.model.scans.SCANS", {})
    subject = nw.wrap(cases.build("jamba"))
    with pytest.raises(nw.NeedleworkError, match="not known to be linear"):
        nw.recurrent_contributions(subject, cases.PROMPT)
    with pytest.raises(nw.NeedleworkError, match="not known to be linear"):
        subject.logits([cases.PROMPT], "block_recurrent()", spans=cases.SPANS)


def test_the_page_lists_every_architecture() -> None:
    page = (Path(__file__).parent.parent / "docs" / "recurrent.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE))
    for name in cases.ALL:
        if name in cases.NO_MIXER:
            wanted = f"refused: {cases.NO_MIXER[name]}"
        else:
            _, part = next(cases.subject(name).anatomy.recurrent_parts())
            sites = [part.recurrence] * part.carries_state + [f"convolution over {part.taps} tokens"] * bool(part.taps)
            wanted = ", ".join(sites)
        assert rows.pop(name) == wanted
    assert set(rows) <= {"lfm3"}  # which older versions of transformers lack
