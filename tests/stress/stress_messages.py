"""The messages of a random program: how one rank sends and receives them, and compares them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
from stress_program import Op
from stress_values import Memory, WrongResultError, difference, laid_out, numbers, same
from torch import Tensor

from phalanx import Backend, CollectiveTimeoutError, irecv, isend

T = TypeVar("T")
Finish = Callable[[], None]

IMPATIENCE = 0.002  # seconds that an impatient call waits,
ATTEMPTS = 30  # and how often, before it waits like the others


class Messages:
    """One rank's messages. Calls begin one, and return what is to be done when it is waited for."""

    def __init__(self) -> None:
        self._here: defaultdict[int, dict[int, tuple[int, Tensor]]] = defaultdict(dict)

    def _content(self, op: Op, src: int, order: int, shape: tuple[int, ...]) -> Tensor:
        """Of the messages of this rank of the group, the one that it sends at that place."""
        return numbers(op, src, shape, salt=order).to(op.dtype)

    def send(self, op: Op, backend: Backend, index: int, waits: bool) -> Finish:
        """Send message `index`; its memory is overwritten when it is sent."""
        message = op.messages[index]
        order = sum(earlier.src == message.src for earlier in op.messages[:index])
        memory = laid_out(self._content(op, message.src, order, message.shape), op.layout)
        if waits:
            self._insist(
                message.patient,
                lambda seconds: backend.send(memory.tensor, op.root, tag=op.tag, timeout=seconds),
            )
            return lambda: _overwrite(memory)
        pending = isend(memory.tensor, backend, op.root, tag=op.tag)

        def finish() -> None:
            pending.wait()
            _overwrite(memory)

        return finish

    def receive(self, op: Op, backend: Backend, index: int, waits: bool) -> Finish:
        """Receive message `index`, into memory around which nothing may change."""
        receive = op.receives[index]
        memory = laid_out(torch.ones(receive.shape, dtype=op.dtype), op.layout)
        if waits:
            sender = self._insist(
                receive.patient,
                lambda seconds: backend.recv(
                    memory.tensor, receive.src, tag=op.tag, timeout=seconds
                ),
            )
            return lambda: self._received(op, backend.world_size, index, sender, memory)
        pending = irecv(memory.tensor, backend, receive.src, tag=op.tag)
        return lambda: self._received(op, backend.world_size, index, pending.wait(), memory)

    def _insist(self, patient: bool, call: Callable[[float | None], T]) -> T:
        """Call it; impatiently, as often as its timeout passes: nothing is lost or left by that."""
        for _ in range(0 if patient else ATTEMPTS):
            with suppress(CollectiveTimeoutError):
                return call(IMPATIENCE)
        return call(None)

    def _received(self, op: Op, size: int, index: int, sender: int, memory: Memory) -> None:
        """Compare a message; those from anyone when all are here, for they come in any order."""
        memory.check_around(op)
        asked = op.receives[index].src
        if asked is not None and sender != asked:
            raise WrongResultError(f"{op}: receive {index} came from {sender}, not {asked}")
        here = self._here[op.number]
        here[index] = (sender, memory.tensor)
        if len(here) < len(op.receives):
            return
        del self._here[op.number]
        count = dict.fromkeys(range(size), 0)
        for place, (src, got) in sorted(here.items()):
            expected = self._content(op, src, count[src], tuple(got.shape))
            count[src] += 1
            if not same(got, expected):
                raise WrongResultError(
                    f"{op}: receive {place}, from {src}: {difference(got, expected)}"
                )
        sent = [sum(message.src == src for message in op.messages) for src in count]
        if list(count.values()) != sent:
            raise WrongResultError(f"{op}: {sent} messages were sent by each rank, came {count}")


def _overwrite(memory: Memory) -> None:
    """What is sent is sent: the memory is the caller's again."""
    memory.tensor.zero_()
