"""How a rank ends when it must: with its parent, or because another rank failed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from phalanx.errors import RankStopped

__all__ = ["GRACE", "die_with_parent", "raise_when_stopped"]

GRACE = 2.0
"""Seconds that a rank told to stop has, before it is killed."""

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL = 0.5


def die_with_parent(parent: int) -> None:
    """End this process, at once and whatever it does, when its `parent` (a process id) ends.

    On Linux the kernel sees to it (when the thread ends that started this process, to be exact:
    the launchers' stay until their ranks have ended); elsewhere a thread looks twice a second. For
    what this process has started itself, and until this call, there is the `Warden`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent watch", daemon=True).start()


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL)
    os._exit(1)


def raise_when_stopped() -> None:
    """Let SIGTERM raise `RankStopped` in the main thread, which must be the caller."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: cleaning up goes on
    raise RankStopped("another rank failed, and this one was told to stop")
