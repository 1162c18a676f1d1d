"""Build a recipe's model with fresh weights, and its optimiser: AdamW, optionally with Muon for linear layers.

Muon (Jordan et al., 2024) orthogonalizes the momentum of a matrix before it is added, so that all directions get a step of the
same size, including rare ones such as the binding of a name to its value. torch.optim.Muon does the same in bfloat16, which is
ten times slower than fp32 on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from needlework.errors import ZooError, did_you_mean
from needlework.toy import words as w
from needlework.training.recipes import Optimiser, Recipe

_FILLED_IN = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
# Coefficients of the quintic Newton-Schulz iteration: five rounds bring the singular values of a matrix of norm 1 near 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_LIKE_ADAMW = 0.2  # root mean square of an AdamW step, in units of its learning rate


def find_model_class(architecture: str) -> Any:
    """Return the causal language model class of transformers with this name; raise for an unknown name."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    suffixed = {name for name in dir(transformers) if name.endswith("ForCausalLM")}
    known = sorted(suffixed | {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
    if architecture not in known:
        raise ZooError(f"unknown architecture {architecture!r} in transformers: {did_you_mean(architecture, known)}")
    return getattr(transformers, architecture)


def build_configuration(recipe: Recipe) -> Any:
    """Return the configuration of the recipe's model class; raise for unknown keys, which transformers would accept."""
    kind = find_model_class(recipe.architecture).config_class
    known = {*kind().to_dict(), *getattr(kind, "attribute_map", {}), "rope_parameters", "head_dim"} - set(_FILLED_IN)
    for key in recipe.config:
        if key in _FILLED_IN:
            raise ZooError(f"recipe {recipe.name}: config.{key} is given by the toy language; leave it out")
        if key not in known:
            raise ZooError(f"recipe {recipe.name}: unknown key config.{key}: {did_you_mean(key, known)}")
    ids = {f"{name}_token_id": w.WORD_ID[word] for name, word in (("pad", w.PAD), ("bos", w.BOS), ("eos", w.EOS))}
    return kind(vocab_size=len(w.VOCABULARY), **ids, **recipe.config)


def build_model(recipe: Recipe) -> Any:
    """Return the model in fp32 with weights initialised from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    try:
        built = find_model_class(recipe.architecture)(build_configuration(recipe)).float()
    except ZooError:
        raise
    except Exception as error:  # model classes raise anything for a bad configuration
        raise ZooError(f"recipe {recipe.name}: {recipe.architecture} refuses this config: {error}") from None
    with torch.no_grad():
        for part, std in recipe.initial_std.items():
            for weight in _find_parameters(built, recipe, "initial_std", part, vectors=False):
                weight.mul_(std / weight.std())
        for part, (first, last) in recipe.initial_range.items():
            for weight in _find_parameters(built, recipe, "initial_range", part, vectors=True):
                weight.copy_(torch.linspace(first, last, len(weight)))
    return built


def _find_parameters(built: Any, recipe: Recipe, key: str, part: str, *, vectors: bool) -> list[Any]:
    chosen = [p for name, p in built.named_parameters() if part in name and (p.ndim == 1) == vectors]
    if not chosen:
        kind = "vector" if vectors else "matrix"
        raise ZooError(f"recipe {recipe.name}: {key} names {part!r}, and no {kind} of the model is called so")
    return chosen


# --- Optimiser ---


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices [n, rows, columns] with their singular values moved near 1 (Newton-Schulz)."""
    a, b, c = _QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon optimiser: orthogonalized Nesterov momentum, scaled so that AdamW's learning rates and weight decays apply."""

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
        for matrix, direction in zip(matrices, orthogonalize(ahead), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-size)


class CombinedOptimiser:
    """Several optimisers with one interface."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def step(self, rate: Callable[[float], float]) -> None:
        """Take one step; `rate` maps the peak learning rate of a parameter group to the current one."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate(group["peak"])
            part.step()

    def forget(self) -> None:
        """Reset the state of all optimisers, e.g. momenta."""
        for part in self.parts:
            part.state.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)


def build_optimiser(settings: Optimiser, model: Any) -> CombinedOptimiser:
    """Return the optimiser of a model: AdamW, or with `matrix_lr` Muon for all linear layers except the output head."""
    head, linear = model.get_output_embeddings(), [m for m in model.modules() if isinstance(m, nn.Linear)]
    maps = [m.weight for m in linear if m is not head] if settings.matrix_lr else []
    taken = {id(weight) for weight in maps}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    # Weight decay applies to matrices only: norms, biases and decay rates of recurrences should not shrink.
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay, "peak": settings.lr},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0, "peak": settings.lr},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
    if not settings.matrix_lr:
        return CombinedOptimiser(adamw)
    muon = Muon(maps, settings.matrix_lr, settings.weight_decay)
    muon.param_groups[0]["peak"] = settings.matrix_lr
    return CombinedOptimiser(adamw, muon)
