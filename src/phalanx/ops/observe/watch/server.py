"""A job's folder over the network, for holders of the job's token.

It serves `PHALANX_WATCH=host:port`, and the nodes of a job of `phalanx run`.

    watcher                              node: its launcher, or its first rank
      | HELLO ... WELCOME (wire/handshake.py): both prove that they hold the token
      | <- one line of JSON, a `JobState`, twice a second, until either end closes

The node only listens. A thread lets callers in, by the rules of an `Acceptor`: a caller without
proof takes no watcher's place. Another thread serves each watcher: it touches the marker in the
folder, so that the ranks of this host publish, and sends their states. A watcher has 2 s to
take a line; there are `MOST_WATCHERS` at a time. The caller is nodes.py.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import suppress

import msgspec
from typing_extensions import override

from phalanx.errors import MisuseError
from phalanx.launch.server import DoorServer
from phalanx.ops.observe.watch.folder import PERIOD, VARIABLE, WatchFolder
from phalanx.transport.tcp.admission import MAKE_ONE, PATIENCE, find_token
from phalanx.wire.control import Endpoint, parse_address
from phalanx.wire.handshake import Identity

MOST_WATCHERS = 8  # at a time; more are turned away
_LAST_WORDS = 2 * PERIOD  # seconds that watchers have to take the last state
NODE, WATCHER = (Identity("phalanx watch", 0, rank, 2) for rank in (0, 1))


def as_address(place: str) -> Endpoint | None:
    """Return the address in `place`; None if it is a folder."""
    if re.fullmatch(r"[^/]+:[0-9]+", place) is None:
        return None
    try:
        return parse_address(place)
    except ValueError as error:
        raise MisuseError(f"{VARIABLE}={place}: {error}") from None


def token_for_watchers(place: str) -> bytes:
    """Return the job's token. `MisuseError` if the environment has none: anyone could watch."""
    token = find_token()
    if not token:
        raise MisuseError(
            f"{place}: over the network only who holds the job's token may look, and there is "
            "none: set PHALANX_TOKEN or PHALANX_TOKEN_FILE for the job and for phalanx watch; "
            f"make a token with {MAKE_ONE}"
        )
    return token.encode()


class WatchServer(DoorServer):
    """Serves the folder of a job to watchers on other hosts, which call this listener.

    Connected watchers are served as long as this process lives, also after `close`.
    """

    label, callers = "the watched node", MOST_WATCHERS

    def __init__(self, folder: WatchFolder, listener: socket.socket, token: bytes) -> None:
        self._folder = folder
        self._serving: list[threading.Thread] = []  # one for each watcher
        super().__init__(listener, token, NODE)

    def finish(self) -> None:
        """Listen no more, and wait at most a moment until the watchers have the last state."""
        self.close()
        deadline = time.monotonic() + _LAST_WORDS
        for thread in self._serving:
            thread.join(max(deadline - time.monotonic(), 0.0))

    @override
    def admit(self, peer: int) -> str | None:
        self._serving = [thread for thread in self._serving if thread.is_alive()]
        if len(self._serving) < MOST_WATCHERS:
            return None
        return f"{MOST_WATCHERS} watch this job already: try again when one of them has left"

    @override
    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        name = "phalanx watch server"
        thread = threading.Thread(target=self._serve, args=(sock,), name=name, daemon=True)
        thread.start()
        self._serving.append(thread)

    def _serve(self, watcher: socket.socket) -> None:
        watcher.settimeout(PATIENCE)
        with watcher, suppress(OSError):
            while True:
                self._folder.touch()
                state = self._folder.read()
                if state is not None:
                    watcher.sendall(msgspec.json.encode(state) + b"\n")
                if state is None or state.ended:
                    return
                time.sleep(PERIOD)


def serve(folder: WatchFolder, endpoint: Endpoint) -> WatchServer:
    """Return a server of `folder` at that address. `MisuseError`: no token, or it is in use."""
    token = token_for_watchers(f"{VARIABLE}={endpoint}")
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        return WatchServer(folder, socket.create_server(tuple(endpoint), family=family), token)
    except OSError as error:
        raise MisuseError(
            f"{VARIABLE}={endpoint}: nobody can listen there ({error}): give an address of this "
            "host (0.0.0.0 for all of them), and a free port, one for each job"
        ) from error
