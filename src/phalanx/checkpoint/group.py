"""The ranks that save or load together: an error on one of them is an error on all."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from phalanx.collectives import all_gather_object
from phalanx.core.backend import Backend
from phalanx.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointIOError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DistributedError,
    MisuseError,
    UnsupportedObjectError,
    UnsupportedOperationError,
)

T = TypeVar("T")
_TIMEOUT = 600.0  # seconds: disks are slow, and not all are equally slow

_KINDS: Mapping[str, type[DistributedError]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            CheckpointDamagedError,
            CheckpointError,
            CheckpointIOError,
            CheckpointMismatchError,
            CheckpointNotFoundError,
            MisuseError,
            UnsupportedObjectError,
            UnsupportedOperationError,
        )
    }
)


class CheckpointGroup:
    """This rank and the others; without a backend it is alone.

    op        what they do, for errors
    timeout   seconds that a rank waits for the others at a time; by default ten minutes, or the
              backend's if that is more
    """

    def __init__(self, backend: Backend | None, op: str, timeout: float | None) -> None:
        self.backend = backend
        self.op = op
        self.rank = backend.rank if backend is not None else 0
        self.size = backend.world_size if backend is not None else 1
        default = max(_TIMEOUT, backend.timeout) if backend is not None else _TIMEOUT
        self.timeout = timeout if timeout is not None else default

    def on_all(self, attempt: Callable[[], T]) -> list[T]:
        """Call `attempt` on every rank; all results, in rank order. Blocks until all have theirs.

        A result is what `all_gather_object` takes. If an Exception is raised on any rank, every
        rank raises an error of that kind, which names the first such rank.
        """
        failure: Exception | None = None
        outcome: tuple[Any, str, str, int | None]  # result, or kind of error, problem and errno
        try:
            outcome = (attempt(), "", "", None)
        except Exception as error:
            failure = error
            outcome = (None, *_described(error))
        outcomes: list[Any] = [outcome]
        if self.backend is not None:
            outcomes = all_gather_object(outcome, self.backend, timeout=self.timeout)
        for rank, (_, kind, problem, number) in enumerate(outcomes):
            if kind:
                raise self.error(kind, problem, rank, number) from failure
        return [result for result, *_ in outcomes]

    def on_rank0(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` on rank 0; its result, on every rank. Raises as `on_all` does."""
        return self.on_all(attempt if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]

    def error(
        self, kind: str, problem: str, culprit: int | None = None, number: int | None = None
    ) -> DistributedError:
        """The error to raise for a problem; of one rank, unless all have it."""
        where = f"rank {culprit}: " if culprit is not None and self.size > 1 else ""
        error = _KINDS.get(kind, CheckpointError)(
            f"{self.op}: {where}{problem}", rank=self.rank, peer=culprit, op=self.op
        )
        if isinstance(error, CheckpointIOError):
            error.errno = number
        return error


def _described(error: Exception) -> tuple[str, str, int | None]:
    """The kind of error to raise on all ranks, its text, and its errno."""
    if isinstance(error, DistributedError):
        return type(error).__name__, error.message, getattr(error, "errno", None)
    if isinstance(error, OSError):
        number = error.errno or 0
        name = errno.errorcode.get(number, "?")
        path = error.filename if error.filename is not None else "a file"
        why = f"{error.strerror or error} ({name}, errno {number})"
        return CheckpointIOError.__name__, f"{path}: {why}", error.errno
    return CheckpointError.__name__, f"{type(error).__name__}: {error}", None
