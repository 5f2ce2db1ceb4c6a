"""What a spawned rank tells its parent: its result, or how it failed.

These are the only pickles of Phalanx: between a process and children that it started itself.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.errors import DistributedError, MisuseError, PeerLostError, RankStopped
from phalanx.launch.cause import describe_exit, follows_from_another
from phalanx.launch.tracebacks import error_line, format_traceback

__all__ = ["RankTraceback", "Report"]


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
