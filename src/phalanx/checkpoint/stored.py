"""Checkpoints on disk, without a model: their contents, and whether they are damaged."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from phalanx.checkpoint import storage
from phalanx.checkpoint.load import find, instead_of, read_records
from phalanx.checkpoint.manifest import Json, Manifest, TensorRecord, decode_manifest, from_json
from phalanx.checkpoint.tensor_files import Reader, verify_file
from phalanx.errors import CheckpointDamagedError
from phalanx.wire.codec import DTYPES

Advance = Callable[[int], object]
"""Hears how many more bytes are done."""
Begin = Callable[[int], Advance]
"""Hears how many bytes there are to do, and gives what hears of those done."""
_DIGITS = re.compile(r"([0-9]+)")


class StoredCheckpoint(NamedTuple):
    """A checkpoint's own folder, and its manifest."""

    path: str
    manifest: Manifest

    @property
    def nbytes(self) -> int:
        """Size of its tensor files in bytes."""
        return sum(file.bytes for file in self.manifest.files)

    def ranks_of(self, record: TensorRecord) -> list[int]:
        """Return the ranks that have written a tensor."""
        names = {self.manifest.files[piece.file].name for piece in record.pieces}
        return sorted(int(name.split("-")[1]) for name in names)

    def value(self, encoded: Json) -> Any:
        """Return a value of the manifest, with its tensors."""
        reader = Reader(self.path, self.manifest)
        reader.request(encoded)
        reader.read()
        return from_json(encoded, reader.copy)


class Exported(NamedTuple):
    """The result of a conversion: the folder, its files, their bytes, notes for the user."""

    path: str
    files: list[str]
    nbytes: int
    notes: list[str]


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]


def nbytes_of(record: TensorRecord) -> int:
    """Return the size of a tensor in bytes."""
    return prod(record.shape) * DTYPES[record.dtype].itemsize


def open_checkpoint(folder: str | os.PathLike[str], step: int | None = None) -> StoredCheckpoint:
    """Return the newest checkpoint in a folder, that of a step, or the one in this own folder.

    Reads the commit record and the manifest. Raises as `load_checkpoint`.
    """
    path = find(os.path.abspath(folder), step)
    try:
        return StoredCheckpoint(path, decode_manifest(path, *read_records(path)))
    except CheckpointDamagedError as error:
        error.message += instead_of(path)
        raise


def checkpoints_in(folder: str | os.PathLike[str], step: int | None = None) -> list[str]:
    """Return the own folders of all checkpoints in a folder, or that of a step, by number.

    Raises `CheckpointNotFoundError` if there is none.
    """
    newest = find(os.path.abspath(folder), step)
    if step is not None or newest == os.path.abspath(folder):
        return [newest]
    return [each.path for each in storage.committed(os.path.abspath(folder))]


def nbytes_in(path: str) -> int:
    """Return the present size of a checkpoint's tensor files."""
    names = (name for name in os.listdir(path) if storage.TENSOR_FILE.fullmatch(name))
    return sum(os.path.getsize(os.path.join(path, name)) for name in names)


def verify(path: str, advance: Advance) -> int:
    """Read all of a checkpoint, and compare it with its checksums; return the number of bytes.

    Raises `CheckpointDamagedError`, which names the first damaged file, and the bytes in it. Holds
    one block.
    """
    checkpoint = StoredCheckpoint(path, decode_manifest(path, *read_records(path)))
    for file in checkpoint.manifest.files:
        verify_file(path, file, advance)
    return checkpoint.nbytes


def describe(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Describe a checkpoint for programs: names, sizes, ranks; no values but options."""
    manifest = checkpoint.manifest

    def tensors(records: dict[str, TensorRecord]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "dtype": record.dtype,
                "shape": list(record.shape),
                "bytes": nbytes_of(record),
                "ranks": checkpoint.ranks_of(record),
            }
            for name, record in sorted(records.items(), key=lambda item: natural_order(item[0]))
        ]

    saved = manifest.optimizer
    reader = Reader(checkpoint.path, manifest)
    optimizer = saved and {
        "kind": saved.kind,
        "groups": [
            {"parameters": len(each.parameters), "options": reader.request(each.options, dict)}
            for each in saved.groups
        ],
        "state": Counter(key for of_parameter in saved.state.values() for key in of_parameter),
    }
    return {
        "folder": checkpoint.path,
        "step": manifest.step,
        "ranks": manifest.world_size,
        "phalanx": manifest.phalanx,
        "torch": manifest.torch,
        "bytes": checkpoint.nbytes,
        "files": [{"name": file.name, "bytes": file.bytes} for file in manifest.files],
        "model": tensors(manifest.model),
        "aliases": manifest.aliases,
        "part": next(([cut.rank, len(cut.runs)] for cut in manifest.cuts.values()), None),
        "values": list(manifest.values),
        "optimizer": optimizer,
        "state": tensors(manifest.state),
        "extra": _keys(manifest.extra),
    }


def _keys(encoded: Json) -> list[str]:
    """Return the keys of a value, if it is a dict; else its type in a list."""
    if encoded is None:
        return []
    if isinstance(encoded, dict) and not any(key.startswith("$") for key in encoded):
        return list(encoded)
    tag = next(iter(encoded)).removeprefix("$") if isinstance(encoded, dict) else ""
    return [f"({tag or type(encoded).__name__})"]
