"""torch's methods as requests of Phalanx: one table, `OPERATIONS`.

    torch's method        its arguments                     ours
    allreduce             tensors, op                       all_reduce_
    allgather             lists of results, tensors         all_gather into one tensor, taken apart

A row turns torch's arguments into a request, which is not issued yet; so wrong arguments are
refused before anything is sent. A list of tensors is handled as one tensor: the memory itself if
the tensors are adjacent in it, else a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp as TorchReduceOp
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from typing_extensions import override

from phalanx import collectives as ours
from phalanx.collectives.request import Request, finish_into
from phalanx.core.backend import Backend
from phalanx.core.reduce_op import ReduceOp
from phalanx.core.work import Work
from phalanx.errors import SizeMismatchError, UnsupportedOperationError
from phalanx.wire.memory import copy_bits, is_plain, plain

REDUCE_OPS: Mapping[Any, ReduceOp] = MappingProxyType(
    {
        TorchReduceOp(getattr(TorchReduceOp, "AVG" if op is ReduceOp.MEAN else op.name)): op
        for op in ReduceOp
    }
)


class Settings(NamedTuple):
    """The arguments of a call beside its tensors.

    timeout  None for the group's
    factor   of PREMUL_SUM: this rank's input is multiplied by it first
    """

    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    timeout: float | None = None
    factor: float = 1.0


class CallRequest(NamedTuple):
    """A request, and the tensors that receive its results."""

    request: Request[Any]
    tensors: Sequence[Tensor]


# ------------------------------------------------------------------------------
# Requests that are not one collective.


@dataclass(slots=True)
class SingleRequest(Request[Any]):
    """A request of two functions: the blocking call, and the one that begins it."""

    blocking: Callable[[], Any]
    begin: Callable[..., Work[Any]]

    @override
    def run(self) -> Any:
        return self.blocking()

    @override
    def issue(self, *, background: bool = True) -> Work[Any]:
        return self.begin(background=background)


@dataclass(slots=True)
class BatchedRequests(Request[None]):
    """Several collectives of one group, in order: all are done when the last one is."""

    requests: Sequence[Any]

    @override
    def run(self) -> None:
        for request in self.requests:
            request.run()

    @override
    def issue(self, *, background: bool = True) -> Work[Any]:
        *others, last = self.requests
        works = [request.issue(background=background) for request in others]
        finish_after(last, lambda: [work.wait() for work in works])
        return last.issue(background=background)  # type: ignore[no-any-return]


def finish_after(request: Any, finish: Callable[[], object]) -> None:
    """Let a request end with `finish()`, after its result is there."""
    result = request.result

    def both() -> Any:
        value = result()
        finish()
        return value

    request.result = both


# ------------------------------------------------------------------------------
# Tensors and lists of tensors as one flat tensor.


def refuse(problem: str, backend: Backend, op: str) -> SizeMismatchError:
    """Return the error for lists that do not fit."""
    return SizeMismatchError(f"rank {backend.rank}: {op}: {problem}", rank=backend.rank, op=op)


def only(tensors: Any, backend: Backend, op: str) -> Any:
    """Return the one element of a list of one; anything but a list unchanged."""
    if not isinstance(tensors, (list, tuple)):
        return tensors
    if len(tensors) != 1:
        problem = f"it takes one tensor a call, not a list of {len(tensors)}: call it for each"
        raise refuse(problem, backend, op)
    return tensors[0]


def only_list(lists: Any, backend: Backend, op: str) -> Any:
    """The one list of a list of one; or what is itself a list of tensors."""
    return lists if lists and isinstance(lists[0], Tensor) else only(lists, backend, op)


def memory_of(tensor: Tensor) -> Tensor:
    """Return the tensor's memory, as a tensor with a version counter of its own.

    Autograd does not learn that a collective changes a tensor: it uses a saved tensor with its
    values of that time, as with torch's own backends. Waits for the result of a functional
    collective, which has no memory before.
    """
    if type(tensor) is not Tensor and isinstance(tensor, AsyncCollectiveTensor):
        waiting: Any = tensor
        tensor = waiting.trigger_wait()
    return tensor.data


def flat(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, in one dimension: its memory, or a contiguous copy."""
    return plain(memory_of(tensor)).view(-1)


def check_list(
    tensors: Sequence[Tensor], like: Tensor | None, backend: Backend, op: str
) -> list[Tensor]:
    """Return the list; raise unless each rank has a tensor of the dtype and size of `like`."""
    listed = list(tensors)
    if len(listed) != backend.world_size:
        raise refuse(
            f"there is one tensor for each of {backend.world_size} ranks, not {len(listed)}",
            backend,
            op,
        )
    first = listed[0] if like is None else like
    for place, tensor in enumerate(listed):
        if tensor.dtype != first.dtype or (like is not None and tensor.numel() != first.numel()):
            raise refuse(
                f"the tensor for rank {place} in the list is {tensor.dtype} {list(tensor.shape)}, "
                f"and should be as {first.dtype} {list(first.shape)}",
                backend,
                op,
            )
    return listed


def check_whole(name: str, whole: Tensor, part: Tensor, backend: Backend, op: str) -> None:
    """Raise unless one tensor, called `name`, is as large as the parts of all ranks together."""
    if whole.numel() != part.numel() * backend.world_size or whole.dtype != part.dtype:
        raise refuse(
            f"the {name} is {whole.dtype} {list(whole.shape)}, and holds {backend.world_size} "
            f"times {part.dtype} {list(part.shape)}",
            backend,
            op,
        )


def check_lists(
    lists: Sequence[Sequence[Tensor]], count: int, backend: Backend, op: str
) -> list[list[Tensor]]:
    """Return the lists; raise unless each rank has one, of `count` tensors."""
    if len(lists) != backend.world_size or any(len(each) != count for each in lists):
        raise refuse(
            f"there is one list of {count} tensors for each of {backend.world_size} ranks, not "
            f"lists of {', '.join(str(len(each)) for each in lists) or 'none'}",
            backend,
            op,
        )
    return [list(each) for each in lists]


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the memory of tensors that are adjacent in one storage; None if they are not."""
    first = tensors[0]
    place = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place or not is_plain(tensor) or tensor.device != first.device:
            return None
        place += tensor.nbytes
    if place - first.data_ptr() == 0 or first.data_ptr() == 0:  # without elements, or memory
        return None
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():
        return None  # neighbours by chance, in two storages
    count = sum(tensor.numel() for tensor in tensors)
    return first.as_strided((count,), (1,))


def joined(tensors: Sequence[Tensor], backend: Backend) -> Tensor:
    """Return the values of some tensors as one flat tensor."""
    tensors = list(map(memory_of, tensors))
    whole = adjacent(tensors)
    if whole is None:
        whole = _room(tensors, backend)
        for tensor, part in _parts(tensors, whole):
            copy_bits(part, tensor)
    return whole


def _room(tensors: Sequence[Tensor], backend: Backend) -> Tensor:
    first, count = tensors[0], sum(tensor.numel() for tensor in tensors)
    return backend.empty(count, dtype=first.dtype, device=first.device)


def _parts(tensors: Sequence[Tensor], whole: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor and its part of the whole, in its shape."""
    parts = torch.split(whole, [tensor.numel() for tensor in tensors])
    return [(t, part.view(t.shape)) for t, part in zip(tensors, parts, strict=True)]


def taken_apart(
    tensors: Sequence[Tensor], backend: Backend, request: Callable[[Tensor], Any]
) -> Any:
    """Return `request(into)` for flat memory, whose parts are copied to some tensors at the end."""
    tensors = list(map(memory_of, tensors))
    whole = adjacent(tensors)
    if whole is not None:
        return request(whole)
    whole = _room(tensors, backend)
    made = request(whole)
    finish_after(made, lambda: [finish_into(t, part) for t, part in _parts(tensors, whole)])
    return made


def _ask(function: Any, given: Any, *arguments: Any, **options: Any) -> Any:
    """Return the request of a Phalanx collective, on the memory of a tensor if one is given."""
    memory = memory_of(given) if isinstance(given, Tensor) else given
    return function.request(memory, *arguments, **options)


def _ask_into(
    function: Any, results: Sequence[Tensor], given: Any, backend: Backend, *more: Any, **o: Any
) -> CallRequest:
    """The same, with its results in these tensors."""

    def request(into: Tensor) -> Any:
        return _ask(function, given, backend, *more, into=into, **o)

    return CallRequest(taken_apart(results, backend, request), results)


# ------------------------------------------------------------------------------
# The rows.


def _all_reduce(backend: Backend, s: Settings, tensors: Any) -> CallRequest:
    tensor = only(tensors, backend, "all_reduce")
    if tensor.is_sparse:
        return CallRequest(_sparse_all_reduce(backend, s, tensor), (tensor,))
    return CallRequest(_ask(ours.all_reduce_, tensor, backend, s.op, timeout=s.timeout), (tensor,))


def _sparse_all_reduce(backend: Backend, s: Settings, tensor: Tensor) -> Request[Any]:
    """Return the sum of sparse tensors: every rank gets the elements of all."""
    if s.op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise UnsupportedOperationError(
            f"rank {backend.rank}: all_reduce of sparse tensors sums or averages, {s.op} is for "
            "dense ones: use .to_dense()",
            rank=backend.rank,
            op="all_reduce",
        )
    own = tensor.detach().coalesce()
    label = f"sparse {tensor.dtype} {list(tensor.shape)}, {s.op.value}"
    parts = (own.indices().contiguous(), own.values().contiguous())
    request = _ask(ours.all_gather_object, parts, backend, label=label, timeout=s.timeout)
    gathered = request.result

    def result() -> None:
        total = torch.zeros_like(own)
        for indices, values in gathered():
            total += torch.sparse_coo_tensor(indices, values, own.shape, check_invariants=False)
        if s.op is ReduceOp.MEAN:
            total /= backend.world_size
        with torch.inference_mode(mode=tensor.is_inference()), torch.no_grad():
            tensor.copy_(total.coalesce())

    request.result = result
    return request  # type: ignore[no-any-return]


def _all_reduce_coalesced(backend: Backend, s: Settings, tensors: list[Tensor]) -> CallRequest:
    memory = list(map(memory_of, tensors))
    request = _ask(ours.all_reduce_coalesced_, memory, backend, s.op, timeout=s.timeout)
    return CallRequest(request, tensors)


def _broadcast(backend: Backend, s: Settings, tensors: Any) -> CallRequest:
    tensor = only(tensors, backend, "broadcast")
    return CallRequest(_ask(ours.broadcast_, tensor, backend, s.root, timeout=s.timeout), (tensor,))


def _reduce(backend: Backend, s: Settings, tensors: Any) -> CallRequest:
    tensor = only(tensors, backend, "reduce")
    request = _ask(ours.reduce_, tensor, backend, s.root, s.op, timeout=s.timeout)
    return CallRequest(request, (tensor,))


def _all_gather(backend: Backend, s: Settings, outputs: Any, inputs: Any) -> CallRequest:
    source = only(inputs, backend, "all_gather")
    results = check_list(only_list(outputs, backend, "all_gather"), source, backend, "all_gather")
    return _ask_into(ours.all_gather, results, flat(source), backend, timeout=s.timeout)


def _all_gather_single(
    backend: Backend, s: Settings, output: Tensor, source: Tensor
) -> CallRequest:
    check_whole("output", output, source, backend, "all_gather")
    return _ask_into(ours.all_gather, [output], flat(source), backend, timeout=s.timeout)


def _gather(backend: Backend, s: Settings, outputs: Any, inputs: Any) -> CallRequest:
    source = only(inputs, backend, "gather")
    if backend.check_rank(s.root, "root") != backend.rank:
        request = _ask(ours.gather, flat(source), backend, s.root, timeout=s.timeout)
        return CallRequest(request, ())
    results = check_list(only_list(outputs, backend, "gather"), source, backend, "gather")
    return _ask_into(ours.gather, results, flat(source), backend, s.root, timeout=s.timeout)


def _scatter(backend: Backend, s: Settings, outputs: Any, inputs: Any) -> CallRequest:
    output = only(outputs, backend, "scatter")
    whole = None
    if backend.check_rank(s.root, "root") == backend.rank:
        lists = only_list(inputs, backend, "scatter")
        whole = joined(check_list(lists, output, backend, "scatter"), backend)
    return _ask_into(ours.scatter, [output], whole, backend, s.root, timeout=s.timeout)


def _reduce_scatter(backend: Backend, s: Settings, outputs: Any, inputs: Any) -> CallRequest:
    output = only(outputs, backend, "reduce_scatter")
    lists = only_list(inputs, backend, "reduce_scatter")
    whole = joined(check_list(lists, output, backend, "reduce_scatter"), backend)
    return _ask_into(ours.reduce_scatter, [output], whole, backend, s.op, timeout=s.timeout)


def _reduce_scatter_single(
    backend: Backend, s: Settings, output: Tensor, source: Tensor
) -> CallRequest:
    check_whole("input", source, output, backend, "reduce_scatter")
    return _ask_into(ours.reduce_scatter, [output], flat(source), backend, s.op, timeout=s.timeout)


def _all_to_all(backend: Backend, s: Settings, outputs: Any, inputs: Any) -> CallRequest:
    results = check_list(outputs, None, backend, "all_to_all")
    sources = check_list(inputs, None, backend, "all_to_all")
    sends, receives = ([each.numel() for each in listed] for listed in (sources, results))
    whole, sizes = joined(sources, backend), (sends, receives)
    return _ask_into(ours.all_to_all_uneven, results, whole, backend, *sizes, timeout=s.timeout)


def _all_to_all_single(
    backend: Backend,
    s: Settings,
    output: Tensor,
    source: Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
) -> CallRequest:
    sizes = _elements(source, input_rows, backend), _elements(output, output_rows, backend)
    if not (output_rows or input_rows):
        return _ask_into(ours.all_to_all, [output], flat(source), backend, timeout=s.timeout)
    uneven, whole = ours.all_to_all_uneven, flat(source)
    return _ask_into(uneven, [output], whole, backend, *sizes, timeout=s.timeout)


def _elements(tensor: Tensor, rows: Sequence[int], backend: Backend) -> list[int]:
    """Return how many elements each rank gets of a tensor that is cut along dim 0."""
    size = backend.world_size
    first = tensor.shape[0] if tensor.dim() else 0
    if not rows:
        if first % size:
            raise refuse(
                f"dim 0 of {list(tensor.shape)} does not divide by the {size} ranks",
                backend,
                "all_to_all",
            )
        return [tensor.numel() // size] * size
    if len(rows) != size or sum(rows) != first:
        raise refuse(
            f"split sizes {list(rows)} are not {size} numbers that add up to dim 0 of "
            f"{list(tensor.shape)}",
            backend,
            "all_to_all",
        )
    return [count * (tensor.numel() // max(first, 1)) for count in rows]


def _each(row: Callable[..., CallRequest]) -> Callable[..., CallRequest]:
    """Return a row's form for lists of its arguments: one request after the other."""

    def several(backend: Backend, s: Settings, outputs: Any, inputs: Any) -> CallRequest:
        if len(outputs) != len(inputs) or not inputs:
            raise refuse(
                f"{len(outputs)} outputs for {len(inputs)} inputs", backend, row.__name__[1:]
            )
        asked = [row(backend, s, *pair) for pair in zip(outputs, inputs, strict=True)]
        tensors = [tensor for each in asked for tensor in each.tensors]
        return CallRequest(BatchedRequests([each.request for each in asked]), tensors)

    return several


def _all_gather_coalesced(backend: Backend, s: Settings, outputs: Any, inputs: Any) -> CallRequest:
    of_ranks = check_lists(outputs, len(inputs), backend, "all_gather_coalesced")
    results = [[[tensors[n] for tensors in of_ranks]] for n in range(len(inputs))]
    return _each(_all_gather)(backend, s, results, [[each] for each in inputs])


def _barrier(backend: Backend, s: Settings) -> CallRequest:
    def blocking() -> None:
        backend.barrier(timeout=s.timeout)

    def begin(*, background: bool) -> Work[Any]:
        return backend.ibarrier(timeout=s.timeout, background=background)

    return CallRequest(SingleRequest(blocking, begin), ())


class Operation(NamedTuple):
    """A row of the table.

    name    for the profiler and errors
    ask     makes the request of a backend, settings, and the tensors
    tensors  number of torch's arguments that are tensors, or sizes of these
    short   arguments after these in the short form, instead of options
    """

    name: str
    ask: Callable[..., CallRequest]
    tensors: int
    short: tuple[str, ...] = ()


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "allreduce": Operation("all_reduce", _all_reduce, 1, ("op",)),
        "allreduce_coalesced": Operation("all_reduce_coalesced", _all_reduce_coalesced, 1, ("op",)),
        "broadcast": Operation("broadcast", _broadcast, 1, ("root",)),
        "reduce": Operation("reduce", _reduce, 1, ("root", "op")),
        "allgather": Operation("all_gather", _all_gather, 2),
        "all_gather_single": Operation("all_gather", _all_gather_single, 2),
        "allgather_coalesced": Operation("all_gather", _all_gather_coalesced, 2),
        "all_gather_single_coalesced": Operation("all_gather", _each(_all_gather_single), 2),
        "gather": Operation("gather", _gather, 2, ("root",)),
        "scatter": Operation("scatter", _scatter, 2, ("root",)),
        "reduce_scatter": Operation("reduce_scatter", _reduce_scatter, 2, ("op",)),
        "reduce_scatter_single": Operation("reduce_scatter", _reduce_scatter_single, 2, ("op",)),
        "reduce_scatter_single_coalesced": Operation(
            "reduce_scatter", _each(_reduce_scatter_single), 2, ("op",)
        ),
        "alltoall": Operation("all_to_all", _all_to_all, 2),
        "all_to_all_single": Operation("all_to_all", _all_to_all_single, 4),
        "barrier": Operation("barrier", _barrier, 0),
    }
)
"""torch's name for the method -> its request."""

OLD_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "_allgather_base": "all_gather_single",
        "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
        "_reduce_scatter_base": "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
        "alltoall_base": "all_to_all_single",
    }
)
"""torch's older name for a method -> the newer one."""
