"""Memory that the ranks of a group have in common: rank 0 takes it, the others attach it.

    rank 0 -> others    where it is, once rank 0 has taken it
    others -> rank 0    that they have attached it, or why they have not
    rank 0 -> others    how it went for all

So if one cannot have it, all raise the same error, and none has it. 3(p-1) messages of 512 bytes.

Order. A rank that is told of something, by a message or by a flag, sees all that the teller had
written in memory before: sending and receiving a message are system calls, or take a lock; around
flags there are fences where they are needed (`shm/control.py`). So what was written before a
barrier is seen by all after it. Between two such points it is the callers' business who writes
what: backends themselves neither read nor write here.
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

SIZE = 512  # bytes of a word
NOBODY = -1
_NUMBERS = struct.Struct("<4q")


class Own(Source):
    """For a group of one rank: nobody else attaches it."""

    def take(self, size: int) -> tuple[UntypedStorage, Place]:
        """Ordinary memory."""
        return zeros(size), NOWHERE

    def attach(self, place: Place, size: int) -> UntypedStorage:
        """Nobody does."""
        raise NotImplementedError

    def close(self) -> None:
        """There is nothing to do."""


def zeros(size: int) -> UntypedStorage:
    """Ordinary memory of so many bytes; large pieces take pages only when these are written."""
    return torch.zeros(size, dtype=torch.uint8).untyped_storage()


class Word(NamedTuple):
    """What ranks tell each other: that all is well, and where; or who cannot go on, and why."""

    blamed: int = NOBODY
    place: Place = NOWHERE
    problem: str = ""

    def pack(self) -> bytes:
        """As it goes to another rank: `SIZE` bytes."""
        head = _NUMBERS.pack(self.blamed, *self.place)
        return (head + self.problem.encode(errors="replace")).ljust(SIZE, b"\0")[:SIZE]

    @classmethod
    def unpack(cls, data: memoryview) -> Word:
        """As it came from another rank."""
        blamed, *place = _NUMBERS.unpack_from(data)
        text = bytes(data[_NUMBERS.size :]).rstrip(b"\0").decode(errors="replace")
        return cls(blamed, (place[0], place[1], place[2]), text)


class CommonMemory:
    """One rank's part in taking it.

    storage   the memory, once this rank has it
    verdict   how it went for all, once that is known
    """

    def __init__(self, source: Source, rank: int, world_size: int, size: int) -> None:
        self.storage: UntypedStorage | None = None
        self.verdict = Word()
        self._source = source
        self._rank = rank
        self._others = [peer for peer in range(world_size) if peer != rank]
        self._size = size
        self._words = memoryview(bytearray(world_size * SIZE))  # one of each rank

    def buffers(self) -> tuple[memoryview, ...]:
        """What the rounds speak of."""
        return (self._words,)

    def steps(self) -> Iterator[Round]:
        """The rounds; between them this rank does what it has to."""
        if self._rank != 0:
            yield self._hear(0)
            self._say(self._attached(self._word(0)))
            yield self._tell(0)
            yield self._hear(0)
            self.verdict = self._word(0)
            return
        taken = self._taken()
        self._say(taken)
        if self._others:
            yield self._tell(*self._others)
            yield self._hear(*self._others)
        words = [taken, *(self._word(peer) for peer in self._others)]
        self.verdict = next((word for word in words if word.blamed != NOBODY), Word())
        self._say(self.verdict)
        if self._others:
            yield self._tell(*self._others)

    def tensor(self, work: Work[None], count: int, dtype: torch.dtype) -> Tensor:
        """The memory, once `work` is done. Raises the same error on every rank if one has none."""
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
        # Not a view of one tensor: where ranks are threads, each counts its own changes of it.
        return torch.empty(0, dtype=dtype).set_(self.storage, 0, (count,), (1,))

    def close(self) -> None:
        """It is over, well or not: an error, with its frames, does not keep the memory."""
        self._source.close()
        self.storage = None

    def _taken(self) -> Word:
        try:
            self.storage, place = self._source.take(self._size)
        except Exception as error:  # whatever it is, all others wait to hear of it
            return Word(self._rank, problem=_said(error))
        return Word(place=place)

    def _attached(self, offer: Word) -> Word:
        if offer.blamed != NOBODY:
            return offer
        try:
            self.storage = self._source.attach(offer.place, self._size)
        except Exception as error:
            return Word(self._rank, problem=_said(error))
        return Word()

    def _word(self, rank: int) -> Word:
        return Word.unpack(self._words[rank * SIZE : (rank + 1) * SIZE])

    def _say(self, word: Word) -> None:
        self._words[self._rank * SIZE : (self._rank + 1) * SIZE] = word.pack()

    def _tell(self, *peers: int) -> Round:
        start = self._rank * SIZE
        return Round(sends=tuple(SendBytes(peer, start, start + SIZE) for peer in peers))

    def _hear(self, *peers: int) -> Round:
        return Round(
            receives=tuple(ReceiveBytes(peer, peer * SIZE, (peer + 1) * SIZE) for peer in peers)
        )


def _said(error: Exception) -> str:
    return str(error) or repr(error)
