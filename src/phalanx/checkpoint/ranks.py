"""The ranks that save or load together: what fails on one fails on all, and says where and why."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

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
_PATIENCE = 600.0  # seconds: disks are slow, and not all are equally slow

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


class _Answer(NamedTuple):
    """Of one rank: its result, or what went wrong; `kind` is empty if nothing did."""

    result: Any
    kind: str
    problem: str
    errno: int | None


class Ranks:
    """This rank and the others; without a backend it is by itself.

    op        what they do, for errors
    timeout   seconds that a rank waits for the others at a time; by default ten minutes, or the
              backend's if that is more
    """

    def __init__(self, backend: Backend | None, op: str, timeout: float | None) -> None:
        self.backend = backend
        self.op = op
        self.rank = backend.rank if backend is not None else 0
        self.size = backend.world_size if backend is not None else 1
        longest = max(_PATIENCE, backend.timeout) if backend is not None else _PATIENCE
        self.timeout = timeout if timeout is not None else longest

    def together(self, attempt: Callable[[], T]) -> list[T]:
        """Every rank's result of `attempt`, in rank order; blocks until all ranks have theirs.

        A result is what `all_gather_object` takes. If it raises an Exception on any rank, every
        rank raises: that rank its own, or what stands for it, the others one that names the rank.
        """
        failure: Exception | None = None
        mine: tuple[Any, ...]
        try:
            mine = (attempt(), "", "", None)
        except Exception as error:
            failure = error
            mine = (None, *_described(error))
        answers: list[_Answer] = self._exchange(mine)
        culprit = next((rank for rank, each in enumerate(answers) if each.kind), None)
        if culprit is None:
            return [each.result for each in answers]
        answer = answers[culprit]
        raise self.error(answer.kind, answer.problem, culprit, answer.errno) from failure

    def on_first(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returns on rank 0, on every rank; fails on all if it fails there."""
        return self.together(attempt if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]

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

    def _exchange(self, answer: tuple[Any, ...]) -> list[_Answer]:
        if self.backend is None:
            return [_Answer(*answer)]
        everyone = all_gather_object(answer, self.backend, timeout=self.timeout)
        return [_Answer(*each) for each in everyone]  # type: ignore[misc]


def _described(error: Exception) -> tuple[str, str, int | None]:
    """The error's kind here, its text, and its errno."""
    if isinstance(error, DistributedError):
        return type(error).__name__, error.message, getattr(error, "errno", None)
    if isinstance(error, OSError):
        number = error.errno or 0
        name = errno.errorcode.get(number, "?")
        path = error.filename if error.filename is not None else "a file"
        why = f"{error.strerror or error} ({name}, errno {number})"
        return CheckpointIOError.__name__, f"{path}: {why}", error.errno
    return CheckpointError.__name__, f"{type(error).__name__}: {error}", None
