"""Log-likelihoods and logits: one forward in which every position counts as prefill, or a forced decode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from needlework.engine.decoding import NOT_FINITE
from needlework.engine.engine import ROWS_AT_ONCE, Engine
from needlework.engine.reading import Read, Reader, group, readings_of
from needlework.errors import NeedleworkError
from needlework.interventions.acts import Phase, Span
from needlework.interventions.base import Intervention
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared, Request, prepare
from needlework.subjects.body import Body
from needlework.subjects.state import Memory


@dataclass(frozen=True)
class Scores:
    """Log-likelihoods of the options of one question."""

    logprobs: tuple[tuple[float, ...], ...]  # of every token of every option
    greedy: tuple[bool, ...]  # every token of the option was the model's first choice
    receipt: Receipt
    error: str = ""

    @property
    def totals(self) -> tuple[float, ...]:
        return tuple(sum(some) for some in self.logprobs)

    @property
    def best(self) -> int:
        return max(range(len(self.logprobs)), key=self.totals.__getitem__)


Asked = tuple[int, Prepared, Sequence[tuple[int, ...]]]  # index of the request, the request, its options


@dataclass(frozen=True)
class _Option:
    """One option of one question of a batch: a row."""

    home: int  # the reading that it continues
    item: Prepared
    tokens: tuple[int, ...]


def choices(
    engine: Engine, asked: Sequence[tuple[Request, Sequence[tuple[int, ...]]]]
) -> Iterator[tuple[int, Scores]]:
    """Each request's options scored, with its index, as they finish: one reading serves all options of equal prefills."""
    prepared = []
    for request, options in asked:
        if not options or not all(options):
            raise NeedleworkError("every question needs at least one option, and every option at least one token")
        longest = max(len(option) for option in options)
        engine.body.check_length(len(request.prompt) + longest - 1)  # an option's last token is never read
        scored = Request(**{**vars(request), "scoring": True, "max_new_tokens": longest})
        prepared.append(prepare(scored, engine.body.anatomy))
    engine.budget.check(prepared)
    reader = Reader(engine.body)
    reader.expect([reading for item in prepared for reading in readings_of(item).values()])
    with engine.body.session():
        for batch in engine.budget.batches(list(enumerate(prepared)), ROWS_AT_ONCE):
            yield from _score(engine, reader, [(i, item, asked[i][1]) for i, item in batch])


def _score(engine: Engine, reader: Reader, batch: Sequence[Asked]) -> list[tuple[int, Scores]]:
    readings, homes = group([item for _, item, _ in batch])
    read = reader.read(readings)
    rows = [_Option(homes[b]["own"], item, option) for b, (_, item, options) in enumerate(batch) for option in options]
    tally = Tally(len(rows))
    found: dict[int, tuple[tuple[float, ...], bool]] = {}
    for length in sorted({len(row.tokens) for row in rows}):
        # Options of one length are read together: none is padded, so nothing is counted that no option has.
        found |= _one_length(engine.body, read, {r: row for r, row in enumerate(rows) if len(row.tokens) == length}, tally)
    places = iter(range(len(rows)))
    results = []
    for b, (i, item, options) in enumerate(batch):
        mine = [next(places) for _ in options]
        receipt = sum((tally.receipt(r) for r in mine), start=read.receipts[homes[b]["own"]])
        logprobs = tuple(found[r][0] for r in mine)
        finite = all(math.isfinite(x) for some in logprobs for x in some)
        error = item.failure(receipt) if finite else NOT_FINITE
        results.append((i, Scores(logprobs, tuple(found[r][1] for r in mine), receipt, error)))
    return results


def _one_length(
    body: Body, read: Read, rows: Mapping[int, _Option], tally: Tally
) -> dict[int, tuple[tuple[float, ...], bool]]:
    """Log-likelihoods of every token of these options, and whether each is the model's first choice; by row."""
    home = torch.tensor([row.home for row in rows.values()], device=body.device)
    tokens = torch.tensor([row.tokens for row in rows.values()], device=body.device)
    heads = read.logits[home][:, None]  # [rows, 1, vocabulary] predicts each option's first token
    if tokens.shape[1] > 1:
        slots = torch.tensor(list(rows), device=body.device)
        heads = torch.cat([heads, _continuations(body, read.memory, home, list(rows.values()), tokens, slots, tally)], 1)
    logprobs = heads.log_softmax(-1)
    each = logprobs.gather(2, tokens[..., None])[..., 0].tolist()
    greedy = (logprobs.argmax(-1) == tokens).all(1).tolist()
    return {r: (tuple(logs), best) for r, logs, best in zip(rows, each, greedy, strict=True)}


def _continuations(
    body: Body, memory: Memory, home: Tensor, rows: Sequence[_Option], tokens: Tensor, slots: Tensor, tally: Tally
) -> Tensor:
    """Logits after every token of every option but its last, [rows, length - 1, vocabulary]."""
    forked = memory.share(home) if body.shareable else memory.select(home)
    acts, samples = [row.item.acts["prefill"] for row in rows], [row.item.sample for row in rows]
    plans = body.compile(acts, samples, "prefill", slots)
    return body.feed(tokens[:, :-1], forked, "prefill", plans, tally, keep="all")


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
