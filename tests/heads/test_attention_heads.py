"""Methods that look at attention, against stock transformers: eager attention, one forward for each token, plain loops."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import needlework as nw
from needlework import zoo
from needlework.heads import samples
from needlework.heads.methods import ROLES, Scores, all_methods, find_methods
from needlework.heads.observers import question_span
from needlework.observation import entropy
from needlework.tasks.base import Item
from needlework.toy.words import WORD_ID

MODEL = "tiny-transformer"  # every layer has attention, and its heads copy


@functools.cache
def subject() -> nw.Subject:
    return nw.load(MODEL)


@functools.cache
def items() -> tuple[Item, ...]:
    task = nw.tasks.make_task({"kind": "niah", "lengths": [40, 56], "depths": [20, 80], "distractors": 1})
    return tuple(sample.item for sample in samples.draw_samples(subject(), [task], 3, seed=5))


def scored(name: str) -> Scores:
    (method,) = find_methods([name])
    return method.score(subject(), items(), seed=0, progress=lambda share: None)


@dataclass
class Seen:
    """What stock attention did: one row of probabilities [keys] for each layer, head and answering token."""

    rows: list[np.ndarray] = field(default_factory=list)  # of each token that answers: [layers x heads, keys]
    said: list[int] = field(default_factory=list)
    reading: np.ndarray | None = None  # [layers x heads, prompt, prompt]


@functools.cache
def stock() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(zoo.path(MODEL), attn_implementation="eager").eval()


@torch.no_grad()
def attentions(ids: list[int]) -> tuple[np.ndarray, int]:
    """[layers x heads, tokens, tokens] of a whole forward, and the token that comes next."""
    out = stock()(torch.tensor([ids]), output_attentions=True)
    return torch.cat([layer[0] for layer in out.attentions]).double().numpy(), int(out.logits[0, -1].argmax())


@functools.cache
def stock_answer(number: int) -> Seen:
    item, seen = items()[number], Seen()
    ids = list(item.prompt)
    assert item.ending is not None
    most, ends = item.ending
    for _ in range(most):
        p, token = attentions(ids)
        seen.reading = p if seen.reading is None else seen.reading
        seen.rows.append(p[:, -1])
        seen.said.append(token)
        ids.append(token)
        if token in ends:
            break
    return seen


def needle(item: Item) -> list[int]:
    return [p for start, end in item.spans["needle"] for p in range(start, end)]


def test_copy_score_is_wus_retrieval_score() -> None:
    """|g & k| / |k| for each head: g are the tokens that are said while the head's most attended key is that very token of the
    needle k. Wu et al. divide by the needle's length, we by the tokens of it that were said: the same for all heads."""
    found = scored("copy_score")
    heads, all_hits, all_copied = len(subject().anatomy.heads), np.zeros(len(subject().anatomy.heads)), 0
    for number, item in enumerate(items()):
        seen, places = stock_answer(number), needle(item)
        inside = {item.prompt[p] for p in places}
        hits = np.zeros(heads)
        for row, token in zip(seen.rows, seen.said, strict=True):
            for head in range(heads):
                most = int(row[head].argmax())
                hits[head] += most in places and item.prompt[most] == token
        copied = sum(token in inside for token in seen.said)
        wu = hits / len(places)
        assert found.each is not None
        assert found.each[number] == pytest.approx(wu * len(places) / copied)
        all_hits, all_copied = all_hits + hits, all_copied + copied
    assert found.values == pytest.approx(all_hits / all_copied)
    assert found.values.max() > 0.8 > 0.2 > found.values.min()
    assert found.evidence["copied_tokens"] == all_copied


def test_needle_mass_and_entropies() -> None:
    mass, plain, without = scored("needle_mass"), scored("entropy"), scored("entropy_no_sink")
    for number, item in enumerate(items()):
        rows = stock_answer(number).rows
        on_needle = np.mean([row[:, needle(item)].sum(1) for row in rows], 0)
        nats = np.mean([[-sum(p * math.log(p) for p in head if p > 0) for head in row] for row in rows], 0)
        rest = [[[p / head[1:].sum() for p in head[1:]] for head in row] for row in rows]
        other = np.mean([[-sum(p * math.log(p) for p in head if p > 0) for head in row] for row in rest], 0)
        assert mass.each is not None
        assert plain.each is not None
        assert without.each is not None
        assert mass.each[number] == pytest.approx(on_needle, abs=1e-5)
        assert plain.each[number] == pytest.approx(-nats, abs=1e-4)
        assert without.each[number] == pytest.approx(-other, abs=1e-4)
    assert np.abs(plain.values - without.values).max() > 0.01  # some head rests on the first token


def test_question_mass_is_contrasted_with_an_empty_question() -> None:
    found = scored("question_mass")
    for number, item in enumerate(items()):
        start, end = question_span(item)
        words = subject().tokenizer.decode(item.prompt[start:end]).split()
        assert (words[0] in ("what", "which"), words[-1]) == (True, "?")
        reading = stock_answer(number).reading
        assert reading is not None
        asked = reading[:, start:end][:, :, needle(item)].sum(2).mean(1)
        empty = [*item.prompt[:start], WORD_ID["?"], *item.prompt[end:]]
        null = attentions(empty)[0][:, start][:, needle(item)].sum(1)
        assert found.each is not None
        assert found.each[number] == pytest.approx(asked - null, abs=1e-5)


@pytest.mark.parametrize("name", ["tiny-transformer", "tiny-jamba"])
def test_roles_are_read_off_stock_attention(name: str) -> None:
    whole = nw.load(name)
    model = AutoModelForCausalLM.from_pretrained(zoo.path(name), attn_implementation="eager").eval()
    some = [items()[0], replace(items()[1], spans={"needle": ((5, 9), (20, 23))})]  # a needle in two parts, too
    gather, aggregate = (method.score(whole, some, seed=0, progress=lambda share: None) for method in find_methods(ROLES))
    for number, item in enumerate(some):
        with torch.no_grad():
            layers = [
                layer for layer in model(torch.tensor([item.prompt]), output_attentions=True).attentions if layer is not None
            ]
        for head, p in enumerate(torch.cat([layer[0] for layer in layers])):
            ends = [end - 1 for _, end in item.spans["needle"]]
            rest = [float(sum(p[end, key] for key in needle(item) if key != end)) for end in ends]
            assert gather.each is not None
            assert aggregate.each is not None
            assert gather.each[number, head] == pytest.approx(sum(rest) / len(ends), abs=1e-5)
            assert aggregate.each[number, head] == pytest.approx(float(p[-1, ends].sum()), abs=1e-5)
    assert gather.values.max() > 0.1
    assert aggregate.values.max() > 0.01


def test_what_plans_record_is_the_same() -> None:
    """One table: the three methods that a recording's sums suffice for say there what they say here."""
    with nw.observe(subject()) as watch:
        subject().answer([item.requests("generate", ending=item.ending)[0] for item in items()])
    known = [name for name, method in all_methods().items() if method.of_row]
    assert known == ["needle_mass", "copy_score", "entropy"]
    for method in find_methods(known):
        assert method.of_row is not None
        assert scored(method.name).values == pytest.approx([method.of_row(row) for row in watch.table()], abs=1e-6)


def test_entropy_of_what_lies_beside_the_first_token() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    rest = torch.tensor([False, True, True])
    assert entropy(p).tolist() == pytest.approx([1.5 * math.log(2), 0, 0])
    assert entropy(p, rest).tolist() == pytest.approx([math.log(2), 0, 0])  # where nothing is left: 0, as all heads tie


def test_batches_do_not_matter() -> None:
    (method,) = find_methods(["copy_score"])
    together = scored("needle_mass").each
    (mass,) = find_methods(["needle_mass"])
    alone = [mass.score(subject(), [item], seed=0, progress=lambda share: None).values for item in items()]
    assert together == pytest.approx(np.array(alone), abs=1e-6)
    assert method.score(subject(), items()[:1], seed=0, progress=lambda share: None).each is not None


def test_items_that_do_not_say_how_answers_end_are_refused() -> None:
    (method,) = find_methods(["needle_mass"])
    for wrong in (replace(items()[0], ending=None), replace(items()[0], spans={})):
        with pytest.raises(nw.NeedleworkError, match="needs a needle's span, and how an answer ends"):
            method.score(subject(), [wrong], seed=0, progress=lambda share: None)
