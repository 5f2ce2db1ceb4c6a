"""Descriptions of the ranks' tensors, and the plan which rank writes which.

Before a save the ranks exchange descriptions: names, dtypes, shapes and shards, but no elements.
From these every rank works out the same plan, without further messages.

    rank 0 holds   w[0:6]   b[0:2]   n        each shard is written once, by a rank that has it;
    rank 1 holds   w[6:12]  b[0:2]   n        shared ones go to the rank with the least to do
    rank 0 writes  w[0:6]            n
    rank 1 writes  w[6:12]  b[0:2]
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint.manifest import (
    FORMAT,
    VERSION,
    CutRecord,
    Json,
    Manifest,
    OptimizerRecord,
    OptionsRecord,
    ShardValue,
    StateRecord,
    StoredShard,
    TensorRecord,
    first_difference,
    to_json,
)
from phalanx.checkpoint.safetensors_format import METADATA
from phalanx.checkpoint.state import ParameterShard, check_tensor, kept_by, named_groups
from phalanx.checkpoint.tensor_files import FileKind, PlannedFile, TensorShard, lay_out
from phalanx.errors import CheckpointMismatchError, MisuseError, UnsupportedObjectError
from phalanx.optim.sharded import options_of
from phalanx.parallel.wrapper import Slice


class RankDescription(msgspec.Struct):
    """A rank's tensors, and its request.

    asked         the part of the request that has to be equal on every rank, in words
    fresh_group   whether it needs a new group for saves in the background
    """

    asked: list[str] = []
    held: list[TensorShard] = []
    aliases: dict[str, str] = {}
    values: dict[str, Json] = {}
    optimizer: OptimizerRecord | None = None
    rng: str = ""
    extra: Json = None
    own: Json = None
    cuts: dict[str, CutRecord] = {}
    fresh_group: bool = False


# ------------------------------------------------------------------------------
# The tensors that a rank could write


class LocalTensors:
    """The tensors that this rank could write, by their descriptions.

    placeholders   whether tensors on the meta device may stand for values that are read later
    """

    def __init__(self, *, placeholders: bool = False) -> None:
        self.tensors: dict[TensorShard, Tensor] = {}
        self._placeholders = placeholders
        self._names: set[tuple[FileKind, str]] = set()

    def add(
        self, kind: FileKind, name: str, tensor: Tensor, part: Slice | None = None, *, equal: bool
    ) -> None:
        """Add a tensor, or the `part` of one; see `TensorShard`."""
        if (kind, name) in self._names or name == METADATA:
            raise MisuseError(f"two tensors would be named {name}: give one another name")
        if not (self._placeholders and tensor.is_meta):
            check_tensor(name, tensor)
            tensor = tensor.detach()
        part = part or Slice.whole(tuple(tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        shard = TensorShard(kind, name, dtype, part.shape, part.start, part.stop, equal)
        self.tensors[shard] = tensor
        self._names.add((kind, name))

    def json(self, value: object, path: str) -> Json:
        """Return the value as JSON; add its tensors, under names that begin with `path`.

        If ranks have the same value, the first of them writes its tensors.
        """

        def keep(tensor: Tensor, name: str) -> str:
            while ("state", name) in self._names:
                name += "'"
            self.add("state", name, tensor, equal=False)
            return name

        return to_json(value, path, keep)


# Of an optimizer's state for a parameter,
#
#     tensors of the parameter's shape      are sharded like it: momentum, Adam's averages
#     values without other tensors          are the same for every shard: the number of steps, text
#     anything else                         is for the shard that it was made for, and no other:
#                                           Adafactor's rows and columns, the history of L-BFGS


def describe_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, ParameterShard], local: LocalTensors
) -> OptimizerRecord:
    """Return the optimizer's record; add its tensors to `local`. Raise as `named_groups` does."""
    named = named_groups(optimizer, parameters)
    kind, held = kept_by(optimizer, parameters)
    kept = {
        name: optimizer.state[parameter]
        for names in named
        for name, parameter in names.items()
        if parameter in optimizer.state and name in held
    }
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    groups = [
        (list(names), group) for names, group in zip(named, optimizer.param_groups, strict=True)
    ]
    return optimizer_record(kind, groups, kept, shared, held, local)


def optimizer_record(
    kind: str,
    grouped: Sequence[tuple[list[str], Mapping[str, object]]],
    kept: Mapping[str, Mapping[str, object]],
    shared: Mapping[Any, object],
    parameters: Mapping[str, ParameterShard],
    local: LocalTensors,
) -> OptimizerRecord:
    """Return an optimizer's record: its groups, the state of each parameter, and the rest.

    Its tensors are added to `local`.
    """
    groups: list[OptionsRecord] = []
    for number, (names, group) in enumerate(grouped):
        options_json = local.json(options_of(group), f"optimizer/group{number}")
        groups.append(OptionsRecord(names, options_json))
    sharded = _sharded_keys(kept, parameters)

    def describe(name: str, key: str, value: object) -> StateRecord:
        path, parameter = f"optimizer/{name}/{key}", parameters[name]
        if key in sharded and isinstance(value, Tensor):
            path = parameter.name_of(path)
            local.add("state", path, value, parameter.slice, equal=True)
            return StateRecord(tensor=path)
        if not _has_dimensions(value):
            return StateRecord(value=local.json(value, path))
        start, stop = parameter.slice.start, parameter.slice.stop
        of_shard = local.json(value, f"{path}/{start}-{stop}")
        return StateRecord(own=[ShardValue(start, stop, of_shard)])

    state = {
        name: {key: describe(name, key, value) for key, value in of_parameter.items()}
        for name, of_parameter in kept.items()
    }
    return OptimizerRecord(kind, groups, state, local.json(shared, "optimizer/shared"))


def _sharded_keys(
    state: Mapping[str, Mapping[Any, object]], parameters: Mapping[str, ParameterShard]
) -> set[str]:
    """Return the keys under which every tensor has its parameter's shape.

    A 0-dim "step" of a 0-dim parameter is no proof: another parameter needs a state of its shape.
    """
    tensors: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for name, of_parameter in state.items():
        for key, value in of_parameter.items():
            if not isinstance(key, str):
                raise UnsupportedObjectError(
                    f"the optimizer keeps something for {name} under {key!r}: a checkpoint takes "
                    "text as keys"
                )
            if isinstance(value, Tensor):
                tensors[key].append((value, parameters[name].tensor))
    return {
        key
        for key, found in tensors.items()
        if all(value.shape == parameter.shape for value, parameter in found)
        and (key != "step" or any(parameter.ndim > 0 for _, parameter in found))
    }


def _has_dimensions(value: object) -> bool:
    """Return whether any tensor in it has dimensions."""
    if isinstance(value, Tensor):
        return value.ndim > 0
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(map(_has_dimensions, value))


# ------------------------------------------------------------------------------
# Files


def plan_files(described: Sequence[RankDescription]) -> list[PlannedFile]:
    """Return all files of a checkpoint, those of rank 0 first; all ranks write about as much.

    Raises `CheckpointMismatchError` if ranks hold different tensors under one name, or no rank
    holds some elements. An empty shard is written only if the whole tensor is empty.
    """
    holders: dict[TensorShard, list[int]] = defaultdict(list)
    for rank, description in enumerate(described):
        for shard in description.held:
            holders[shard].append(rank)
    _check_complete(holders)
    shards = [shard for shard in holders if shard.stop > shard.start]
    shards += [shard for shard in holders if prod(shard.shape) == 0]
    choices = {shard: holders[shard] if shard.equal else holders[shard][:1] for shard in shards}
    size = len(described)
    writer, load = {}, [0] * size
    # Those without a choice first; then the largest, each to the rank with the least to write.
    for shard in sorted(shards, key=lambda shard: (len(choices[shard]) > 1, -shard.nbytes)):
        writer[shard] = min(choices[shard], key=lambda rank: load[rank])
        load[writer[shard]] += shard.nbytes
    files: dict[tuple[int, FileKind], list[TensorShard]] = defaultdict(list)
    for shard in shards:
        files[writer[shard], shard.kind].append(shard)
    return [
        lay_out(rank, kind, f"{kind}-{rank:05}-of-{size:05}.safetensors", files[rank, kind])
        for rank in range(size)
        for kind in get_args(FileKind)
        if (rank, kind) in files
    ]


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
    """Return the manifest's records of the tensors of the model, or of the state."""
    found: dict[str, TensorRecord] = {}
    for number, file in enumerate(planned):
        for shard, at in file.shards if file.kind == kind else ():
            record = found.setdefault(shard.name, TensorRecord(shard.dtype, shard.shape, []))
            record.pieces.append(StoredShard(number, at, shard.start, shard.stop))
    for record in found.values():
        record.pieces.sort(key=lambda stored: (stored.start, stored.stop))
    return found


# ------------------------------------------------------------------------------
# The ranks' optimizers as one, and the manifest


def merge_optimizers(described: Sequence[RankDescription]) -> OptimizerRecord | None:
    """Return the ranks' optimizers as one; `MisuseError` if their kinds or options differ."""
    optimizers = [each.optimizer for each in described if each.optimizer]
    if not optimizers:
        return None
    if len(optimizers) < len(described):
        given = [each.optimizer is not None for each in described]
        raise MisuseError(
            f"rank {given.index(True)} gave an optimizer and rank {given.index(False)} gave none"
        )
    first = optimizers[0]
    for rank, other in enumerate(optimizers):
        differences = [
            f"group {at} has {found[0]} and {found[1]}"
            for at, (ours, theirs) in enumerate(zip(first.groups, other.groups, strict=False))
            if (found := first_difference(ours.options, theirs.options))
        ]
        if first.kind != other.kind or len(first.groups) != len(other.groups):
            groups = f"{first.kind} with {len(first.groups)} groups"
            differences = [f"{groups} and {other.kind} with {len(other.groups)}"]
        if differences:
            raise MisuseError(
                f"rank {rank} has another optimizer than rank 0, or other options: "
                f"{differences[0]}. Every rank has to have the same"
            )
    merged = []
    for at, group in enumerate(first.groups):
        names = [name for each in optimizers for name in each.groups[at].parameters]
        merged.append(OptionsRecord(list(dict.fromkeys(names)), group.options))
    return OptimizerRecord(first.kind, merged, _merged_state(optimizers), first.shared)


def _merged_state(optimizers: Sequence[OptimizerRecord]) -> dict[str, dict[str, StateRecord]]:
    """Return for each parameter and key the record of the first rank that has one.

    Values for single shards are those of all shards.
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


def make_manifest(
    described: Sequence[RankDescription],
    optimizer: OptimizerRecord | None,
    planned: Sequence[PlannedFile],
    step: int,
) -> Manifest:
    """Return the manifest without the records of the files, which have the order of `planned`."""
    aliases: dict[str, str] = {}
    values: dict[str, Json] = {}
    cuts: dict[str, CutRecord] = {}
    for each in reversed(described):  # the first rank's entry wins
        aliases |= each.aliases
        values |= each.values
        cuts |= each.cuts
    own = [each.own for each in described]
    return Manifest(
        format=FORMAT,
        version=VERSION,
        step=step,
        world_size=len(described),
        phalanx=installed_version(),
        torch=str(torch.__version__),
        files=[],
        model=tensor_records(planned, "model"),
        aliases=aliases,
        values=values,
        optimizer=optimizer,
        state=tensor_records(planned, "state"),
        rng=[each.rng for each in described],
        extra=described[0].extra,
        own=own if any(each is not None for each in own) else [],
        cuts=cuts,
    )


@cache
def installed_version() -> str:
    """Return Phalanx's version; "unknown" if it is run from its source."""
    try:
        return importlib.metadata.version("phalanx")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
