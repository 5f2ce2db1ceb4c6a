"""The inside of a process that `spawn` started."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from phalanx.errors import MisuseError, RankStopped
from phalanx.launch.init import MeetingPoint, factory_named
from phalanx.launch.report import Report
from phalanx.launch.scratch import die_with_parent, raise_when_stopped

__all__ = ["run_rank"]


def run_rank(
    pipe: Connection,
    call: bytes,
    point: MeetingPoint,
    *,
    parent: int,
    backend: str,
    timeout: float,
) -> None:
    """Run the pickled function `call` as one rank, and send `pipe` the report of it."""
    die_with_parent(parent)
    _leave_the_terminal()
    raise_when_stopped()
    try:
        try:
            report = Report.of_result(point.rank, _call(call, backend, timeout, point))
        except BaseException as error:
            report = Report.of_error(point.rank, error, hide=[__file__])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # half a report is worse than a late end
        pipe.send_bytes(pickle.dumps(report))
    except RankStopped:  # between the lines above: nobody waits for this report
        pass


def _leave_the_terminal() -> None:
    """Hear no Ctrl-C: the parent does, and stops its ranks.

    In a session of its own, a rank is ended together with what it has started. It was started
    with SIGINT blocked, so that one which came before this line says nothing either.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _call(call: bytes, backend: str, timeout: float, point: MeetingPoint) -> Any:
    function = _unpickle(call)
    made = factory_named(backend)(point, timeout)
    try:
        result = function(made)
    except BaseException:
        made.abort()
        raise
    made.close()
    return result


def _unpickle(call: bytes) -> Callable[[Any], Any]:
    try:
        function: Callable[[Any], Any] = pickle.loads(call)
    except Exception as error:
        raise MisuseError(
            "a fresh process cannot find the function that was given to spawn: define it at the "
            "top level of a module or script, not in a console or notebook"
        ) from error
    return function
