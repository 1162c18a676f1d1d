"""The paper's protocol, number by number, and what every needle item promises."""

from __future__ import annotations

from typing import Any

import pytest
from token_kinds import make, scored, shown

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import make_task, niah
from needlework.tasks.base import plain

SENTENCE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
SMALL = {"lengths": [400], "depths": [0, 50, 100]}


def items(tokenizer: Any, seed: int = 0, window: int | None = None, most: int | None = None, **spec: Any) -> list[Any]:
    return list(make_task({"kind": "niah", **spec}).items(tokenizer, seed, window, most))


def test_the_grid_is_the_papers() -> None:
    found = items(make("word"))
    lengths = [round(250 + i * (4096 - 250) / 9) for i in range(10)]
    assert [item.facts["length_tokens"] for item in found] == [n for n in lengths for _ in range(10)]
    assert [item.facts["depth_percent"] for item in found[:10]] == [round(i * 100 / 9) for i in range(10)]
    assert {item.facts["length_tokens"] - item.facts["context_tokens"] for item in found} == {200}
    assert len({item.id for item in found}) == 100
    assert max(len(item.prompt) for item in found) + 40 <= 4096


def test_prompts_of_base_and_chat_models() -> None:
    (item,) = items(make("byte"), lengths=[300], depths=[0], reserve_tokens=200)
    context, rest = item.prompt_text.split("\n\nQUESTION: ")
    assert context.startswith(f"CONTEXT: {SENTENCE} ")
    assert rest == (
        "What is the best thing to do in San Francisco?\n\nANSWER: Here is the most relevant sentence in the context: "
    )
    (item,) = items(make("byte", chat=True), lengths=[300], depths=[0])
    assert item.prompt_text.startswith("<s>[user] CONTEXT: ")
    assert item.prompt_text.endswith("\n\nOutput the most relevant sentence in the context, word by word! [end][bot]")
    assert items(make("byte", chat=True), lengths=[300], depths=[0], style="base")[0].prompt_text.startswith("CONTEXT")


def test_layouts() -> None:
    plain_item, twice, first = (
        items(make("byte"), layout=layout, **SMALL)[1].prompt_text for layout in ("plain", "jrt", "question_first")
    )
    block, lead = plain_item.split("ANSWER: ")
    assert twice == f"{block}{block}ANSWER: {lead}"
    context, question = block.split("QUESTION: ")
    assert first == f"QUESTION: {question}{context}ANSWER: {lead}"


@pytest.mark.parametrize(
    "text, exact, points",
    [
        (f"Sure! {SENTENCE.upper()} Bye", 1, 5),
        ("eat a sandwich", 0, 1),
        ("Eat a sandwich, and sit in Dolores Park.", 0, 2),
        ("visit dolores park", 0, 0.5),
        ("sit in Dolores Park, on a sunny day!", 0, 2),
        ("eat a sandwich and sit in Dolores Park on a sunny day", 0, 3),
        ("reheat a sandwiches", 0, 0),
        ("", 0, 0),
    ],
)
def test_exact_and_graded_scores(text: str, exact: float, points: float) -> None:
    (item,) = items(make("byte"), lengths=[300], depths=[0])
    assert make_task({"kind": "niah"}).score(item, Answer(text=text)) == {"correct": exact, "exact": exact, "graded": points}


def test_graded_parts_can_be_set() -> None:
    spec: dict[str, Any] = {"kind": "niah", "needle": "The word is {value}.", "value": "so long", "graded": {"so": 2}}
    task = make_task({**spec, "lengths": [300], "depths": [0]})
    (item,) = task.items(make("byte"), 0, None, None)
    assert task.score(item, Answer(text="so what"))["graded"] == 2
    assert task.score(item, Answer(text="the word is: so long"))["exact"] == 1


def test_case_and_punctuation_are_ignored() -> None:
    assert plain(" The  “Word”, is-SO_ long!\n") == "the word is so long"


@pytest.mark.parametrize("world", ["toy", "english"])
def test_in_window_means_the_answer_can_see_the_whole_needle(world: str, toy: Any) -> None:
    tokenizer = toy if world == "toy" else make("byte")
    for layout in ("plain", "jrt"):
        spec = {"lengths": [320], "depths": [50], "layout": layout}
        (item,) = items(tokenizer, **spec)
        start, last = item.spans["needle"][-1][0], len(item.prompt) - 1
        seen = last - start + 1  # keys from the needle's first token to the token that begins the answer
        found = {window: items(tokenizer, window=window, **spec)[0].facts["in_window"] for window in (seen - 1, seen)}
        assert found == {seen - 1: False, seen: True}
        assert item.facts["in_window"]


@pytest.mark.parametrize("layout", ["plain", "jrt", "question_first"])
@pytest.mark.parametrize("distractors", [0, 3])
@pytest.mark.parametrize("quote", [False, True])
def test_toy_items(toy: Any, layout: str, distractors: int, quote: bool) -> None:
    spec = {"layout": layout, "distractors": distractors, "quote": quote, "lengths": [90, 120], "samples": 3}
    for item in items(toy, **spec):
        for needle, value in zip(shown(toy, item, "needle"), shown(toy, item, "value"), strict=True):
            assert needle.endswith(value)
            assert item.target == (needle if quote else value)
            assert item.facts["key"] in needle
        assert len(item.spans["needle"]) == (2 if layout == "jrt" else 1)
        assert toy.decode(list(item.prompt), skip_special_tokens=True) == item.prompt_text
        texts, kinds = item.facts["options"], item.facts["option_kinds"]
        assert (kinds.count("true"), kinds.count("context"), kinds.count("absent")) == (1, distractors, 3)
        assert texts[item.answer] == item.target == toy.decode(list(item.options[item.answer]))
        for text, kind in zip(texts, kinds, strict=True):
            offered = text.removeprefix(needle.removesuffix(value)) if quote else text
            assert (f" {offered} ." in item.prompt_text) == (kind != "absent")
        twin = item.twins["twin"]
        changed = [i for i, (a, b) in enumerate(zip(item.prompt, twin, strict=True)) if a != b]
        assert changed
        assert all(any(a <= i < b for a, b in item.spans["value"]) for i in changed)
        assert item.twin_target in texts
        assert toy.decode(list(twin[slice(*item.spans["needle" if quote else "value"][-1])])) == item.twin_target


def test_scores_in_the_toy_world(toy: Any) -> None:
    task = make_task({"kind": "niah", "relation": "code", "lengths": [64], "depths": [0]})
    (item,) = task.items(toy, 0, None, None)
    a, b, c = item.target.split()
    assert task.score(item, Answer(text=f"{a} {b} {c} ."))["correct"] == 1
    assert task.score(item, Answer(text=f"{a} {b} {c}"))["graded"] == 5
    wrong = task.score(item, Answer(text=f". the {a} {b} {c}"))
    assert wrong["correct"] == 0
    assert task.score(item, Answer(text=f"{a} x {c}")) == {"correct": 0, "exact": 0, "graded": pytest.approx(10 / 3)}


def test_toy_lengths_fit_the_model(toy: Any) -> None:
    for layout in ("plain", "jrt"):
        found = items(toy, most=256, layout=layout)
        assert max(len(item.prompt) for item in found) > 200
        assert len({item.facts["length_tokens"] for item in found}) == 4
    # a model that could hold far more than it was trained on is asked at the toy world's own lengths
    for most in (None, 2_048, 262_144):
        assert sorted({item.facts["length_tokens"] for item in items(toy, most=most, depths=[0])}) == list(niah.TOY_LENGTHS)


def test_what_does_not_fit_is_refused(toy: Any) -> None:
    with pytest.raises(NeedleworkError, match="holds 256"):
        items(toy, most=256, lengths=[250])
    with pytest.raises(NeedleworkError, match="greater length"):
        items(make("byte"), lengths=[210])
    with pytest.raises(NeedleworkError, match="longer context"):
        items(toy, lengths=[6])
    with pytest.raises(NeedleworkError, match="unknown relation 'cod'"):
        items(toy, relation="cod")
    with pytest.raises(NeedleworkError, match="distractors need"):
        items(make("byte"), needle="It is {value}.", distractors=1, **SMALL)


def test_the_companion_asks_the_same(toy: Any) -> None:
    for tokenizer, spec in ((toy, {"lengths": [80], "distractors": 2}), (make("byte"), {**SMALL, "distractors": 2})):
        spoken, chosen = (list(make_task({"kind": k, **spec}).items(tokenizer, 3, 64, None)) for k in ("niah", "niah_choice"))
        assert spoken == chosen
    task = make_task({"kind": "niah_choice", **SMALL, "distractors": 2})
    item = chosen[0]
    assert task.chance == item.facts["chance"] == 1 / 6
    for option in item.options:
        assert make("byte").decode(list(option)).startswith("The best thing to do in San Francisco is ")
    with pytest.raises(NeedleworkError, match="nothing to choose from"):
        list(make_task({"kind": "niah_choice", "needle": "It is so.", "absent": 0, **SMALL}).items(make("byte"), 0, None, None))


@pytest.mark.parametrize("against, chance", [("all", 1 / 6), ("context", 1 / 3), ("absent", 1 / 4)])
def test_forced_choice(toy: Any, against: str, chance: float) -> None:
    task = make_task({"kind": "niah_choice", "lengths": [80], "depths": [0], "distractors": 2, "against": against})
    (item,) = task.items(toy, 0, None, None)
    kinds = item.facts["option_kinds"]
    logs = {"true": -2.0, "context": -3.0, "absent": -1.0}
    scores = task.score(item, scored(tuple(logs[kind] for kind in kinds)))
    assert (scores["correct_context"], scores["correct_absent"]) == (1, 0)
    assert scores["correct"] == (against == "context")
    assert scores["margin"] == -1
    assert task.chance == pytest.approx(chance)


def test_equal_options_are_right_as_often_as_chance(toy: Any) -> None:
    task = make_task({"kind": "niah_choice", "lengths": [64], "samples": 60, "distractors": 1, "absent": 2})
    scores = [task.score(i, scored((0.0,) * 4))["correct"] for i in task.items(toy, 0, None, None)]
    assert 0.2 < sum(scores) / len(scores) < 0.3


def test_english_twins() -> None:
    tokenizer = make("word")
    for item in items(tokenizer, twins=True, layout="jrt", others=[{"value": VALUE_OF_14}], **SMALL):
        twin = item.twins["twin"]
        assert len(twin) == len(item.prompt)
        assert item.twin_target == f"The best thing to do in San Francisco is {VALUE_OF_14}."
        assert twin != item.prompt
        outside = [i for i in range(len(twin)) if not any(a <= i < b for a, b in item.spans["needle"])]
        assert [twin[i] for i in outside] == [item.prompt[i] for i in outside]
    with pytest.raises(NeedleworkError, match="no twin"):
        items(tokenizer, twins=True, others=[{"value": "sit in Dolores Park on a sunny day"}], **SMALL)


VALUE_OF_14 = "climb a tower and look over the lake on a windy day"


def test_samples_differ_and_seeds_repeat(toy: Any) -> None:
    for tokenizer, spec in ((toy, {"lengths": [80], "depths": [50]}), (make("byte"), {"lengths": [400], "depths": [50]})):
        first, again, other = (items(tokenizer, seed, samples=3, **spec) for seed in (0, 0, 1))
        assert first == again
        texts = {item.prompt for item in (*first, *other)}
        assert len(texts) == 6
        assert len({item.cluster for item in first}) == 3


def test_cells_share_a_haystack_when_asked() -> None:
    found = items(make("byte"), haystack_per="sample", samples=2, **SMALL)
    assert {item.cluster for item in found} == {"niah/haystack=0", "niah/haystack=1"}
    bare = {item.cluster: set() for item in found}
    for item in found:
        context = item.prompt_text.split("\n\nQUESTION")[0].removeprefix("CONTEXT: ")
        bare[item.cluster].add(context.replace(SENTENCE, "").replace(" ", ""))
    assert [len(texts) for texts in bare.values()] == [1, 1]


def test_the_users_text(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("The old clock is quiet. " * 40)
    item = items(make("byte"), haystack=f"{tmp_path}/*.txt", haystack_per="sample", **SMALL)[1]
    assert item.prompt_text.startswith("CONTEXT: The old clock is quiet. The old")
    assert f"quiet. {SENTENCE} The old" in item.prompt_text


def test_endings(toy: Any) -> None:
    assert make_task({"kind": "niah"}).ending(make("byte")) == (40, None)
    assert make_task({"kind": "niah"}).ending(toy) == (12, ".")
    assert make_task({"kind": "niah", "max_new_tokens": 40}).ending(toy)[0] == 40
    assert niah.LENGTHS[-1] == 4096


def test_worlds_and_models_must_match(toy: Any) -> None:
    with pytest.raises(NeedleworkError, match="zoo model"):
        items(make("byte"), world="toy")
    with pytest.raises(NeedleworkError, match="knows English"):
        items(toy, world="english")
