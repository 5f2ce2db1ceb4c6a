"""What a spawned rank tells its parent: its result, or how it failed.

These are the only pickles of Phalanx: between a process and children that it started itself.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import DistributedError, MisuseError, PeerLostError, RankStopped


class RankTraceback(Exception):  # noqa: N818 -- it is no error, it is where one was
    """The traceback of an error that was raised in another process, as text: a `__cause__`."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\nRank {self.rank}:\n{self.text}"""'


@dataclass(frozen=True)
class Report:
    """How one rank ended. Times are of the monotonic clock, which processes of a host share."""

    rank: int
    kind: Literal["result", "error", "death", "stopped"]
    payload: bytes = field(default=b"", repr=False)
    """The pickled result or error."""
    traceback: str = field(default="", repr=False)
    summary: str = ""
    """The error in one line."""
    follows: bool = False
    """Whether another rank's failure led to this one."""
    when: float = field(default_factory=time.monotonic)

    @property
    def order(self) -> tuple[bool, float]:
        """The smallest is the root cause."""
        return self.follows, self.when

    def result(self) -> Any:
        """Return the rank's result; `MisuseError` where this process cannot make it out."""
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
    def of_result(cls, rank: int, value: object) -> Report:
        """Return the report of a rank whose function returned `value`: tensors go by value."""
        try:
            return cls(rank, "result", pickle.dumps(value))
        except Exception as error:
            misuse = MisuseError(
                f"rank {rank} returned {_kind(value)}, which cannot be pickled "
                f"({error_line(error)}): return tensors, numbers, text, or lists and dicts of them",
                rank=rank,
            )
            misuse.__cause__ = error
            return cls.of_error(rank, misuse)

    @classmethod
    def of_error(cls, rank: int, error: BaseException, *, hide: Collection[str] = ()) -> Report:
        """Return the report of a rank that raised `error`; see `format_traceback` for `hide`."""
        if isinstance(error, RankStopped):
            return cls(rank, "stopped", follows=True)
        text, summary = format_traceback(error, hide=hide), error_line(error)
        follows = follows_from_another(error)
        if isinstance(error, SystemExit):
            error = PeerLostError(
                f"rank {rank} ended itself with sys.exit({error.code!r}) and has no result: let "
                "the function return",
                peer=rank,
            )
        return cls(rank, "error", _portable(rank, error), text, summary, follows)

    @classmethod
    def of_death(cls, rank: int, exitcode: int | None) -> Report:
        """Return the report of a rank that ended without one of its own."""
        how = "closed its pipe" if exitcode is None else describe_exit(exitcode)
        hint = {
            1: "; what it wrote to stderr says why (a module that calls spawn when it is "
            'imported needs `if __name__ == "__main__":` around the call)',
            -9: "; nobody here sent it: the kernel does when memory runs out",
        }.get(exitcode or 0, "")
        error = PeerLostError(f"rank {rank} ended without a result: {how}{hint}", peer=rank)
        return cls(rank, "death", pickle.dumps(error))


def _portable(rank: int, error: BaseException) -> bytes:
    """Return `error` pickled, or what stands for it if it does not survive that."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception as failure:
        stand_in = DistributedError(
            f"rank {rank} raised {error_line(error)} (which cannot be pickled: "
            f"{error_line(failure)})",
            rank=rank,
        )
        return pickle.dumps(stand_in)
    return payload


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# ------------------------------------------------------------------------------
# Telling the failure that came first from those that follow from it.
#
# When rank 2 fails, ranks 0, 1 and 3 lose their peer and fail too. All endings of a run are put in
# this order, and the first is the root cause:
#
#     1. errors of a rank's own, and deaths that nobody ordered, by time
#     2. lost peers, and whatever was raised while handling one; ranks told to stop; by time


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


def describe_exit(code: int) -> str:
    """Return how a process ended in words: `exit code 3`, or `killed by signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


# ------------------------------------------------------------------------------
# The file in which a failed rank of `phalanx run` leaves its story, for its launcher to tell.
#
# It is the error file of torch's elastic agent, in its format, with what `phalanx run` adds.


@dataclass(frozen=True)
class Record:
    """What a rank says about its own failure."""

    summary: str
    """One line: the error, or the call that ended the rank."""
    traceback: str
    """The whole traceback as text; "" where it says no more than the summary."""
    follows: bool
    """Whether another rank's failure led to this one."""
    time: float
    """Seconds since the epoch."""


def write_record(path: str, *, summary: str, traceback: str, follows: bool) -> None:
    """Write the story of this rank, whole or not at all."""
    now = time.time()
    story = {
        "message": {
            "message": summary,
            "extraInfo": {"py_callstack": traceback or summary, "timestamp": str(int(now))},
        },
        "phalanx": {"traceback": traceback, "follows": follows, "time": now},
    }
    part = f"{path}.part"
    Path(part).write_text(json.dumps(story), encoding="utf-8")
    os.replace(part, path)


def read_record(path: str) -> Record | None:
    """Return the story in `path`, or None where no rank has left one that can be read."""
    try:
        story = json.loads(Path(path).read_text(encoding="utf-8"))
        added = story["phalanx"]
        return Record(
            summary=str(story["message"]["message"]),
            traceback=str(added["traceback"]),
            follows=bool(added["follows"]),
            time=float(added["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ------------------------------------------------------------------------------
# Tracebacks as the user's own code would give them: without the frames that started it.


def format_traceback(error: BaseException, *, hide: Collection[str]) -> str:
    """Return the traceback of `error` as text, without its first frames that are in files `hide`.

    An error that has no other frame (a script with a syntax error) has no frames then.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in hide:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def error_line(error: BaseException) -> str:
    """Return `error` in one line, `ValueError: a bug`, without the notes that it carries."""
    told = traceback.TracebackException(type(error), error, None)
    notes = "__notes__"
    if hasattr(told, notes):
        setattr(told, notes, None)
    return list(told.format_exception_only())[-1].strip().partition("\n")[0]
