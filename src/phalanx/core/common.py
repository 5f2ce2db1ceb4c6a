"""Memory that the ranks of a group have in common: rank 0 allocates it, the others attach it.

    rank 0 -> others    where it is, once rank 0 has allocated it
    others -> rank 0    that they have attached it, or why they could not
    rank 0 -> others    whether all have it

So if one rank cannot have it, all raise the same error, and none keeps it. 3(p-1) messages of 512
bytes.

Memory order. A rank that receives a message, or sees a flag, sees everything that the sender had
written in memory before: sending and receiving a message are system calls, or take a lock; around
flags there are fences where they are needed (`shm/epoch.py`). So all ranks see after a barrier all
that was written before it. Between two barriers the callers share out the writing: backends neither
read nor write this memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from phalanx.core.steps import NOWHERE, Place, ReceiveBytes, Round, SendBytes, Source
from phalanx.core.work import Work
from phalanx.errors import BackendUnavailableError

SIZE = 512  # bytes of a notice
NOBODY = -1
_NUMBERS = struct.Struct("<4q")


class Own(Source):
    """Memory of a group of one rank, which no other rank attaches."""

    def take(self, size: int) -> tuple[UntypedStorage, Place]:
        return zeros(size), NOWHERE

    def attach(self, place: Place, size: int) -> UntypedStorage:
        raise NotImplementedError

    def close(self) -> None: ...


def zeros(size: int) -> UntypedStorage:
    """Return ordinary memory of `nbytes` zeros; large pieces take pages only when written."""
    return torch.zeros(size, dtype=torch.uint8).untyped_storage()


class AttachNotice(NamedTuple):
    """A rank's message: the memory's place; or the rank that cannot have it, and the reason."""

    blamed: int = NOBODY
    place: Place = NOWHERE
    problem: str = ""

    def encode(self) -> bytes:
        """Return it as bytes, always of one length."""
        head = _NUMBERS.pack(self.blamed, *self.place)
        return (head + self.problem.encode(errors="replace")).ljust(SIZE, b"\0")[:SIZE]

    @classmethod
    def decode(cls, data: memoryview) -> AttachNotice:
        """Return the notice in a rank's message."""
        blamed, *place = _NUMBERS.unpack_from(data)
        text = bytes(data[_NUMBERS.size :]).rstrip(b"\0").decode(errors="replace")
        return cls(blamed, (place[0], place[1], place[2]), text)


class CommonMemory:
    """One rank's part in allocating or attaching it.

    storage   the memory, once this rank has it
    verdict   whether all ranks have it, once that is known
    """

    def __init__(self, source: Source, rank: int, world_size: int, size: int) -> None:
        self.storage: UntypedStorage | None = None
        self.verdict = AttachNotice()
        self._source = source
        self._rank = rank
        self._others = [peer for peer in range(world_size) if peer != rank]
        self._size = size
        self._notices = memoryview(bytearray(world_size * SIZE))  # a notice of each rank

    def buffers(self) -> tuple[memoryview, ...]:
        """Return the memory of the rounds."""
        return (self._notices,)

    def steps(self) -> Iterator[Round]:
        """Yield the rounds. Between two of them this rank allocates or attaches the memory."""
        if self._rank != 0:
            yield self._receive_from(0)
            self._set_own(self._attach(self._notice(0)))
            yield self._send_to(0)
            yield self._receive_from(0)
            self.verdict = self._notice(0)
            return
        own = self._allocate()
        self._set_own(own)
        if self._others:
            yield self._send_to(*self._others)
            yield self._receive_from(*self._others)
        notices = [own, *(self._notice(peer) for peer in self._others)]
        failed = (notice for notice in notices if notice.blamed != NOBODY)
        self.verdict = next(failed, AttachNotice())
        self._set_own(self.verdict)
        if self._others:
            yield self._send_to(*self._others)

    def tensor(self, work: Work[None], count: int, dtype: torch.dtype) -> Tensor:
        """Return the memory, once `work` is done. Raise one error on all ranks if any has none."""
        verdict, rank = self.verdict, self._rank
        if verdict.blamed != NOBODY:
            raise BackendUnavailableError(
                f"rank {rank}: {work.describe()}: rank {verdict.blamed} cannot have "
                f"{self._size:,} bytes in common with the others: {verdict.problem}",
                rank=rank,
                peer=None if verdict.blamed == rank else verdict.blamed,
                op=work.name,
                sequence=work.sequence,
            )
        assert self.storage is not None
        # Not a view of one tensor: if ranks are threads, each counts its own changes of it.
        return torch.empty(0, dtype=dtype).set_(self.storage, 0, (count,), (1,))

    def close(self) -> None:
        """Drop the memory at the end: the traceback of an error shall not keep it alive."""
        self._source.close()
        self.storage = None

    def _allocate(self) -> AttachNotice:
        try:
            self.storage, place = self._source.take(self._size)
        except Exception as error:  # of any kind: the other ranks wait for the notice
            return AttachNotice(self._rank, problem=_text_of(error))
        return AttachNotice(place=place)

    def _attach(self, offer: AttachNotice) -> AttachNotice:
        if offer.blamed != NOBODY:
            return offer
        try:
            self.storage = self._source.attach(offer.place, self._size)
        except Exception as error:
            return AttachNotice(self._rank, problem=_text_of(error))
        return AttachNotice()

    def _notice(self, rank: int) -> AttachNotice:
        return AttachNotice.decode(self._notices[rank * SIZE : (rank + 1) * SIZE])

    def _set_own(self, notice: AttachNotice) -> None:
        self._notices[self._rank * SIZE : (self._rank + 1) * SIZE] = notice.encode()

    def _send_to(self, *peers: int) -> Round:
        start = self._rank * SIZE
        return Round(sends=tuple(SendBytes(peer, start, start + SIZE) for peer in peers))

    def _receive_from(self, *peers: int) -> Round:
        return Round(
            receives=tuple(ReceiveBytes(peer, peer * SIZE, (peer + 1) * SIZE) for peer in peers)
        )


def _text_of(error: Exception) -> str:
    return str(error) or repr(error)
