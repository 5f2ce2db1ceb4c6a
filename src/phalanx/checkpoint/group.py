"""The ranks that save or load together: an error on one of them is an error on all."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from phalanx import errors
from phalanx.collectives import all_gather_object
from phalanx.core.backend import Backend

T = TypeVar("T")
_TIMEOUT = 600.0  # seconds: disks are slow, and not all are equally slow
_KINDS: Mapping[str, type[errors.DistributedError]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            *(errors.CheckpointDamagedError, errors.CheckpointError, errors.CheckpointIOError),
            *(errors.CheckpointMismatchError, errors.CheckpointNotFoundError, errors.MisuseError),
            *(errors.UnsupportedObjectError, errors.UnsupportedOperationError),
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
                where = f"rank {rank}: " if self.size > 1 else ""
                told = _KINDS.get(kind, errors.CheckpointError)(
                    f"{self.op}: {where}{problem}", rank=self.rank, peer=rank, op=self.op
                )
                if isinstance(told, errors.CheckpointIOError):
                    told.errno = number
                raise told from failure
        return [result for result, *_ in outcomes]

    def on_rank0(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` on rank 0; its result, on every rank. Raises as `on_all` does."""
        return self.on_all(attempt if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]


def _described(error: Exception) -> tuple[str, str, int | None]:
    """The kind of error to raise on all ranks, its text, and its errno."""
    if isinstance(error, errors.DistributedError):
        return type(error).__name__, error.message, getattr(error, "errno", None)
    if isinstance(error, OSError):
        name = errno.errorcode.get(error.errno or 0, "?")
        path = error.filename if error.filename is not None else "a file"
        why = f"{error.strerror or error} ({name}, errno {error.errno or 0})"
        return "CheckpointIOError", f"{path}: {why}", error.errno
    return "CheckpointError", f"{type(error).__name__}: {error}", None
