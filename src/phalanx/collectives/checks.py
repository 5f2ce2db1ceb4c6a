"""What is checked of the tensors that a collective is given, before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.core.backend import Backend
from phalanx.errors import MisuseError, SizeMismatchError, UnsupportedOperationError


def check_tensor(tensor: Tensor, backend: Backend, op: str) -> None:
    """Raise unless `tensor` is one that can be moved: dense, and where the backend takes it."""
    rank = backend.rank
    if not isinstance(tensor, Tensor):
        raise TypeError(f"rank {rank}: {op} takes a tensor, not {type(tensor).__name__}")
    problem = None
    if not tensor.is_cpu and tensor.device.type not in backend.devices:
        problem = f"one on {tensor.device}; move it with .cpu(), or use a backend for that device"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        problem = f"a {tensor.layout} one; convert it with .to_dense()"
    elif tensor.is_quantized:
        problem = "a quantized one; send its .int_repr(), and its scale"
    if problem is not None:
        raise UnsupportedOperationError(
            f"rank {rank}: {op} moves dense {_places(backend)} tensors and was given {problem}",
            rank=rank,
            op=op,
        )


def _places(backend: Backend) -> str:
    return " and ".join(sorted(device.upper() for device in backend.devices))


def check_distinct(tensor: Tensor) -> None:
    """Raise `MisuseError` if several elements lie in one place, as in what `expand` gives."""
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise MisuseError(
            f"a tensor of shape {list(tensor.shape)} has several elements in one place (strides "
            f"{list(tensor.stride())}), which cannot hold several results; use .contiguous()"
        )


def check_into(
    into: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, backend: Backend, op: str
) -> None:
    """Raise `SizeMismatchError` unless `into` can hold the result."""
    if into is None:
        return
    check_tensor(into, backend, op)
    check_distinct(into)
    if tuple(into.shape) != shape or into.dtype != dtype:
        raise SizeMismatchError(
            f"rank {backend.rank}: {op}: into= is {into.dtype} {list(into.shape)}, the result is "
            f"{dtype} {list(shape)}",
            rank=backend.rank,
            op=op,
        )


def check_slices(shape: tuple[int, ...], backend: Backend, op: str) -> tuple[int, ...]:
    """The shape of one of p slices of dim 0; `SizeMismatchError` if that does not divide."""
    size = backend.world_size
    if not shape or shape[0] % size:
        raise SizeMismatchError(
            f"rank {backend.rank}: {op} cuts dim 0 into {size} slices, one for each rank, and "
            f"cannot cut a tensor of shape {list(shape)}; pad dim 0 to a multiple of {size}",
            rank=backend.rank,
            op=op,
        )
    return (shape[0] // size, *shape[1:])
