"""The door: who calls this rank, before the call counts.

A caller is a stranger until the handshake is complete. Until then it may cost

    memory       1 KiB in this process: its socket, its place in the tables, one message of the
                 handshake (not the kernel's own buffers, which the kernel bounds)
    time         2 s of this rank's attention, however busily it talks
    a place      of 128, and one for each rank; the oldest of those that have said the least gives
                 way to the next caller, also when there is no file descriptor left
    a log line   of ten in full, then only a count

Nobody's name is looked up. An honest rank that has to give way calls again (`dial.py`).
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.backends.tcp.address import BACKLOG
from phalanx.backends.tcp.rejections import Rejections
from phalanx.backends.tcp.unproved import HUNG_UP, Unproved
from phalanx.wire.address import is_loopback
from phalanx.wire.handshake import ROOM, AcceptorHandshake, Refused

if TYPE_CHECKING:
    from phalanx.backends.tcp.mesh import Mesh

log = logging.getLogger("phalanx")

PATIENCE = 2.0  # seconds of attention that a caller gets to prove itself
TICK = 0.1  # seconds between looks at who has had them
TICKS = round(PATIENCE / TICK)
PLACES = 128  # callers that may be in their handshake at a time, beside one for each rank
CALLS_AT_A_TIME = 32  # a part of the places, so that who stands there is heard before it gives way
REST = 0.1  # seconds without a look at the door when there is nothing to accept a call with

_OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Linux tells in accept() what has befallen the connection that would have been accepted.
_OF_THE_CALLER = frozenset(
    {
        errno.ECONNABORTED,
        errno.ENETDOWN,
        errno.EPROTO,
        errno.ENOPROTOOPT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EOPNOTSUPP,
        errno.ENETUNREACH,
        errno.EPERM,
        getattr(errno, "ENONET", errno.ENETDOWN),
    }
)


class Door:
    """A listener: every caller becomes a `Knock`. Opened to form the group, then closed.

    All methods are called with the engine's lock held; none blocks.
    """

    def __init__(self, mesh: Mesh, listener: socket.socket) -> None:
        self.mesh = mesh
        self.listener = listener
        self.knocks: dict[Knock, None] = {}  # in the order in which they came
        self.places = PLACES + mesh.world_size
        self.rejections = Rejections(mesh)
        self.admit = mesh.admit  # one bound method for all knocks
        self.now = 0  # ticks that this rank has seen: it may be away, and they have to wait then
        self._ticking = False
        self._open = True
        listener.setblocking(False)
        with suppress(OSError):
            listener.listen(BACKLOG)  # strangers must not keep ranks from the queue
        mesh.reactor.watch(listener, self._on_ready)

    def close(self) -> None:
        """Listen no more, and send away whoever has not finished."""
        self._open = False
        self.mesh.reactor.forget(self.listener)
        self.listener.close()
        for knock in list(self.knocks):
            self.drop(knock)
        self.rejections.total()

    def drop(self, knock: Knock) -> None:
        """Hang up on a caller."""
        self.knocks.pop(knock, None)
        knock.hang_up()

    def _on_ready(self, readable: bool, writable: bool) -> None:
        for _ in range(CALLS_AT_A_TIME):
            try:
                sock, address = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OF_THE_CALLER:
                    continue
                if error.errno in _OUT_OF and self.knocks:
                    # A few more than one: this rank needs some for its own calls.
                    self.places = 3 * len(self.knocks) // 4
                    self._make_room(self.places)
                    continue
                self._rest(error)
                return
            self._let_knock(sock, str(address[0]))

    def _let_knock(self, sock: socket.socket, host: str) -> None:
        if self.mesh.loopback_only and not is_loopback(host):
            sock.close()
            reason = "without a token (PHALANX_TOKEN) only this host is let in"
            self.rejections.add(f"{host}: {reason}", rank=None)
            return
        self._make_room(max(self.places - 1, 0))
        knock = Knock(self, sock, host)
        self.knocks[knock] = None
        knock.hear()  # now, that it does not look silent to the one behind it
        if not self._ticking:
            self._ticking = True
            self.mesh.reactor.call_later(TICK, self._tick)

    def _make_room(self, most: int) -> None:
        """Hang up on some, until there are `most`."""
        while len(self.knocks) > most:
            silent = (knock for knock in self.knocks if not knock.standing)
            knock = next(silent, None) or min(self.knocks, key=lambda knock: knock.standing)
            knock.turn_away("had to give way to other callers before it had proved itself")

    def _tick(self) -> None:
        # Those who have spoken were heard before: sockets come before timers in every turn. And
        # a rank that was away for long finds one tick more, not many.
        self.now += 1
        for knock in list(self.knocks):
            if knock.born + TICKS > self.now:
                break
            did = "did not prove itself" if knock.standing else "was silent"
            knock.turn_away(f"{did} for {PATIENCE:g} s")
        self._ticking = bool(self.knocks)
        if self._ticking:
            self.mesh.reactor.call_later(TICK, self._tick)

    def _rest(self, error: OSError) -> None:
        """Nobody can be let in just now, and nobody can be sent away: not a reason to spin."""
        reason = f"{error.strerror or error}"
        if error.errno in _OUT_OF:
            reason += "; this process may need more (ulimit -n)"
        self.rejections.add(f"a caller, whom it could not accept: {reason}", rank=None)
        self.mesh.reactor.forget(self.listener)
        self.mesh.reactor.call_later(REST, self._look_again)

    def _look_again(self) -> None:
        if self._open:
            self.mesh.reactor.watch(self.listener, self._on_ready)


class Knock(Unproved):
    """A caller at the door. `standing`: 0 it is silent, 1 it speaks, 2 it was challenged."""

    __slots__ = ("born", "door", "host", "standing")

    def __init__(self, door: Door, sock: socket.socket, host: str) -> None:
        super().__init__(door.mesh, sock)
        self.door = door
        self.host = host
        self.born = door.now
        self.standing = 0
        self.mesh.reactor.watch(sock, self._on_ready)

    def hear(self) -> None:
        """Take what the caller has said, if it has, and answer."""
        try:
            data = self.read(self.handshake.room if self.standing else ROOM)
            if data is None:
                return
            self._answer(data)
        except Refused as refusal:
            if refusal.reason == HUNG_UP:  # no line in the log: port scanners do it all the time
                self.door.drop(self)
                return
            self.say_farewell()
            self.turn_away(refusal.reason)

    def turn_away(self, reason: str) -> None:
        """Hang up, without a word, and log it."""
        rank = self.handshake.peer if self.standing else None
        who = self.host if rank is None else f"{self.host}, as rank {rank}"
        self.door.rejections.add(f"{who}: {reason}", rank=rank)
        self.door.drop(self)

    def _on_ready(self, readable: bool, writable: bool) -> None:
        self.hear()

    def _answer(self, data: bytes) -> None:
        mesh = self.mesh
        if not self.standing:  # most that are silent stay so: they cost no handshake
            self.handshake = AcceptorHandshake(mesh.identity, mesh.token, self.door.admit)
            self.standing = 1
        self.send(self.handshake.receive(data))
        if self.handshake.peer is not None:
            self.standing = 2
        if self.handshake.complete:
            self.door.knocks.pop(self, None)
            self.open()
