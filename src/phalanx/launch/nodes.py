"""The nodes of a job: the messages of their launchers through the store of node 0 (store.py).

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

Every node writes one entry a generation: its end there. A node on which somebody watches the job
writes so; then all write their addresses for watchers (observer.py).

torch programs need a port on rank 0's host for a store of their own. Node 0 keeps one free for each
generation, and tells it when it joins, and with the entry of the generation before.

A thread talks to the store, while the launcher watches its ranks. A job of one node has the store
for its ranks alone, and agrees with itself.
"""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from phalanx.errors import BackendUnavailableError, DistributedError, MisuseError, plain
from phalanx.launch.observer import NodePlace, WatchedNodes
from phalanx.launch.report import AGAIN, RankExit, describe_failure, root_cause
from phalanx.launch.store import StoreClient, StoreServer, connect_store, listen_for_store
from phalanx.native.store_rendezvous import tries
from phalanx.transport.tcp.addresses import reserve_port
from phalanx.wire.control import Endpoint, learned, parse_address

PATIENCE = 300  # seconds to wait for a node that does not join, or does not answer any more
_POLL = 0.1
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
    """The end of one generation of ranks on one node."""

    node: int
    failed: bool
    summary: str = ""  # the first failure of a rank; "" if ranks were only stopped
    follows: bool = False  # whether the failure of another rank led to it
    code: int = 0  # the exit code of the launcher for this failure; 75 if ranks left with it
    final: bool = False  # whether the job ends with it, even if restarts are left
    port: int = 0  # of node 0: free on its host, for torch's own store in the next generation

    @classmethod
    def of_ranks(cls, node: int, exits: list[RankExit]) -> NodeExit:
        """Return the end of a generation on `node`, from those of its ranks."""
        root = root_cause(exits)
        if root is None:
            left = any(one.code == AGAIN for one in exits)
            return cls(node, failed=False, code=AGAIN if left else 0)
        return cls(node, True, describe_failure(root, brief=True), root.follows, root.shell_code)


class _Joined(msgspec.Struct, frozen=True, array_like=True):
    """A node's entry when it joins; `port` is as that of `NodeExit`, for the first generation."""

    ranks: int
    options: list[int]
    host: str
    port: int


class Nodes:
    """This node's part in a job; `close()` it at the end.

    `placement` is the first rank of this node and the world size; None until all nodes have joined.
    `token` is the job's, which the store's clients have to hold, and `job` its name. `watching`
    exchanges the nodes' addresses for watchers; `listen` is for it. With several nodes a thread
    sets the attributes.
    """

    def __init__(
        self,
        *,
        ranks: int,
        token: str = "",
        job: str = "",
        nodes: int = 1,
        node_rank: int = 0,
        max_restarts: int = 0,
        master: str = "",
        listen: Callable[[Endpoint, str, int], str] | None = None,
    ) -> None:
        self.watching = WatchedNodes(node_rank, listen)
        self._token, self._job = token, job
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
        self._server: StoreServer | None = None
        self._reserved: socket.socket | None = None
        self._first_port = 0
        if nodes > 1:
            self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
            self._thread.start()
            return
        self.placement = 0, ranks
        self._first_port = self._reserve()
        self._server = self._hold(self._listen(time.monotonic()))
        self.endpoint = self._server.endpoint

    def awaited(self) -> str:
        """Return this node's wait before it can begin, in words, and its length."""
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
        """Raise the error for which this node cannot go on, if any."""
        if self._error is not None:
            raise self._error

    def master_port(self, generation: int) -> int:
        """Return the port of rank 0's host for torch's own store; it was kept free until now."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        if generation == 0:
            return self._first_port
        return next((one.port for one in self._written_of(generation - 1) if one.node == 0), 0)

    def write(self, ended: NodeExit) -> None:
        """Tell all nodes the end of the next generation on this one."""
        self._written = time.monotonic()
        if self._node_rank == 0:
            ended = msgspec.structs.replace(ended, port=self._reserve())
        (self._log if self._nodes == 1 else self._unwritten).append(ended)

    def failed(self, generation: int) -> bool:
        """Return whether a node has written that the generation has failed."""
        return any(one.failed for one in self._written_of(generation))

    def outcome(self, generation: int) -> list[NodeExit] | None:
        """Return the ends of a generation on all nodes, in the order of writing; None: not yet.

        The others have some time after this node's entry: `_SETTLE` seconds after a failure, after
        which the job ends, else `PATIENCE`.
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
        """Leave the job; wait for the thread at most `seconds`, and return whether it has ended."""
        if self._nodes > 1:
            self._closing.set()
            self._thread.join(seconds)
        elif self._server is not None:
            self._server.close()
        if self._reserved is not None:  # only now: the thread may have been about to reserve it
            self._reserved.close()
        return self._nodes == 1 or not self._thread.is_alive()

    def _written_of(self, generation: int) -> list[NodeExit]:
        return self._log[generation * self._nodes : (generation + 1) * self._nodes]

    def _reserve(self) -> int:
        """Keep a port of this host free for the next generation; return its number."""
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = reserve_port()
        return int(self._reserved.getsockname()[1])

    def _hold(self, listener: socket.socket) -> StoreServer:
        return StoreServer(listener, self._token.encode(), job=self._job)

    def _listen(self, deadline: float) -> socket.socket:
        """Return node 0's listener. Its name may not resolve yet, as a pod's: try again."""
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
        store: StoreClient | None = None
        try:
            deadline = time.monotonic() + PATIENCE
            if self._node_rank == 0:
                self._server = self._hold(self._listen(deadline))
                self._first_port = self._reserve()
            store = self._find_store(deadline)
            self.placement = self._join(store, deadline)
            self._exchange(store)
        except DistributedError as error:
            self._error = error
        except Exception as error:
            self._error = BackendUnavailableError(
                f"the launcher of node 0 at {self.endpoint} does not answer as it should ({error}):"
                " is the same version of Phalanx installed everywhere?"
            )
            self._error.__cause__ = error
        finally:
            if store is not None:
                store.close()
            if self._server is not None:
                self._server.close()

    def _alone(self, why: str) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"node {self._node_rank} of {self._nodes} did not meet the others at {self.endpoint}: "
            "are all of them started with the same --master, and may they connect to it? "
            f"({why})"
        )

    def _find_store(self, deadline: float) -> StoreClient:
        """Return the store of node 0, not that of this node's former job, which ends.

        Kubernetes may restart a node before node 0's former launcher has ended.
        """
        while True:
            try:
                place = self.endpoint if self._server is None else self._server.endpoint
                store = connect_store(place, self._token, deadline, job=self._job)
            except BackendUnavailableError as error:
                raise self._alone(str(error)) from error
            try:
                if store.add(f"phalanx/launchers/{self._node_rank}", 1) == 1:
                    return store
                self._ending = store.get("phalanx/log/0/1") is not None
            except BackendUnavailableError as error:  # it ended just now
                if time.monotonic() > deadline or self._closing.is_set():
                    raise self._alone(str(error)) from error
                continue
            store.close()
            if not self._ending:
                raise MisuseError(
                    f"another launcher of this job has --node-rank {self._node_rank}, too: give "
                    "each node a number of its own"
                )
            if time.monotonic() > deadline or self._closing.wait(_POLL):
                raise self._alone("the job that it was in before has not ended")

    def _join(self, store: StoreClient, deadline: float) -> tuple[int, int]:
        """Wait for all nodes; return the `placement`."""
        node, nodes = self._node_rank, self._nodes
        own = _Joined(self._ranks, self._options, socket.gethostname(), self._first_port)
        store.set(f"phalanx/node/{node}", msgspec.json.encode(own))
        joined: dict[int, _Joined] = {}
        while missing := set(range(nodes)) - joined.keys():
            for other in missing:
                if data := store.get(f"phalanx/node/{other}"):
                    joined[other] = theirs = msgspec.json.decode(data, type=learned(_Joined))
                    if theirs.options != self._options:
                        raise MisuseError(
                            f"node {other} was started with --nnodes, --max-restarts "
                            f"{theirs.options}, node {node} with {self._options}: give all nodes "
                            "the same"
                        )
            self._missing = missing - joined.keys()
            if time.monotonic() > deadline or self._closing.wait(_POLL):
                names = ", ".join(map(str, sorted(missing)))
                raise self._alone(f"missing after {PATIENCE} s: node {names}")
        first_rank = 0
        for other in range(nodes):
            host, ranks = plain(joined[other].host), joined[other].ranks
            place = NodePlace(node=other, host=host, first_rank=first_rank, ranks=ranks)
            self.watching.places[other] = place
            first_rank += ranks
        self._first_port = joined[0].port
        return self.watching.places[node].first_rank, first_rank

    def _exchange(self, store: StoreClient) -> None:
        """Write the pending entries, and read the log, until `close()`."""
        written = 0
        while not self._closing.wait(_POLL) or self._unwritten:
            while self._unwritten:
                ended = self._unwritten.pop(0)
                ended = msgspec.structs.replace(ended, summary=plain(ended.summary))
                number = store.add(f"phalanx/log/{written}", 1)
                store.set(f"phalanx/log/{written}/{number}", msgspec.json.encode(ended))
                written += 1
            while True:
                generation, number = divmod(len(self._log), self._nodes)
                data = store.get(f"phalanx/log/{generation}/{number + 1}")
                if data is None:
                    break
                said = msgspec.json.decode(data, type=learned(NodeExit))
                self._log.append(msgspec.structs.replace(said, summary=plain(said.summary)))
            self.watching.meet(store, self.endpoint)
        ended_nodes = store.add("phalanx/ended", 1)
        deadline = time.monotonic() + _LAST_WORDS
        while self._node_rank == 0 and ended_nodes < self._nodes and time.monotonic() < deadline:
            time.sleep(_POLL)
            ended_nodes = store.add("phalanx/ended", 0)
