from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import TASKS, Item, Task, base, make_task, task

KINDS = {
    "association",
    "association_choice",
    *("niah", "niah_choice", "ruler", "ruler_choice", "mqar", "mqar_choice", "phone_book", "phone_book_choice"),
    *("copy", "copy_choice", "cloze", "cloze_choice", "letter", "letter_lookup", "judgements", "perplexity"),
    *("prompts", "prompts_choice", "linked", "linked_choice"),
}


class Echo(Task):
    """The smallest task: say a word."""

    kind = "echo"
    mode = "generate"
    word: str = "needle"

    def items(self, tokenizer: Any, seed: int, window: int | None, max_tokens: int | None) -> Iterator[Item]:
        ids = tuple(tokenizer(self.word)["input_ids"])
        yield Item(id="echo/0", cluster="echo/0", prompt=ids, prompt_text=self.word, target=self.word)

    def score(self, item: Item, answer: Answer) -> dict[str, float]:
        return {"correct": float(item.target in answer.text)}


@pytest.fixture
def clean() -> Iterator[None]:
    before = dict(TASKS)
    yield
    TASKS.clear()
    TASKS.update(before)


def test_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "a", "target": "b", "options": ["b", "c"]}')
    needed = {kind: {"file": str(tmp_path / "own.jsonl")} for kind in ("prompts", "prompts_choice")}
    assert set(TASKS) == KINDS
    for name, cls in TASKS.items():
        made = make_task({"kind": name, **needed.get(name, {})})
        assert type(made) is cls
        assert made == make_task({"kind": name, **made.model_dump(exclude_unset=True)})
        assert made.ability in ("retrieval", "knowledge", "perplexity", "")
        assert made.mode in ("generate", "choices", "perplexity")
        assert (made.chance > 0) == (made.mode == "choices")
        assert cls.__doc__ or name.endswith("_choice")


def test_a_new_task_in_one_decorator(clean: None, toy: Any) -> None:
    task(Echo)
    made = make_task({"kind": "echo", "word": "the king"})
    (item,) = made.items(toy, 0, None, None)
    assert made.score(item, Answer(text="the king .")) == {"correct": 1}


def test_a_plug_in_is_found(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("echo", f"{__name__}:Echo", base.GROUP)
    monkeypatch.setattr(base, "entry_points", lambda group: [point] if group == base.GROUP else [])
    assert make_task({"kind": "echo"}).kind == "echo"
    broken = EntryPoint("bad", "no.such.module:Echo", base.GROUP)
    monkeypatch.setattr(base, "entry_points", lambda group: [broken])
    with pytest.raises(NeedleworkError, match="plug-in 'bad'"):
        make_task({"kind": "something"})


def test_two_tasks_of_one_kind_are_refused(clean: None) -> None:
    with pytest.raises(TypeError, match="already taken"):
        task(type("Other", (Echo,), {"kind": "niah", "__module__": "elsewhere"}))
    with pytest.raises(TypeError, match="kind and mode"):
        task(type("Nothing", (Task,), {}))


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"kind": "nia"}, "did you mean 'niah'"),
        ({"kind": "zzz"}, "known: .*cloze"),
        ({"kinds": "niah"}, "you wrote 'kinds'"),
        ({}, "needs a kind"),
        ("niah", "is a mapping"),
        ({"kind": ["niah"]}, "kind is a word"),
        ({"kind": "niah", "length": [1]}, "unknown key 'length'; did you mean 'lengths'"),
        ({"kind": "niah", "layout": "twice"}, "layout: .*'jrt'"),
        ({"kind": "niah", "samples": 0}, "samples: .*greater than or equal to 1"),
        ({"kind": "niah", "lengths": "long"}, "lengths"),
        ({"kind": "niah", "others": [{"val": "x"}]}, "others.0.value"),
        ({"kind": "niah", 3: 4}, "task 'niah'"),
        ({"kind": "ruler", "keys": "some"}, "keys"),
        ({"kind": "niah", "depths": [120]}, "depths"),
        ({"kind": "niah", "lengths": []}, "lengths"),
    ],
)
def test_errors_name_the_right_word(spec: Any, message: str) -> None:
    with pytest.raises(NeedleworkError, match=message):
        make_task(spec)


def test_tasks_never_import_torch() -> None:
    code = "import sys, needlework.tasks; print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
