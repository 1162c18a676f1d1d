"""The model behind the page: its answers are those of `subject.generate`, whatever the page asks."""

from __future__ import annotations

from typing import Any

import pytest
from parts import parts_of

import needlework as nw
from needlework import zoo
from needlework.engine.prefill import KeptPrefills
from needlework.measure import make_samples
from needlework.play.playground import Playground
from needlework.play.state import PromptState, RequestState, stories
from needlework.tasks import make_task

TEXTS = [
    "none",
    "keep_heads(k=2)",
    "keep_heads(phase='decode', k=1, by='random', seed=2)",
    "ablate_attention()",
    "ablate_heads(heads=[[2, 0], [5, 3]])",
    "expose_tokens(phase='decode', mode='omit')",
    "limit_context(tokens=9, sinks=1)",
    "ablate_recurrent()",
    "ablate_recurrent(site='conv')",
    "ablate_recurrent_groups(groups=[[0, 1]])",
    "swap_memory(half='kv')",
]


def ask(playground: Playground, prompt: PromptState, text: str) -> dict[str, Any]:
    return playground.generate(RequestState(prompt=prompt, parts=tuple(parts_of(text)), max_new_tokens=12))


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_is_that_of_generate_and_the_choice_that_of_choices(griffin: Playground, text: str) -> None:
    subject = griffin.subject
    prompt = griffin.sample(128, 50, 0)
    found = ask(griffin, prompt, text)
    spans = {"needle": tuple((start, end) for start, end in found["prompt"]["needle"])}
    twin = {"twin": prompt.of_twin().text}
    (told,) = subject.generate([prompt.text], text, spans=[spans], twins=[twin], max_new_tokens=12, stop=["."])
    assert (found["text"], [token["id"] for token in found["tokens"]]) == (told.text, list(told.tokens))
    assert found["intervention"] == str(nw.parse(text))
    assert "".join(found["prompt"]["tokens"]).removeprefix("<bos>").strip() == prompt.text
    assert "".join(token["text"] for token in found["tokens"]).strip() == told.text.strip()
    if "phase" in text or "swap" in text:
        return  # scoring has no decode phase
    (scored,) = subject.choices([prompt.text], [[f" {option}" for option in prompt.options]], text, spans=[spans])
    assert [option["logprob"] for option in found["options"]] == pytest.approx(list(scored.totals), abs=2e-3)
    assert sum(option["probability"] for option in found["options"]) == pytest.approx(1)


def test_the_prompt_is_the_tasks_own(griffin: Playground) -> None:
    task = make_task({"kind": "niah", "distractors": 3, "lengths": [64], "depths": [75]})
    item = make_samples(griffin.subject, task, 3)[0].item
    prompt = griffin.sample(64, 75, 3)
    encoded = griffin.encode(prompt)
    assert (prompt.text, encoded.ids, encoded.spans["needle"]) == (item.prompt_text, item.prompt, item.spans["needle"])
    assert encoded.twins == item.twins
    assert prompt.target == item.target
    assert len(prompt.options) == 4


def test_attention_is_what_observe_sees(griffin: Playground) -> None:
    prompt = griffin.sample(64, 50, 1)
    request = RequestState(prompt=prompt, parts=tuple(parts_of("keep_heads(k=2)")), max_new_tokens=12)
    found = griffin.attention(request, 1)
    encoded = griffin.encode(prompt)
    with nw.observe(griffin.subject, patterns=True, positions=[len(encoded.ids)]) as seen:
        griffin.subject.generate([prompt.text], "keep_heads(k=2)", spans=[encoded.spans], max_new_tokens=12, stop=["."])
    assert len(seen.patterns) == 20
    for pattern in seen.patterns:
        layer = next(each for each in found["layers"] if each["layer"] == pattern.layer)
        weights = [layer["weights"][pattern.head][key] for key in pattern.keys.tolist()]
        assert weights == pytest.approx(pattern.weights.tolist(), abs=2e-3)
    for row in seen.table():
        mass = next(each for each in found["needle"] if each["layer"] == row.layer)["mass"]
        assert mass[row.head] == pytest.approx(row.needle_mass, abs=2e-3)
    with pytest.raises(nw.NeedleworkError, match="the answer has tokens 0 to"):
        griffin.attention(request, 99)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*zoo.catalog()])
def test_every_zoo_model_has_its_stories_or_says_what_it_lacks(name: str) -> None:
    playground = Playground(nw.load(name), name)
    told = stories(playground.anatomy)
    assert len(told) == 8
    prompt = playground.sample(64, 50, 0)
    requests = playground.tour(prompt)
    assert len(requests) == sum(not story.missing for story in told)
    assert all(answer["tokens"] for answer in playground.generate_all(requests))
    missing = {story.id for story in told if story.missing}
    expected = {"tiny-transformer": {"no-recurrence"}, "tiny-mamba": {x.id for x in told} - {"untouched", "no-recurrence"}}
    assert missing == expected.get(name, set())
    assert all("has no" in story.missing for story in told if story.missing)


def test_a_model_without_attention_says_so() -> None:
    playground = Playground(nw.load("tiny-mamba"), "tiny-mamba")
    described = playground.describe()
    assert described["scores"] == described["rankings"] == []
    request = RequestState(prompt=playground.sample(64, 50, 0), parts=({"name": "keep_heads", "k": 1},), max_new_tokens=4)
    with pytest.raises(nw.NeedleworkError, match="has no separate attention layers"):
        playground.generate(request)
    with pytest.raises(nw.NeedleworkError, match="no attention to look at"):
        playground.attention(request.model_copy(update={"parts": ()}), 0)


def test_a_prompt_that_is_too_long_for_the_model_is_refused_before_it_is_read() -> None:
    playground = Playground(nw.load("tiny-transformer"), "tiny-transformer")
    prompt = playground.sample(64, 50, 0)
    most = playground.anatomy.max_tokens
    assert most is not None
    long = prompt.model_copy(update={"after": prompt.after * (most // 20)})
    with pytest.raises(nw.NeedleworkError, match=f"tokens are more than the {most} that .* allows; shorten the prompt"):
        ask(playground, long, "none")
    assert ask(playground, prompt, "none")["tokens"]


def test_a_ranking_orders_all_heads(griffin: Playground) -> None:
    order = griffin.ranking("needle_mass")
    assert sorted(order) == [[layer, head] for layer in (2, 5) for head in range(10)]
    with pytest.raises(nw.NeedleworkError, match="are not ranked by 'guessing'"):
        griffin.ranking("guessing")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"before": "", "needle": "", "after": "", "question": " "}, "the prompt is empty"),
        ({"needle": "the secret code of gandalf is 4"}, "toy language without the words 'gandalf'"),
        ({"twin": "the secret code of belan is 1"}, "they must be of one length"),
        ({"options": ("4 7 1", "four hundred")}, "toy language without the words 'four', 'hundred'"),
        ({"options": ("",)}, "an option is empty"),
        ({"needle": ""}, "no span 'needle'"),
    ],
)
def test_what_is_wrong_with_a_typed_prompt_is_told(griffin: Playground, fields: dict[str, Any], said: str) -> None:
    prompt = griffin.sample(64, 50, 0).model_copy(update=fields)
    text = "expose_tokens(mode='omit')" if fields == {"needle": ""} else "swap_memory(half='kv')"
    with pytest.raises(nw.NeedleworkError, match=said):
        ask(griffin, prompt, text)


def test_draws_that_do_not_exist_are_refused(griffin: Playground) -> None:
    for draw in ((65, 50, 0), (64, 51, 0), (64, 50, 20), (64, 50, -1)):
        with pytest.raises(nw.NeedleworkError, match="prompts are drawn with"):
            griffin.sample(*draw)


def test_prompts_are_read_once_and_attention_is_kept_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    playground = Playground(nw.load("tiny-griffin"), "tiny-griffin")
    prefills = {  # by intervention
        "none": 1,
        "keep_heads(phase='decode', k=2)": 0,
        "swap_memory(half='kv')": 1,  # of the twin
        "ablate_attention()": 1,
        "swap_memory(half='recurrent')": 0,
    }
    for text in prefills:  # the first runs of a model also check its shortcuts
        ask(playground, playground.sample(64, 50, 3), text)
    prompt = playground.sample(64, 50, 2)
    fed: list[str] = []
    feed = playground.subject.body.feed

    def count(ids: object, memory: object, phase: str, *args: Any, **options: Any) -> Any:
        fed.append(phase)
        return feed(ids, memory, phase, *args, **options)

    monkeypatch.setattr(playground.subject.body, "feed", count)
    for text, expected in prefills.items():
        fed.clear()
        ask(playground, prompt, text)
        assert fed.count("prefill") == expected, text
        assert fed.count("decode") > 1
    fed.clear()
    assert playground.attention(RequestState(prompt=prompt, parts=(), max_new_tokens=12), 1)["layers"]
    assert fed == []


def test_an_answer_does_not_change_what_is_kept(griffin: Playground) -> None:
    """Without options, nothing is forked: the answer must not continue the kept memory itself."""
    prompt = griffin.sample(64, 50, 5).model_copy(update={"options": ()})
    requests = [RequestState(prompt=prompt, max_new_tokens=count) for count in (12, 11, 12)]
    kept = KeptPrefills(1 << 20)
    found = [griffin.generate_all([request], kept=kept)[0]["tokens"] for request in requests]
    assert found == [griffin.generate_all([request])[0]["tokens"] for request in requests]


def test_what_is_kept_has_a_limit(griffin: Playground) -> None:
    """With room for one prompt of 50 KB only, the other is read again, and answers are the same."""
    prompts = [griffin.sample(64, 50, seed) for seed in (3, 4)]
    requests = [RequestState(prompt=prompt, max_new_tokens=12) for prompt in (*prompts, *prompts)]
    kept = KeptPrefills(75_000)
    found = [griffin.generate_all([request], kept=kept)[0]["tokens"] for request in requests]
    assert found == [answer["tokens"] for answer in griffin.generate_all(requests)]
    sizes = [result.memory.nbytes() for result in kept._results.values() if result.memory]
    assert len(sizes) == 1
    assert sum(sizes) <= 75_000
    none = KeptPrefills(1000)
    assert griffin.generate_all(requests[:1], kept=none)[0]["tokens"] == found[0]
    assert not none._results
