"""A model under test: prompts, the reference forward of transformers, and distances between logits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from needlework.anatomy import Anatomy
from needlework.interventions.base import NONE, Intervention
from needlework.model.hooked_model import exclusive_use, slow_kernel_hints
from needlework.model.probe import attention_switched
from needlework.requests import Answer, Request
from needlework.subject import Subject

# Tolerance for rounding, in standard deviations of the logits. In half precision, rounding may even route a token to another
# expert, so there the median over tokens is compared, in single precision the worst token (docs/trust.md).
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}


class DoesNotApply(Exception):
    """The law does not apply to this model; the message says why."""


@dataclass(frozen=True)
class LawResult:
    """The outcome of one law."""

    holds: bool
    why: str
    measured: float | None = None
    allowed: float | None = None
    shown: tuple[str, ...] = ()


@dataclass
class Case:
    """A subject and the sizes of its test prompts: `tokens` by default, `most_tokens` at most."""

    subject: Subject
    tokens: int = 32
    after: int = 4  # forced tokens after a prompt
    most_tokens: int = 4096
    text_ids: tuple[int, ...] = ()  # tokens of real text; empty without a tokenizer

    @property
    def anatomy(self) -> Anatomy:
        return self.subject.anatomy

    @property
    def rounding(self) -> float:
        return ROUNDING.get(self.subject.model.dtype, ROUNDING[torch.float32])

    @property
    def half(self) -> bool:
        return self.subject.model.dtype in (torch.float16, torch.bfloat16)

    @cached_property
    def between_routes(self) -> float:
        """Tolerance between prefill and decode; larger for families whose own implementations of the two differ."""
        return max(self.rounding, self.subject.body.family.drift)

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        return self.sequence(self.tokens)

    @cached_property
    def idle(self) -> Tensor:
        """Logits [1, tokens, vocabulary] of the prompt without an intervention."""
        return self.subject.logits([self.prompt])

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the logits over the vocabulary, averaged over tokens: the unit of all differences."""
        return max(float(self.idle.std(-1).mean()), 1e-6)

    def sequence(self, count: int, seed: int = 0) -> tuple[int, ...]:
        """Return `count` token ids: real text if available and `seed` is 0, else random ids without special tokens."""
        if seed == 0 and self.text_ids:
            times = -(-count // len(self.text_ids))
            return (self.text_ids * times)[:count]
        config = self.subject.model.config
        special = set(getattr(self.subject.tokenizer, "all_special_ids", None) or ())
        for part in (config, config.get_text_config(decoder=True)):
            for value in (value for name, value in vars(part).items() if "token_id" in name):
                special |= {i for i in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(i, int)}
        ordinary = [i for i in range(min(self.anatomy.vocabulary, 4096)) if i not in special] or [0]
        draw = torch.Generator().manual_seed(17 + seed)
        return tuple(ordinary[i] for i in torch.randint(len(ordinary), (count,), generator=draw).tolist())

    def changed(self, ids: Sequence[int], places: range) -> tuple[int, ...]:
        """Return the token ids with those at the positions `places` replaced by random ones."""
        others = self.sequence(len(ids), seed=5)
        more = self.sequence(len(ids), seed=6)
        swap = {i: others[i] if others[i] != ids[i] else more[i] for i in places}
        return tuple(swap.get(i, token) for i, token in enumerate(ids))

    @torch.inference_mode()
    def stock(self, ids: Sequence[int]) -> Tensor:
        """Return the logits [1, tokens, vocabulary] of transformers' own forward, without cache or needlework's kernels."""
        model, body = self.subject.model, self.subject.body
        training = [module for module in model.modules() if module.training]
        with exclusive_use(), slow_kernel_hints(), body.new_memory(1).mounted():  # mounted: leaves no state on the modules
            try:
                with attention_switched(model.eval(), "sdpa") if body.attention else nullcontext():
                    logits: Tensor = model(input_ids=torch.tensor([ids], device=body.device), use_cache=False).logits.float()
                    return logits
            finally:
                for module in training:
                    module.training = True

    def distance(self, a: Tensor, b: Tensor) -> float:
        """Return the distance of two logit tensors [..., vocabulary]: the largest difference per token, over tokens."""
        return self.over_tokens((a.float() - b.float()).abs().flatten(0, -2).max(-1).values.tolist())

    def logprob_distance(self, a: Answer, b: Answer) -> float:
        """Return the distance of two answers' log-probabilities in standard deviations."""
        ours, theirs = ([*x.logprobs, *(value for option in x.option_logprobs for value in option)] for x in (a, b))
        return self.over_tokens([abs(x - y) for x, y in zip(ours, theirs, strict=True)])

    def distance_from_logits(self, logprobs: Sequence[float], logits: Tensor, said: Sequence[int]) -> float:
        """Return the distance of the tokens' log-probabilities from those that logits [tokens, vocabulary] give."""
        expected = logits.log_softmax(-1).gather(1, torch.tensor(said, device=logits.device)[:, None])[:, 0].tolist()
        return self.over_tokens([abs(x - y) for x, y in zip(logprobs, expected, strict=True)])

    def over_tokens(self, differences: Sequence[float]) -> float:
        """Reduce differences per token to one number: median in half precision, else maximum; NaN if any is NaN."""
        most = worst(*differences)
        return (median(differences) if self.half and most == most else most) / self.spread

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Run requests and return their answers; raise if one failed."""
        answers = self.subject.answer(requests)
        failed = next((answer.error for answer in answers if answer.error), "")
        if failed:
            raise RuntimeError(failed)
        return answers

    def forced(self, act: Intervention = NONE, prompt: Sequence[int] = (), after: Sequence[int] = (), **more: Any) -> Request:
        """Return a request with forced tokens (teacher forcing), so that log-probabilities can be compared."""
        follows = tuple(after) or self.sequence(self.after, seed=3)
        return Request(tuple(prompt) or self.prompt, act, forced=follows, **more)

    def need_full_heads(self) -> None:
        if self.subject.body.streams:
            raise DoesNotApply("some heads stream: transformers' own forward, and the window of their layer, show them more keys")

    def need_heads(self) -> None:
        if not self.anatomy.attention_layers:
            raise DoesNotApply(f"{self.anatomy.architecture} has no attention heads")


def worst(*values: float) -> float:
    """Return the largest value; NaN counts as the largest."""
    return max(values, key=lambda value: float("inf") if value != value else value)


def near(measured: float, allowed: float, why: str, otherwise: str = "") -> LawResult:
    """Return a finding that holds if `measured` is at most `allowed`; NaN fails."""
    holds = measured <= allowed
    return LawResult(holds, why if holds else otherwise or why, measured, allowed)
