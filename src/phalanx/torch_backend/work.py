"""Work and futures: the handles of torch's callers on a call that is under way.

    ProcessGroupWork   torch's `Work` over ours
    WorkFuture         torch's `Future` of it, for Python code

**Futures.** The value is always a list of tensors: DDP's C++ code reads it without a check of its
type. So an error reaches C++ by way of a `then` that raises. FP16_COMPRESS, a hook of DDP's in C++,
wants a C++ list. Only a complete future can hold one: so `get_future` waits for float16.

**Order.** A callback that a DDP hook puts on a future (`then`) may issue collectives, as PowerSGD's
does. These need one order on all ranks. So inside a backward pass or a callback, Python code gets a
complete future: its collective is waited for first. DDP's own reduction, in C++, puts no callbacks
on its futures. It stays asynchronous: the thread of the backward pass waits for it at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future
from typing_extensions import override

from phalanx.core.work import AnyOf
from phalanx.errors import DistributedError
from phalanx.torch_backend.errors import as_torch
from phalanx.torch_internals import backward_number, future_in_cpp, is_called_by_engine, untraced

if TYPE_CHECKING:
    from phalanx.core.work import Work

T = TypeVar("T")
UNSET = timedelta(0)


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return a timeout of torch's in seconds; None if it is not set: -1 ms, 0 or None."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


@untraced
class ProcessGroupWork(c10d.Work):
    """A call on a process group, which may still be under way.

    tensors   its results
    work      ours, while it is under way; None when it is done
    at_end    called once with this if its future is wanted in a backward pass while it is under
              way, or it has failed
    error     the error of a work that never began
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        work: Work[Any] | None = None,
        at_end: Callable[[ProcessGroupWork], None] | None = None,
        error: DistributedError | None = None,
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._work = work
        self._at_end = at_end
        self._error = error
        self._sender = -1
        self._future: Any = None

    def wait(self, timeout: timedelta | None = UNSET) -> bool:
        """Block until it is done. Raises its error.

        When `timeout` passes, this raises `CollectiveTimeoutError`, and the work goes on.
        """
        work = self._work
        if work is not None:
            seconds = None if timeout is UNSET else seconds_of(timeout)
            if seconds is not None and not work.over:
                try:
                    BoundedWait(work, seconds).wait()
                except DistributedError as error:
                    raise as_torch(error) from None
            try:
                result = work.wait()
            except DistributedError as error:
                self._error = as_torch(error)
            else:
                self._sender = result if type(result) is int else -1
            self._work = None
        if self._error is not None:
            raise self._error.again() from None
        return True

    def synchronize(self) -> None:
        """Block until it is done."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._work is None or self._work.done()

    def exception(self) -> DistributedError | None:
        """Return the error with which it ended, or None, also while it is under way."""
        if self._work is not None and self._work.done():
            self.take_outcome()
        return self._error

    def is_success(self) -> bool:
        """Return whether it is done, without an error."""
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Tensor]:
        """Wait, and return its tensors."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """Wait for a receive, and return the sender's rank in the group."""
        self.wait()
        return self._sender

    _source_rank = source_rank

    def take_outcome(self) -> None:
        """Take the outcome; blocks only if it is under way."""
        with suppress(DistributedError):  # it is kept
            self.wait()

    def go_on(self) -> None:
        """Let it move on from now without a `wait`: there are waiters for its future only."""
        if self._work is not None:
            self._work.go_on()

    # Futures --------------------------------------------------------------------------------

    def get_future(self) -> Any:
        """Return the future of its list of tensors; always the same one."""
        if self._future is None:
            self._future = self._make_future()
        return self._future

    def _make_future(self) -> Any:
        in_backward = backward_number() >= 0
        for_cpp = in_backward and is_called_by_engine(1)
        if for_cpp:
            waits = any(tensor.dtype is torch.float16 for tensor in self._tensors)
        else:
            waits = in_backward or _callbacks.running
        if waits:
            self.take_outcome()
        work, failed = self._work, self._error is not None
        if in_backward and self._at_end is not None and (work is not None or failed):
            self._at_end(self)
        if not for_cpp:
            future = WorkFuture(self)
            if work is None:
                future.complete()
            else:
                work.on_done(lambda _: future.complete())
            return future
        if work is None and not failed:
            return future_in_cpp(lambda: list(self._tensors))
        base: Any = Future()
        future = base.then(self._value)  # which raises as it should in C++
        if work is None:
            base.set_result([])
        else:
            work.on_done(lambda _: base.set_result([]))
        return future

    def _value(self, _: object) -> list[Tensor]:
        self.wait()
        return list(self._tensors)

    get_future_result = get_future


class BoundedWait(AnyOf):
    """A wait for a work that may end before that does."""

    def __init__(self, work: Work[Any], timeout: float) -> None:
        super().__init__(work.group, [work], timeout)
        self.name = work.name
        self.sequence = work.sequence

    @override
    def describe(self) -> str:
        return self.works[0].describe()


@untraced
class TogetherWork(ProcessGroupWork):
    """Several works as one: done when all are. `_end_coalescing` returns one."""

    def __init__(self, works: Sequence[ProcessGroupWork]) -> None:
        super().__init__([tensor for work in works for tensor in work._tensors])
        self._works = works

    def wait(self, timeout: timedelta | None = UNSET) -> bool:
        """Block until all are done. Raises the error of the first that fails."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> DistributedError | None:
        """Return the error of the first that failed, or None."""
        return next((e for work in self._works if (e := work.exception())), None)

    def get_future(self) -> Any:
        """Return a future of all their tensors; they are waited for first."""
        self.wait()
        return super().get_future()


class _Callbacks(threading.local):
    """A flag of each thread: it is running a callback of a future."""

    running = False


_callbacks = _Callbacks()


@untraced
class WorkFuture(Future[list[Tensor]]):
    """The future of a work, for Python code: a wait for it moves the work on."""

    def __init__(self, work: ProcessGroupWork) -> None:
        super().__init__()
        self._owner = work
        self._once = threading.Lock()

    def complete(self) -> None:
        """Set the outcome, if it is not set, and run the callbacks. The work is over."""
        self._owner.take_outcome()  # which may run callbacks, and these may wait for this future
        if not self._once.acquire(blocking=False):
            return
        outer, _callbacks.running = _callbacks.running, True
        try:
            if self._owner._error is not None:
                self._set_unwrap_func(self._raise)
            self.set_result(list(self._owner._tensors))
        finally:
            _callbacks.running = outer

    def _raise(self, _: object) -> None:
        self._owner.wait()

    def wait(self) -> list[Tensor]:
        """Block until the work is done; return its tensors."""
        self._owner.take_outcome()
        self.complete()
        return super().wait()

    def then(self, callback: Callable[[Future[list[Tensor]]], Any]) -> Any:
        """Return a future of the result of `callback(self)`, called when the work is done."""
        self._owner.go_on()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Future[list[Tensor]]], None]) -> None:
        """Call `callback(self)` when the work is done."""
        self._owner.go_on()
        super().add_done_callback(callback)
