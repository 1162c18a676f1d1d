"""Log-likelihoods and logits: one forward in which every position counts as prefill, or a forced decode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from needlework.engine import Engine
from needlework.errors import NeedleworkError
from needlework.interventions.acts import Phase, Span
from needlework.interventions.base import Intervention
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared, Request, prepare
from needlework.subjects.body import Body


@dataclass(frozen=True)
class Scores:
    """Log-likelihoods of the options of one question."""

    logprobs: tuple[tuple[float, ...], ...]  # of every token of every option
    greedy: tuple[bool, ...]  # every token of the option was the model's first choice
    receipt: Receipt

    @property
    def totals(self) -> tuple[float, ...]:
        return tuple(sum(some) for some in self.logprobs)

    @property
    def best(self) -> int:
        return max(range(len(self.logprobs)), key=self.totals.__getitem__)


def choices(engine: Engine, asked: Sequence[tuple[Request, Sequence[tuple[int, ...]]]]) -> list[Scores]:
    """Each request's options scored: one reading of a prompt serves all its options and all equal prefills."""
    prepared = []
    for request, options in asked:
        if not options or not all(options):
            raise NeedleworkError("every question needs at least one option, and every option at least one token")
        longest = max(len(option) for option in options)
        engine.body.check_length(len(request.prompt) + longest)
        scored = Request(**{**vars(request), "scoring": True, "max_new_tokens": longest})
        prepared.append(prepare(scored, engine.body.anatomy))
    buckets: dict[int, list[int]] = defaultdict(list)
    for i, item in enumerate(prepared):
        buckets[item.prefill_tokens].append(i)
    scores: dict[int, Scores] = {}
    with engine.body.session():
        for members in buckets.values():
            for batch in engine.budget.batches(members, prepared):
                for i, result in zip(batch, _score(engine, [(prepared[i], asked[i][1]) for i in batch]), strict=True):
                    scores[i] = result
    return [scores[i] for i in range(len(asked))]


def _score(engine: Engine, batch: Sequence[tuple[Prepared, Sequence[tuple[int, ...]]]]) -> list[Scores]:
    body = engine.body
    groups: dict[tuple[object, ...], Prepared] = {item.group: item for item, _ in batch}
    place = {key: i for i, key in enumerate(groups)}
    prefilled = engine.prefill([(item, item.request.prompt) for item in groups.values()])
    assert prefilled.logits is not None
    rows = [(b, option) for b, (_, options) in enumerate(batch) for option in options]
    home = torch.tensor([place[batch[b][0].group] for b, _ in rows], device=body.device)
    heads = prefilled.logits[home][:, None]  # [rows, 1, vocabulary] predicts each option's first token
    longest = max(len(option) for _, option in rows)
    tally = Tally(len(rows))
    if longest > 1:
        memory = (prefilled.memory.share if body.shareable else prefilled.memory.select)(home)
        padded = [option[:-1] + (0,) * (longest - len(option)) for _, option in rows]  # what follows is never looked at
        acts = [batch[b][0].acts["prefill"] for b, _ in rows]
        samples = [batch[b][0].sample for b, _ in rows]
        plans = body.compile(acts, samples, "prefill", torch.arange(len(rows), device=body.device))
        rest = body.feed(torch.tensor(padded, device=body.device), memory, "prefill", plans, tally, keep="all")
        heads = torch.cat([heads, rest], 1)
    logprobs = heads.log_softmax(-1)
    results: list[tuple[list[tuple[float, ...]], list[bool]]] = [([], []) for _ in batch]
    for r, (b, option) in enumerate(rows):
        tokens = torch.tensor(option, device=body.device)
        results[b][0].append(tuple(logprobs[r, : len(option)].gather(1, tokens[:, None])[:, 0].tolist()))
        results[b][1].append(bool((logprobs[r, : len(option)].argmax(-1) == tokens).all()))
    return [
        Scores(tuple(logs), tuple(greedy), prefilled.receipts[place[item.group]])
        for (logs, greedy), (item, _) in zip(results, batch, strict=True)
    ]


def logits(
    body: Body,
    input_ids: Tensor | Sequence[Sequence[int]],
    intervention: Intervention,
    prompt_tokens: int | None,
    attention_mask: Tensor | None,
    spans: Mapping[str, Span],
    boundary: Phase,
) -> Tensor:
    """See `Subject.logits`."""
    ids = torch.as_tensor(input_ids, device=body.device)
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise NeedleworkError(f"input_ids must be [rows, tokens] with at least one token, got {tuple(ids.shape)}")
    if attention_mask is not None:
        return _without_padding(body, ids, attention_mask, intervention, prompt_tokens, spans, boundary)
    count = ids.shape[1] if prompt_tokens is None else prompt_tokens
    if not 1 <= count <= ids.shape[1]:
        raise NeedleworkError(f"prompt_tokens={count} must lie between 1 and the {ids.shape[1]} tokens given")
    scoring = prompt_tokens is None
    body.check_length(ids.shape[1])
    rows = [tuple(row) for row in ids.tolist()]
    steps = ids.shape[1] - count + 1
    asked = [Request(row[:count], intervention, steps, spans=spans, boundary=boundary, scoring=scoring) for row in rows]
    items = [prepare(request, body.anatomy) for request in asked]
    if items[0].swaps:
        raise NeedleworkError("logits() does not swap memory; use generate(..., twins=[...])")
    tally, slots = Tally(len(rows)), torch.arange(len(rows), device=body.device)
    samples = [item.sample for item in items]
    memory, split = body.new_memory(len(rows)), items[0].prefill_tokens
    parts = []
    with body.session():
        if split:
            plans = body.compile([item.acts["prefill"] for item in items], samples, "prefill", slots)
            parts.append(body.feed(ids[:, :split], memory, "prefill", plans, tally, keep="all"))
        plans = body.compile([item.acts["decode"] for item in items], samples, "decode", slots)
        for t in range(split, ids.shape[1]):
            parts.append(body.feed(ids[:, t : t + 1], memory, "decode", plans, tally))
    return torch.cat(parts, 1)


def _without_padding(
    body: Body,
    ids: Tensor,
    attention_mask: Tensor,
    intervention: Intervention,
    prompt_tokens: int | None,
    spans: Mapping[str, Span],
    boundary: Phase,
) -> Tensor:
    """Each row without its padding, run by itself: padding cannot change an answer that never sees it."""
    mask = attention_mask.to(ids.device).bool()
    if mask.shape != ids.shape or not bool((mask.int().diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
        raise NeedleworkError("attention_mask must have the shape of input_ids and mark left padding only (0 ... 0 1 ... 1)")
    out = torch.zeros(*ids.shape, body.anatomy.vocabulary, device=ids.device)
    for r in range(ids.shape[0]):
        pads = int((~mask[r]).sum())
        count = None if prompt_tokens is None else prompt_tokens - pads
        out[r, pads:] = logits(body, ids[r : r + 1, pads:], intervention, count, None, spans, boundary)[0]
    return out
