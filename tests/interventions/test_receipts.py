"""Receipts tell what was done: an intervention that did nothing fails its trial, or a note says that it had nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cases
import needlework as nw
from needlework.interventions.acts import Act
from needlework.receipts import nothing_to_hide

WIDE, NARROW = nw.LimitContext(tokens=100), nw.LimitContext(tokens=4)


def _kinds(kind: type[Act] = Act) -> Iterator[type[Act]]:
    for cls in kind.__subclasses__():
        yield cls
        yield from _kinds(cls)


def test_every_act_says_what_it_counts() -> None:
    """Without a count of its own, an act that did nothing would pass."""
    kinds = [cls for cls in _kinds() if cls.__module__.startswith("needlework.")]
    assert len(kinds) >= 10
    assert [cls.__name__ for cls in kinds if not vars(cls).get("count")] == []


@pytest.mark.parametrize(
    "act, silent",
    [
        (WIDE, True),
        (NARROW, False),
        (nw.LimitContext(tokens=1, sinks=50), True),
        (WIDE + nw.KeepHeads(k=1), True),
        (nw.LimitContext(tokens=12), False),  # the prompt fits; its answer does not
        (nw.LimitContext(tokens=12, phase="prefill"), True),
        (nw.LimitContext(tokens=4, phase="prefill") + nw.LimitContext(tokens=100, phase="decode"), True),
        (nw.LimitContext(tokens=4, phase="prefill") + nw.LimitContext(tokens=5, phase="decode"), False),
        (nw.KeepHeads(k=1), False),
    ],
)
def test_a_limit_that_hides_no_key_is_noted_and_no_failure(act: nw.Intervention, silent: bool) -> None:
    answer = cases.subject("llama").generate([cases.PROMPT], act, max_new_tokens=4)[0]
    assert answer.error == ""
    assert nothing_to_hide(answer.receipt.to_dict()) == silent
    assert [note.startswith("nothing to hide") for note in answer.receipt.notes] == [True] * silent


def test_a_limit_that_hides_no_key_is_noted_in_scores() -> None:
    subject = cases.subject("gemma3")  # some layers have a window of 8: what that hides, no limit hid
    wide, narrow = subject.choices([cases.PROMPT] * 2, [[(5, 6)]] * 2, interventions=[WIDE, NARROW])
    assert (wide.error, narrow.error) == ("", "")
    assert nothing_to_hide(wide.receipt.to_dict())
    assert not nothing_to_hide(narrow.receipt.to_dict())


def test_a_trial_without_a_receipt_hides_nothing_from_the_predicate() -> None:
    assert not nothing_to_hide(None)
    assert not nothing_to_hide({})


def test_a_swap_is_written_down_where_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half that comes from the same reading was not swapped, whatever was asked for."""
    subject, act = cases.subject("jamba"), nw.SwapMemory(half="kv") + nw.SwapMemory(half="recurrent")
    twins = [{"twin": cases.TWIN}]
    assert subject.generate([cases.PROMPT], act, twins=twins, max_new_tokens=2)[0].receipt.swapped == ("kv", "recurrent")
    monkeypatch.setattr("needlework.requests._twin", lambda swap, request, anatomy: request.prompt)
    unswapped = subject.generate([cases.PROMPT], act, twins=twins, max_new_tokens=2)[0]
    assert unswapped.receipt.swapped == ()
    assert unswapped.error == "the kv half of the memory was not swapped"
