"""The messages between worker and server.

    worker                                     server
      HELLO  hash of the list of parameters   ->
             <- WELCOME  clock to begin with;  or DIFFERS  bytes of the list that follows, as text
      JOIN   the latest of all servers' clocks ->
      PULL   the last push that must have been applied ->
             <- VALUES  steps of the optimizer; with the parameters
      PUSH   the step, counted from 1; with the gradients ->
             <- DONE    the step, which counts
      SKIP   the step, without gradients       ->
             <- DONE    the step
      BYE                                     ->
             <- DONE

A header and the tensors that belong to it are one message, so that neither comes without the other.
Every request has a number, which its answer repeats: a late one is not taken for another's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import zip_longest
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.compression.compressor import is_finite, listed_tensors
from phalanx.core.backend import Backend
from phalanx.errors import InvalidWorldSizeError, UnsupportedOperationError
from phalanx.parallel.guards import check_ranks_stay
from phalanx.wire.memory import tensor_bytes

HEADERS, TENSORS, TEXT = 0, 1, 2  # tags: headers alone, with tensors, a list of parameters
LONGEST_TEXT = 64 << 20  # bytes of a list of parameters, as text


class MessageKind(IntEnum):
    """The kinds of messages, as above."""

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


class MessageHeader(NamedTuple):
    """The beginning of a message.

    request   its number; of an answer, the number of the request
    number    its hash, clock, push, step or length, as above
    """

    kind: MessageKind
    request: int
    number: int = 0

    def write(self, message: Tensor) -> None:
        """Write it at the beginning of a message."""
        _FORMAT.pack_into(tensor_bytes(message), 0, *self)

    @staticmethod
    def read(message: Tensor) -> MessageHeader:
        """Return the header of a message. ValueError if it has none."""
        kind, request, number = _FORMAT.unpack_from(tensor_bytes(message))
        return MessageHeader(MessageKind(kind), request, number)

    def message(self) -> Tensor:
        """Return a message of this header alone."""
        message = torch.zeros(HEADER_SIZE, dtype=torch.uint8)
        self.write(message)
        return message


_FORMAT = struct.Struct("<QQQ8x")  # tensors behind it are aligned
HEADER_SIZE = _FORMAT.size


# ------------------------------------------------------------------------------
# Shards: the parameters of each server, and their places in a message.
#
#     parameters   0        1    2      3          largest first, each to the server that has least
#     server 0     0 ------------2-----
#     server 1              1 -------- 3 --------
#
# Whole tensors, so that every optimizer works. In a message those of wide elements come first, and
# so nothing has to be padded:
#
#     header | float64 ... | float32 ... | bfloat16 ...


def numbers_by_server(params: Sequence[Tensor], servers: int) -> list[list[int]]:
    """Return the numbers of each server's parameters, ascending; balanced by bytes.

    A server may have none. The same on every rank that has tensors alike.
    """
    shares: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for number in sorted(range(len(params)), key=lambda number: -params[number].nbytes):
        place = loads.index(min(loads))
        shares[place].append(number)
        loads[place] += params[number].nbytes
    return [sorted(share) for share in shares]


class ShardMessage:
    """Memory for a message: a header, and tensors of given shapes and dtypes behind it.

    data      the whole, which is sent without a copy
    tensors   their places in it
    """

    def __init__(self, like: Sequence[Tensor], backend: Backend) -> None:
        places, size = [0] * len(like), HEADER_SIZE
        for number in sorted(range(len(like)), key=lambda n: -like[n].dtype.itemsize):
            places[number] = size
            size += like[number].nbytes
        self.data = backend.empty(size, dtype=torch.uint8)
        self.tensors = [
            self.data[place : place + one.nbytes].view(one.dtype).view(one.shape)
            for one, place in zip(like, places, strict=True)
        ]


class ParameterList:
    """A list of parameters, on which worker and server have to agree, line by line.

    text     the lines as bytes
    digest   their hash, of 64 bits
    """

    def __init__(self, params: Sequence[Tensor], servers: Sequence[int]) -> None:
        self._lines = [
            f"servers {', '.join(map(str, servers))}",
            *(f"parameter {number} ({described(param)})" for number, param in enumerate(params)),
        ]
        self.text = msgspec.json.encode(self._lines)
        self.digest = xxh3_64_intdigest(self.text)

    def first_difference(self, text: bytes) -> tuple[str, str]:
        """Return the first lines in which this list and another one, given as text, differ."""
        theirs = msgspec.json.decode(text, type=list[str])
        for here, there in zip_longest(self._lines, theirs, fillvalue="no more parameters"):
            if here != there:
                return here, there
        raise AssertionError("the hashes of equal descriptions differ")


def described(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def not_finite(tensors: Iterable[Tensor]) -> tuple[int, object] | None:
    """Return the place of the first tensor with a value that is not finite, and that value."""
    for place, tensor in enumerate(tensors):
        if not is_finite(tensor):
            return place, tensor[~tensor.isfinite()][0].item()
    return None


def checked_params(params: Iterable[Tensor], who: str) -> list[Tensor]:
    """Return the parameters as a list. TypeError if it is no list of tensors;
    `UnsupportedOperationError` for integers, which no optimizer can change.
    """
    listed = listed_tensors(params, who, what="parameter", advice="")
    for number, param in enumerate(listed):
        if not (param.is_floating_point() or param.is_complex()):
            raise UnsupportedOperationError(
                f"{who}: parameter {number} ({described(param)}) has no gradient: leave out "
                "tensors of whole numbers"
            )
    return listed


# ------------------------------------------------------------------------------
# The ranks that are servers and workers, and their pairs.
#
#     ranks      0   1   2   3           pairs   (0, 2)  (0, 3)  (1, 2)  (1, 3)
#     servers    0   1
#     workers            2   3
#
# Each pair is a group of its own, so that it breaks alone: a lost rank breaks the groups that it is
# in. Both make it; that sends nothing, and does not need the others of the backend's group there.


def checked_servers(servers: Sequence[int], backend: Backend, who: str) -> tuple[int, ...]:
    """Return the servers, in their order. InvalidRankError for one that is no rank; ValueError for
    duplicates; `InvalidWorldSizeError` for none.
    """
    check_ranks_stay(who, backend, "servers and workers are those that it began with")
    listed = tuple(backend.check_rank(server, "server") for server in servers)
    if not listed:
        raise InvalidWorldSizeError(f"{who} needs at least one server", rank=backend.rank)
    if len(set(listed)) < len(listed):
        raise ValueError(f"{who}: servers={listed} names a rank twice")
    return listed


def local_rank(backend: Backend, rank: int) -> int | None:
    """Return the backend's number for a rank of the job; None if it is no member."""
    return backend.ranks.index(rank) if rank in backend.ranks else None
