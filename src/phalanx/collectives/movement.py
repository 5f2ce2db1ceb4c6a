"""The collectives that move tensors: broadcast, all_gather, gather, scatter, all_to_all.

Each is written once, as its request; the `async_` forms are made of the blocking ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from operator import index

import torch
from torch import Tensor

from phalanx.collectives.layout import Binder, exchanged, ranges_of
from phalanx.collectives.request import (
    ProgramRequest,
    Request,
    asynchronous,
    check_backend,
    check_slices,
    check_tensor,
    collective,
    given,
    out_for,
    work_in_place,
)
from phalanx.collectives.resolve import TensorRequest, checked_algorithm
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.core.backend import Backend
from phalanx.core.steps import ReceiveBytes, Round, SendBytes
from phalanx.errors import SizeMismatchError
from phalanx.wire.memory import copy_bits, plain, tensor_bytes


@collective
def broadcast(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """The tensor of rank `root`, on every rank.

    tensor      of the same shape and dtype on every rank; only the root's values matter
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    into        where to put the result, of the same shape and dtype; else a new tensor
    label, timeout   as `all_reduce` has them

    Blocks until this rank has the result (the root: until its sends are done). A binomial tree
    sends the tensor at most ceil(log2 p) times from any of p ranks, a ring about once. Raises
    `InvalidRankError` for a root that does not exist, `CollectiveTimeoutError`, `PeerLostError`,
    `DesyncError`.
    """
    check_tensor(tensor, backend, "broadcast")
    root = backend.check_rank(root, "root")
    shape, dtype = tensor.shape, tensor.dtype
    out, result = out_for(shape, dtype, backend, into, "broadcast", device=tensor.device)
    source = given(tensor, out, place=0) if backend.rank == root else None
    options = (algorithm, False, label, timeout)
    return TensorRequest(
        backend, "broadcast", shape, dtype, source, out, result, options, root=root
    )


@collective
def broadcast_(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """`broadcast` in place: `tensor` is overwritten on all ranks but the root, and returned."""
    check_tensor(tensor, backend, "broadcast_")
    root = backend.check_rank(root, "root")
    out, result = work_in_place(tensor)
    source = out if backend.rank == root else None
    options = (algorithm, False, label, timeout)
    return TensorRequest(
        backend, "broadcast", tensor.shape, tensor.dtype, source, out, result, options, root=root
    )


@collective
def all_gather(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """Every rank's `tensor`, joined along dim 0 in rank order.

    tensor      of the same shape and dtype on every rank; not changed. `[n, ...]` gives
                `[world_size * n, ...]`; a tensor of no dimensions gives `[world_size]`
    algorithm   `auto`, or `ring`, `direct`, `tree`, `halving_doubling`, `star`, `two_level`
    into        where to put the result, of that shape and the same dtype; else a new tensor
    label, timeout   as `all_reduce` has them

    Blocks until this rank has the result. A ring sends p-1 times the tensor's bytes from each of p
    ranks, which is optimal. Raises `SizeMismatchError` if `into` does not fit,
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    check_tensor(tensor, backend, "all_gather")
    rows = tensor.shape[0] if tensor.dim() else 1
    shape, dtype = (backend.world_size * rows, *tensor.shape[1:]), tensor.dtype
    out, result = out_for(shape, dtype, backend, into, "all_gather", device=tensor.device)
    source = given(tensor, out, place=backend.rank)
    options = (algorithm, False, label, timeout)
    return TensorRequest(backend, "all_gather", shape, dtype, source, out, result, options)


@collective
def gather(
    tensor: Tensor,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor | None]:
    """Every rank's `tensor`, joined along dim 0 in rank order, on rank `root`; None on the others.

    tensor      of the same shape and dtype on every rank; not changed. `[n, ...]` gives
                `[world_size * n, ...]`; a tensor of no dimensions gives `[world_size]`
    root        the rank that gets the result; the same on every rank
    algorithm   `auto`, or `tree`, `star`
    into        where the root puts the result, of that shape and the same dtype; else a new tensor.
                The other ranks need not give it, and leave it alone
    label, timeout   as `all_reduce` has them

    Blocks until the root has the result; the others, until their part is done. The root receives
    p-1 times the tensor's bytes, which is the least there is: as p-1 messages (star), or as
    ceil(log2 p) messages from ranks that have collected those of others (binomial tree). Raises
    `InvalidRankError` for a root that does not exist, `SizeMismatchError` if `into` does not fit,
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    check_tensor(tensor, backend, "gather")
    root = backend.check_rank(root, "root")
    rows = tensor.shape[0] if tensor.dim() else 1
    shape, dtype = (backend.world_size * rows, *tensor.shape[1:]), tensor.dtype
    result: Callable[[], Tensor | None]
    source, out, result = plain(tensor), None, lambda: None
    if backend.rank == root:
        out, result = out_for(shape, dtype, backend, into, "gather", device=tensor.device)
        source = given(tensor, out, place=root)
    options = (algorithm, False, label, timeout)
    return TensorRequest(backend, "gather", shape, dtype, source, out, result, options, root=root)


@collective
def scatter(
    tensor: Tensor | None,
    backend: Backend,
    root: int = 0,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """Slice `rank` of the tensor of rank `root`.

    tensor      on the root, what is cut: its dim 0 has to be divisible by the world size, and
                `[p * n, ...]` gives `[n, ...]`. It is not changed. The other ranks say what is to
                come: with any tensor of the root's shape and dtype, whose values do not matter
                (`torch.empty`, or one on the device "meta", which takes no memory); or with None,
                and `into` of the shape of the slice
    root        the rank whose tensor is cut; the same on every rank
    algorithm   `auto`, or `tree`, `star`
    into        where to put the slice, of that shape and the same dtype; else a new tensor
    label, timeout   as `all_reduce` has them

    Blocks until this rank has its slice (the root: until its sends are done). The root sends
    (p-1)/p of the tensor's bytes, which is the least there is: as p-1 messages (star), or as
    ceil(log2 p) messages to ranks that pass on those of others (binomial tree). Raises, before
    anything is sent, `InvalidRankError` for a root that does not exist and `SizeMismatchError` if
    dim 0 does not divide, `into` does not fit, or neither says what is to come;
    `CollectiveTimeoutError`, `PeerLostError`, and `DesyncError` if ranks expect different tensors.
    """
    root = backend.check_rank(root, "root")
    whole, dtype, device = _what_is_cut(tensor, backend, root, into)
    shape = check_slices(whole, backend, "scatter")
    out, result = out_for(shape, dtype, backend, into, "scatter", device=device)
    source = None
    if backend.rank == root:
        assert tensor is not None
        source = given(tensor, out)
    options = (algorithm, False, label, timeout)
    return TensorRequest(backend, "scatter", whole, dtype, source, out, result, options, root=root)


@collective
def all_to_all(
    tensor: Tensor,
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """Slice `rank` of every rank's `tensor`, joined along dim 0 in rank order.

    tensor      of the same shape and dtype on every rank; not changed. Its dim 0 has to be
                divisible by the world size: slice i of it goes to rank i
    algorithm   `auto`; or `direct`, all pairs at once; or `pairwise`, one after the other
    into        where to put the result, of the same shape and dtype; else a new tensor
    label, timeout   as `all_reduce` has them

    Blocks until this rank has the result. Every rank sends and receives (p-1)/p of the tensor's
    bytes, which is the least there is, as p-1 messages (Thakur et al. 2005). Raises
    `SizeMismatchError` before anything is sent if dim 0 does not divide or `into` does not fit;
    `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    check_tensor(tensor, backend, "all_to_all")
    shape, dtype = tensor.shape, tensor.dtype
    check_slices(shape, backend, "all_to_all")
    out, result = out_for(shape, dtype, backend, into, "all_to_all", device=tensor.device)
    options = (algorithm, False, label, timeout)
    return TensorRequest(
        backend, "all_to_all", shape, dtype, given(tensor, out), out, result, options
    )


async_broadcast = asynchronous(broadcast)
async_broadcast_ = asynchronous(broadcast_)
async_all_gather = asynchronous(all_gather)
async_gather = asynchronous(gather)
async_scatter = asynchronous(scatter)
async_all_to_all = asynchronous(all_to_all)


def _what_is_cut(
    tensor: Tensor | None, backend: Backend, root: int, into: Tensor | None
) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Return shape and dtype of the root's tensor, and the slice's memory, from the arguments."""
    if tensor is not None:
        if not isinstance(tensor, Tensor) or backend.rank == root or tensor.device.type != "meta":
            check_tensor(tensor, backend, "scatter")
            return tuple(tensor.shape), tensor.dtype, tensor.device
        device = into.device if isinstance(into, Tensor) else torch.device("cpu")
        return tuple(tensor.shape), tensor.dtype, device
    if backend.rank == root:
        raise SizeMismatchError(
            f"rank {root}: scatter: the root gives the tensor that is cut, and gave None",
            rank=root,
            op="scatter",
        )
    if into is None:
        raise SizeMismatchError(
            f"rank {backend.rank}: scatter cannot tell what rank {root} will send: give a tensor "
            "of the shape and dtype of the root's (its values do not matter), or into= of the "
            "shape of the slice",
            rank=backend.rank,
            peer=root,
            op="scatter",
        )
    check_tensor(into, backend, "scatter")
    rows = into.shape[0] if into.dim() else 0
    return (backend.world_size * rows, *into.shape[1:]), into.dtype, into.device


# ------------------------------------------------------------------------------
# all_to_all_uneven: every rank sends every rank as many rows as it likes.

UNEVEN = "all_to_all_uneven"
SIZES_OUT, SIZES_IN = 2, 3  # buffers of the program, behind WORK and SOURCE
ENTRY = 16  # bytes: for each peer, two int64


@collective
def all_to_all_uneven(
    tensor: Tensor,
    backend: Backend,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    label: str = "",
    timeout: float | None = None,
) -> Request[Tensor]:
    """The rows that all ranks have for this one, joined along dim 0 in rank order.

    tensor      cut along dim 0: the first `send_sizes[0]` rows go to rank 0, the next ones to
                rank 1, ... Of the same dtype, and the same shape but for dim 0, on every rank; not
                changed
    send_sizes  p numbers of rows, one for each rank, which add up to dim 0
    recv_sizes  p numbers of rows, one for each rank, that come from it: what rank i expects of
                rank j, `recv_sizes[j]`, is what that has for it, its `send_sizes[i]`
    algorithm   `auto`; or `direct`, all pairs at once; or `pairwise`, one after the other
    into        where to put the result, `[sum(recv_sizes), ...]`, same dtype; else a new tensor
    label, timeout   as `all_reduce` has them

    Blocks until this rank has the result. Moves each row once; before that, every pair of ranks
    compares its numbers, in one round of 16 bytes each way. Raises `SizeMismatchError` before
    anything is sent if the sizes are not p numbers, or do not add up, or `into` does not fit; and
    on every rank, naming two ranks and their numbers, before any row is moved between these, if
    what one sends is not what the other expects. Also `CollectiveTimeoutError`, `PeerLostError`,
    `DesyncError`.
    """
    check_backend(backend, f"{UNEVEN}(tensor, backend, send_sizes, recv_sizes)", recv_sizes)
    check_tensor(tensor, backend, UNEVEN)
    rank, size = backend.rank, backend.world_size
    sends, recvs = _checked_rows(tensor, send_sizes, recv_sizes, backend)
    row = tuple(tensor.shape[1:])
    shape = (sum(recvs), *row)
    algorithm = checked_algorithm("all_to_all", algorithm, backend)
    algorithm = "direct" if algorithm == "auto" else algorithm  # others' sizes are not known
    work, result = out_for(shape, tensor.dtype, backend, into, UNEVEN, device=tensor.device)
    source = given(tensor, work)
    if not source.is_cpu:
        source, work, result = _on_host(source, work, result, backend)
    outgoing, incoming = ranges_of(sends), ranges_of(recvs)
    copy_bits(work[slice(*incoming[rank])], source[slice(*outgoing[rank])])
    binder = Binder(rank, exchanged(rank, outgoing, incoming), prod(row) * tensor.itemsize)
    moves = binder.bind(COLLECTIVES["all_to_all"][algorithm].schedule(rank, size))
    # Of each pair: the elements sent to that rank, and those expected from it.
    mine = torch.tensor([sends, recvs], dtype=torch.int64).t().contiguous()
    theirs = torch.empty_like(mine)

    def program() -> Iterator[Round]:
        if size > 1:
            yield _exchange_of_sizes(rank, size)
        _check_sizes(sends, recvs, theirs.tolist(), backend)
        for step in moves:
            assert isinstance(step, Round)  # there is nothing to reduce
            yield step

    dtype = str(tensor.dtype).removeprefix("torch.")
    signature = f"{dtype} rows of shape {list(row)}, {algorithm}" + (f", {label}" if label else "")
    buffers = (tensor_bytes(work), tensor_bytes(source), tensor_bytes(mine), tensor_bytes(theirs))
    return ProgramRequest(backend, UNEVEN, program(), buffers, result, signature, timeout)


async_all_to_all_uneven = asynchronous(all_to_all_uneven)


def _on_host(
    source: Tensor, out: Tensor, result: Callable[[], Tensor], backend: Backend
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Do so for tensors on a device, whole in page-locked memory: ranks' sizes differ."""
    copies = backend.engine.copies_of(source.device, UNEVEN)
    work = copies.room_for(out)

    def deliver() -> Tensor:
        copy_bits(out, work)
        return result()

    return copies.to_host(source), work, deliver


def _checked_rows(
    tensor: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], backend: Backend
) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that this rank sends to each rank, and gets from it."""
    sends = _checked(send_sizes, "send_sizes", backend)
    recvs = _checked(recv_sizes, "recv_sizes", backend)
    rows, own = tensor.shape[0] if tensor.dim() else None, backend.rank
    if sum(sends) != rows:
        raise _refusal(
            f"send_sizes={sends} are {sum(sends)} rows, and a tensor of shape "
            f"{list(tensor.shape)} has {rows or 'none'}",
            backend,
        )
    if sends[own] != recvs[own]:
        raise _refusal(
            f"send_sizes has {sends[own]} rows for this rank itself, and recv_sizes {recvs[own]}",
            backend,
        )
    return sends, recvs


def _check_sizes(
    sends: list[int], recvs: list[int], told: list[list[int]], backend: Backend
) -> None:
    """Raise unless every other rank sends the rows that this one expects, and vice versa."""
    rank, sequence = backend.rank, backend.finished  # of which this is the next
    for peer, (sent, expected) in enumerate(told):
        if peer == rank:
            continue
        problems = []
        if sends[peer] != expected:
            problems.append(
                f"rank {rank} sends {sends[peer]} rows to rank {peer}, which expects {expected}"
            )
        if recvs[peer] != sent:
            problems.append(
                f"rank {peer} sends {sent} rows to rank {rank}, which expects {recvs[peer]}"
            )
        if problems:
            raise SizeMismatchError(
                f"rank {rank}: {UNEVEN} #{sequence}: {'; '.join(problems)}; send_sizes[{peer}] "
                f"here has to be recv_sizes[{rank}] there, and the other way round",
                rank=rank,
                peer=peer,
                op=UNEVEN,
                sequence=sequence,
            )


def _exchange_of_sizes(rank: int, size: int) -> Round:
    """Return the round that tells each other rank the rows sent there and expected from there."""
    right = [(rank + k) % size for k in range(1, size)]
    left = [(rank - k) % size for k in range(1, size)]
    return Round(
        tuple(SendBytes(p, ENTRY * p, ENTRY * (p + 1), SIZES_OUT) for p in right),
        tuple(ReceiveBytes(p, ENTRY * p, ENTRY * (p + 1), SIZES_IN) for p in left),
    )


def _checked(sizes: Sequence[int], what: str, backend: Backend) -> list[int]:
    """Return the sizes as a list of ints. Raises unless they are p numbers of rows."""
    try:
        numbers = [index(size) for size in sizes]
    except TypeError:
        raise TypeError(
            f"rank {backend.rank}: {UNEVEN}: {what} is a list of whole numbers, not {sizes!r}"
        ) from None
    if len(numbers) != backend.world_size or any(number < 0 for number in numbers):
        raise _refusal(
            f"{what}={numbers}: there has to be one number of rows, 0 or more, for each of the "
            f"{backend.world_size} ranks",
            backend,
        )
    return numbers


def _refusal(problem: str, backend: Backend) -> SizeMismatchError:
    return SizeMismatchError(
        f"rank {backend.rank}: {UNEVEN}: {problem}", rank=backend.rank, op=UNEVEN
    )
