"""Checkpoints of the parts of a tensor-parallel model, put together into its whole tensors.

    runs/a/0    up.weight [4, 8], rows 0:4 of 8      norm.weight [8]
    runs/a/1    up.weight [4, 8], rows 4:8 of 8      norm.weight [8]
    whole       up.weight [8, 8]                     norm.weight [8], of the first part

Each part is a checkpoint of its own, saved by the ranks that have it; its manifest has the cuts of
its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import msgspec
from torch import Tensor, nn

from phalanx.checkpoint.load import shown
from phalanx.checkpoint.manifest import CutRecord, Manifest, TensorRecord
from phalanx.checkpoint.stored import StoredCheckpoint
from phalanx.checkpoint.tensor_files import Reader, copy_tensors
from phalanx.errors import CheckpointMismatchError
from phalanx.parallel.wrapper import Slice, walk
from phalanx.tensor.layer import ParallelLayer
from phalanx.tensor.shards import ShardSpec
from phalanx.wire.memory import plain, tensor_bytes


def cuts_of(model: nn.Module, stored: Iterable[str]) -> dict[str, CutRecord]:
    """Return the cuts of a model's tensors that are stored under these names."""
    names = set(stored)
    return {
        prefix + name: CutRecord(split.dim, split.cut.total, split.cut.runs, layer.backend.rank)
        for prefix, layer in walk(model)
        if isinstance(layer, ParallelLayer)
        for name, split in layer.splits.items()
        if prefix + name in names
    }


class WholeModel:
    """The whole tensors of a model, from the checkpoints of all its parts, or of its only one.

    first     the part with the first elements of each tensor
    records   the dtypes and shapes of the whole tensors, by name

    Raises `CheckpointMismatchError`, which names the missing or different part, unless these are
    checkpoints of one step, one of each part.
    """

    def __init__(self, given: Sequence[StoredCheckpoint]) -> None:
        ranks = {_part_of(each): each for each in reversed(given)}
        parts = [ranks[rank] for rank in sorted(ranks)]
        self.first = first = parts[0]
        cuts = self._cuts = first.manifest.cuts
        count = max((len(cut.runs) for cut in cuts.values()), default=1)
        if len(given) != count or sorted(ranks) != [*range(count)]:
            raise CheckpointMismatchError(_not_all(first, given, count))
        for rank, other in enumerate(parts):
            _check_fits(first, other, rank)
        self.records = {
            name: msgspec.structs.replace(record, shape=_whole_shape(record, cuts[name]))
            if name in cuts
            else record
            for name, record in first.manifest.model.items()
        }
        self._parts = parts
        self._readers = [Reader(part.path, part.manifest) for part in parts]

    def copy(self, names: Iterable[str], write: Callable[[memoryview], object]) -> None:
        """Give the bytes of these tensors to `write`, in order.

        Holds 64 MiB at a time, and two copies of one whole tensor that is cut.
        """
        for is_cut, group in groupby(names, self._cuts.__contains__):
            if not is_cut:
                records = (self.records[name] for name in group)
                copy_tensors(self._readers[0], records, write)
                continue
            for name in group:
                write(tensor_bytes(plain(self._joined(name))))

    def differing(self) -> list[str]:
        """Return the tensors that are whole in every part, but have different bits there."""
        found = []
        for name in self.records:
            if name not in self._cuts and len(self._parts) > 1:
                one, *others = (tensor_bytes(part) for part in self._read(name))
                if any(one != other for other in others):
                    found.append(name)
        return found

    def _read(self, name: str) -> list[Tensor]:
        """Return a tensor as each part has it."""
        read = []
        for part, reader in zip(self._parts, self._readers, strict=True):
            record = part.manifest.model[name]
            read.append(reader.part(record, Slice.whole(record.shape)).view(record.shape))
            reader.read()
        return read

    def _joined(self, name: str) -> Tensor:
        cut = self._cuts[name]
        return ShardSpec(cut.total, cut.runs).join(self._read(name), cut.dim)


def _part_of(checkpoint: StoredCheckpoint) -> int:
    """Return the number of the part; 0 for a model that is not cut."""
    return next((cut.rank for cut in checkpoint.manifest.cuts.values()), 0)


def _not_all(first: StoredCheckpoint, given: Sequence[StoredCheckpoint], count: int) -> str:
    """Return the problem if these are not the parts, each of them once."""
    if count == 1:
        return (
            f"{first.path} does not say that it is a part: it is of a whole model, or of an "
            "earlier version, which did not write how tensors are cut"
        )
    there = ", ".join(f"{each.path} is part {_part_of(each)}" for each in given)
    return (
        f"the model is cut into {count} parts, each with a checkpoint of its own, and all are "
        f"needed, once each; {there} (counted from 0). Give the folders of the others with --part"
    )


def _whole_shape(record: TensorRecord, cut: CutRecord) -> tuple[int, ...]:
    return (*record.shape[: cut.dim], cut.total, *record.shape[cut.dim + 1 :])


def _check_fits(first: StoredCheckpoint, other: StoredCheckpoint, rank: int) -> None:
    """Raise unless `other` is part `rank` of the model of which `first` is part 0."""
    here, there = first.manifest, other.manifest
    if here.step != there.step:
        raise CheckpointMismatchError(
            f"{first.path} is of step {here.step} and {other.path} of step {there.step}: with "
            "--step N the checkpoints of one step are taken"
        )
    wrong = sorted(here.model.keys() ^ there.model.keys())
    wrong += sorted(
        name
        for name in here.model.keys() & there.model.keys()
        if not _tensor_fits(name, here, there, rank)
    )
    wrong += sorted(here.aliases) if here.aliases != there.aliases else []
    if wrong:
        raise CheckpointMismatchError(
            f"{other.path} is not of the model that {first.path} is of, or one of them has another "
            f"part of some layers: {shown(wrong)}"
        )


def _tensor_fits(name: str, here: Manifest, there: Manifest, rank: int) -> bool:
    mine, theirs, cut = here.model[name], there.model[name], here.cuts.get(name)
    if cut is None:
        return name not in there.cuts and (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape)
    if rank >= len(cut.runs) or there.cuts.get(name) != msgspec.structs.replace(cut, rank=rank):
        return False
    length = sum(end - start for start, end in cut.runs[rank])
    shape = (*mine.shape[: cut.dim], length, *mine.shape[cut.dim + 1 :])
    return (theirs.dtype, theirs.shape) == (mine.dtype, shape)
