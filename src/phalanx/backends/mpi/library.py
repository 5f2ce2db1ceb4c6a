"""`MpiLibrary`: one rank's view of one MPI communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from phalanx.backends.library.library import Abilities, Handle, Library
from phalanx.backends.mpi.datatypes import REDUCED
from phalanx.backends.mpi.exchange import EXCHANGED, is_large
from phalanx.backends.mpi.folding import folds
from phalanx.backends.mpi.formation import meet, meeting_tag
from phalanx.backends.mpi.handles import MpiHandle, message
from phalanx.backends.mpi.imported import Mpi
from phalanx.backends.mpi.steps import STEPS, Communicator, countable
from phalanx.backends.native import Call
from phalanx.errors import DistributedError, PeerLostError, UnsupportedOperationError

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
        super().__init__()
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
    def has(self, call: Call) -> bool:
        if not countable(call):
            return False
        if call.op is None:
            return True
        if call.source is None:
            return False
        dtype = call.source.dtype
        return (call.op, dtype) in REDUCED or self._is_exchanged(call)

    def _is_exchanged(self, call: Call) -> bool:
        assert call.source is not None
        assert call.op is not None
        return is_large(call, self.size) and folds(call.op, call.source.dtype)

    @override
    def collective(self, call: Call) -> Handle:
        large = call.op is not None and self._is_exchanged(call)
        steps = (EXCHANGED if large else STEPS)[call.collective]
        return MpiHandle(steps(self._communicator, call), self._pending, self._looks)

    @override
    def send(self, view: memoryview, peer: int, tag: int) -> Handle:
        request = self._comm.Isend([view, len(view), self._bytes], peer, tag)
        return MpiHandle(message(request, view), self._pending, self._looks)

    @override
    def recv(self, view: memoryview, peer: int, tag: int) -> Handle:
        request = self._comm.Irecv([view, len(view), self._bytes], peer, tag)
        return MpiHandle(message(request, view), self._pending, self._looks, is_receive=True)

    @override
    def subgroup(self, members: Sequence[int], ident: int, timeout: float) -> Library:
        meet(self._mpi, self._comm, members, ident, timeout + GRACE)
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
        for handle in list(self._pending):
            handle.cancel()
        if self._pending:
            keyval = self._mpi.Comm.Create_keyval()
            self._mpi.COMM_SELF.Set_attr(keyval, self._pending)

    @override
    def abort(self) -> None:
        self.close()
