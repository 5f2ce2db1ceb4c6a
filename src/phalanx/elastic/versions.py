"""Kept versions: a checkpoint's parts, in memory that lives on when the rank that wrote it dies.

Each rank writes, at the end of a step and before the vote on it, what it would write into a
checkpoint. It has two files without a name for that, which the other ranks of its host have open:

    rank 1, host a     file 0: version 6, complete      file 1: version 7, being written: invalid
                          |
    rank 0, host a     has both open; if rank 1 is killed, it gives version 6 in its place

Version 8 overwrites version 6. By then the vote on 7 has returned, so every rank has 7. What all
ranks hold, as with DDP, is written in equal parts; what one rank holds, as with a shard or a
residual, is written whole by that one.

On several hosts each rank sends its part to the next rank of another host, too, which has two files
for it. Only residuals stay: they are lost with their host.

    host a   rank 0: 0, and 3 as a guest    rank 1: 1
    host b   rank 2: 2, and 0 and 1         rank 3: 3
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from phalanx.checkpoint.save_plan import RankDescription
from phalanx.checkpoint.tensor_files import TensorShard
from phalanx.collectives import all_gather_object, chunk_ranges
from phalanx.core.backend import Backend
from phalanx.core.work import Work
from phalanx.elastic.membership import HeldPart
from phalanx.elastic.moves import Holding
from phalanx.wire.codec import DTYPES
from phalanx.wire.control import learned
from phalanx.wire.memory import copy_bits, plain

_HEAD = struct.Struct("<qqqq")  # version, generation, bytes of the tensors and of the description
_INVALID = _HEAD.pack(-1, 0, 0, 0)
_TENSORS = 4096  # where they begin
_ALIGNED = 64  # bytes
_WHOLE = 4096  # bytes: what all ranks hold is written whole by each of them if it is smaller


class KeptPiece(NamedTuple):
    """Elements of a tensor that this rank writes into each version, as `shard` describes them."""

    shard: TensorShard
    tensor: Tensor
    start: int
    stop: int

    def values(self) -> Tensor:
        """Return these elements as they are now, flat, on the CPU."""
        flat = plain(self.tensor.detach().cpu()).view(-1)
        return flat if self.stop - self.start == flat.numel() else flat[self.start : self.stop]


class KeptPart(NamedTuple):
    """What one rank writes: a description for each optimizer, and the pieces that these list.

    own   pieces of compressors and the like, which come last
    """

    rank: int
    parts: list[RankDescription]
    pieces: list[KeptPiece]
    own: list[KeptPiece]

    def description(self, *, own: bool) -> bytes:
        """Return it as bytes, with or without `own`."""
        shards = [piece.shard for piece in self.own] if own else []
        return msgspec.json.encode((self.rank, self.parts, shards))


def part_of(holding: Holding, ranks: int, replicated: Collection[str]) -> KeptPart:
    """Return what this rank writes of all that it holds, so that the ranks' parts are complete.

    replicated   the names of tensors that all ranks hold whole, with equal values
    """
    made = KeptPart(holding.rank, [], [], [])
    for description, tensors in zip(holding.parts, holding.tensors, strict=True):
        chosen: list[KeptPiece] = []
        for shard, tensor in tensors.items():
            begin, end = 0, shard.stop - shard.start
            if shard.name in replicated and shard.nbytes >= _WHOLE:
                begin, end = chunk_ranges(end, ranks)[holding.rank]
                shard = replace(shard, start=begin, stop=end)  # noqa: PLW2901
            elif shard.kind == "model" and not shard.equal and holding.rank > 0:
                continue  # a buffer: rank 0's is the checkpoint's
            own = shard.name.startswith("own/")
            (made.own if own else chosen).append(KeptPiece(shard, tensor, begin, end))
        made.parts.append(replace(description, held=[each.shard for each in chosen]))
        made.pieces.extend(chosen)
    return made


# ------------------------------------------------------------------------------
# The memory of one version


class VersionFile:
    """A file without a name: one version of a rank's part, which its host's processes can read.

    0          version, or -1 while it is written; generation, sizes
    4096       the tensors, each aligned to 64 bytes
    behind     the description
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory: mmap.mmap | None = None
        self._written: Sequence[TensorShard] = ()
        self._views: list[Tensor] = []

    @classmethod
    def create(cls) -> VersionFile:
        """Create one; where the system has no such files, one that only this process can read."""
        if not hasattr(os, "memfd_create"):
            with tempfile.TemporaryFile() as file:
                return cls(os.dup(file.fileno()))
        return cls(os.memfd_create("phalanx-version", os.MFD_CLOEXEC))

    @classmethod
    def open_of(cls, process: int, fd: int, inode: int) -> VersionFile:
        """Open one that another process has; OSError if that may not be, or it has another there
        by now: a rank that is lost closes its files, and opens others by the same numbers.
        """
        opened = cls(os.open(f"/proc/{process}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        if opened.inode() != inode:
            opened.close()
            raise FileNotFoundError(f"descriptor {fd} of process {process} is another file now")
        return opened

    def inode(self) -> int:
        """Return its number in the system, which no other file has while this one is open."""
        return os.fstat(self.fd).st_ino

    def version(self) -> tuple[int, int]:
        """Return the version that is whole in it, and its generation; -1 for none."""
        head = os.pread(self.fd, _HEAD.size, 0)
        version, generation, *_ = _HEAD.unpack(head) if head else (-1, 0)
        return version, generation

    def write(self, key: tuple[int, int], part: KeptPart, pause: Callable[[], object]) -> None:
        """Write a version over the one before, which is gone then; call `pause` in between."""
        pieces = part.pieces + part.own
        shards = [piece.shard for piece in pieces]
        size = _size(shards)
        self._begin(size)
        if self._written != shards:
            self._views, self._written = list(_views(self._memory, shards)), shards
        pause()
        for view, piece in zip(self._views, pieces, strict=True):
            copy_bits(view, piece.values())
            pause()
        self._end(key, size, part.description(own=True))

    def read(self) -> Holding:
        """Return the version that is whole in it; its memory stays while the tensors are used."""
        _, _, size, length = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))
        told = os.pread(self.fd, length, _TENSORS + size)
        rank, parts, own = msgspec.json.decode(told, type=learned(_Described))
        memory = mmap.mmap(self.fd, _TENSORS + size, access=mmap.ACCESS_COPY)
        views = _views(memory, [*(shard for part in parts for shard in part.held), *own])
        tensors = [{shard: next(views) for shard in part.held} for part in parts]
        tensors[0].update(zip(own, views, strict=True))
        parts[0].held += own
        return Holding(rank, parts, tensors)

    def close(self) -> None:
        """Close it; the memory is free when nobody has it open, or maps it."""
        self._views.clear()
        self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    # Over to another host ---------------------------------------------------------------------

    def begin_receive(self, size: int) -> memoryview:
        """Return the memory for so many bytes of tensors, which are another rank's."""
        self._begin(size)
        assert self._memory is not None
        return memoryview(self._memory)[_TENSORS : _TENSORS + size]

    def end_receive(self, key: tuple[int, int], size: int, description: bytes) -> None:
        """Take the version as whole."""
        self._end(key, size, description)

    def tensors(self, size: int) -> memoryview:
        """Return the first bytes of the tensors, to send."""
        assert self._memory is not None
        return memoryview(self._memory)[_TENSORS : _TENSORS + size]

    def _begin(self, size: int) -> None:
        os.pwrite(self.fd, _INVALID, 0)
        if self._memory is None or len(self._memory) < _TENSORS + size:
            self._views, self._written = [], ()
            os.ftruncate(self.fd, _TENSORS + size)
            self._memory = mmap.mmap(self.fd, _TENSORS + size)

    def _end(self, key: tuple[int, int], size: int, description: bytes) -> None:
        os.pwrite(self.fd, description, _TENSORS + size)
        os.pwrite(self.fd, _HEAD.pack(*key, size, len(description)), 0)


_Described = tuple[int, list[RankDescription], list[TensorShard]]


def _views(memory: mmap.mmap | None, shards: Sequence[TensorShard]) -> Iterator[Tensor]:
    """Yield the tensors in a version's memory, flat."""
    at = _TENSORS
    for shard in shards:
        dtype, count = DTYPES[shard.dtype], shard.stop - shard.start
        yield (
            torch.frombuffer(memory, dtype=dtype, count=count, offset=at)
            if count
            else torch.empty(0, dtype=dtype)
        )
        at += _size([shard])


def _size(shards: Sequence[TensorShard]) -> int:
    """Return the bytes that they take together, aligned."""
    return sum(-(-shard.nbytes // _ALIGNED) * _ALIGNED for shard in shards)


# ------------------------------------------------------------------------------
# The versions of a generation

Files = list[VersionFile]  # two; of another process those that could be opened


class Versions:
    """This rank's versions in one generation, and those that its host has of other ranks.

    members   the processes of the generation, by rank
    """

    def __init__(
        self,
        generation: int,
        backend: Backend,
        members: Sequence[str],
        pause: Callable[[], object],
    ) -> None:
        self.generation, self.members = generation, tuple(members)
        self._backend, self._pause = backend, pause
        self._rank, self._hosts = backend.rank, backend.topology
        self._apart: Backend | None = None
        self._mine: dict[int, Files] = {}
        self._files: dict[tuple[int, int], Files] = {}  # by the rank that has them, and whose it is

    def _open(self) -> Backend:
        """Create files, and exchange with all ranks where they are; return a group for messages."""
        size = len(self.members)
        self._apart = self._backend.subgroup(range(size))  # no message of the program's
        mine = [rank for rank in range(size) if self._keeper_of(rank) == self._rank]
        self._mine = {rank: _create() for rank in (self._rank, *mine)}
        self._files = {(self._rank, owner): files for owner, files in self._mine.items()}
        told_of = [(at, f.fd, f.inode()) for at, files in self._mine.items() for f in files]
        try:
            told: list[Any] = all_gather_object((os.getpid(), told_of), self._apart)
        except BaseException:
            self.close()
            raise
        for rank, (process, descriptors) in enumerate(told):
            if rank != self._rank and self._hosts[rank] == self._hosts[self._rank]:
                for owner, fd, inode in descriptors:
                    with suppress(OSError):  # another user's, or no Linux: they go with it
                        opened = VersionFile.open_of(process, fd, inode)
                        self._files.setdefault((rank, owner), []).append(opened)
        return self._apart

    def write(self, version: int, part: KeptPart) -> None:
        """Write a version over the older of the two, here and on another host; blocks for that.

        All ranks write alike. The first time, they also open each other's files.
        """
        apart = self._apart or self._open()
        key, file = (version, self.generation), _older(self._mine[self._rank])
        file.write(key, part, self._pause)
        to = self._keeper_of(self._rank)
        guests = {
            owner: _older(files) for owner, files in self._mine.items() if owner != self._rank
        }
        works: list[Work[Any]] = []
        heads = {owner: memoryview(bytearray(16)) for owner in guests}
        if to is not None:
            size = _size([piece.shard for piece in part.pieces])
            told = part.description(own=False)
            head = struct.pack("<qq", size, len(told))
            works += [apart.isend(each, to) for each in (head, told, file.tensors(size)) if each]
        for owner, theirs in heads.items():
            apart.recv(theirs, owner)
        for owner, guest in guests.items():
            size, length = struct.unpack("<qq", heads[owner])
            described, memory = bytearray(length), guest.begin_receive(size)
            apart.recv(described, owner)
            if size:
                apart.recv(memory, owner)
            guest.end_receive(key, size, bytes(described))
        for work in works:
            work.wait()

    def held(self) -> list[HeldPart]:
        """Return the parts that this rank can read."""
        return [
            HeldPart(version, self.generation, owner, len(self.members))
            for (_, owner), files in self._files.items()
            for version, _ in (file.version() for file in files)
            if version >= 0
        ]

    def give(self, version: int, living: Sequence[str]) -> list[Holding]:
        """Return the parts of a version that this rank can give: its own, and those of processes
        that are none of the `living`. Others may have copies of these, too.
        """
        return [
            file.read()
            for (holder, owner), files in self._files.items()
            if owner == self._rank == holder or self.members[owner] not in living
            for file in files
            if file.version() == (version, self.generation)
        ]

    def _keeper_of(self, rank: int) -> int | None:
        """Return the next rank of another host, which has a rank's versions, too."""
        size = len(self.members)
        after = [(rank + distance) % size for distance in range(1, size)]
        return next((each for each in after if self._hosts[each] != self._hosts[rank]), None)

    def close(self) -> None:
        """Close all files; the memory of tensors that were read stays while they are used."""
        for files in self._files.values():
            for file in files:
                file.close()
        self._files.clear()
        if self._apart is not None:
            self._apart.close()


def _create() -> Files:
    return [VersionFile.create(), VersionFile.create()]


def _older(files: Files) -> VersionFile:
    return min(files, key=lambda file: file.version())
