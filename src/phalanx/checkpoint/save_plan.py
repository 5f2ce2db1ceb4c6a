"""What each rank holds, and who writes what.

Before a save the ranks exchange descriptions: names, dtypes, shapes and shards, but no elements.
From these every rank works out the same plan, without further messages.

    rank 0 holds   w[0:6]   b[0:2]   n        each shard is written once, by a rank that has it;
    rank 1 holds   w[6:12]  b[0:2]   n        what several have goes to the one with the least to do
    rank 0 writes  w[0:6]            n
    rank 1 writes  w[6:12]  b[0:2]
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import msgspec
import torch

from phalanx.checkpoint.manifest import (
    FORMAT,
    VERSION,
    FileRecord,
    Json,
    Manifest,
    OptimizerRecord,
    OptionsRecord,
    StateRecord,
    StoredShard,
    TensorRecord,
)
from phalanx.checkpoint.tensor_files import FileKind, PlannedFile, TensorShard, lay_out
from phalanx.errors import CheckpointMismatchError, MisuseError

KINDS: tuple[FileKind, ...] = ("model", "state")


class RankDescription(msgspec.Struct):
    """What a rank holds, and what it asks for.

    asked         what every rank has to ask for alike, in words
    fresh_group   whether it needs a new group for saves in the background
    """

    asked: list[str]
    held: list[TensorShard]
    aliases: dict[str, str]
    values: dict[str, Json]
    optimizer: OptimizerRecord | None
    rng: str
    extra: Json
    fresh_group: bool = False


class SavePlan:
    """Who writes what: the same on every rank, since all know all descriptions.

    fresh_group   whether a rank needs a new group for saves in the background

    Raises `MisuseError` if the ranks ask for different things, or have different optimizers;
    `CheckpointMismatchError` if they do not hold one model together.
    """

    def __init__(self, described: Sequence[RankDescription]) -> None:
        first = described[0]
        for rank, each in enumerate(described):
            for ours, theirs in zip(first.asked, each.asked, strict=True):
                if ours != theirs:
                    raise MisuseError(f"rank 0 asks for {ours} and rank {rank} for {theirs}")
        self.fresh_group = any(each.fresh_group for each in described)
        self._described = described
        self._optimizer = merge_optimizers(described)
        self._files = plan_files(described)

    def files_of(self, rank: int) -> list[PlannedFile]:
        """The files that a rank writes."""
        return [file for file in self._files if file.rank == rank]

    def manifest(self, step: int, files: list[FileRecord]) -> Manifest:
        """The manifest; `files` are those of rank 0, then of rank 1, ..., as they were written."""
        aliases: dict[str, str] = {}
        values: dict[str, Json] = {}
        for each in reversed(self._described):  # the first rank's entry wins
            aliases |= each.aliases
            values |= each.values
        try:
            version = importlib.metadata.version("phalanx")
        except importlib.metadata.PackageNotFoundError:  # run from its source
            version = "unknown"
        return Manifest(
            format=FORMAT,
            version=VERSION,
            step=step,
            world_size=len(self._described),
            phalanx=version,
            torch=str(torch.__version__),
            files=files,
            model=tensor_records(self._files, "model"),
            aliases=aliases,
            values=values,
            optimizer=self._optimizer,
            state=tensor_records(self._files, "state"),
            rng=[each.rng for each in self._described],
            extra=self._described[0].extra,
        )


# ------------------------------------------------------------------------------
# Files


def plan_files(described: Sequence[RankDescription]) -> list[PlannedFile]:
    """All files of a checkpoint, those of rank 0 first.

    Raises `CheckpointMismatchError` if ranks hold different tensors under one name, or no rank
    holds some of the elements.
    """
    holders: dict[TensorShard, list[int]] = defaultdict(list)
    for rank, description in enumerate(described):
        for shard in description.held:
            holders[shard].append(rank)
    _check_complete(holders)
    size = len(described)
    files: dict[tuple[int, FileKind], list[TensorShard]] = defaultdict(list)
    for shard, rank in _writers(holders, size).items():
        files[rank, shard.kind].append(shard)
    return [
        lay_out(rank, kind, f"{kind}-{rank:05}-of-{size:05}.safetensors", files[rank, kind])
        for rank in range(size)
        for kind in KINDS
        if (rank, kind) in files
    ]


def _writers(holders: Mapping[TensorShard, list[int]], size: int) -> dict[TensorShard, int]:
    """The rank that writes each shard: all ranks write about as much.

    An empty shard is not written, unless the whole tensor is empty.
    """
    shards = [shard for shard in holders if shard.stop > shard.start]
    shards += [shard for shard in holders if prod(shard.shape) == 0]
    choices = {shard: holders[shard] if shard.equal else holders[shard][:1] for shard in shards}
    writer = dict.fromkeys(shards, 0)
    load = [0] * size
    # Those without a choice first; then the largest, each to the rank with the least to write.
    for shard in sorted(shards, key=lambda shard: (len(choices[shard]) > 1, -shard.nbytes)):
        rank = min(choices[shard], key=lambda rank: load[rank])
        writer[shard] = rank
        load[rank] += shard.nbytes
    return writer


def _check_complete(holders: Mapping[TensorShard, list[int]]) -> None:
    by_name: dict[tuple[str, str], list[TensorShard]] = defaultdict(list)
    for shard in holders:
        by_name[shard.kind, shard.name].append(shard)
    for (_, name), shards in by_name.items():
        first = shards[0]
        for other in shards[1:]:
            if (other.dtype, other.shape, other.equal) != (first.dtype, first.shape, first.equal):
                raise CheckpointMismatchError(
                    f"{name} is {first.dtype} {list(first.shape)} on rank {holders[first][0]} and "
                    f"{other.dtype} {list(other.shape)} on rank {holders[other][0]}: ranks save "
                    "one model together; give another backend= or folder for each of several"
                )
        reached = 0
        for shard in sorted(shards, key=lambda shard: shard.start):
            if shard.start > reached:
                break
            reached = max(reached, shard.stop)
        if reached < prod(first.shape):
            raise CheckpointMismatchError(
                f"no rank holds the elements of {name} from {reached} on ({first.dtype} "
                f"{list(first.shape)}): every rank that has the model has to save it"
            )


def tensor_records(planned: Sequence[PlannedFile], kind: FileKind) -> dict[str, TensorRecord]:
    """Where each tensor of the model, or of the state, is; for the manifest."""
    found: dict[str, TensorRecord] = {}
    for number, file in enumerate(planned):
        for shard, at in file.shards if file.kind == kind else ():
            record = found.setdefault(shard.name, TensorRecord(shard.dtype, shard.shape, []))
            record.pieces.append(StoredShard(number, at, shard.start, shard.stop))
    for record in found.values():
        record.pieces.sort(key=lambda stored: (stored.start, stored.stop))
    return found


# ------------------------------------------------------------------------------
# Optimizers


def merge_optimizers(described: Sequence[RankDescription]) -> OptimizerRecord | None:
    """The ranks' optimizers as one.

    Raises `MisuseError` if they are of different kinds, or have different options.
    """
    given = [(rank, each.optimizer) for rank, each in enumerate(described) if each.optimizer]
    if not given:
        return None
    if len(given) < len(described):
        without = next(rank for rank, each in enumerate(described) if not each.optimizer)
        raise MisuseError(f"rank {given[0][0]} gave an optimizer and rank {without} gave none")
    first = given[0][1]
    for rank, other in given[1:]:
        for difference in _differences(first, other):
            raise MisuseError(
                f"rank {rank} has another optimizer than rank 0, or other options: {difference}. "
                "Every rank has to have the same"
            )
    optimizers = [optimizer for _, optimizer in given]
    groups = [
        OptionsRecord(
            list(dict.fromkeys(name for each in optimizers for name in each.groups[at].parameters)),
            group.options,
        )
        for at, group in enumerate(first.groups)
    ]
    return OptimizerRecord(first.kind, groups, _merged_state(optimizers), first.shared)


def _differences(first: OptimizerRecord, other: OptimizerRecord) -> Iterator[str]:
    if first.kind != other.kind or len(first.groups) != len(other.groups):
        yield (
            f"{first.kind} with {len(first.groups)} groups and {other.kind} with "
            f"{len(other.groups)}"
        )
        return
    for at, (ours, theirs) in enumerate(zip(first.groups, other.groups, strict=True)):
        if ours.options != theirs.options:
            yield f"group {at} has {ours.options} and {theirs.options}"


def _merged_state(optimizers: Sequence[OptimizerRecord]) -> dict[str, dict[str, StateRecord]]:
    """For each parameter and key the record of the first rank that has one.

    Of values for one shard each, those of all shards.
    """
    merged: dict[str, dict[str, StateRecord]] = defaultdict(dict)
    for optimizer in optimizers:
        for name, of_parameter in optimizer.state.items():
            for key, record in of_parameter.items():
                known = merged[name].setdefault(key, record)
                if bool(known.own) != bool(record.own) or bool(known.tensor) != bool(record.tensor):
                    raise CheckpointMismatchError(
                        f"the optimizer's {key} of {name} has the shape of the parameter on one "
                        "rank and another shape on another: it can be saved from ranks that hold "
                        "the whole parameter only"
                    )
                have = {(value.start, value.stop) for value in known.own}
                more = [v for v in record.own if (v.start, v.stop) not in have]
                if more:
                    merged[name][key] = StateRecord(own=known.own + more)
    return dict(merged)
