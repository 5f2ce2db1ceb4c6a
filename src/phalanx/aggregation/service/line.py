"""One worker's messages, on the server's side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from phalanx.aggregation.service.shards import Layout
from phalanx.aggregation.service.words import TENSORS, TEXT, WORDS, Kind, Word, empty_message
from phalanx.backends.base import Backend
from phalanx.backends.engine import Operation
from phalanx.backends.sub import SubBackend
from phalanx.errors import DistributedError

Write = Callable[[list[Tensor]], None]


class Line:
    """The messages of one pair of server and worker, which breaks alone.

    error   why it cannot go on, which `poll` has not raised yet; nothing else here raises

    A word is always expected; tensors, while there is memory for them: `free` says that the last
    push is not needed any more. Memory for tensors is taken when the worker comes, twice the
    server's parameters.
    """

    def __init__(self, pair: SubBackend, layout: Layout) -> None:
        self.pair = pair
        self.error: DistributedError | None = None
        self._layout = layout
        self._peer = 1 - pair.rank
        self._word = empty_message()
        self._receives: dict[Operation, Tensor] = {}  # and what each fills
        self._sends: set[Operation] = set()
        self._pushed: Tensor | None = None
        self._values: Tensor | None = None
        self._values_sent: Operation | None = None
        self._put_off: tuple[Word, Write] | None = None
        self._is_expecting = True
        self._expect(self._word, WORDS)

    def pending(self) -> list[Operation]:
        """What is under way, any of which may be waited for."""
        return [*self._receives, *self._sends]

    def poll(self) -> Iterator[Word]:
        """The words that have come since; then the error that ends the line, if there is one."""
        for operation in [each for each in self._receives if each.done]:
            message = self._receives.pop(operation, None)
            if message is None:  # it was given up meanwhile
                continue
            self.pair.wait(operation)
            word = Word.read(message)
            if word.kind is Kind.HELLO and self._pushed is None:
                self._values = self._layout.memory(self.pair)
                self._pushed = self._layout.memory(self.pair)
                self.free()
            yield word
            if message is self._word and self._is_expecting:
                self._expect(self._word, WORDS)
        for operation in [each for each in self._sends if each.done]:
            self._sends.remove(operation)
            self.pair.wait(operation)
        if self._put_off is not None:
            self.say_values(*self._put_off)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def pushed(self) -> list[Tensor]:
        """The gradients that have come last."""
        assert self._pushed is not None
        return self._layout.views(self._pushed)

    def free(self) -> None:
        """What was pushed is not needed any more: expect the next."""
        if self._is_expecting:
            assert self._pushed is not None
            self._expect(self._pushed, TENSORS)

    def say(self, word: Word, text: bytes = b"") -> None:
        """Send a word, and the text that follows it, if there is any."""
        self._send(word.message(), WORDS)
        if text:
            self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), TEXT)

    def say_values(self, word: Word, write: Write) -> None:
        """Send a word and the parameters, which `write` copies into views of the message.

        Later, if the last ones are still on their way to a worker that has asked again.
        """
        if self._values_sent is not None and not self._values_sent.done:
            self._put_off = word, write
            return
        assert self._values is not None
        self._put_off = None
        word.write(self._values)
        write(self._layout.views(self._values))
        self._values_sent = self._send(self._values, TENSORS)

    def end(self, *, lost: bool = False) -> None:
        """Expect nothing more of this worker; `lost`: nor that it takes what was sent."""
        self._is_expecting = False
        for operation in [*self._receives, *(self._sends if lost else ())]:
            self.pair.give_up(operation, "the worker is gone")
        self._receives.clear()
        self._put_off = self.error = None
        if lost:
            self._sends.clear()

    def why(self, error: Exception) -> str:
        """Why the line has ended, without the words of the message that noticed it."""
        failure = self.pair.group.failure
        return failure.reason if failure is not None else str(error)

    def culprit(self, backend: Backend, worker: int) -> int:
        """Whose fault that is, as a rank of the backend: the worker's, or of whom it says so."""
        failure = self.pair.group.failure
        named = None if failure is None else backend.group.to_local.get(failure.culprit)
        return worker if named is None or named == backend.rank else named

    def _expect(self, into: Tensor, tag: int) -> None:
        try:
            operation, _ = self.pair.start_recv(into, self._peer, tag=tag, timeout=math.inf)
        except DistributedError as error:
            self.error = error
        else:
            self._receives[operation] = into

    def _send(self, message: Tensor, tag: int) -> Operation | None:
        try:
            operation = self.pair.start_send(message, self._peer, tag=tag, timeout=math.inf)
        except DistributedError as error:
            self.error = error
            return None
        self._sends.add(operation)
        return operation
