"""Before our own maths first replaces a model's attention, it must be seen to agree with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cases
import needlework as nw
import tiny
from needlework.errors import NeedleworkError, TrialError
from needlework.model import attention


def test_a_model_whose_attention_we_get_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = attention.OwnKeys.scores

    def wrong(self: Any, query: Any, first: int, last: int) -> Any:
        return scores(self, query, first, last) * 1.5

    monkeypatch.setattr(attention.OwnKeys, "scores", wrong)
    subject = nw.wrap(tiny.build("llama"))
    with pytest.raises(NeedleworkError, match="differs from LlamaForCausalLM's own"):
        subject.generate([cases.PROMPT], nw.KeepHeads(k=1), max_new_tokens=2)
    monkeypatch.undo()
    assert subject.generate([cases.PROMPT], nw.KeepHeads(k=1), max_new_tokens=2)[0].error == ""


def test_attention_with_parts_we_do_not_have_is_refused() -> None:
    subject = nw.wrap(tiny.build("llama"))
    module = subject.model.model.layers[0].self_attn
    forward = attention.Forward(
        "prefill",
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        attention.Tally(1),
        {module: 0},
        observer=SimpleNamespace(attention=True),  # type: ignore[arg-type]
    )
    x = torch.zeros(1, 4, 1, 8)
    with attention.current(forward), pytest.raises(TrialError, match="s_aux"):
        attention._attention(module, x, x, x, torch.ones(1, 1, 1, 1, dtype=torch.bool), scaling=1.0, s_aux=x)
