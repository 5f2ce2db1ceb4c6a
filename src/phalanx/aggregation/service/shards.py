"""Shards: which server has which parameters, and where they lie in a message.

    parameters   0        1    2      3          largest first, each to the server that has least
    server 0     0 ------------2-----
    server 1              1 -------- 3 --------

Whole tensors, so that every optimizer works. In a message those of wide elements come first, and so
nothing has to be padded:

    word | float64 ... | float32 ... | bfloat16 ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.aggregation.service.words import SIZE
from phalanx.backends.base import Backend
from phalanx.errors import UnsupportedOperationError


def numbers_by_server(params: Sequence[Tensor], servers: int) -> list[list[int]]:
    """For each server the numbers of its parameters, ascending; balanced by bytes.

    A server may have none. The same on every rank that has tensors alike.
    """
    shares: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for number in sorted(range(len(params)), key=lambda number: -params[number].nbytes):
        place = loads.index(min(loads))
        shares[place].append(number)
        loads[place] += params[number].nbytes
    return [sorted(share) for share in shares]


class Layout:
    """Where some tensors lie in a message, behind its word.

    size   bytes of the message: theirs, and the word's
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        self._places = [0] * len(tensors)
        self.size = SIZE
        widest_first = sorted(range(len(tensors)), key=lambda n: -tensors[n].dtype.itemsize)
        for number in widest_first:
            self._places[number] = self.size
            self.size += tensors[number].nbytes

    def memory(self, backend: Backend) -> Tensor:
        """Memory for such a message, which is sent without a copy."""
        return backend.empty(self.size, dtype=torch.uint8)

    def views(self, message: Tensor) -> list[Tensor]:
        """The tensors in a message."""
        views = []
        for (shape, dtype), place in zip(self._kinds, self._places, strict=True):
            count = shape_bytes(shape, dtype)
            views.append(message[place : place + count].view(dtype).view(shape))
        return views


def shape_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor of this shape."""
    return torch.Size(shape).numel() * dtype.itemsize


def described(params: Sequence[Tensor], servers: Sequence[int]) -> list[str]:
    """What worker and server have to agree on, line by line."""
    return [
        f"servers {', '.join(map(str, servers))}",
        *(f"parameter {number} ({_kind(param)})" for number, param in enumerate(params)),
    ]


def encoded(lines: list[str]) -> bytes:
    """The same as bytes."""
    return msgspec.json.encode(lines)


def decoded(text: bytes) -> list[str]:
    """And back."""
    return msgspec.json.decode(text, type=list[str])


def digest(lines: list[str]) -> int:
    """The same as a hash of 64 bits."""
    return xxh3_64_intdigest(encoded(lines))


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """The first line of each in which they differ."""
    end = "no more parameters"
    for place in range(max(len(mine), len(theirs))):
        here = mine[place] if place < len(mine) else end
        there = theirs[place] if place < len(theirs) else end
        if here != there:
            return here, there
    raise AssertionError("the hashes of equal descriptions differ")


def checked_params(params: Iterable[Tensor], who: str) -> list[Tensor]:
    """The parameters as a list.

    TypeError unless it is one of tensors; `UnsupportedOperationError` for one that no optimizer
    can change: of whole numbers.
    """
    if isinstance(params, Tensor):
        raise TypeError(f"{who} takes a list of parameters, not one tensor")
    listed = list(params)
    for number, param in enumerate(listed):
        if not isinstance(param, Tensor):
            raise TypeError(f"{who}: parameter {number} is a {type(param).__name__}, not a tensor")
        if not (param.is_floating_point() or param.is_complex()):
            raise UnsupportedOperationError(
                f"{who}: parameter {number} ({_kind(param)}) has no gradient: leave out tensors of "
                "whole numbers"
            )
    return listed


def checked_gradients(
    gradients: Iterable[Tensor], params: Sequence[Tensor], who: str, *, what: str = "gradient"
) -> list[Tensor]:
    """The gradients, or `what` they are, as a list. TypeError or ValueError, which names it, for
    one that is not alike the parameter, or is missing.
    """
    if isinstance(gradients, Tensor):
        raise TypeError(f"{who} takes a list of {what}s, not one tensor")
    listed = list(gradients)
    if len(listed) != len(params):
        raise ValueError(f"{who}: {len(listed)} {what}s for {len(params)} parameters")
    for number, (gradient, param) in enumerate(zip(listed, params, strict=True)):
        if not isinstance(gradient, Tensor):
            raise TypeError(
                f"{who}: {what} {number} is a {type(gradient).__name__}, not a tensor; give "
                "zeros for a parameter that was not used"
            )
        if (gradient.shape, gradient.dtype) != (param.shape, param.dtype):
            raise ValueError(
                f"{who}: {what} {number} ({_kind(gradient)}) does not fit parameter {number} "
                f"({_kind(param)})"
            )
        if gradient.layout != torch.strided:
            raise ValueError(f"{who}: {what} {number} is sparse; give its to_dense()")
    return listed


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
