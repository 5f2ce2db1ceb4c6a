"""What a rank has done last: for errors, for comparison with other ranks, and for traces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from phalanx.backends.engine.caller import Site
from phalanx.backends.engine.describe import describe

if TYPE_CHECKING:
    from phalanx.backends.engine.operation import Operation

SHOWN = 8  # operations in an error's note


class Record(NamedTuple):
    """An operation that has ended. It keeps no tensor alive."""

    name: str
    sequence: int
    signature: str
    suffix: str
    site: Site
    fingerprint: int
    started: float
    ended: float
    failed: bool

    @classmethod
    def of(cls, operation: Operation, now: float) -> Record:
        """What is to be kept of an operation that has just ended."""
        return cls(
            operation.name,
            operation.sequence,
            operation.signature,
            operation.group.suffix,
            operation.site,
            operation.fingerprint,
            operation.started,
            now,
            operation.error is not None,
        )

    def describe(self) -> str:
        """As `Operation.describe`."""
        return describe(self.name, self.sequence, self.signature, self.suffix, self.site)


class History:
    """The last operations of one rank, of all its groups, in the order in which they ended."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._records: deque[Record] = deque(maxlen=SHOWN)

    def add(self, record: Record) -> None:
        """An operation has ended."""
        self._records.append(record)

    def note_on(self, error: BaseException) -> None:
        """Add a note to an error, once, that lists the last operations (Python 3.11 shows it)."""
        if self._records and hasattr(error, "add_note") and not hasattr(error, "__notes__"):
            error.add_note("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        yield f"the last operations of rank {self._rank}, which ended in this order:"
        for record in self._records:
            how = "failed after" if record.failed else "took"
            yield f"  {record.describe()} {how} {_duration(record.ended - record.started)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
