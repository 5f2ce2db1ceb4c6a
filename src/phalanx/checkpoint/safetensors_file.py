"""The safetensors format, written block by block, so that checksums are of what was in memory.

    8 bytes    length of the header, the lowest byte first
    header     JSON: {name: {dtype, shape, data_offsets: [begin, end]}}, padded with spaces
    data       the tensors' bytes one after the other, those with the largest elements first, so
               that each begins where its elements may

A dtype that the format does not have is written as one that it has: complex numbers as pairs of
floats, the others as their bytes. The manifest says what they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from xxhash import xxh3_64

from phalanx.checkpoint.manifest import FileRecord
from phalanx.checkpoint.storage import opened, write_all
from phalanx.wire.codec import DTYPES

BLOCK = 4 << 20  # bytes that have one checksum: what a reader has to read at least
METADATA = "__metadata__"  # a name in the header that no tensor can have
_ALIGNMENT = 8

_NAMES: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType(
    {
        "bool": ("BOOL", ()),
        "uint8": ("U8", ()),
        "int8": ("I8", ()),
        "uint16": ("U16", ()),
        "int16": ("I16", ()),
        "uint32": ("U32", ()),
        "int32": ("I32", ()),
        "uint64": ("U64", ()),
        "int64": ("I64", ()),
        "float16": ("F16", ()),
        "bfloat16": ("BF16", ()),
        "float32": ("F32", ()),
        "float64": ("F64", ()),
        "float8_e4m3fn": ("F8_E4M3", ()),
        "float8_e5m2": ("F8_E5M2", ()),
        "complex32": ("F16", (2,)),
        "complex64": ("F32", (2,)),
        "complex128": ("F64", (2,)),
    }
)
"""What a dtype is called in the format, and what its shape ends in there."""


class Content(NamedTuple):
    """A tensor of a file: all of one of this shape, or elements start:stop, as one dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return (self.stop - self.start) * DTYPES[self.dtype].itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.start == 0 and self.stop == prod(self.shape)


class FileLayout(NamedTuple):
    """A file before it is written: its header, its tensors, and where in it each begins."""

    name: str
    header: bytes
    contents: list[tuple[Content, int]]

    @property
    def bytes(self) -> int:
        """How long the file will be."""
        if not self.contents:
            return len(self.header)
        last, at = self.contents[-1]
        return at + last.nbytes


def lay_out(name: str, contents: Iterable[Content]) -> FileLayout:
    """The layout of a file with these tensors; the same for the same tensors."""
    ordered = sorted(contents, key=lambda content: -DTYPES[content.dtype].itemsize)
    header: dict[str, object] = {METADATA: _metadata(ordered)}
    begins, end = [], 0
    for content in ordered:
        begins.append(end)
        end += content.nbytes
        itemsize = DTYPES[content.dtype].itemsize
        dtype, more = _NAMES.get(content.dtype, ("U8", (itemsize,) if itemsize > 1 else ()))
        shape = content.shape if content.is_whole else (content.stop - content.start,)
        header[content.name] = {
            "dtype": dtype,
            "shape": [*shape, *more],
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return FileLayout(
        name,
        len(text).to_bytes(8, "little") + text,
        [(content, start + begin) for content, begin in zip(ordered, begins, strict=True)],
    )


def _metadata(contents: Sequence[Content]) -> dict[str, str]:
    """What the format lets anyone add, as text: which tensors are parts, and of what."""
    parts = {
        content.name: {"shape": content.shape, "start": content.start, "stop": content.stop}
        for content in contents
        if not content.is_whole
    }
    return {"format": "pt", **({"phalanx.parts": json.dumps(parts)} if parts else {})}


def write_tensors(
    folder: str, layout: FileLayout, bytes_of: Callable[[str], memoryview], block: int = BLOCK
) -> FileRecord:
    """Write a new file, safe but for its name in its folder. OSErrors name it.

    bytes_of   gives the memory of a tensor, by its name; called once for each
    """
    checksums = Checksums(block)
    with opened(
        os.path.join(folder, layout.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL
    ) as descriptor:
        contents = (bytes_of(content.name) for content, _ in layout.contents)
        for memory in (memoryview(layout.header), *contents):
            for begin in range(0, len(memory), block):
                part = memory[begin : begin + block]
                checksums.add(part)
                write_all(descriptor, part)
        os.fsync(descriptor)
    return FileRecord(layout.name, checksums.bytes, block, checksums.finish())


class Checksums:
    """Those of the blocks of a file that goes by in parts of any length."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._hash = xxh3_64()
        self._done: list[str] = []
        self.bytes = 0

    def add(self, part: memoryview) -> None:
        """The next bytes of the file."""
        while part:
            room = self._block - self.bytes % self._block
            now, part = part[:room], part[room:]
            self._hash.update(now)
            self.bytes += len(now)
            if self.bytes % self._block == 0:
                self._end_block()

    def finish(self) -> str:
        """The checksums of all blocks, one after the other."""
        if self.bytes % self._block:
            self._end_block()
        return "".join(self._done)

    def _end_block(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash.reset()
