"""Answers on another device are those of the CPU: `NEEDLEWORK_TEST_DEVICE=cuda pytest tests/test_other_device.py`."""

from __future__ import annotations

import pytest

import cases
import needlework as nw
from needlework.requests import Answer

pytestmark = pytest.mark.skipif(cases.DEVICE == "cpu", reason="NEEDLEWORK_TEST_DEVICE names no other device")


def _answers(subject: nw.Subject, acts: list[nw.Intervention]) -> list[Answer]:
    prompts, spans, twins = [cases.PROMPT] * len(acts), [cases.SPANS] * len(acts), [{"twin": cases.TWIN}] * len(acts)
    return subject.generate(prompts, interventions=acts, max_new_tokens=4, spans=spans, twins=twins)


@cases.each(cases.ALL)
def test_every_intervention_does_there_what_it_does_on_the_cpu(name: str) -> None:
    here, there = cases.subject(name, device="cpu"), cases.subject(name)
    whiches = [which for which in cases.INTERVENTIONS if not cases.refusal(name, which)]
    acts = [cases.intervention(which, here.anatomy) for which in whiches]
    for which, a, b in zip(whiches, _answers(here, acts), _answers(there, acts), strict=True):
        assert a.error == "" == b.error, which
        assert a.receipt == b.receipt, which
        # The likeliest token may be another one where two tie; how likely it is may not.
        assert a.logprobs[0] == pytest.approx(b.logprobs[0], abs=1e-3), which
