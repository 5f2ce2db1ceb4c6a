"""The launcher's store: the small table through which launchers and ranks find each other.

    client                                       server: a thread of node 0's launcher
      | HELLO ... WELCOME (wire/handshake.py)       both prove that they hold the job's token
      | ["set", "phalanx/node/1", ...]  ---->       a request: a MessagePack array behind its length
      | <----------------  ["", None, 0]            one reply to each: an error in words, a value,
      |                                             a number

Callers are let in by the rules of an `Acceptor`. Clients are bounded in number, keys, values, and
in memory altogether; one beyond a bound gets an error in words, and the others go on. While a
client does not take its reply, its next request is not read. All requests are data: nothing is
unpickled, and an announced length is checked before anything is read.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from contextlib import suppress
from typing import Annotated, Literal, TypeVar

import msgspec
from typing_extensions import override

from phalanx.errors import AuthenticationError, BackendUnavailableError, plain
from phalanx.launch.server import DoorServer, call
from phalanx.native.store_rendezvous import tries
from phalanx.transport.tcp.addresses import address_on_interface
from phalanx.transport.tcp.loop import READ, WRITE
from phalanx.transport.tcp.tls import Tls
from phalanx.wire.control import Endpoint, is_loopback, learned
from phalanx.wire.handshake import Identity, Refused

log = logging.getLogger("phalanx")

MOST_KEY = 256  # characters
MOST_VALUE = 1 << 16  # bytes
MOST_KEYS = 1 << 18
MOST_MEMORY = 64 << 20  # bytes of keys and values, with `_OVERHEAD` for each
MOST_CLIENTS = 1 << 12  # at a time: a rank is one for a moment, when it meets the others
_OVERHEAD = 200
_LONGEST = 2 * MOST_VALUE + 4 * MOST_KEY + 64  # bytes of a message
_AT_A_TIME = 64  # requests of one client before the others have a turn
_CALLERS = 1024  # places for callers that have not proved themselves yet
_PATIENCE = 60.0  # seconds for a reply
_FIRST_WAIT, _LAST_WAIT = 1.0, 8.0  # seconds for the answer to a call; then another one is made
_FULL = "clients are there already: try again when one of them has left"

_HEAD = struct.Struct("<I")
_Key = Annotated[str, msgspec.Meta(max_length=MOST_KEY)]
_Value = Annotated[bytes, msgspec.Meta(max_length=MOST_VALUE)]


class StoreRequest(msgspec.Struct, array_like=True, frozen=True):
    """A client's request.

    get          the value of `key`, or None
    set          `key` has `value`
    compare_set  `key` has `value` if it had `expected`, b"" for none; its value then
    add          the number at `key`, from 0, with `number` added
    wait         the value of `key`, as soon as it has one; the next request, of any kind, ends it
    end          nothing: there is no reply. It ends a `wait`
    """

    op: Literal["get", "set", "compare_set", "add", "wait", "end"]
    key: _Key = ""
    value: _Value = b""
    number: int = 0
    expected: _Value = b""


class StoreReply(msgspec.Struct, array_like=True, frozen=True):
    """The answer to a request; `error` is "" for none."""

    error: str = ""
    value: bytes | None = None
    number: int = 0


_Message = TypeVar("_Message", StoreRequest, StoreReply)


def _identity(job: str, rank: int) -> Identity:
    return Identity(f"phalanx store {job}", 0, rank, 2)


def _pack(message: StoreRequest | StoreReply) -> bytes:
    content = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(content)) + content


def _cut(received: bytearray, kind: type[_Message]) -> _Message | None:
    """Take the message that begins here; None if it is not whole, ValueError if it is none."""
    if len(received) < _HEAD.size:
        return None
    (length,) = _HEAD.unpack_from(received)
    if length > _LONGEST:
        raise ValueError(f"a message of {length} bytes, and the longest has {_LONGEST}")
    if len(received) < _HEAD.size + length:
        return None
    content = bytes(received[_HEAD.size : _HEAD.size + length])
    del received[: _HEAD.size + length]
    try:
        return msgspec.msgpack.decode(content, type=learned(kind))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"a message that cannot be read: {error}") from None


# ------------------------------------------------------------------------------
# The server.


class StoreServer(DoorServer):
    """A store that this process holds, in a thread, until `close()`."""

    label, callers = "the launcher's store", _CALLERS

    def __init__(self, listener: socket.socket, token: bytes, *, job: str = "") -> None:
        self.memory = 0
        self.clients: set[_Client] = set()
        self.waiting: dict[str, set[_Client]] = {}
        self._values: dict[str, bytes] = {}
        super().__init__(listener, token, _identity(job, 0))

    @override
    def close(self) -> None:
        with self.lock:
            for client in list(self.clients):
                client.close()
        super().close()

    @override
    def admit(self, peer: int) -> str | None:
        return f"{MOST_CLIENTS} {_FULL}" if len(self.clients) >= MOST_CLIENTS else None

    @override
    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        _Client(self, sock, surplus)

    def answer(self, request: StoreRequest) -> StoreReply:
        """Return the reply to a request. Called with the lock held."""
        if request.op == "set":
            return self._put(request.key, request.value) or StoreReply()
        if request.op == "compare_set":
            value = self._values.get(request.key, b"")
            if value != request.expected:
                return StoreReply(value=value)
            return self._put(request.key, request.value) or StoreReply(value=request.value)
        if request.op == "add":
            return self._add(request)
        return StoreReply(value=self._values.get(request.key))  # get, and wait

    def _add(self, request: StoreRequest) -> StoreReply:
        try:
            number = int(self._values.get(request.key, b"0")) + request.number
        except ValueError:
            return StoreReply(f"{request.key}: its value is no number, to which one could add")
        if abs(number) >= 1 << 63:
            return StoreReply(f"{request.key}: a number of more than 63 bits")
        return self._put(request.key, b"%d" % number) or StoreReply(number=number)

    def _put(self, key: str, value: bytes) -> StoreReply | None:
        """Set a value, and answer its waiting clients; return why there is no room, or None."""
        old = self._values.get(key)
        memory = self.memory + _size(key, value) - (0 if old is None else _size(key, old))
        if old is None and len(self._values) >= MOST_KEYS:
            return StoreReply(f"{key}: the store is full, it has {MOST_KEYS} keys")
        if memory > MOST_MEMORY:
            return StoreReply(f"{key}: the store is full, it has {MOST_MEMORY} bytes")
        self.memory = memory
        self._values[key] = value
        for client in self.waiting.pop(key, ()):
            client.awaits = None
            client.reply(StoreReply(value=value))
        return None


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value) + _OVERHEAD


class _Client:
    """A client that has been let in. Called with the server's lock held.

    awaits   the key that it waits for
    """

    def __init__(self, server: StoreServer, sock: socket.socket, surplus: bytes) -> None:
        self.server, self.sock = server, sock
        self.awaits: str | None = None
        self._received = bytearray(surplus)
        self._unsent = b""
        self._last = False  # whether it is hung up on when it has its reply
        sock.setblocking(False)
        server.clients.add(self)
        self._ready()

    def reply(self, reply: StoreReply) -> None:
        """Send a reply, as far as the client takes it now."""
        self._unsent += _pack(reply)
        try:
            self._send()
        except OSError:
            self.close()

    def close(self) -> None:
        self._wait_no_more()
        self.server.clients.discard(self)
        self.server.reactor.forget(self.sock)
        self.sock.close()

    def _ready(self, readable: bool = True, writable: bool = False) -> None:
        if self not in self.server.clients:
            return
        try:
            self._send()
            # Until there is no more: a socket may hold bytes of which the kernel knows nothing.
            for _ in range(_AT_A_TIME):
                if self._unsent or not self._take():
                    break
            else:
                self.server.reactor.call_later(0.0, self._ready)
        except Exception as error:
            if not isinstance(error, OSError):  # it costs this client, and no other
                log.exception("the launcher's store hangs up on a client")
            self.close()

    def _send(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        if self._last and not self._unsent:
            raise ConnectionError
        self.server.reactor.watch(self.sock, self._ready, WRITE if self._unsent else READ)

    def _take(self) -> bool:
        """Answer the next request; return whether there was one. OSError if it was the last."""
        try:
            while (request := _cut(self._received, StoreRequest)) is None:
                data = self.sock.recv(1 << 16)
                if not data:
                    raise ConnectionError
                self._received += data
        except BlockingIOError:
            return False
        except ValueError as error:
            # Report the error, and hang up: later requests cannot be told apart.
            self._last = True
            self.reply(StoreReply(str(error)))
            return False
        if self.awaits is not None:
            self._wait_no_more()
            self.reply(StoreReply())
        if request.op == "end" or self not in self.server.clients:
            return self in self.server.clients
        reply = self.server.answer(request)
        if request.op == "wait" and reply.value is None:
            self.awaits = request.key
            self.server.waiting.setdefault(request.key, set()).add(self)
        else:
            self.reply(reply)
        return True

    def _wait_no_more(self) -> None:
        if self.awaits is not None:
            waiting = self.server.waiting.get(self.awaits, set())
            waiting.discard(self)
            if not waiting:
                self.server.waiting.pop(self.awaits, None)
            self.awaits = None


def listen_for_store(host: str, port: int) -> socket.socket:
    """Return a socket that listens for a store of `host`; port 0 is any free one.

    It listens on the interface of `host`. If `host` is a name that means loopback on this host
    alone, no other host could connect there: the socket listens on PHALANX_INTERFACE; without it on
    all interfaces, and the log says so. `OSError` when the address is taken or another host's.
    """
    own = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    both, means_loopback = False, is_loopback(own) and not is_loopback(host)
    if means_loopback and (chosen := address_on_interface()):
        own = chosen
    elif means_loopback:
        log.warning(
            "%s means %s on this host, so the launcher's store listens on all of its interfaces: "
            "give the address of the one that the other hosts use, instead of a name, or set "
            "PHALANX_INTERFACE",
            host,
            own,
        )
        own, both = "", socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in own else socket.AF_INET
    return socket.create_server((own, port), family=family, backlog=1024, dualstack_ipv6=both)


# ------------------------------------------------------------------------------
# Its clients.


class StoreClient:
    """A connection to the launcher's store, for one thread; it blocks, but handles signals.

    Every call may raise `BackendUnavailableError`, which names the store, the key, and the remedy.
    It waits for a reply for `patience` seconds.
    """

    patience = _PATIENCE

    def __init__(self, endpoint: Endpoint, sock: socket.socket, surplus: bytes) -> None:
        self._place = f"the launcher's store at {endpoint}"
        self._socket = sock
        self._received = bytearray(surplus)

    def close(self) -> None:
        self._socket.close()

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""
        return self._ask(StoreRequest("get", key)).value

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask(StoreRequest("set", key, value.encode() if isinstance(value, str) else value))

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set the value of a key that has `expected`, b"" for none; return its value then."""
        request = StoreRequest("compare_set", key, value, expected=expected)
        return self._ask(request).value or b""

    def add(self, key: str, amount: int) -> int:
        """Add to the number at a key, from 0; return the new one."""
        return self._ask(StoreRequest("add", key, number=amount)).number

    def _ask(self, request: StoreRequest) -> StoreReply:
        reply = self._exchange(request)
        if reply.error:
            raise BackendUnavailableError(f"{self._place} says: {plain(reply.error)}")
        return reply

    def wait(self, key: str, seconds: float) -> bytes | None:
        """Wait for the value of a key, and return it; None after `seconds`."""
        return self._exchange(StoreRequest("wait", key), seconds).value

    def _exchange(self, request: StoreRequest, seconds: float | None = None) -> StoreReply:
        try:
            self._send(request)
            try:
                patience = self.patience if seconds is None else seconds
                return self._reply(time.monotonic() + patience)
            except TimeoutError:
                if request.op != "wait":
                    raise
                self._send(StoreRequest("end"))
                return self._reply(time.monotonic() + self.patience)
        except OSError as error:
            self.close()
            raise BackendUnavailableError(
                f"{self._place} does not answer any more ({error}; key {request.key!r}): has the "
                "launcher that holds it ended, or is the network between down?"
            ) from error
        except BaseException:  # such as KeyboardInterrupt: the reply would be taken for another's
            self.close()
            raise

    def _send(self, request: StoreRequest) -> None:
        self._socket.settimeout(self.patience)
        self._socket.sendall(_pack(request))

    def _reply(self, deadline: float) -> StoreReply:
        """Return the next reply. OSError; TimeoutError at the deadline, after which it may come."""
        try:
            while (reply := _cut(self._received, StoreReply)) is None:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                data = self._socket.recv(1 << 16)
                if not data:
                    raise ConnectionError("it has hung up")
                self._received += data
        except ValueError as error:
            raise ConnectionError(str(error)) from None
        return reply


def connect_store(endpoint: Endpoint, token: str, deadline: float, *, job: str = "") -> StoreClient:
    """Return the launcher's store at `endpoint`; try until `deadline`.

    `deadline` is a time of the monotonic clock. When it has passed, the last try's failure is
    raised as `BackendUnavailableError`. `AuthenticationError` when the two do not hold the same
    token, or are of two jobs.
    """
    failure: OSError = TimeoutError("no answer")
    key, identity, patience = token.encode(), _identity(job, 1), _FIRST_WAIT
    tls = Tls(key)
    for left in tries(deadline):
        try:
            return StoreClient(endpoint, *call(endpoint, identity, key, tls, min(left, patience)))
        except OSError as error:
            if isinstance(error, TimeoutError):
                patience = min(2 * patience, _LAST_WAIT)
            failure = error
        except Refused as refusal:
            failure = ConnectionError(plain(refusal.reason))
            if refusal.final and not refusal.reason.endswith(_FULL):
                raise AuthenticationError(
                    f"the launcher's store at {endpoint} and this process are not of one job: "
                    f"{plain(refusal.reason)}"
                ) from None
    raise BackendUnavailableError(
        f"the launcher's store cannot be reached at {endpoint} ({failure}): is the launcher of "
        "node 0 running, and may this host connect to it?"
    ) from failure
