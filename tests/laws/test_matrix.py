"""Every architecture under every intervention: the laws that any intervention must keep, or a refusal with its reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import cases
import needlework as nw
from needlework.requests import Answer

STEPS = 4

_CELLS = [
    pytest.param(name, which, marks=() if name in cases.CORE else pytest.mark.slow)
    for name in cases.ALL
    for which in cases.INTERVENTIONS
]


def _answers(subject: nw.Subject, some: list[nw.Intervention]) -> list[Answer]:
    count = len(some)
    return subject.generate(
        [cases.PROMPT] * count,
        interventions=some,
        max_new_tokens=STEPS,
        spans=[cases.SPANS] * count,
        twins=[{"twin": cases.TWIN}] * count,
    )


@functools.cache
def _together(name: str) -> dict[str, Answer]:
    """All interventions that this architecture takes, in one batch."""
    subject = cases.subject(name)
    names = [which for which in cases.INTERVENTIONS if not cases.refusal(name, which)]
    answers = _answers(subject, [cases.intervention(which, subject.anatomy) for which in names])
    return dict(zip(names, answers, strict=True))


@pytest.mark.parametrize("name, which", _CELLS)
def test_cell(name: str, which: str, record_property: Callable[[str, Any], None]) -> None:
    record_property("cell", (name, which))
    subject = cases.subject(name)
    intervention = cases.intervention(which, subject.anatomy)
    assert nw.parse(str(intervention)) == intervention
    reason = cases.refusal(name, which)
    if reason:
        with pytest.raises(nw.NeedleworkError, match=reason):
            _answers(subject, [intervention])
        with pytest.raises(nw.NeedleworkError, match=reason):
            subject.logits([cases.PROMPT], intervention, prompt_tokens=9, spans=cases.SPANS)
        record_property("verdict", reason)
        return
    alone = _answers(subject, [intervention])[0]
    batched = _together(name)[which]
    plain = _together(name)["none"]
    assert alone.error == "" == batched.error
    assert alone.tokens == batched.tokens
    assert alone.logprobs == pytest.approx(batched.logprobs, abs=1e-4)
    assert alone.receipt == batched.receipt
    if which == "none":
        assert {what for count in alone.receipt.counts.values() for what in count} <= {"positions"}
    else:
        assert alone.receipt != plain.receipt
        assert _differs(alone, plain), "it should have changed the answer's log-probabilities"
    if not any(part.side == "memory" or part.phase != "both" for part in intervention.parts):
        _one_result_on_both_routes(subject, intervention, cases.between_routes(name))


def _differs(a: Answer, b: Answer) -> bool:
    return a.tokens != b.tokens or max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) > 1e-4


def _one_result_on_both_routes(subject: nw.Subject, intervention: nw.Intervention, tolerance: float) -> None:
    """What acts in both phases gives the same logits whether tokens are read at once or one by one."""
    ids = [cases.PROMPT]
    whole = subject.logits(ids, intervention, spans=cases.SPANS)
    stepwise = subject.logits(ids, intervention, spans=cases.SPANS, prompt_tokens=8)
    if any(part.name == "keep_heads" and part.by == "random" for part in intervention.parts):  # type: ignore[attr-defined]
        return  # the choice hangs on the prompt, and the prompts differ: test_random_heads.py looks at it
    assert cases.apart(whole, stepwise) < tolerance


def test_the_table_has_these_counts() -> None:
    cells = [(name, which) for name in cases.ALL for which in cases.INTERVENTIONS]
    refused = [cell for cell in cells if cases.refusal(*cell)]
    new = len({"lfm3"} & set(cases.ALL))  # families that an older transformers lacks
    assert (len(cases.ALL), len(cases.HYBRIDS), len(cases.INTERVENTIONS)) == (28 + new, 19 + new, 38)
    # 3 models without heads refuse 25 of them, 6 without a mixer of their own 13, 1 without convolution 2, 3 without state 3.
    assert (len(cells), len(refused), len(cells) - len(refused)) == (1064 + 38 * new, 161 + 3 * new, 903 + 35 * new)
