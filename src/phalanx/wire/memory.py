"""Tensors and buffers as plain bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from phalanx.errors import MisuseError, UnsupportedOperationError

P = ParamSpec("P")
T = TypeVar("T")
Buffer = Any  # bytes, bytearray, memoryview, array: the buffer protocol has no type before 3.12


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes; it keeps the tensor alive.

    By way of ctypes, since NumPy knows no bfloat16 and need not be installed. Raises
    `UnsupportedOperationError` for a tensor of another device.
    """
    if not tensor.is_cpu:
        raise UnsupportedOperationError(
            f"this backend moves CPU memory and was given a tensor on {tensor.device}; "
            "move it with .cpu(), or use a backend for that device"
        )
    count = tensor.nbytes
    if count == 0:
        return memoryview(bytearray())
    address = tensor.data_ptr()
    if not address:
        raise UnsupportedOperationError(
            f"a tensor of class {type(tensor).__name__} has no memory; use .to_local()"
        )
    array = (ctypes.c_char * count).from_address(address)
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def tensor_at(address: int, count: int, dtype: torch.dtype, *, keeping: object) -> Tensor:
    """A tensor of `count` elements at an address; it keeps that object alive."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    array = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    array.owner = keeping  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=dtype)


def readable_bytes(data: Tensor | Buffer) -> memoryview:
    """Return the bytes of `data` to send: a tensor (copied if it is not contiguous) or a buffer."""
    if isinstance(data, Tensor):
        return tensor_bytes(plain(data))
    return _bytes_of_buffer(memoryview(data))


def writable_bytes(into: Tensor | Buffer) -> tuple[memoryview, Tensor | None]:
    """Return memory to receive in, and the contiguous copy to read from if `into` is strided."""
    if isinstance(into, Tensor):
        if is_plain(into):
            return tensor_bytes(into.detach()), None
        stand_in = torch.empty(into.shape, dtype=into.dtype)
        return tensor_bytes(stand_in), stand_in
    view = memoryview(into)
    if view.readonly:
        raise TypeError(f"cannot receive into read-only memory ({type(into).__name__})")
    return _bytes_of_buffer(view), None


def _bytes_of_buffer(view: memoryview) -> memoryview:
    if view.nbytes == 0:  # which cannot be cast
        return memoryview(bytearray())
    return view.cast("B")


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor as plain memory: itself, an alias of its memory, or a contiguous copy."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        copy_bits(copy, tensor)
        return copy
    if tensor.is_inference():  # neither it nor a view of it may be written outside of the mode
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.detach())  # type: ignore[call-overload,no-any-return]
    return tensor.detach() if tensor.requires_grad else tensor


def outside_inference_mode(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function outside of `torch.inference_mode()`, and return what it returns.

    A tensor made in that mode cannot be written by other threads, or later. A function that makes
    tensors asks whether it is in the mode, and calls itself so: no decorator, which would be one
    more call on the way of every message.
    """
    with torch.inference_mode(mode=False):
        return function(*args, **kwargs)


def copy_bits(into: Tensor, values: Tensor) -> None:
    """Copy values of one dtype, bit for bit, also of dtypes for which torch has no copy."""
    dtype = values.dtype
    if dtype not in _COPIED:
        as_bits = _BITS[dtype.itemsize]
        into, values = into.view(as_bits), values.detach().view(as_bits)
    into.copy_(values.detach())


_COPIED = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
        *(torch.complex32, torch.complex64, torch.complex128),
    }
)
_BITS: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)


NO_DISPATCH = Tensor.__torch_dispatch__  # of classes of tensors that have memory of their own


def why_not_movable(tensor: Tensor, devices: Container[str]) -> str | None:
    """Return why a tensor's memory cannot be moved, for a message; None if it can."""
    if not tensor.is_cpu and tensor.device.type not in devices:
        return f"one on {tensor.device}; move it with .cpu(), or use a backend for that device"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a {tensor.layout} one; convert it with .to_dense()"
    if tensor.is_quantized:
        return "a quantized one; send its .int_repr(), and its scale"
    if type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is not NO_DISPATCH:
        return f"one of class {type(tensor).__name__}, without memory; use .to_local()"
    return None


def check_distinct(tensor: Tensor) -> None:
    """Raise `MisuseError` if several elements lie in one place, as in a result of `expand`."""
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise MisuseError(
            f"a tensor of shape {list(tensor.shape)} has several elements in one place (strides "
            f"{list(tensor.stride())}), which cannot hold several results; use .contiguous()"
        )


def is_plain(tensor: Tensor) -> bool:
    """Return whether the values lie one after the other, none negated or conjugated."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
