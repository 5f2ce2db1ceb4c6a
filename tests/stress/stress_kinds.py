"""The collectives of random programs: one row each, with what it is given and what it must give.

A row is found by the function's name in `phalanx`; what `async_` and the underscore at the end
change is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from stress_program import Op
from stress_values import numbers, reduced

import phalanx
from phalanx import Backend, PendingCollective, ReduceOp
from phalanx.collectives.schedules import COLLECTIVES

Value = Any  # a tensor, a list of them, an object, or None
Given = Callable[[Op, int, int], Value]  # (op, rank, size) -> what a rank brings
Expected = Callable[[Op, int, list[Value]], list[Value]]  # (op, size, all brought) -> all get
Call = Callable[[Op, Backend, Value, Value, Callable[..., Any]], Any]


class Kind(NamedTuple):
    """One collective.

    forms       what can be done with its result
    background  whether there is an asynchronous form
    given       what each rank brings, whole numbers in tensors
    expected    what each rank gets
    call        calls it, and returns its result or what is pending
    """

    forms: tuple[str, ...]
    expected: Expected
    call: Call
    given: Given = lambda op, rank, size: numbers(op, rank, op.shape)
    reduces: bool = False
    rooted: bool = False
    cuts: bool = False  # dim 0 has to be divisible by the number of ranks
    joins: bool = False  # needs a dim 0
    background: bool = True

    def algorithms(self, name: str) -> tuple[str, ...]:
        """Those that the collective has."""
        return ("auto", *COLLECTIVES.get(name, ()))


# ------------------------------------------------------------------------------- what must come


def _joined(op: Op, given: list[Value]) -> Value:
    return torch.cat([each if each.dim() else each.reshape(1) for each in given])


def _all_reduce(op: Op, size: int, given: list[Value]) -> list[Value]:
    return [reduced(given, op)] * size


def _reduce(op: Op, size: int, given: list[Value]) -> list[Value]:
    # In place, the others get back what they gave.
    others = given if op.form == "in_place" else [None] * size
    return [reduced(given, op) if rank == op.root else others[rank] for rank in range(size)]


def _reduce_scatter(op: Op, size: int, given: list[Value]) -> list[Value]:
    return list(reduced(given, op).chunk(size)) if op.shape[0] else [reduced(given, op)] * size


def _all_gather(op: Op, size: int, given: list[Value]) -> list[Value]:
    return [_joined(op, given)] * size


def _gather(op: Op, size: int, given: list[Value]) -> list[Value]:
    return [_joined(op, given) if rank == op.root else None for rank in range(size)]


def _broadcast(op: Op, size: int, given: list[Value]) -> list[Value]:
    return [given[op.root]] * size


def _scatter(op: Op, size: int, given: list[Value]) -> list[Value]:
    return list(given[op.root].split(op.shape[0] // size)) if op.shape[0] else given


def _all_to_all(op: Op, size: int, given: list[Value]) -> list[Value]:
    if not op.shape[0]:
        return given
    cut = [each.split(op.shape[0] // size) for each in given]
    return [torch.cat([slices[rank] for slices in cut]) for rank in range(size)]


def _rows(op: Op, src: int, dst: int) -> int:
    """How many rows go from one rank to another in an uneven exchange."""
    return (op.shape[0] + 3 * src + 5 * dst + op.number) % 4


def _uneven(op: Op, size: int, given: list[Value]) -> list[Value]:
    ranks = range(size)
    cut = [given[src].split([_rows(op, src, dst) for dst in ranks]) for src in ranks]
    return [torch.cat([cut[src][dst] for src in ranks]) for dst in ranks]


def _coalesced(op: Op, size: int, given: list[Value]) -> list[Value]:
    return [[reduced(list(each), op) for each in zip(*given, strict=True)]] * size


def _exchange(op: Op, size: int, given: list[Value]) -> list[Value]:
    return [given[(rank - op.root) % size] for rank in range(size)]


# ------------------------------------------------------------------------------ how it is called


def _function(op: Op) -> Callable[..., Any]:
    name = ("async_" if op.asynchronous else "") + op.kind
    return getattr(phalanx, name + ("_" if op.form == "in_place" else ""))  # type: ignore[no-any-return]


def _plain(
    op: Op, backend: Backend, given: Value, into: Value, function: Callable[..., Any]
) -> Any:
    options: dict[str, Any] = {"algorithm": op.algorithm}
    kind = KINDS[op.kind]
    if kind.reduces:
        options["op"] = ReduceOp[op.reduce]
    if kind.rooted:
        options["root"] = op.root
    if into is not None:
        options["into"] = into
    return function(given, backend, **options)


def _barrier_call(op: Op, backend: Backend, given: Value, into: Value, function: Any) -> Any:
    return function(backend)


def _object_call(op: Op, backend: Backend, given: Value, into: Value, function: Any) -> Any:
    options = {"root": op.root} if KINDS[op.kind].rooted else {}
    return function(given, backend, **options)


def _uneven_call(op: Op, backend: Backend, given: Value, into: Value, function: Any) -> Any:
    ranks, rank = range(backend.world_size), backend.rank
    sends = [_rows(op, rank, other) for other in ranks]
    receives = [_rows(op, other, rank) for other in ranks]
    return function(given, backend, sends, receives, algorithm=op.algorithm, into=into)


def _exchange_call(op: Op, backend: Backend, given: Value, into: Value, function: Any) -> Any:
    rank, size = backend.rank, backend.world_size
    right, left = (rank + op.root) % size, (rank - op.root) % size
    if right == rank:
        into.copy_(given)
    else:
        phalanx.sendrecv(given, backend, right, into, left, tag=op.tag)
    return into


def _an_object(op: Op, rank: int, size: int) -> Value:
    return {
        "rank": rank,
        "list": [op.number / 4, None, rank % 2 == 0, "Straße" * rank, b"\0\1" * op.number],
        "tensor": (numbers(op, rank, op.shape).to(op.dtype), ()),
    }


_ALL = ("new", "into", "in_place")
_NO_PLACE = ("new", "into")

# fmt: off
KINDS: Mapping[str, Kind] = MappingProxyType({
    "all_reduce":        Kind(_ALL, _all_reduce, _plain, reduces=True),
    "reduce":            Kind(_ALL, _reduce, _plain, reduces=True, rooted=True),
    "reduce_scatter":    Kind(_NO_PLACE, _reduce_scatter, _plain, reduces=True, cuts=True),
    "all_gather":        Kind(_NO_PLACE, _all_gather, _plain),
    "gather":            Kind(_NO_PLACE, _gather, _plain, rooted=True),
    "broadcast":         Kind(_ALL, _broadcast, _plain, rooted=True),
    "scatter":           Kind(_NO_PLACE, _scatter, _plain, rooted=True, cuts=True),
    "all_to_all":        Kind(_NO_PLACE, _all_to_all, _plain, cuts=True),
    "all_to_all_uneven": Kind(_NO_PLACE, _uneven, _uneven_call, joins=True,
        given=lambda op, rank, size: numbers(
            op, rank, (sum(_rows(op, rank, other) for other in range(size)), *op.shape[1:]))),
    "all_reduce_coalesced": Kind(("new", "in_place"), _coalesced, _plain, reduces=True,
        given=lambda op, rank, size: [
            numbers(op, rank, shape, salt) for salt, shape in enumerate((op.shape, (), (3, 2)))]),
    "all_gather_object": Kind(("new",), lambda op, size, given: [given] * size, _object_call,
        given=_an_object),
    "broadcast_object":  Kind(("new",), _broadcast, _object_call, given=_an_object, rooted=True),
    "barrier":           Kind(("new",), lambda op, size, given: [None] * size, _barrier_call,
        given=lambda op, rank, size: None),
    "exchange":          Kind(("into",), _exchange, _exchange_call, background=False),
})
# fmt: on


def begin(op: Op, backend: Backend, given: Value, into: Value) -> PendingCollective[Any] | Any:
    """Call the operation: its result, or what is pending if it is asynchronous."""
    function = _function(op) if op.kind != "exchange" else phalanx.sendrecv
    return KINDS[op.kind].call(op, backend, given, into, function)
