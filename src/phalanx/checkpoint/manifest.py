"""The manifest of a checkpoint, its commit record, and Python values as JSON.

Both records are JSON. The manifest has the checksums of all other files, and the commit record has
the manifest's: the commit record, which is small and written last, vouches for everything.
"""

from __future__ import annotations

import base64
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import isclose, prod
from typing import Annotated, Any, TypeVar

import msgspec
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from phalanx.checkpoint.storage import COMMIT, MANIFEST, TENSOR_FILE
from phalanx.errors import CheckpointDamagedError, CheckpointError, UnsupportedObjectError, plain
from phalanx.wire.codec import DEPTH, DIMENSIONS, DTYPES
from phalanx.wire.control import learned

FORMAT = "phalanx checkpoint"
VERSION = 1
MOST_BYTES = 1 << 30  # of a manifest
BLOCKS = range(1 << 10, (1 << 26) + 1)  # bytes that may share a checksum
_T = TypeVar("_T")

# Numbers from a file are bounded before computing with them.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=DIMENSIONS)]


class StoredShard(msgspec.Struct, frozen=True, array_like=True):
    """Elements start:stop of a tensor: their file in the manifest, and their first byte there."""

    file: Count
    at: Count
    start: Count
    stop: Count


class TensorRecord(msgspec.Struct, frozen=True):
    """A tensor and its shards, ordered by `start`, which together are the whole."""

    dtype: str
    shape: Shape
    pieces: list[StoredShard]


class CutRecord(msgspec.Struct, frozen=True):
    """The cuts of a tensor of a tensor-parallel layer, and this checkpoint's part of it.

    dim     the dimension along which it is cut
    total   its length in the whole tensor
    runs    for each part its ranges (start, end), which follow each other in the part
    rank    of this part
    """

    dim: Count
    total: Count
    runs: tuple[tuple[tuple[Count, Count], ...], ...]
    rank: Count


class FileRecord(msgspec.Struct, frozen=True):
    """A file, and the xxh3_64 of each of its blocks in hexadecimal; the last block may be short."""

    name: str
    bytes: Count
    block: Count
    checksums: str


class ShardValue(msgspec.Struct, frozen=True, array_like=True):
    """A value that belongs to elements start:stop of a parameter only."""

    start: Count
    stop: Count
    value: Any


class StateRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An optimizer's state for a parameter under one key; one of the three is set.

    tensor   the name of a tensor with the parameter's shape, which is sharded like the parameter
    value    a value, which does not depend on how the parameter is sharded
    own      a value for each shard
    """

    tensor: str = ""
    value: Any = None
    own: list[ShardValue] = []


class OptionsRecord(msgspec.Struct, frozen=True):
    """A parameter group of an optimizer: the names of its parameters, and its options."""

    parameters: list[str]
    options: Any


class OptimizerRecord(msgspec.Struct, frozen=True):
    """An optimizer: of a rank, or of all. `shared` is state that belongs to no parameter."""

    kind: str
    groups: list[OptionsRecord]
    state: dict[str, dict[str, StateRecord]]
    shared: Any


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of a checkpoint.

    aliases   other names of tied parameters and buffers, with the name that is stored
    values    extra state of modules (`get_extra_state`), by its key in the state dict
    rng       for each rank the name of the tensor with its random state
    own       a value for each rank; empty, and not written, if no rank gave one
    cuts      of a part of a tensor-parallel model: the tensors that are cut; else not written
    """

    format: str
    version: int
    step: Count
    world_size: Count
    phalanx: str
    torch: str
    files: list[FileRecord]
    model: dict[str, TensorRecord]
    aliases: dict[str, str]
    values: dict[str, Any]
    optimizer: OptimizerRecord | None
    state: dict[str, TensorRecord]
    rng: list[str]
    extra: Any
    own: list[Any] = []
    cuts: dict[str, CutRecord] = {}


class Commit(msgspec.Struct, frozen=True):
    """The record that makes a folder a checkpoint: length and hash of the manifest."""

    version: int
    step: Count
    bytes: Count
    xxh3: str


class _Version(msgspec.Struct, frozen=True):
    """The fields of a manifest of any version."""

    format: str = ""
    version: int = 0
    phalanx: str = "?"


def encode(record: Manifest | Commit) -> bytes:
    """Return the record as indented JSON; equal records give equal bytes.

    Raises `CheckpointError` for a record that could not be read.
    """
    content = msgspec.json.format(msgspec.json.encode(record), indent=1)
    if len(content) > MOST_BYTES:
        raise CheckpointError(
            f"the manifest would have {len(content):,} bytes, of which {MOST_BYTES:,} are read: "
            "keep long lists as tensors"
        )
    return content


def decode(content: bytes | bytearray, kind: type[_T], path: str) -> _T:
    """Return the record in a file. Raise `CheckpointDamagedError`, with its path, without one."""
    try:
        return msgspec.json.decode(content, type=learned(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {plain(str(error))}") from None


def decode_manifest(folder: str, commit: bytes, content: bytes) -> Manifest:
    """Return the manifest of a checkpoint, from its commit record and manifest as bytes.

    Raises `CheckpointDamagedError` for a manifest that has changed, or contradicts itself.
    """
    path = os.path.join(folder, COMMIT)
    record = decode(commit, Commit, path)
    if record.version != VERSION:
        raise CheckpointDamagedError(
            f"{path} is of version {record.version}; this is Phalanx for version {VERSION}: load "
            "it with the release that wrote it"
        )
    if encode(record) != commit:
        raise CheckpointDamagedError(f"{path} is not as it was written")
    path = os.path.join(folder, MANIFEST)
    if len(content) != record.bytes:
        raise CheckpointDamagedError(
            f"{path} has {len(content)} bytes, and had {record.bytes} when it was written"
        )
    if xxh3_64_hexdigest(content) != record.xxh3:
        raise CheckpointDamagedError(f"{path} is not as it was written: its checksum differs")
    if content.count(b'"$tensor"') > 1000 + 10 * content.count(b'"dtype"'):
        raise CheckpointDamagedError(f"{path} refers to tensors more often than makes sense")
    version = decode(content, _Version, path)
    if version.format != FORMAT or version.version != VERSION:
        raise CheckpointDamagedError(
            f"{path} is a {plain(version.format)!r} of version {version.version}; this is Phalanx "
            f"for version {VERSION}: load it with the release that wrote it (phalanx "
            f"{plain(version.phalanx)})"
        )
    manifest = decode(content, Manifest, path)
    if manifest.step != record.step:
        raise CheckpointDamagedError(f"{path} is of step {manifest.step}, not {record.step}")
    for problem in _problems(manifest):
        raise CheckpointDamagedError(f"{path} makes no sense: {plain(problem)}")
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions in a manifest: a checkpoint may come from a stranger."""
    size, counts = manifest.world_size, (len(manifest.rng), len(manifest.own) or len(manifest.rng))
    if counts != (size, size) or size < 1:
        yield f"{size} ranks, random states of {counts[0]}, and own values of {counts[1]}"
    if len({file.name for file in manifest.files}) < len(manifest.files):
        yield "a file is there twice"
    if strangers := set(manifest.aliases.values()) - manifest.model.keys():
        yield f"there is no {min(strangers)}, which has other names"
    for file in manifest.files:
        if not TENSOR_FILE.fullmatch(file.name):
            yield f"no file of a checkpoint is named {plain(file.name)!r}"
        if file.block not in BLOCKS:
            yield f"{file.name} has blocks of {file.block} bytes"
        elif len(file.checksums) != 16 * -(-file.bytes // file.block):
            yield f"{file.name} has another number of checksums than of blocks"
    yield from _problems_of_tensors(manifest)
    yield from (
        f"{name} cannot be part {cut.rank} of {len(cut.runs)}, cut along dim {cut.dim}"
        for name, cut in manifest.cuts.items()
        if not _is_cut(manifest.model.get(name), cut)
    )


def _problems_of_tensors(manifest: Manifest) -> Iterator[str]:
    places: list[tuple[int, int, int]] = []
    for name, tensor in (*manifest.model.items(), *manifest.state.items()):
        if tensor.dtype not in DTYPES or prod(n or 1 for n in tensor.shape) >= _MOST:
            yield f"{name} is a {tensor.dtype} of shape {list(tensor.shape)}"
            continue
        size, count, reached = DTYPES[tensor.dtype].itemsize, prod(tensor.shape), 0
        for shard in tensor.pieces:
            if not shard.start <= shard.stop <= count or shard.start > reached:
                yield f"{name} has no elements from {reached} on"
            if shard.file >= len(manifest.files):
                yield f"{name} is in file {shard.file}"
                continue
            file, nbytes = manifest.files[shard.file], size * (shard.stop - shard.start)
            if shard.at + nbytes > file.bytes:
                yield f"{name} reaches beyond the end of {file.name}"
            if nbytes:
                places.append((shard.file, shard.at, shard.at + nbytes))
            reached = max(reached, shard.stop)
        if reached != count:
            yield f"{name} has no elements from {reached} on"
    for (before, _, end), (number, at, _) in pairwise(sorted(places)):
        if before == number and at < end:  # small files would be large tensors
            yield f"bytes {at}:{end} of {manifest.files[number].name} are in two tensors"


def _is_cut(here: TensorRecord | None, cut: CutRecord) -> bool:
    """Return whether a tensor has its part's shape, and all parts together are the whole."""
    if here is None or not (0 <= cut.dim < len(here.shape) and 0 <= cut.rank < len(cut.runs)):
        return False
    reached = 0
    for start, end in sorted(run for of_part in cut.runs for run in of_part):
        if start != reached or end < start:
            return False
        reached = end
    length = sum(end - start for start, end in cut.runs[cut.rank])
    return reached == cut.total and length == here.shape[cut.dim]


# ------------------------------------------------------------------------------
# Python values as JSON, without pickle
#
#     None, bool, str, list    as they are
#     int                      as it is; {"$int": "0x..."} if it is no int64
#     float                    as it is; {"$float": "nan" | "inf" | "-inf"}
#     dict                     as it is if its keys are text without a $ in front, else
#                              {"$dict": [[key, value], ...]}
#     tuple                    {"$tuple": [...]}
#     bytes                    {"$bytes": base64}
#     tensor                   {"$tensor": its name in the state files}
#
# A value of a subclass comes back as the type itself: a Counter as a dict, a numpy.float64 as a
# float.

Json = Any
_MOST = 2**63
_ALIKE = 100  # keys of one hash in a dict


def to_json(value: Any, path: str, keep: Callable[[Tensor, str], str], depth: int = DEPTH) -> Json:
    """Return the value as JSON.

    path    its name in errors, and in the names of tensors
    keep    called with each tensor and its path; returns the name under which it is stored
    depth   levels that it may have

    Raises `UnsupportedObjectError` (a TypeError), naming the part of another type.
    """
    if depth < 0:
        raise UnsupportedObjectError(f"{path} is more than {DEPTH} levels deep, or in itself")

    def inside(part: object, step: object) -> Json:
        return to_json(part, f"{path}.{step}", keep, depth - 1)

    encoded: Json
    match value:
        case None | bool():
            encoded = value
        case Tensor():
            encoded = {"$tensor": keep(value, path)}
        case str():
            encoded = str(value)
        case int():
            encoded = int(value) if -_MOST <= value < _MOST else {"$int": hex(value)}
        case float():
            encoded = float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            encoded = {"$bytes": base64.b64encode(value).decode()}
        case tuple():
            encoded = {"$tuple": [inside(part, at) for at, part in enumerate(value)]}
        case list():
            encoded = [inside(part, at) for at, part in enumerate(value)]
        case dict() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            encoded = {str(key): inside(part, key) for key, part in value.items()}
        case dict():
            pairs = value.items()
            encoded = {"$dict": [[inside(key, "key"), inside(part, key)] for key, part in pairs]}
        case _:
            hint = ". Its tolist() can be kept" * hasattr(value, "tolist")  # NumPy's
            raise UnsupportedObjectError(
                f"{path} is a {type(value).__qualname__}, which a checkpoint cannot keep: it takes "
                "None, bool, int, float, str, bytes, tensors, and lists, tuples and dicts of them"
                + hint
            )
    return encoded


def first_difference(here: Json, there: Json) -> tuple[str, str] | None:
    """Return the first number or text that differs, with its path, as each has it, or has it not;
    or None.

    Two floats may differ in their last digits: processors do not compute a cosine alike.
    """
    ours, theirs, absent = dict(_leaves(here, "")), dict(_leaves(there, "")), object()
    for place in {**ours, **theirs}:
        one, two = ours.get(place, absent), theirs.get(place, absent)
        close = isinstance(one, float) and isinstance(two, float) and isclose(one, two)
        if one != two and not close:
            mine, other = (
                f"no {place}" if each is absent else f"{place} {each!r}" for each in (one, two)
            )
            return mine, other
    return None


def _leaves(value: Json, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, (dict, list)):
        pairs = sorted(value.items()) if isinstance(value, dict) else enumerate(value)
        for step, part in pairs:
            yield from _leaves(part, f"{path}.{step}".lstrip("."))
    else:
        yield path, value


def from_json(encoded: Json, tensor: Callable[[str], Tensor], depth: int = DEPTH) -> Any:
    """Return the original value of `to_json`; `tensor` returns the tensor of a name.

    Raises ValueError, KeyError or TypeError for other JSON than that of `to_json`.
    """
    if depth < 0:
        raise ValueError(f"a value of more than {DEPTH} levels")

    def inside(part: Json) -> Any:
        return from_json(part, tensor, depth - 1)

    if isinstance(encoded, list):
        return [inside(part) for part in encoded]
    if not isinstance(encoded, dict):
        if type(encoded) is int and not -_MOST <= encoded < _MOST:
            raise ValueError("a number of more than 64 bits")
        return encoded
    content: Any
    value: Any
    tag, content = next(iter(encoded.items())) if len(encoded) == 1 else ("", None)
    match tag:
        case "$int":
            value = int(content, 16)
        case "$float":
            value = float(content)
        case "$bytes":
            value = base64.b64decode(content, validate=True)
        case "$tensor":
            value = tensor(content)
        case "$tuple":
            value = tuple(inside(part) for part in content)
        case "$dict":
            keys = [inside(key) for key, _ in content]
            if keys and max(Counter(map(hash, keys)).values()) > _ALIKE:
                raise ValueError("keys that were chosen to be slow to tell apart")
            value = dict(zip(keys, (inside(part) for _, part in content), strict=True))
        case _:
            value = {key: inside(part) for key, part in encoded.items()}
    return value
