"""Collectives of one communicator, as steps: MPI requests, one after the other.

A collective is a generator. It yields a request, and goes on when that is complete; what it does
in between is local. Blocking MPI calls are quicker in some libraries, but know no deadline, and two
groups' collectives that two ranks enter in opposite orders would wait for each other in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.backends.memory import copy_bits
from phalanx.backends.mpi.datatypes import MOST, MOVED, REDUCED
from phalanx.backends.mpi.folding import divide_
from phalanx.backends.mpi.imported import Mpi
from phalanx.backends.native import Call

Request = Any  # of mpi4py
Steps = Iterator[Request]
Memory = list[Any]  # as mpi4py takes it: where, how many, of which datatype


class Stage(NamedTuple):
    """Memory for what comes from others: all of it, and what comes from each."""

    whole: Tensor
    parts: list[Tensor]


class Communicator:
    """An MPI communicator that nobody else uses, and the ways to speak of memory to it.

    pieces   what a tensor of some length is cut into, as `exchange` has worked it out before
    """

    def __init__(self, mpi: Mpi, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.in_place = mpi.IN_PLACE
        self._at = mpi.buffer.fromaddress
        self.moved = {size: getattr(mpi, name) for size, name in MOVED.items()}
        self._reduced = {
            key: (getattr(mpi, row.datatype), getattr(mpi, row.op)) for key, row in REDUCED.items()
        }
        self.pieces: dict[Any, Any] = {}
        self._block = torch.empty(0, dtype=torch.uint8)
        self._staged: tuple[int, torch.dtype] | None = None
        self._stage = Stage(self._block, [])

    def all_of(self, tensor: Tensor) -> Memory:
        """A contiguous tensor's memory, to be moved."""
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        return [where, tensor.numel(), self.moved[tensor.itemsize]]

    def numbers(self, tensor: Tensor, op: str) -> tuple[Memory, Any]:
        """A contiguous tensor's memory, to be reduced, and MPI's operation."""
        datatype, operation = self._reduced[op, tensor.dtype]
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        return [where, tensor.numel(), datatype], operation

    def each_of(self, tensor: Tensor) -> Memory:
        """A contiguous tensor's memory, cut into one part for each rank."""
        where, count, datatype = self.all_of(tensor)
        return [where, count // self.size, datatype]

    def parts_of(self, tensor: Tensor, counts: list[int], starts: list[int]) -> Memory:
        """Parts of a contiguous tensor's memory, one for each rank, in elements."""
        where = self._at(tensor.data_ptr(), tensor.nbytes)
        return [where, (counts, starts), self.moved[tensor.itemsize]]

    def stage(self, parts: int, count: int, dtype: torch.dtype) -> Stage:
        """Memory for so many parts of so many elements; the next call gives the same again."""
        key = (count, dtype)
        if key != self._staged:
            size = parts * count * dtype.itemsize
            if self._block.numel() < size:
                self._block = torch.empty(size, dtype=torch.uint8)
            whole = self._block[:size].view(dtype)
            self._staged = key
            self._stage = Stage(whole, [whole[n * count :][:count] for n in range(parts)])
        return self._stage


def _all_reduce(c: Communicator, call: Call) -> Steps:
    source, out, op = _reduction(call)
    memory, operation = c.numbers(out, op)
    same = source.data_ptr() == out.data_ptr()
    yield c.comm.Iallreduce(c.in_place if same else c.numbers(source, op)[0], memory, operation)
    if op == "mean":
        divide_(out, c.size)


def _reduce(c: Communicator, call: Call) -> Steps:
    assert call.source is not None
    assert call.op is not None
    source, operation = c.numbers(call.source, call.op)
    if c.rank != call.root:
        yield c.comm.Ireduce(source, None, operation, call.root)
        return
    out = _given(call.out)
    same = call.source.data_ptr() == out.data_ptr()
    into = c.numbers(out, call.op)[0]
    yield c.comm.Ireduce(c.in_place if same else source, into, operation, call.root)
    if call.op == "mean":
        divide_(out, c.size)


def _reduce_scatter(c: Communicator, call: Call) -> Steps:
    source, out, op = _reduction(call)
    (where, count, datatype), operation = c.numbers(source, op)
    given = [where, count // c.size, datatype]  # the count is that of a part, by mpi4py's rules
    yield c.comm.Ireduce_scatter_block(given, c.numbers(out, op)[0], operation)
    if op == "mean":
        divide_(out, c.size)


def _broadcast(c: Communicator, call: Call) -> Steps:
    from_here = call.source if c.rank == call.root else call.out
    yield c.comm.Ibcast(c.all_of(_given(from_here)), call.root)
    if c.rank == call.root and call.out is not None and call.source is not None:
        copy_bits(call.out, call.source)


def _all_gather(c: Communicator, call: Call) -> Steps:
    source, out = _given(call.source), _given(call.out)
    yield c.comm.Iallgather(_unless_there(c, source, out), c.each_of(out))


def _gather(c: Communicator, call: Call) -> Steps:
    source = _given(call.source)
    if c.rank != call.root:
        yield c.comm.Igather(c.all_of(source), None, call.root)
        return
    out = _given(call.out)
    yield c.comm.Igather(_unless_there(c, source, out), c.each_of(out), call.root)


def _scatter(c: Communicator, call: Call) -> Steps:
    out = c.all_of(_given(call.out))
    source = c.each_of(_given(call.source)) if c.rank == call.root else None
    yield c.comm.Iscatter(source, out, call.root)


def _all_to_all(c: Communicator, call: Call) -> Steps:
    yield c.comm.Ialltoall(c.each_of(_given(call.source)), c.each_of(_given(call.out)))


def _barrier(c: Communicator, call: Call) -> Steps:
    yield c.comm.Ibarrier()


STEPS: Mapping[str, Callable[[Communicator, Call], Steps]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "reduce_scatter": _reduce_scatter,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "gather": _gather,
        "scatter": _scatter,
        "all_to_all": _all_to_all,
        "barrier": _barrier,
    }
)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _reduction(call: Call) -> tuple[Tensor, Tensor, str]:
    assert call.op is not None
    return _given(call.source), _given(call.out), call.op


def _unless_there(c: Communicator, source: Tensor, out: Tensor) -> Any:
    """What this rank gives to a gather: nothing, if it is in its place already."""
    place = out.data_ptr() + c.rank * source.nbytes
    return c.in_place if source.data_ptr() == place else c.all_of(source)


def countable(call: Call) -> bool:
    """Whether MPI can count the elements of a call."""
    tensors = (call.source, call.out)
    return all(tensor is None or tensor.numel() <= MOST for tensor in tensors)
