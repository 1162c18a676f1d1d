"""The verdict rules (version 2), one by one, at and around their lines."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from needlework.analysis.evidence import Context, Curve, Evidence, Kept, Silenced
from needlework.analysis.verdicts import RULES, RULES_VERSION, Verdict, judge
from needlework.stats import NOTHING, Estimate, Interaction, retained, wilson

ROOT = Path(__file__).parents[2]
GOOD = wilson(98, 100)
GONE = Silenced(wilson(0, 300), wilson(75, 300), 0.25)
POSITIVE, NEGATIVE, ACROSS = Estimate(1.0, 0.5, 1.5, 80), Estimate(-1.0, -1.5, -0.5, 80), Estimate(0.1, -0.2, 0.4, 80)


def verdict(claim: str, evidence: Evidence) -> Verdict:
    return next(v for v in judge(evidence) if v.claim == claim)


def word(claim: str, **fields: object) -> str:
    return verdict(claim, replace(Evidence("m", baseline=GOOD), **fields)).word  # type: ignore[arg-type]


def test_every_claim_of_the_method_has_one_rule() -> None:
    claims = [rule.claim for rule in RULES]
    assert claims == ["segregation", "few_heads", "no_rescue", "exposure", "context", "double_dissociation", "memory"]
    assert [v.claim for v in judge(Evidence("m"))] == claims


def test_rules_are_numbered_in_order_and_every_verdict_names_its_own() -> None:
    assert [rule.number for rule in RULES] == list(range(1, 8))
    for rule, judged in zip(RULES, judge(Evidence("m", baseline=GOOD, silenced=GONE)), strict=True):
        assert judged.number == rule.number
        assert judged.why.startswith(f"rule {rule.number}: ")


@pytest.mark.parametrize(
    "exact,choice,expected",
    [
        (wilson(0, 73), wilson(75, 300), "supported"),
        (wilson(0, 72), wilson(75, 300), "inconclusive"),  # 0 of 72 does not bound below 5 %
        (wilson(1, 75), wilson(75, 300), "inconclusive"),
        (wilson(20, 75), wilson(75, 300), "not supported"),
        (wilson(0, 300), wilson(88, 300), "supported"),  # 29.3 % [24.5, 34.7]: at most 10 points above chance
        (wilson(0, 300), wilson(89, 300), "inconclusive"),  # 29.7 % [24.8, 35.1]
        (wilson(0, 300), wilson(105, 300), "inconclusive"),  # 35 % [29.8, 40.6]: its lower bound is within five points
        (wilson(0, 300), wilson(106, 300), "not supported"),  # 35.3 % [30.1, 40.9]: the information is still there
        (wilson(0, 300), wilson(10, 300), "supported"),  # below chance is said beside the verdict
        (wilson(0, 75), wilson(13, 75), "supported"),  # 17.3 % at a chance of 25 %: inconclusive by version 1
        (wilson(0, 75), wilson(19, 75), "inconclusive"),  # too few samples to exclude ten points more than chance
        (wilson(0, 300), NOTHING, "inconclusive"),
    ],
)
def test_segregation(exact: Estimate, choice: Estimate, expected: str) -> None:
    assert word("segregation", silenced=Silenced(exact, choice, 0.25)) == expected


def test_an_interval_below_chance_is_said_beside_the_verdict() -> None:
    below = verdict("segregation", Evidence("m", baseline=GOOD, silenced=Silenced(wilson(0, 300), wilson(10, 300), 0.25)))
    assert "wholly below chance" in below.sentence
    assert "below chance" not in verdict("segregation", Evidence("m", baseline=GOOD, silenced=GONE)).sentence


def test_segregation_says_which_of_its_two_questions_decided() -> None:
    left = verdict("segregation", Evidence("m", baseline=GOOD, silenced=Silenced(wilson(0, 300), wilson(120, 300), 0.25)))
    assert left.why == (
        "rule 1: without heads forced choice is 15 points from chance [9.6, 20.6; n = 300], a lower bound of at most 5 allowed"
    )
    gone = verdict("segregation", Evidence("m", baseline=GOOD, silenced=GONE))
    assert gone.why == (
        "rule 1: without heads it finds 0 % [0, 1.3; n = 300], at most 5 % allowed;"
        " without heads forced choice is 0 points from chance [-4.6, 5.2; n = 300], at most 10 allowed"
    )
    assert [(p.label, p.line, p.bound) for p in gone.points] == [
        ("untouched", None, ""),
        ("no heads", 0.05, "at most"),
        ("no heads, forced choice", 0.25, "chance"),
    ]


@pytest.mark.slow
@given(st.integers(1, 400), st.data(), st.sampled_from([1 / 7, 0.25, 0.5]))
def test_fewer_right_choices_never_speak_more_against_lost_information(n: int, data: st.DataObject, chance: float) -> None:
    order = ["supported", "inconclusive", "not supported"]
    few, many = sorted([data.draw(st.integers(0, n)), data.draw(st.integers(0, n))])
    words = [word("segregation", silenced=Silenced(wilson(0, 300), wilson(hits, n), chance)) for hits in (few, many)]
    assert order.index(words[0]) <= order.index(words[1])


@pytest.mark.parametrize("hits,n,expected", [(88, 100, "supported"), (87, 100, "not testable"), (0, 0, "not run")])
def test_a_weak_baseline_is_not_testable(hits: int, n: int, expected: str) -> None:
    judged = verdict("segregation", Evidence("m", baseline=wilson(hits, n), silenced=GONE))
    assert judged.word == expected
    assert ("lower bound must be 80 %" in judged.sentence) == (expected == "not testable")
    why = "rule 1: too few samples (100 of 233): untouched it finds 87 % [79, 92.2; n = 100], at least 80 % needed"
    assert (judged.why == why) == (n == 100 and hits == 87)


def test_a_good_baseline_of_few_samples_is_told_as_too_few_samples() -> None:
    judged = verdict("segregation", Evidence("m", baseline=wilson(8, 8), silenced=GONE))
    assert judged.word == "not testable"
    assert judged.why.startswith("rule 1: too few samples (8 of 233): untouched it finds 100 % [67.6, 100; n = 8]")
    assert judged.sentence.endswith("the lower bound must be 80 %, and there are too few samples (8 of 233).")
    weak = verdict("segregation", Evidence("m", baseline=wilson(4, 80), silenced=GONE))
    assert weak.why == "rule 1: untouched it finds 5 % [2, 12.2; n = 80], at least 80 % needed"


def test_samples_of_one_haystack_decide_nothing_and_say_so() -> None:
    share = retained([1.0] * 300, [1.0] * 300, ["one"] * 300)
    judged = verdict("few_heads", replace(Evidence("m", baseline=GOOD), **thinned(share)))  # type: ignore[arg-type]
    assert judged.word == "inconclusive"
    assert "keep 100 % [one haystack: no interval over haystacks; n = 300]" in judged.why
    assert "it keeps 100 % of its retrieval [one haystack: no interval over haystacks; n = 300]" in judged.sentence


def thinned(share: Estimate, kept: int = 2, heads: int = 12, *more: Curve) -> dict[str, object]:
    return {"heads": heads, "few_kept": kept, "curves": [Curve("by entropy", {kept: share}), *more]}


@pytest.mark.parametrize(
    "low,high,expected", [(0.95, 1.0, "supported"), (0.949, 1.0, "inconclusive"), (0.5, 0.949, "not supported")]
)
def test_few_heads(low: float, high: float, expected: str) -> None:
    assert word("few_heads", **thinned(Estimate((low + high) / 2, low, high, 80))) == expected


@pytest.mark.parametrize("kept,heads,said", [(2, 16, "12.5 %"), (5, 32, "15.6 %"), (2, 10, "20 %"), (2, 12, "16.7 %")])
def test_few_heads_says_the_share_that_was_really_kept(kept: int, heads: int, said: str) -> None:
    few = Estimate(0.981, 0.954, 0.992, 300)
    judged = verdict("few_heads", replace(Evidence("m", baseline=GOOD), **thinned(few, kept, heads)))  # type: ignore[arg-type]
    assert judged.why == f"rule 2: {kept} of {heads} heads ({said}) keep 98.1 % [95.4, 99.2; n = 300], at least 95 % needed"
    assert f"With {kept} of {heads} heads ({said}) per layer, by entropy, it keeps" in judged.sentence


def test_few_heads_tells_the_fewest_that_suffice_in_each_way_and_their_sink_share() -> None:
    whole, weak = Estimate(0.99, 0.96, 1.0, 300), Estimate(0.9, 0.85, 0.94, 300)
    curves = [
        Curve("by entropy", {2: weak, 3: Estimate(0.96, 0.9499, 1, 300), 4: whole, 8: whole}, {2: 0.4, 4: 0.25}),
        Curve("by needle mass, of other samples", {2: whole}, {2: 0.01}),
        Curve("at random", {2: weak, 8: weak}),
    ]
    judged = verdict("few_heads", Evidence("m", baseline=GOOD, heads=16, few_kept=2, curves=curves))
    assert (judged.word, judged.estimate) == ("not supported", weak)
    assert "By entropy 4 of 16 suffice (they give the first token 25 % of their attention)." in judged.sentence
    assert (
        "By needle mass, of other samples 2 of 16 suffice (they give the first token 1 % of their attention)." in judged.sentence
    )
    assert judged.sentence.endswith("At random no number up to 8 of 16 was seen to suffice.")
    assert [(p.label, p.estimate, p.line) for p in judged.points] == [
        ("2 of 16 heads by entropy", weak, 0.95),
        ("2 of 16 heads by needle mass, of other samples", whole, 0.95),
        ("2 of 16 heads at random", weak, 0.95),
    ]


def test_few_heads_tells_knowledge_with_it() -> None:
    kept = Kept("letter", Estimate(0.84, 0.8, 0.88, 300), Estimate(0.79, 0.7, 0.9, 300))
    few = Estimate(0.99, 0.96, 1.0, 80)
    evidence = replace(Evidence("m", baseline=GOOD, few_knowledge=[kept]), **thinned(few))  # type: ignore[arg-type]
    judged = verdict("few_heads", evidence)
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


def test_no_rescue_says_what_it_wants_for_and_how_the_untouched_model_reads_the_layout() -> None:
    both = {"jrt": GONE, "question_first": GONE}
    untouched = {"question_first": wilson(21, 100)}
    judged = verdict("no_rescue", Evidence("m", baseline=GOOD, layouts=both, layouts_untouched=untouched))
    assert judged.why == "rule 3: reading twice helps no model here by more than 10 points"
    assert "untouched, it finds 21 % of them" in judged.sentence
    assert len(judged.points) == 4


def test_exposure() -> None:
    assert word("exposure", omit_decode=wilson(0, 75)) == "supported"
    assert word("exposure", omit_decode=wilson(0, 50)) == "inconclusive"
    assert word("exposure", omit_decode=wilson(30, 75)) == "not supported"
    kept = Estimate(0.9, 0.8, 1, 75)
    judged = verdict("exposure", Evidence("m", baseline=GOOD, omit_decode=wilson(0, 75), omit_prefill=kept))
    assert "hidden only while reading, it keeps 90 % of its retrieval [80, 100; n = 75]" in judged.sentence


WHOLE, BROKEN = Estimate(0.99, 0.95, 1.0, 300), Estimate(0.3, 0.2, 0.499, 300)


@pytest.mark.parametrize(
    "reading,answering,together,expected",
    [
        (WHOLE, WHOLE, BROKEN, "supported"),
        (WHOLE, WHOLE, replace(BROKEN, high=0.5), "inconclusive"),
        (WHOLE, WHOLE, Estimate(0.6, 0.5, 0.7, 300), "not supported"),
        (replace(WHOLE, low=0.949), WHOLE, BROKEN, "inconclusive"),
        (WHOLE, replace(WHOLE, low=0.949), BROKEN, "inconclusive"),
        (Estimate(0.9, 0.85, 0.949, 300), WHOLE, BROKEN, "not supported"),
        (WHOLE, Estimate(0.9, 0.85, 0.949, 300), BROKEN, "not supported"),
        (NOTHING, WHOLE, BROKEN, "inconclusive"),
        (WHOLE, WHOLE, NOTHING, "inconclusive"),
    ],
)
def test_context(reading: Estimate, answering: Estimate, together: Estimate, expected: str) -> None:
    assert word("context", context=Context(reading, answering, together)) == expected


def test_context_gives_the_graded_version_beside_it() -> None:
    limits = [(8, wilson(5, 80)), (32, wilson(60, 80)), (64, wilson(77, 80)), (128, wilson(80, 80))]
    judged = verdict("context", Evidence("m", baseline=GOOD, context=Context(WHOLE, WHOLE, BROKEN, limits)))
    assert (judged.word, judged.estimate) == ("supported", BROKEN)
    assert "64 tokens in sight while reading are the fewest that suffice: it finds 96.2 % of the needles" in judged.sentence
    assert [(p.label, p.line) for p in judged.points] == [
        ("heads off while reading", 0.95),
        ("only the needle in sight while answering", 0.95),
        ("both at once", 0.5),
    ]
    only_limits = verdict("context", Evidence("m", baseline=GOOD, context=Context(limits=limits)))
    assert (only_limits.word, only_limits.points) == ("not run", ())
    assert only_limits.sentence.startswith("64 tokens")


def test_double_dissociation() -> None:
    for contrast, expected in ((POSITIVE, "supported"), (NEGATIVE, "not supported"), (ACROSS, "inconclusive")):
        assert word("double_dissociation", interaction=Interaction(contrast, POSITIVE, POSITIVE)) == expected
    contrast = Interaction(POSITIVE, ACROSS, POSITIVE)
    left = [("retrieval without attention", wilson(0, 80)), ("knowledge without attention", wilson(80, 80))]
    one_sided = verdict("double_dissociation", Evidence("m", baseline=GOOD, interaction=contrast, dissociation=left))
    assert [p.label for p in one_sided.points] == ["retrieval without attention", "knowledge without attention"]
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


def test_not_run_does_not_apply_and_not_testable_are_three_words() -> None:
    assert {v.word for v in judge(Evidence("m", baseline=GOOD))} == {"not run"}
    assert {(v.sentence, v.points) for v in judge(Evidence("m", baseline=GOOD))} == {("This was not run.", ())}
    assert {v.word for v in judge(Evidence("m", has_attention=False))} == {"does not apply"}
    assert verdict("memory", Evidence("m", has_attention=False)).why == "rule 7: the model has no attention layers"
    no_recurrence = {v.claim: v.word for v in judge(Evidence("m", baseline=GOOD, has_recurrence=False))}
    assert {claim for claim, said in no_recurrence.items() if said == "does not apply"} == {"double_dissociation", "memory"}
    weak = Evidence("m", baseline=wilson(50, 100), silenced=GONE)
    assert {v.claim: v.word for v in judge(weak)}["segregation"] == "not testable"
    assert {v.claim: v.word for v in judge(weak)}["memory"] == "not run"


def test_what_does_not_apply_stays_so_whatever_was_measured() -> None:
    assert word("memory", follows_kv=wilson(97, 100), has_recurrence=False) == "does not apply"


def test_a_share_that_could_not_be_computed_decides_nothing() -> None:
    nan = Estimate(math.nan, math.nan, math.nan, 80)
    assert word("few_heads", **thinned(nan)) == "inconclusive"
    why = replace(nan, why="baseline 0 %: nothing to retain")
    judged = verdict("few_heads", replace(Evidence("m", baseline=GOOD), **thinned(why)))  # type: ignore[arg-type]
    assert "it keeps no known share of its retrieval (baseline 0 %: nothing to retain; n = 80)" in judged.sentence
    assert judged.points == ()


# How many samples a rule needs.


def test_the_smallest_n_is_computed_from_the_rules() -> None:
    needs = {rule.claim: rule.needs() for rule in RULES}
    assert needs["segregation"] == 233
    assert needs["few_heads"] == 283
    assert needs["no_rescue"] == 279
    assert needs["exposure"] == 73
    assert needs["context"] == 334  # two shares must both be whole
    assert needs["memory"] == 14
    assert needs["double_dissociation"] == 0
    at_other_chance = next(rule for rule in RULES if rule.claim == "segregation").needs(1 / 7)
    assert at_other_chance != needs["segregation"]


@pytest.mark.slow
def test_every_larger_number_of_samples_suffices_too() -> None:
    """Power is a saw-tooth: at chance 25 % it is 0.901 for n = 217 and 0.886 for n = 219."""

    def power(n: int) -> float:
        most = max(hits for hits in range(n + 1) if wilson(hits, n).high <= 0.35)
        return float(binom.cdf(most, n, 0.25))

    assert power(217) == pytest.approx(0.901, abs=5e-4)
    assert power(219) == pytest.approx(0.886, abs=5e-4)
    assert power(232) < 0.9
    assert all(power(n) >= 0.9 for n in range(233, 1500))


@pytest.mark.slow
@pytest.mark.parametrize("n", [75, 216, 232, 233, 300])
def test_the_power_of_forced_choice_is_what_simulated_verdicts_have(n: int) -> None:
    rng = np.random.default_rng(n)
    hits = rng.binomial(n, 0.25, size=2000)
    counts = {int(h): word("segregation", silenced=Silenced(wilson(0, 300), wilson(int(h), n), 0.25)) for h in set(hits.tolist())}
    power = np.mean([counts[int(h)] == "supported" for h in hits])
    exact = sum(
        float(binom.pmf(h, n, 0.25))
        for h in range(n + 1)
        if word("segregation", silenced=Silenced(wilson(0, 300), wilson(h, n), 0.25)) == "supported"
    )
    assert power == pytest.approx(exact, abs=0.03)
    assert (exact >= 0.9) == (n >= 233)
    if n == 75:
        assert exact < 0.6  # which decides it in half of all cases


@pytest.mark.slow
def test_the_power_of_few_heads_holds_for_the_share_that_reports_compute() -> None:
    n, rng = next(rule for rule in RULES if rule.claim == "few_heads").needs(), np.random.default_rng(0)
    supported = []
    for _ in range(300):
        before = np.zeros(n)
        before[: round(0.99 * n)] = 1
        after = (rng.random(n) < 0.99 * 0.99).astype(float)
        supported.append(retained(after, before, np.arange(n)).low >= 0.95)
    assert np.mean(supported) > 0.85


def test_the_table_of_the_method_page_is_that_of_the_rules() -> None:
    spec = importlib.util.spec_from_file_location("rules", ROOT / "docs" / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    assert module.page() == written, "run `python docs/rules.py`"
    assert all(f"| {rule.number} | {rule.title}" in written for rule in RULES)
    assert f"Version {RULES_VERSION} of the rules" in written
    assert "after results of version 1 had been seen" in written
    assert "judged on fresh seeds" in written
    assert f"{len(RULES)} claims are judged at once" in written


# The reason in a few words.


def test_a_verdict_that_needs_more_samples_says_how_many() -> None:
    gone = Silenced(wilson(0, 60), wilson(15, 60), 0.25)
    assert verdict("segregation", Evidence("m", baseline=GOOD, silenced=gone)).reason == "too few samples (60 of 233)"
    assert verdict("segregation", Evidence("m", baseline=wilson(8, 8), silenced=GONE)).reason == "too few samples (8 of 233)"


def test_a_part_that_was_not_run_is_named_even_beside_too_few_samples() -> None:
    unasked = verdict("segregation", Evidence("m", baseline=GOOD, silenced=Silenced(wilson(0, 60))))
    assert unasked.reason == "too few samples (60 of 233); without heads no forced choice was run"
    enough = verdict("segregation", Evidence("m", baseline=GOOD, silenced=Silenced(wilson(0, 300))))
    assert enough.reason == "without heads no forced choice was run"


def test_what_is_not_supported_names_the_part_that_failed() -> None:
    found = verdict("segregation", Evidence("m", baseline=GOOD, silenced=Silenced(wilson(90, 300), wilson(75, 300), 0.25)))
    assert (found.word, found.reason) == ("not supported", "without heads it finds more than 5 %")
    known = verdict("segregation", Evidence("m", baseline=GOOD, silenced=Silenced(wilson(0, 300), wilson(200, 300), 0.25)))
    assert known.reason == "without heads forced choice is above chance"
    few = verdict("few_heads", replace(Evidence("m", baseline=GOOD), **thinned(wilson(150, 300))))  # type: ignore[arg-type]
    assert few.reason == "2 of 12 heads (16.7 %) keep less than 95 %"
    assert verdict("segregation", Evidence("m", baseline=GOOD, silenced=GONE)).reason == ""


def test_enough_samples_across_the_line_say_which_line() -> None:
    few = verdict("few_heads", replace(Evidence("m", baseline=GOOD), **thinned(wilson(285, 300))))  # type: ignore[arg-type]
    assert (few.word, few.reason) == ("inconclusive", "2 of 12 heads (16.7 %) keep a share whose interval contains 95 %")
