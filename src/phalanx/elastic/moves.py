"""Moves of state: what the ranks of one generation hold becomes what those of the next have.

A checkpoint is loaded whose files are the ranks' memories. It has the same descriptions, the same
plan of who gives which elements, and the same manifest as one that is saved. Only the reader
differs: it takes what this rank has from its memory, and the rest in messages.

    generation 1   rank 0  w[0:4]      rank 1  w[4:8]      rank 2  w[8:12], and a copy of w[4:8]
                      |                  (is lost)              |
    generation 2   rank 0  w[0:6]  <---- w[4:6] ------------ rank 1  w[6:12]

Elements that are in their place already are not moved, nor copied. Nothing is changed before every
rank has all that it needs: if one is lost meanwhile, what each had is whole.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from typing_extensions import override

from phalanx.checkpoint import state
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.checkpoint.load import into_model, into_optimizer, shown
from phalanx.checkpoint.manifest import TensorRecord, from_json
from phalanx.checkpoint.save import describe
from phalanx.checkpoint.save_plan import (
    LocalTensors,
    RankDescription,
    describe_optimizer,
    make_manifest,
    merge_optimizers,
    plan_files,
)
from phalanx.checkpoint.tensor_files import Reader, TensorShard, overlaps
from phalanx.core.backend import Backend
from phalanx.core.work import Work
from phalanx.errors import CheckpointMismatchError
from phalanx.parallel.wrapper import Slice
from phalanx.wire.codec import DTYPES
from phalanx.wire.control import learned
from phalanx.wire.memory import plain, tensor_bytes

PACKED = 64 << 10  # bytes: pieces that are smaller go in one message
Tensors = dict[TensorShard, Tensor]
_Requests = dict[int, list[tuple[int, int, int, int]]]
_Wanted = list[_Requests]  # of each part


class Holding(NamedTuple):
    """The state of one rank of a generation, which that rank has, or another one has a copy of.

    rank      its number in that generation
    parts     the description of the model with the first optimizer, and of each further optimizer
    tensors   the tensors of each part, by their descriptions
    """

    rank: int
    parts: list[RankDescription]
    tensors: list[Tensors]


def holding(
    rank: int,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    values: object = None,
) -> Holding:
    """Return this rank's own state as it is: nothing is copied, and nothing sent.

    values   of other kept objects, as a checkpoint's `extra`; of the lowest rank's counts
    """
    local = LocalTensors()
    parts = [describe(model, optimizers[0] if optimizers else None, local, {})]
    parts[0].extra = local.json(values, "extra")
    tensors = [local.tensors]
    for optimizer in optimizers[1:]:
        local, parameters = LocalTensors(), state.model_state(model).parameters
        parts.append(RankDescription(optimizer=describe_optimizer(optimizer, parameters, local)))
        tensors.append(local.tensors)
    for part, its in zip(parts, tensors, strict=True):
        part.held = list(its)
    return Holding(rank, parts, tensors)


def move(
    holdings: Sequence[Holding],
    backend: Backend,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    timeout: float | None = None,
) -> Any:
    """Load the state that the ranks hold together into this rank's model and optimizers, in place.
    Return the other values.

    holdings   the part that this rank gives: its own, and those that it has copies of; or nothing
    backend    the ranks of the new generation; each of them calls this
    timeout    seconds that a rank waits for the others at a time; by default the backend's

    The model has been cut anew for `backend` since `holding`. Blocks until every rank has all that
    it needs, and only then changes anything. Messages: descriptions, requests, and the bytes that a
    rank has not in its place. Raises as `load_checkpoint` does, with nothing changed.
    """
    seconds = backend.timeout if timeout is None else timeout
    with backend.subgroup(range(backend.world_size)) as apart:  # no message of the program's
        group = CheckpointGroup(apart, "elastic", seconds, "the state of the ranks")
        readers = _readers(holdings, group)
        changes: list[Iterator[list[str]]] = []

        def request() -> bytes:
            here = state.model_state(model)
            changes.append(into_model(here, readers[0].manifest, readers[0]))
            for optimizer, reader in zip(optimizers, readers, strict=False):
                manifest = reader.manifest
                changes.append(into_optimizer(optimizer, here, manifest, reader, exact=True))
            if unused := [name for change in changes for name in next(change)]:
                raise CheckpointMismatchError(
                    f"rank {backend.rank} has no place for {shown(unused)}, which others have: "
                    "every process makes the same model and optimizers before steps()"
                )
            readers[0].request(readers[0].manifest.extra)
            return msgspec.json.encode([reader.wanted for reader in readers])

        asked = [msgspec.json.decode(each, type=learned(_Wanted)) for each in group.on_all(request)]
        if any(each for of_rank in asked for each in of_rank):
            for reader, wanted in zip(readers, zip(*asked, strict=True), strict=True):
                reader.asked = wanted
                reader.read()
            group.on_all(lambda: None)
        for change in changes:
            next(change, None)
        return from_json(readers[0].manifest.extra, readers[0].copy)


def _readers(holdings: Sequence[Holding], group: CheckpointGroup) -> list[MemoryReader]:
    """Return the reader of each part, after all ranks have told what they hold."""
    kind = list[tuple[int, list[RankDescription]]]
    mine = msgspec.json.encode([(each.rank, each.parts) for each in holdings])
    held = [
        Held(rank, owner, place, parts)
        for owner, told in enumerate(group.on_all(lambda: mine))
        for place, (rank, parts) in enumerate(msgspec.json.decode(told, type=learned(kind)))
    ]
    # Of what may differ between ranks, the first one's is taken. Several may have copies of a lost
    # rank's state: the fullest is, since those on another host have no residuals.
    held.sort(key=lambda each: (each.rank, -len(each.parts[0].held), each.owner))
    held = [next(same) for _, same in groupby(held, lambda each: each.rank)]
    return [MemoryReader(held, at, holdings, group) for at in range(len(held[0].parts))]


# ------------------------------------------------------------------------------
# The reader: each holding's part is one of the checkpoint's ranks, whose file is in memory


class Held(NamedTuple):
    """A holding, as all ranks know it: whose it was, and which rank has it, as its which one."""

    rank: int
    owner: int
    place: int
    parts: list[RankDescription]


class MemoryReader(Reader):
    """Reads tensors where the ranks hold them. `read` is a collective of all of them.

    held     all holdings
    at       the part of them that is read
    wanted   what this rank requests, by the rank that has it: file and place of a shard there, and
             bytes of it
    asked    what each rank requests, for `read`
    """

    def __init__(
        self, held: Sequence[Held], at: int, holdings: Sequence[Holding], group: CheckpointGroup
    ) -> None:
        described = [source.parts[at] for source in held]
        planned = plan_files(described)
        merged = merge_optimizers([each for each in described if each.optimizer] or described)
        super().__init__("the state of the ranks", make_manifest(described, merged, planned, 0))
        self._most = sys.maxsize
        self._group = group
        self._mine = [each.tensors[at] for each in holdings]
        self._equal = {
            shard: tensor
            for its in self._mine
            for shard, tensor in its.items()
            if shard.equal  # so it does not matter whose it is
        }
        self._places = {
            (number, begin): (held[file.rank], shard)
            for number, file in enumerate(planned)
            for shard, begin in file.shards  # an empty one gives its place to the next
        }
        self.wanted: _Requests = defaultdict(list)
        self.asked: Sequence[_Requests] = ()
        self._into: dict[int, list[memoryview]] = defaultdict(list)  # the memory for each

    @override
    def part(self, record: TensorRecord, part: Slice) -> Tensor:
        """Request a part of a tensor, flat: the memory where it is, or some that `read` fills."""
        size = DTYPES[record.dtype].itemsize
        pieces = list(overlaps(record.pieces, part.start, part.stop))
        if len(pieces) == 1:
            here = self._here(pieces[0][0].file, pieces[0][0].at)
            if here is not None and here.numel() == part.numel:
                return here
        flat = torch.empty(part.numel, dtype=DTYPES[record.dtype])
        memory = tensor_bytes(flat)
        for piece, first, last in pieces:
            into = memory[size * (first - part.start) : size * (last - part.start)]
            low, high = size * (first - piece.start), size * (last - piece.start)
            here = self._here(piece.file, piece.at)
            if here is not None:
                into[:] = tensor_bytes(here)[low:high]
                continue
            source, _ = self._places[piece.file, piece.at]
            self.wanted[source.owner].append((piece.file, piece.at, low, high))
            self._into[source.owner].append(into)
        return flat

    @override
    def read(self) -> None:
        """Take the requested bytes from the ranks that have them; give them theirs."""
        backend = self._group.backend
        assert backend is not None
        rank, size = backend.rank, backend.world_size
        unpacked: list[tuple[memoryview, list[memoryview]]] = []
        works: list[Work[int] | Work[None]] = []
        for peer in ((rank - distance) % size for distance in range(1, size)):
            small, large = _sorted(self._into.pop(peer, []))
            if small:
                room = memoryview(bytearray(sum(map(len, small))))
                unpacked.append((room, small))
                large = [room, *large]
            works += [backend.irecv(into, peer, background=False) for into in large]
        for peer in ((rank + distance) % size for distance in range(1, size)):
            small, large = _sorted([self._bytes(*each) for each in self.asked[peer].get(rank, [])])
            packed = [memoryview(b"".join(small))] if small else []
            works += [backend.isend(each, peer, background=False) for each in packed + large]
        for work in works:
            work.wait(self._group.timeout)
        for room, small in unpacked:
            rest = room
            for into in small:
                into[:], rest = rest[: len(into)], rest[len(into) :]

    def _here(self, file: int, begin: int) -> Tensor | None:
        """Return a shard, flat, if this rank holds it, or one that is equal."""
        source, shard = self._places[file, begin]
        if source.owner == self._group.rank:
            tensor = self._mine[source.place][shard]
        elif shard in self._equal:
            tensor = self._equal[shard]
        else:
            return None
        return plain(tensor.cpu()).view(-1)

    def _bytes(self, file: int, begin: int, low: int, high: int) -> memoryview:
        """Return bytes of a shard that this rank holds."""
        source, shard = self._places[file, begin]
        return tensor_bytes(plain(self._mine[source.place][shard].cpu()))[low:high]


def _sorted(pieces: Sequence[memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """Return the small ones, which go in one message, and the large ones."""
    small = [each for each in pieces if len(each) < PACKED]
    return small, [each for each in pieces if len(each) >= PACKED]
