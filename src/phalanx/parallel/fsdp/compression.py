"""Gradients that a compressor averages: which of the two steps of a reduction goes compressed.

                     reduce-scatter: full gradients       all-reduce: shards, between replicas
    FULL_SHARD,      compressed, over all ranks           -
    SHARD_GRAD_OP
    hybrid(k)        as it is, over k ranks               compressed
    NO_SHARD         -                                    compressed, over all ranks

With `hybrid` the links between groups are the slow ones, and what crosses them is compressed; what
goes over the fast ones is added up exactly before. So a rank has a shard's residual only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from phalanx.aggregation.exchange import Exchange, Under
from phalanx.aggregation.saved import WHOLE, Cut
from phalanx.backends.base import Backend
from phalanx.compression import Compressor
from phalanx.compression.bundle import Bundle
from phalanx.compression.exchange import Part, Rounds
from phalanx.compression.residuals import owned_key
from phalanx.parallel.fsdp.flat import Flat
from phalanx.parallel.fsdp.ranks import Ranks


class Awaited(Protocol):
    """What can be waited for."""

    def wait(self) -> object:
        """Block until it is done."""


class _UnderWay:
    """An average that has begun."""

    def __init__(self, exchange: Exchange, under: Under | None) -> None:
        self._exchange, self._under = exchange, under

    @torch.no_grad()
    def wait(self) -> None:
        self._exchange.finish([self._under])


class Compression:
    """Of one FSDP on one rank.

    compressor   knows each gradient by its parameter's name; with `hybrid`, whose ranks have parts
                 of it only, by elements and name (`owned_key`)
    group        the ranks that average compressed gradients
    scatters     whether these are full gradients, of which each rank gets its shard
    """

    def __init__(self, compressor: Compressor, ranks: Ranks) -> None:
        self.compressor = compressor
        self.scatters = ranks.shards is not None and ranks.replicas is None
        self.group: Backend = ranks.replicas or ranks.shards or ranks.world
        self._shards = ranks.size
        self._part = Part(self.group.rank, self.group.world_size)
        self._exchange = Exchange(self.group)

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""
        return self._exchange.bytes_sent

    def cut(self, flats: Iterable[Flat]) -> Cut:
        """What of gradients its compressor knows on this rank."""
        if self.scatters or self._shards == 1:
            return WHOLE
        pieces = (key for flat in flats for key, _ in _parts(flat))
        return Cut(self._shards, frozenset(pieces))

    @torch.no_grad()
    def scatter(self, flat: Flat, full: Tensor, into: Tensor, label: str) -> Awaited:
        """Begin to put this rank's shard of the mean of full gradients, padded, into `into`.

        `full` is overwritten.
        """
        bundle = Bundle(full, flat.names, [torch.Size(shape) for shape in flat.layout.shapes])
        return _UnderWay(self._exchange, self._exchange.begin(self._shard(bundle, into), label))

    def _shard(self, bundle: Bundle, into: Tensor) -> Rounds:
        yield from self.compressor.average_shard_(bundle, self._part)
        into.copy_(bundle.shards(self._part.parts)[self._part.number])

    @torch.no_grad()
    def average(self, flat: Flat, shard: Tensor, label: str) -> Awaited:
        """Begin to overwrite a shard of gradients with the mean over the ranks that have it."""
        pieces = dict(_whole(flat) if self._shards == 1 else _parts(flat))
        size = sum(map(prod, pieces.values()))
        bundle = Bundle(shard[:size], list(pieces), [*map(torch.Size, pieces.values())])
        average = self.compressor.average_(bundle, self._part)
        return _UnderWay(self._exchange, self._exchange.begin(average, label))


def _whole(flat: Flat) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from zip(flat.names, flat.layout.shapes, strict=True)


def _parts(flat: Flat) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What this rank's shard has of each parameter, and its shape.

    Of a matrix the rows that are whole are one again, for compressors that look for that:

        . . x x     x x         2 of its first row
        x x x x     x x x x     2 rows
        x x x x     x x x x
        x . . .     x           1 of its last one
    """
    for number, (name, shape) in enumerate(_whole(flat)):
        start, stop = flat.layout.part(number, flat.place)
        row = prod(shape[1:])
        first, last = (-(-start // row) * row, stop // row * row) if row else (0, 0)
        cuts = (start, first, last, stop) if first < last else (start, stop)
        for low, high in pairwise(cuts):
            if low < high:
                rows = (low, high) == (first, last) and len(shape) > 0
                yield (
                    owned_key(name, low, high),
                    ((high - low) // row, *shape[1:]) if rows else (high - low,),
                )
