"""RULER's family and the recall tasks: what is hidden can be found, and guessing gives what `chance` says."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, get_args

import pytest
from token_kinds import make, shown

from needlework.errors import NeedleworkError
from needlework.requests import Answer
from needlework.tasks import make_task
from needlework.tasks.ruler import Variant

VARIANTS = get_args(Variant)
LISTS = ("mqar", "phone_book", "copy")


def both(tokenizer: Any, kind: str, **spec: Any) -> tuple[Any, list[Any]]:
    task = make_task({"kind": f"{kind}_choice", **spec})
    chosen = list(task.items(tokenizer, 0, 50, None))
    assert chosen == list(make_task({"kind": kind, **spec}).items(tokenizer, 0, 50, None))
    assert len({item.id for item in chosen}) == len(chosen)
    for item in chosen:
        assert item.facts["chance"] == pytest.approx(task.chance)
        assert len(set(item.facts["options"])) == len(item.options)
        for text, option in zip(item.facts["options"], item.options, strict=True):
            assert tokenizer.decode(list(option)).strip() == text
    return task, chosen


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world", ["toy", "byte", "joined"])
@pytest.mark.parametrize("layout", ["plain", "jrt"])
def test_ruler(variant: str, world: str, layout: str, toy: Any) -> None:
    tokenizer = toy if world == "toy" else make(world)
    lengths = [192, 256] if world == "toy" else [700]
    _, found = both(tokenizer, "ruler", variant=variant, lengths=lengths, samples=2, layout=layout)
    for item in found:
        targets, needles = item.facts["targets"], shown(tokenizer, item, "needle")
        assert all(any(target in needle for needle in needles) for target in targets)
        room = item.facts["length_tokens"] - (0 if world == "toy" else 128)
        assert 0.8 * room < item.facts["context_tokens"] <= room
        texts, kinds = item.facts["options"], item.facts["option_kinds"]
        told = item.prompt_text
        assert texts[item.answer] == targets[0]
        assert all((f" {t} " in told.replace(".", " ")) == (k != "absent") for t, k in zip(texts, kinds, strict=True))
        score = make_task({"kind": "ruler", "variant": variant}).score
        assert score(item, Answer(text=item.target)) == {"correct": 1, "found": 1}
        assert score(item, Answer(text="nothing"))["found"] == 0
        part = score(item, Answer(text=targets[0]))
        assert part["found"] == pytest.approx(1 / len(targets))
        assert part["correct"] == (len(targets) == 1)


def test_ruler_variants_differ_as_defined(toy: Any) -> None:
    tokenizer = make("byte")

    def one(**spec: Any) -> Any:
        return next(make_task({"kind": "ruler", "lengths": [900], **spec}).items(tokenizer, 0, None, None))

    assert "distractor" not in one(variant="single").spans
    assert len(one(variant="multikey", keys=5).spans["distractor"]) == 5
    many = one(variant="multivalue", values=3)
    assert len({text.rsplit(" ", 1)[0] for text in shown(tokenizer, many, "needle")}) == 1
    assert len(many.spans["needle"]) == len(many.facts["targets"]) == 3
    asked = one(variant="multiquery", queries=2)
    assert len({text.rsplit(" ", 1)[0] for text in shown(tokenizer, asked, "needle")}) == 2
    full = one(variant="multikey", keys="full")
    context = full.prompt_text.split("\n\n")[0]
    assert context.count("The locker number for the") == context.count(".") == full.facts["needles"] > 20
    series = list(make_task({"kind": "ruler", "variant": "multiquery", "lengths": [192]}).items(toy, 0, None, None))
    assert len(series) == 4
    assert {item.cluster for item in series} == {"ruler/multiquery/length=192/0"}
    assert series[1].prompt_text.count("answer :") == 2
    assert f"answer : {series[0].target} ." in series[1].prompt_text


def test_variables_are_handed_on_in_order() -> None:
    for item in make_task({"kind": "ruler", "variant": "variables", "lengths": [900], "samples": 5, "hops": 3}).items(
        make("byte"), 0, None, None
    ):
        given, *copies = shown(make("byte"), item, "needle")
        names = item.facts["targets"][::-1]
        assert len(names) == 4
        assert given.startswith(f"The {names[0]} was given the number ")
        assert copies == [f"The {b} was given the same number as the {a}." for a, b in pairwise(names)]


@pytest.mark.parametrize("variant", ["common_words", "frequent_words"])
@pytest.mark.parametrize("world", ["toy", "byte"])
def test_targets_are_the_most_frequent_words(variant: str, world: str, toy: Any) -> None:
    tokenizer, length = (toy, 200) if world == "toy" else (make("byte"), 1500)
    for item in make_task({"kind": "ruler", "variant": variant, "lengths": [length], "samples": 3}).items(
        tokenizer, 0, None, None
    ):
        words = item.prompt_text.lower().split("question")[0].replace("context :", "").replace("context:", "").split()
        counts = Counter(words).most_common()
        assert {word for word, _ in counts[:3]} == set(item.facts["targets"])
        assert counts[2][1] > counts[3][1]
        if variant == "common_words":
            assert counts[2][1] >= 10 * counts[3][1]
            assert counts[3][1] == counts[-1][1]
        assert sum(n for _, n in counts[:3]) == len(item.spans["needle"])


def test_toy_ruler_has_twins(toy: Any) -> None:
    for variant in ("single", "multikey", "multiquery"):
        for item in make_task({"kind": "ruler", "variant": variant, "lengths": [192]}).items(toy, 0, None, None):
            twin = item.twins["twin"]
            changed = {i for i in range(len(twin)) if twin[i] != item.prompt[i]}
            assert changed
            assert changed <= {i for a, b in item.spans["value"] for i in range(a, b)}
            assert item.twin_target != item.target


@pytest.mark.parametrize("spec", [{"lengths": [140]}, {"variant": "common_words", "lengths": [160]}])
def test_ruler_says_what_is_too_short(spec: dict[str, Any]) -> None:
    with pytest.raises(NeedleworkError, match="greater length"):
        list(make_task({"kind": "ruler", **spec}).items(make("byte"), 0, None, None))


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("layout", ["jrt", "question_first"])
def test_refused_layouts_of_lists_in_the_toy_language(kind: str, layout: str, toy: Any) -> None:
    for name in (kind, f"{kind}_choice"):
        task = make_task({"kind": name, "sizes": [4], "samples": 1, "layout": layout})
        with pytest.raises(NeedleworkError, match=f"{name}: .*layout plain only, not {layout}"):
            list(task.items(toy, 0, 50, None))
        assert list(task.items(make("byte"), 0, 50, None))


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("world", ["toy", "byte"])
def test_recall(kind: str, world: str, toy: Any) -> None:
    tokenizer = toy if world == "toy" else make(world)
    queries = 1 if kind == "copy" else 2
    _, found = both(tokenizer, kind, sizes=[4, 6], queries=queries, samples=3)
    assert len(found) == 2 * 3 * queries
    assert len({item.cluster for item in found}) == 6
    for item in found:
        (needle,), (value,) = shown(tokenizer, item, "needle"), shown(tokenizer, item, "value")
        assert needle.endswith(value)
        assert value == item.target == item.facts["options"][item.answer]
        assert kind == "copy" or needle.startswith(item.facts["key"])
        made = make_task({"kind": kind})
        assert made.score(item, Answer(text=f"{item.target} ."))["correct"] == 1
        assert made.score(item, Answer(text=f"the {item.target}"))["correct"] == 0
        if world == "toy":
            assert len(item.twins["twin"]) == len(item.prompt)
            assert item.twin_target in item.facts["options"]


def test_too_many_queries_or_entries(toy: Any) -> None:
    with pytest.raises(NeedleworkError, match="queries need"):
        list(make_task({"kind": "mqar", "sizes": [2], "queries": 3}).items(toy, 0, None, None))
    with pytest.raises(NeedleworkError, match="different"):
        list(make_task({"kind": "mqar", "sizes": [200]}).items(toy, 0, None, None))
