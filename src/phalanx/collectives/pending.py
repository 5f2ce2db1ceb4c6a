"""`PendingCollective`: a collective that is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from phalanx.backends.base import Backend
    from phalanx.backends.engine.operation import Operation

T = TypeVar("T")
U = TypeVar("U")


class PendingCollective(Generic[T]):
    """What an asynchronous collective returns at once.

    The tensors that were given to it must not be written before it is done; one that is worked on
    in place, or that is received into, must not be read either. Any number may be outstanding on
    one backend; collectives of one group run in the order in which they were issued. A
    `PendingCollective` need not be waited for, but its error is then seen only by the next call.
    """

    def __init__(self, backend: Backend, operation: Operation, result: Callable[[], T]) -> None:
        self._backend = backend
        self._operation = operation
        self._finish: Callable[[], T] | None = result
        self._result: T | None = None

    @property
    def op_name(self) -> str:
        """Which collective it is, such as `all_reduce`."""
        return self._operation.name

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once. Moves what can be moved meanwhile."""
        if not self._operation.done:
            self._backend.engine.look_at(self._operation)
        return self._operation.done

    def wait(self, timeout: float | None = None) -> T:
        """Block until the collective is done and return its result; again, the same object.

        Raises the collective's error, each time it is called. `timeout` is in seconds from now, and
        replaces the one that the collective was issued with; when it passes, the collective fails.
        """
        self._backend.wait(self._operation, timeout=timeout)
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # type: ignore[return-value]

    def giving(self, result: Callable[[], U]) -> PendingCollective[U]:
        """The same collective, whose result is what `result` returns once it is done."""
        return PendingCollective(self._backend, self._operation, result)
