"""Prompts of one's own: spans are exactly the needle, scores are what `match` says, and every fault names file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from token_kinds import make, scored, shown

from needlework.errors import NeedleworkError
from needlework.experiments.plan import load
from needlework.requests import Answer
from needlework.tasks import make_task
from needlework.tasks.base import Task, equals

ENGLISH = {
    "prompt": "the baker repaired the fence. The old clock is quiet at this hour. We say: the old clock is quiet. What is quiet?",
    "target": "the old clock",
    "needle": "old clock is quiet",
}
TOY = {
    "prompt": "the secret code of loran is 4 7 1 . question : what is the secret code of loran ? answer :",
    "target": "4 7 1",
    "needle": "the secret code of loran is 4 7 1 .",
    "options": ["4 7 1", "2 9 9", "4 7 2"],
}


def written(folder: Path, *lines: dict[str, Any] | str) -> str:
    file = folder / "mine.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(file)


def prompts(folder: Path, *lines: dict[str, Any] | str, kind: str = "prompts", **fields: Any) -> Task:
    return make_task({"kind": kind, "file": written(folder, *lines), **fields})


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_decoding_the_span_gives_the_needle_wherever_it_occurs(kind: str, bos: bool, chat: bool, tmp_path: Path) -> None:
    tokenizer = make(kind, bos, chat)
    line = ENGLISH
    if kind == "word":  # its words hold their full stops
        line = {**ENGLISH, "prompt": "The old clock is quiet at night. The old clock is quiet at noon."}
    (item,) = prompts(tmp_path, line, chat=chat).items(tokenizer, 0, None, None)
    assert shown(tokenizer, item, "needle") == [ENGLISH["needle"]] * 2
    assert [i for i, t in enumerate(item.prompt) if t == tokenizer.bos_token_id] == ([0] if bos or chat else [])
    if chat:
        turn = [{"role": "user", "content": line["prompt"]}]
        whole = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        assert item.prompt_text == whole
    else:
        assert item.prompt_text == line["prompt"]
        if kind == "joined":  # its tokens go over the needle's ends, so they are cut there
            assert tokenizer.decode(list(item.prompt), skip_special_tokens=True) == line["prompt"]
        else:
            assert item.prompt == tuple(tokenizer(line["prompt"])["input_ids"])


def test_zoo_models_are_asked_in_words(toy: Any, tmp_path: Path) -> None:
    made = prompts(tmp_path, TOY)
    (item,) = made.items(toy, 0, 16, None)
    assert shown(toy, item, "needle") == [TOY["needle"]]
    assert item.spans["needle"] == ((1, 11),)
    assert item.prompt == tuple(toy(TOY["prompt"])["input_ids"])
    assert item.facts["in_window"] is False
    assert item.facts["needle_distance_tokens"] == len(item.prompt) - 1
    assert made.ending(toy) == (40, ".")
    assert made.ending(make("byte")) == (40, None)
    with pytest.raises(NeedleworkError, match=r"mine\.jsonl:1: not a text of the toy language: 'baker"):
        list(prompts(tmp_path, {**TOY, "prompt": "the baker of loran", "needle": "loran"}).items(toy, 0, None, None))


def test_a_needle_that_ends_within_a_token_is_cut_out_of_it(tmp_path: Path) -> None:
    tokenizer = make("byte")
    line = {"prompt": "walk to the garden walls", "target": "x", "needle": "den wall"}
    (item,) = prompts(tmp_path, line).items(tokenizer, 0, None, None)
    assert shown(tokenizer, item, "needle") == ["den wall"]
    assert tokenizer.decode(list(item.prompt), skip_special_tokens=True) == line["prompt"]


def test_ids_and_clusters_are_the_lines_own_and_seeds_change_nothing(toy: Any, tmp_path: Path) -> None:
    lines = (TOY, "", {**TOY, "id": "b", "cluster": "book"}, {**TOY, "id": 7, "cluster": 0}, "  ")
    made = prompts(tmp_path, *lines)
    items = list(made.items(toy, 0, None, None))
    assert [item.id for item in items] == ["prompts/1", "prompts/b", "prompts/7"]
    assert [item.cluster for item in items] == ["prompts/1", "book", "0"]
    assert items == list(made.items(toy, 5, None, None))


@pytest.mark.parametrize(
    "match, right, wrong",
    [
        ("contains", "Well, it is the OLD clock!", "the older clock"),
        ("begins", "The old clock, they say", "it is the old clock"),
        ("exact", " the old clock. ", "the old clock is"),
    ],
)
def test_match_says_when_an_answer_is_right(match: str, right: str, wrong: str, tmp_path: Path) -> None:
    made = prompts(tmp_path, ENGLISH, match=match)
    (item,) = made.items(make("byte"), 0, None, None)
    assert made.score(item, Answer(text=right)) == {"correct": 1.0}
    assert made.score(item, Answer(text=wrong)) == {"correct": 0.0}


def test_exact_is_the_whole_answer() -> None:
    assert equals("A b!", "a B")
    assert not equals("a b c", "a b")


def test_the_file_decides_whether_it_is_retrieval(tmp_path: Path) -> None:
    without = {key: value for key, value in ENGLISH.items() if key != "needle"}
    assert prompts(tmp_path, ENGLISH, ENGLISH).ability == "retrieval"
    mixed = prompts(tmp_path, ENGLISH, without)
    assert mixed.ability == ""
    first, second = mixed.items(make("byte"), 0, None, None)
    assert second.spans == {}
    assert "needle" in first.spans


def test_options_are_chosen_from(toy: Any, tmp_path: Path) -> None:
    made = prompts(tmp_path, TOY, {**TOY, "options": ["4 7 1", "3 3 3"]}, kind="prompts_choice")
    assert made.ability == "retrieval"
    assert made.chance == pytest.approx((1 / 3 + 1 / 2) / 2)
    item, other = made.items(toy, 0, None, None)
    assert item.answer is not None
    assert toy.decode(list(item.options[item.answer])) == "4 7 1"
    assert sorted(toy.decode(list(option)) for option in item.options) == sorted(TOY["options"])
    assert item.facts["chance"] == pytest.approx(1 / 3)
    logs = tuple(-1.0 if i == item.answer else -2.0 for i in range(3))
    assert made.score(item, scored(logs))["correct"] == 1
    assert made.score(item, scored(tuple(-3 - x for x in logs)))["correct"] == 0
    assert len(other.options) == 2


@pytest.mark.parametrize("kind", ["prompts", "prompts_choice"])
@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "Invalid JSON"),
        ("[1]", "should be an object"),
        ({**TOY, "neddle": "x"}, "unknown key 'neddle'; did you mean 'needle'?"),
        ({"prompt": "x"}, "target: Field required"),
        ({**TOY, "prompt": ""}, "prompt: String should have at least 1 character"),
        ({**TOY, "target": 4}, "target: Input should be a valid string"),
        ({**TOY, "needle": "loran is 9"}, "the needle 'loran is 9' does not occur in the prompt"),
        ({**TOY, "needle": " "}, "the needle is empty"),
        ({**TOY, "options": ["4 7 1"]}, "two or more different texts"),
        ({**TOY, "options": ["4 7 1", "1", "1"]}, "two or more different texts"),
        ({**TOY, "options": ["4 7 2", "1"]}, "must be one of the options"),
        ({**TOY, "options": ["4 7 1", " 4 7 1"]}, "and one only"),
        ({**TOY, "id": "1"}, "the id '1' is taken by line 1"),
    ],
)
def test_a_fault_names_file_and_line(kind: str, line: Any, words: str, tmp_path: Path) -> None:
    made = prompts(tmp_path, {**TOY, "id": "1"}, "", line, kind=kind)
    with pytest.raises(NeedleworkError) as error:
        made.check()
    assert f"{tmp_path / 'mine.jsonl'}:3: " in str(error.value)
    assert words in str(error.value)


def test_faults_of_one_kind_only(tmp_path: Path, toy: Any) -> None:
    silent = {**TOY, "target": "?", "options": ["?", "!"]}
    with pytest.raises(NeedleworkError, match=r":1: the target '\?' has no letter or digit"):
        prompts(tmp_path, silent).check()
    prompts(tmp_path, silent, kind="prompts_choice").check()
    plain = {"prompt": "x", "target": "y"}
    prompts(tmp_path, plain).check()
    with pytest.raises(NeedleworkError, match=r':1: prompts_choice needs "options" in every line'):
        prompts(tmp_path, plain, kind="prompts_choice").check()
    strange = {"prompt": "What is quiet?", "target": "the clock", "options": ["the clock", "zzyzx", "qqq"]}
    with pytest.raises(NeedleworkError, match=r":1: two of the options .* are the same tokens"):
        list(prompts(tmp_path, strange).items(make("word"), 0, None, None))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = make_task({"kind": "prompts", "file": str(tmp_path / "none.jsonl")})
    with pytest.raises(NeedleworkError, match=r"none\.jsonl': cannot be read"):
        missing.check()
    (tmp_path / "mine.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(NeedleworkError, match="not UTF-8"):
        make_task({"kind": "prompts", "file": str(tmp_path / "mine.jsonl")}).check()
    with pytest.raises(NeedleworkError, match=r"mine\.jsonl:1: the file is empty"):
        prompts(tmp_path, "", "").check()


def test_a_prompt_that_the_model_cannot_hold_names_its_line(tmp_path: Path) -> None:
    made = prompts(tmp_path, {"prompt": "a", "target": "b"}, ENGLISH, max_new_tokens=8)
    with pytest.raises(NeedleworkError, match=r"mine\.jsonl:2: .* the model holds 20; shorten the prompt"):
        list(made.items(make("byte"), 0, None, 20))


def test_in_a_plan_files_are_read_from_where_the_plan_is_and_faults_name_both_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("One. Two.")
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path, TOY)
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "models: [tiny-griffin]\nexperiments:\n  own:\n    interventions: none\n    tasks:\n"
        "      - {kind: prompts, file: mine.jsonl}\n      - {kind: niah, haystack: texts/*.txt}\n"
        "      - {kind: perplexity, text: from-here/*.txt}\n"
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    own, niah, perplexity = (named.task for named in load(plan).experiments[0].tasks)
    assert own.file == str(tmp_path / "mine.jsonl")  # type: ignore[attr-defined]
    assert niah.haystack == str(tmp_path / "texts/*.txt")  # type: ignore[attr-defined]
    assert perplexity.text == "from-here/*.txt"  # type: ignore[attr-defined]
    written(tmp_path, TOY, "{")
    with pytest.raises(NeedleworkError) as error:
        load(plan)
    assert str(error.value).startswith(f"{plan}:6: task 'prompts': {tmp_path / 'mine.jsonl'}:2: Invalid JSON")


def test_a_file_that_changes_while_it_is_used_changes_nothing(tmp_path: Path) -> None:
    made = prompts(tmp_path, ENGLISH)
    made.check()
    written(tmp_path, {"prompt": "x", "target": "y"})
    assert made.ability == "retrieval"
    assert [item.target for item in made.items(make("byte"), 0, None, None)] == [ENGLISH["target"]]
