"""One operation of one peer on this rank's memory, ready to be repeated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from phalanx.bench.operations import Operation

__all__ = ["Exchange", "Fresh"]


class Exchange:
    """What is timed: `call()` as often as wanted, then `finish()`.

    operation   what it does; says what is given and gotten
    source      what this rank gives; written before calls
    out         what it gets; looked at after calls. The same memory in place; None where it is
                not known before the first call
    call        does it once. Blocks as the library's own call does
    finish      waits until the last call has arrived, for calls that return before. Timed
    """

    def __init__(
        self,
        operation: Operation,
        source: Tensor | None,
        out: Tensor | None,
        call: Callable[[], object],
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.operation = operation
        self.source = source
        self.out = out
        self.call = call
        self.finish = finish

    @property
    def in_place(self) -> bool:
        """Whether calls overwrite what they are given."""
        return self.source is self.out

    def load(self) -> None:
        """Take over `source`, where the library wants it in memory of its own. Not timed."""

    def store(self) -> None:
        """Bring the result to `out`. Not timed."""

    def count_wrong(self, calls: int) -> int:
        """How many elements are wrong after so many calls, besides those of `out`. Not timed."""
        return 0


class Fresh(Exchange):
    """A call that returns its result in new memory; it is kept until the next call has one."""

    def __init__(
        self, operation: Operation, source: Tensor, make: Callable[[], Tensor | None]
    ) -> None:
        super().__init__(operation, source, None, self._keep)
        self._make = make

    def _keep(self) -> None:
        self.out = self._make()
