"""Whether the states of compressors that are loaded can be what some ranks had left over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.compression.finite import is_finite
from phalanx.compression.memory import under
from phalanx.compression.residuals import OWNED, RESIDUAL, read_owned_key
from phalanx.errors import SizeMismatchError

States = Mapping[int, Mapping[str, Tensor]]


def check_intact(
    states: States, backend: Backend, sizes_of: Mapping[str, int] | None = None
) -> None:
    """Raise unless they are; nothing has been loaded then.

    states     by the rank whose they were
    sizes_of   of each gradient, by name, if they are known

    `SizeMismatchError`, which names it, for what was left over of a gradient that is not there, or
    has another size, here or on another of the ranks; ValueError for what is no state: values that
    are not finite would come back in every average.
    """
    rank = backend.rank
    sizes = dict(sizes_of) if sizes_of is not None else {}
    for whose, state in states.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                _refuse(rank, whose, key, f"is a {type(value).__name__}, not a tensor")
        for name, left in under(RESIDUAL, state).items():
            if not left.is_floating_point() or left.dim() != 1 or not is_finite(left):
                _refuse(rank, whose, RESIDUAL + name, "is no row of finite numbers")
            if sizes_of is None:
                sizes.setdefault(name, left.numel())
            if sizes.get(name) != left.numel():
                has = f"{sizes[name]} values" if name in sizes else "no such gradient"
                raise SizeMismatchError(
                    f"rank {rank}: the state dict has {left.numel()} values that were left over "
                    f"of {name}, and this model has {has}: it is the state of another model",
                    rank=rank,
                )
    for whose, state in states.items():
        for key, left in under(OWNED, state).items():
            if not _is_slice(key, left, sizes):
                _refuse(rank, whose, OWNED + key, "is no part of a gradient that is there")


def _is_slice(key: str, left: Tensor, sizes: Mapping[str, int]) -> bool:
    try:
        name, start, stop = read_owned_key(key)
    except ValueError:
        return False
    fits = 0 <= start <= stop <= sizes.get(name, -1) and left.shape == (stop - start,)
    return fits and left.is_floating_point() and is_finite(left)


def _refuse(rank: int, whose: int, key: str, problem: str) -> NoReturn:
    raise ValueError(
        f"rank {rank}: the state dict is damaged: {key!r}, of rank {whose}'s compressor, {problem}"
    )
