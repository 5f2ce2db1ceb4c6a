"""Files of tensors in the safetensors format: written and read in blocks with checksums.

The tensors with the largest elements come first, so that all are aligned. The format is written
here and in `safetensors_format.py`, since the safetensors library cannot keep the promises of
`save_checkpoint` and `load_checkpoint`. It writes without checksums and fsync, and reads through
a memory map: a truncated file or a failing disk ends the process (SIGBUS) instead of raising.

A dtype that the format lacks is written as one that it has: complex numbers as pairs of floats, the
others as bytes. The manifest has the true dtype.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from phalanx import files
from phalanx.checkpoint.manifest import (
    FileRecord,
    Json,
    Manifest,
    StoredShard,
    TensorRecord,
    from_json,
)
from phalanx.checkpoint.safetensors_format import DTYPES_ON_DISK, header_bytes, read_into
from phalanx.errors import CheckpointDamagedError, CheckpointError, plain
from phalanx.parallel.wrapper import Slice
from phalanx.wire.codec import DTYPES
from phalanx.wire.memory import tensor_bytes

BLOCK = 4 << 20  # bytes that share one checksum: the least that a reader reads
HELD = 64 << 20  # bytes that a conversion holds at a time

FileKind = Literal["model", "state"]


class TensorShard(msgspec.Struct, frozen=True, array_like=True):
    """Elements start:stop of a tensor, which a rank could write.

    kind    of file: which of a rank's two it belongs to
    equal   ranks that hold these elements have equal values, so any of them may write them; else
            the first of these ranks does
    """

    kind: FileKind
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    equal: bool

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.dtype].itemsize

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == prod(self.shape)


# ------------------------------------------------------------------------------
# Writing


class PlannedFile(NamedTuple):
    """A file to be written: the rank that writes it, its header, and each shard's first byte.

    A shard that is a whole tensor has the tensor's shape there; others have one dimension.
    """

    rank: int
    kind: FileKind
    name: str
    header: bytes
    shards: list[tuple[TensorShard, int]]


def lay_out(rank: int, kind: FileKind, name: str, shards: Iterable[TensorShard]) -> PlannedFile:
    """Plan a file of these shards; the same shards give the same file."""
    ordered = sorted(shards, key=lambda shard: -DTYPES[shard.dtype].itemsize)
    parts = {
        shard.name: {"shape": shard.shape, "start": shard.start, "stop": shard.stop}
        for shard in ordered
        if not shard.is_whole
    }
    metadata = {"format": "pt", **({"phalanx.parts": json.dumps(parts)} if parts else {})}
    tensors = []
    for shard in ordered:
        itemsize = DTYPES[shard.dtype].itemsize
        as_bytes = ("U8", (itemsize,) if itemsize > 1 else ())
        dtype, more = DTYPES_ON_DISK.get(shard.dtype, as_bytes)
        shape = shard.shape if shard.is_whole else (shard.stop - shard.start,)
        tensors.append((shard.name, dtype, (*shape, *more), shard.nbytes))
    header = header_bytes(metadata, tensors)
    begins = accumulate((shard.nbytes for shard in ordered), initial=len(header))
    return PlannedFile(rank, kind, name, header, list(zip(ordered, begins, strict=False)))


def write_tensors(
    folder: str,
    file: PlannedFile,
    bytes_of: Callable[[TensorShard], memoryview],
    block: int = BLOCK,
) -> FileRecord:
    """Write a new file; its bytes are durable, its name is not yet. OSErrors name it.

    bytes_of   returns the memory of a shard; called once for each, in their order
    """
    size, checksums, of_block = 0, [], xxh3_64()
    path = os.path.join(folder, file.name)
    with files.new_file(path) as descriptor:
        contents = (bytes_of(shard) for shard, _ in file.shards)  # copies are there one at a time
        for memory in chain([memoryview(file.header)], contents):
            rest = memory
            while rest:
                room = block - size % block
                now, rest = rest[:room], rest[room:]
                of_block.update(now)
                files.write_all(descriptor, now)
                size += len(now)
                if size % block == 0:
                    checksums.append(of_block.hexdigest())
                    of_block.reset()
        os.fsync(descriptor)
    if size % block:
        checksums.append(of_block.hexdigest())
    return FileRecord(file.name, size, block, "".join(checksums))


# ------------------------------------------------------------------------------
# Reading: of each file only the blocks with requested bytes
#
#     file        |--block 0--|--block 1--|--block 2--|-
#     requested                    ####      ##
#     read                    |-----------|-----------|     and their checksums compared


def overlaps(
    shards: Sequence[StoredShard], start: int, stop: int
) -> Iterator[tuple[StoredShard, int, int]]:
    """Yield the elements of shards that are elements start:stop; each once, in order.

    The shards are ordered by `start`, and may overlap.
    """
    for shard in shards:
        until = min(stop, shard.stop)
        if shard.start <= start < until:
            yield shard, start, until
            start = until


_Request = tuple[int, memoryview]
"""Where bytes of a file begin, and the memory for them."""


class Reader:
    """Tensors of a checkpoint: all are requested first, and then read together."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        self._path = path
        self.manifest = manifest
        self._requests: dict[int, list[_Request]] = defaultdict(list)
        self._whole: dict[str, Tensor] = {}
        self._referred = 0  # bytes of the copies that values get
        self._most = HELD + 16 * sum(file.bytes for file in manifest.files)

    def part(self, record: TensorRecord, part: Slice) -> Tensor:
        """Request a part of a tensor: a flat one, which `read` fills."""
        try:
            flat = torch.empty(part.numel, dtype=DTYPES[record.dtype])
        except (MemoryError, RuntimeError):
            raise CheckpointError(
                f"{self._path} has a tensor, {record.dtype} {list(record.shape)}, for which there "
                "is no memory here"
            ) from None
        memory, size = tensor_bytes(flat), flat.element_size()
        for shard, first, last in overlaps(record.pieces, part.start, part.stop):
            into = memory[size * (first - part.start) : size * (last - part.start)]
            begin = shard.at + size * (first - shard.start)
            self._requests[shard.file].append((begin, into))
        return flat

    def whole(self, name: str) -> Tensor:
        """Request a whole tensor of the state files; return the same one if requested again."""
        if name not in self._whole:
            record = self.record(name)
            self._whole[name] = self.part(record, Slice.whole(record.shape)).view(record.shape)
        self._referred += self._whole[name].nbytes
        if self._referred > self._most:
            raise CheckpointDamagedError(f"{self._path} refers too often to {plain(name)}")
        return self._whole[name]

    def copy(self, name: str) -> Tensor:
        """Return a new tensor with the elements that were read; values may share a name."""
        return self.whole(name).clone()

    def request(self, encoded: Json, kind: type[object] = object) -> Json:
        """Request the tensors of a value; return the value, which is still encoded.

        Raises `CheckpointDamagedError` unless it encodes a value of that type.
        """
        try:
            value = from_json(encoded, self.whole)
        except CheckpointDamagedError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointDamagedError(f"{self._path} cannot be read: {error}") from error
        if not isinstance(value, kind):
            raise CheckpointDamagedError(
                f"{self._path} cannot be read: it has {type(value).__name__} in place of a "
                f"{kind.__name__}"
            )
        return encoded

    def record(self, name: str) -> TensorRecord:
        """Return the record of a tensor of the state files."""
        if name not in self.manifest.state:
            raise CheckpointDamagedError(f"{self._path} does not say where {name} is")
        return self.manifest.state[name]

    def read(self) -> None:
        """Read the requested tensors; `CheckpointDamagedError` for a file that has changed."""
        for number, requests in sorted(self._requests.items()):
            file = self.manifest.files[number]
            path = os.path.join(self._path, file.name)
            try:
                with files.reading(path) as descriptor:
                    _read_blocks(descriptor, path, file, requests)
            except FileNotFoundError:
                raise CheckpointDamagedError(f"{path} is missing") from None
        self._requests.clear()


def copy_tensors(
    reader: Reader,
    records: Iterable[TensorRecord],
    write: Callable[[memoryview], object],
    most: int = HELD,
) -> None:
    """Give the bytes of tensors to `write`, one tensor after the other; hold `most` at a time.

    Small tensors are read together, large ones in parts. Raises as `Reader.read`.
    """
    parts: list[Tensor] = []
    room = most

    def flush() -> None:
        reader.read()
        parts.reverse()
        while parts:
            write(tensor_bytes(parts.pop()))

    for record in records:
        size, start, count = DTYPES[record.dtype].itemsize, 0, prod(record.shape)
        while start < count:
            if room < size:
                flush()
                room = most
            stop = min(count, start + room // size)
            parts.append(reader.part(record, Slice(record.shape, start, stop)))
            room -= size * (stop - start)
            start = stop
    flush()


def verify_file(folder: str, file: FileRecord, advance: Callable[[int], object]) -> None:
    """Read all of a file, and compare it with its checksums; `advance` gets each block's size.

    Raises `CheckpointDamagedError`, which names the first damaged bytes.
    """
    path = os.path.join(folder, file.name)
    try:
        with files.reading(path) as descriptor:
            _check_size(descriptor, path, file)
            buffer = memoryview(bytearray(min(file.block, file.bytes)))
            for number in range(-(-file.bytes // file.block)):
                block = buffer[: min(file.block, file.bytes - number * file.block)]
                _read_block(descriptor, path, file, number, block)
                advance(len(block))
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{path} is missing") from None


def _check_size(descriptor: int, path: str, file: FileRecord) -> None:
    size = os.fstat(descriptor).st_size
    if size != file.bytes:
        how = "truncated" if size < file.bytes else "longer"
        raise CheckpointDamagedError(
            f"{path} is {how}: it has {size} bytes, and had {file.bytes} when it was written"
        )


def _read_blocks(
    descriptor: int, path: str, file: FileRecord, requests: Sequence[_Request]
) -> None:
    _check_size(descriptor, path, file)
    by_block: dict[int, list[_Request]] = defaultdict(list)
    for request in requests:
        first, into = request
        for number in range(first // file.block, -(-(first + len(into)) // file.block)):
            by_block[number].append(request)
    buffer = memoryview(bytearray(min(file.block, file.bytes)))
    for number, wanted in sorted(by_block.items()):
        begin = number * file.block
        end = min(begin + file.block, file.bytes)
        block = buffer[: end - begin]
        direct = None
        for first, into in wanted:
            if first <= begin and end <= first + len(into):  # read into place
                direct, block = into, into[begin - first : end - first]
        _read_block(descriptor, path, file, number, block)
        for first, into in wanted:
            if into is not direct:
                low, high = max(begin, first), min(end, first + len(into))
                into[low - first : high - first] = block[low - begin : high - begin]


def _read_block(
    descriptor: int, path: str, file: FileRecord, number: int, block: memoryview
) -> None:
    """Read a block of a file, and compare it with its checksum."""
    begin = number * file.block
    read_into(descriptor, path, block, begin)
    if xxh3_64_hexdigest(block) != file.checksums[16 * number : 16 * (number + 1)]:
        raise CheckpointDamagedError(
            f"{path} is not as it was written: the checksum of its bytes {begin}:"
            f"{begin + len(block)} differs"
        )
