"""The safetensors format: names, dtypes, and the header in front of the tensors' bytes.

    8 bytes    length of the header, little-endian
    header     JSON: {name: {dtype, shape, data_offsets: [begin, end]}}, padded with spaces
    data       the tensors' bytes; begin and end count from here

Both checkpoints (`tensor_files.py`) and Hugging Face's files (`pretrained.py`, `ops/interop/`)
are in this format.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod
from types import MappingProxyType

import msgspec

from phalanx import files
from phalanx.checkpoint.manifest import Count, Shape, decode
from phalanx.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    plain,
)
from phalanx.wire.codec import DTYPES

METADATA = "__metadata__"  # a key of the header, which no tensor can have
ALIGNMENT = 8
LONGEST_HEADER = 32 << 20  # bytes that are read: of some 300,000 tensors
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES_ON_DISK: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType(
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
"""The dtype's name in the format, and the dimensions that it adds to the shape there."""


DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{dtype: name for dtype, (name, more) in DTYPES_ON_DISK.items() if not more},
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "complex64": "C64",
    }
)
"""The format's name of each dtype that the safetensors library reads."""


_DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {name: (dtype, DTYPES[dtype].itemsize) for dtype, name in DTYPE_NAMES.items()}
)


def header_bytes(
    metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, Iterable[int], int]]
) -> bytes:
    """Return the start of a file of these tensors, whose bytes follow in this order.

    tensors   name, dtype in the format, shape there, and size in bytes of each
    """
    header: dict[str, object] = {METADATA: metadata}
    begin = 0
    for name, dtype, shape, nbytes in tensors:
        places = [begin, begin + nbytes]
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": places}
        begin += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_into(descriptor: int, path: str, memory: memoryview, at: int) -> None:
    """Fill memory with the bytes of a file from `at` on; `CheckpointDamagedError` at its end."""
    while memory:
        count = os.preadv(descriptor, [memory], at)
        if count == 0:
            raise CheckpointDamagedError(f"{path} ends at byte {at}: it was truncated")
        memory, at = memory[count:], at + count


class TensorEntry(msgspec.Struct, gc=False, frozen=True):
    """A tensor in a file: its dtype and shape, and its first byte there."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    at: int


class _Said(msgspec.Struct, gc=False):
    """A header's entry of a tensor. Its metadata is decoded as one, too: texts by any names."""

    dtype: str = ""
    shape: Shape | str | None = None
    data_offsets: tuple[Count, Count] | str | None = None


_PLACES = re.compile(rb'"data_offsets"\s*:\s*\[')


def _header_text(path: str) -> tuple[bytearray, int]:
    """Return a file's header, not decoded, and the file's size."""
    try:
        with files.reading(path, follow=True) as descriptor:
            size = os.fstat(descriptor).st_size
            start = bytearray(8)
            read_into(descriptor, path, memoryview(start), 0)
            length = int.from_bytes(start, "little")
            if length > min(LONGEST_HEADER, size - 8):
                raise CheckpointDamagedError(
                    f"{path} has {size} bytes, and announces a header of {length}; at most "
                    f"{LONGEST_HEADER} are read"
                )
            text = bytearray(length)
            read_into(descriptor, path, memoryview(text), 8)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is no {path}") from None
    return text, size


def read_header(path: str) -> dict[str, TensorEntry]:
    """Read the place of each tensor in a file. The file may come from a stranger.

    Raises `CheckpointDamagedError` for a header that contradicts itself, `CheckpointNotFoundError`.
    """
    text, size = _header_text(path)
    said = decode(text, dict[str, _Said], path)
    said.pop(METADATA, None)
    if len(_PLACES.findall(text)) > len(said):
        raise CheckpointDamagedError(f"{path} cannot be read: a name is there twice")
    first, found, places = 8 + len(text), {}, []
    for name, entry in said.items():
        shape, place = entry.shape, entry.data_offsets
        if type(shape) is not tuple or type(place) is not tuple:
            raise CheckpointDamagedError(f"{path}: {plain(name)} lacks what says where it is")
        if entry.dtype not in _DTYPES:
            raise CheckpointMismatchError(
                f"{path}: {plain(name)} is of dtype {plain(entry.dtype)}, which is not known"
            )
        dtype, itemsize = _DTYPES[entry.dtype]
        begin, end = place
        if end - begin != prod(shape) * itemsize or first + end > size:
            raise CheckpointDamagedError(
                f"{path}: {plain(name)}, {dtype} {list(shape)}, cannot be bytes {begin}:{end} of "
                f"{size - first}"
            )
        places.append(place)
        found[name] = TensorEntry(path, dtype, shape, first + begin)
    for (_, reached), (begin, _) in pairwise(sorted(places)):
        if begin < reached:
            raise CheckpointDamagedError(f"{path}: a tensor lies over another tensor, at {begin}")
    return found
