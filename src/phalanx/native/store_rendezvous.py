"""The rendezvous of a group's ranks through a store, and which of its entries a rank believes.

    every rank   counts its rendezvous here; puts an announcement: host, process, a nonce
    rank 0       reads all of them; listens; puts an answer for each rank, with its nonce
    the others   read theirs, and connect

Keys carry the count, because a store may outlive the group: under torchrun a second
`init_process_group` finds the keys of the first one. An entry of an earlier start lacks this
start's nonce, so it is not believed.

The possible writers of the store decide how far its entries are trusted (`Trust`):

    door     the launcher's own store: its writers have proved that they hold the token
    sealed   torch's store, which anybody can write to, and PHALANX_TOKEN: each entry has a seal,
             HMAC-SHA256 over key, value, job, generation, group and the rank that writes it, and
             its key is one that nobody finds without the token. Others are ignored
    local    torch's store without a token: only addresses of this host are taken
    all      PHALANX_TRUST_STORE=1 without a token: any address, and a fresh token with it

No entry becomes code: errors are made of a fixed table of classes, and text is shown as text.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from phalanx import errors
from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    InvalidWorldSizeError,
    MisuseError,
    name_ranks,
    plain,
)
from phalanx.transport.tcp.addresses import ELSEWHERE, listen_toward
from phalanx.transport.tcp.admission import MAKE_ONE, find_token
from phalanx.transport.tcp.heartbeat import host_id
from phalanx.wire.control import Endpoint, is_loopback, learned, parse_address

log = logging.getLogger("phalanx")

Store = Any  # torch.distributed.Store, or the launcher's (launch/store.py)
Trust = Literal["door", "sealed", "local", "all"]
TRUST_VARIABLE = "PHALANX_TRUST_STORE"

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1  # seconds between two tries
_AGAIN = 0.5  # seconds until a word that may have been overwritten is put once more
_LONGEST_ENTRY, _LONGEST_TEXT = 8192, 2000  # bytes of a word; characters of an error in it
_MARK = "sealed"  # the empty entry, in the place of one, if there is no token


def tries(deadline: float, longest_pause: float = _LONGEST_PAUSE) -> Iterator[float]:
    """Yield the seconds left until `deadline` (of the monotonic clock), for each try until then.

    The pauses between them become longer. This is how to wait for another process, because a wait
    inside torch's store handles no signal.
    """
    pause = _FIRST_PAUSE
    while True:
        yield max(deadline - time.monotonic(), pause)
        if time.monotonic() + pause > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, longest_pause)


def connect_torchs_store(endpoint: Endpoint, deadline: float) -> Store:
    """Return the TCPStore that is held there; try until `deadline`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    failure: Exception = TimeoutError()
    for left in tries(deadline):
        try:
            # A plain socket fails soon and in clear words, unlike the store's own client.
            seconds = min(max(left, 1.0), 86400.0)  # neither of the two knows infinity
            socket.create_connection(endpoint, min(left, seconds)).close()
            wait = timedelta(seconds=seconds)
            return TCPStore(*endpoint, is_master=False, timeout=wait, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            failure = error
    raise failure


def trust_in_torchs_store(environ: Mapping[str, str] = os.environ) -> Trust:
    """Return how far this environment trusts the entries of a store of torch's."""
    if find_token(environ):
        return "sealed"
    return "all" if environ.get(TRUST_VARIABLE, "") == "1" else "local"


class Entries:
    """The entries of one group's ranks in a store.

    scope     job, generation and group: an entry of one is ignored in another
    strange   how many of the entries that this rank has looked for were ignored
    """

    def __init__(self, store: Store, scope: Sequence[str | int], trust: Trust) -> None:
        self.trust = trust
        self.strange = 0
        self._store = store
        self._scope = list(scope)
        self._token = find_token().encode() if trust == "sealed" else b""
        self._prefix = f"phalanx/{'/'.join(map(str, scope))}/"

    def count(self, rank: int) -> int:
        """Return the number of this rank's rendezvous here, with this one."""
        return int(self._store.add(self._place(f"count/{rank}"), 1))

    def put(self, key: str, writer: int, text: str) -> None:
        """Put an entry of rank `writer`."""
        if not self._token:
            self._store.set(self._prefix + key, text)
            return
        self._store.set(self._place(key), f"{self._seal(key, writer, text)} {text}")
        self._store.set(self._prefix + key, _MARK)

    def look(self, key: str, writer: int, seconds: float = 0.0) -> str | None:
        """Return the entry of rank `writer` at this key; None if there is none of its own.

        The launcher's store waits for it, at most `seconds`; others do not.
        """
        if self.trust == "door":
            return (self._store.wait(self._place(key), seconds) or b"").decode()
        found = self._read(self._place(key))
        if not self._token or not found:
            return found
        seal, _, text = found.partition(" ")
        if hmac.compare_digest(seal.encode(), self._seal(key, writer, text).encode()):
            return text
        self._ignore(key, writer)
        return None

    def look_beside(self, key: str, writer: int) -> bool:
        """Return whether that rank has a token, if this rank has none.

        If this rank has one, and that rank another or none, that counts as strange.
        """
        found = self._read(self._prefix + key)
        if self._token and found and self.look(key, writer) is None:
            self._ignore(key, writer)
        return not self._token and found == _MARK

    def _read(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        found = bytes(self._store.get(key) or b"")
        return found.decode("utf-8", "replace") if len(found) <= _LONGEST_ENTRY else ""

    def _ignore(self, key: str, writer: int) -> None:
        self.strange += 1
        if self.strange == 1:
            log.warning(
                "%s in the store, where a word of rank %d is awaited, is not sealed with this "
                "rank's token, and is ignored: does that rank hold the same PHALANX_TOKEN, or does "
                "a stranger write there?",
                key,
                writer,
            )

    def _place(self, key: str) -> str:
        if not self._token:
            return self._prefix + key
        return self._prefix + self._mac(b"key", [*self._scope, key])

    def _seal(self, key: str, writer: int, text: str) -> str:
        return self._mac(b"word", [*self._scope, key, writer, text])

    def _mac(self, what: bytes, of: list[str | int]) -> str:
        return store_mac(self._token, what, of)


def store_mac(token: bytes, what: bytes, of: Sequence[str | int]) -> str:
    """Return what only who holds the token can say of these words in a store, as hex digits."""
    said = b"phalanx store " + what + b"\0" + msgspec.msgpack.encode(of)
    return hmac.new(token, said, "sha256").hexdigest()


class Announcement(msgspec.Struct, frozen=True):
    """A rank's entry in the store: its place, and its arguments.

    nonce   random, of this one rendezvous
    gpu     whether it has a GPU of its own, for NCCL
    """

    host: str
    process: int
    world_size: int
    nonce: str = ""
    gpu: bool = False


class RendezvousAnswer(msgspec.Struct, frozen=True):
    """Rank 0's entry for one rank: its address, or the reason why there is none.

    nonce   that of the rank which it answers
    token   of the mesh; "" for that of the environment, if it has one
    gpu     whether all ranks have a GPU of their own
    error   the name of an error's class, its text and the rank to blame; "" for none
    """

    nonce: str = ""
    address: str = ""
    token: str = ""
    gpu: bool = False
    error: str = ""
    reason: str = ""
    peer: int = 0


_ERRORS: Mapping[str, type[DistributedError]] = MappingProxyType(
    {
        name: kind
        for name in errors.__all__
        if issubclass(kind := getattr(errors, name), DistributedError)
    }
)


class RendezvousResult(NamedTuple):
    """The outcome of a rendezvous, the same on all ranks but for the listener.

    address    rank 0's
    token      of the mesh; None for that of the environment, if it has one
    listener   on rank 0, which may have one
    gpu        whether all ranks have a GPU of their own
    """

    address: str
    token: str | None = None
    listener: socket.socket | None = None
    gpu: bool = False


class StoreRendezvous:
    """One rank's part in one rendezvous: `run()` on every rank.

    timeout   seconds for both
    op        the user's call, for errors
    """

    def __init__(
        self,
        entries: Entries,
        rank: int,
        world_size: int,
        timeout: float,
        op: str,
        *,
        gpu: bool = False,
    ) -> None:
        self.entries, self.rank, self.world_size, self.op = entries, rank, world_size, op
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self._own = Announcement(host_id(), os.getpid(), world_size, secrets.token_hex(16), gpu)
        self._entry = msgspec.json.encode(self._own).decode()
        self._count = 0
        self._stale = False  # whether rank 0's answer is one to an earlier start of this rank
        self._others: list[Announcement] = []  # those of all ranks, on rank 0

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def run(self, toward: Endpoint) -> RendezvousResult:
        """Meet: `announce()`, then `exchange()`. Rank 0 listens in the direction of `toward`.

        Raise their errors, and on all ranks the one for which rank 0 cannot listen.
        """
        one_host, listener, endpoint = self.announce(), None, None
        try:
            if self.rank == 0:
                listener, endpoint = listen_toward(toward, one_host=one_host)
        except DistributedError as error:
            self.fail(error)
            raise
        with _closing_on_error(listener):
            answer = self.exchange(str(endpoint), secrets.token_hex(32))
        return RendezvousResult(answer.address, answer.token or None, listener, answer.gpu)

    def announce(self) -> bool:
        """Announce this rank. On rank 0 wait for all, and return whether all are on one host.

        Rank 0 tells the others of a problem there. `CollectiveTimeoutError` names the absent ranks.
        `MisuseError` if two processes are one rank, `InvalidWorldSizeError` if ranks disagree on
        their number.
        """
        with self._use_store():
            return self._announce()

    def _announce(self) -> bool:
        self._count = self.entries.count(self.rank)
        last = f"last/{self.rank}"
        before = self._announcement(last, self.rank)
        if before is not None and before.host == self._own.host and self._is_twin(before.process):
            raise self._error(
                MisuseError,
                f"rank {self.rank} has come to this store already, as process {before.process} "
                f"of this host, which is alive (this is process {os.getpid()}): do two jobs "
                "have one MASTER_PORT, or did two processes get one RANK?",
            )
        self.entries.put(last, self.rank, self._entry)
        self._put_announcement()
        if self.rank:
            return False
        try:
            self._others = [self._own, *map(self._await, range(1, self.world_size))]
            one_host = len({each.host for each in self._others}) == 1
            if self.entries.trust == "local" and not one_host:
                raise self._untrusted()
        except DistributedError as error:
            self.fail(error)
            raise
        return one_host

    def exchange(self, address: str = "", token: str = "") -> RendezvousAnswer:
        """As rank 0, tell all ranks this address, and the token if the store may have one.

        Return rank 0's answer. Blocks until it is there; raises the error of `fail`.
        """
        with self._use_store():
            return self._read_answer() if self.rank else self._publish(address, token)

    def _publish(self, address: str, token: str) -> RendezvousAnswer:
        token = token if self.entries.trust == "all" else ""
        gpu = all(each.gpu for each in self._others)
        answer = RendezvousAnswer(address=address, token=token, gpu=gpu)
        for rank, other in enumerate(self._others):
            self._answer(rank, msgspec.structs.replace(answer, nonce=other.nonce))
        return answer

    def fail(self, error: DistributedError) -> None:
        """As rank 0, tell all ranks that have come why the rendezvous fails."""
        kind, peer = type(error).__name__, error.peer or 0
        answer = RendezvousAnswer(error=kind, reason=str(error)[:_LONGEST_TEXT], peer=peer)
        for rank in range(1, self.world_size):
            other = self._announcement(self._key(rank), rank)
            if other is not None:
                self._answer(rank, msgspec.structs.replace(answer, nonce=other.nonce))

    @contextmanager
    def _use_store(self) -> Iterator[None]:
        try:
            yield
        except DistributedError:
            raise
        except RuntimeError as error:  # as torch's stores put it
            raise self._error(
                BackendUnavailableError,
                f"rank {self.rank} cannot use the store through which the ranks meet ({error}): is "
                "the process that holds it alive?",
            ) from error

    def _error(
        self, kind: type[DistributedError], text: str, peer: int | None = None
    ) -> DistributedError:
        return kind(text, rank=self.rank, peer=peer, op=self.op)

    def _put_announcement(self) -> None:
        self.entries.put(self._key(self.rank), self.rank, self._entry)

    def _answer(self, rank: int, answer: RendezvousAnswer) -> None:
        self.entries.put(self._key(f"answer/{rank}"), 0, msgspec.json.encode(answer).decode())

    def _key(self, what: object) -> str:
        return f"{self._count}/{what}"

    def _await(self, rank: int) -> Announcement:
        """Block until `rank` has put its entry there; return it."""
        for found in self._poll(rank, self._key(rank)):
            other = _decode(found, Announcement)
            if other is not None:
                self._compare(rank, other)
                return other
        raise self._nobody(rank)

    def _compare(self, rank: int, other: Announcement) -> None:
        if other.world_size != self.world_size:
            raise self._error(
                InvalidWorldSizeError,
                f"rank {self.rank} was told that there are {self.world_size} ranks, and rank "
                f"{rank} that there are {other.world_size}: give all the same world_size",
                rank,
            )

    def _read_answer(self) -> RendezvousAnswer:
        """Return rank 0's answer to this rank's announcement."""
        for found in self._poll(0, self._key(f"answer/{self.rank}")):
            answer = _decode(found, RendezvousAnswer)
            if answer is None or answer.nonce != self._own.nonce:
                self._stale = answer is not None
                continue
            if answer.error:
                kind = _ERRORS.get(answer.error, DistributedError)
                text = f"rank {self.rank}: rank 0 says: {plain(answer.reason, _LONGEST_TEXT)}"
                raise self._error(kind, text, answer.peer)
            if self.entries.trust == "local" and not _is_here(answer.address):
                raise self._untrusted()
            return answer
        raise self._nobody(0)

    def _poll(self, writer: int, key: str) -> Iterator[str]:
        """Yield the entry of `writer` at `key`, once a try, until the deadline."""
        beside = time.monotonic() + _AGAIN
        for left in tries(self.deadline):
            found = self.entries.look(key, writer, min(left, _AGAIN))
            if found:
                yield found
            elif time.monotonic() > beside and self.entries.trust != "door":
                beside = time.monotonic() + _AGAIN
                self._put_announcement()
                there = self._announcement(self._key(writer), writer)
                if there is not None:  # rank 0 may have left, for what others have told it
                    self._compare(writer, there)
                if self.entries.look_beside(self._key(writer), writer):
                    raise self._error(
                        AuthenticationError,
                        f"rank {self.rank} and rank {writer} do not hold the same token: rank "
                        f"{writer} has one, this rank none (PHALANX_TOKEN, on all or none)",
                        writer,
                    )

    def _announcement(self, key: str, rank: int) -> Announcement | None:
        found = self.entries.look(key, rank)
        return _decode(found, Announcement) if found else None

    def _untrusted(self) -> DistributedError:
        return self._error(
            AuthenticationError,
            f"rank {self.rank}: the ranks are on several hosts, and meet through a store that "
            "anybody who reaches it can write to: without a token a stranger could be rank 0. "
            f"Set PHALANX_TOKEN, or PHALANX_TOKEN_FILE, on every host ({MAKE_ONE} makes one); or "
            f"set {TRUST_VARIABLE}=1 on every host: then whoever reaches the store can join the "
            "job, read what its ranks send, and end it",
        )

    def _is_twin(self, process: int) -> bool:
        if process == os.getpid():
            return False
        try:
            os.kill(process, 0)
        except (OSError, OverflowError) as error:
            return isinstance(error, PermissionError)  # it is another user's
        return True

    def _nobody(self, rank: int) -> CollectiveTimeoutError:
        ranks = [each for each in range(self.world_size) if each != self.rank]
        missing = [each for each in ranks if self._announcement(self._key(each), each) is None]
        missing = missing or [rank]
        they = "they" if len(missing) > 1 else "it"
        strange = ""
        if self.entries.strange:
            strange = (
                f"; {self.entries.strange} times something stood there that is not sealed with "
                "this rank's token: do all ranks hold the same PHALANX_TOKEN?"
            )
        if self._stale:
            strange += (
                "; rank 0's answer is to an earlier start of this rank: give each job a name, or a "
                "token, of its own"
            )
        return CollectiveTimeoutError(
            f"rank {self.rank} waited {self.timeout:g} s in {self.op} for {name_ranks(missing)} of "
            f"{self.world_size}: did {they} start, with the same address and world size, and call "
            f"{self.op} as often as this rank?{strange}",
            rank=self.rank,
            peer=missing[0],
            op=self.op,
            seconds=self.timeout,
        )


_T = TypeVar("_T", Announcement, RendezvousAnswer)


def _is_here(address: str) -> bool:
    """Return whether only this host can reach an address."""
    try:
        return is_loopback(parse_address(address).host)
    except ValueError:
        return False


def _decode(text: str, kind: type[_T]) -> _T | None:
    """Return the message in an entry; None if it is none of this kind."""
    try:
        return msgspec.json.decode(text, type=learned(kind))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


# ------------------------------------------------------------------------------
# Without a store: a library that brings bytes of rank 0 to all ranks.

_BLOCK = 512  # bytes: an address, and a token


def rendezvous_by(
    broadcast: Callable[[bytearray], object], rank: int, toward: Endpoint, *, one_host: bool
) -> RendezvousResult:
    """Meet by a broadcast, which fills each rank's block with that of rank 0.

    Strangers cannot write to it. Rank 0 listens in the direction of `toward`.
    """
    listener, block = None, bytearray()
    given = find_token()  # a received token never replaces it
    if rank == 0:
        listener, address = listen_toward(toward, one_host=one_host)
        block += f"{address} {'' if given else secrets.token_hex(32)}".encode()
    block = block.ljust(_BLOCK, b"\0")
    with _closing_on_error(listener):
        broadcast(block)
    told, _, token = block.rstrip(b"\0").decode().partition(" ")
    return RendezvousResult(told, None if given else token or None, listener)


@contextmanager
def _closing_on_error(listener: socket.socket | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if listener is not None:
            listener.close()
        raise


def route_by(host: str = "") -> Endpoint:
    """Return an address in the direction of the other ranks: `host`, or else MASTER_ADDR."""
    host = host or os.environ.get("MASTER_ADDR", "")
    return Endpoint(host, 0) if host else ELSEWHERE
