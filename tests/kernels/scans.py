"""What the kernel tests share: running a scan with gradients, and comparing two runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

Scan = Callable[..., tuple[Tensor, Tensor]]
Run = dict[str, Tensor]
Threads = Callable[[int], None]

# Around the sizes of blocks (64 channels) and tiles (32 tokens), and well away from them.
WIDTHS = st.sampled_from([1, 3, 63, 64, 65, 130])
LENGTHS = st.sampled_from([1, 2, 5, 31, 32, 33, 70])
BATCHES = st.integers(1, 3)
SEEDS = st.integers(0, 2**16)


def run(scan: Scan, floats: dict[str, Tensor], reset: Tensor | None = None, weights: tuple[float, float] = (1.0, 1.0)) -> Run:
    """Results and gradients of a scan. The loss looks at all of the output and at the last state, weighted."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in floats.items()}
    out, final = scan(**leaves) if reset is None else scan(**leaves, reset=reset)
    loss = torch.zeros(())
    if weights[0]:
        loss = loss + weights[0] * (out.float() * _directions(out)).sum()
    if weights[1]:
        loss = loss + weights[1] * (final * _directions(final)).sum()
    loss.backward()
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), "final": final.detach()} | {f"grad of {name}": grad for name, grad in grads.items()}


def _directions(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(5))


def assert_close(ours: Run, theirs: Run, tolerance: float = 2e-6) -> None:
    """Equal up to `tolerance` of each tensor's largest entry (at least 0.1: sums of terms near 1 may cancel)."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = max(0.1, float(expected.float().abs().max())) if expected.numel() else 1.0
        worst = float((ours[name].float() - expected.float()).abs().max()) if expected.numel() else 0.0
        assert worst <= tolerance * scale, f"{name} is off by {worst:.1e} at a scale of {scale:.1e}"


def resets(batch: int, length: int, share: float = 0.1) -> Tensor:
    return torch.rand(batch, length) < share


def linear_inputs(batch: int, length: int, width: int) -> dict[str, Tensor]:
    """Inputs of h_t = decay_t * h_{t-1} + x_t."""
    tensors = {"x": torch.randn(batch, length, width), "decay": torch.rand(batch, length, width)}
    return tensors | {"state": torch.randn(batch, width)}


def rglru_inputs(batch: int, length: int, width: int, with_state: bool = True) -> dict[str, Tensor]:
    """Inputs of the RG-LRU with its gates."""
    tensors = {name: torch.randn(batch, length, width) for name in ("x", "gate_in", "gate_keep")}
    tensors["rate"] = 0.01 + torch.rand(width)
    return tensors | ({"state": torch.randn(batch, width)} if with_state else {})


def selective_inputs(
    batch: int, length: int, inner: int, n: int = 5, fused: bool = False, state: bool = True
) -> dict[str, Tensor]:
    tensors = {
        "x": torch.randn(batch, length, inner),
        "dt": torch.rand(batch, length, inner),
        "A": -4 * torch.rand(inner, n),
        "B": torch.randn(batch, length, n),
        "C": torch.randn(batch, length, n),
    }
    if state:
        tensors["state"] = torch.randn(batch, inner, n)
    if fused:
        tensors["dt"] = 3 * torch.randn(batch, length, inner)
        tensors |= {"dt_bias": torch.randn(inner), "skip": torch.randn(inner), "z": torch.randn(batch, length, inner)}
    return tensors
