"""Scoring of options and `Subject.logits`: log-likelihoods from prefill, logits from prefill and teacher-forced decode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlework.engine.decode import NOT_FINITE
from needlework.engine.prefill import Reader
from needlework.engine.reading import Read, group
from needlework.errors import NeedleworkError
from needlework.interventions.acts import Phase, Span
from needlework.interventions.base import Intervention
from needlework.model.hooked_model import HookedModel
from needlework.model.memory import Memory
from needlework.receipts import Tally
from needlework.requests import Answer, Finish, Prepared, Request, prepare


@dataclass(frozen=True)
class _Option:
    """One row of a scoring batch: one option of one request."""

    place: int  # index of the reading that it continues
    item: Prepared
    tokens: tuple[int, ...]


def score(body: HookedModel, reader: Reader, batch: Sequence[tuple[int, Prepared]]) -> list[tuple[int, Answer]]:
    """Return (index, answer) of each request, with the log-likelihoods of its options; options share their prompt's prefill."""
    readings, places = group([item for _, item in batch])
    read = reader.read(readings, remember=any(item.request.steps > 1 for _, item in batch))
    rows = [_Option(places[b]["own"], item, option) for b, (_, item) in enumerate(batch) for option in item.request.options]
    if body.observer is not None:
        body.observer.begin([row.item.request for row in rows], body.device)
    tally = Tally(len(rows))
    scores: dict[int, tuple[tuple[float, ...], bool]] = {}
    for length in sorted({len(row.tokens) for row in rows}):
        # Options of one length share a forward: without padding, receipts count only the options' own tokens.
        alike = {r: row for r, row in enumerate(rows) if len(row.tokens) == length}
        scores |= _one_length(body, read, alike, tally)
    numbers = iter(range(len(rows)))
    answers = []
    for b, (i, item) in enumerate(batch):
        own = [next(numbers) for _ in item.request.options]
        receipt = sum((tally.receipt(r) for r in own), start=read.receipts[places[b]["own"]])
        receipt = replace(receipt, notes=item.notes(receipt))
        logprobs = tuple(scores[r][0] for r in own)
        finite = all(math.isfinite(value) for option in logprobs for value in option)
        error = item.failure(receipt) if finite else NOT_FINITE
        finish: Finish = "failed" if error else "scored"
        greedy = tuple(scores[r][1] for r in own)
        answers.append((i, Answer(receipt=receipt, finish=finish, error=error, option_logprobs=logprobs, greedy=greedy)))
    return answers


def _one_length(
    body: HookedModel, read: Read, rows: Mapping[int, _Option], tally: Tally
) -> dict[int, tuple[tuple[float, ...], bool]]:
    """Return, by row, the log-likelihood of each token of an option, and whether all its tokens are the argmax."""
    place = torch.tensor([row.place for row in rows.values()], device=body.device)
    tokens = torch.tensor([row.tokens for row in rows.values()], device=body.device)
    first = read.logits.log_softmax(-1)  # [readings, vocabulary]: scores each option's first token
    logprobs, greedy = first[place, tokens[:, 0]][:, None], first.argmax(-1)[place] == tokens[:, 0]
    if tokens.shape[1] > 1:
        slots = torch.tensor(list(rows), device=body.device)
        assert read.memory is not None
        later = _continuations(body, read.memory, place, list(rows.values()), tokens, slots, tally).log_softmax(-1)
        logprobs = torch.cat([logprobs, later.gather(2, tokens[:, 1:, None])[..., 0]], 1)
        greedy &= (later.argmax(-1) == tokens[:, 1:]).all(1)
    return {r: (tuple(logs), best) for r, logs, best in zip(rows, logprobs.tolist(), greedy.tolist(), strict=True)}


def _continuations(
    body: HookedModel, memory: Memory, place: Tensor, rows: Sequence[_Option], tokens: Tensor, slots: Tensor, tally: Tally
) -> Tensor:
    """Return logits [rows, length - 1, vocabulary] after each token of each option but its last."""
    forked = memory.share(place) if body.shareable else memory.select(place)
    acts, samples = [row.item.acts["prefill"] for row in rows], [row.item.sample for row in rows]
    compiled = body.compile(acts, samples, "prefill", slots)
    return body.feed(tokens[:, :-1], forked, "prefill", compiled, tally, keep="all")


def logits(
    body: HookedModel,
    input_ids: Tensor | Sequence[Sequence[int]],
    intervention: Intervention,
    prompt_tokens: int | None,
    attention_mask: Tensor | None,
    spans: Mapping[str, Span],
    boundary: Phase,
) -> Tensor:
    """Return logits [rows, tokens, vocabulary]; see `Subject.logits`."""
    ids = torch.as_tensor(input_ids, device=body.device)
    if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
        shape = f"{tuple(ids.shape)} of {ids.dtype}"
        raise NeedleworkError(f"input_ids must be [rows, tokens] of whole numbers with at least one token, got {shape}")
    if attention_mask is not None:
        return _rows_alone(body, ids, attention_mask, intervention, prompt_tokens, spans, boundary)
    count = ids.shape[1] if prompt_tokens is None else prompt_tokens
    if not 1 <= count <= ids.shape[1]:
        raise NeedleworkError(f"prompt_tokens={count} must lie between 1 and the {ids.shape[1]} tokens given")
    if prompt_tokens is None:
        boundary = "prefill"  # nothing is decoded
    body.check_length(ids.shape[1])
    rows = [tuple(row) for row in ids.tolist()]
    steps = ids.shape[1] - count + 1
    asked = [Request(row[:count], intervention, steps, spans=spans, boundary=boundary) for row in rows]
    items = [prepare(request, body.anatomy) for request in asked]
    body.check_rankings(intervention)
    if items[0].swaps:
        raise NeedleworkError("logits() does not swap memory; use generate(..., twins=[...])")
    tally, slots = Tally(len(rows)), torch.arange(len(rows), device=body.device)
    samples = [item.sample for item in items]
    memory, split = body.new_memory(len(rows)), items[0].prefill_tokens
    parts = []
    with body.session():
        if body.observer is not None:
            body.observer.begin(asked, body.device)
        if split:
            compiled = body.compile([item.acts["prefill"] for item in items], samples, "prefill", slots)
            parts.append(body.feed(ids[:, :split], memory, "prefill", compiled, tally, keep="all"))
        compiled = body.compile([item.acts["decode"] for item in items], samples, "decode", slots)
        for t in range(split, ids.shape[1]):
            parts.append(body.feed(ids[:, t : t + 1], memory, "decode", compiled, tally))
    return torch.cat(parts, 1)


def _rows_alone(
    body: HookedModel,
    ids: Tensor,
    attention_mask: Tensor,
    intervention: Intervention,
    prompt_tokens: int | None,
    spans: Mapping[str, Span],
    boundary: Phase,
) -> Tensor:
    """Run each row alone, without its left padding, so that padding cannot change its logits; padded positions stay 0."""
    mask = attention_mask.to(ids.device).bool()
    if mask.shape != ids.shape or not bool((mask.int().diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
        raise NeedleworkError("attention_mask must have the shape of input_ids and mark left padding only (0 ... 0 1 ... 1)")
    shortest = int(mask.sum(1).min())
    if prompt_tokens is not None and prompt_tokens > shortest:
        raise NeedleworkError(f"prompt_tokens={prompt_tokens} counts without padding, the shortest row has {shortest} tokens")
    out = torch.zeros(*ids.shape, body.anatomy.vocabulary, device=ids.device)
    for r in range(ids.shape[0]):
        pads = int((~mask[r]).sum())
        out[r, pads:] = logits(body, ids[r : r + 1, pads:], intervention, prompt_tokens, None, spans, boundary)[0]
    return out
