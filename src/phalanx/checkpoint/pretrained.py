"""`load_pretrained`: load Hugging Face's safetensors files into a model that ranks split.

    rank 0's part of a weight       w[0:6]   read from byte 0 of it on, 6 elements
    rank 1's                        w[6:12]  from element 6 on

Each rank reads the headers, and the data of its own part. A part of a tensor-parallel layer is
several ranges of the whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from phalanx import files
from phalanx.checkpoint.group import group_for
from phalanx.checkpoint.load import shown
from phalanx.checkpoint.manifest import CutRecord, decode
from phalanx.checkpoint.parts import cuts_of
from phalanx.checkpoint.safetensors_format import (
    INDEX,
    LONGEST_HEADER,
    SINGLE,
    TensorEntry,
    read_header,
    read_into,
)
from phalanx.checkpoint.state import ModelState, ParameterShard, model_state
from phalanx.core.backend import Backend
from phalanx.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    plain,
)
from phalanx.wire.codec import DTYPES
from phalanx.wire.memory import copy_bits, tensor_bytes

Rename = Callable[[str], str | None] | Mapping[str, str | None]
_CHUNK = 4 << 20  # bytes that are read at a time


def load_pretrained(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    backend: Backend | None = None,
    rename: Rename | None = None,
    timeout: float | None = None,
) -> None:
    """Load a model from Hugging Face's safetensors files; every rank calls it.

    folder    with `model.safetensors`, or `model.safetensors.index.json` and its shards; all ranks
              see it
    model     plain, DDP, FSDP with any strategy, LocalSGD, DiLoCo (a new period begins),
              tensor-parallel (`parallelize`), or a pipeline
    backend   the ranks that load together; by default the model's, or this one by itself. Of a
              tensor-parallel model give all ranks that have it
    rename    the model's name for a name in the files: a function, or a mapping of those that
              differ. None for one that is not loaded
    timeout   seconds that a rank waits for the others at a time; by default 600, or the backend's
              if that is more

    A floating dtype is converted to the model's, as `Tensor.to` does it; others have to be the
    same. Tied parameters are loaded from any of their names; if several are there they have to be
    equal. Extra state is left as it is. Blocks until every rank has read its part and found that it
    fits; only then is anything changed. A rank reads its own bytes and the headers. It holds a copy
    of its part of the model, and at most 64 MiB more. Messages: names, no tensors.

    Raises, on every rank and with nothing changed, `CheckpointNotFoundError`;
    `CheckpointDamagedError` for a file that is truncated, or whose header contradicts itself;
    `CheckpointMismatchError`, naming the tensor that is missing, has no place in the model, or has
    another shape or dtype; `CheckpointIOError`. `CollectiveTimeoutError`, `PeerLostError`,
    `DesyncError`.
    """
    folder = os.path.abspath(folder)
    group = group_for(model, backend, folder, "load_pretrained", timeout, of_parts=True)
    load = _Pretrained(folder, model, rename)
    unused = group.on_all(load.check)
    nobodys = [name for name in unused[0] if all(name in others for others in unused[1:])]
    if nobodys:
        raise CheckpointMismatchError(
            f"load_pretrained: {folder} does not fit: the model has no place for {shown(nobodys)}. "
            "With rename= they get other names, or None, and are not loaded then",
            rank=group.rank,
            op=group.op,
        )
    group.on_all(load.read)
    load.apply()


Range = tuple[int, int, int]
"""Elements of a whole tensor, read row by row: from, how many, and where they are in the part."""


class _Wanted(NamedTuple):
    """This rank's part of a tensor, and its ranges in the files; `others` have to be equal."""

    name: str
    shard: ParameterShard
    entry: TensorEntry
    others: list[TensorEntry]
    ranges: Callable[[], Iterator[Range]]


class _Pretrained:
    """One rank's part in one load: check, read, and, when all ranks have read, apply."""

    def __init__(self, folder: str, model: nn.Module, rename: Rename | None) -> None:
        self._folder = folder
        self._model = model
        self._rename = rename
        self._wanted: list[_Wanted] = []
        self._read: list[Tensor] = []
        self._held: ModelState | None = None

    def check(self) -> list[str]:
        """Raise unless all fits; return the names in the files that this rank's model lacks."""
        self._held = held = model_state(self._model)
        there = _renamed(_entries(self._folder), self._rename)
        here = {**held.parameters, **held.buffers}
        names = {name: [name] for name in here}
        for other, stored in held.aliases.items():
            if stored in names:
                names[stored].append(other)
        missing = [name for name, known in names.items() if not any(n in there for n in known)]
        if missing:
            raise CheckpointMismatchError(
                f"{self._folder} does not fit: it has no {shown(missing)}, which the model has. It "
                f"has {shown(sorted(there))}. If these are they, under other names, give "
                "rename=, which turns a name of the files into one of the model"
            )
        cuts = cuts_of(self._model, here)
        wrong = []
        for name, shard in here.items():
            entries = [there[known] for known in names[name] if known in there]
            whole, ranges = _whole(shard, cuts.get(name))
            for entry in entries:
                ours = str(shard.tensor.dtype).removeprefix("torch.")
                if entry.shape != whole or not _converts(entry.dtype, ours):
                    wrong.append(
                        f"{name} is {entry.dtype} {list(entry.shape)} there and {ours} "
                        f"{list(whole)} here"
                    )
            self._wanted.append(_Wanted(name, shard, entries[0], entries[1:], ranges))
        if wrong:
            raise CheckpointMismatchError(f"{self._folder} does not fit: {shown(wrong)}")
        used = {known for known_as in names.values() for known in known_as}
        return [name for name in there if name not in used]

    def read(self) -> None:
        """Read this rank's part; leave the model as it is."""
        for name, shard, entry, others, ranges in self._wanted:
            part = torch.empty(shard.slice.numel, dtype=shard.tensor.dtype)
            for begin, values in _parts(entry, ranges(), part.dtype):
                part[begin : begin + len(values)] = values
            for other in others:
                for begin, values in _parts(other, ranges(), part.dtype):
                    ours = part[begin : begin + len(values)]
                    if tensor_bytes(ours) != tensor_bytes(values):
                        raise CheckpointMismatchError(
                            f"{self._folder} does not fit: {name} has several names in the model, "
                            "and under these different values in the files"
                        )
            self._read.append(part)

    def apply(self) -> None:
        """Copy the values read into the model."""
        assert self._held is not None
        with ExitStack() as writing, torch.no_grad():
            for wrapper in self._held.wrappers.values():
                writing.enter_context(wrapper.writing())
            for wanted, part in zip(self._wanted, self._read, strict=True):
                tensor = wanted.shard.tensor.detach()
                copy_bits(tensor, part.view(tensor.shape))
        for wrapper in self._held.wrappers.values():  # as after load_state_dict of a plain state
            wrapper.load_own_state({})


def _converts(there: str, here: str) -> bool:
    floating = DTYPES[there].is_floating_point and DTYPES[here].is_floating_point
    return there == here or floating


def _renamed(entries: Mapping[str, TensorEntry], rename: Rename | None) -> dict[str, TensorEntry]:
    renamed: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        new: str | None = name
        if isinstance(rename, Mapping):
            new = rename.get(name, name)
        elif rename is not None:
            new = rename(name)
        if new is None:
            continue
        if new in renamed:
            raise CheckpointMismatchError(
                f"two tensors would be named {plain(new)}: {plain(name)} is the second"
            )
        renamed[new] = entry
    return renamed


# ------------------------------------------------------------------------------
# A rank's elements of the whole
#
#     a weight of 2 x 6, cut along dim 1, rank 1 of 2      0 1 2 [3 4 5]
#                                                          6 7 8 [9 10 11]
#     ranges: 3 from element 3 on, 3 from element 9 on


def _whole(
    shard: ParameterShard, cut: CutRecord | None
) -> tuple[tuple[int, ...], Callable[[], Iterator[Range]]]:
    """Return the shape of the whole tensor, and a shard's ranges of it."""
    shape, start, stop = shard.slice
    if cut is None:
        return shape, lambda: iter([(start, stop - start, 0)])
    dim, runs = cut.dim, cut.runs[cut.rank]
    whole = (*shape[:dim], cut.total, *shape[dim + 1 :])
    rows, inner = shape[dim], prod(shape[dim + 1 :])

    def ranges() -> Iterator[Range]:
        for outer in range(prod(shape[:dim])):
            at = outer * rows * inner  # in this rank's part of the layer
            for begin, end in runs:
                length = (end - begin) * inner
                first, last = max(at, start), min(at + length, stop)
                if first < last:
                    source = (outer * cut.total + begin) * inner + first - at
                    yield source, last - first, first - start
                at += length

    return whole, ranges


def _parts(
    entry: TensorEntry, ranges: Iterator[Range], dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Yield the values of these ranges in parts of some MiB: the place of each, and its values."""
    stored = DTYPES[entry.dtype]
    most = _CHUNK // stored.itemsize
    with files.reading(entry.path, follow=True) as descriptor:
        for first, count, place in ranges:
            for begin in range(0, count, most):
                values = torch.empty(min(most, count - begin), dtype=stored)
                at = entry.at + (first + begin) * stored.itemsize
                read_into(descriptor, entry.path, tensor_bytes(values), at)
                yield place + begin, values.to(dtype) if stored != dtype else values


# ------------------------------------------------------------------------------
# Which files


class _Index(msgspec.Struct):
    """An index: the file of each tensor."""

    weight_map: dict[str, str]


def _entries(folder: str) -> dict[str, TensorEntry]:
    """Return all tensors of the files, by name."""
    index = os.path.join(folder, INDEX)
    if not os.path.exists(index):
        single = os.path.join(folder, SINGLE)
        if not os.path.exists(single):
            raise CheckpointNotFoundError(
                f"there is neither {SINGLE} nor {INDEX} in {folder}: other formats, such as "
                "pytorch_model.bin, are pickles, and are not read"
            )
        return read_header(single)
    weight_map = _weight_map(index)
    headers = {file: read_header(os.path.join(folder, file)) for file in set(weight_map.values())}
    found: dict[str, TensorEntry] = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointDamagedError(
                f"{index} says that {plain(name)} is in {file}, which lacks it"
            )
        found[name] = headers[file][name]
    return found


def _weight_map(path: str) -> dict[str, str]:
    content = files.read(path, LONGEST_HEADER, follow=True)
    weight_map = decode(content, _Index, path).weight_map
    for file in set(weight_map.values()):
        is_beside = os.path.basename(file) == file and file.isprintable()
        if not is_beside or not file.endswith(".safetensors"):
            raise CheckpointDamagedError(
                f"{path} has no weight_map of names of files beside it: {plain(file)!r} is none"
            )
    return weight_map
