"""The verdict rules, one by one, at and around their lines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from needlework.stats import NOTHING, Estimate, Interaction, wilson
from needlework.verdicts import RULES, Evidence, Kept, Silenced, Verdict, judge

GOOD = wilson(98, 100)
GONE = Silenced(wilson(0, 75), wilson(19, 75), 0.25)
POSITIVE, NEGATIVE, ACROSS = Estimate(1.0, 0.5, 1.5, 80), Estimate(-1.0, -1.5, -0.5, 80), Estimate(0.1, -0.2, 0.4, 80)


def verdict(claim: str, evidence: Evidence) -> Verdict:
    return next(v for v in judge(evidence) if v.claim == claim)


def word(claim: str, **fields: object) -> str:
    return verdict(claim, replace(Evidence("m", baseline=GOOD), **fields)).word  # type: ignore[arg-type]


def test_every_claim_of_the_method_has_one_rule() -> None:
    claims = [rule.claim for rule in RULES]
    assert claims == ["segregation", "few_heads", "no_rescue", "exposure", "context", "double_dissociation", "memory"]
    assert [v.claim for v in judge(Evidence("m"))] == claims


@pytest.mark.parametrize(
    "exact,choice,expected",
    [
        (wilson(0, 73), wilson(19, 75), "supported"),
        (wilson(0, 72), wilson(19, 75), "inconclusive"),  # 0 of 72 does not bound below 5 %
        (wilson(1, 75), wilson(19, 75), "inconclusive"),
        (wilson(20, 75), wilson(19, 75), "not supported"),
        (wilson(0, 200), wilson(66, 200), "inconclusive"),  # 33 %: more than 5 points off, but its interval reaches them
        (wilson(0, 200), wilson(90, 200), "not supported"),  # the information is still there
        (wilson(0, 200), wilson(8, 200), "not supported"),  # below chance is information, too
        (wilson(0, 200), NOTHING, "inconclusive"),
    ],
)
def test_segregation(exact: Estimate, choice: Estimate, expected: str) -> None:
    assert word("segregation", silenced=Silenced(exact, choice, 0.25)) == expected


@pytest.mark.parametrize("hits,n,expected", [(88, 100, "supported"), (87, 100, "not testable"), (0, 0, "not testable")])
def test_a_weak_baseline_is_not_testable(hits: int, n: int, expected: str) -> None:
    judged = verdict("segregation", Evidence("m", baseline=wilson(hits, n), silenced=GONE))
    assert judged.word == expected
    assert ("lower bound must be 80 %" in judged.sentence) == (expected == "not testable")


@pytest.mark.parametrize(
    "low,high,expected", [(0.95, 1.0, "supported"), (0.949, 1.0, "inconclusive"), (0.5, 0.949, "not supported")]
)
def test_few_heads(low: float, high: float, expected: str) -> None:
    assert word("few_heads", few=Estimate((low + high) / 2, low, high, 80), few_label="2 of 12 heads") == expected


def test_few_heads_tells_knowledge_with_it() -> None:
    kept = Kept("letter", Estimate(0.84, 0.8, 0.88, 300), Estimate(0.79, 0.7, 0.9, 300))
    few = Estimate(0.99, 0.96, 1.0, 80)
    judged = verdict("few_heads", Evidence("m", baseline=GOOD, few=few, few_label="2 of 12 heads", few_knowledge=[kept]))
    assert "84 % of its knowledge asked as letter [80, 88; n = 300] (corrected for chance 79 %)" in judged.sentence
    assert judged.estimate == few


def test_no_rescue_needs_both_layouts_and_a_prompt_that_can_work() -> None:
    both = {"jrt": GONE, "question_first": GONE}
    assert word("no_rescue", layouts=both, reading_twice_helps="tiny-mamba") == "supported"
    assert word("no_rescue", layouts=both) == "inconclusive"
    assert word("no_rescue", layouts={"jrt": GONE}, reading_twice_helps="tiny-mamba") == "inconclusive"
    rescued = Silenced(wilson(60, 75), wilson(70, 75), 0.25)
    assert word("no_rescue", layouts={**both, "jrt": rescued}, reading_twice_helps="tiny-mamba") == "not supported"
    assert word("no_rescue", layouts={**both, "jrt": rescued}) == "not supported"


def test_exposure() -> None:
    assert word("exposure", omit_decode=wilson(0, 75)) == "supported"
    assert word("exposure", omit_decode=wilson(0, 50)) == "inconclusive"
    assert word("exposure", omit_decode=wilson(30, 75)) == "not supported"
    kept = Estimate(0.9, 0.8, 1, 75)
    judged = verdict("exposure", Evidence("m", baseline=GOOD, omit_decode=wilson(0, 75), omit_prefill=kept))
    assert "hidden only while reading, it keeps 90 % of its retrieval [80, 100; n = 75]" in judged.sentence


def test_context_names_the_smallest_limit_that_suffices() -> None:
    points = [(8, wilson(5, 80)), (32, wilson(60, 80)), (64, wilson(77, 80)), (128, wilson(80, 80))]
    judged = verdict("context", Evidence("m", baseline=GOOD, context=points))
    assert (judged.word, judged.estimate) == ("supported", wilson(77, 80))
    assert judged.sentence.startswith("64 tokens")
    assert word("context", context=[(8, wilson(400, 400)), (16, wilson(400, 400))]) == "not supported"
    assert word("context", context=[(8, wilson(5, 80)), (16, wilson(40, 80))]) == "inconclusive"


def test_double_dissociation() -> None:
    for contrast, expected in ((POSITIVE, "supported"), (NEGATIVE, "not supported"), (ACROSS, "inconclusive")):
        assert word("double_dissociation", interaction=Interaction(contrast, POSITIVE, POSITIVE)) == expected
    contrast = Interaction(POSITIVE, ACROSS, POSITIVE)
    one_sided = verdict("double_dissociation", Evidence("m", baseline=GOOD, interaction=contrast))
    assert "no crossed dissociation" in one_sided.sentence


def test_a_claim_is_testable_by_the_baseline_of_its_own_tasks() -> None:
    weak = Evidence("m", baseline=GOOD, silenced=GONE, follows_kv=wilson(97, 100), baselines={"segregation": wilson(50, 100)})
    assert verdict("segregation", weak).word == "not testable"
    assert verdict("memory", weak).word == "supported"


def test_what_a_verdict_stands_on_is_said_where_it_was_run() -> None:
    evidence = Evidence("m", baseline=GOOD, silenced=GONE, note="boundary: prefill", tasks={"segregation": "near, far"})
    assert verdict("segregation", evidence).sentence.endswith(" (Tasks: near, far.) (Boundary: prefill.)")
    assert verdict("memory", evidence).sentence == "This was not run."


def test_needles_out_of_the_window_do_not_decide_about_memory() -> None:
    evidence = Evidence("m", baseline=GOOD, follows_kv=wilson(40, 40), follows_kv_outside=wilson(0, 40))
    assert verdict("memory", evidence).estimate == wilson(40, 40)
    assert "0 % of those answers [0, 8.8; n = 40]" in verdict("memory", evidence).sentence


def test_memory() -> None:
    assert word("memory", follows_kv=wilson(97, 100)) == "supported"
    assert word("memory", follows_kv=wilson(50, 100)) == "inconclusive"
    assert word("memory", follows_kv=wilson(3, 100)) == "not supported"


def test_what_was_not_run_says_so() -> None:
    assert {v.word for v in judge(Evidence("m", baseline=GOOD))} == {"not testable"}
    assert verdict("memory", Evidence("m")).sentence == "This was not run."
    assert "does not have" in verdict("memory", Evidence("m", has_attention=False)).sentence


def test_a_share_that_could_not_be_computed_decides_nothing() -> None:
    nan = Estimate(math.nan, math.nan, math.nan, 80)
    assert word("few_heads", few=nan, few_label="2 of 12 heads") == "inconclusive"
    why = replace(nan, why="baseline 0 %: nothing to retain")
    judged = verdict("few_heads", Evidence("m", baseline=GOOD, few=why, few_label="2 of 12 heads"))
    assert "it keeps no known share of its retrieval (baseline 0 %: nothing to retain; n = 80)" in judged.sentence
