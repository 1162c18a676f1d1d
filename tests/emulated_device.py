"""An accelerator in software, for machines that have none: two devices, `emu:0` and `emu:1`.

A tensor of an emulated device holds a CPU tensor that computes for it, and refuses what a GPU refuses: to meet tensors of the
CPU or of the other device, to be indexed by the other device's tensors, random numbers of a CPU generator, and `.numpy()`.
What a GPU accepts is accepted: CPU tensors without dimensions, and CPU tensors as indices. Numbers are those of the CPU's
kernels, so neither the numerics nor the speed of real kernels is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_iter, tree_map

NAME, DEVICES = "emu", 2
_ANYWHERE = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}  # between devices
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_RESIZING = ("arange", "arange.start", "arange.start_step", "linspace", "randperm", "eye", "eye.m")  # make and then resize
_made: list[Any] = []  # registrations live as long as what made them


class DeviceMismatch(RuntimeError):
    """Tensors of two devices met."""


class EmulatedTensor(Tensor):
    """A tensor of an emulated device around the CPU tensor that computes for it."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type[EmulatedTensor], inner: Tensor, device: torch.device) -> EmulatedTensor:
        made: EmulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))

    def __repr__(self, **options: Any) -> str:
        return f"{self.inner!r} on {self.device}"

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_without_lists(index, self.device))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index, self.device), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Tensor = _wrap(self.inner.detach().clone(), self.device)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.inner.tolist()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, **options: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")


def is_named(device: str) -> bool:
    """Whether a name is that of an emulated device, which torch need not know yet."""
    return device.partition(":")[0] == NAME


def is_emulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute one operation on the CPU tensors inside, after checking that a GPU would accept its arguments."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # in inference mode these arrive whole
    device = _check_devices(func._schema.name, args, kwargs)
    if "device" in kwargs and kwargs["device"] is not None:
        device = torch.device(kwargs["device"])
    if func._schema.name == "aten::histc" and not args[0].is_floating_point():
        args = (args[0].float(), *args[1:])  # which a GPU counts as they are
    wrappers: dict[int, EmulatedTensor] = {}

    def unwrap(value: Any) -> Any:
        if isinstance(value, EmulatedTensor):
            wrappers[id(value.inner)] = value
            return value.inner
        return torch.device("cpu") if isinstance(value, torch.device) and is_emulated(value) else value

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, EmulatedTensor):
            return value
        if id(value) in wrappers:
            known = wrappers[id(value)]
            assert known.shape == value.shape, f"{func} changed the shape of its argument, which the emulated device cannot"
            return known
        if not is_emulated(device):
            return value
        if func.is_view and not any(known.is_inference() for known in wrappers.values()):
            with torch.inference_mode(False):  # a view of a parameter is no inference tensor, whichever mode it is made in
                return _wrap(value, device)
        return _wrap(value, device)

    return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))


def _wrap(inner: Tensor, device: Any) -> EmulatedTensor:
    place = torch.device(device)
    return EmulatedTensor(inner, torch.device(NAME, place.index or 0))


def _check_devices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device of the result; refuse arguments of several devices where a GPU does."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    for value in tensors:
        assert is_emulated(value.device) == isinstance(value, EmulatedTensor), f"{name}: a tensor of no known kind"
    emulated = [value for value in tensors if isinstance(value, EmulatedTensor)]
    if name in _ANYWHERE:
        return emulated[0].device if emulated and tensors[0] is emulated[0] else None
    if not emulated and "device" not in kwargs:
        return None
    place = emulated[0].device if emulated else torch.device(kwargs["device"])
    for value in tree_iter((args, kwargs)):
        if isinstance(value, torch.Generator) and is_emulated(place):
            raise DeviceMismatch(f"{name}: a generator of the CPU for {place}")
    others = [value for value in tensors if value.device != place]
    if name in _INDEXING and emulated and isinstance(args[0], EmulatedTensor):
        indices = {id(value) for value in args[1] if value is not None}
        others = [value for value in others if id(value) not in indices or value.device.type != "cpu"]
    others = [value for value in others if value.dim() > 0 or value.device.type != "cpu"]
    if others:
        raise DeviceMismatch(
            f"{name}: expected all tensors on one device, found {place} and"
            f" {', '.join(f'{tuple(value.shape)} on {value.device}' for value in others)}"
        )
    return place


def _without_lists(index: Any, device: torch.device) -> Any:
    """Indices with tensors for lists, which torch would make on the CPU without calling the device."""
    if isinstance(index, tuple):
        return tuple(_without_lists(part, device) for part in index)
    return _wrap(torch.tensor(index), device) if isinstance(index, list) else index


def _on_device(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` and `torch.as_tensor` for emulated devices, too: they copy data without calling the device."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if not is_emulated(device):
            return make(data, *args, device=device, **kwargs)
        if isinstance(data, Tensor):
            return data.to(device, *args, **kwargs)
        return _wrap(make(data, *args, **kwargs), device)

    return made


class _Backend(backend_registration._DummyBackendModule):
    def device_count(self) -> int:
        return DEVICES


def register() -> None:
    """Make `emu:0` and `emu:1` known to torch, for the rest of the process."""
    if _made:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    some = torch.library.Library("aten", "IMPL")
    for operation in _RESIZING:
        name, _, overload = operation.partition(".")
        func = getattr(getattr(torch.ops.aten, name), overload or "default")
        some.impl(operation, lambda *args, func=func, **kwargs: _run(func, *args, **kwargs), "PrivateUse1")
    _device_constructors()  # torch lists them once, by identity: as `with torch.device(...)` knows them
    torch.tensor, torch.as_tensor = _on_device(torch.tensor), _on_device(torch.as_tensor)
    _made.extend([everything, some])
