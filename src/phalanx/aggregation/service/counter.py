"""One server's counter, on the worker's side: the messages of one pair, and memory for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.aggregation.service.shards import Layout
from phalanx.aggregation.service.words import TENSORS, TEXT, WORDS, Kind, Word, empty_message
from phalanx.backends.engine import Operation
from phalanx.backends.sub import SubBackend


class Counter:
    """What a worker gives to one server, and gets of it.

    server    its rank
    numbers   which parameters it has

    Memory for two messages with tensors, each as large as this server's parameters.
    """

    def __init__(
        self, pair: SubBackend, server: int, numbers: list[int], params: Sequence[Tensor]
    ) -> None:
        self.pair = pair
        self.server = server
        self.numbers = numbers
        self._peer = 1 - pair.rank
        self._layout = Layout([params[number] for number in numbers])
        self._given = self._layout.memory(pair)
        self._values = self._layout.memory(pair)
        self._word = empty_message()

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Copy this server's gradients into the message for them."""
        for view, number in zip(self._layout.views(self._given), self.numbers, strict=True):
            view.copy_(gradients[number].detach())

    def copy_to(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters that have come last to where they belong."""
        for view, number in zip(self._layout.views(self._values), self.numbers, strict=True):
            params[number].copy_(view)

    def say(self, word: Word) -> Operation:
        """Begin to send a word; a PUSH with the gradients."""
        if word.kind is Kind.PUSH:
            word.write(self._given)
            return self._send(self._given, TENSORS)
        return self._send(word.message(), WORDS)

    def expect(self, tag: int) -> tuple[Operation, Tensor]:
        """Begin to receive an answer, with parameters or without; where it will be."""
        return self._receive(self._values if tag == TENSORS else self._word, tag)

    def expect_text(self, size: int) -> tuple[Operation, Tensor]:
        """Begin to receive a text of so many bytes."""
        return self._receive(torch.empty(size, dtype=torch.uint8), TEXT)

    # Who waits for any of them has a deadline; they have none of their own.

    def _send(self, message: Tensor, tag: int) -> Operation:
        return self.pair.start_send(message, self._peer, tag=tag, timeout=math.inf)

    def _receive(self, into: Tensor, tag: int) -> tuple[Operation, Tensor]:
        operation, _ = self.pair.start_recv(into, self._peer, tag=tag, timeout=math.inf)
        return operation, into
