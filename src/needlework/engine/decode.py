"""Answers from prefilled prompts: the greedy decode loop, log-likelihoods of options, and logits of given tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from needlework.engine.budget import group
from needlework.engine.prefill import Prefiller, compile_items
from needlework.errors import NeedleworkError
from needlework.interventions.acts import Phase, Span
from needlework.interventions.base import Intervention
from needlework.model.hooked_model import HookedModel
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Answer, Finish, Prepared, Request, prepare

_NOT_FINITE = "the logits are not finite"


@dataclass
class Generation:
    """The state of one request while it decodes."""

    index: int  # of the request
    prepared: Prepared
    receipt: Receipt = field(default_factory=Receipt)  # counts of what was done to it so far
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish: Finish | None = None
    steps: int = field(init=False)  # copied from the request, so that it is not computed at every token
    stop: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        request = self.prepared.request
        self.steps, self.stop = request.steps, frozenset() if request.forced else frozenset(request.stop)

    def answer(self, body: HookedModel) -> Answer:
        """Return the answer of a finished request. Needs an open session: what failed is run again."""
        assert self.finish is not None
        receipt = replace(self.receipt, notes=self.prepared.notes(self.receipt))
        error = self.prepared.failure(receipt)
        if self.finish == "failed":
            error = f"{_NOT_FINITE}; the first layer that is not is {_first_bad_layer(body, self.prepared, self.tokens)}"
        finish: Finish = "failed" if error else self.finish
        return Answer(tuple(self.tokens), tuple(self.logprobs), tuple(self.margins), receipt, finish, error)


class Decoder:
    """A batch of rows that decode in lockstep; finished rows leave, and others may join where the cache allows it."""

    def __init__(
        self, body: HookedModel, generations: Sequence[Generation], memory: Memory, tokens: Tensor, positions: Tensor
    ) -> None:
        self.body, self.generations, self.memory = body, list(generations), memory
        self.tokens, self.positions = tokens, positions  # [rows] next input token and its position
        self.rows = compile_items(body, [generation.prepared for generation in generations], "decode")
        self.tally = Tally(len(self.generations))
        self.begin_observation()

    def __len__(self) -> int:
        return len(self.rows.slots)

    def begin_observation(self) -> None:
        """Tell the observer, if there is one, which request each slot belongs to; again after any other batch was prefilled."""
        if self.body.observer is not None:
            self.body.observer.begin([generation.prepared.request for generation in self.generations], self.body.device)

    def alive(self) -> list[Generation]:
        return [self.generations[i] for i in self.rows.slots.tolist()]

    def step(self) -> list[Generation]:
        """Feed one token to every row and return the generations that finished."""
        fed, positions = self.tokens[:, None], self.positions[:, None]
        logits = self.body.feed(fed, self.memory, "decode", self.rows, self.tally, positions)[:, 0]  # [rows, vocabulary]
        self.positions = self.positions + 1
        alive = self.alive()
        self.tokens, going = choose(logits, alive)
        if self.body.observer is not None:
            self.body.observer.chose(self.rows.slots, self.tokens)
        if bool(going.all()):
            return []
        for slot, generation in zip(self.rows.slots.tolist(), alive, strict=True):
            if generation.finish:
                generation.receipt = generation.receipt + self.tally.receipt(slot)
        rows = going.nonzero()[:, 0]
        self.tokens, self.positions, self.rows = self.tokens[rows], self.positions[rows], self.rows.select(rows)
        if len(rows):
            self.memory = self.memory.select(rows)
        return [generation for generation in alive if generation.finish]

    def join(self, other: Decoder) -> Decoder:
        """Return both batches as one; counts so far are moved to the generations' receipts, unless memory runs out before."""
        joined = Decoder(
            self.body,
            self.alive() + other.alive(),
            Memory.join([self.memory, other.memory]),
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.positions, other.positions]),
        )
        for decoder in (self, other):
            for slot, generation in zip(decoder.rows.slots.tolist(), decoder.alive(), strict=True):
                generation.receipt = generation.receipt + decoder.tally.receipt(slot)
        return joined


def choose(logits: Tensor, generations: Sequence[Generation]) -> tuple[Tensor, Tensor]:
    """Choose the next token of every row (forced, or argmax) and record it in its generation.

    Args:
        logits: [rows, vocabulary]

    Returns:
        Token ids [rows], and a boolean mask [rows] of the rows that continue.
    """
    finite = logits.isfinite().all(-1)
    top = logits.topk(2, -1).values if logits.shape[-1] > 1 else logits.expand(-1, 2)
    best = logits.argmax(-1)
    forced = [t.prepared.request.forced for t in generations]
    if any(forced):
        known = [f[len(t.tokens)] if f else -1 for f, t in zip(forced, generations, strict=True)]
        wanted = torch.tensor(known, device=logits.device)
        best = torch.where(wanted >= 0, wanted, best)
    logprob = logits.gather(-1, best[:, None])[:, 0] - logits.logsumexp(-1)
    columns = (best.tolist(), logprob.tolist(), (top[:, 0] - top[:, 1]).tolist(), finite.tolist())
    for generation, token, log, margin, good in zip(generations, *columns, strict=True):
        if not good:
            generation.finish = "failed"
            continue
        generation.tokens.append(token)
        generation.logprobs.append(log)
        generation.margins.append(margin)
        if token in generation.stop:
            generation.finish = "stop"
        elif len(generation.tokens) >= generation.steps:
            generation.finish = "length"
    return best, torch.tensor([not generation.finish for generation in generations], device=logits.device)


def _first_bad_layer(body: HookedModel, item: Prepared, answer: Sequence[int]) -> str:
    """Run a failed request and its answer so far again; return the path of the first layer whose output is not finite."""
    bad: list[str] = []

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and not bool(hidden.isfinite().all()) and not bad:
                bad.append(path)

        return hook

    lists = {path for path, module in body.model.named_modules() if isinstance(module, nn.ModuleList)}
    with ExitStack() as stack:
        for path, module in body.model.named_modules():
            if path.rpartition(".")[0] in lists or isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(watch(path)).remove)
        _feed_tokens(body, [item], torch.tensor([[*item.request.prompt, *answer]], device=body.device), "last")
    return bad[0] if bad else "none of them (the output head)"


def score(body: HookedModel, prefiller: Prefiller, batch: Sequence[tuple[int, Prepared]]) -> list[tuple[int, Answer]]:
    """Return (index, answer) of each request, with the log-likelihoods of its options; options share their prompt's prefill."""
    prefills, places = group([item for _, item in batch])
    result = prefiller.run(prefills, remember=any(item.request.steps > 1 for _, item in batch))
    rows = [(place[None], item, o) for place, (_, item) in zip(places, batch, strict=True) for o in item.request.options]
    if body.observer is not None:
        body.observer.begin([item.request for _, item, _ in rows], body.device)
    tally, first = Tally(len(rows)), result.logits.log_softmax(-1)  # [prefills, vocabulary]: scores each option's first token
    scores: list[tuple[tuple[float, ...], bool]] = [((), True)] * len(rows)  # of each token, and whether all are the argmax
    for length in sorted({len(option) for *_, option in rows}):
        # Options of one length share a forward: without padding, receipts count only the options' own tokens.
        alike = [r for r, (*_, option) in enumerate(rows) if len(option) == length]
        place, tokens = (torch.tensor([rows[r][part] for r in alike], device=body.device) for part in (0, 2))
        logprobs, greedy = first[place, tokens[:, 0]][:, None], first.argmax(-1)[place] == tokens[:, 0]
        if length > 1:
            assert result.memory is not None
            forked = result.memory.share(place) if body.shareable else result.memory.select(place)
            compiled = compile_items(body, [rows[r][1] for r in alike], "prefill", torch.tensor(alike, device=body.device))
            later = body.feed(tokens[:, :-1], forked, "prefill", compiled, tally, keep="all", chunk=prefiller.chunk)
            later = later.log_softmax(-1)
            logprobs = torch.cat([logprobs, later.gather(2, tokens[:, 1:, None])[..., 0]], 1)
            greedy &= (later.argmax(-1) == tokens[:, 1:]).all(1)
        for r, logs, best in zip(alike, logprobs.tolist(), greedy.tolist(), strict=True):
            scores[r] = tuple(logs), best
    numbers = iter(range(len(rows)))
    answers = []
    for own, (i, item) in zip(places, batch, strict=True):
        mine = [next(numbers) for _ in item.request.options]
        receipt = sum((tally.receipt(r) for r in mine), start=result.receipts[own[None]])
        receipt = replace(receipt, notes=item.notes(receipt))
        of_options, greedy_ones = zip(*(scores[r] for r in mine), strict=True)
        finite = all(math.isfinite(value) for logs in of_options for value in logs)
        error = item.failure(receipt) if finite else _NOT_FINITE
        finish: Finish = "failed" if error else "scored"
        answers.append((i, Answer(receipt=receipt, finish=finish, error=error, option_logprobs=of_options, greedy=greedy_ones)))
    return answers


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
        # Each row runs alone, without its left padding, so that padding cannot change its logits.
        mask = attention_mask.to(ids.device).bool()
        if mask.shape != ids.shape or not bool((mask.int().diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
            raise NeedleworkError("attention_mask must have the shape of input_ids and mark left padding only (0 ... 0 1 ... 1)")
        shortest = int(mask.sum(1).min())
        if prompt_tokens is not None and prompt_tokens > shortest:
            raise NeedleworkError(f"prompt_tokens={prompt_tokens} counts without padding, the shortest row has {shortest} tokens")
        out = torch.zeros(*ids.shape, body.anatomy.vocabulary, device=ids.device)
        for r, pads in enumerate((~mask).sum(1).tolist()):
            out[r, pads:] = logits(body, ids[r : r + 1, pads:], intervention, prompt_tokens, None, spans, boundary)[0]
        return out
    count = ids.shape[1] if prompt_tokens is None else prompt_tokens
    if not 1 <= count <= ids.shape[1]:
        raise NeedleworkError(f"prompt_tokens={count} must lie between 1 and the {ids.shape[1]} tokens given")
    if prompt_tokens is None:
        boundary = "prefill"  # nothing is decoded
    body.check_length(ids.shape[1])
    steps = ids.shape[1] - count + 1
    asked = [Request(tuple(row[:count]), intervention, steps, spans=spans, boundary=boundary) for row in ids.tolist()]
    items = [prepare(request, body.anatomy) for request in asked]
    body.check_rankings(intervention)
    if items[0].twins:
        raise NeedleworkError("logits() does not swap memory; use generate(..., twins=[...])")
    with body.session():
        if body.observer is not None:
            body.observer.begin(asked, body.device)
        return _feed_tokens(body, items, ids, "all")


def _feed_tokens(body: HookedModel, items: Sequence[Prepared], ids: Tensor, keep: Literal["last", "all"]) -> Tensor:
    """Feed prompts and given answers [rows, tokens] in their phases; return logits of all tokens, or without most prefill's.

    Args:
        items: The request of each row, all with prefills of one length.
        keep: Which logits of the prefill are kept.
    """
    memory, tally, split, parts = body.new_memory(len(items)), Tally(len(items)), items[0].prefill_tokens, []
    if split:
        parts.append(body.feed(ids[:, :split], memory, "prefill", compile_items(body, items, "prefill"), tally, keep=keep))
    compiled = compile_items(body, items, "decode")
    parts += [body.feed(ids[:, t : t + 1], memory, "decode", compiled, tally) for t in range(split, ids.shape[1])]
    return torch.cat(parts, 1)
