"""A request: one collective of one rank, with its memory, before its algorithm is decided.

    @collective
    def all_reduce(tensor, backend, ...) -> Request[Tensor]     checks the arguments, and returns
                                                                the request: written once
    all_reduce(tensor, backend)                                 blocks, and returns the result
    async_all_reduce = asynchronous(all_reduce)                 returns at once, a `Work`

`resolve.py` decides how to carry out a request: by another library, in shared memory, or by rounds
of messages.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from phalanx.core.backend import Backend
from phalanx.core.steps import Program
from phalanx.core.work import Work
from phalanx.errors import SizeMismatchError
from phalanx.wire.memory import (
    check_distinct,
    copy_bits,
    is_plain,
    outside_inference_mode,
    plain,
    why_not_movable,
)

PendingCollective = Work  # its public name

# Bytes that a rank gives at most in a small collective, which copies them in any case, also where
# memory is shared.
SMALL = 64 << 10

P = ParamSpec("P")
T = TypeVar("T")


class Request(ABC, Generic[T]):
    """One call of a collective, not yet begun."""

    def run(self) -> T:
        """Carry it out and return its result. Blocks."""
        return self.issue(background=False).wait()

    @abstractmethod
    def issue(self, *, background: bool = True) -> Work[T]:
        """Begin it. Returns at once; with `background`, it moves on while nobody waits for it."""


@dataclass(slots=True)
class ProgramRequest(Request[T]):
    """A collective whose rounds are no plan of a schedule: a program of its own."""

    backend: Backend
    name: str
    program: Iterable[Program]
    buffers: tuple[memoryview, ...]
    result: Callable[[], T]
    signature: str
    timeout: float | None = None

    @override
    def issue(self, *, background: bool = True) -> Work[T]:
        fingerprint = xxh3_64_intdigest(f"{self.name} {self.signature}".encode())
        arguments = self.buffers, None, self.signature, fingerprint, self.timeout
        return self.backend.issue(
            self.name, self.program, *arguments, result=self.result, background=background
        )


def collective(define: Callable[P, Request[T]]) -> Callable[P, T]:
    """Return the blocking form of a collective, from the function that makes its request."""

    @wraps(define)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return outside_inference_mode(run, *args, **kwargs)
        return define(*args, **kwargs).run()

    run.request = define  # type: ignore[attr-defined]
    _annotate(run, define, "{}")
    return run


def asynchronous(blocking: Callable[P, T]) -> Callable[P, Work[T]]:
    """Return the form of a collective that returns at once."""
    define: Callable[P, Request[T]] = blocking.request  # type: ignore[attr-defined]
    name = define.__name__

    @wraps(define)
    def issue(*args: P.args, **kwargs: P.kwargs) -> Work[T]:
        if torch.is_inference_mode_enabled():
            return outside_inference_mode(issue, *args, **kwargs)
        return define(*args, **kwargs).issue()

    issue.__name__ = issue.__qualname__ = f"async_{name}"
    issue.__doc__ = (
        f"`{name}` that returns at once; `wait()` of what it returns gives the result.\n\n"
        f"    {name}: {define.__doc__}"
    )
    _annotate(issue, define, "PendingCollective[{}]")
    return issue


def _annotate(form: Callable[..., object], define: Callable[..., object], result: str) -> None:
    """Let `help` and `inspect.signature` show this form's result, instead of a request."""
    signature = inspect.signature(define)
    returns = str(signature.return_annotation)
    returned = result.format(returns[returns.index("[") + 1 : -1])
    form.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    form.__annotations__ = {**define.__annotations__, "return": returned}


# ------------------------------------------------------------------------------
# Checks of a collective's tensors, before anything is sent.


def check_backend(backend: object, call: str, *others: object) -> None:
    """Raise TypeError, which shows the `call`, unless `backend` is one, rather than an other."""
    if isinstance(backend, Backend):
        return
    if hasattr(type(backend), "__getattr__"):
        _ = backend.rank  # type: ignore[attr-defined]  # a DeviceMesh says what to give instead
    rank = next((f"rank {other.rank}: " for other in others if isinstance(other, Backend)), "")
    raise TypeError(f"{rank}{call} takes the backend second, not {type(backend).__name__}")


def check_tensor(tensor: Tensor, backend: Backend, op: str) -> None:
    """Raise unless `tensor` can be moved: dense, and on a device of the backend."""
    if not isinstance(tensor, Tensor) or not isinstance(backend, Backend):
        raise _no_tensor(tensor, backend, op)
    if why_not_movable(tensor, backend.devices) is not None:
        backend.check_movable(tensor, op)  # raises


def _no_tensor(tensor: object, backend: Any, op: str) -> TypeError:
    check_backend(backend, f"{op}(tensor, backend, ...)", tensor)
    return TypeError(f"rank {backend.rank}: {op} takes a tensor, not {type(tensor).__name__}")


def check_into(
    into: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    backend: Backend,
    op: str,
    *,
    device: torch.device,
) -> None:
    """Raise `SizeMismatchError` unless `into` can hold the result, on that device."""
    if not isinstance(into, Tensor):
        raise _no_tensor(into, backend, f"{op}: into=")
    check_tensor(into, backend, op)
    check_distinct(into)
    if into.shape != shape or into.dtype != dtype or into.device != device:
        where, there = "", ""
        if into.device != device:
            where, there = f" on {into.device}", f" on {device}"
        raise SizeMismatchError(
            f"rank {backend.rank}: {op}: into= is {into.dtype} {list(into.shape)}{where}, the "
            f"result is {dtype} {list(shape)}{there}",
            rank=backend.rank,
            op=op,
        )


def check_slices(shape: tuple[int, ...], backend: Backend, op: str) -> tuple[int, ...]:
    """Return the shape of one of p slices of dim 0; `SizeMismatchError` if that does not divide."""
    size = backend.world_size
    if not shape or shape[0] % size:
        advice = f"pad dim 0 to a multiple of {size}" if shape else "it has no dim 0"
        raise SizeMismatchError(
            f"rank {backend.rank}: {op} cuts dim 0 into {size} slices, one for each rank, and "
            f"cannot cut a tensor of shape {list(shape)}; {advice}",
            rank=backend.rank,
            op=op,
        )
    return (shape[0] // size, *shape[1:])


# ------------------------------------------------------------------------------
# Memory for inputs and results.


def out_for(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    backend: Backend,
    into: Tensor | None,
    op: str,
    *,
    device: torch.device,
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return uninitialized contiguous memory for a result, and the function that returns that.

    The memory is `into`, if that is given; else new, on the device.

    Raises `SizeMismatchError` if `into` does not fit.
    """
    if into is None:
        if prod(shape) * dtype.itemsize <= SMALL:  # nothing is gained by registered memory
            memory = torch.empty(shape, dtype=dtype, device=device)
        else:
            memory = backend.empty(*shape, dtype=dtype, device=device)
        return memory, lambda: memory
    check_into(into, shape, dtype, backend, op, device=device)
    empty = backend.empty
    memory = plain(into) if is_plain(into) else empty(*shape, dtype=dtype, device=into.device)
    return memory, lambda: finish_into(into, memory)


def work_in_place(tensor: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return memory to work on for `tensor`: itself, or a contiguous copy, copied back."""
    memory = plain(tensor)
    if memory is not tensor:
        check_distinct(tensor)
    return memory, partial(finish_into, tensor, memory)


def given(tensor: Tensor, out: Tensor, *, place: int | None = None) -> Tensor:
    """Return a rank's input, contiguous, and apart from `out`.

    Or else it lies in `out` at its `place`: as many times its own bytes from the beginning.
    """
    values = plain(tensor)
    start, first = values.data_ptr(), out.data_ptr()
    if start >= first + out.nbytes or first >= start + values.nbytes:
        return values
    if place is not None and start == first + place * values.nbytes:
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    copy_bits(copy, values)
    return copy


def finish_into(into: Tensor, work: Tensor) -> Tensor:
    """Return `into` with the values of `work`; tell autograd that it changed."""
    if into is not work and (into.data_ptr() != work.data_ptr() or not is_plain(into)):
        copy_bits(into.detach(), work)
    increment_version(into)
    return into
