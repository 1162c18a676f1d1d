"""Rank heads by their contribution to the correct answer: LOCOS, and gates on the heads (gradients and trained gates).

LOCOS (arXiv 2607.01002) measures what a head writes to the residual stream because it attends to the needle. At the decode step
t that generates token y of the answer, key j adds phi(t, j) = a(t, j) * u_y . W_O v_j to the logit of y on the direct path: a is
the attention weight, v the value, W_O the head's slice of the output projection (without bias) and u_y the row of the
unembedding. The final norm and later layers are ignored, as in the authors' code. The score of a sample is the sum over the
needle's keys minus the sum over all other visible keys, rescaled to the needle's number of keys, averaged over the answer's
tokens. In models with a gate between attention and output projection, v_j is multiplied by the query's gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from needlework.errors import NeedleworkError
from needlework.heads.methods import Scores, method
from needlework.heads.observers import SampleObserver
from needlework.heads.samples import AnsweredItem, evidence, select_correct
from needlework.measure import Progress, map_samples, run_requests
from needlework.model.attention import Forward, QueryBlock
from needlework.model.hooked_model import answer_log_p, differentiable
from needlework.observation import NEEDLE
from needlework.requests import Request
from needlework.subject import Subject
from needlework.tasks.base import Item

_ROWS_AT_ONCE = 8  # texts in one backward pass


class ContributionObserver(SampleObserver):
    """Observer that sums each head's direct contribution to the generated token's logit, from the needle and from other keys.

    Hooks find the output projection: the last linear layer of matching width that the attention module calls after attention.
    The ratio of its input to the attention output is the gate between the two.
    """

    each_sample = False  # prefill is not observed, so prompts may share it

    def __init__(self, subject: Subject, samples: int) -> None:
        super().__init__(samples, NEEDLE)
        self._subject = subject
        self._unembedding: Tensor = subject.model.get_output_embeddings().weight.detach()
        self.steps = np.zeros(samples)
        # For each attention call of this step: layer; attention output from needle keys and from all keys, [rows, heads, dim];
        # number of needle keys divided by number of other keys, [rows, 1 or heads]
        self._said: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self._entered: tuple[nn.Linear, Tensor] | None = None  # last linear layer called since then, and its input
        self._towards: list[tuple[nn.Linear, Tensor]] = []  # output projection of each call, and its input

    def see(self, forward: Forward, layer: int, block: QueryBlock, probabilities: Tensor) -> None:
        if forward.phase != "decode":
            return
        p, k = probabilities, block.k_positions
        past = ((k >= 0) & (k <= block.q_positions))[:, None]
        seen = past if block.visible is None else block.visible[:, :, 0].expand(len(k), -1, -1)  # [rows, 1 or heads, keys]
        needle = self.in_span(NEEDLE, forward.slots, k)[:, None] & seen
        ours, others = needle.sum(-1), (seen & ~needle).sum(-1)  # [rows, 1 or heads] keys
        dtype = self._unembedding.dtype
        from_needle, from_all = (block.mix(x.to(dtype))[:, 0] for x in (p * needle[:, :, None], p))
        self._said.append((layer, from_needle, from_all, ours / others.clamp_min(1)))
        self._entered = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record a linear layer inside an attention module whose input is as wide as all heads; it may also belong to a gate."""
        if len(self._towards) < len(self._said) and args and args[0].numel() == self._said[-1][2].numel():
            assert isinstance(module, nn.Linear)
            self._entered = (module, args[0].reshape(self._said[-1][2].shape))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the last recorded linear layer of an attention module as its output projection."""
        if len(self._towards) < len(self._said):
            if self._entered is None:
                raise NeedleworkError(
                    f"locos: no linear map takes what the heads of {type(module).__name__} say, so what they write is not known;"
                    " choose another method, such as leave_one_out"
                )
            self._towards.append(self._entered)

    def chose(self, slots: Tensor, tokens: Tensor) -> None:
        direction = self._unembedding[tokens.to(self._unembedding.device)].float()  # [rows, hidden]
        for (layer, of_needle, whole, share), (projection, given) in zip(self._said, self._towards, strict=True):
            gate = torch.where(whole == 0, 1.0, given / whole).float()  # 1 in models without a gate
            weight = projection.weight.float()
            towards = (direction.to(weight.device) @ weight).view(whole.shape) * gate  # [rows, heads, dim]
            ours, all_ = ((towards * x.float()).sum(-1).double() for x in (of_needle, whole))  # [rows, heads]
            self.add(layer, "contrast", slots, ours - share * (all_ - ours))
            self.add(layer, "written", slots, all_)
        np.add.at(self.steps, self.numbers(slots).tolist(), 1)
        self._said.clear()
        self._towards.clear()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Observe all requests to the subject inside the `with` block, with hooks on the linear layers of its attention."""
        body = self._subject.body
        with ExitStack() as stack:
            for module, layer in body.attention.items():
                part = body.anatomy.attention(layer)
                width = part.query_heads * part.value_dim
                for inner in module.modules():
                    if isinstance(inner, nn.Linear) and inner.in_features == width:
                        stack.callback(inner.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            stack.enter_context(self._subject.body.observed_by(self))
            yield


@method("locos", "contribution", "what the head writes towards the answer because it looks at the needle (LOCOS, 2607.01002)")
def locos(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Score a head by LOCOS (see the module's docstring) on samples with a needle span."""
    used = [x for x in select_correct(subject, items) if x.item.spans.get("needle")]
    if not used:
        raise NeedleworkError("locos: the samples have no span named 'needle', so what is read from the needle is not known")
    return Scores.of_samples(np.concatenate(map_samples(subject, _contributions, used, progress)), **evidence(used, items))


def _contributions(subject: Subject, used: Sequence[AnsweredItem], progress: Progress) -> np.ndarray:
    """Return each head's LOCOS score on each sample, [samples, heads]."""
    observer = ContributionObserver(subject, len(used))
    requests = [
        Request(x.item.prompt, max_new_tokens=len(x.answer), spans=x.item.spans, forced=x.answer, sample=i)
        for i, x in enumerate(used)
    ]
    with observer.hooked():
        run_requests(subject, requests, [x.item.id for x in used], progress)
    return np.asarray(observer.all_heads("contrast") / observer.steps[:, None])


@method("gradient", "contribution", "slope of the right answer's log P by a gate on the head: gradient x activation")
def gradient(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Score heads by d log P / d gate at gates of 1: a first-order `leave_one_out`, for all heads in one backward pass."""
    used = select_correct(subject, items)
    return Scores.of_samples(np.concatenate(map_samples(subject, _differentiate, used, progress)), **evidence(used, items))


def _differentiate(subject: Subject, used: Sequence[AnsweredItem], progress: Progress) -> np.ndarray:
    """Return the derivative of log P by each head's gate, [samples, heads]."""
    order = sorted(range(len(used)), key=lambda i: len(used[i].item.prompt))
    each = np.zeros((len(used), len(subject.anatomy.heads)))
    with differentiable(subject.body):
        for start in range(0, len(order), _ROWS_AT_ONCE):
            some = order[start : start + _ROWS_AT_ONCE]
            gates = torch.ones(len(some), each.shape[1], device=subject.body.device, requires_grad=True)
            log_p = answer_log_p(subject.body, [(used[i].item.prompt, used[i].answer) for i in some], gates)
            (slope,) = torch.autograd.grad(log_p.sum(), gates)
            each[some] = slope.double().cpu().numpy()
            progress((start + len(some)) / len(order))
    return each


@method("learned", "learned", "how long a gate on the head stays open in training that taxes gates (L1; after DuoAttention)")
def learned(
    subject: Subject,
    items: Sequence[Item],
    *,
    seed: int,
    progress: Progress,
    steps: int = 200,
    rows: int = 4,
    penalty: float = 1.0,
    rate: float = 0.05,
) -> Scores:
    """Score heads by gates that are trained with an L1 penalty; the model's weights stay frozen.

    Gates start at 1 and are clamped to [0, 1]. The loss is the mean -log P of the answers' tokens plus `penalty` times the mean
    gate. The score is a gate's mean over all steps, because many gates end at the same value. DuoAttention's gates (arXiv
    2410.10819) mix full attention with a window; here a gate multiplies the head's output, so 0 equals an ablated head.
    """
    train = partial(_train_gates, seed=seed, steps=steps, rows=rows, penalty=penalty, rate=rate)
    (scores,) = map_samples(subject, train, items, progress, whole=True)
    return scores


def _train_gates(
    subject: Subject, items: Sequence[Item], progress: Progress, seed: int, steps: int, rows: int, penalty: float, rate: float
) -> Scores:
    used, body = select_correct(subject, items), subject.body
    by_length = sorted(used, key=lambda x: len(x.item.prompt) + len(x.answer))  # similar lengths need little padding
    batches = [by_length[start : start + rows] for start in range(0, len(used), rows)]
    draw = np.random.default_rng(seed)
    gates = torch.ones(1, len(subject.anatomy.heads), device=body.device, requires_grad=True)
    optimiser = torch.optim.Adam([gates], lr=rate, betas=(0.9, 0.99))
    total, losses = torch.zeros_like(gates[0], requires_grad=False), []
    with differentiable(body):
        for step in range(steps):
            batch = batches[int(draw.integers(len(batches)))]
            log_p = answer_log_p(body, [(x.item.prompt, x.answer) for x in batch], gates)
            loss = -log_p.sum() / sum(len(x.answer) for x in batch)
            losses.append(float(loss.detach()))
            (gates.grad,) = torch.autograd.grad(loss + penalty * gates.mean(), gates)
            optimiser.step()
            with torch.no_grad():
                gates.clamp_(0, 1)
                total += gates[0]
            progress((step + 1) / steps)
    facts = {**evidence(used, items), "gates": [round(g, 4) for g in gates[0].tolist()], "loss": losses[:: max(1, steps // 50)]}
    return Scores((total / steps).double().cpu().numpy(), None, {**facts, "steps": steps, "penalty": penalty})
