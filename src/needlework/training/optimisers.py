"""AdamW, alone or together with Muon for the linear maps inside a model, which it trains sooner at this size.

Muon (Jordan and others, 2024) makes the momentum of a matrix orthogonal before it is added: every direction in which a
matrix could move gets the same step, also the rare ones that carry "which name belongs to which value". torch.optim.Muon
does the same in bfloat16, which is ten times slower than fp32 on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from needlework.training.recipes import Optimiser

# The quintic of Newton and Schulz whose five rounds bring all singular values of a matrix of norm 1 near 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_LIKE_ADAMW = 0.2  # the root mean square of an AdamW step, in units of its learning rate


def orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix of [n, rows, columns] with its singular values brought near 1."""
    a, b, c = _QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum made orthogonal; steps are scaled so that AdamW's learning rates and weight decays fit."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            same_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    same_shape[matrix.shape].append(matrix)
            for shape, matrices in same_shape.items():
                self._move(matrices, max(shape), group)

    def _move(self, matrices: list[Tensor], longer_side: int, group: dict[str, Any]) -> None:
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        for matrix in matrices:
            self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch.lerp(torch.stack(gradients), torch.stack(momenta), group["momentum"])
        size = group["lr"] * _LIKE_ADAMW * longer_side**0.5
        for matrix, direction in zip(matrices, orthogonal(ahead), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-size)


class Together:
    """Several optimisers as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def step(self, rate: Callable[[float], float]) -> None:
        """One step, at the learning rate that `rate` gives for a group's peak."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate(group["peak"])
            part.step()

    def forget(self) -> None:
        """Drop all momenta, as if nothing had been trained yet."""
        for part in self.parts:
            part.state.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)


def _inner_maps(model: Any) -> list[Tensor]:
    """The weights of linear maps between hidden states; what reads or writes the vocabulary is none."""
    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]


def for_model(settings: Optimiser, model: Any) -> Together:
    maps = _inner_maps(model) if settings.matrix_lr else []
    taken = {id(weight) for weight in maps}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    # Weight decay is for matrices: norms, biases and decay rates of recurrences have no reason to shrink.
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay, "peak": settings.lr},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0, "peak": settings.lr},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
    if not settings.matrix_lr:
        return Together(adamw)
    muon = Muon(maps, settings.matrix_lr, settings.weight_decay)
    muon.param_groups[0]["peak"] = settings.matrix_lr
    return Together(adamw, muon)
