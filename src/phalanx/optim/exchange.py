"""The ways of parameters to their owners and back, for one step.

    replicas   every rank has them        owner 0: a       owner 1: b, c
                                          step a           step b, c
                                          broadcast a, b, c

    shards     rank 0: a b c, first half  a, both halves   b and c, both halves     all to all
               rank 1: a b c, last half   step a           step b, c
                                          halves go back                            all to all

Each is a context in which owners have whole parameters and gradients, and write the former; after
it all ranks have the new values. It blocks; every rank enters it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from phalanx.collectives import all_to_all_uneven, async_broadcast_
from phalanx.core.backend import Backend
from phalanx.parallel.averaging import LARGE, Bucket, batches, least_sent
from phalanx.parallel.wrapper import Slice

CHAIN = 64 << 10  # bytes from which on a broadcast goes down a chain: no rank sends it twice
Owners = Mapping[nn.Parameter, int]  # of parameters, in an order that is the same on every rank


@contextmanager
def whole_replicas(owners: Owners, backend: Backend, label: str) -> Iterator[None]:
    """Parameters that every rank has. Sends each p-1 times, in all: 1 MiB or more as it lies there,
    smaller ones in buckets, all under way together.
    """
    yield
    pending, copies = [], list[tuple[Tensor, Tensor]]()
    runs = batches(owners, LARGE, owners) if backend.world_size > 1 else ()
    for number, run in enumerate(runs):
        owner, flat = owners[run[0]], run[0].detach()  # type: ignore[index]
        if len(run) > 1 or not flat.is_contiguous():
            bucket = Bucket(run, backend)
            flat = bucket.flat
            if owner == backend.rank:
                torch.cat([p.detach().reshape(-1) for p in run], out=flat)
            else:
                copies += bucket.views.items()
        algorithm = least_sent(backend, "ring" if flat.nbytes >= CHAIN else "tree")
        part = f"{label}, part {number}"
        pending.append(async_broadcast_(flat, backend, owner, algorithm=algorithm, label=part))
    for each in pending:
        each.wait()
    for parameter, view in copies:
        parameter.copy_(view)


@contextmanager
def whole_shards(
    owners: Owners,
    backend: Backend,
    label: str,
    slices: Mapping[nn.Parameter, Sequence[Slice]],
    *,
    steps: bool = True,
) -> Iterator[None]:
    """Parameters of which each rank has one of the `slices`, and of its gradient, if it has one.
    Inside, whole ones are the `data` of their owner's Parameters; without `steps` only to be read.
    """
    ranks = range(backend.world_size)
    shards = {p: (p.data, p.grad) for p in owners if not steps or p.grad is not None}

    def to_owners(pieces: Mapping[nn.Parameter, Sequence[Tensor | None]]) -> list[list[Tensor]]:
        """Return for each rank this one's pieces of what it owns."""
        mine = [[some for p, some in pieces.items() if owners[p] == rank] for rank in ranks]
        return [[t.view(-1) for t in chain(*some) if t is not None] for some in mine]

    def by_rank(wholes: Mapping[nn.Parameter, Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return for each rank its pieces of what this one owns."""
        return [
            [t.view(-1)[slice(*slices[p][rank][1:])] for p, some in wholes.items() for t in some]
            for rank in ranks
        ]

    owned = [p for p in shards if owners[p] == backend.rank]
    wholes = {p: [p.new_empty(slices[p][0].shape) for _ in range(1 + steps)] for p in owned}
    _move(to_owners({p: shards[p][: 1 + steps] for p in shards}), by_rank(wholes), backend, label)
    try:
        for parameter, (value, *gradient) in wholes.items():
            _replace(parameter, value, *gradient)
        yield
    finally:
        for parameter in wholes:
            _replace(parameter, *shards[parameter])
    if steps:
        new = by_rank({p: some[:1] for p, some in wholes.items()})
        _move(new, to_owners({p: [p.detach()] for p in shards}), backend, f"{label}, back")


def _replace(parameter: nn.Parameter, value: Tensor, gradient: Tensor | None = None) -> None:
    parameter.grad = None  # which has to have the shape of the parameter
    parameter.data = value
    parameter.grad = gradient


def _move(
    outgoing: list[list[Tensor]], incoming: list[list[Tensor]], backend: Backend, label: str
) -> None:
    """Send each rank its tensors, and copy those from it into place: a message for each dtype."""
    kinds = {t.dtype: t.new_empty(0) for t in chain(*outgoing, *incoming)}
    for dtype, nothing in sorted(kinds.items(), key=str):
        out, into = (
            [[t for t in some if t.dtype is dtype] for some in each]
            for each in (outgoing, incoming)
        )
        sizes = [[sum(t.numel() for t in some) for some in each] for each in (out, into)]
        sent, places = torch.cat([nothing, *chain(*out)]), list(chain(*into))
        given = all_to_all_uneven(sent, backend, *sizes, label=label)
        pieces = torch.split(given, [t.numel() for t in places])
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece)
