"""A notice to leave: one rank is told that its machine goes away, and all ranks stop at one step.

    with phalanx.Notice(backend) as notice:
        for step in range(first, steps):
            train(step)
            if notice.given():
                save_checkpoint(...)
                break
    sys.exit(notice.exit_code)  # 75 after a notice, "start me again"; else 0

              step 7        step 8        step 9
    rank 0    .... given()  .... given()  .... given() -> True, save
    rank 1    ..!. given()  .... given()  .... given() -> True, save
              SIGTERM    \\_____ exchange ____/

An *exchange* is an `async_all_reduce_` of 16 bytes on a group of the notice's own. It begins in one
call of `given()` and is read in the next one, when it is long over, so that no rank waits for it.
All ranks read the same result in the same call.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterable
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.collectives import PendingCollective, ReduceOp, async_all_reduce_
from phalanx.core.backend import Backend, SubBackend
from phalanx.errors import MisuseError
from phalanx.parallel.guards import check_ranks_stay

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("phalanx")

ECHO = 1.0  # seconds in which further signals are the same notice: a launcher passes on what an
# engine has sent to every process
MOST_CALLS = 16  # between two exchanges: steps may become slower at once


class Notice:
    """A notice to this job to leave: the same answer on every rank, at the same step.

    backend  the ranks that leave together
    signals  that give notice: SIGTERM comes from `phalanx run`, torchrun, Kubernetes, Ray
             and `scancel`; SLURM's `--signal=USR1@60` sends SIGUSR1. Without any, `give()` is left
    every    seconds between two exchanges, if steps are shorter: then most calls of `given()`
             cost nothing. 0: one in each call

    Used in a `with` statement by every rank of the backend, which makes a group of them. A signal
    more than a second after the first one, such as while a checkpoint is written, goes to the
    former handler: as a second Ctrl-C does. After the `with` statement all do. A notice around
    another one is given, too.

    Raises `MisuseError` for signals outside the main thread, since Python handles none there;
    ValueError for a signal that cannot be handled, or a negative `every`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        signals: Iterable[int] = (signal.SIGTERM,),
        every: float = 0.5,
    ) -> None:
        if not isinstance(backend, Backend):
            raise TypeError(f"Notice takes a backend, such as phalanx.init(), not {backend!r}")
        check_ranks_stay("Notice", backend, "a rank leaves it after SIGTERM, or by job.leave()")
        self._backend = backend
        if not every >= 0:
            raise ValueError(f"every={every!r}: it is the seconds between exchanges, 0 or more")
        self._signals = NoticeSignals(
            signals,
            rank=backend.rank,
            elsewhere="make the Notice there, or with signals=(), and call its give() when a "
            "notice comes",
        )
        self._every = every
        self._given = False  # whether all have a notice
        self._group: SubBackend | None = None
        self._exchange: PendingCollective[Tensor] | None = None
        self._calls = self._next = self._begun = 0  # of `given()`; those with an exchange
        self._began = monotonic()

    @property
    def exit_code(self) -> int:
        """The program's exit code: 75 (EX_TEMPFAIL) if `given()` has returned True, else 0."""
        return os.EX_TEMPFAIL if self._given else 0

    def give(self) -> None:
        """Give this rank notice, as a signal does. From any thread, any number of times."""
        self._signals.told = True

    def given(self) -> bool:
        """Return whether the ranks leave now. Every rank calls it after every step; save if so.

        A notice is answered in the second call after it; if steps take less than `every`, after
        about that time, and 17 calls at most. From then on all calls return True. A notice in the
        last steps of a loop may not be answered any more.

        Blocks only while other ranks are a whole step behind. Raises as `all_reduce` does:
        `PeerLostError`, `CollectiveTimeoutError` or `DeadlockError`, too, if ranks call it
        unequally often.
        """
        group = self._group
        if group is None:
            raise MisuseError(
                f"rank {self._backend.rank}: given() outside of the with statement of its Notice",
                rank=self._backend.rank,
            )
        if self._given:
            return True
        if group.world_size == 1:
            self._given = self._signals.told
            return self._given
        self._calls += 1
        if self._exchange is not None and self._read(self._exchange):
            return True
        if self._calls >= self._next:
            self._exchange = self._begin(group)
        return False

    def _begin(self, group: SubBackend) -> PendingCollective[Tensor]:
        """Begin an exchange: of the rank with a notice (from 1), and the time of the next one."""
        now, calls = monotonic(), self._calls - self._begun
        seconds = max(now - self._began, 1e-9) / calls
        wanted = min(max(1, int(self._every / seconds)), MOST_CALLS)
        self._began, self._begun = now, self._calls
        values = torch.tensor([(group.rank + 1) * self._signals.told, -wanted])
        return async_all_reduce_(values, group, ReduceOp.MAX, label="Notice.given()")

    def _read(self, exchange: PendingCollective[Tensor]) -> bool:
        """Return whether a rank had a notice when it began this exchange."""
        told, negative = exchange.wait().tolist()  # the least that a rank wants, as a MAX
        self._exchange = None
        self._next = self._begun - negative
        self._given = told > 0
        if told - 1 == self._backend.rank:
            log.warning(
                "rank %d was given notice to leave: all %d ranks leave now",
                *(self._backend.rank, self._backend.world_size),
            )
        return self._given

    def __enter__(self) -> Self:
        if self._group is not None:
            raise MisuseError(f"rank {self._backend.rank}: this Notice is in use already")
        self._group = self._backend.subgroup(range(self._backend.world_size))
        self._signals.install()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._signals.close()
        group, exchange = self._group, self._exchange
        self._group = self._exchange = None
        assert group is not None
        try:
            if exchange is not None and kind is None and not group.forked:
                exchange.wait()  # the others read it, too
        finally:
            group.close()


class NoticeSignals:
    """Signals that give this process notice, from `install()` to `close()`; it has no backend.

    told   whether one has come; the program may set it, too

    Signals within a second of the first are the same notice. A later one goes to the former
    handler; one that another notice has installed hears all. `close` restores the former handlers.

    Raises ValueError for a signal that cannot be handled. Outside the main thread, in which Python
    handles signals, `MisuseError`, in whose text `elsewhere` is the remedy.
    """

    def __init__(self, signals: Iterable[int], *, elsewhere: str, rank: int | None = None) -> None:
        self.told = False
        self._signals = _checked(signals)
        self._before: dict[int, Any] = {}  # the former handlers, by signal
        self._first = math.inf  # when the first signal came
        thread = threading.current_thread()
        if self._signals and thread is not threading.main_thread():
            who = "" if rank is None else f"rank {rank}: "
            raise MisuseError(
                f"{who}Python handles signals in the main thread, and this is {thread.name!r}: "
                f"{elsewhere}",
                rank=rank,
            )

    def install(self) -> None:
        """Handle the signals from now on."""
        for signum in self._signals:
            self._before[signum] = signal.getsignal(signum)
            signal.signal(signum, self._handle)

    def close(self) -> None:
        """Restore the former handlers, unless others were set meanwhile."""
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, signal.SIG_DFL if before is None else before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Take note of a signal, and do no more: it may come at any point."""
        self._first = min(self._first, monotonic())
        self.told = True
        before = self._before[signum]
        again = monotonic() > self._first + ECHO
        of_a_notice = isinstance(getattr(before, "__self__", None), NoticeSignals)
        if callable(before) and (again or of_a_notice):
            before(signum, frame)
        elif again and before != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


def _checked(signals: Iterable[int]) -> tuple[int, ...]:
    """Return the signals; ValueError unless a program can handle them."""
    can_be_handled = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    if isinstance(signals, int) or not can_be_handled.issuperset(signals):
        raise ValueError(
            f"signals={signals!r}: it takes a list of signals that a program can handle, such as "
            "[signal.SIGTERM, signal.SIGUSR1]"
        )
    return tuple(signals)
