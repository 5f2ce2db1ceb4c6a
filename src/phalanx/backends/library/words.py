"""Words: what ranks tell each other through the library, in messages of one size.

A library matches a receive with a message of exactly its size, and tells nothing else about it. So
every message begins with a word, a block of `WORD` bytes for which a receive is always posted: a
small message is in it whole, a larger one is announced by it. It follows at once, as a copy, or, if
that would be large, when it is granted and has not been given up meanwhile.

    sender                                        receiver
       | -- MESSAGE 7, 40 B, and the bytes ---------> |  where the receive wants them
       |                                              |
       | -- EAGER 8, 64 kB -------------------------> |
       | == 64 kB, a copy ==========================> |  when it has room for it
       |                                              |
       | -- MESSAGE 9, 3 MB ------------------------> |  has room for it
       | <------------------------------- GRANT 9 --- |
       | -- COMING 9 -------------------------------> |
       | == 3 MB ===================================> |

       | -- CONTROL FAILURE, LEAVE, ASK, ... -------> |  what TCP has control frames for

    0      1      2   4        8       12      20       28            36      44   64
    +------+------+---+--------+-------+-------+--------+-------------+-------+---+-----------------
    | verb | kind | 0 | length | ident | group | number | fingerprint | total | 0 | payload, padding
    +------+------+---+--------+-------+-------+--------+-------------+-------+---+-----------------
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from phalanx.wire.frame import MAX_CONTROL, Channel, FrameError, Kind

# The payload begins at a multiple of 16: torch computes with it where it lies.
_HEADER = struct.Struct("<BBHIIQqQQ20x")
_PADDING = bytes(2048)
WORD = 2048  # bytes; under the size from which libraries send nothing before they are asked
INLINE = WORD - _HEADER.size  # bytes of payload that a word has room for


class Verb(enum.IntEnum):
    """What a word says."""

    MESSAGE = 1  # here is a message, or (longer than `INLINE`) there is one: may it come?
    EAGER = 2  # there is one, and it is on its way
    GRANT = 3  # it may come
    COMING = 4  # it does, now
    CANCEL = 5  # or it will not, granted or not
    CONTROL = 6  # about a group, as TCP's control frames; goes on in the next word if it is long


class Word(NamedTuple):
    """One word. The payload is a part of the block that it came in."""

    verb: Verb
    channel: Channel
    ident: int = 0  # of a message among those from this sender
    fingerprint: int = 0
    total: int = 0  # bytes of the whole message
    payload: memoryview | bytes = b""


def pack(word: Word) -> memoryview:
    """The block for a word, new."""
    (group, kind, number), payload = word.channel, word.payload
    header = _HEADER.pack(
        word.verb,
        kind,
        0,
        len(payload),
        word.ident,
        group,
        number,
        word.fingerprint,
        word.total,
    )
    return memoryview(b"".join((header, payload, _PADDING[: INLINE - len(payload)])))


def unpack(block: memoryview) -> Word:
    """The word in a block. Raises `FrameError` for anything that cannot be one."""
    verb, kind, zero, length, ident, group, number, fingerprint, total = _HEADER.unpack_from(block)
    try:
        channel = Channel(group, Kind(kind), number)
        known = Verb(verb)
    except ValueError as error:
        raise FrameError(f"a word that says nothing: {error}") from None
    if zero or length > INLINE or length > total:
        raise FrameError(f"a word of {length} bytes of {total}")
    if known is Verb.CONTROL and total > MAX_CONTROL:
        raise FrameError(f"a control message announces {total} bytes, more than {MAX_CONTROL}")
    payload = block[_HEADER.size : _HEADER.size + length]
    return Word(known, channel, ident, fingerprint, total, payload)
