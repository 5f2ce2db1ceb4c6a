"""How ranks come together to form a communicator.

MPI has calls for it that block until all have come, without a deadline. So the ranks meet first, by
messages, and make those calls when all are there:

    1, 2, ... -> 0    here I am
    0 -> 1, 2, ...    all are here
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from phalanx.backends.mpi.imported import Mpi
from phalanx.backends.mpi.patience import wait_until
from phalanx.backends.mpi.steps import Request
from phalanx.errors import CollectiveTimeoutError

FIRST_TAG = 2  # those below it are the messages' own


def duplicate(comm: Any, timeout: float) -> Any:
    """A communicator of the same ranks, for nobody else; each of them calls this.

    Raises `CollectiveTimeoutError` if that takes longer than so many seconds.
    """
    copy, request = comm.Idup()
    if not wait_until(request.Test, timeout):
        rank = comm.Get_rank()
        raise CollectiveTimeoutError(
            f"rank {rank}: MpiBackend waited {timeout:g} s for the {comm.Get_size()} ranks of its "
            "communicator: has every one of them made its backend?",
            rank=rank,
            op="MpiBackend",
            seconds=timeout,
        )
    return copy


def hosts(mpi: Mpi, comm: Any) -> tuple[int, ...]:
    """For each rank the number of the host that it is on. All ranks are there, and call this."""
    shared = comm.Split_type(mpi.COMM_TYPE_SHARED)
    firsts = comm.allgather(shared.bcast(comm.Get_rank()))
    shared.Free()
    numbers = {first: number for number, first in enumerate(dict.fromkeys(firsts))}
    return tuple(numbers[first] for first in firsts)


def meet(mpi: Mpi, comm: Any, members: Sequence[int], ident: int, timeout: float) -> None:
    """Wait until all members, ranks of `comm`, have called this for the group `ident`.

    Raises `CollectiveTimeoutError`, which names one that has not.
    """
    rank, first, tag = comm.Get_rank(), members[0], meeting_tag(mpi, ident)
    deadline = monotonic() + timeout
    word = [bytearray(1), 1, mpi.BYTE]
    if rank != first:
        sent = [comm.Isend(word, first, tag)]
        expected = {first: comm.Irecv([bytearray(1), 1, mpi.BYTE], first, tag)}
        _gather(rank, members, expected, deadline, timeout)
    else:
        others = members[1:]
        expected = {peer: comm.Irecv([bytearray(1), 1, mpi.BYTE], peer, tag) for peer in others}
        _gather(rank, members, expected, deadline, timeout)
        sent = [comm.Isend(word, peer, tag) for peer in others]
    wait_until(lambda: mpi.Request.Testall(sent), deadline - monotonic())


def meeting_tag(mpi: Mpi, ident: int) -> int:
    """The tag of what is said about a group."""
    largest = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))
    return FIRST_TAG + ident % (largest - FIRST_TAG)


def _gather(
    rank: int,
    members: Sequence[int],
    expected: dict[int, Request],
    deadline: float,
    timeout: float,
) -> None:
    for peer, request in expected.items():
        if wait_until(request.Test, deadline - monotonic()):
            continue
        missing = [late for late, request in expected.items() if not request.Test()]
        for late in missing:
            expected[late].Cancel()
            expected[late].Wait()
        raise CollectiveTimeoutError(
            f"rank {rank}: the group of ranks {list(members)} waited {timeout:g} s for "
            f"{', '.join(f'rank {late}' for late in missing)}: every member has to make it",
            rank=rank,
            peer=peer,
            op="subgroup",
            seconds=timeout,
        )
