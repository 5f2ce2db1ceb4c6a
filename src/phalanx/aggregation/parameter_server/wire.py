"""Words: what worker and server say to each other besides tensors.

    worker                                     server
      HELLO  a hash of the list of parameters ->
             <- WELCOME the clock to begin with;  or DIFFERS, and then its list, as text
      JOIN   the latest of all servers' clocks ->
      PULL   after which push                 ->
             <- VALUES and the parameters
      PUSH   its number, and the gradients    ->
             <- DONE    it counts
      SKIP   its number: a step of nothing    ->
             <- DONE
      BYE                                     ->
             <- DONE

A word and the tensors that belong to it are one message, so that neither comes without the other.
Every request has a number, which its answer repeats: one that comes too late is not taken for
another's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.core.backend import Backend, SubBackend
from phalanx.errors import InvalidWorldSizeError, MisuseError, UnsupportedOperationError
from phalanx.wire.memory import tensor_bytes

WORDS, TENSORS, TEXT = 0, 1, 2  # tags: words alone, words with tensors, a list of parameters
LONGEST_TEXT = 64 << 20  # bytes of a list of parameters, in words


class Kind(IntEnum):
    """What a word says."""

    HELLO = 1
    JOIN = 2
    PULL = 3
    PUSH = 4
    SKIP = 5
    BYE = 6
    WELCOME = 7
    DIFFERS = 8
    VALUES = 9
    DONE = 10


class Word(NamedTuple):
    """One of them.

    request   its number; of an answer, that of what is answered
    number    of HELLO the hash; of JOIN the clock to begin with; of PUSH and SKIP the step, counted
              from 1; of PULL the last push that must have been applied; of WELCOME the clock; of
              VALUES the steps of the optimizer; of DIFFERS the bytes of the text that follows
    """

    kind: Kind
    request: int
    number: int = 0

    def write(self, message: Tensor) -> None:
        """Put it at the beginning of a message."""
        _FORM.pack_into(tensor_bytes(message), 0, *self)

    @staticmethod
    def read(message: Tensor) -> Word:
        """The word at the beginning of a message. ValueError for what is none."""
        kind, request, number = _FORM.unpack_from(tensor_bytes(message))
        return Word(Kind(kind), request, number)

    def message(self) -> Tensor:
        """A message of nothing else."""
        message = torch.zeros(SIZE, dtype=torch.uint8)
        self.write(message)
        return message


_FORM = struct.Struct("<QQQ8x")  # tensors behind it are aligned
SIZE = _FORM.size


def empty_message() -> Tensor:
    """Memory for a word."""
    return torch.empty(SIZE, dtype=torch.uint8)


# ------------------------------------------------------------------------------
# Shards: which server has which parameters, and where they lie in a message.
#
#     parameters   0        1    2      3          largest first, each to the server that has least
#     server 0     0 ------------2-----
#     server 1              1 -------- 3 --------
#
# Whole tensors, so that every optimizer works. In a message those of wide elements come first, and
# so nothing has to be padded:
#
#     word | float64 ... | float32 ... | bfloat16 ...


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


# ------------------------------------------------------------------------------
# Which ranks are servers and workers, and the pairs that they talk in.
#
#     ranks      0   1   2   3           pairs   (0, 2)  (0, 3)  (1, 2)  (1, 3)
#     servers    0   1
#     workers            2   3
#
# Each pair is a group of its own, so that it breaks alone: who is lost breaks the groups that it is
# in. Making one sends nothing, and does not need the others of the backend's group to be there.


def checked_servers(servers: Sequence[int], backend: Backend, who: str) -> tuple[int, ...]:
    """The servers, in their order. InvalidRankError for one that is no rank; ValueError for twice
    the same; `InvalidWorldSizeError` for none.
    """
    listed = tuple(servers)
    if not listed:
        raise InvalidWorldSizeError(f"{who} needs at least one server", rank=backend.rank)
    for server in listed:
        backend.check_rank(server, "server")
    if len(set(listed)) < len(listed):
        raise ValueError(f"{who}: servers={listed} names a rank twice")
    return listed


def checked_workers(
    workers: Sequence[int] | None, servers: tuple[int, ...], backend: Backend, who: str
) -> tuple[int, ...]:
    """The workers, ascending: by default every rank that is no server."""
    if backend.rank not in servers:
        raise MisuseError(
            f"rank {backend.rank} calls {who} and is none of servers={servers}: workers call "
            "ParameterServer.connect",
            rank=backend.rank,
        )
    if workers is None:
        return tuple(rank for rank in range(backend.world_size) if rank not in servers)
    for worker in workers:
        backend.check_rank(worker, "worker")
        if worker in servers:
            raise ValueError(f"{who}: rank {worker} cannot be a server and a worker")
    return tuple(sorted(set(workers)))


def pair_of(backend: Backend, peer: int) -> SubBackend:
    """The group of this rank and another one. Both make it; no bytes are sent."""
    return backend.subgroup((backend.rank, peer))


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 2, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------
# The parameters that one server has, and their optimizer.

OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]


class Holding:
    """One server's parameters: the caller's tensors, changed in place.

    optimizer   made by `make` for exactly these; None where there are none
    """

    def __init__(self, params: list[Tensor], make: OptimizerFactory) -> None:
        self.params = params
        self.optimizer = make(params) if params else None

    def step(self, pushed: Sequence[list[Tensor]]) -> None:
        """One step of the optimizer along the mean of some workers' gradients.

        These are used as memory. Sums are in the order given; of float16 and bfloat16, in float32.
        """
        if self.optimizer is None:
            return
        means = [_mean(gradients) for gradients in zip(*pushed, strict=True)]
        for param, mean in zip(self.params, means, strict=True):
            param.grad = mean.to(param.device)
        self.optimizer.step()
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def copy_to(self, views: Sequence[Tensor]) -> None:
        """Write the parameters into a message."""
        for view, param in zip(views, self.params, strict=True):
            view.copy_(param)


def _mean(gradients: tuple[Tensor, ...]) -> Tensor:
    first, *others = gradients
    if not others:
        return first
    if first.dtype.itemsize <= 2:
        wide = first.float()
        for other in others:
            wide += other
        return (wide / len(gradients)).to(first.dtype)
    for other in others:
        first += other
    return first.div_(len(gradients))
