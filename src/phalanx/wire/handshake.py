"""The handshake by which two ranks prove to each other that they are of one job. Sans-IO.

    dialer                                   acceptor
      | HELLO     identity, target, nonce  ->  |   who are you: version, job, generation, size
      | <- CHALLENGE  rank, nonce, proof       |   HMAC(token, "acceptor", all of the above)
      | PROOF     HMAC(token, "dialer", ...)-> |
      |     between hosts, TLS 1.3 begins here, and within it: SEAL, which follows from PROOF ->
      | <- WELCOME                             |

Either side sends REFUSE with a reason instead and is done; REFUSE_SIZE, if only the world sizes
differ. Both proofs are HMAC-SHA256, keyed with the job's token, over the role and the whole of
HELLO and CHALLENGE: protocol version, job, generation, world size, the two ranks, both nonces, and
each side's offer of TLS. So a proof can be neither replayed nor reflected, and a change on the way
is detected by the next proof.

A caller without the token learns the protocol's version, and nothing about the job. The acceptor
checks the content of HELLO only after the dialer has proved itself. The rank and the rest of
CHALLENGE are masked by a value derived from the token, HELLO and the nonce.

A message is a type byte, a 16-bit length of at most `LIMIT`, and its content. The driver reads
`room` bytes at a time: of an unauthenticated peer no more than one message is kept.

The acceptor's proof comes first, so anyone who may connect can try tokens against it offline. Hence
a token is random, of 128 bits at least.

TLS (`agree` says whether). Each side has an ephemeral certificate, whose SHA-256 is in CHALLENGE
and in PROOF, under the same proofs. Within TLS, each side compares it with the other's certificate,
whose private key the other has used. So the two ends of the tunnel are the two proved ranks,
without anybody between. SEAL, sent only after that, is derived from the nonces: it binds this
tunnel to this conversation, even if ranks share a certificate. Without TLS, bytes after the
handshake are neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

PROTOCOL_VERSION = 6  # raised with every change of the ranks' messages
NONCE_SIZE = 32
PROOF_SIZE = 32
LIMIT = 192

HELLO, CHALLENGE, PROOF, WELCOME, REFUSE, SEAL, REFUSE_SIZE = range(1, 8)

_HEAD = struct.Struct("<4sBH")
_VERSION = struct.Struct("<H")  # which every HELLO of every version begins with
_HELLO = struct.Struct("<H16sIIIIB32s")
_MASKED = struct.Struct("<IB32s")  # the acceptor's rank, offer and fingerprint
_CHALLENGE = struct.Struct(f"<{_MASKED.size}s32s")
_FITS = REFUSE, ""  # one object: each caller that has not proved itself keeps what it is given
PLAIN_TEXT = "it speaks plain text where TLS was agreed"
_APART = 0x80  # in the byte of an offer, beside the stance
_MAGIC = b"PHX?"
FIRST, ROOM = _HEAD.size, _HEAD.size + LIMIT  # bytes to read first; the longest message


class Identity(NamedTuple):
    """The rank that a process claims to be."""

    job: str
    generation: int
    rank: int
    world_size: int

    @property
    def job_digest(self) -> bytes:
        """Return the job's name in 16 bytes."""
        return hashlib.sha256(self.job.encode()).digest()[:16]


class Stance(IntEnum):
    """A side's capability and demand of TLS."""

    OFF, CANNOT, ABLE = range(3)


class Offer(NamedTuple):
    """A side's offer of TLS.

    apart         it sees the other side on another host
    fingerprint   makes its certificate, if there is none yet; returns the SHA-256 of that
    """

    stance: Stance = Stance.OFF
    apart: bool = False
    fingerprint: Callable[[], bytes] = bytes

    @property
    def byte(self) -> int:
        """Return stance and `apart`, as they are sent."""
        return self.stance | (_APART if self.apart else 0)


NO_OFFER = Offer()
_WITHOUT = MappingProxyType(
    {Stance.OFF: "has PHALANX_TLS=off", Stance.CANNOT: "lacks TLS (pip install 'phalanx[tls]')"}
)


def agree(dialer: int, dialers: int, acceptor: int, acceptors: int) -> tuple[bool, str]:
    """Return whether two ranks speak TLS, and why they cannot agree on it, or "".

    Both sides ask it with the same bytes: each one's rank, and its offer's `byte`.
    """
    sides = sorted([(dialers & ~_APART, dialer), (acceptors & ~_APART, acceptor)])
    (less, without), (more, other) = sides
    if not (dialers | acceptors) & _APART or more != Stance.ABLE:
        return False, ""
    if less == Stance.ABLE:
        return True, ""
    return False, (
        f"rank {without} {_WITHOUT[Stance(less)]}, and rank {other}, on another host, "
        "speaks TLS: have it, or set PHALANX_TLS=off, on every host"
    )


class Refused(Exception):  # noqa: N818 - it is an event, and becomes an error of Phalanx later
    """The handshake failed.

    by_peer     the other side refused
    final       the two will never agree; else the connection failed, and another may succeed
    world_size  the two are of one job and start, and were given other world sizes
    """

    def __init__(
        self, reason: str, *, by_peer: bool = False, final: bool = True, world_size: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason, self.by_peer, self.final = reason, by_peer, final
        self.world_size = world_size


class Handshake:
    """One side of one handshake: feed it the received bytes, send the bytes it returns.

    `receive(data)` returns the bytes to send, and raises `Refused` when it has failed, with the
    last words for the peer in `farewell`. After it is `complete`, `peer` is the other rank, and
    `surplus` the bytes behind the handshake. If the driver gives it at most `room` bytes at a time,
    it never keeps more than one message, nor reads bytes of TLS.

    begins_tls    nothing more is said in plain text: the driver calls `enter_tls` and starts TLS,
                  the dialer as its client, and the handshake goes on within
    fingerprint   of the certificate that the peer shows there; b"": TLS is not spoken
    """

    __slots__ = (
        "_buffer",
        "_key",
        "_offer",
        "_token",
        "_within",
        "begins_tls",
        "complete",
        "farewell",
        "fingerprint",
        "identity",
        "peer",
    )

    def __init__(self, identity: Identity, token: bytes, offer: Offer) -> None:
        self.identity = identity
        self.peer: int | None = None
        self.complete = self.begins_tls = False
        self.farewell = self.fingerprint = b""
        self._token = token
        self._offer = offer
        self._buffer = bytearray()
        self._key = b""  # HMAC(token, "dialer", ...), the dialer's proof
        self._within = b""  # this side's first message within TLS

    @property
    def has_token(self) -> bool:
        """Return whether there is a token to prove: without one, anybody speaks the handshake."""
        return bool(self._token)

    @property
    def room(self) -> int:
        """Return how many bytes to read next, at most: the missing part of the message."""
        have = len(self._buffer)
        if have < _HEAD.size:
            return _HEAD.size - have
        length: int = _HEAD.unpack_from(self._buffer)[2]
        return max(_HEAD.size + min(length, LIMIT) - have, 1)

    @property
    def surplus(self) -> bytes:
        """Return the bytes that follow the handshake."""
        return bytes(self._buffer)

    def receive(self, data: bytes) -> bytes:
        """Take received bytes; return those to send. Raise `Refused`."""
        self._buffer += data
        reply = b""
        while not (self.complete or self.begins_tls):
            message = self._next_message()
            if message is None:
                break
            kind, content = message
            if kind in (REFUSE, REFUSE_SIZE):
                words = content.decode("utf-8", "replace")
                reason = "".join(c if c.isprintable() else "?" for c in words)  # it gets logged
                raise Refused(reason, by_peer=True, world_size=kind == REFUSE_SIZE)
            reply += self._answer(kind, content)
        return reply

    def enter_tls(self) -> bytes:
        """Go on within TLS; return the first bytes to send there, if any."""
        self.begins_tls = False
        if self._buffer:
            raise self._refuse(PLAIN_TEXT)
        return self._within

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

    def _refuse(self, reason: str, kind: int = REFUSE) -> Refused:
        self.farewell = _message(kind, reason.encode()[:LIMIT])
        return Refused(reason)

    def _expect(self, kind: int, content: bytes, wanted: int, size: int) -> None:
        if kind != wanted or len(content) != size:
            raise self._refuse(
                f"expected handshake message {wanted} of {size} bytes, "
                f"got {kind} of {len(content)} bytes"
            )

    def _check(self, proof: bytes, due: bytes) -> None:
        if not hmac.compare_digest(proof, due):
            raise self._refuse("the two do not hold the same token (PHALANX_TOKEN, on all or none)")

    def _proof(self, role: bytes, transcript: bytes) -> bytes:
        return _mac(self._token, role, transcript)

    def _mask(self, said: bytes, content: bytes) -> bytes:
        """Mask the acceptor's description of itself, or unmask it, by the messages before it."""
        mask = self._proof(b"rank", said) + self._proof(b"certificate", said)
        return bytes(one ^ other for one, other in zip(content, mask, strict=False))


class DialerHandshake(Handshake):
    """The side that opened the connection, to reach `target`.

    proved   it has sent its proof: the other side may take the connection to be open
    """

    __slots__ = ("_hello", "proved")

    def __init__(
        self, identity: Identity, token: bytes, target: int, offer: Offer = NO_OFFER
    ) -> None:
        super().__init__(identity, token, offer)
        self.peer = target
        self._hello = b""
        self.proved = False

    def start(self) -> bytes:
        """Return the first message, HELLO."""
        me = self.identity
        self._hello = _HELLO.pack(
            PROTOCOL_VERSION,
            me.job_digest,
            me.generation,
            me.rank,
            me.world_size,
            self.peer or 0,
            self._offer.byte,
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
        self._check(proof, self._proof(b"acceptor", transcript))
        rank, theirs, fingerprint = _MASKED.unpack(self._mask(self._hello + nonce, masked))
        if rank != self.peer:
            raise self._refuse(f"reached rank {rank} where rank {self.peer} should be")
        tls, problem = agree(self.identity.rank, self._offer.byte, rank, theirs)
        if problem:
            raise self._refuse(problem)
        self.proved = True
        self._key = self._proof(b"dialer", transcript)
        if not tls:
            return _message(PROOF, self._key)
        self.fingerprint, self.begins_tls = fingerprint, True
        mine = self._offer.fingerprint()
        self._within = _message(SEAL, _mac(self._key, b"seal", fingerprint))
        return _message(PROOF, mine + _mac(self._key, b"certificate", mine))


class AcceptorHandshake(Handshake):
    """The side that accepted. `admit(peer)` gives a reason to turn that rank away, or None."""

    __slots__ = ("_admit", "_mine", "_mismatch")

    def __init__(
        self,
        identity: Identity,
        token: bytes,
        admit: Callable[[int], str | None],
        offer: Offer = NO_OFFER,
    ) -> None:
        super().__init__(identity, token, offer)
        self._admit = admit
        self._mine = b""  # the fingerprint of its certificate, if TLS was agreed
        self._mismatch = _FITS  # why the two do not fit, with any proof

    def _answer(self, kind: int, content: bytes) -> bytes:
        if self.peer is None:
            return self._challenge(kind, content)
        if self.fingerprint:  # this is within TLS
            self._expect(kind, content, SEAL, PROOF_SIZE)
            self._check(content, _mac(self._key, b"seal", self._mine))
        elif self._mine:
            self._expect(kind, content, PROOF, 2 * PROOF_SIZE)
            theirs = content[:PROOF_SIZE]
            self._check(content[PROOF_SIZE:], _mac(self._key, b"certificate", theirs))
            self.fingerprint, self.begins_tls = theirs, True
            return b""
        else:
            self._expect(kind, content, PROOF, PROOF_SIZE)
            self._check(content, self._key)
        # Only now: a dialer that has proved nothing learns nothing about the job.
        kind, mismatch = self._mismatch
        if reason := mismatch or self._admit(self.peer):
            raise self._refuse(reason, kind)
        self.complete = True
        return _message(WELCOME, b"")

    def _challenge(self, kind: int, content: bytes) -> bytes:
        # The version first: in another version, the rest may differ.
        if kind == HELLO and len(content) >= _VERSION.size:
            (theirs,) = _VERSION.unpack_from(content)
            if theirs != PROTOCOL_VERSION:
                raise self._refuse(
                    f"the caller speaks protocol version {theirs}, this rank {PROTOCOL_VERSION}: "
                    "is the same Phalanx installed everywhere?"
                )
        self._expect(kind, content, HELLO, _HELLO.size)
        _, job, generation, rank, world_size, target, theirs, _ = _HELLO.unpack(content)
        me, ours = self.identity, self._offer.byte
        if theirs & ~_APART > max(Stance):
            raise self._refuse(f"an offer of an unknown kind ({theirs})")
        self.peer = rank  # as claimed, until the handshake is complete
        tls, problem = agree(rank, theirs, me.rank, ours)
        mismatch = self._compare(job, generation, rank, world_size, target)
        self._mismatch = (REFUSE, problem) if problem and mismatch is _FITS else mismatch
        nonce = secrets.token_bytes(NONCE_SIZE)
        self._mine = self._offer.fingerprint() if tls else b""
        said = _MASKED.pack(me.rank, ours, self._mine)
        challenge = _CHALLENGE.pack(self._mask(content + nonce, said), nonce)
        transcript = content + challenge
        # Kept in place of its inputs: an unauthenticated connection shall cost little memory.
        self._key = self._proof(b"dialer", transcript)
        return _message(CHALLENGE, challenge + self._proof(b"acceptor", transcript))

    def _compare(
        self, job: bytes, generation: int, rank: int, world_size: int, target: int
    ) -> tuple[int, str]:
        """Return how to refuse a caller with this identity, and why it does not belong here."""
        me = self.identity
        if job != me.job_digest:
            return REFUSE, "the caller is of another job"
        for kind, said, ours, what in (
            (REFUSE, generation, me.generation, "is of generation"),
            (REFUSE_SIZE, world_size, me.world_size, "has world size"),
            (REFUSE, target, me.rank, "looks for rank"),
        ):
            if said != ours:
                return kind, f"the caller {what} {said}, this rank {ours}"
        if rank >= me.world_size or rank == me.rank:
            who = f"rank {rank} of {me.world_size}, to rank {me.rank}"
            return REFUSE, f"the caller says that it is {who}"
        return _FITS


def _message(kind: int, content: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, kind, len(content)) + content


def _mac(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"phalanx " + role + b"\0" + said, "sha256")
