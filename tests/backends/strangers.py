"""Many unauthenticated callers: silent, half of a hello, nonsense, or a whole hello."""

from __future__ import annotations

import random
import selectors
import socket
import time
from contextlib import suppress

from phalanx.wire.handshake import DialerHandshake, Identity

HELLO = DialerHandshake(Identity("", 0, 1, 4), b"", 0).start()
TRICKLE = 0.2  # seconds between two bytes of one that says half of a hello


class Crowd:
    """So many connections of each kind to one address, all open when this returns.

    Those that say `hello` know the job, but not its token. `mingle()` lets them go on: the partial
    ones say another byte, and with `insistent` who was hung up on calls again.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        idle: int,
        partial: int,
        garbage: int,
        hello: int = 0,
        seed: int = 0,
        insistent: bool = False,
    ) -> None:
        self._address = address
        self._insistent = insistent
        self._random = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._said: dict[socket.socket, int] = {}
        self._next_byte = time.monotonic() + TRICKLE
        self.calls = 0
        self.hung_up = 0
        self.size = idle + partial + garbage + hello
        kinds = [
            *["idle"] * idle,
            *["partial"] * partial,
            *["garbage"] * garbage,
            *["hello"] * hello,
        ]
        self._random.shuffle(kinds)
        for kind in kinds:
            self._call(kind)

    def mingle(self, seconds: float) -> None:
        """Go on for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, 0.05)):
                self._hear(key.fileobj, key.data)  # type: ignore[arg-type]
            if time.monotonic() >= self._next_byte:
                self._next_byte += TRICKLE
                self._trickle()

    def left(self) -> int:
        """How many the acceptor has not hung up on, and who would not be told if they spoke."""
        self._insistent = False
        for key in list(self._selector.get_map().values()):
            # The kernel forgets without a word who was not in the queue yet when it was closed.
            with suppress(OSError):
                key.fileobj.send(b"\0")  # type: ignore[union-attr]
        end = time.monotonic() + 5.0
        while self._selector.get_map() and time.monotonic() < end:
            self.mingle(0.02)
        return len(self._selector.get_map())

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _call(self, kind: str) -> None:
        sock = socket.socket(socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET)
        try:
            sock.settimeout(5.0)
            sock.connect(self._address)
            sock.setblocking(False)
            if kind == "partial":
                sock.send(HELLO[:20])
                self._said[sock] = 20
            elif kind == "hello":
                sock.send(HELLO)
            elif kind == "garbage":
                sock.send(self._random.randbytes(1 + self._random.randrange(2000)))
        except OSError:
            sock.close()
            return
        self.calls += 1
        self._selector.register(sock, selectors.EVENT_READ, kind)

    def _hear(self, sock: socket.socket, kind: str) -> None:
        try:
            if sock.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.hung_up += 1
        self._selector.unregister(sock)
        self._said.pop(sock, None)
        sock.close()
        if self._insistent:
            self._call(kind)

    def _trickle(self) -> None:
        for sock, said in list(self._said.items()):
            if said < len(HELLO) - 1:
                with suppress(OSError):
                    sock.send(HELLO[said : said + 1])
                self._said[sock] = said + 1
