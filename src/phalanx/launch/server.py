"""A server beside the mesh: the store (store.py), and that of watchers (`ops/observe/watch`).

caller --> Acceptor (transport/tcp/admission.py) --> link_opened: a client that is in
           \\_______________ one thread, from the constructor until close() _______________/
"""

from __future__ import annotations

import errno
import logging
import socket
import threading

from phalanx.transport.tcp.admission import Acceptor, Door, speak
from phalanx.transport.tcp.loop import LONGEST_SLEEP, Reactor
from phalanx.transport.tcp.tls import Tls
from phalanx.wire.control import Endpoint
from phalanx.wire.handshake import DialerHandshake, Identity, Refused

log = logging.getLogger("phalanx")


class DoorServer(Door):
    """A `Door`, and the thread that lets callers in.

    listener   the socket that clients call; the server's from now on
    token      that they have to hold; b"": only this host is let in
    lock       held during every call; the thread does not hold it while it waits

    An error inside costs the callers that have not proved themselves yet, and a line in the log;
    the port stays open. A subclass sets its attributes before it calls this constructor.
    """

    def __init__(self, listener: socket.socket, token: bytes, identity: Identity) -> None:
        self.token, self.identity = token, identity
        self.tls = Tls(token)
        self.reactor = Reactor()
        self.lock = threading.RLock()
        self.endpoint = Endpoint(*listener.getsockname()[:2])
        self._acceptor = Acceptor(self, listener)
        self._thread = threading.Thread(
            target=self._run, name=f"phalanx: {self.label}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Listen no more. May be repeated."""
        with self.lock:
            self._acceptor.close()
            self.reactor.wake()
        self._thread.join()
        self.reactor.close()

    def _run(self) -> None:
        with self.lock:
            while not self._acceptor.closed:
                try:
                    self.reactor.turn(LONGEST_SLEEP, self.lock)
                except Exception as error:
                    log.debug("%s: an error inside", self.label, exc_info=True)
                    self._acceptor.begin_again(error)


def call(
    endpoint: Endpoint, identity: Identity, token: bytes, tls: Tls, seconds: float
) -> tuple[socket.socket, bytes]:
    """Return a connection to a server that has let this process in, and the bytes behind that.

    Blocks for at most `timeout` seconds until it is connected, and until it is in; they become the
    socket's timeout. Raises `Refused`, or OSError (TimeoutError when the other side is silent).
    """
    sock = socket.create_connection(endpoint, seconds)
    handshake = DialerHandshake(identity, token, 0, tls.offer(sock))
    try:
        return speak(sock, handshake, handshake.start(), seconds, tls), handshake.surplus
    except OSError as error:
        if error.errno == errno.EBADMSG:  # TLS does not come about
            raise Refused(str(error.strerror)) from None
        raise
