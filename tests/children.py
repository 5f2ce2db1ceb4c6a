"""What a child does that a test forks, in words."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable

import pytest

from phalanx import MisuseError

LONGEST = 20  # seconds; then a child that hangs dies of SIGALRM


def said_by_child(act: Callable[[], object]) -> str:
    """Fork; what `act` returns in the child, or the error that it raises, and its output."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        # Garbage of earlier tests stays: to free a store or group of torch's is to join its
        # threads, which this process has not.
        gc.freeze()
        os.dup2(theirs, 2)
        signal.alarm(LONGEST)
        try:
            said = str(act())
        except BaseException:
            said = traceback.format_exc()
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as end:
        said = end.read().decode()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"{said} (ended with {os.waitstatus_to_exitcode(status)})"


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(MisuseError, match="was forked"):
        call()
    return ""


def left(*things: object) -> str:
    """What leaving them says, in a child."""
    for thing in things:
        thing.__exit__(None, None, None)  # type: ignore[attr-defined]
    return ""
