"""Groups of recurrent mixers: what they are, what silencing one does, and that a head's state is heard in its own group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
import needlework as nw
from needlework.receipts import Tally
from tiny import build

IDS = cases.tokens(2, 11, seed=5)
# (groups, channels of one, kind) as the configurations in tiny.py say.
EXPECTED = {
    "recurrent_gemma": (4, 8, "blocks"),
    "zamba": (2, 32, "heads"),
    **dict.fromkeys(("jamba", "mamba", "falcon_mamba"), (16, 4, "channels")),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), (16, 2, "channels")),
    **dict.fromkeys(("bamba", "zamba2", "falcon_h1", "granitemoehybrid", "nemotron_h", "mamba2"), (4, 16, "heads")),
}
TAPS = {"lfm3": 7}
PROJECTIONS = ("out_proj", "o_proj", "linear_out")
WITH_STATE = tuple(name for name in cases.WITH_MIXER if name not in cases.NO_STATE)


def _projection(mixer: Any) -> Any:
    """By the names that transformers gives it, not by the probe."""
    (found,) = [getattr(mixer, name) for name in PROJECTIONS if hasattr(mixer, name)]
    return found


def _mixers(subject: nw.Subject) -> dict[int, Any]:
    return {layer: subject.model.get_submodule(part.path) for layer, part in subject.anatomy.recurrent_parts()}


@contextmanager
def _zeroed_by_hand(subject: nw.Subject, groups: list[nw.Group]) -> Iterator[None]:
    width = {layer: EXPECTED.get(_name_of(subject), (4, 8, "heads"))[1] for layer in _mixers(subject)}
    with ExitStack() as stack:
        for layer, mixer in _mixers(subject).items():
            mine = [group.index for group in groups if group.layer == layer]

            def zero(module: Any, args: Any, mine: list[int] = mine, size: int = width[layer]) -> Any:
                said = args[0].clone()
                for index in mine:
                    said[:, :, index * size : (index + 1) * size] = 0.0
                return (said,)

            stack.enter_context(cases.hook(_projection(mixer).register_forward_pre_hook, zero))
        yield


def _name_of(subject: nw.Subject) -> str:
    return next(name for name in cases.WITH_MIXER if cases.subject(name) is subject)


@cases.each(cases.WITH_MIXER)
def test_groups_are_what_the_configuration_says(name: str) -> None:
    anatomy = cases.subject(name).anatomy
    parts = [part for _, part in anatomy.recurrent_parts()]
    assert {(part.groups, part.group_width, part.group_kind) for part in parts} == {EXPECTED.get(name, (4, 8, "heads"))}
    assert len(anatomy.groups) == sum(part.groups for part in parts) == anatomy.to_dict()["groups"]
    assert {part.taps for part in parts} == {
        TAPS.get(name, 0 if name in cases.NO_CONVOLUTION else 3 if name in cases.NO_STATE else 4)
    }
    assert {part.carries_state for part in parts} == {name not in cases.NO_STATE}


@cases.each(cases.WITH_MIXER)
def test_a_silenced_group_is_zero_where_the_stock_output_projection_reads_it(name: str) -> None:
    subject = cases.subject(name)
    some = [group for i, group in enumerate(subject.anatomy.groups) if i % 3 == 1]
    with _zeroed_by_hand(subject, some):
        expected = subject.logits(IDS)
    silenced = subject.logits(IDS, nw.AblateRecurrentGroups(groups=tuple(some)))
    assert cases.apart(silenced, expected) < 1e-5
    assert cases.apart(expected, subject.logits(IDS)) > 1e-2


def _read_by_projection(subject: nw.Subject, layer: int, disturb: Callable[[Tensor], Tensor]) -> Tensor:
    """[rows, channels] that a layer's output projection reads of the token after a prompt, if the state is disturbed between."""
    body, heard = subject.body, []
    cache_layer = next(mixer.cache_layer for mixer in body.mixers if mixer.layer == layer)
    projection = _projection(_mixers(subject)[layer])
    with body.session(), cases.hook(projection.register_forward_pre_hook, lambda module, args: heard.append(args[0].clone())):
        memory, rows = body.new_memory(2), body.compile([[], []], [0, 1], "prefill", torch.zeros(2, dtype=torch.int64))
        body.feed(IDS[:, :8], memory, "prefill", rows, Tally(1))
        for slot in memory.states_of(cache_layer, "state"):
            slot.put(disturb(slot.tensor))
        body.feed(IDS[:, 8:9], memory, "decode", rows, Tally(1))
    return heard[-1][:, 0]


@cases.each(WITH_STATE)
def test_a_groups_state_is_heard_in_its_own_channels_alone(name: str) -> None:
    """If one group's state is disturbed, its channels change; the others change by a factor at most, where a norm spans them."""
    subject = cases.subject(name)
    layer = subject.anatomy.recurrent_layers[0].index
    part = subject.anatomy.layers[layer].recurrent
    assert part is not None

    def heard(group: int) -> tuple[float, float]:
        """How far channels of this group and of the others change, of the largest, when this group's state is disturbed."""

        def disturbed(state: Tensor) -> Tensor:  # [rows, heads or channels, ...]
            of_group = torch.arange(state.shape[1]) // (state.shape[1] // part.groups) == group
            return state + 3.0 * of_group.view(1, -1, *[1] * (state.dim() - 2))

        changed = _read_by_projection(subject, layer, disturbed)
        own = torch.arange(plain.shape[1]) // part.group_width == group
        factor = (plain * changed)[:, ~own].sum(1, keepdim=True) / (plain**2)[:, ~own].sum(1, keepdim=True)
        apart = (changed - plain * factor).abs().amax(0) / plain.abs().max()
        return float(apart[own].max()), float(apart[~own].max())

    plain = _read_by_projection(subject, layer, torch.clone)
    found = [heard(group) for group in range(min(4, part.groups))]
    assert max(others for _, others in found) < 1e-4
    assert max(own for own, _ in found) > 1e-2  # a head that forgets at once is not heard


@cases.each(cases.WITH_MIXER)
def test_all_groups_silenced_leave_the_bias_of_the_projection(name: str) -> None:
    subject = cases.subject(name)
    everything = nw.AblateRecurrentGroups(groups=subject.anatomy.groups)
    silent = subject.logits(IDS, everything)
    if any(_projection(mixer).bias is not None for mixer in _mixers(subject).values()):
        assert cases.apart(silent, subject.logits(IDS, nw.AblateRecurrent(site="block"))) > 1e-2
    else:
        assert cases.apart(silent, subject.logits(IDS, nw.AblateRecurrent(site="block"))) < 1e-5


@cases.each(("mamba", "mamba2", "falcon_mamba"))
def test_groups_are_silenced_in_the_calls_that_replace_a_cut_one(name: str) -> None:
    """No attention and no positions: without memory, a Mamba without groups is that model on single tokens."""
    subject = cases.subject(name)
    groups = nw.AblateRecurrentGroups(groups=subject.anatomy.groups[::2])
    one_by_one = [subject.logits(IDS[:, t : t + 1], groups) for t in range(IDS.shape[1])]
    assert cases.apart(subject.logits(IDS, groups + nw.AblateRecurrent()), torch.cat(one_by_one, 1)) < 1e-4


@pytest.mark.parametrize("site", ["memory", "conv", "state", "block"])
@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma"])
def test_receipts_count_each_token_and_group_once(name: str, site: Any) -> None:
    """Also where a mixer is called again, and with rows beside it that ask for something else."""
    subject = cases.subject(name)
    first, second = (layer.index for layer in subject.anatomy.recurrent_layers[:2])
    groups = nw.AblateRecurrentGroups(groups=((first, 0), (first, 2), (second, 1)))
    some = [groups + nw.AblateRecurrent(site=site), nw.NONE, groups, nw.AblateRecurrent(site=site)]
    answers = subject.generate([cases.PROMPT] * 4, interventions=some, max_new_tokens=3)
    for answer, wanted in zip(answers, (2, 0, 2, 0), strict=True):
        assert answer.receipt.total("groups_zeroed", "prefill", first) == wanted * (len(cases.PROMPT) - 1)
        assert answer.receipt.total("groups_zeroed", "decode", first) == wanted * len(answer.tokens)
        assert answer.receipt.total("groups_zeroed", layer=second) * 2 == answer.receipt.total("groups_zeroed", layer=first)


def test_groups_that_do_not_exist_are_refused() -> None:
    subject = cases.subject("jamba")
    for wrong, message in (
        ([(0, 16)], "no such groups"),
        ([(2, 0)], "no recurrent layers"),
        ([], "no such groups"),
        ([(0, 1, 2)], "a group is a pair"),
    ):
        with pytest.raises(nw.NeedleworkError, match=message):
            subject.logits(IDS, nw.AblateRecurrentGroups(groups=wrong))  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match="drop layers"):
        subject.logits(IDS, nw.AblateRecurrentGroups(groups=((0, 1),), layers=(1,)))  # type: ignore[arg-type]


def test_a_mixer_whose_last_step_is_unknown_has_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something follows the projection, a group would be silenced before something else: refused, not guessed."""
    from transformers.models.mamba2 import modeling_mamba2

    stock = modeling_mamba2.Mamba2Mixer.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return stock(self, *args, **kwargs) * 0.5

    monkeypatch.setattr(modeling_mamba2.Mamba2Mixer, "forward", scaled)
    subject = nw.wrap(build("mamba2"))
    assert subject.anatomy.groups == ()
    assert "groups not known" in subject.anatomy.recurrent_layers[0].recurrent.made_of  # type: ignore[union-attr]
    with pytest.raises(nw.NeedleworkError, match="not the output of one linear map"):
        subject.logits(IDS, "ablate_recurrent_groups(groups=[[0, 1]])")
    subject.logits(IDS, nw.AblateRecurrent(site="conv"))  # what needs no groups goes on
