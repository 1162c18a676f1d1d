"""Head scores of one's own: what is equal chooses equally, beside any other score, and bad ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

import cases
import needlework as nw
from needlework.interventions import known_scores
from needlework.interventions.base import expand

pytestmark = pytest.mark.usefixtures("registries")
FAMILIES = ["llama", "jamba", "recurrent_gemma"]
EXPOSED = nw.ExposeTokens("only", phase="decode")


def _register_twins_of_the_built_in() -> dict[str, str]:
    """Scores by other names, in the words of the definition; name -> built-in that they equal."""

    @nw.head_score(needs="probabilities")
    def sure(p: Any, log_p: Any) -> Any:
        return (p * log_p).sum(-1)

    @nw.head_score()
    def peaked(p: Any, log_p: Any) -> Any:
        return log_p.zero_().add(p).pow(2).sum(-1).sqrt()  # writes over what is its own

    @nw.head_score(needs="outputs")
    def loud(outputs: Any) -> Any:
        return outputs.float().pow(2).sum(-1).sqrt()

    return {"sure": "entropy", "peaked": "l2", "loud": "norm"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("more", [nw.NONE, EXPOSED], ids=str)
def test_an_equal_score_by_another_name_gives_equal_answers(name: str, more: nw.Intervention) -> None:
    subject, options = cases.subject(name), {"max_new_tokens": 5, "spans": [cases.SPANS]}
    for own, built_in in _register_twins_of_the_built_in().items():
        a, b = (subject.generate([cases.PROMPT], nw.KeepHeads(2, by=by) + more, **options)[0] for by in (own, built_in))
        assert (a.tokens, a.receipt, a.error) == (b.tokens, b.receipt, "")
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_a_score_is_obeyed() -> None:
    """The heads with the highest score are kept, whatever it says."""

    @nw.head_score(needs="outputs")
    def last(outputs: Any) -> Any:
        return outputs.isfinite().all(-1).cumsum(1)

    subject = cases.subject("llama")
    last_head = nw.OnlyHeads([(layer.index, 3) for layer in subject.anatomy.attention_layers])
    kept = subject.logits([cases.PROMPT], nw.KeepHeads(1, by="last"))
    assert cases.apart(kept, subject.logits([cases.PROMPT], last_head)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_with_different_scores_equal_single_runs(name: str) -> None:
    """In one batch no score sees what another wrote over, and every row gets its own."""
    subject = cases.subject(name)
    _register_twins_of_the_built_in()
    acts = [nw.KeepHeads(k, by=by) for by in known_scores() for k in (1, 2)] + [nw.NONE]
    count = len(acts)
    together = subject.generate([cases.PROMPT] * count, interventions=acts, max_new_tokens=5)
    for act, answer in zip(acts, together, strict=True):
        alone = subject.generate([cases.PROMPT], act, max_new_tokens=5)[0]
        assert (answer.tokens, answer.receipt, answer.error) == (alone.tokens, alone.receipt, "")
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({answer.logprobs for answer in together}) > 6, "different scores must choose differently here"


def test_a_score_has_a_name_in_texts_and_grids() -> None:
    assert known_scores() == ("entropy", "l2", "norm", "random")
    with pytest.raises(nw.NeedleworkError, match="no head score 'sure'"):
        nw.KeepHeads(1, by="sure")
    _register_twins_of_the_built_in()
    assert known_scores() == ("entropy", "l2", "norm", "sure", "peaked", "loud", "random")
    assert str(nw.parse("keep_heads(1, by='sure')")) == "keep_heads(k=1, by='sure')"
    assert [str(act) for act in expand("keep_heads({1, 2}, by='loud')", {})] == [
        "keep_heads(k=1, by='loud')",
        "keep_heads(k=2, by='loud')",
    ]


@pytest.mark.parametrize("name", ["random", "ranking", "entropy", "l2", "norm", "<lambda>"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    def function(p: Any, log_p: Any) -> Any: ...

    function.__name__ = name
    with pytest.raises(nw.NeedleworkError, match="is no name for a score of one's own"):
        nw.head_score()(function)


def test_what_is_no_score_is_refused() -> None:
    with pytest.raises(nw.NeedleworkError, match="needs='keys' is not known"):
        nw.head_score(needs="keys")  # type: ignore[arg-type]
    with pytest.raises(nw.NeedleworkError, match=r"write @nw\.head_score\('probabilities'\)"):

        @nw.head_score  # type: ignore[arg-type]
        def bare(p: Any, log_p: Any) -> Any: ...

    @nw.head_score()
    def flat(p: Any, log_p: Any) -> Any:
        return p.sum(-1).sum(1)

    @nw.head_score("outputs")
    def nothing(outputs: Any) -> Any: ...

    subject = cases.subject("llama")
    with pytest.raises(nw.NeedleworkError, match=r"flat must return \[rows, heads, queries\] = \[1, 4, 11\], not \[1, 11\]"):
        subject.generate([cases.PROMPT], "keep_heads(1, by='flat')")
    with pytest.raises(nw.NeedleworkError, match=r"nothing must return .*, not None"):
        subject.generate([cases.PROMPT], "keep_heads(1, by='nothing')")


@pytest.mark.parametrize("needs", ["probabilities", "outputs"])
def test_a_score_that_returns_nan_or_writes_into_its_argument_is_refused(needs: Any) -> None:
    @nw.head_score(needs)
    def undefined(values: Any) -> Any:
        return values.sum(-1).fill_(float("nan"))

    @nw.head_score(needs)
    def writes(values: Any) -> Any:
        return values.mul_(2).sum(-1)

    @nw.head_score(needs)
    def writes_into_a_part(values: Any) -> Any:
        values[:, 0] = 0
        return values.sum(-1)

    subject = cases.subject("llama")
    with pytest.raises(nw.NeedleworkError, match="undefined returned NaN"):
        subject.generate([cases.PROMPT], "keep_heads(1, by='undefined')")
    for name in ("writes", "writes_into_a_part"):
        with pytest.raises(nw.NeedleworkError, match=f"{name} writes into its argument"):
            subject.generate([cases.PROMPT], f"keep_heads(1, by='{name}')")


def test_nan_is_accepted_where_a_query_has_no_attention_left() -> None:
    """Without its first token, the first query sees nothing: what a score divides by is 0 there."""

    @nw.head_score()
    def largest_share(p: Any) -> Any:
        return p.amax(-1) / p.sum(-1)

    @nw.head_score()
    def largest(p: Any) -> Any:
        return p.amax(-1)

    subject = cases.subject("llama")
    a, b = (subject.logits([cases.PROMPT], f"keep_heads(1, by='{by}', sinks=1)") for by in ("largest_share", "largest"))
    assert cases.apart(a, b) < 1e-5
