"""A job's folder over the network, for who holds the job's token: `PHALANX_WATCH=host:port`, and
between the nodes of a job of `phalanx run`.

    watcher                              node: its launcher, or its first rank
      | HELLO ... WELCOME (wire/handshake.py): both prove that they hold the token
      | <- one line of JSON, a `JobState`, twice a second, until either end closes

The node only listens. A thread lets callers in, by the rules of an `Acceptor`: whoever proves
nothing takes no watcher's place. Another thread serves each watcher: it touches the marker in the
folder, so that the ranks of this host publish, and sends what stands there. A watcher has 2 s to
take a line; there are `MOST_WATCHERS` at a time.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import suppress

import msgspec
from typing_extensions import override

from phalanx.errors import AuthenticationError, BackendUnavailableError, MisuseError, plain
from phalanx.launch.server import DoorServer, call
from phalanx.ops.observe.watch.folder import PERIOD, VARIABLE, WatchFolder
from phalanx.ops.observe.watch.state import MOST_BYTES, JobState, bounded
from phalanx.transport.tcp.admission import MAKE_ONE, PATIENCE, find_token
from phalanx.transport.tcp.tls import Tls
from phalanx.wire.control import Endpoint, learned, parse_address
from phalanx.wire.handshake import Identity, Refused

MOST_WATCHERS = 8  # at a time; more are turned away
_LAST_WORDS = 2 * PERIOD  # seconds that watchers have to take the last state
_NODE, _WATCHER = (Identity("phalanx watch", 0, rank, 2) for rank in (0, 1))


def as_address(place: str) -> Endpoint | None:
    """Return the address that `place` is; None where it is a folder."""
    if re.fullmatch(r"[^/]+:[0-9]+", place) is None:
        return None
    try:
        return parse_address(place)
    except ValueError as error:
        raise MisuseError(f"{VARIABLE}={place}: {error}") from None


def token_for_watchers(place: str) -> bytes:
    """Return the job's token. `MisuseError` where the environment has none: who else may look?"""
    token = find_token()
    if not token:
        raise MisuseError(
            f"{place}: over the network only who holds the job's token may look, and there is "
            "none: set PHALANX_TOKEN or PHALANX_TOKEN_FILE for the job and for phalanx watch; "
            f"make a token with {MAKE_ONE}"
        )
    return token.encode()


class WatchServer(DoorServer):
    """Serves the folder of a job to watchers on other hosts, who call this listener.

    Who is connected is served as long as this process lives, also when it has been closed.
    """

    label, callers = "the watched node", MOST_WATCHERS

    def __init__(self, folder: WatchFolder, listener: socket.socket, token: bytes) -> None:
        self._folder = folder
        self._serving: list[threading.Thread] = []  # one for each watcher
        super().__init__(listener, token, _NODE)

    def finish(self) -> None:
        """Listen no more, and wait until the watchers have the last state, a moment at most."""
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


class RemoteFolder:
    """A watcher's connection to one node. `read()` returns the latest state that has come.

    heard   when something has come last, on the monotonic clock

    `BackendUnavailableError` when nobody listens there, `AuthenticationError` when the two do not
    hold the same token.
    """

    def __init__(self, endpoint: Endpoint, token: bytes) -> None:
        self._latest: JobState | None = None
        self.heard = time.monotonic()
        try:
            self._socket, surplus = call(endpoint, _WATCHER, token, Tls(token), PATIENCE)
        except OSError as error:
            raise BackendUnavailableError(
                f"no job can be watched at {endpoint} ({error}): is that what its {VARIABLE} says, "
                "does it run, and is it not stopped? Give a folder, or nothing, for a job of this "
                "host"
            ) from error
        except Refused as error:
            if error.by_peer:
                raise BackendUnavailableError(f"the job at {endpoint} says: {error}") from error
            raise AuthenticationError(
                f"the job at {endpoint} cannot be watched: {error}; the token comes from "
                "PHALANX_TOKEN or PHALANX_TOKEN_FILE"
            ) from error
        self._received = bytearray(surplus)

    def read(self) -> JobState | None:
        """Return the latest state; None when the node has closed the connection."""
        try:
            self._socket.settimeout(PATIENCE if self._latest is None else 0.0)
            while b"\n" not in self._received:
                self._take()
            self._socket.settimeout(0.0)
            while True:
                self._take()
        except BlockingIOError:
            pass
        except OSError:  # the node has gone, or says nothing; what it has said last still counts
            if b"\n" not in self._received:
                self.close()
                return None
        lines, newline, rest = self._received.rpartition(b"\n")
        if newline:
            try:
                state = msgspec.json.decode(lines.rpartition(b"\n")[2], type=learned(JobState))
            except msgspec.MsgspecError:
                return None
            self._received = rest
            state.ranks = [bounded(rank) for rank in state.ranks]
            state.name, state.ended = plain(state.name), plain(state.ended)
            self._latest = state
        return self._latest

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _take(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data or len(self._received) > 2 * MOST_BYTES:
            raise ConnectionError
        self._received += data
        self.heard = time.monotonic()
