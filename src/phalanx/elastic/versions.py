"""Kept versions: a checkpoint's parts, in memory that lives on when the rank that wrote it dies.

Each rank writes, at the end of a step and before the vote on it, what it would write into a
checkpoint. It has two files without a name for that, which the other ranks of its host have open:

    rank 1, host a     file 0: version 6, complete      file 1: version 7, being written: invalid
                          |
    rank 0, host a     has both open; if rank 1 is killed, it gives version 6 in its place

A version is overwritten by the one after the next, so by one whose step is voted on after all ranks
have written the one in between. What all ranks hold, as with DDP, is written in equal parts; what
one rank holds, as with a shard or a residual, is written whole by that one.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint.save_plan import RankDescription
from phalanx.checkpoint.tensor_files import TensorShard
from phalanx.collectives import all_gather_object, chunk_ranges
from phalanx.core.backend import Backend
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


class Piece(NamedTuple):
    """Elements of a tensor that this rank writes into each version, as `shard` describes them."""

    shard: TensorShard
    tensor: Tensor
    start: int
    stop: int

    def values(self) -> Tensor:
        """Return these elements as they are now, flat, on the CPU."""
        flat = plain(self.tensor.detach().cpu()).view(-1)
        return flat if self.stop - self.start == flat.numel() else flat[self.start : self.stop]


class Part(NamedTuple):
    """What one rank writes: a description for each optimizer, and the pieces that these list."""

    rank: int
    parts: list[RankDescription]
    pieces: list[Piece]


def part_of(holding: Holding, ranks: int, replicated: Collection[str]) -> Part:
    """Return what this rank writes of all that it holds, so that the ranks' parts are complete.

    replicated   the names of tensors that all ranks hold whole, with equal values
    """
    parts, pieces = [], []
    for description, tensors in zip(holding.parts, holding.tensors, strict=True):
        chosen: list[Piece] = []
        for shard, tensor in tensors.items():
            begin, end = 0, shard.stop - shard.start
            if shard.name in replicated and shard.nbytes >= _WHOLE:
                begin, end = chunk_ranges(end, ranks)[holding.rank]
                shard = msgspec.structs.replace(shard, start=begin, stop=end)  # noqa: PLW2901
            elif shard.kind == "model" and not shard.equal and holding.rank > 0:
                continue  # a buffer: rank 0's is the checkpoint's
            chosen.append(Piece(shard, tensor, begin, end))
        parts.append(msgspec.structs.replace(description, held=[each.shard for each in chosen]))
        pieces += chosen
    return Part(holding.rank, parts, pieces)


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
    def open_of(cls, process: int, fd: int) -> VersionFile:
        """Open one that another process has; OSError if that may not be."""
        return cls(os.open(f"/proc/{process}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))

    def version(self) -> tuple[int, int] | None:
        """Return the version and generation that is whole in it, or None."""
        head = os.pread(self.fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or head == _INVALID:
            return None
        version, generation, *_ = _HEAD.unpack(head)
        return version, generation

    def write(self, version: int, generation: int, part: Part, pause: Callable[[], object]) -> None:
        """Write a version over the one before, which is gone then; call `pause` in between."""
        os.pwrite(self.fd, _INVALID, 0)
        described = msgspec.json.encode((part.rank, part.parts))
        shards = [piece.shard for piece in part.pieces]
        if self._written != shards:
            self._make_room(shards)
        pause()
        for view, piece in zip(self._views, part.pieces, strict=True):
            copy_bits(view, piece.values())
            pause()
        size = _size(shards)
        os.pwrite(self.fd, described, _TENSORS + size)
        os.pwrite(self.fd, _HEAD.pack(version, generation, size, len(described)), 0)

    def read(self) -> Holding:
        """Return the version that is whole in it; its memory stays while the tensors are used."""
        _, _, size, length = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))
        told = os.pread(self.fd, length, _TENSORS + size)
        rank, parts = msgspec.json.decode(told, type=learned(tuple[int, list[RankDescription]]))
        views = self._map(size, [shard for part in parts for shard in part.held], mmap.ACCESS_COPY)
        return Holding(rank, parts, [{each: next(views) for each in part.held} for part in parts])

    def close(self) -> None:
        """Close it; the memory is free when nobody has it open, or maps it."""
        self._views.clear()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _make_room(self, shards: Sequence[TensorShard]) -> None:
        self._views.clear()
        os.ftruncate(self.fd, _TENSORS + _size(shards))
        self._views = list(self._map(_size(shards), shards, mmap.ACCESS_WRITE))
        self._written = shards

    def _map(self, size: int, shards: Sequence[TensorShard], access: int) -> Iterator[Tensor]:
        memory = mmap.mmap(self.fd, _TENSORS + size, access=access)
        for shard, at in zip(shards, _places(shards), strict=True):
            dtype, count = DTYPES[shard.dtype], shard.stop - shard.start
            yield (
                torch.frombuffer(memory, dtype=dtype, count=count, offset=_TENSORS + at)
                if count
                else torch.empty(0, dtype=dtype)
            )


def _places(shards: Sequence[TensorShard]) -> Iterator[int]:
    at = 0
    for shard in shards:
        yield at
        at += -(-shard.nbytes // _ALIGNED) * _ALIGNED


def _size(shards: Sequence[TensorShard]) -> int:
    return sum(-(-shard.nbytes // _ALIGNED) * _ALIGNED for shard in shards)


# ------------------------------------------------------------------------------
# The versions of a generation


class Versions:
    """This rank's versions in one generation, and those of the other ranks of its host.

    members   the processes of the generation, by rank
    """

    def __init__(
        self,
        generation: int,
        backend: Backend,
        members: Sequence[str],
        pause: Callable[[], object],
    ) -> None:
        """Exchange with all ranks where the files are."""
        self.generation, self.members = generation, tuple(members)
        self._rank, self._hosts, self._pause = backend.rank, backend.topology, pause
        self._files = {self._rank: [VersionFile.create(), VersionFile.create()]}
        own = os.getpid(), *(file.fd for file in self._files[self._rank])
        try:
            self._told: list[Sequence[int]] = list(all_gather_object(own, backend))  # type: ignore[arg-type]
        except BaseException:
            self.close()
            raise
        here = self._hosts[self._rank]
        for rank, (process, *descriptors) in enumerate(self._told):
            if rank != self._rank and self._hosts[rank] == here:
                with suppress(OSError):  # another user's, or no Linux: its versions go with it
                    self._files[rank] = [VersionFile.open_of(process, fd) for fd in descriptors]

    def write(self, version: int, part: Part) -> None:
        """Write a version over the older of the two."""
        first, second = self._files[self._rank]
        known = first.version(), second.version()
        older = second if known[0] and (known[1] is None or known[0] > known[1]) else first
        if known[0] is None:
            older = first
        older.write(version, self.generation, part, self._pause)

    def held(self) -> list[HeldPart]:
        """Return the parts that this rank can read."""
        return [
            HeldPart(version[0], self.generation, rank, len(self.members))
            for rank, files in self._files.items()
            for version in (file.version() for file in files)
            if version is not None
        ]

    def give(self, version: int, living: Sequence[str]) -> list[Holding]:
        """Return the parts of a version that this rank gives: its own, and of those of its host
        whose process is not one of the `living` if it is the first of these there.
        """
        given = []
        for rank, files in self._files.items():
            if self._giver(rank, living) != self._rank:
                continue
            for file in files:
                if file.version() == (version, self.generation):
                    given.append(file.read())
                    break
        return given

    def _giver(self, owner: int, living: Sequence[str]) -> int | None:
        if self.members[owner] in living:
            return owner
        there = [
            rank
            for rank, member in enumerate(self.members)
            if member in living and self._hosts[rank] == self._hosts[owner]
        ]
        return min(there, default=None, key=lambda rank: living.index(self.members[rank]))

    def close(self) -> None:
        """Close all files; the memory of tensors that were read stays while they are used."""
        for files in self._files.values():
            for file in files:
                file.close()
        self._files.clear()
