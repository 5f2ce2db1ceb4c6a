"""The small messages that ranks send about the job itself, as MessagePack (never pickle)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from phalanx.wire.frame import FrameError


class Address(msgspec.Struct, frozen=True):
    """From each rank to rank 0: where it listens, and which host and process it is."""

    host: str
    port: int
    host_id: str
    process: int = 0  # 0: one that others of its host cannot look at
    # Numbers of files of that process, for others of its host: its shared memory, and what wakes
    # it. -1: it has none.
    memory: int = -1
    bell: int = -1


class Table(msgspec.Struct, frozen=True):
    """From rank 0 to each rank: every rank's address, in rank order."""

    addresses: list[Address]


class Attached(msgspec.Struct, frozen=True):
    """From each rank to all, when it knows the table: whether it has its neighbours' memory."""

    problem: str  # "" if there is none


class FailureNotice(msgspec.Struct, frozen=True):
    """A group is broken. Ranks are those of the whole job."""

    error: str  # name of the error's class
    culprit: int
    reporter: int
    reason: str
    # For ranks that disagree: what the reporter was doing, and under which number.
    signature: str = ""
    sequence: int = -1
    met: str = ""  # what the culprit was doing, where that is known


LONGEST_TEXT = 20_000  # characters; three of them fit into a control frame in any script


def shortened(text: str) -> str:
    """The text, or its beginning if it is too long for a control frame."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


class Ask(msgspec.Struct, frozen=True):
    """To a rank that is waited for, in the group of the frame."""

    sequence: int  # of the collective; -1: this is not about one
    fingerprint: int
    what: str  # that collective in words
    inquiry: int = 0  # not 0: not whether you agree, but what keeps you from it; see `Answer`


class Answer(msgspec.Struct, frozen=True):
    """What a rank waits for: `what` in words, or "" if it waits in no call."""

    waits_for: list[int]  # ranks of the job
    what: str
    kept: int = 0  # bytes of the asker's messages that nobody here has received yet
    inquiry: int = 0  # that of the `Ask`
    group: int = 0  # that what it waits in is of,
    sequence: int = -1  # and its number there, if it is a collective


_T = TypeVar("_T", bound=msgspec.Struct)

encode = msgspec.msgpack.Encoder().encode


def decode(payload: bytes, kind: type[_T]) -> _T:
    """The message in `payload`. Raises `FrameError` if it is not one of this kind."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    # Text that is not UTF-8 and lists in lists in lists: msgspec has no error of its own for them.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a {kind.__name__} message that cannot be read: {error}") from None
