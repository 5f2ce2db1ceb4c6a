"""Who writes what: worked out by every rank from the same descriptions, so nobody has to ask.

rank 0 holds   w[0:6]   b[0:2]   n        each part is written once, by a rank that has it;
rank 1 holds   w[6:12]  b[0:2]   n        what several have goes to the one with the least to do
rank 0 writes  w[0:6]            n
rank 1 writes  w[6:12]  b[0:2]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec
from torch import Tensor

from phalanx.checkpoint.manifest import (
    OptimizerRecord,
    OptionsRecord,
    Own,
    Piece,
    StateRecord,
    TensorRecord,
    to_json,
)
from phalanx.checkpoint.model_parts import ModelParts, check_tensor
from phalanx.checkpoint.safetensors_file import METADATA, Content, FileLayout, lay_out
from phalanx.errors import CheckpointMismatchError, MisuseError
from phalanx.parallel.wrapper import Slice

FILES: tuple[File, ...] = ("model", "state")


class PlannedFile(NamedTuple):
    """A file, and the rank that writes it."""

    rank: int
    file: File
    layout: FileLayout


def plan_files(described: Sequence[Description]) -> list[PlannedFile]:
    """All files of a checkpoint, in an order that all ranks agree on.

    Raises `CheckpointMismatchError` if ranks hold different tensors under one name, or no rank
    holds some of the elements.
    """
    holders: dict[Held, list[int]] = defaultdict(list)
    for rank, description in enumerate(described):
        for held in description.held:
            holders[held].append(rank)
    _check_complete(holders)
    parts = {held: ranks for held, ranks in holders.items() if held.stop > held.start}
    parts |= {held: ranks for held, ranks in holders.items() if prod(held.shape) == 0}
    contents: dict[tuple[int, File], list[Content]] = defaultdict(list)
    for held, rank in _writers(parts, len(described)).items():
        contents[rank, held.file].append(held.content())
    return [
        PlannedFile(
            rank, file, lay_out(_file_name(file, rank, len(described)), contents[rank, file])
        )
        for rank in range(len(described))
        for file in FILES
        if (rank, file) in contents
    ]


def _file_name(file: File, rank: int, size: int) -> str:
    return f"{file}-{rank:05}-of-{size:05}.safetensors"


def _writers(parts: Mapping[Held, list[int]], size: int) -> dict[Held, int]:
    """The rank that writes each part, in the order of `parts`: all write about as much."""
    load = [0] * size
    writer: dict[Held, int] = {}
    for held, ranks in parts.items():
        if len(ranks) == 1 or not held.equal:
            writer[held] = ranks[0]
            load[ranks[0]] += held.content().nbytes
    shared = [held for held in parts if held not in writer]
    for held in sorted(shared, key=lambda held: -held.content().nbytes):
        rank = min(parts[held], key=lambda rank: load[rank])
        writer[held] = rank
        load[rank] += held.content().nbytes
    return {held: writer[held] for held in parts}


def _check_complete(holders: Mapping[Held, list[int]]) -> None:
    by_name: dict[tuple[str, str], list[Held]] = defaultdict(list)
    for held in holders:
        by_name[held.file, held.name].append(held)
    for (_, name), parts in by_name.items():
        first = parts[0]
        for other in parts[1:]:
            if (other.dtype, other.shape, other.equal) != (first.dtype, first.shape, first.equal):
                raise CheckpointMismatchError(
                    f"{name} is {first.dtype} {list(first.shape)} on rank {holders[first][0]} and "
                    f"{other.dtype} {list(other.shape)} on rank {holders[other][0]}: ranks save "
                    "one model together; give another backend= or folder for each of several"
                )
        reached = 0
        for part in sorted(parts, key=lambda part: part.start):
            if part.start > reached:
                break
            reached = max(reached, part.stop)
        if reached < prod(first.shape):
            raise CheckpointMismatchError(
                f"no rank holds the elements of {name} from {reached} on ({first.dtype} "
                f"{list(first.shape)}): every rank that has the model has to save it"
            )


def records_of(
    planned: Sequence[PlannedFile],
) -> dict[File, dict[str, TensorRecord]]:
    """Where each tensor is, for the manifest."""
    pieces: dict[tuple[File, str], list[Piece]] = defaultdict(list)
    about: dict[tuple[File, str], Content] = {}
    for number, (_, file, layout) in enumerate(planned):
        for content, at in layout.contents:
            pieces[file, content.name].append(Piece(number, at, content.start, content.stop))
            about[file, content.name] = content
    records: dict[File, dict[str, TensorRecord]] = {file: {} for file in FILES}
    for (file, name), content in about.items():
        ordered = sorted(pieces[file, name], key=lambda piece: (piece.start, piece.stop))
        records[file][name] = TensorRecord(content.dtype, content.shape, ordered)
    return records


def merge_optimizers(described: Sequence[Description]) -> OptimizerRecord | None:
    """The ranks' optimizers as one.

    Raises `MisuseError` if they are of different kinds, or have different options.
    """
    mine = [(rank, each.optimizer) for rank, each in enumerate(described) if each.optimizer]
    if not mine:
        return None
    if len(mine) < len(described):
        without = next(rank for rank, each in enumerate(described) if not each.optimizer)
        raise MisuseError(f"rank {mine[0][0]} gave an optimizer and rank {without} gave none")
    first_rank, first = mine[0]
    for rank, other in mine[1:]:
        if _outline(other) != _outline(first):
            raise MisuseError(
                f"rank {rank} has another optimizer than rank {first_rank}, or other options: "
                f"{_difference(first, other)}. Every rank has to have the same"
            )
    return OptimizerRecord(
        kind=first.kind,
        groups=[
            OptionsRecord(_union(other.groups[at].parameters for _, other in mine), group.options)
            for at, group in enumerate(first.groups)
        ],
        state=_merged_state([other for _, other in mine]),
        shared=first.shared,
    )


def _outline(optimizer: OptimizerDescription) -> tuple[str, list[Any]]:
    return optimizer.kind, [group.options for group in optimizer.groups]


def _difference(first: OptimizerDescription, other: OptimizerDescription) -> str:
    if first.kind != other.kind or len(first.groups) != len(other.groups):
        return (
            f"{first.kind} with {len(first.groups)} groups and {other.kind} with "
            f"{len(other.groups)}"
        )
    return next(
        f"group {at} has {ours.options} and {theirs.options}"
        for at, (ours, theirs) in enumerate(zip(first.groups, other.groups, strict=True))
        if ours.options != theirs.options
    )


def _union(lists: Any) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _merged_state(
    optimizers: Sequence[OptimizerDescription],
) -> dict[str, dict[str, StateRecord]]:
    """For each parameter and key, what the first rank has that has it; of what is own, all."""
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
                if record.own:
                    merged[name][key] = StateRecord(own=_joined(known.own, record.own))
    return dict(merged)


def _joined(known: list[Own], more: list[Own]) -> list[Own]:
    have = {(own.start, own.stop) for own in known}
    return known + [own for own in more if (own.start, own.stop) not in have]


# ------------------------------------------------------------------------------
# What each rank tells the others before a save: what it holds, but not the values.
#
# From all of them every rank works out the same plan.

File = Literal["model", "state"]
NONE: Mapping[Tensor, Tensor] = MappingProxyType({})


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Elements start:stop of a tensor, which this rank could write.

    file    which of a rank's two files it belongs in
    equal   ranks that hold the same elements have the same values, so anyone may write them; else
            the first of these ranks does
    """

    file: File
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    equal: bool

    def content(self) -> Content:
        """As a tensor of a file."""
        return Content(self.name, self.dtype, self.shape, self.start, self.stop)


class OptimizerDescription(msgspec.Struct):
    """An optimizer: see `OptimizerRecord`."""

    kind: str
    groups: list[OptionsRecord]
    state: dict[str, dict[str, StateRecord]]
    shared: Any


class Description(msgspec.Struct):
    """What a rank holds. `asked` is what every rank has to ask for alike, in words."""

    asked: list[str]
    held: list[Held]
    aliases: dict[str, str]
    values: dict[str, Any]
    optimizer: OptimizerDescription | None
    rng: str
    extra: Any
    fresh: bool = False


class Holdings:
    """The tensors behind a description, by the file that they belong in and their name there."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.tensors: dict[tuple[File, str], Tensor] = {}

    def add(
        self, file: File, name: str, tensor: Tensor, part: Slice | None = None, *, equal: bool
    ) -> None:
        """Another one; `part` says what of a whole tensor it is.

        Raises `MisuseError` for a name that is taken already.
        """
        if (file, name) in self.tensors or name == METADATA:
            raise MisuseError(f"two tensors would be named {name}: give one another name")
        check_tensor(name, tensor)
        part = part or Slice.whole(tuple(tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.held.append(Held(file, name, dtype, part.shape, part.start, part.stop, equal))
        self.tensors[file, name] = tensor.detach()

    def keep(self, tensor: Tensor, path: str) -> str:
        """A tensor inside a value, for `to_json`: written by the first rank that has the value.

        Its name is the path, or, where another one has the same, that and a prime.
        """
        while ("state", path) in self.tensors:
            path += "'"
        self.add("state", path, tensor, equal=False)
        return path

    def json(self, value: object, path: str) -> Any:
        """The value as JSON, its tensors kept under names that begin with `path`."""
        return to_json(value, path, self.keep)

    def add_model(self, parts: ModelParts, means: Mapping[Tensor, Tensor] = NONE) -> dict[str, Any]:
        """Parameters and buffers, or their means over the ranks, where there are any; returns what
        modules keep beside them.
        """
        for name, part in parts.parameters.items():
            tensor = means.get(part.tensor, part.tensor)
            self.add("model", name, tensor, part.slice, equal=True)
        for name, buffer in parts.buffers.items():
            self.add("model", name, means.get(buffer, buffer), equal=False)
        return {
            key: self.json(module.get_extra_state(), f"model/{key}")
            for key, module in parts.stateful.items()
        }
