"""The example of CONTRIBUTING.md is code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cases
import needlework as nw
from needlework.interventions.base import _REGISTRY

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def test_the_example_intervention_works_as_written() -> None:
    example = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    try:
        exec(example[1], {})  # the guide's own words
        half = nw.parse("scale_heads(factor=0.5, phase='decode')")
        assert nw.parse(str(half)) == half
        subject = cases.subject("jamba")
        prompts = [cases.PROMPT] * 3
        acts = [nw.NONE, half, nw.parse("scale_heads(factor=0.0, phase='decode')")]
        plain, halved, silent = subject.generate(prompts, interventions=acts, max_new_tokens=4)
        off = subject.generate([cases.PROMPT], nw.AblateAttention(phase="decode"), max_new_tokens=4)[0]
        layers = len(subject.anatomy.attention_layers)
        assert halved.receipt.total("heads_changed") == 4 * layers
        assert plain.receipt.total("heads_changed") == 0
        assert silent.logprobs == pytest.approx(off.logprobs, abs=1e-4)
        assert halved.logprobs != pytest.approx(plain.logprobs, abs=1e-4)
    finally:
        _REGISTRY.pop("scale_heads", None)
