"""The manifest: what a checkpoint contains, and where in which file. And the commit record.

Both are JSON. The commit record says what the manifest is (its length and hash), the manifest what
all other files are; so one small record, written last, stands for everything.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from phalanx.errors import CheckpointDamagedError, UnsupportedObjectError
from phalanx.wire.codec import DTYPES

VERSION = 1
FILE_NAME = re.compile(r"(model|state)-\d{5,}-of-\d{5,}\.safetensors", re.ASCII)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Elements start:stop of a tensor, in a file of the manifest, from this byte on."""

    file: int
    at: int
    start: int
    stop: int


class TensorRecord(msgspec.Struct, frozen=True):
    """A tensor, and its pieces, ordered by `start`; together they are all of it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


class FileRecord(msgspec.Struct, frozen=True):
    """A file, and the xxh3_64 of each block of it, in hexadecimal; the last one may be shorter."""

    name: str
    bytes: int
    block: int
    checksums: str

    def checksum(self, block: int) -> str:
        """That of one block."""
        return self.checksums[16 * block : 16 * (block + 1)]


class Own(msgspec.Struct, frozen=True, array_like=True):
    """A value that belongs to elements start:stop of a parameter, and makes no sense for others."""

    start: int
    stop: int
    value: Any


class StateRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an optimizer keeps for a parameter under one key; one of the three.

    tensor   shaped like the parameter, and cut like it: its name
    value    the same whatever part of the parameter a rank holds; see plain.py
    own      another one for each part
    """

    tensor: str = ""
    value: Any = None
    own: list[Own] = []


class OptionsRecord(msgspec.Struct, frozen=True):
    """A parameter group: the names of its parameters, and its options."""

    parameters: list[str]
    options: Any


class OptimizerRecord(msgspec.Struct, frozen=True):
    """An optimizer; `shared` is state that it keeps for no parameter."""

    kind: str
    groups: list[OptionsRecord]
    state: dict[str, dict[str, StateRecord]]
    shared: Any


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint contains.

    aliases   other names of parameters that are one and the same
    values    what modules keep beside tensors (`get_extra_state`), by its key in the state dict
    rng       for each rank the tensor that is its random state
    """

    format: str
    version: int
    step: int
    world_size: int
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


class Commit(msgspec.Struct, frozen=True):
    """The record whose presence makes a checkpoint one; about the manifest."""

    version: int
    step: int
    bytes: int
    xxh3: str


FORMAT = "phalanx checkpoint"
_T = TypeVar("_T", bound=msgspec.Struct)


def commit_of(manifest: Manifest, content: bytes) -> Commit:
    """The record for a manifest that is these bytes."""
    return Commit(VERSION, manifest.step, len(content), xxh3_64_hexdigest(content))


def encode(record: Manifest | Commit) -> bytes:
    """As JSON that people can read; the same for the same record."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def decode(content: bytes, kind: type[_T], path: str) -> _T:
    """The record in a file. Raises `CheckpointDamagedError`, naming it, if there is none."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from None


def decode_commit(content: bytes, path: str) -> Commit:
    """The commit record in a file.

    Raises `CheckpointDamagedError` unless it is, byte for byte, what `encode` makes of it.
    """
    commit = decode(content, Commit, path)
    if commit.version != VERSION:
        raise CheckpointDamagedError(
            f"{path} is of version {commit.version}; this is Phalanx for version {VERSION}: load "
            "it with the release that wrote it"
        )
    if encode(commit) != content:
        raise CheckpointDamagedError(f"{path} is not as it was written")
    return commit


def decode_manifest(content: bytes, commit: Commit, path: str) -> Manifest:
    """The manifest that a commit record is about.

    Raises `CheckpointDamagedError` if it is another one, or says what cannot be.
    """
    if len(content) != commit.bytes:
        raise CheckpointDamagedError(
            f"{path} has {len(content)} bytes, and had {commit.bytes} when it was written"
        )
    if xxh3_64_hexdigest(content) != commit.xxh3:
        raise CheckpointDamagedError(f"{path} is not as it was written: its checksum differs")
    version = decode(content, _Version, path)
    if version.format != FORMAT or version.version != VERSION:
        raise CheckpointDamagedError(
            f"{path} is a {version.format!r} of version {version.version}; this is Phalanx for "
            f"version {VERSION}: load it with the release that wrote it (phalanx {version.phalanx})"
        )
    manifest = decode(content, Manifest, path)
    if manifest.step != commit.step:
        raise CheckpointDamagedError(f"{path} is of step {manifest.step}, not {commit.step}")
    for problem in _problems(manifest):
        raise CheckpointDamagedError(f"{path} makes no sense: {problem}")
    return manifest


class _Version(msgspec.Struct, frozen=True):
    format: str = ""
    version: int = 0
    phalanx: str = "?"


def _problems(manifest: Manifest) -> Iterator[str]:
    """What would lead a reader astray: a checkpoint may come from a stranger."""
    if len(manifest.rng) != manifest.world_size or manifest.world_size < 1:
        yield "another number of random states than of ranks"
    for file in manifest.files:
        if not FILE_NAME.fullmatch(file.name):
            yield f"no file of a checkpoint is named {file.name!r}"
        if file.block < 1 or file.bytes < 0:
            yield f"{file.name} has blocks of {file.block} bytes"
        elif len(file.checksums) != 16 * -(-file.bytes // file.block):
            yield f"{file.name} has another number of checksums than of blocks"
    for name, tensor in (*manifest.model.items(), *manifest.state.items()):
        if tensor.dtype not in DTYPES or min(tensor.shape, default=0) < 0:
            yield f"{name} is a {tensor.dtype} of shape {list(tensor.shape)}"
            continue
        size, reached = DTYPES[tensor.dtype].itemsize, 0
        for piece in tensor.pieces:
            if not 0 <= piece.start <= piece.stop <= tensor.numel or piece.start > reached:
                yield f"{name} has no elements from {reached} on"
            if not 0 <= piece.file < len(manifest.files) or piece.at < 0:
                yield f"{name} is in file {piece.file}"
            elif piece.at + size * (piece.stop - piece.start) > manifest.files[piece.file].bytes:
                yield f"{name} reaches beyond the end of {manifest.files[piece.file].name}"
            reached = max(reached, piece.stop)
        if reached != tensor.numel:
            yield f"{name} has no elements from {reached} on"


# ------------------------------------------------------------------------------
# Python values as JSON, and back: what people keep beside tensors. No pickle.
#
#     None, bool, str, list    as they are
#     int                      as it is; {"$int": "0x..."} from 2^63 on
#     float                    as it is; {"$float": "nan" | "inf" | "-inf"}
#     dict                     as it is if its keys are text without a $ in front, else
#                              {"$dict": [[key, value], ...]}
#     tuple                    {"$tuple": [...]}
#     bytes                    {"$bytes": base64}
#     tensor                   {"$tensor": the name under which it is kept elsewhere}
#
# A value of a subclass of these becomes one of the type itself: a Counter a dict, a numpy.float64 a
# float.

Json = Any
DEPTH = 100  # levels inside each other
_MOST = 2**63


def to_json(value: object, path: str, keep: Callable[[Tensor, str], str]) -> Json:
    """The value as JSON.

    path   what it is called in errors, and in the names of tensors
    keep   called with each tensor and its path; returns the name under which it is kept

    Raises `UnsupportedObjectError` (a TypeError), naming the part of another type.
    """
    return _to_json(value, path, keep, DEPTH)


def _to_json(  # noqa: PLR0911 - a table of types
    value: Any, path: str, keep: Callable[[Tensor, str], str], depth: int
) -> Json:
    if depth < 0:
        raise UnsupportedObjectError(f"{path} is more than {DEPTH} levels deep, or in itself")

    def inside(part: object, step: object) -> Json:
        return _to_json(part, f"{path}.{step}", keep, depth - 1)

    match value:
        case None | bool():
            return value
        case Tensor():
            return {"$tensor": keep(value, path)}
        case str():
            return str(value)
        case int():
            return int(value) if -_MOST <= value < _MOST else {"$int": hex(value)}
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case tuple():
            return {"$tuple": [inside(part, at) for at, part in enumerate(value)]}
        case list():
            return [inside(part, at) for at, part in enumerate(value)]
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {str(key): inside(part, key) for key, part in value.items()}
            pairs = value.items()
            return {"$dict": [[inside(key, "key"), inside(part, key)] for key, part in pairs]}
    raise UnsupportedObjectError(
        f"{path} is a {type(value).__qualname__}, which a checkpoint cannot keep: it takes None, "
        "bool, int, float, str, bytes, tensors, and lists, tuples and dicts of them"
    )


def from_json(plain: Json, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `to_json` was given; `tensor` gives the tensor of a name.

    Raises ValueError, KeyError or TypeError for what `to_json` does not make.
    """
    if isinstance(plain, list):
        return [from_json(part, tensor) for part in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((tag, content),) = plain.items()
        if tag == "$tensor":
            return tensor(content)
        if tag in _FROM_JSON:
            return _FROM_JSON[tag](content, tensor)
    return {key: from_json(part, tensor) for key, part in plain.items()}


def tensors_in(plain: Json) -> list[str]:
    """The names of the tensors that a value refers to."""
    found: list[str] = []

    def note(name: str) -> Any:
        found.append(name)

    from_json(plain, note)
    return found


_FROM_JSON: Mapping[str, Callable[[Any, Callable[[str], Tensor]], object]] = MappingProxyType(
    {
        "$int": lambda content, _: int(content, 16),
        "$float": lambda content, _: float(content),
        "$bytes": lambda content, _: base64.b64decode(content, validate=True),
        "$tuple": lambda content, tensor: tuple(from_json(part, tensor) for part in content),
        "$dict": lambda content, tensor: {
            from_json(key, tensor): from_json(part, tensor) for key, part in content
        },
    }
)
