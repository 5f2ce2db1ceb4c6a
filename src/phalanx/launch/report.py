"""The end of a rank, and the report to the user when one has failed.

A rank sends its supervisor a `RankReport`: the result of its function, or its failure. Together
with the exit code of the process that is a `RankExit`. When rank 2 fails, ranks 0, 1 and 3 lose
their peer and fail too; all exits of a run are put in this order, and the first is the root cause:

    1. errors of a rank's own, and exits that nobody ordered, by time
    2. lost peers, and errors raised while handling one; ranks told to stop; by time

Exit code 75 is no failure: all ranks left together, after a notice, and ask to be started again.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import DistributedError, MisuseError, PeerLostError, RankStopped, name_ranks

# Exit codes of a rank that SIGINT or SIGTERM has stopped, as a shell counts: 128 more.
INTERRUPTED, STOPPED = 130, 143
# Exit code of a rank that has saved its work, left, and asks to be started again (`Notice`).
AGAIN = os.EX_TEMPFAIL
# Exit codes of a rank that did as it was told.
_ORDERED = frozenset({-signal.SIGTERM, -signal.SIGINT, STOPPED, INTERRUPTED})

_HINTS = {
    1: "; what it wrote to stderr may say why",
    -signal.SIGKILL: ", not by this launcher; the kernel does that when memory runs out",
    -signal.SIGSEGV: "; a crash in compiled code: its output holds the stack",
    -signal.SIGTERM: ", sent from outside, before it had begun",
    STOPPED: " is what it ends with after a SIGTERM, sent from outside",
    INTERRUPTED: " is what it ends with after a SIGINT, sent from outside",
}

_HEADER = 8  # bytes of the length that goes before a report

Dumps = Callable[[object], bytes]  # pickle's, or cloudpickle's


class RankTraceback(Exception):  # noqa: N818 -- it is no error, but the place of one
    """The traceback of an error that was raised in another process, as text: a `__cause__`."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\nRank {self.rank}:\n{self.text}"""'


@dataclass(frozen=True)
class RankReport:
    """A rank's report of its own end: its result, or its failure.

    Reports and their contents are the only pickles of Phalanx: between a process and children that
    it started itself.
    """

    rank: int
    failed: bool
    # The pickled result, or the pickled error if a caller will raise it.
    payload: bytes = field(default=b"", repr=False)
    summary: str = ""  # one line: the error, or the call that ended the rank
    traceback: str = field(default="", repr=False)  # "" if it has no more than the summary
    follows: bool = False  # whether another rank's failure led to this one
    time: float = field(default_factory=time.monotonic)  # the processes of a host share this clock
    code: int = 1  # with which a rank that has failed ends

    def encode(self) -> bytes:
        """Return the report as bytes for a stream, after their length."""
        data = pickle.dumps(self)
        return len(data).to_bytes(_HEADER, "big") + data

    @staticmethod
    def decode(received: bytearray) -> RankReport | None:
        """Return the report in the received bytes, or None while it is not whole."""
        size = int.from_bytes(received[:_HEADER], "big")
        if size == 0 or len(received) < _HEADER + size:
            return None
        with memoryview(received) as view:
            report: RankReport = pickle.loads(view[_HEADER:])
        return report

    def result(self) -> Any:
        """Return the rank's result; `MisuseError` if this process cannot unpickle it."""
        try:
            return pickle.loads(self.payload)
        except Exception as error:
            raise MisuseError(
                f"the result of rank {self.rank} cannot be unpickled here ({error_line(error)}): "
                "return tensors, numbers, text, or lists and dicts of them",
                rank=self.rank,
            ) from error

    def error(self) -> BaseException:
        """Return the rank's error, with its traceback in that process as `__cause__`."""
        try:
            error: BaseException = pickle.loads(self.payload)
        except Exception as failure:
            error = DistributedError(
                f"rank {self.rank} raised {self.summary} (its error cannot be unpickled here: "
                f"{error_line(failure)})",
                rank=self.rank,
            )
        if self.traceback:
            error.__cause__ = RankTraceback(self.rank, self.traceback)
        return error

    @classmethod
    def of_result(cls, rank: int, value: object, dumps: Dumps = pickle.dumps) -> RankReport:
        """Return the report of a rank whose function returned `value`: tensors go by value."""
        try:
            return cls(rank, failed=False, payload=dumps(value))
        except Exception as error:
            name = type(value).__name__
            misuse = MisuseError(
                f"rank {rank} returned {'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}, which "
                f"cannot be pickled ({error_line(error)}): return tensors, numbers, text, or lists "
                "and dicts of them",
                rank=rank,
            )
            misuse.__cause__ = error
            return cls.of_error(rank, misuse)

    @classmethod
    def of_error(
        cls,
        rank: int,
        error: BaseException,
        dumps: Dumps = pickle.dumps,
        *,
        hide: Collection[str] = (),
    ) -> RankReport:
        """Return the report of a rank that raised `error`; see `format_traceback` for `hide`."""
        text, summary = format_traceback(error, hide=hide), error_line(error)
        follows = follows_from_another(error)
        if isinstance(error, SystemExit):
            error = PeerLostError(
                f"rank {rank} ended itself with sys.exit({error.code!r}) and has no result: let "
                "the function return",
                peer=rank,
            )
        try:
            payload = dumps(error)
            pickle.loads(payload)  # some errors go only one way
        except Exception as failure:
            stand_in = DistributedError(
                f"rank {rank} raised {error_line(error)} (which cannot be pickled: "
                f"{error_line(failure)})",
                rank=rank,
            )
            payload = pickle.dumps(stand_in)
        return cls(rank, True, payload, summary, text, follows)


def follows_from_another(error: BaseException) -> bool:
    """Return whether another rank's failure led to `error`: a lost peer is in its chain."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, (PeerLostError, RankStopped)):
            return True
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


@dataclass
class RankExit:
    """The end of one rank, past or to come, as far as its supervisor knows."""

    rank: int
    code: int | None = None  # of its process, negative for a signal; None while that runs
    report: RankReport | None = None
    time: float = math.inf  # when it reported or else ended, by the monotonic clock
    told_to_stop: bool = False  # whether the supervisor has sent it a signal
    killed: bool = False  # whether the supervisor has killed it
    owes_result: bool = False  # whether it fails if it ends without a report

    @property
    def failed(self) -> bool:
        """Return whether the rank has failed, and the supervisor had not ended it before."""
        if self.report is not None:
            return self.report.failed
        if self.owes_result:
            return not self._stopped
        return self.code not in (0, AGAIN) and not self._stopped

    @property
    def _stopped(self) -> bool:
        return self.killed or (self.told_to_stop and self.code in _ORDERED)

    @property
    def follows(self) -> bool:
        """Return whether another rank's failure led to that of this one."""
        return self.report is not None and self.report.follows

    @property
    def shell_code(self) -> int:
        """Return the exit code as a shell has it: 128 plus a signal's number, and never 0.

        A rank that has reported is killed if it does not end soon: its report has the code.
        """
        code = self.code or 0
        if self.report is not None:
            return code if code > 0 else self.report.code
        return code if code > 0 else 128 - code

    def error(self) -> BaseException:
        """Return the error of a rank that has failed, or the `PeerLostError` of one that died."""
        if self.report is not None:
            return self.report.error()
        code = self.code or 0
        how = f"{describe_exit_code(code)}{_HINTS.get(code, '')}"
        return PeerLostError(f"rank {self.rank} ended without a result: {how}", peer=self.rank)


def root_cause(exits: Iterable[RankExit]) -> RankExit | None:
    """Return the failure that the others follow from, if there is one."""
    failures = (one for one in exits if one.failed)
    return min(failures, key=lambda one: (one.follows, one.time), default=None)


def describe_exit_code(code: int) -> str:
    """Return the end of a process in words: `exit code 3`, or `killed by signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


def describe_failure(failed: RankExit, *, brief: bool = False) -> str:
    """Return one rank's failure: a line, and its traceback if it left one; `brief`: the line."""
    code, report = failed.code or 0, failed.report
    if report is None:
        how = "was" if code < 0 else "failed:"
        hint = "" if brief else _HINTS.get(code, "; it left no traceback")
        return f"rank {failed.rank} {how} {describe_exit_code(code)}{hint}"
    how = f"rank {failed.rank} failed ({describe_exit_code(failed.shell_code)}"
    if brief:
        return f"{how}: {report.summary})"
    if not report.traceback:
        return f"{how}): {report.summary}"
    return f"{how}); its traceback:\n{report.traceback.rstrip()}"


def print_failure(exits: Collection[RankExit], elsewhere: str = "") -> None:
    """Write the report of the first failure to stderr.

    Ranks that ended with exit code 0 or 75 are named, too: they ended too soon for the others, if
    these lost a peer or waited in vain. `elsewhere` names in one line the failure on another node
    that led to those here.
    """
    root = root_cause(exits)
    lines: list[str] = []
    if elsewhere:
        lines.append(elsewhere if root is None else f"{elsewhere}; here, because of it:")
    if root is not None:
        lines.append(describe_failure(root))
    for code in () if elsewhere else (0, AGAIN):
        left = sorted(one.rank for one in exits if (one.code, one.report) == (code, None))
        if left:
            lines.append(f"{name_ranks(left)} ended with exit code {code}")
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def print_restart(exits: Collection[RankExit], elsewhere: str, restart: str) -> None:
    """Write to stderr why all ranks are started again."""
    why, root = elsewhere, root_cause(exits)
    if root is not None and not elsewhere:
        why = describe_failure(root, brief=True)
        if root.report is not None and root.report.traceback:
            why = f"{describe_failure(root)}\n{why}"
    sys.stderr.write(f"{why}; {restart}\n")


# ------------------------------------------------------------------------------
# Tracebacks as the user's own code would give them: without the frames that started it, and without
# this package's. These stay if there are no others, if a fault of this package is the cause, and if
# PHALANX_LOG is "debug".

_OWN = f"{Path(__file__).parents[1]}{os.sep}"


def format_traceback(error: BaseException, *, hide: Collection[str]) -> str:
    """Return the traceback of `error` as text, without its first frames that are in files `hide`.

    An error without other frames (a script with a syntax error) has no frames then.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in hide:
        frames = frames.tb_next
    told = traceback.TracebackException(type(error), error, frames)
    if os.environ.get("PHALANX_LOG") != "debug":
        _leave_out_own(told, error)
    return "".join(told.format())


def _leave_out_own(
    told: traceback.TracebackException, error: BaseException, *, explained: bool = False
) -> None:
    """Leave this package's frames out of an error's, and of those that it came from.

    explained   whether an error that this package raises on purpose came from this one
    """
    own = [frame.filename.startswith(_OWN) for frame in told.stack]
    on_purpose = isinstance(error, (DistributedError, TypeError, ValueError))
    if all(own) and explained and isinstance(error, (DistributedError, OSError, ImportError)):
        told.stack = traceback.StackSummary()
    elif not all(own) and (on_purpose or not own[-1]):
        others = [frame for frame, ours in zip(told.stack, own, strict=True) if not ours]
        told.stack = traceback.StackSummary.from_list(others)
    explained = isinstance(error, DistributedError)
    before = (told.__cause__, error.__cause__), (told.__context__, error.__context__)
    for told_before, error_before in before:
        if told_before is not None and error_before is not None:
            _leave_out_own(told_before, error_before, explained=explained)


def error_line(error: BaseException) -> str:
    """Return `error` in one line, `ValueError: a bug`, without the notes that it carries.

    Of an error of several lines that is the first, but for this package's: these it joins.
    """
    told = traceback.TracebackException(type(error), error, None)
    vars(told)["__notes__"] = None  # which Python 3.10 has not
    first, *more = list(told.format_exception_only())[-1].strip().splitlines()
    if not (more and isinstance(error, DistributedError)):
        return first
    return f"{first} {'; '.join(line.strip() for line in more)}"
