"""`MpiLibrary`: one rank's view of one MPI communicator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from typing_extensions import override

from phalanx.core.steps import NativeCall
from phalanx.errors import (
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
    UnsupportedOperationError,
)
from phalanx.native.base import Abilities, Handle, Library
from phalanx.native.mpi.steps import (
    EXCHANGED,
    REDUCED,
    STEPS,
    Communicator,
    Mpi,
    Request,
    Steps,
    countable,
    folds,
    is_large,
)

_WRONG_CALLS = ("ERR_ARG", "ERR_BUFFER", "ERR_COUNT", "ERR_OP", "ERR_TYPE")
GRACE = 0.5  # seconds: who waits for a group has a deadline, too, and its error says more


class MpiLibrary(Library):
    """A communicator that is its own.

    Collectives are MPI's nonblocking ones. Reductions of `LEAST_CHUNK` bytes a rank and more are
    MPI's all-to-all and torch's arithmetic (see `exchange`).

    What MPI still writes when a group breaks is kept in memory until MPI is ended: of its
    collectives none can be cancelled. And a communicator is kept until nobody can send to it:
    Open MPI takes what comes late for a message of the next communicator, and ends the job.
    """

    name = "MPI"

    def __init__(self, mpi: Mpi, comm: Any, looks: int) -> None:
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # which mpi4py raises
        self._mpi = mpi
        self._comm = comm
        self._bytes = mpi.BYTE
        self._looks = looks
        self._communicator = Communicator(mpi, comm)
        self._pending: set[MpiHandle] = set()
        self._ended = False
        self.rank = self._communicator.rank
        self.size = self._communicator.size
        self.can = Abilities()

    @override
    def has(self, call: NativeCall) -> bool:
        if not countable(call):
            return False
        if call.op is None:
            return True
        if call.source is None:
            return False
        dtype = call.source.dtype
        return (call.op, dtype) in REDUCED or self._is_exchanged(call)

    def _is_exchanged(self, call: NativeCall) -> bool:
        assert call.source is not None
        assert call.op is not None
        return is_large(call, self.size) and folds(call.op, call.source.dtype)

    @override
    def collective(self, call: NativeCall) -> Handle:
        large = call.op is not None and self._is_exchanged(call)
        steps = (EXCHANGED if large else STEPS)[call.collective]
        return MpiHandle(steps(self._communicator, call), self._pending, self._looks)

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        rendezvous(self._mpi, self._comm, members, ident, timeout + GRACE)
        whole = self._comm.Get_group()
        some = whole.Incl(list(members))
        try:
            tag = meeting_tag(self._mpi, ident)
            comm = self._comm.Create_group(some, tag)
            return MpiLibrary(self._mpi, comm, self._looks)
        finally:
            some.Free()
            whole.Free()

    @override
    def kind_of(self, error: Exception) -> type[DistributedError]:
        mpi = self._mpi
        if isinstance(error, DistributedError):
            return type(error)
        if isinstance(error, mpi.Exception):
            wrong = [getattr(mpi, name) for name in _WRONG_CALLS]
            if error.Get_error_class() in wrong:
                return UnsupportedOperationError
        return PeerLostError

    @override
    def close(self) -> None:
        if self._ended or self._mpi.Is_finalized():
            return
        self._ended = True
        if self._pending:
            keyval = self._mpi.Comm.Create_keyval()
            self._mpi.COMM_SELF.Set_attr(keyval, self._pending)

    @override
    def abort(self) -> None:
        self.close()


# ------------------------------------------------------------------------------
# Handles: what is under way in MPI.


class MpiHandle(Handle):
    """A request, and, of a collective, those that follow it.

    steps    yields the requests, one after the other, and does what is to be done in between
    pending  the handles that are not over, of which this is one until it is
    looks    how many are taken at once by who waits
    """

    __slots__ = ("_looks", "_pending", "_request", "_steps")

    def __init__(self, steps: Steps, pending: set[MpiHandle], looks: int) -> None:
        self._steps = steps
        self._looks = looks
        self._request: Request = next(steps, None)
        self._pending = pending
        if self._request is not None:
            pending.add(self)

    @override
    def done(self) -> bool:
        request = self._request
        while request is not None:
            if not request.Test():
                return False
            self._request = request = next(self._steps, None)
            if request is None:
                self._pending.discard(self)
        return True

    @override
    def wait(self, seconds: float) -> bool:
        return wait_until(self.done, seconds, self._looks)


# ------------------------------------------------------------------------------
# Forming a communicator.
#
# MPI's calls for it block until all ranks have come, without a deadline. So the ranks exchange
# messages first, and make those calls when all are there:
#
#     1, 2, ... -> 0    here I am
#     0 -> 1, 2, ...    all are here

FIRST_TAG = 2  # lower tags are those of messages


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


def rendezvous(mpi: Mpi, comm: Any, members: Sequence[int], ident: int, timeout: float) -> None:
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


# ------------------------------------------------------------------------------
# Waiting for MPI, which moves bytes only when it is called, and knows no deadline.

YIELDING = 0.005  # seconds of looks between which other processes may run
PAUSE = 50e-6  # seconds between looks after that
BUSY = 10e-6  # seconds: a look that takes longer has moved bytes


def looks_at_once(ranks_here: int) -> int:
    """How many looks to take one after the other, with so many ranks on this host.

    Where each has a core of its own, nobody is kept from anything; else a rank that looks keeps
    another one from doing what it looks for.
    """
    return 3000 if ranks_here <= (os.cpu_count() or 1) else 50


def wait_until(done: Callable[[], bool], seconds: float, looks: int = 50) -> bool:
    """Call `done` until it is true or so many seconds have passed; whether it is.

    First so many times without a pause; then letting others have the core, which may be those
    waited for; and when nothing has moved for a while, with short sleeps.
    """
    for _ in range(looks):
        if done():
            return True
    now = moved = monotonic()
    deadline = now + seconds
    while now < deadline:
        if now - moved < YIELDING:
            os.sched_yield()
        else:
            time.sleep(PAUSE)
        looked = monotonic()
        if done():
            return True
        now = monotonic()
        if now - looked > BUSY:
            moved = now
    return False
