"""`DeviceMesh`: a grid of ranks whose axes have names, with a backend for each axis.

DeviceMesh(backend, (2, 4), ("data", "tensor"))          the last axis varies fastest

         tensor
data    0   1   2   3           mesh["tensor"] on rank 5:  ranks 4, 5, 6, 7
        4  [5]  6   7           mesh["data"]   on rank 5:  ranks 1, 5
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from operator import index
from typing import TYPE_CHECKING, NoReturn

import torch

from phalanx.core.backend import Backend, SubBackend
from phalanx.errors import InvalidRankError, InvalidWorldSizeError
from phalanx.parallel.guards import check_agreement

__all__ = ["DeviceMesh"]

DRAWN = 64  # ranks: a larger grid is not drawn


class DeviceMesh:
    """The ranks of `backend` as a grid; `mesh["data"]` is this rank's line along that axis.

    backend      every rank of it makes the mesh
    shape        number of ranks along each axis; their product is the world size
    axis_names   one for each axis, no two alike

    coordinates  this rank's place along each axis; `mesh["data"].rank` is the one along "data"

    Ranks are placed in row-major order: neighbours along the last axis have neighbouring numbers,
    so give that to the one with most traffic (tensor parallelism). The axes' groups are made here.
    Blocks for one message of 8 bytes: ranks that make different grids get a `DesyncError` that
    names them. Before that it raises `InvalidWorldSizeError` if the sizes do not multiply to the
    world size, and `ValueError` for names that do not fit.
    """

    def __init__(self, backend: Backend, shape: Sequence[int], axis_names: Sequence[str]) -> None:
        self.backend = backend
        self.shape = _checked_shape(shape, backend)
        self.axis_names = _checked_names(axis_names, self.shape)
        self._ranks = torch.arange(backend.world_size, device="cpu").view(self.shape)
        check_agreement(
            [f"the shape {self.shape}", f"the axes {self.axis_names}"],
            backend,
            op="DeviceMesh",
            remedy="Make the same mesh on every rank",
        )
        self.coordinates = self.coordinates_of(backend.rank)
        self._groups: dict[tuple[str, ...], SubBackend] = {
            (name,): self._group((name,)) for name in self.axis_names
        }

    def __getitem__(self, axes: str | tuple[str, ...]) -> SubBackend:
        """Return a backend for the ranks that differ from this one along the named axes only.

        One name: this rank's line. Several, in the mesh's order: this rank's plane, flattened in
        row-major order. The same object each time. A plane's group is made at the first call, which
        all its members make, as of any `SubBackend`: without a message. Raises `KeyError`.
        """
        names = axes if isinstance(axes, tuple) else (axes,)
        if not names or names != tuple(name for name in self.axis_names if name in names):
            raise KeyError(
                f"{axes!r}: this mesh has the axes {', '.join(self.axis_names)}; ask for one of "
                "them, or for several in this order"
            )
        if names not in self._groups:
            self._groups[names] = self._group(names)
        return self._groups[names]

    if not TYPE_CHECKING:  # to which every name would exist

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that names the backends to give instead of a mesh."""
            axes = self.__dict__.get("axis_names", ("data",))
            raise AttributeError(
                f"a DeviceMesh has no {name!r}. It is no backend: take that of an axis, such as "
                f"mesh[{axes[0]!r}], or that of all ranks, mesh.backend"
            )

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True)
        )
        head = f"DeviceMesh({sizes}), rank {self.backend.rank} at {self.coordinates}"
        if self.backend.world_size > DRAWN:
            return head
        return "\n".join([head, *self._picture()])

    def rank_at(self, *coordinates: int) -> int:
        """Return the rank, of `backend`, at a place of the grid: one number for each axis."""
        inside = len(coordinates) == len(self.shape) and all(
            0 <= place < size for place, size in zip(coordinates, self.shape, strict=True)
        )
        if not inside:
            raise InvalidRankError(
                f"rank {self.backend.rank}: a mesh of shape {self.shape} has no place "
                f"{coordinates}",
                rank=self.backend.rank,
            )
        return int(self._ranks[coordinates])

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank of `backend`: the inverse of `rank_at`."""
        self.backend.check_rank(rank)
        axes = zip(self._ranks.stride(), self.shape, strict=True)
        return tuple(rank // stride % size for stride, size in axes)

    def _group(self, names: tuple[str, ...]) -> SubBackend:
        here = zip(self.axis_names, self.coordinates, strict=True)
        places = tuple(slice(None) if name in names else place for name, place in here)
        return self.backend.subgroup(self._ranks[places].flatten().tolist())

    def _picture(self) -> Iterator[str]:
        """Draw the last axis from left to right, the one before downwards, the others in turn."""
        *outer, rows, columns = (1, *self.shape)
        *outer_names, row_name, column_name = ("", *self.axis_names)
        titles = [
            ", ".join(f"{n}={at}" for n, at in zip(outer_names, place, strict=True) if n)
            for place in product(*map(range, outer))
        ]
        margin = max(map(len, [row_name, *titles]))
        width = len(str(self.backend.world_size - 1)) + 2
        planes = self._ranks.view(-1, rows, columns).tolist()
        for title, plane in zip(titles, planes, strict=True):
            yield f"{title:{margin}}  {column_name}".rstrip()
            for row, ranks in enumerate(plane):
                cells = "".join(
                    f"{f'[{rank}]' if rank == self.backend.rank else f'{rank} ':>{width + 1}}"
                    for rank in ranks
                )
                yield f"{row_name if row == 0 else '':{margin}}{cells}".rstrip()


def _checked_shape(shape: Sequence[int], backend: Backend) -> tuple[int, ...]:
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError:
        raise TypeError(f"the shape of a mesh is a list of whole numbers, not {shape!r}") from None
    if not sizes or any(size < 1 for size in sizes) or prod(sizes) != backend.world_size:
        ranks = f"{backend.world_size} rank{'s' if backend.world_size > 1 else ''}"
        product_ = " x ".join(map(str, sizes)) or "no axes"
        raise InvalidWorldSizeError(
            f"rank {backend.rank}: a mesh of {product_} has {prod(sizes) if sizes else 0} places, "
            f"and the backend has {ranks}: the sizes, each 1 or more, have to multiply to the "
            "number of ranks",
            rank=backend.rank,
        )
    return sizes


def _checked_names(axis_names: Sequence[str], shape: tuple[int, ...]) -> tuple[str, ...]:
    if not isinstance(axis_names, Iterable):
        raise TypeError(f"the names of a mesh's axes are a list of words, not {axis_names!r}")
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"the names of a mesh's axes are words, not {names!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"two axes of a mesh cannot have one name: {', '.join(names)}")
    if len(names) != len(shape):
        raise ValueError(
            f"a mesh of shape {shape} needs {len(shape)} names, one for each axis, and was given "
            f"{len(names)}: {', '.join(names)}"
        )
    return names
