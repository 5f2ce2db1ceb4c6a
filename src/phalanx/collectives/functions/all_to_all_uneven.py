"""all_to_all_uneven: every rank sends every rank as many rows as it likes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from operator import index

import torch
import xxhash
from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.backends.engine.rounds import ReceiveBytes, Round, SendBytes
from phalanx.backends.memory import copy_bits, tensor_bytes
from phalanx.collectives.binder import Binder
from phalanx.collectives.checks import check_tensor
from phalanx.collectives.layout import Exchanged, ranges_of
from phalanx.collectives.pending import PendingCollective
from phalanx.collectives.run import checked_algorithm
from phalanx.collectives.schedules import COLLECTIVES
from phalanx.collectives.task import given, out_for
from phalanx.errors import SizeMismatchError

NAME = "all_to_all_uneven"
SIZES_OUT, SIZES_IN = 2, 3  # buffers of the operation, behind WORK and SOURCE
ENTRY = 16  # bytes: for each peer, two int64


def all_to_all_uneven(
    tensor: Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> Tensor:
    """The rows that all ranks have for this one, joined along dim 0 in rank order.

    tensor      cut along dim 0: the first `send_sizes[0]` rows go to rank 0, the next ones to
                rank 1, ... Of the same dtype, and the same shape but for dim 0, on every rank; not
                changed
    send_sizes  p numbers of rows, one for each rank, which add up to dim 0
    recv_sizes  p numbers of rows, one for each rank, that come from it: what rank i expects of
                rank j, `recv_sizes[j]`, is what that has for it, its `send_sizes[i]`
    algorithm   `auto`; or `direct`, all pairs at once; or `pairwise`, one after the other
    into        where to put the result, `[sum(recv_sizes), ...]`, same dtype; else a new tensor
    timeout     seconds that this rank waits at most; by default the backend's

    Blocks until this rank has the result. Moves each row once; before that, every pair of ranks
    compares its numbers, in one round of 16 bytes each way. Raises `SizeMismatchError` before
    anything is sent if the sizes are not p numbers, or do not add up, or `into` does not fit; and
    on every rank, naming two ranks and their numbers, before any row is moved between these, if
    what one sends is not what the other expects. Also `CollectiveTimeoutError`, `PeerLostError`,
    `DesyncError`.
    """
    return _start(
        tensor,
        send_sizes,
        recv_sizes,
        backend,
        algorithm=algorithm,
        into=into,
        timeout=timeout,
    ).wait()


def async_all_to_all_uneven(
    tensor: Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    backend: Backend,
    *,
    algorithm: str = "auto",
    into: Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[Tensor]:
    """`all_to_all_uneven` that returns at once; `wait()` gives the result."""
    return _start(
        tensor,
        send_sizes,
        recv_sizes,
        backend,
        algorithm=algorithm,
        into=into,
        timeout=timeout,
        background=True,
    )


def _start(
    tensor: Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    backend: Backend,
    *,
    algorithm: str,
    into: Tensor | None,
    timeout: float | None,
    background: bool = False,
) -> PendingCollective[Tensor]:
    check_tensor(tensor, backend, NAME)
    rank, size = backend.rank, backend.world_size
    sends = _checked(send_sizes, "send_sizes", backend)
    recvs = _checked(recv_sizes, "recv_sizes", backend)
    rows = tensor.shape[0] if tensor.dim() else None
    if sum(sends) != rows:
        raise _refusal(
            f"send_sizes={sends} are {sum(sends)} rows, and a tensor of shape "
            f"{list(tensor.shape)} has {rows or 'none'}",
            backend,
        )
    if sends[rank] != recvs[rank]:
        raise _refusal(
            f"send_sizes has {sends[rank]} rows for this rank itself, and recv_sizes {recvs[rank]}",
            backend,
        )
    row = tuple(tensor.shape[1:])
    shape = (sum(recvs), *row)
    algorithm = checked_algorithm("all_to_all", algorithm, backend)
    if algorithm == "auto":  # not by size: ranks do not know how much the others move
        algorithm = "direct"
    work, result = out_for(shape, tensor.dtype, backend, into, NAME, device=tensor.device)
    source = given(tensor, work)
    outgoing_ranges, incoming_ranges = ranges_of(sends), ranges_of(recvs)
    copy_bits(work[slice(*incoming_ranges[rank])], source[slice(*outgoing_ranges[rank])])

    binder = Binder(
        rank, Exchanged(rank, outgoing_ranges, incoming_ranges), prod(row) * tensor.itemsize
    )
    moves = binder.bind(COLLECTIVES["all_to_all"][algorithm].schedule(rank, size))
    # From the left in each pair: what goes there, and what is expected from there.
    mine = torch.tensor([sends, recvs], dtype=torch.int64).t().contiguous()
    theirs = torch.empty_like(mine)

    def program() -> Iterator[Round]:
        if size > 1:
            yield _exchange_of_sizes(rank, size)
        told = theirs.tolist()
        for peer in range(size):
            if peer != rank and told[peer] != [recvs[peer], sends[peer]]:
                raise _mismatch(backend, peer, sends[peer], recvs[peer], *told[peer])
        for step in moves:
            assert isinstance(step, Round)  # there is nothing to fold
            yield step

    dtype = str(tensor.dtype).removeprefix("torch.")
    signature = f"{dtype} rows of shape {list(row)}, {algorithm}"
    operation = backend.start(
        NAME,
        program(),
        (tensor_bytes(work), tensor_bytes(source), tensor_bytes(mine), tensor_bytes(theirs)),
        signature=signature,
        fingerprint=xxhash.xxh3_64_intdigest(f"{NAME} {signature}".encode()),
        timeout=timeout,
        background=background,
    )
    return PendingCollective(backend, operation, result)


def _exchange_of_sizes(rank: int, size: int) -> Round:
    """Each rank tells each other one how much it sends there, and what it expects from there."""
    right = [(rank + k) % size for k in range(1, size)]
    left = [(rank - k) % size for k in range(1, size)]
    return Round(
        tuple(SendBytes(p, ENTRY * p, ENTRY * (p + 1), SIZES_OUT) for p in right),
        tuple(ReceiveBytes(p, ENTRY * p, ENTRY * (p + 1), SIZES_IN) for p in left),
    )


def _mismatch(
    backend: Backend, peer: int, sent: int, expected: int, told_sent: int, told_expected: int
) -> SizeMismatchError:
    """The error for two ranks whose numbers differ, in one direction or both."""
    rank, sequence = backend.rank, backend.group.finished  # of which this is the next
    problems = []
    if sent != told_expected:
        problems.append(
            f"rank {rank} sends {sent} rows to rank {peer}, which expects {told_expected}"
        )
    if expected != told_sent:
        problems.append(
            f"rank {peer} sends {told_sent} rows to rank {rank}, which expects {expected}"
        )
    return SizeMismatchError(
        f"rank {rank}: {NAME} #{sequence}: {'; '.join(problems)}; send_sizes[{peer}] here has to "
        f"be recv_sizes[{rank}] there, and the other way round",
        rank=rank,
        peer=peer,
        op=NAME,
        sequence=sequence,
    )


def _checked(sizes: Sequence[int], what: str, backend: Backend) -> list[int]:
    """The sizes as a list of ints. Raises unless they are p numbers of rows."""
    try:
        numbers = [index(size) for size in sizes]
    except TypeError:
        raise TypeError(
            f"rank {backend.rank}: {NAME}: {what} is a list of whole numbers, not {sizes!r}"
        ) from None
    if len(numbers) != backend.world_size or any(number < 0 for number in numbers):
        raise _refusal(
            f"{what}={numbers}: there has to be one number of rows, 0 or more, for each of the "
            f"{backend.world_size} ranks",
            backend,
        )
    return numbers


def _refusal(problem: str, backend: Backend) -> SizeMismatchError:
    return SizeMismatchError(f"rank {backend.rank}: {NAME}: {problem}", rank=backend.rank, op=NAME)
