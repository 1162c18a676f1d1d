"""A page's state as JSON: parts to interventions and back, the schema, and what is refused."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator
from parts import parts_of

import needlework as nw
from needlework.play import state
from needlework.play.page import static

TEXTS = [
    "none",
    "keep_heads(k=2)",
    "keep_heads(phase='decode', k=0, by='random', seed=3)",
    "keep_heads(k=1, by=ranking('2.0 5.3'))",
    "ablate_heads(heads=[[2, 0], [5, 9]])",
    "ablate_attention()",
    "ablate_attention(phase='prefill', layers=[2])",
    "ablate_recurrent(site='conv') + ablate_recurrent(site='state')",
    "ablate_recurrent_groups(phase='decode', groups=[[0, 1], [3, 9]])",
    "expose_tokens(phase='decode', mode='omit') + expose_tokens(phase='prefill', mode='balanced')",
    "limit_context(tokens=16, sinks=1)",
    "swap_memory(half='kv') + swap_memory(half='recurrent')",
    "ablate_heads(phase='decode', heads=[[2, 1]]) + keep_heads(k=3) + limit_context(tokens=9)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_parts_are_two_forms_of_one_intervention(text: str) -> None:
    parts = parts_of(text)
    assert state.text_of(parts) == str(nw.parse(text))
    assert state.intervention_of(parts) == nw.parse(text)
    assert parts_of(state.text_of(parts)) == parts
    Draft202012Validator(json.loads(static("intervention.schema.json"))).validate(parts)


@pytest.mark.parametrize(
    "parts",
    [
        [{"name": "reset_state", "at": 3}],
        [{"name": "keep_heads", "k": 2, "by": "guess"}],
        [{"name": "keep_heads", "k": 2, "scope": "model"}],
        [{"name": "keep_heads"}],
        [{"name": "keep_heads", "k": 2, "phase": "never"}],
        [{"name": "ablate_heads", "heads": "all"}],
        [{"name": "keep_heads", "k": 1, "by": {"ranking": [[2]]}}],
        [{"name": "keep_heads", "k": 1, "by": {"order": []}}],
        [{"name": "keep_heads", "k": 1}, {"name": "keep_heads", "k": 2}],
        ["none"],
        [{"k": 2}],
        [{"name": "swap_memory", "half": "kv", "from": "elsewhere"}],
    ],
)
def test_other_parts_are_refused(parts: list[object]) -> None:
    with pytest.raises(nw.NeedleworkError):
        state.intervention_of(parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["reset_state(at=4)", "keep_heads(fraction=0.5)", "keep_heads(k=2, sinks=1)"])
def test_interventions_without_a_control_are_refused_by_name(text: str) -> None:
    with pytest.raises(nw.NeedleworkError, match=r"the page has no part|has no field .* on the page"):
        state.intervention_of(parts_of(text))


def test_the_parts_of_a_prompt_never_touch() -> None:
    prompt = state.PromptState(before="a b .", needle="the code is 4 .", after="\n\nc", question="what ?")
    assert prompt.text == "a b . the code is 4 .\n\nc what ?"
    assert [text for text, is_needle in prompt.pieces() if is_needle] == ["the code is 4 ."]
    assert prompt.model_copy(update={"twin": "the code is 5 ."}).of_twin().text == "a b . the code is 5 .\n\nc what ?"


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {"prompt": "text"},
        {"prompt": {"before": 3}},
        {"prompt": {"before": "a"}, "max_new_tokens": 0},
        {"prompt": {"before": "a"}, "max_new_tokens": 10**6},
        {"prompt": {"before": "a", "file": "/etc/passwd"}},
        {"prompt": {"before": "a" * (state.MOST_CHARACTERS + 1)}},
        {"prompt": {"before": "a"}, "parts": [{}] * 99},
    ],
)
def test_requests_of_other_shapes_are_refused(content: object) -> None:
    with pytest.raises(nw.NeedleworkError):
        state.read_request(content)
