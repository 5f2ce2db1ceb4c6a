"""The launcher's store: the small table through which ranks find each other (torch's TCPStore).

What the nodes of a job tell each other goes through it, too; the launcher of node 0 holds it:

    node 0                                     node 1
    holds the store (--master) <-------------- connects to it
    joins: "node 0 has 4 ranks"                joins: "node 1 has 4 ranks"
        \\------------- every node knows its ranks and the world size ------------/
    ranks of generation 0                      ranks of generation 0
    log of generation 0: "node 1: rank 5 failed (...)"   <---- a rank fails here
    stops its ranks                            stops its ranks
    log of generation 0: "node 0: stopped"
        \\------- all nodes have written: the same log, the same decision --------/
    ranks of generation 1, or the end          ranks of generation 1, or the end

Every node writes one entry a generation: how it ended there. When somebody watches the job on a
node, that one leaves word of it; then all write where they can be watched (watch_node.py).

Calls of torch's store wait without hearing signals. So a thread makes them, while the launcher
watches its ranks. A job of one node needs the store for its ranks alone, and agrees with itself.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from phalanx.errors import BackendUnavailableError, DistributedError, MisuseError
from phalanx.launch.reaper import Reaper, die_with_parent
from phalanx.launch.report import (
    AGAIN,
    RankExit,
    describe_exit_code,
    describe_failure,
    root_cause,
)
from phalanx.launch.state import NodePlace, OtherNodes
from phalanx.launch.watch_server import token_between_nodes
from phalanx.transport.tcp.addresses import address_on_interface
from phalanx.wire.control import Endpoint, is_loopback, parse_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

log = logging.getLogger("phalanx")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1  # seconds between two tries


def tries(deadline: float) -> Iterator[float]:
    """Yield the seconds left until `deadline` (of the monotonic clock), for each try until then.

    The pauses between them become longer. What another process has to do first is tried in this
    way, because a wait inside torch's store hears no signal.
    """
    pause = _FIRST_PAUSE
    while True:
        yield max(deadline - time.monotonic(), pause)
        if time.monotonic() + pause > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def listen_for_store(host: str, port: int) -> socket.socket:
    """Return a socket that listens where a store of `host` belongs; port 0 is any free one.

    That is the one interface of `host`. Where `host` is a name that means loopback on this host
    alone, no other host could connect there: the socket listens on PHALANX_INTERFACE; without it
    on all interfaces, and the log says so. `OSError` when the address is taken or another host's.
    """
    own = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    means_loopback = is_loopback(own) and not is_loopback(host)
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
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        own = ""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    return socket.create_server((own, port), family=family, backlog=1024)


def hold_store(
    host: str, port: int, *, timeout: float, listener: socket.socket | None = None
) -> TCPStore:
    """Return a store that this process holds at `host:port`; its `port` is the one it has got.

    `timeout` is in seconds. A `listener` that is given is the store's from now on; see
    `listen_for_store` for the one that is made else, and for the errors.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    if listener is None:
        listener = listen_for_store(host, port)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


SERVE_STORE = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    "from phalanx.launch.store import serve_alone; serve_alone(*map(int, sys.argv[1:]))"
)
"""What Python runs as the process of a store; its arguments are those of `serve_alone`."""


def serve_alone(parent: int, listener: int) -> None:
    """Hold a store in this process, at the socket of this descriptor, as long as `parent` lives."""
    die_with_parent(parent)
    _store = hold_store("127.0.0.1", 0, timeout=60.0, listener=socket.socket(fileno=listener))
    threading.Event().wait()


def connect_store(host: str, port: int, deadline: float) -> TCPStore:
    """Return the launcher's store at `host:port`; tries again until `deadline`.

    `deadline` is a time of the monotonic clock. When it has passed this raises why the last try
    failed: an `OSError`, or torch's `RuntimeError`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    failure: Exception = TimeoutError()
    for left in tries(deadline):
        try:
            # A plain socket says soon and in words what the store's own client says at length.
            socket.create_connection((host, port), left).close()
            seconds = timedelta(seconds=max(left, 1.0))
            return TCPStore(host, port, is_master=False, timeout=seconds, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            failure = error
    raise failure


# ------------------------------------------------------------------------------
# The nodes of a job.

PATIENCE = 300  # seconds to wait for a node that does not join, or does not answer any more
_POLL = 0.1
_LOOK_EVERY = 5  # polls between two looks whether somebody watches on another node
_SETTLE = 10.0  # seconds that nodes have to stop their ranks, and to write that they have
_LAST_WORDS = 5.0  # seconds that node 0 keeps the store for nodes that have not read its end

_WHY_NOT: Mapping[int, str] = {
    errno.EADDRINUSE: "the port is in use, perhaps by another job or one that has not ended: "
    "end it, or give --master another port, on every node",
    errno.EADDRNOTAVAIL: "that is no address of this host: start --node-rank 0 on the host "
    "that --master names",
    errno.EACCES: "ports below 1024 are the system's: give --master another port, on every node",
}


class NodeExit(msgspec.Struct, frozen=True):
    """How one generation of ranks ended on one node."""

    node: int
    failed: bool
    summary: str = ""  # the first failure of a rank; "" where ranks were only stopped
    follows: bool = False  # whether the failure of another rank led to it
    code: int = 0  # the exit code of the launcher for this failure; 75 where ranks left with it
    final: bool = False  # whether the job ends with it, whatever restarts are left

    @classmethod
    def of_ranks(cls, node: int, exits: list[RankExit]) -> NodeExit:
        """Return how the generation whose ranks ended so has ended on `node`."""
        root = root_cause(exits)
        if root is None:
            left = any(one.code == AGAIN for one in exits)
            return cls(node, failed=False, code=AGAIN if left else 0)
        return cls(node, True, describe_failure(root, brief=True), root.follows, root.shell_code)


class Nodes:
    """This node's part in a job; `close()` it at the end.

    `placement` is the first rank of this node and the world size; None until all nodes have joined.
    `watched` is to be set when somebody watches on this node; `listen(endpoint, token, ranks)` has
    to return then where this node can be watched, or raise why it cannot.
    With several nodes a thread sets the attributes. With one the store is a process of its own:
    the launcher does not import torch, which takes seconds and holds up every thread meanwhile.
    """

    def __init__(
        self,
        reaper: Reaper,
        *,
        ranks: int,
        nodes: int = 1,
        node_rank: int = 0,
        max_restarts: int = 0,
        master: str = "",
        listen: Callable[[Endpoint, str, int], str] | None = None,
    ) -> None:
        self.watched = threading.Event()
        self._listen_for_watchers = listen
        self._token = ""  # of those who watch, when somebody does
        self._places: dict[int, NodePlace] = {}
        self._nodes, self._node_rank = nodes, node_rank
        self._ranks, self._options = ranks, [nodes, max_restarts]
        self.endpoint = parse_address(master) if nodes > 1 else Endpoint("127.0.0.1", 0)
        self.placement: tuple[int, int] | None = None
        self._ending = False  # whether a job that this node was in before holds the store
        # Nodes that have not joined, as far as this one knows.
        self._missing = {0} if node_rank else set(range(nodes))
        self._error: Exception | None = None
        self._log: list[NodeExit] = []  # so many of each generation as there are nodes
        self._unwritten: list[NodeExit] = []
        self._written = math.inf
        self._closing = threading.Event()
        self._reaper = reaper
        self._process: subprocess.Popen[bytes] | None = None
        if nodes > 1:
            self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
            self._thread.start()
            return
        self.placement = 0, ranks
        with self._listen(time.monotonic()) as listener:
            self.endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE_STORE, str(os.getpid()), str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        reaper.hold(self._process.pid)

    def awaited(self) -> str:
        """Return what this node waits for before it can begin, and how long."""
        names = ", ".join(map(str, sorted(self._missing - {self._node_rank})))
        trouble = ""
        try:
            socket.getaddrinfo(*self.endpoint)
        except OSError as error:
            trouble = f"; the host name cannot be resolved here: {error.strerror}"
        if self._ending:
            trouble = "; it waits for the job that it was in before to end there"
        return (
            f"node {self._node_rank} of {self._nodes} waits for node {names} to meet at "
            f"{self.endpoint}, for {PATIENCE} s at most{trouble}"
        )

    def check(self) -> None:
        """Raise why this node cannot go on, if it cannot."""
        if self._error is not None:
            raise self._error
        if self._process is not None and (code := self._process.poll()) is not None:
            raise BackendUnavailableError(
                f"the launcher's store has ended ({describe_exit_code(code)}): can Python import "
                "torch here, and is there memory left?"
            )

    def others(self) -> OtherNodes | None:
        """Return where the other nodes can be watched, as far as they have said; None: not yet."""
        if not self._token:
            return None
        nodes = [place for place in self._places.values() if place.node != self._node_rank]
        return OtherNodes(token=self._token, nodes=nodes)

    def write(self, ended: NodeExit) -> None:
        """Tell all nodes how the next generation has ended on this one."""
        self._written = time.monotonic()
        (self._log if self._nodes == 1 else self._unwritten).append(ended)

    def failed(self, generation: int) -> bool:
        """Return whether a node has written that the generation has failed."""
        return any(one.failed for one in self._written_of(generation))

    def outcome(self, generation: int) -> list[NodeExit] | None:
        """Return how a generation ended on each node, in the order of writing; None: not yet.

        The others have some time from when this node has written: `_SETTLE` seconds after a
        failure, after which the job ends, and else `PATIENCE`.
        """
        log = self._written_of(generation)
        missing = sorted(set(range(self._nodes)) - {one.node for one in log})
        waited = time.monotonic() - self._written
        if not missing or any(one.final for one in log):
            return log
        if not self.failed(generation):
            return log if waited > PATIENCE else None
        if waited < _SETTLE:
            return None
        summary = f"its launcher has not answered for {_SETTLE:g} s"
        return [*log, *(NodeExit(node, True, summary, True, 1, final=True) for node in missing)]

    def close(self, seconds: float) -> bool:
        """Leave the job; return whether the thread has ended, for which this waits so long."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reaper.release(self._process.pid)
            return True
        self._closing.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _written_of(self, generation: int) -> list[NodeExit]:
        return self._log[generation * self._nodes : (generation + 1) * self._nodes]

    def _listen(self, deadline: float) -> socket.socket:
        """Return node 0's listener. Its name may not be known yet, as a pod's: tries again."""
        failure = OSError()
        for _ in tries(deadline):
            try:
                return listen_for_store(*self.endpoint)
            except OSError as error:
                failure = error
            if not isinstance(failure, socket.gaierror) or self._closing.is_set():
                break
        why = f"{failure}: give --master a name and a port of node 0"
        raise BackendUnavailableError(
            f"node 0 cannot listen at {self.endpoint}: {_WHY_NOT.get(failure.errno or 0, why)}"
        ) from failure

    def _run(self) -> None:
        try:
            deadline = time.monotonic() + PATIENCE
            if self._node_rank == 0:
                listener = self._listen(deadline)
                store = hold_store(*self.endpoint, timeout=PATIENCE, listener=listener)
            else:
                store = self._find_store(deadline)
            self.placement = self._join(store, deadline)
            self._exchange(store)
        except DistributedError as error:
            self._error = error
        except Exception as error:
            self._error = BackendUnavailableError(
                f"the launcher of node 0 at {self.endpoint} does not answer any more ({error}): "
                "has it been ended, or is the network between down?"
            )
            self._error.__cause__ = error

    def _alone(self, why: str) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"node {self._node_rank} of {self._nodes} did not meet the others at {self.endpoint}: "
            "are all of them started with the same --master, and may they connect to it? "
            f"({why})"
        )

    def _find_store(self, deadline: float) -> TCPStore:
        """Return the store of node 0, not the one of a job that this node was in and that ends.

        Who starts nodes again, as Kubernetes does, may be sooner than node 0's last words.
        """
        while True:
            try:
                store = connect_store(*self.endpoint, deadline)
                if store.add(f"phalanx/launchers/{self._node_rank}", 1) == 1:
                    return store
                self._ending = store.check(["phalanx/log/0/1"])
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline or self._closing.is_set():
                    raise self._alone(str(error)) from error
                continue
            if not self._ending:
                raise MisuseError(
                    f"another launcher of this job has --node-rank {self._node_rank}, too: give "
                    "each node a number of its own"
                )
            if time.monotonic() > deadline or self._closing.wait(_POLL):
                raise self._alone("the job that it was in before has not ended")

    def _join(self, store: TCPStore, deadline: float) -> tuple[int, int]:
        """Wait for all nodes; return the `placement`."""
        node, nodes = self._node_rank, self._nodes
        own = msgspec.json.encode([self._ranks, self._options, socket.gethostname()])
        store.set(f"phalanx/node/{node}", own.decode())
        joined: dict[int, tuple[int, list[int], str]] = {}
        while missing := set(range(nodes)) - joined.keys():
            for other in missing:
                if store.check([key := f"phalanx/node/{other}"]):
                    data = store.get(key)
                    joined[other] = msgspec.json.decode(data, type=tuple[int, list[int], str])
                    _, theirs, _ = joined[other]
                    if theirs != self._options:
                        raise MisuseError(
                            f"node {other} was started with --nnodes, --max-restarts {theirs}, "
                            f"node {node} with {self._options}: give all nodes the same"
                        )
            self._missing = missing - joined.keys()
            if time.monotonic() > deadline or self._closing.wait(_POLL):
                names = ", ".join(map(str, sorted(missing)))
                raise self._alone(f"missing after {PATIENCE} s: node {names}")
        first_rank = 0
        for other in range(nodes):
            ranks, _, host = joined[other]
            self._places[other] = NodePlace(
                node=other, host=host, first_rank=first_rank, ranks=ranks
            )
            first_rank += ranks
        return self._places[node].first_rank, first_rank

    def _exchange(self, store: TCPStore) -> None:
        """Write what there is to write, and read the log, until `close()`."""
        written = polls = 0
        while not self._closing.wait(_POLL) or self._unwritten:
            while self._unwritten:
                value = msgspec.json.encode(self._unwritten.pop(0)).decode()
                number = store.add(f"phalanx/log/{written}", 1)
                store.set(f"phalanx/log/{written}/{number}", value)
                written += 1
            while True:
                generation, number = divmod(len(self._log), self._nodes)
                if not store.check([key := f"phalanx/log/{generation}/{number + 1}"]):
                    break
                self._log.append(msgspec.json.decode(store.get(key), type=NodeExit))
            polls += 1
            if self._listen_for_watchers is not None and (
                self.watched.is_set() or polls % _LOOK_EVERY == 0
            ):
                self._meet_watchers(store, self._listen_for_watchers)
        ended_nodes = store.add("phalanx/ended", 1)
        deadline = time.monotonic() + _LAST_WORDS
        while self._node_rank == 0 and ended_nodes < self._nodes and time.monotonic() < deadline:
            time.sleep(_POLL)
            ended_nodes = store.add("phalanx/ended", 0)

    def _meet_watchers(self, store: TCPStore, listen: Callable[[Endpoint, str, int], str]) -> None:
        """When somebody watches, on any node, listen here; there, learn where the others do.

        Where the job was given no token, theirs is drawn here, and stands in the store, as that of
        the ranks does.
        """
        key, node = "phalanx/watch", self._node_rank
        if not self._token:
            if self.watched.is_set():
                drawn = store.compare_set(key, "", secrets.token_hex(32))
            elif store.check([key]):
                drawn = store.get(key)
            else:
                return
            self._token = token_between_nodes(drawn.decode())
            try:
                said = {"address": listen(self.endpoint, self._token, self._ranks)}
            except (OSError, DistributedError) as error:
                said = {"reason": str(error)}
            self._places[node] = msgspec.structs.replace(self._places[node], **said)
            store.set(f"{key}/{node}", msgspec.json.encode(said).decode())
        if self.watched.is_set():
            for other, place in list(self._places.items()):
                unknown = not place.address and not place.reason
                if unknown and store.check([f"{key}/{other}"]):
                    told = msgspec.json.decode(store.get(f"{key}/{other}"), type=dict[str, str])
                    self._places[other] = msgspec.structs.replace(place, **told)
