"""An errand: the same words to all servers, and what each answers.

         server 0   - PUSH ->   <- DONE
worker   server 1   - PUSH -------->     <- DONE      it goes on when all have answered
         server 2   - PUSH ->       <- DONE
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from torch import Tensor

from phalanx.aggregation.service.counter import Counter
from phalanx.aggregation.service.words import LONGEST_TEXT, TENSORS, TEXT, WORDS, Kind, Word
from phalanx.backends.base import Backend
from phalanx.backends.engine import Operation
from phalanx.backends.memory import tensor_bytes
from phalanx.errors import SizeMismatchError

SHORTEST = 1e-3  # seconds that are left at least


class Part(NamedTuple):
    """A message under way: of a receive, which request it answers, and where it will be."""

    counter: Counter
    request: int = -1
    into: Tensor | None = None
    tag: int = WORDS


class Errand:
    """Some words to each server. In the end:

    answers   by server, the last answer without tensors
    texts     by server, the text that followed it, if there was one
    """

    def __init__(
        self, backend: Backend, counters: Sequence[Counter], words: Sequence[Word], seconds: float
    ) -> None:
        self.answers: dict[int, Word] = {}
        self.texts: dict[int, bytes] = {}
        self._backend = backend
        self._counters = counters
        self._words = words
        self._deadline = monotonic() + seconds
        self._under_way: dict[Operation, Part] = {}

    def run(self) -> None:
        """Blocks until all have answered. On an error nothing of it is under way any more."""
        try:
            for counter in self._counters:
                for word in self._words:
                    if word.kind is not Kind.JOIN:  # which nobody answers
                        tag = TENSORS if word.kind is Kind.PULL else WORDS
                        self._expect(counter, word.request, tag)
                    self._under_way[counter.say(word)] = Part(counter)
            while self._under_way:
                left = max(self._deadline - monotonic(), SHORTEST)
                self._backend.wait_any([*self._under_way], timeout=left)
                for operation in [each for each in self._under_way if each.done]:
                    self._take(operation)
        finally:
            for operation, part in self._under_way.items():
                part.counter.pair.give_up(operation, "another message of this call failed")

    def _expect(self, counter: Counter, request: int, tag: int) -> None:
        operation, into = counter.expect(tag)
        self._under_way[operation] = Part(counter, request, into, tag)

    def _take(self, operation: Operation) -> None:
        counter, request, into, tag = self._under_way.pop(operation)
        counter.pair.wait(operation)
        if into is None:
            return
        if tag == TEXT:
            self.texts[counter.server] = bytes(tensor_bytes(into))
            return
        word = Word.read(into)
        if word.request != request:  # of a call that did not wait for it
            self._expect(counter, request, tag)
            return
        if tag == WORDS:
            self.answers[counter.server] = word
        if word.kind is Kind.DIFFERS:
            self._expect_text(counter, word.number)

    def _expect_text(self, counter: Counter, size: int) -> None:
        if size > LONGEST_TEXT:
            raise SizeMismatchError(
                f"rank {self._backend.rank}: server rank {counter.server} announces a list of "
                f"parameters of {size} bytes, and {LONGEST_TEXT} are taken at most",
                rank=self._backend.rank,
                peer=counter.server,
            )
        operation, into = counter.expect_text(size)
        self._under_way[operation] = Part(counter, into=into, tag=TEXT)
