"""Interventions are values: text and back, sums free of order, and errors that say what to change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cases
import needlework as nw
from needlework.errors import NeedleworkError
from needlework.interventions import base
from needlework.interventions.acts import Act, ChangeOutputs, LoweringContext, Place
from strategies import PARTS


@given(st.one_of(*PARTS))
def test_every_part_reads_back(part: nw.Part) -> None:
    assert nw.parse(str(part)) == part
    assert str(nw.parse(str(part))) == str(part)
    assert hash(nw.parse(str(part))) == hash(part)
    assert part + nw.NONE == part == nw.NONE + part


@given(st.lists(st.one_of(*PARTS), min_size=2, max_size=4, unique_by=lambda part: part.name), st.randoms())
def test_sums_read_back_and_know_no_order(parts: list[nw.Part], random: Any) -> None:
    assume(not any(a.clashes(b) for a in parts for b in parts if a is not b))  # block_recurrent and ablate_recurrent may
    total: nw.Intervention = nw.NONE
    for part in parts:
        total = total + part
    shuffled: nw.Intervention = nw.NONE
    random.shuffle(parts)
    for part in parts:
        shuffled = part + shuffled
    assert total == shuffled
    assert nw.parse(str(total)) == total
    assert nw.parse(" + ".join(str(part) for part in parts)) == total
    assert sorted(map(str, total.parts)) == sorted(map(str, parts))


@given(st.one_of(*PARTS))
def test_two_of_a_kind_do_not_meet(part: nw.Part) -> None:
    with pytest.raises(NeedleworkError, match=r"two \w+ meet in one phase and layer"):
        part + part


def test_two_of_a_kind_apart() -> None:
    prefill, decode = nw.KeepHeads(k=1, phase="prefill"), nw.KeepHeads(k=2, phase="decode")
    assert len((prefill + decode).parts) == 2
    assert len((nw.KeepHeads(k=1, layers=[0]) + nw.KeepHeads(k=2, layers=[1])).parts) == 2
    for other in (nw.KeepHeads(k=3), nw.KeepHeads(k=3, phase="prefill", layers=[4])):
        with pytest.raises(NeedleworkError, match="merge them"):
            prefill + other
    assert len((nw.ResetState(at=3) + nw.ResetState(at=4)).parts) == 2
    with pytest.raises(NeedleworkError):
        nw.KeepHeads(k=1, layers=[0, 1]) + nw.KeepHeads(k=2, layers=[1, 2])


def test_golden_texts() -> None:
    """Texts are keys of stored results: they must not change."""
    assert str(nw.NONE) == "none" == str(nw.parse("none")) == str(nw.parse(" "))
    assert str(nw.KeepHeads(k=2, phase="decode")) == "keep_heads(phase='decode', k=2)"
    assert str(nw.AblateHeads(heads=[(3, 1), (2, 0), (3, 1)])) == "ablate_heads(heads=[[2, 0], [3, 1]])"
    assert str(nw.KeepHeads(k=2, sinks=1)) == "keep_heads(k=2, sinks=1)"
    assert str(nw.SwapMemory(half="kv")) == "swap_memory(half='kv')"
    assert str(nw.SwapMemory(half="kv", from_="b")) == "swap_memory(half='kv', from='b')"
    assert str(nw.AblateRecurrentGroups(groups=[(3, 1), (0, 2), (3, 1)])) == "ablate_recurrent_groups(groups=[[0, 2], [3, 1]])"
    assert str(nw.AblateRecurrent(site="state", phase="decode")) == "ablate_recurrent(phase='decode', site='state')"
    both = nw.AblateRecurrent(layers=[1, 0]) + nw.AblateAttention()
    assert str(both) == "ablate_attention() + ablate_recurrent(layers=[0, 1])"
    ranked = nw.KeepHeads(k=1, by=nw.Ranking(order=[(5, 1), (2, 0)]))
    assert str(ranked) == "keep_heads(k=1, by=ranking('5.1 2.0'))"
    assert nw.parse("expose_tokens('omit')") == nw.ExposeTokens(mode="omit")


@pytest.mark.parametrize(
    "text, says",
    [
        ("keep_head(k=2)", "did you mean 'keep_heads'"),
        ("keep_heads(kk=2)", "has no 'kk'"),
        ("keep_heads(k=2", "cannot read"),
        ("keep_heads(k=2) - none", "expected name"),
        ("keep_heads(k=open('x'))", "no plain value"),
        (
            "keep_heads(1, 0.5, 'l2', 'layer', 0, 'token', 7, 8)",
            "8 values without names; it has k, fraction, by, scope, seed, draw, sinks",
        ),
        ("keep_heads(k=1, by='norm', sinks=1)", "by='norm' is none"),
        ("keep_heads(k=1, by='random', sinks=1)", "by='random' is none"),
        ("keep_heads(k=1, by=ranking('2.0'), sinks=1)", "is none; drop sinks"),
        ("keep_heads(k=1, sinks=-1)", "sinks"),
        ("ablate_recurrent('memory', 'decode')", "2 values without names; it has site"),
        ("keep_heads(2, k=2)", "is given 'k' twice"),
        ("swap_memory('kv', 'a', from='b')", "is given 'from' twice"),
        ("keep_heads(k=1, by=ranking('x'))", "layer.head"),
        ("__import__('os').system('true')", "expected name"),
        ("limit_context(tokens=0)", "greater than or equal to 1"),
        ("keep_heads(k=1, by='magic')", "no head score 'magic'; known: entropy, l2, norm, random"),
        ("keep_heads(k=1, by='entropie')", "did you mean 'entropy'?"),
        ("keep_heads(k=1, phase='always')", "phase"),
        ("keep_heads()", "either k or fraction"),
        ("keep_heads(k=1, fraction=0.5)", "either k or fraction"),
        ("keep_heads(k=1, scope='model')", "scope='model' needs a Ranking"),
        ("ablate_heads(heads=[[0, 0]], value='mean')", "means=HASH"),
        ("keep_heads(k=1) + keep_heads(k=2)", "merge them"),
        ("block_attention(from='a', from_='b')", "is given 'from' twice"),
        ("block_attention('a') + block_attention('a')", "merge them"),
        ("limit_context(8, tokens=16)", "is given 'tokens' twice"),
        ("limit_context(tokens=8, tokens=16)", "is given 'tokens' twice"),
        ("swap_memory('kv', from='a', from_='b')", "is given 'from' twice"),
        ("keep_heads(k=1, layers=[])", "leave layers out to act on all"),
        ("ablate_attention(layers=[])", "leave layers out to act on all"),
        ("expose_tokens('omit', layers=[])", "leave layers out to act on all"),
        ("limit_context(8, layers=[])", "leave layers out to act on all"),
        ("ablate_recurrent(layers=[])", "leave layers out to act on all"),
        ("reset_state(3, layers=[])", "leave layers out to act on all"),
        ("only_heads([[2, 0]], layers=[])", "leave layers out to act on all"),
    ],
)
def test_bad_texts_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(NeedleworkError) as error:
        nw.parse(text)
    assert says in str(error.value)


def test_values_are_frozen_and_take_no_unknown_field() -> None:
    with pytest.raises(Exception, match="frozen"):
        nw.KeepHeads(k=1).k = 2  # type: ignore[misc]
    with pytest.raises(NeedleworkError, match="Extra inputs"):
        nw.KeepHeads(k=1, color="red")  # type: ignore[call-arg]


def _double(cls_name: str) -> type[nw.Part]:
    class Part(nw.Part):
        """All heads say everything twice as loud."""

        side = "attention"

        def lower(self, context: LoweringContext) -> Iterable[Act]:
            for index in self.where(context.anatomy):
                yield ChangeOutputs(index, lambda out, place: out * 2)

    Part.__name__ = cls_name
    return Part


def test_an_intervention_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered by decorator, it parses, acts and is counted like any other."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    cls = nw.register(_double("DoubleHeads"))
    act = nw.parse("double_heads(layers=[0])")
    assert act == cls(layers=[0])
    subject = cases.subject("llama")
    answer = subject.generate([cases.PROMPT], act, max_new_tokens=2)[0]
    assert answer.error == ""
    assert answer.receipt.total("heads_changed", layer=0) == len(cases.PROMPT) + 1
    projection = subject.model.model.layers[0].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    expected = subject.logits([cases.PROMPT])
    handle.remove()
    assert cases.apart(subject.logits([cases.PROMPT], act), expected) < 1e-4


def test_the_old_name_of_lower_works_and_warns() -> None:
    """Also in a subclass of a built-in intervention, whose own `lower` must not win."""
    with pytest.warns(DeprecationWarning, match=r"stands_for\(scene\) is lower\(context\) now"):

        class Older(nw.AblateAttention):
            def stands_for(self, scene: LoweringContext) -> Iterable[Act]:
                for index in self.where(scene.anatomy):
                    yield ChangeOutputs(index, lambda out, place: out * 2)

    answer = cases.subject("llama").generate([cases.PROMPT], Older(), max_new_tokens=2)[0]
    assert answer.error == ""
    assert answer.receipt.total("heads_changed", layer=0) == len(cases.PROMPT) + 1


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_a_function_is_told_where_it_acts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function for prompts with a common beginning, in one batch: each is changed by its own sample, as if it were alone."""
    monkeypatch.setattr("needlework.engine.budget._FORWARD_FLOPS", {"cpu": 0.0})  # what prompts share would be read once
    subject, places = cases.subject(name), set()
    layer = subject.anatomy.attention_layers[1].index
    prompts = [cases.PROMPT, (*cases.PROMPT[:-1], 99), (*cases.PROMPT[:8], 5, 6, 7)]

    def change(outputs: Any, place: Place) -> Any:
        assert outputs.shape[:2] == (len(place.positions), 4)
        places.update((place.sample, place.layer, place.phase, position) for position in place.positions.tolist())
        return outputs * (1 + place.sample % 7) + place.positions[:, None, None]

    class Bend(nw.Part):
        side = "attention"

        def lower(self, context: LoweringContext) -> Iterable[Act]:
            yield nw.ChangeOutputs(layer, change)

    together = subject.generate(prompts, Bend(), max_new_tokens=3)
    assert places == {
        (nw.sample_key(prompt), layer, "prefill" if position < len(prompt) - 1 else "decode", position)
        for prompt in prompts
        for position in range(len(prompt) + 2)
    }
    for prompt, answer in zip(prompts, together, strict=True):
        alone = subject.generate([prompt], Bend(), max_new_tokens=3)[0]
        assert (answer.tokens, answer.receipt) == (alone.tokens, alone.receipt)
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@pytest.mark.parametrize("function, given", [(lambda out, place: None, "None"), (lambda out, place: out[:, 0], r"\[11, 8\]")])
def test_a_function_must_return_what_it_is_given(function: Any, given: str) -> None:
    class Forget(nw.Part):
        side = "attention"

        def lower(self, context: LoweringContext) -> Iterable[Act]:
            yield nw.ChangeOutputs(0, function)

    with pytest.raises(NeedleworkError, match=rf"must return \[queries, heads, dim\] = \[11, 4, 8\], not {given}"):
        cases.subject("llama").generate([cases.PROMPT], Forget())


def test_an_intervention_from_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "triple_heads"

        def load(self) -> type[nw.Part]:
            return _double("TripleHeads")

    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    monkeypatch.setattr(base, "_plug_ins", lambda: [Point()])
    assert str(nw.parse("triple_heads()")) == "triple_heads()"
