"""The handshake by which two ranks prove to each other that they are of one job. Sans-IO.

    dialer                                   acceptor
      | HELLO     identity, target, nonce  ->  |   who are you: version, job, generation, size
      | <- CHALLENGE  rank, nonce, proof       |   HMAC(token, "acceptor", all of the above)
      | PROOF     HMAC(token, "dialer", ...)-> |
      | <- WELCOME                             |

Either side sends REFUSE with a reason instead and is done. Both proofs are HMAC-SHA256, keyed with
the job's token, over the role and the whole of HELLO and CHALLENGE: protocol version, job,
generation, world size, the two ranks, both nonces. So a proof can be neither replayed nor
reflected, and a change on the way is detected by the next proof.

A caller without the token learns the protocol's version, and nothing about the job: the acceptor
compares what HELLO says with what it is only when the dialer has proved itself, and the rank in
CHALLENGE is masked by a value that follows from the token, HELLO and the nonce.

A message is a type byte, a 16-bit length of at most `LIMIT`, and its content. The driver reads
`room` bytes at a time: of an unauthenticated peer no more than one message is kept.

The acceptor's proof comes first, so anyone who may connect can try tokens against it offline: this
is why a token is random, of 128 bits at least. The handshake authenticates the two ranks; what is
sent afterwards is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

PROTOCOL_VERSION = 4  # raised with every change of what ranks say to each other
NONCE_SIZE = 32
PROOF_SIZE = 32
LIMIT = 192

HELLO, CHALLENGE, PROOF, WELCOME, REFUSE = range(1, 6)

_HEAD = struct.Struct("<4sBH")
_VERSION = struct.Struct("<H")  # which every HELLO of every version begins with
_HELLO = struct.Struct("<H16sIIII32s")
_CHALLENGE = struct.Struct("<I32s")
_MAGIC = b"PHX?"
ROOM = _HEAD.size + LIMIT  # the longest message


class Identity(NamedTuple):
    """Who a rank claims to be."""

    job: str
    generation: int
    rank: int
    world_size: int

    @property
    def job_digest(self) -> bytes:
        """The job's name in 16 bytes."""
        return hashlib.sha256(self.job.encode()).digest()[:16]


class Refused(Exception):  # noqa: N818 - it is what happened, and becomes an error of ours later
    """The handshake failed.

    by_peer   the other side refused
    final     the two will never agree; otherwise the connection failed, and another may not
    """

    def __init__(self, reason: str, *, by_peer: bool = False, final: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.by_peer, self.final = reason, by_peer, final


class Handshake:
    """One side of one handshake: feed it what was received, send what it returns.

    `receive(data)` returns the bytes to send, and raises `Refused` when it has failed, with the
    last words for the peer in `farewell`. After it is `complete`, `peer` is the other rank, and
    `surplus` what came behind the handshake. A driver that gives it `room` bytes at most at a time
    never makes it keep more than that.
    """

    __slots__ = ("_buffer", "_token", "complete", "farewell", "identity", "peer")

    def __init__(self, identity: Identity, token: bytes) -> None:
        self.identity = identity
        self.peer: int | None = None
        self.complete = False
        self.farewell = b""
        self._token = token
        self._buffer = bytearray()

    @property
    def room(self) -> int:
        """How many bytes to read next, at most."""
        return max(ROOM - len(self._buffer), 1)

    @property
    def surplus(self) -> bytes:
        """Bytes that belong to whatever follows the handshake."""
        return bytes(self._buffer)

    def receive(self, data: bytes) -> bytes:
        """Take received bytes; return what to send. Raises `Refused`."""
        self._buffer += data
        reply = b""
        while not self.complete:
            message = self._next_message()
            if message is None:
                break
            kind, content = message
            if kind == REFUSE:
                words = content.decode("utf-8", "replace")
                reason = "".join(c if c.isprintable() else "?" for c in words)  # it gets logged
                raise Refused(reason, by_peer=True)
            reply += self._answer(kind, content)
        return reply

    def _answer(self, kind: int, content: bytes) -> bytes:
        raise AssertionError("a handshake is either a DialerHandshake or an AcceptorHandshake")

    def _next_message(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if not _MAGIC.startswith(bytes(buffer[: len(_MAGIC)])):
            raise Refused("what came is not Phalanx's handshake")
        if len(buffer) < _HEAD.size:
            return None
        _, kind, length = _HEAD.unpack_from(buffer)
        if length > LIMIT:
            raise self._refuse(f"a handshake message of {length} bytes (limit {LIMIT})")
        end = _HEAD.size + length
        if len(buffer) < end:
            return None
        content = bytes(buffer[_HEAD.size : end])
        del buffer[:end]
        return kind, content

    def _refuse(self, reason: str) -> Refused:
        self.farewell = _message(REFUSE, reason.encode()[:LIMIT])
        return Refused(reason)

    def _expect(self, kind: int, content: bytes, wanted: int, size: int) -> None:
        if kind != wanted or len(content) != size:
            raise self._refuse(
                f"expected handshake message {wanted} of {size} bytes, "
                f"got {kind} of {len(content)} bytes"
            )

    def _proof(self, role: bytes, transcript: bytes) -> bytes:
        return hmac.new(self._token, b"phalanx " + role + b"\0" + transcript, "sha256").digest()

    def _mask(self, said: bytes) -> int:
        """Return 32 bits that only who holds the token can know of what was said so far."""
        return int.from_bytes(self._proof(b"rank", said)[:4], "little")


class DialerHandshake(Handshake):
    """The side that opened the connection, to reach `target`.

    proved   it has sent its proof: the other side may take the connection to be open
    """

    __slots__ = ("_hello", "proved")

    def __init__(self, identity: Identity, token: bytes, target: int) -> None:
        super().__init__(identity, token)
        self.peer = target
        self._hello = b""
        self.proved = False

    def start(self) -> bytes:
        """The first message."""
        me = self.identity
        self._hello = _HELLO.pack(
            PROTOCOL_VERSION,
            me.job_digest,
            me.generation,
            me.rank,
            me.world_size,
            self.peer or 0,
            secrets.token_bytes(NONCE_SIZE),
        )
        return _message(HELLO, self._hello)

    def _answer(self, kind: int, content: bytes) -> bytes:
        if self.proved:
            self._expect(kind, content, WELCOME, 0)
            self.complete = True
            return b""
        self._expect(kind, content, CHALLENGE, _CHALLENGE.size + PROOF_SIZE)
        challenge, proof = content[: _CHALLENGE.size], content[_CHALLENGE.size :]
        masked, nonce = _CHALLENGE.unpack(challenge)
        transcript = self._hello + challenge
        if not hmac.compare_digest(proof, self._proof(b"acceptor", transcript)):
            raise self._refuse("the two do not hold the same token (PHALANX_TOKEN, on all or none)")
        rank = masked ^ self._mask(self._hello + nonce)
        if rank != self.peer:
            raise self._refuse(f"reached rank {rank} where rank {self.peer} should be")
        self.proved = True
        return _message(PROOF, self._proof(b"dialer", transcript))


class AcceptorHandshake(Handshake):
    """The side that was called. `admit(peer)` gives a reason to turn that rank away, or None."""

    __slots__ = ("_admit", "_awaited", "_mismatch")

    def __init__(
        self, identity: Identity, token: bytes, admit: Callable[[int], str | None]
    ) -> None:
        super().__init__(identity, token)
        self._admit = admit
        self._awaited = b""  # the proof that the dialer has to send
        self._mismatch = ""  # why the two do not fit, whatever it proves

    def _answer(self, kind: int, content: bytes) -> bytes:
        if self.peer is None:
            return self._challenge(kind, content)
        self._expect(kind, content, PROOF, PROOF_SIZE)
        if not hmac.compare_digest(content, self._awaited):
            raise self._refuse("the two do not hold the same token (PHALANX_TOKEN, on all or none)")
        # Only now: a dialer that has proved nothing learns nothing about the job.
        reason = self._mismatch or self._admit(self.peer)
        if reason:
            raise self._refuse(reason)
        self.complete = True
        return _message(WELCOME, b"")

    def _challenge(self, kind: int, content: bytes) -> bytes:
        # The version first: in another version, what follows may differ.
        if kind == HELLO and len(content) >= _VERSION.size:
            (theirs,) = _VERSION.unpack_from(content)
            if theirs != PROTOCOL_VERSION:
                raise self._refuse(
                    f"the caller speaks protocol version {theirs}, this rank {PROTOCOL_VERSION}: "
                    "is the same Phalanx installed everywhere?"
                )
        self._expect(kind, content, HELLO, _HELLO.size)
        _, job, generation, rank, world_size, target, _ = _HELLO.unpack(content)
        self.peer = rank  # as claimed, until the handshake is complete
        self._mismatch = self._compare(job, generation, rank, world_size, target)
        nonce = secrets.token_bytes(NONCE_SIZE)
        challenge = _CHALLENGE.pack(self.identity.rank ^ self._mask(content + nonce), nonce)
        transcript = content + challenge
        # Kept in place of its inputs: an unauthenticated connection shall cost little memory.
        self._awaited = self._proof(b"dialer", transcript)
        return _message(CHALLENGE, challenge + self._proof(b"acceptor", transcript))

    def _compare(self, job: bytes, generation: int, rank: int, world_size: int, target: int) -> str:
        """Return why a caller that says this about itself does not belong here, or ""."""
        me = self.identity
        if job != me.job_digest:
            return "the caller is of another job"
        for said, ours, what in (
            (generation, me.generation, "is of generation"),
            (world_size, me.world_size, "has world size"),
            (target, me.rank, "looks for rank"),
        ):
            if said != ours:
                return f"the caller {what} {said}, this rank {ours}"
        if rank >= me.world_size or rank == me.rank:
            return f"the caller says that it is rank {rank} of {me.world_size}, to rank {me.rank}"
        return ""


def _message(kind: int, content: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, kind, len(content)) + content
