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
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.backends.memory import tensor_bytes

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
