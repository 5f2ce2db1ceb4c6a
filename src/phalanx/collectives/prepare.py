"""The memory of a collective: what is worked on, and what the caller gets of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.memory import check_on_cpu, copy_bits, is_plain, plain
from phalanx.errors import MisuseError, SizeMismatchError, UnsupportedOperationError

__all__ = [
    "Prepared",
    "check_distinct",
    "check_into",
    "check_slices",
    "check_tensor",
    "copy_bits",
    "empty",
    "finish_into",
    "fresh",
    "in_place",
    "outgoing",
    "plain",
]


class Prepared(NamedTuple):
    """A collective's memory: what is worked on, and what the caller gets of it afterwards."""

    work: Tensor  # contiguous; may be overwritten
    result: Callable[[], Tensor]


def fresh(tensor: Tensor, backend: Backend, into: Tensor | None, op: str) -> Prepared:
    """Work on a copy of `tensor`, in `into` if that is given; the result is that memory."""
    check_tensor(tensor, backend, op)
    prepared = empty(tuple(tensor.shape), tensor.dtype, backend, into, op)
    copy_bits(prepared.work, tensor)
    return prepared


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, backend: Backend, into: Tensor | None, op: str
) -> Prepared:
    """Work on uninitialized memory, in `into` if that is given; the result is that memory."""
    check_into(into, shape, dtype, backend, op)
    if into is None:
        work = backend.empty(*shape, dtype=dtype)
        return Prepared(work, lambda: work)
    work = into.detach() if is_plain(into) else backend.empty(*shape, dtype=dtype)
    return Prepared(work, lambda: finish_into(into, work))


def in_place(tensor: Tensor) -> Prepared:
    """Work on `tensor` itself, or on a contiguous copy that is copied back."""
    if not tensor.is_cpu:
        check_on_cpu(tensor)
    check_distinct(tensor)
    work = plain(tensor)
    return Prepared(work, lambda: finish_into(tensor, work))


def outgoing(tensor: Tensor, into: Tensor | None) -> Tensor:
    """`plain`, and in other memory than `into`, which is written while this is still sent."""
    values = plain(tensor)
    if into is None or values.untyped_storage().data_ptr() != into.untyped_storage().data_ptr():
        return values
    copy = torch.empty(values.shape, dtype=values.dtype)
    copy_bits(copy, values)
    return copy


def finish_into(into: Tensor, work: Tensor) -> Tensor:
    """`into` with the values of `work`; autograd is told that it changed."""
    if into.data_ptr() != work.data_ptr() or not is_plain(into):
        copy_bits(into.detach(), work)
    torch.autograd.graph.increment_version(into)
    return into


# ------------------------------------------------------------------------------------------ checks


def check_tensor(tensor: Tensor, backend: Backend, op: str) -> None:
    """Raise unless `tensor` is one whose memory can be moved: dense, and the processor's."""
    rank = backend.rank
    if not isinstance(tensor, Tensor):
        raise TypeError(f"rank {rank}: {op} takes a tensor, not {type(tensor).__name__}")
    problem = None
    if not tensor.is_cpu:
        problem = f"one on {tensor.device}; move it with .cpu(), or use a backend for that device"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        problem = f"a {tensor.layout} one; convert it with .to_dense()"
    elif tensor.is_quantized:
        problem = "a quantized one; send its .int_repr(), and its scale"
    if problem is not None:
        raise UnsupportedOperationError(
            f"rank {rank}: {op} moves dense CPU tensors and was given {problem}", rank=rank, op=op
        )


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
