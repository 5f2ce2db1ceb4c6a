"""A job's folder over the network, for holders of the job's token; and the nodes of a job as one.

    phalanx watch --- reads ---> the folder of this host: its ranks, the others' addresses
         |----------- calls ---> node 1: its launcher, or its first rank
         `----------- calls ---> node 2

    watcher                              node
      | HELLO ... WELCOME (wire/handshake.py): both prove that they hold the token
      | <- one line of JSON, a `JobState`, twice a second, until either end closes

A node only listens: at `PHALANX_WATCH=host:port`, or at an address that the nodes of a job of
`phalanx run` tell each other. A thread lets callers in, by the rules of an `Acceptor`: a caller
without proof takes no watcher's place. Another thread serves each watcher: it touches the marker in
the folder, so that the ranks of this host publish, and sends their states. A watcher has 2 s to
take a line; there are `MOST_WATCHERS` at a time.

A watcher has a thread for each of the others, which calls again after the end of a connection. So a
node that is gone, or out of reach, does not delay the others: its ranks are shown as unreachable,
with the name of their node and the reason, as long as the others go on.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    DistributedError,
    MisuseError,
    plain,
)
from phalanx.launch.observer import NodePlace
from phalanx.launch.server import DoorServer, call
from phalanx.ops.observe.watch.folder import GONE, LINGER, PERIOD, VARIABLE, WatchFolder
from phalanx.ops.observe.watch.state import MOST_BYTES, JobState, RankState, read_state
from phalanx.transport.tcp.admission import MAKE_ONE, PATIENCE, find_token
from phalanx.transport.tcp.tls import Tls
from phalanx.wire.control import Endpoint, parse_address
from phalanx.wire.handshake import Identity, Refused

MOST_WATCHERS = 8  # at a time; more are turned away
_GOODBYE = 2 * PERIOD  # seconds that watchers have to take the last state
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
        deadline = time.monotonic() + _GOODBYE
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


# ------------------------------------------------------------------------------
# The watcher's end.

SILENCE = 3.0  # seconds without a word after which a node is out of reach
FIRST = 5.0  # seconds that a node has to say where it listens, and to answer
_AGAIN = 1.0  # seconds between two calls
_LAST_WORDS = 2.0  # seconds that the others have to say how their ranks ended

Read = Callable[[], "JobState | None"]  # asks for states, returns the latest; None: it is gone


class RemoteNode:
    """One node of a job, read by a thread as long as `read` is called."""

    def __init__(self, name: str, endpoint: Endpoint, token: bytes) -> None:
        self.name = name  # to be shown
        self.latest: JobState | None = None
        self.problem = ""  # why it is silent; "" if it is not, or was not called yet
        self.gone = False  # whether no process listens there any more
        self._endpoint, self._token = endpoint, token
        self._socket: socket.socket | None = None
        self._received = b""
        self._asked = 0.0
        self._thread: threading.Thread | None = None

    @property
    def over(self) -> bool:
        """Return whether it has reported the end of the job."""
        return self.latest is not None and bool(self.latest.ended)

    def read(self) -> JobState | None:
        """Return the latest state; None for none. Does not wait.

        If the node is silent, ranks that have not ended are unreachable.
        """
        self._asked = time.monotonic()
        if not self.over and (self._thread is None or not self._thread.is_alive()):
            name = f"phalanx watch {self.name}"
            self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
            self._thread.start()
        latest, problem = self.latest, self.problem
        if latest is None:
            return None
        ranks = [replace(state) for state in latest.ranks]
        for state in ranks:
            if problem and state.status not in ("dead", "ended"):
                state.status, state.reason = "unreachable", f"{self.name}: {problem}"
        return replace(latest, ranks=ranks)

    def take(self) -> None:
        """Wait for the next state, or for a `problem`; call the node if there is no connection.

        `BackendUnavailableError` if no process listens there, `AuthenticationError` if the two do
        not hold the same token.
        """
        if self._socket is None:
            self._connect()
        assert self._socket is not None
        try:
            while b"\n" not in self._received:
                data = self._socket.recv(1 << 16)
                if not data or len(self._received) > 2 * MOST_BYTES:
                    raise ConnectionError
                self._received += data
        except TimeoutError:
            self._hang_up(f"nothing has come from it for {SILENCE:g} s")
            return
        except OSError:
            self._hang_up("it has closed the connection")
            return
        lines, _, self._received = self._received.rpartition(b"\n")
        state = read_state(lines.rpartition(b"\n")[2])
        if state is None:
            self._hang_up("it says what is no state: is it another version of Phalanx?")
        else:
            self.latest, self.problem = state, ""

    def _connect(self) -> None:
        """Connect to the node. Raises as `take`."""
        where, token = self._endpoint, self._token
        try:
            self._socket, self._received = call(where, WATCHER, token, Tls(token), PATIENCE)
        except OSError as error:
            raise BackendUnavailableError(
                f"no job can be watched at {where} ({error}): is that what its {VARIABLE} says, "
                "does it run, and is it not stopped? Give a folder, or nothing, for a job of this "
                "host"
            ) from error
        except Refused as error:
            if error.by_peer:
                raise BackendUnavailableError(f"the job at {where} says: {error}") from error
            raise AuthenticationError(
                f"the job at {where} cannot be watched: {error}; the token comes from "
                "PHALANX_TOKEN or PHALANX_TOKEN_FILE"
            ) from error
        self._socket.settimeout(SILENCE)
        self.gone = False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _hang_up(self, problem: str) -> None:
        self.problem = problem
        self.close()

    def _follow(self) -> None:
        while not self.over and time.monotonic() < self._asked + LINGER:
            try:
                self.take()
            except DistributedError as error:
                self.gone = isinstance(error.__cause__, ConnectionRefusedError)
                self.problem = f"{self._endpoint} does not answer ({error.__cause__ or error})"
            time.sleep(_AGAIN if self.problem else PERIOD / 2)
        self.close()


def all_of(nodes: Sequence[RemoteNode]) -> Read:
    """Return a reader of the nodes of a job as one. When all are gone, the job is."""

    def read() -> JobState | None:
        parts = [part for node in nodes if (part := node.read()) is not None]
        over = all(node.gone or node.over for node in nodes)
        ended = [part.ended for part in parts if part.ended]
        if not parts or (over and not ended):
            return None
        job = max(parts, key=lambda part: part.generation)
        job.ranks = [state for part in parts for state in part.ranks]
        job.ended = ended[0] if over else ""
        return job

    return read


class WholeJob:
    """Reads a job on this host from its folder, and on its other nodes from their reports."""

    def __init__(self, folder: WatchFolder) -> None:
        self._folder = folder
        self._nodes: dict[int, RemoteNode] = {}
        self._began = time.monotonic()
        self._ended: float | None = None

    def __call__(self) -> JobState | None:
        job, others = self._here(), self._folder.others()
        if job is None or others is None:
            return job
        for place in others.nodes:
            if place.address and place.node not in self._nodes:
                endpoint = parse_address(place.address)
                self._nodes[place.node] = RemoteNode(str(place), endpoint, others.token.encode())
            job.ranks += self._ranks_at(place)
        if job.ended:  # the others say so at the same time
            now = time.monotonic()
            self._ended = now if self._ended is None else self._ended
            late = now > self._ended + _LAST_WORDS
            if not late and not all(node.over or node.problem for node in self._nodes.values()):
                job.ended = ""
        return job

    def _here(self) -> JobState | None:
        """Return the state of this host: its launcher reports the end of the job, if it has one."""
        folder = self._folder
        try:
            folder.touch()
        except OSError:
            return None
        state = folder.read()
        if state is None or state.ended:
            return state
        alive = [rank for rank in state.ranks if rank.status not in ("dead", "ended")]
        if folder.is_gone():
            state.ended = GONE
        elif not (folder.has_launcher() or alive):
            well = all(rank.status == "ended" for rank in state.ranks)
            state.ended = "its ranks have left it" if well else "its processes have gone"
        return state

    def _ranks_at(self, place: NodePlace) -> list[RankState]:
        """Return all ranks of a node, also those without a report."""
        node = self._nodes.get(place.node)
        latest = node.read() if node is not None else None
        known = {state.rank: state for state in latest.ranks} if latest is not None else {}
        problem = "it has not said where it listens" if node is None else node.problem
        if place.reason:
            problem = f"it cannot listen: {plain(place.reason)}"
        late = time.monotonic() > self._began + FIRST
        unreachable = late if node is None and not place.reason else bool(problem)
        return [
            known.get(rank)
            or RankState(
                rank=rank,
                host=plain(place.host),
                status="unreachable" if unreachable else "starting",
                reason=f"{place}: {problem}" if problem else "",
            )
            for rank in range(place.first_rank, place.first_rank + place.ranks)
        ]
