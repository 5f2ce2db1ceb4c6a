"""Phalanx's own errors: failures between ranks, and calls that they cannot do.

All derive from `DistributedError`, and each also from the built-in that a Python programmer would
catch. An argument that is wrong by itself, such as a tag that is no number, is Python's own
TypeError or ValueError. Attributes have the known facts:

    DistributedError
    ├── InvalidRankError        ValueError         a rank that does not exist
    ├── InvalidWorldSizeError   ValueError         a world or group that cannot be
    ├── SelfSendError           ValueError         a message to oneself
    ├── SizeMismatchError       ValueError         a message not as long as expected
    ├── DesyncError             RuntimeError       ranks that do different things
    ├── CollectiveTimeoutError  TimeoutError       a deadline that passed
    ├── PeerLostError           ConnectionError    a rank that died, left or cannot be reached
    ├── BackendUnavailableError RuntimeError       a backend that cannot run here
    ├── UnsupportedOperationError NotImplementedError  something that a backend cannot do
    │   └── UnsupportedObjectError  TypeError      an object that cannot be sent
    ├── MalformedObjectError    ValueError         bytes that are no object
    ├── AuthenticationError     PermissionError    a peer without the job's token
    ├── DeadlockError           RuntimeError       every rank waits
    ├── MembershipError         RuntimeError       too few ranks for an elastic job, or no store
    ├── CheckpointError                            a checkpoint that cannot be saved or loaded
    │   ├── CheckpointIOError       OSError            a file could not be written or read
    │   ├── CheckpointNotFoundError FileNotFoundError  there is none
    │   ├── CheckpointDamagedError  ValueError         files that have changed or are gone
    │   └── CheckpointMismatchError ValueError         it is of another model or optimizer
    └── MisuseError             RuntimeError       a call that makes no sense now

`RankStopped` is no error: it ends the other ranks of a run in which one has failed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = [
    "AuthenticationError",
    "BackendUnavailableError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointIOError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DesyncError",
    "DistributedError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "MalformedObjectError",
    "MembershipError",
    "MisuseError",
    "PeerLostError",
    "RankStopped",
    "SelfSendError",
    "SizeMismatchError",
    "UnsupportedObjectError",
    "UnsupportedOperationError",
]


class DistributedError(Exception):
    """The base class of all errors of this package.

    rank      the rank that raises, in the numbering of the backend that was called
    peer      the rank that is to blame or was waited for
    op        the operation, such as "all_reduce"
    sequence  the number of that operation in its group, counted from 0
    seconds   how long the rank had waited

    What is not known, or has no meaning, is None.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:
            cls.__doc__ = f"{cls.__doc__}\n\nCauses, remedies: docs/symptoms.md, {cls.__name__}"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        op: str | None = None,
        sequence: int | None = None,
        seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.peer = peer
        self.op = op
        self.sequence = sequence
        self.seconds = seconds

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default, which calls cls(*args).
        return (rebuild, (type(self), self.message, self.__dict__.copy()))

    def again(self) -> DistributedError:
        """Return an equal error to raise again: each raise adds a traceback to an error."""
        return rebuild(type(self), self.message, self.__dict__)


def rebuild(
    kind: type[DistributedError], message: str, attributes: dict[str, object]
) -> DistributedError:
    error = kind(message)
    error.__dict__.update(attributes)
    if "__notes__" in attributes:  # a list of its own, to which the user may add
        error.__dict__["__notes__"] = list(attributes["__notes__"])  # type: ignore[call-overload]
    return error


class InvalidRankError(DistributedError, ValueError):
    """A rank that is not one of the group's, as a peer, a root or a member: it is `peer`.

    `rank` raises it, as every error; None if its own number is the invalid one.
    """


class InvalidWorldSizeError(DistributedError, ValueError):
    """A world or a group of no rank, of more than there are, or of another size on each rank."""


class SelfSendError(DistributedError, ValueError):
    """A message from a rank to itself: it would wait for itself."""


class SizeMismatchError(DistributedError, ValueError):
    """Sizes that must agree and do not; the message names both."""


class DesyncError(DistributedError, RuntimeError):
    """Ranks of one group met in different operations, or in one with different arguments."""


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """An operation was not complete when its deadline passed; it waited for `peer`."""


class PeerLostError(DistributedError, ConnectionError):
    """A rank (`peer`) died, left, was interrupted, or cannot be reached any more."""


class BackendUnavailableError(DistributedError, RuntimeError):
    """A backend that does not exist or cannot run here; the message names its needs."""


class UnsupportedOperationError(DistributedError, NotImplementedError):
    """Something that this backend, algorithm or dtype cannot do."""


class UnsupportedObjectError(UnsupportedOperationError, TypeError):
    """An object that cannot be sent; the message names the part of it, as `obj["a"][3]`."""


class MalformedObjectError(DistributedError, ValueError):
    """Received bytes that encode no Python object."""


class AuthenticationError(DistributedError, PermissionError):
    """A peer that does not hold the job's token, or is another one than it must be."""


class DeadlockError(DistributedError, RuntimeError):
    """Every rank waits and nothing is in flight; the message names all waits."""


class MembershipError(DistributedError, RuntimeError):
    """An elastic job has had too few ranks, or no store, for too long."""


class CheckpointError(DistributedError):
    """A checkpoint that cannot be saved or loaded, on all ranks; it failed on `peer`."""


class CheckpointIOError(CheckpointError, OSError):
    """A file could not be written or read; `errno` has the reason, the message the name."""

    errno: int | None = None  # over OSError's own, which would not come along to another process


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointDamagedError(CheckpointError, ValueError):
    """A file of a checkpoint is missing, or has changed; the message names it."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint of another model or optimizer; nothing was changed."""


class MisuseError(DistributedError, RuntimeError):
    """A call that makes no sense in this state; the message names the right call."""


class RankStopped(BaseException):
    """Raised in a rank that has to end because another one failed.

    Not an `Exception`, so that `except Exception` in training code lets it pass.
    """


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 2`, or `ranks 2, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------
# Other processes' text, in an error or on a terminal

LONGEST_TEXT = 400  # characters of one text
_STYLES = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")


def plain(text: str, most: int = LONGEST_TEXT) -> str:
    """Return one line of text that is harmless to a terminal, of `most` characters or fewer.

    Colours and the like go; other unprintable characters (escapes, new lines, controls of
    direction) become spaces.
    """
    text = _STYLES.sub("", text[: 4 * most])
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
