"""One caller at a time: threads wait for each other, and nobody is asked while answering."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import cases
import needlework as nw
from needlework.interventions.acts import Act, ChangeOutputs, LoweringContext
from needlework.requests import Answer, Request

CALLS = 4  # of each thread
PROMPTS = [tuple(range(5 + i, 40 + 3 * i)) for i in range(CALLS)]


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    """Threads take turns so often that code which lets them meet is caught."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _in_threads(*tasks: Callable[[], Any]) -> list[Any]:
    """What each task returns, all of them run at once; an exception of theirs is raised here."""
    results: dict[int, Any] = {}
    failures: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def work(i: int) -> None:
        try:
            start.wait()
            results[i] = tasks[i]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[i] for i in range(len(tasks))]


def _acts(subject: nw.Subject) -> list[nw.Intervention]:
    """Some that change modules, states and attention while they are at work."""
    first = subject.anatomy.attention_layers[0].index
    return [nw.AblateRecurrent(), nw.KeepHeads(k=1) + nw.AblateRecurrent(), nw.AblateHeads(heads=[(first, 0)]), nw.NONE]


def _ask(subject: nw.Subject, interventions: Iterable[nw.Intervention]) -> list[tuple[int, ...]]:
    prompts = zip(PROMPTS, interventions, strict=True)
    return [subject.generate([prompt], act, max_new_tokens=4)[0].tokens for prompt, act in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-griffin", "tiny-granite"])
def test_three_threads_get_the_answers_of_one(name: str) -> None:
    subject = nw.load(name)
    sizes = {path: m.chunk_size for path, m in subject.model.named_modules() if hasattr(m, "chunk_size")}
    assert bool(sizes) == (name == "tiny-granite")
    orders = [_acts(subject), _acts(subject)[::-1], [nw.NONE] * CALLS]
    expected = [_ask(subject, acts) for acts in orders]
    assert _in_threads(*(lambda acts=acts: _ask(subject, acts) for acts in orders)) == expected
    assert {path: m.chunk_size for path, m in subject.model.named_modules() if hasattr(m, "chunk_size")} == sizes


def test_subjects_of_one_family_share_code_but_no_answers() -> None:
    """Stock code, our kernels, and a model that is being wrapped: what one replaces, no other may run on."""
    fast, stock = (nw.wrap(cases.build("recurrent_gemma"), kernels=kernels) for kernels in ("fast", "stock"))
    expected = [[one.logprobs for one in _answers(subject)] for subject in (fast, stock)]
    assert expected[0] != expected[1], "their last bits tell them apart"

    def wrapped() -> list[nw.Anatomy]:
        return [nw.wrap(cases.build("recurrent_gemma")).anatomy for _ in range(CALLS)]

    *found, anatomies = _in_threads(
        *(lambda subject=subject: [one.logprobs for one in _answers(subject)] for subject in (fast, stock)), wrapped
    )
    assert found == expected
    assert anatomies == [fast.anatomy] * CALLS


def _answers(subject: nw.Subject) -> list[Answer]:
    return [subject.generate([prompt], max_new_tokens=6)[0] for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ask",
    [
        lambda subject: subject.generate([cases.PROMPT], max_new_tokens=2),
        lambda subject: subject.choices([cases.PROMPT], [[(5, 6)]]),
        lambda subject: subject.logits([cases.PROMPT]),
        lambda subject: nw.calibrate(subject, [cases.PROMPT]),
        lambda subject: nw.wrap(cases.build("llama")),
        lambda subject: cases.subject("jamba").logits([cases.PROMPT]),
    ],
)
def test_nobody_is_asked_while_answering(ask: Callable[[nw.Subject], Any]) -> None:
    subject = cases.subject("llama")
    cases.subject("jamba")

    class Nested(nw.Part):
        """Asks a model from inside a model."""

        side = "attention"

        def lower(self, context: LoweringContext) -> Iterable[Act]:
            def change(out: Any, place: Any) -> Any:
                ask(subject)
                return out

            return [ChangeOutputs(0, change)]

    expected = subject.generate([cases.PROMPT], max_new_tokens=4)
    with pytest.raises(nw.NeedleworkError, match="already answering in this thread"):
        subject.generate([cases.PROMPT], Nested(), max_new_tokens=2)
    requests = [Request(cases.PROMPT, max_new_tokens=many) for many in (1, 4)]
    running = subject.engine.run(requests)
    first = next(running)
    with pytest.raises(nw.NeedleworkError, match="must be finished or closed first"):
        ask(subject)
    assert dict([first, *running])[1].tokens == expected[0].tokens, "a refusal does not disturb who is answering"
    assert subject.generate([cases.PROMPT], max_new_tokens=4) == expected


def test_an_exception_of_who_iterates_ends_the_turn() -> None:
    """Also while that exception is being handled: a run asks again for what it could not write."""
    subject = cases.subject("llama")

    def fail() -> None:
        for _ in subject.engine.run([Request(cases.PROMPT, max_new_tokens=many) for many in (1, 5)]):
            raise OSError("no room")

    answers = []
    try:
        fail()
    except OSError:
        answers = subject.generate([cases.PROMPT], max_new_tokens=2)
    assert [len(answer.tokens) for answer in answers] == [2]


class Holder:
    """Holds an iteration, and itself."""

    def __init__(self, running: Iterator[Any]) -> None:
        self.running, self.me = running, self


@pytest.mark.slow
@pytest.mark.parametrize("drop", [lambda running: None, Holder], ids=["dropped", "dropped in a cycle"])
def test_an_iteration_that_is_dropped_half_way_ends_its_turn(drop: Callable[[Iterator[Any]], Any]) -> None:
    subject = cases.subject("recurrent_gemma")
    expected = subject.generate([cases.PROMPT], max_new_tokens=3)
    running = subject.engine.run([Request(cases.PROMPT, max_new_tokens=many) for many in (1, 5)])
    next(running)
    drop(running)
    del running
    assert subject.generate([cases.PROMPT], max_new_tokens=3) == expected
    assert _in_threads(lambda: subject.generate([cases.PROMPT], max_new_tokens=3)) == [expected]
