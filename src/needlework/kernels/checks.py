"""Checks of the shapes and types that scans are given. The compiled kernels trust them blindly."""

import torch
from torch import Tensor


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but {list(shape)} is needed")


def check_reset(reset: Tensor | None, batch: int, length: int) -> None:
    if reset is None:
        return
    check_shape("reset", reset, batch, length)
    if reset.dtype != torch.bool:
        raise TypeError(f"reset is {reset.dtype}, but a bool mask is needed: pass `reset != 0`")
