"""One way to ask: `measure` gives what a plain loop over the model gives, and an answer that failed is an error."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import needlework as nw
from needlework.errors import NeedleworkError
from needlework.measure import Sample, make_samples, map_samples, measure, run_requests
from needlework.requests import Request
from needlework.tasks.base import Item, make_task

ACTS = [nw.NONE, nw.parse("keep_heads(k=1, phase='both')"), nw.parse("ablate_attention()"), nw.NONE]


@cache
def subject() -> nw.Subject:
    return nw.load("tiny-griffin-small")


def test_measure_is_a_plain_loop_of_generate() -> None:
    task = make_task({"kind": "niah", "lengths": [40, 64], "depths": [0, 50], "samples": 2, "distractors": 3})
    samples = make_samples(subject(), task, seed=3)
    told: list[float] = []
    found = measure(subject(), samples, ACTS, progress=told.append)
    most, stop = task.ending(subject().tokenizer)
    for a, act in enumerate(ACTS):
        for s, sample in enumerate(samples):
            (alone,) = subject().generate([sample.item.prompt], act, max_new_tokens=most, stop=() if stop is None else (stop,))
            answer = found.answers[a][s]
            assert (answer.tokens, answer.text, answer.finish) == (alone.tokens, alone.text, alone.finish)
            assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            assert found.values()[a, s] == task.score(sample.item, alone)["correct"]
    assert found.values().shape == (4, 8)
    assert (found.values()[0] == found.values()[3]).all()
    assert 0 < found.values().mean() < 1, "the interventions change some answers"
    assert told == sorted(told)
    assert (len(told), told[-1]) == (3 * 8, 1.0), "equal interventions are asked once"


@pytest.mark.parametrize("kind", ["cloze_choice", "niah_choice"])
def test_measure_is_a_plain_loop_of_choices(kind: str) -> None:
    samples = make_samples(subject(), make_task({"kind": kind, **({"lengths": [40]} if kind == "niah_choice" else {})}), seed=0)[
        :6
    ]
    found = measure(subject(), samples)
    for sample, answer in zip(samples, found.answers[0], strict=True):
        (alone,) = subject().choices([sample.item.prompt], [sample.item.options])
        assert answer.totals == pytest.approx(alone.totals, abs=1e-4)
    assert found.values()[0].tolist() == [sample.score(a)["correct"] for sample, a in zip(samples, found.answers[0], strict=True)]


def test_a_whole_text_is_scored_from_its_second_token_on() -> None:
    (sample, *_) = make_samples(subject(), make_task({"kind": "perplexity", "samples": 1, "tokens": 32}), seed=0)
    (request,) = sample.requests()
    assert (request.prompt, request.options) == (sample.item.prompt[:1], (sample.item.prompt[1:],))
    assert request.key == Request(sample.item.prompt).key, "random choices are those of the whole text"
    logits = subject().logits([sample.item.prompt])[0].double().log_softmax(-1)
    expected = [float(logits[i, token]) for i, token in enumerate(sample.item.prompt[1:])]
    answer = measure(subject(), [sample]).answers[0][0]
    assert answer.option_logprobs[0] == pytest.approx(expected, abs=1e-4)


def test_a_sample_of_several_prompts_has_one_answer() -> None:
    class Task:
        mode = "choices"

    parts = [Item(f"x/{i}", "x", (4 + i, 9), "", "", options=((5,), (6, 7))) for i in range(3)]
    sample = Sample(Task(), replace(parts[0], also=tuple(parts[1:])))  # type: ignore[arg-type]
    (answer,) = measure(subject(), [sample]).answers[0]
    alone = subject().choices([part.prompt for part in parts], [part.options for part in parts])
    assert len(answer.totals) == 6
    assert answer.totals == pytest.approx([total for one in alone for total in one.totals], abs=1e-4)


class Failing:
    """An engine whose second answer failed."""

    def run(self, requests: Any) -> Any:
        for i in reversed(range(len(requests))):
            yield i, nw.Answer(tokens=(1,), finish="failed" if i == 1 else "stop", error="not finite" if i == 1 else "")


def test_an_answer_that_failed_is_an_error_that_names_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject(), "engine", Failing())
    requests = [Request((1, 2), act) for act in (nw.NONE, nw.parse("ablate_attention()"))]
    with pytest.raises(NeedleworkError, match=r"^b under ablate_attention\(\): not finite$"):
        run_requests(subject(), requests, ["a", "b"])
    with pytest.raises(NeedleworkError, match=r"^request 1: not finite$"):
        run_requests(subject(), [Request((1, 2))] * 2)


def test_what_ends_an_answer_must_be_known() -> None:
    with pytest.raises(NeedleworkError, match="what ends an answer is not known"):
        Item("x", "x", (1, 2), "", "").requests("generate")


def test_a_local_model_takes_all_samples_in_one_call() -> None:
    def count(model: nw.Subject, samples: Any, progress: Any) -> int:
        progress(1.0)
        return len(samples)

    told: list[float] = []
    assert map_samples(subject(), count, range(50), told.append) == [50]
    assert map_samples(subject(), count, range(50), told.append, whole=True) == [50]
    assert told == [1.0, 1.0]
    assert np.isfinite(told).all()
