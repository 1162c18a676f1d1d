"""Patched runs equal runs of the stock model under plain PyTorch hooks, on every architecture and for every kind of site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import needlework as nw
from needlework.interventions.acts import PatchOutputs, TokenMap
from needlework.model.outputs import Recording
from needlework.patching import CarryActs, Pair, _exact, _Recorder, _targets
from needlework.requests import Request

CLEAN, CORRUPT = cases.TWIN, cases.PROMPT
SPANS = cases.SPANS
COUNT = len(CORRUPT)
OUTPUTS = ("heads", "attention", "mixers", "layers")


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


class Plain:
    """The stock model: log-probabilities of answers, with what one module gives recorded or replaced by plain hooks."""

    def __init__(self, name: str) -> None:
        self.model: Any = cases.build(name)
        self.anatomy = cases.subject(name).anatomy

    def module(self, site: str, layer: int) -> nn.Module:
        parts = self.anatomy.layers[layer]
        if site in ("heads", "attention"):
            assert parts.attention is not None
            return self.model.get_submodule(parts.attention.path)
        if site == "mixers":
            assert parts.recurrent is not None
            return self.model.get_submodule(parts.recurrent.path)
        known = next(part for x in self.anatomy.layers for part in (x.attention, x.recurrent) if part)
        stack, _, _ = known.path.partition(
            f".{next(x.index for x in self.anatomy.layers if known in (x.attention, x.recurrent))}."
        )
        return self.model.get_submodule(f"{stack}.{layer}")

    @contextmanager
    def hooked(self, site: str, layer: int, function: Any) -> Iterator[None]:
        """Apply a function to the output of a module; for heads, to the input of the output projection."""
        module = self.module(site, layer)
        if site != "heads":
            hook = lambda m, a, o: (function(first(o)), *o[1:]) if isinstance(o, tuple) else function(o)  # noqa: E731
            with cases.hook(module.register_forward_hook, hook):
                yield
            return
        part = self.anatomy.attention(layer)
        projection = cases.output_projection(module, part.query_heads * part.value_dim)
        shape = (part.query_heads, part.value_dim)
        before = lambda m, a: (function(a[0].unflatten(-1, shape)).flatten(-2), *a[1:])  # noqa: E731
        with cases.hook(projection.register_forward_pre_hook, before):
            yield

    def log_p(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            log_p = self.model(input_ids=ids).logits[0].float().log_softmax(-1)
        return sum(float(log_p[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))

    def patched(self, pair: Pair, site: str, layer: int, head: int | None, positions: Mapping[int, int]) -> float:
        """The metric on the corrupt prompt, with the site's outputs on the clean one at these positions (own -> clean)."""
        values = []
        for answer in pair.answers:
            recorded: list[Tensor] = []
            keep = lambda x, recorded=recorded: recorded.append(x.clone()) or x  # noqa: E731
            with self.hooked(site, layer, keep):
                self.log_p(pair.clean, answer)
            end = len(pair.corrupt) + len(answer) - 1
            some = {own: other for own, other in positions.items() if own < end}
            calls = iter(recorded)

            def put(x: Tensor, calls: Any = calls, some: Mapping[int, int] = some) -> Tensor:
                x, new = x.clone(), next(calls)
                for own, other in some.items():
                    where = (0, own) if head is None else (0, own, head)
                    x[where] = new[(0, other, *where[2:])]
                return x

            with self.hooked(site, layer, put):
                values.append(self.log_p(pair.corrupt, answer))
        return values[0] - values[1]


def answers_that_differ(name: str, length: int = 2) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two answers that the clean prompt and the corrupt one tell apart, by as much as this model can."""
    with torch.no_grad():
        clean, corrupt = (cases.build(name)(input_ids=torch.tensor([x])).logits[0, -1].log_softmax(-1) for x in (CLEAN, CORRUPT))
    gap = clean - corrupt
    return (int(gap.argmax()), 7)[:length], (int(gap.argmin()), 9)[:length]


def pair_of(name: str, length: int = 2) -> Pair:
    return Pair(CLEAN, CORRUPT, answers_that_differ(name, length), SPANS, SPANS, "0")


def has_sites(name: str, site: str) -> bool:
    subject = cases.subject(name)
    if site == "heads":
        return bool(subject.anatomy.heads) and not any(part.output_gate for _, part in subject.anatomy.attention_parts())
    if site == "layers":
        return subject.body.layers is not None
    return bool(subject.anatomy.recurrent_layers if site == "mixers" else subject.anatomy.attention_layers)


@pytest.mark.slow
@pytest.mark.parametrize("site", OUTPUTS)
@cases.each(cases.ALL)
def test_a_patch_is_that_of_plain_hooks(name: str, site: str) -> None:
    """Everywhere, in a span, at the last prompt token, and in decode; all of them in one batch."""
    if not has_sites(name, site):  # what is refused has its own test; gated heads are not the projection's input
        return
    subject, plain, pair = cases.subject(name), Plain(name), pair_of(name)
    places: dict[str | int, Sequence[int]] = {
        "all": range(COUNT + 1),
        "needle": (3, 4, 5),
        COUNT - 1: (COUNT - 1,),
        "decode": (COUNT - 1, COUNT),
    }
    targets = _targets(subject, [site], list(places), None, [pair])
    if site == "heads":
        targets = targets[:: max(1, len(targets) // 6)]
    targets = [targets[0], *targets[1::2], targets[-1]]
    found = _exact(subject, [pair], targets, lambda share: None)[0]
    tolerance = cases.between_routes(name)
    for prompt, value in ((CLEAN, found[0]), (CORRUPT, found[1])):
        assert value == pytest.approx(plain.log_p(prompt, pair.answers[0]) - plain.log_p(prompt, pair.answers[1]), abs=tolerance)
    moved = 0
    for target, value in zip(targets, found[2:], strict=True):
        own = places[target.at]
        expected = plain.patched(pair, site, target.layer, target.head, dict(zip(own, own, strict=True)))
        assert value == pytest.approx(expected, abs=tolerance), target
        moved += abs(expected - found[1]) > 10 * tolerance
    assert moved or name in ("zamba2", "nemotron_h")  # else a patch that did nothing would pass


@cases.each(cases.ALL)
def test_laws_of_patching(name: str) -> None:
    """The last layer's outputs restore everything; what is recorded on the same prompt changes nothing."""
    subject, answers = cases.subject(name), answers_that_differ(name, 1)
    tolerance = cases.between_routes(name)
    sites = [site for site in OUTPUTS if has_sites(name, site)]
    if "layers" in sites:
        last = len(subject.anatomy.layers) - 1
        table = nw.patch(subject, CLEAN, CORRUPT, "layers", answers=answers, layers=[last])
        assert abs(table.rows[0].share.value - 1) * (table.clean - table.corrupt) < tolerance
    else:
        with pytest.raises(nw.NeedleworkError, match="no plain stack"):
            nw.patch(subject, CLEAN, CORRUPT, "layers", answers=answers)
    same = Pair(CORRUPT, CORRUPT, answers, SPANS, SPANS)
    targets = _targets(subject, sites, ["all", "needle", "decode"], None, [same])
    values = _exact(subject, [same], targets, lambda share: None)[0]
    assert values == pytest.approx([values[1]] * len(values), abs=tolerance)


@pytest.mark.slow
@cases.each(cases.ALL)
def test_receipts_count_what_was_patched(name: str) -> None:
    subject, pair = cases.subject(name), pair_of(name)
    sites = [site for site in OUTPUTS if has_sites(name, site)]
    targets = _targets(subject, sites, ["all", "needle"], None, [pair])
    recorder = _Recorder(pair, targets)
    recorded = subject.answer(recorder.record())
    assert all(answer.error == "" for answer in recorded)
    for target in targets:
        for answer in subject.answer(recorder.patched(target)):
            assert answer.error == ""
            kind = f"{target.site}_patched"
            tokens = {"all": (COUNT - 1, 2), "needle": (3, 0)}[str(target.at)]
            for phase, count in zip(("prefill", "decode"), tokens, strict=True):
                total = answer.receipt.total(kind, phase)
                assert total == answer.receipt.total(kind, phase, target.layer)
                calls = total // count if name == "hrm_text" and count else 1  # it recurs over depth
                assert total == calls * count
                assert calls >= 1


def test_a_patch_that_does_nothing_fails_its_trial() -> None:
    subject, into = cases.subject("jamba"), Recording()
    nowhere = PatchOutputs(2, "layers", into, TokenMap((COUNT + 40,), (0,)))
    answer = subject.answer([Request(CORRUPT, CarryActs(members=(nowhere,), phase="decode"), 2)])[0]
    assert answer.error == "PatchOutputs in layer 2 should have acted in decode, but layers_patched is 0"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "jamba", "recurrent_gemma"])
def test_prompts_of_unlike_length_are_patched_by_spans(name: str) -> None:
    clean = (5, *CLEAN[:7], 44, *CLEAN[7:])
    a, b = answers_that_differ(name)
    pair = Pair(clean, CORRUPT, (a, b), {"needle": ((3, 6),)}, {"needle": ((4, 7),)})
    subject, plain = cases.subject(name), Plain(name)
    targets = _targets(subject, ["layers", "attention"], ["needle", "decode"], None, [pair])
    values = _exact(subject, [pair], targets, lambda share: None)[0]
    shifted = {"needle": {3: 4, 4: 5, 5: 6}, "decode": {COUNT - 1: COUNT + 1, COUNT: COUNT + 2}}
    for target, value in zip(targets, values[2:], strict=True):
        expected = plain.patched(pair, target.site, target.layer, target.head, shifted[str(target.at)])
        assert value == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "recurrent_gemma", "falcon_h1", "mamba"])
def test_attributions_are_those_of_plain_gradients(name: str) -> None:
    """(clean - corrupt) x gradient, summed over tokens, with autograd through the stock model and plain hooks."""
    subject, plain = cases.subject(name), Plain(name)
    pair = pair_of(name, 1 if name == "falcon_h1" else 2)  # whose second tokens undo the difference
    sites = [site for site in OUTPUTS if has_sites(name, site)]
    table = nw.patch(subject, CLEAN, CORRUPT, sites, answers=pair.answers, at=["all", "needle"], spans=SPANS, method="gradient")
    places = {"all": slice(0, COUNT + 1), "needle": slice(3, 6)}
    rows = [row for row in table.rows if row.head in (None, 1)]
    for row in rows:
        total = 0.0
        for sign, answer in zip((1, -1), pair.answers, strict=True):
            recorded: dict[tuple[int, ...], list[Tensor]] = {CLEAN: [], CORRUPT: []}
            for prompt, kept in recorded.items():

                def keep(x: Tensor, kept: list[Tensor] = kept) -> Tensor:
                    x = x + torch.zeros_like(x, requires_grad=True)
                    x.retain_grad()
                    kept.append(x)
                    return x

                ids = torch.tensor([[*prompt, *answer[:-1]]])
                with torch.enable_grad(), ExitStack() as stack:
                    stack.enter_context(plain.hooked(row.site, row.layer, keep))
                    log_p = plain.model(input_ids=ids).logits[0].log_softmax(-1)
                    sum(log_p[COUNT - 1 + i, token] for i, token in enumerate(answer)).backward()
            for a, b in zip(recorded[CLEAN], recorded[CORRUPT], strict=True):
                assert b.grad is not None
                part = ((a - b) * b.grad).detach()[0, places[row.at]]
                total += sign * float(part.sum() if row.head is None else part[:, row.head].sum())
        assert row.share.value * (table.clean - table.corrupt) == pytest.approx(total, abs=2e-4), row
    assert len(rows) >= 4


def test_a_model_that_stops_gradients_is_not_attributed() -> None:
    """HRM runs all but its last cycles without gradients: a sum over its calls would be a part of the effect."""
    answers = answers_that_differ("hrm_text", 1)
    with pytest.raises(nw.NeedleworkError, match="HrmTextForCausalLM computes parts of itself without gradients"):
        nw.patch(cases.subject("hrm_text"), CLEAN, CORRUPT, "attention", answers=answers, method="gradient")
