"""What the user is told when a run has failed: which rank was first, and how."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Sequence

from phalanx.launch.attempt import Ending
from phalanx.launch.cause import describe_exit
from phalanx.launch.worker import INTERRUPTED, STOPPED

__all__ = ["describe", "root_cause", "summarise", "tell_failure"]

_HINTS = {
    -signal.SIGKILL: "; nobody here sent it: the kernel does when memory runs out",
    -signal.SIGSEGV: "; a crash in compiled code: its output holds the stack",
    -signal.SIGTERM: ", sent from outside, before it had begun",
    STOPPED: " is what it ends with after a SIGTERM, sent from outside",
    INTERRUPTED: " is what it ends with after a SIGINT, sent from outside",
}


def root_cause(endings: Iterable[Ending]) -> Ending:
    """Return the ending that the others follow from."""
    return min(endings, key=lambda ending: ending.order)


def describe(ending: Ending) -> str:
    """Return the story of one rank's failure: a line, and its traceback if it left one."""
    how = describe_exit(ending.exitcode)
    if ending.record is None:
        hint = _HINTS.get(ending.exitcode, "; it left no traceback")
        return f"rank {ending.rank} {'was' if ending.exitcode < 0 else 'failed:'} {how}{hint}"
    if not ending.record.traceback:
        return f"rank {ending.rank} failed ({how}): {ending.record.summary}"
    text = ending.record.traceback.rstrip()
    return f"rank {ending.rank} failed ({how}); its traceback:\n{text}"


def summarise(ending: Ending) -> str:
    """Return how one rank failed in one line."""
    how = describe_exit(ending.exitcode)
    if ending.record is not None:
        return f"rank {ending.rank} failed ({how}: {ending.record.summary})"
    return f"rank {ending.rank} {'was' if ending.exitcode < 0 else 'failed:'} {how}"


def tell_failure(endings: list[Ending], *, nodes: int, left: Sequence[int] = ()) -> int:
    """Write the story of the first failure to stderr; return the exit code that fits it.

    `left` are ranks that ended in good order: too soon for the others, if these lost a peer or
    waited in vain.
    """
    root = root_cause(endings)
    if nodes > 1 and root.follows:
        sys.stderr.write("the first failure was on another node; here, because of it:\n")
    sys.stderr.write(f"{describe(root)}\n")
    if left:
        who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}"
        sys.stderr.write(f"{who} ended with exit code 0\n")
    return root.exitcode if root.exitcode > 0 else 128 - root.exitcode
