"""Heads by what they write towards the right answer: LOCOS, and the gradient of a gate on each head.

LOCOS (arXiv 2607.01002) asks what a head writes because it looks at the needle. At every step t that says a token y of the
answer, a key j adds phi(t, j) = a(t, j) * u_y . W_O v_j to the logit of y on the direct path: a is the attention weight, v the
value, W_O the head's part of the output projection (without its bias, which is no head's) and u_y the row of the unembedding,
raw: neither the final norm nor later layers are taken into account, as in the authors' own code. The score of a sample is the sum
over the needle's keys less the sum over all other keys that the query sees, scaled to as many keys as the needle has, averaged
over the answer's tokens. Where a model multiplies heads by a gate between attention and projection, v_j is gated as the query is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from needlework.errors import NeedleworkError
from needlework.heads.answers import Question, questions
from needlework.heads.causal import Progress, evidence
from needlework.heads.methods import Scores, method
from needlework.heads.pieces import in_pieces
from needlework.model.attention import Block, Forward
from needlework.model.gates import answer_log_p, differentiable
from needlework.requests import Request
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.subject import Subject

_ROWS_AT_ONCE = 8  # texts whose gradients are taken together


class Writing:
    """Watches decode steps: what each head writes towards the token that is said, from the needle and from elsewhere."""

    each_sample = False

    def __init__(self, subject: Subject, samples: int) -> None:
        self._unembedding: Tensor = subject.model.get_output_embeddings().weight.detach()
        self._body = subject.body
        shapes = {layer.index: (samples, len(layer.heads)) for layer in subject.anatomy.attention_layers}
        self.contrast = {layer: np.zeros(shape) for layer, shape in shapes.items()}  # summed over steps
        self.written = {layer: np.zeros(shape) for layer, shape in shapes.items()}  # from all keys
        self.steps = np.zeros(samples)
        self._samples: list[int] = []  # by slot
        self._needle = torch.empty(0, 0)
        # This step, call by call: layer; from the needle and from all keys [rows, heads, dim]; the needle's keys over the others
        self._said: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self._entered: tuple[nn.Linear, Tensor] | None = None  # the last linear map since then, and what it was given
        self._towards: list[tuple[nn.Linear, Tensor]] = []  # of each call: its output projection, and what that was given

    def begin(self, requests: Sequence[Request], device: torch.device) -> None:
        self._samples = [request.key for request in requests]
        self._needle = torch.zeros(len(requests), max(len(request.prompt) for request in requests), dtype=torch.bool)
        for slot, request in enumerate(requests):
            for start, end in request.spans["needle"]:
                self._needle[slot, start:end] = True
        self._needle = self._needle.to(device)

    def see(self, forward: Forward, layer: int, block: Block, probabilities: Tensor) -> None:
        if forward.phase != "decode":
            return
        p, k = probabilities, block.k_positions
        inside = (k >= 0) & (k < self._needle.shape[1])
        needle = self._needle[forward.slots].gather(1, k.clamp(0, self._needle.shape[1] - 1)) & inside  # [rows, keys]
        past = ((k >= 0) & (k <= block.q_positions))[:, None]
        seen = past if block.visible is None else block.visible[:, :, 0].expand(len(k), -1, -1)  # [rows, 1 or heads, keys]
        needle = needle[:, None] & seen
        ours, others = needle.sum(-1), (seen & ~needle).sum(-1)  # [rows, 1 or heads] keys
        dtype = self._unembedding.dtype
        from_needle, from_all = (block.mix(x.to(dtype))[:, 0] for x in (p * needle[:, :, None], p))
        self._said.append((layer, from_needle, from_all, ours / others.clamp_min(1)))
        self._entered = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A linear map inside an attention module, as wide as its heads; a gate's own may come after attention, too."""
        if len(self._towards) < len(self._said) and args and args[0].numel() == self._said[-1][2].numel():
            assert isinstance(module, nn.Linear)
            self._entered = (module, args[0].reshape(self._said[-1][2].shape))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """An attention module is done: the last of its linear maps was the output projection."""
        if len(self._towards) < len(self._said):
            if self._entered is None:
                raise NeedleworkError(
                    f"locos: no linear map takes what the heads of {type(module).__name__} say, so what they write is not known;"
                    " choose another method, such as leave_one_out"
                )
            self._towards.append(self._entered)

    def chose(self, slots: Tensor, tokens: Tensor) -> None:
        places = [self._samples[slot] for slot in slots.tolist()]
        direction = self._unembedding[tokens].float()  # [rows, hidden]
        for (layer, of_needle, whole, share), (projection, given) in zip(self._said, self._towards, strict=True):
            gate = torch.where(whole == 0, 1.0, given / whole).float()  # 1 where there is none
            towards = (direction @ projection.weight.float()).view(whole.shape) * gate  # [rows, heads, dim]
            ours, all_ = ((towards * x.float()).sum(-1).double() for x in (of_needle, whole))  # [rows, heads]
            np.add.at(self.contrast[layer], places, (ours - share * (all_ - ours)).cpu().numpy())
            np.add.at(self.written[layer], places, all_.cpu().numpy())
        np.add.at(self.steps, places, 1)
        self._said.clear()
        self._towards.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, everything that the subject is asked is seen."""
        body = self._body
        with ExitStack() as stack:
            for module, layer in body.attention.items():
                part = body.anatomy.attention(layer)
                width = part.query_heads * part.value_dim
                for inner in module.modules():
                    if isinstance(inner, nn.Linear) and inner.in_features == width:
                        stack.callback(inner.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            before, body.observer = body.observer, self
            stack.callback(setattr, body, "observer", before)
            yield


@method("locos", "contribution", "what the head writes towards the answer because it looks at the needle (LOCOS, 2607.01002)")
def locos(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    asked = [question for question in questions(subject, items) if question.item.spans.get("needle")]
    if not asked:
        raise NeedleworkError("locos: the samples have no span named 'needle', so what is read from the needle is not known")
    return Scores.of_samples(np.concatenate(in_pieces(subject, _written, asked, progress)), **evidence(asked, items))


def _written(subject: Subject, asked: Sequence[Question], progress: Progress) -> np.ndarray:
    """What each head writes towards the answer because it looks at the needle, [questions, heads]."""
    writing = Writing(subject, len(asked))
    requests = [
        Request(x.item.prompt, max_new_tokens=len(x.answer), spans=x.item.spans, forced=x.answer, sample=i)
        for i, x in enumerate(asked)
    ]
    with writing.watching():
        for done, (i, answer) in enumerate(subject.engine.run(requests)):
            if answer.error:
                raise NeedleworkError(f"{asked[i].item.id}: {answer.error}")
            progress((done + 1) / len(requests))
    sums = np.concatenate([writing.contrast[layer.index] for layer in subject.anatomy.attention_layers], 1)
    return np.asarray(sums / writing.steps[:, None])


@method(
    "gradient",
    "contribution",
    "slope of the right answer's log P by a gate on the head: gradient x activation",
)
def gradient(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """A first-order guess of `leave_one_out`, of all heads by one backward pass: d log P / d gate where every gate is 1."""
    asked = questions(subject, items)
    return Scores.of_samples(np.concatenate(in_pieces(subject, _slopes, asked, progress)), **evidence(asked, items))


def _slopes(subject: Subject, asked: Sequence[Question], progress: Progress) -> np.ndarray:
    """By the gate of each head, [questions, heads]."""
    order = sorted(range(len(asked)), key=lambda i: len(asked[i].item.prompt))
    each = np.zeros((len(asked), len(subject.anatomy.heads)))
    with differentiable(subject.body):
        for start in range(0, len(order), _ROWS_AT_ONCE):
            some = order[start : start + _ROWS_AT_ONCE]
            gates = torch.ones(len(some), each.shape[1], device=subject.body.device, requires_grad=True)
            log_p = answer_log_p(subject.body, [(asked[i].item.prompt, asked[i].answer) for i in some], gates)
            (slope,) = torch.autograd.grad(log_p.sum(), gates)
            each[some] = slope.double().cpu().numpy()
            progress((start + len(some)) / len(order))
    return each
