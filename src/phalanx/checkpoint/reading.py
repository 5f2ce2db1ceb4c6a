"""Reading parts of files, checked: of each file only the blocks that have something wanted in them.

file     |--block 0--|--block 1--|--block 2--|-
wanted                    ####      ##
read                 |-----------|-----------|        and their checksums compared
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from phalanx.backends.memory import tensor_bytes
from phalanx.checkpoint.disk import opened
from phalanx.checkpoint.manifest import FileRecord, Manifest, Piece, TensorRecord
from phalanx.collectives.objects import DTYPES
from phalanx.errors import CheckpointDamagedError


class Stretch(NamedTuple):
    """Elements start:stop of a tensor, out of one piece of it."""

    piece: Piece
    start: int
    stop: int


def stretches(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Stretch]:
    """Where elements start:stop are, each once, in order; the pieces are ordered by `start`."""
    for piece in pieces:
        until = min(stop, piece.stop)
        if piece.start <= start < until:
            yield Stretch(piece, start, until)
            start = until


class _Want(NamedTuple):
    """Bytes of a file from `at` on, and where they go."""

    at: int
    into: memoryview

    @property
    def end(self) -> int:
        return self.at + len(self.into)


class Reader:
    """Tensors of a checkpoint, asked for first and read later, together.

    bytes_read   how many `read` has read
    """

    def __init__(self, path: str, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._wants: dict[int, list[_Want]] = defaultdict(list)
        self._whole: dict[str, Tensor] = {}
        self.bytes_read = 0

    def part(self, record: TensorRecord, start: int, stop: int) -> Tensor:
        """Elements start:stop of a tensor, in one dimension; their values come with `read`."""
        flat = torch.empty(stop - start, dtype=DTYPES[record.dtype])
        memory, size = tensor_bytes(flat), flat.element_size()
        for piece, begin, end in stretches(record.pieces, start, stop):
            into = memory[size * (begin - start) : size * (end - start)]
            self._wants[piece.file].append(_Want(piece.at + size * (begin - piece.start), into))
        return flat

    def whole(self, name: str) -> Tensor:
        """A tensor that is kept for itself; its values come with `read`. Again: the same."""
        if name not in self._whole:
            record = self.record(name)
            self._whole[name] = self.part(record, 0, record.numel).view(record.shape)
        return self._whole[name]

    def record(self, name: str) -> TensorRecord:
        """Where a tensor is that is kept beside the model's."""
        if name not in self._manifest.state:
            raise CheckpointDamagedError(f"{self._path} does not say where {name} is")
        return self._manifest.state[name]

    def read(self) -> None:
        """Read what was asked for.

        Raises `CheckpointDamagedError` for a file that is missing or not as it was written.
        """
        for number, wants in sorted(self._wants.items()):
            file = self._manifest.files[number]
            path = os.path.join(self._path, file.name)
            try:
                with opened(path, os.O_RDONLY) as descriptor:
                    self._read_file(descriptor, path, file, sorted(wants, key=lambda w: w.at))
            except FileNotFoundError:
                raise CheckpointDamagedError(f"{path} is missing") from None
        self._wants.clear()

    def _read_file(
        self, descriptor: int, path: str, file: FileRecord, wants: Sequence[_Want]
    ) -> None:
        size = os.fstat(descriptor).st_size
        if size != file.bytes:
            how = "truncated" if size < file.bytes else "longer"
            raise CheckpointDamagedError(
                f"{path} is {how}: it has {size} bytes, and had {file.bytes} when it was written"
            )
        buffer = memoryview(bytearray(min(file.block, file.bytes)))
        done = -1  # the last block that was read
        first = 0  # of those that may want something of the next one
        for want in wants:
            for number in range(want.at // file.block, -(-want.end // file.block)):
                if number <= done:
                    continue
                begin = number * file.block
                end = min(begin + file.block, file.bytes)
                whole = want.at <= begin and end <= want.end
                into = (
                    want.into[begin - want.at : end - want.at] if whole else buffer[: end - begin]
                )
                self._read_block(descriptor, path, begin, into)
                if xxh3_64_hexdigest(into) != file.checksum(number):
                    raise CheckpointDamagedError(
                        f"{path} is not as it was written: the checksum of its bytes "
                        f"{begin}:{end} differs"
                    )
                while wants[first].end <= begin and wants[first] is not want:
                    first += 1
                if not whole:
                    _hand_out(wants, first, begin, end, into)
                done = number

    def _read_block(self, descriptor: int, path: str, begin: int, into: memoryview) -> None:
        while into:
            count = os.preadv(descriptor, [into], begin)
            if count == 0:
                raise CheckpointDamagedError(f"{path} ends at byte {begin}: it was truncated")
            self.bytes_read += count
            begin, into = begin + count, into[count:]


def _hand_out(wants: Sequence[_Want], first: int, begin: int, end: int, block: memoryview) -> None:
    """Copy what is wanted of a block, bytes begin:end of the file, to where it goes."""
    for at in range(first, len(wants)):
        want = wants[at]
        if want.at >= end:
            break
        low, high = max(begin, want.at), min(end, want.end)
        if low < high:
            want.into[low - want.at : high - want.at] = block[low - begin : high - begin]
