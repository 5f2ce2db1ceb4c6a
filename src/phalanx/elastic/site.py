"""Where an elastic job's process lives: how it meets others, its store, and its clock.

ProcessSite     a process: sockets and shared memory, the machine's clock
SimulatedSite   a process of `phalanx.simulate`, where the clock jumps when all wait
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType

from typing_extensions import override
from xxhash import xxh3_64_hexdigest

from phalanx.core.backend import Backend
from phalanx.elastic.stores import JobStore, KeyValueStore
from phalanx.errors import BackendUnavailableError, DistributedError, UnsupportedOperationError
from phalanx.transport import backends
from phalanx.transport.simulated import SimulatedBackend
from phalanx.transport.simulated_process import SimulatedProcess
from phalanx.transport.tcp.addresses import listen_toward
from phalanx.transport.tcp.heartbeat import has_ended, host_id
from phalanx.wire.control import Endpoint, is_loopback

MEETING = 5.0  # seconds that the ranks of a generation have to connect to each other
LOOK = 1.0  # seconds between two looks of rank 0 at the newcomers

KINDS: Mapping[str, type[backends.MeshBackend]] = MappingProxyType(
    {
        "auto": backends.HybridBackend,
        "hybrid": backends.HybridBackend,
        "shm": backends.SharedMemoryBackend,
        "tcp": backends.TcpBackend,
    }
)


def check_kind(name: str) -> None:
    """Raise unless the backends of that name can be elastic."""
    if name in ("gloo", "nccl", "ucc", "mpi"):
        raise UnsupportedOperationError(
            f"backend={name!r}: the ranks of {name} are those that it began with. Elastic training "
            "takes 'tcp', 'shm', 'hybrid' or 'auto'"
        )
    if name not in KINDS:
        raise BackendUnavailableError(
            f"there is no backend {name!r}; elastic training takes {', '.join(sorted(KINDS))}"
        )


class Site(ABC):
    """The surroundings of one process.

    process    its name, which no other process of the job has
    host       the name of its host, for the log
    store      the job's; None: it is alone
    watches    True: a thread looks once a second. False: rank 0 looks before each vote
    """

    process: str
    host: str
    store: JobStore | None
    watches = True

    @abstractmethod
    def address(self) -> str:
        """Return where it listens, as rank 0 of the next generation would."""

    @abstractmethod
    def meet(self, generation: int, rank: int, size: int, address: str, timeout: float) -> Backend:
        """Be this rank of the generation's group, when all have come; raise after `MEETING`."""

    @abstractmethod
    def now(self) -> float:
        """Return the seconds of its clock."""

    @abstractmethod
    def has_ended(self, process: str) -> bool:
        """Return whether a process has ended, by its name; False if this one cannot see it."""

    @abstractmethod
    def pause(self) -> None:
        """Come by between two parts of a copy: a simulated process may crash there."""

    @abstractmethod
    def watch(self, look: Callable[[JobStore], object]) -> Callable[[], None]:
        """Call `look` once a second from now on, with a store; return what ends that."""

    @abstractmethod
    def close(self) -> None:
        """Close what listens, and the store."""


class ProcessSite(Site):
    """A process of its own.

    kind        of its backends
    open_store  opens the job's store, for one thread; None: it is alone
    route       the address of the store, toward which the other hosts are
    job, token  of the connections
    """

    def __init__(
        self,
        kind: str,
        open_store: Callable[[], JobStore] | None,
        route: Endpoint,
        job: str,
        token: str,
    ) -> None:
        check_kind(kind)
        self.host = socket.gethostname()
        # Processes of the same place see each other by their numbers.
        self._place = xxh3_64_hexdigest(host_id().encode())
        self.process = f"{self.host}/{os.getpid()}/{self._place}-{secrets.token_hex(6)}"
        self._kind, self._route, self._job, self._token = kind, route, job, token
        self._open_store = open_store
        self.store = open_store() if open_store is not None else None
        self._listener: socket.socket | None = None
        self._endpoint = route  # of the listener, once there is one

    @override
    def address(self) -> str:
        if self._listener is None:
            one_host = is_loopback(self._route.host)
            self._listener, self._endpoint = listen_toward(self._route, one_host=one_host)
            self._listener.setblocking(False)
        return str(self._endpoint)

    @override
    def meet(self, generation: int, rank: int, size: int, address: str, timeout: float) -> Backend:
        if size == 1:
            return SimulatedBackend.create_group(1, timeout=timeout)[0]
        listener = None
        if rank == 0:
            listener, self._listener = self._listener, None
        made = KINDS[self._kind](
            rank,
            size,
            address,
            token=self._token,
            timeout=MEETING,
            job=self._job,
            generation=generation,
            listener=listener,
            fall_back=self._kind == "auto",
        )
        made.timeout = timeout
        return made

    @override
    def now(self) -> float:
        return time.monotonic()

    @override
    def has_ended(self, process: str) -> bool:
        _, number, name = process.split("/")
        return name.startswith(self._place) and has_ended(int(number))

    @override
    def pause(self) -> None:
        """Go on: a process is killed wherever it is."""

    @override
    def watch(self, look: Callable[[JobStore], object]) -> Callable[[], None]:
        over = threading.Event()

        def run() -> None:
            assert self._open_store is not None
            store = self._open_store()
            while not over.wait(LOOK):
                with suppress(DistributedError, OSError):  # nobody waits for a store meanwhile
                    look(store)
            store.store.close()

        if self._open_store is None:
            return over.set
        threading.Thread(target=run, name="phalanx: newcomers", daemon=True).start()
        return over.set

    @override
    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self.store is not None:
            self.store.store.close()


# ------------------------------------------------------------------------------
# In `phalanx.simulate`


class SimulatedSite(Site):
    """A process of a simulation."""

    watches = False

    def __init__(self, process: SimulatedProcess, token: bytes = b"a simulation") -> None:
        self.process, self.host = f"simulated/{process.number}", "simulated"
        self.store = JobStore(SimulatedEntries(process), "job", token)
        self._process = process

    @override
    def address(self) -> str:
        return f"p{self._process.number}:1"

    @override
    def meet(self, generation: int, rank: int, size: int, address: str, timeout: float) -> Backend:
        name = f"generation {generation}"
        return self._process.form(name, rank, size, seconds=MEETING, timeout=timeout)

    @override
    def now(self) -> float:
        return self._process.now()

    @override
    def has_ended(self, process: str) -> bool:
        return self._process.has_ended(int(process.removeprefix("simulated/")))

    @override
    def pause(self) -> None:
        self._process.give_turn()

    @override
    def watch(self, look: Callable[[JobStore], object]) -> Callable[[], None]:
        return lambda: None

    @override
    def close(self) -> None:
        """There is nothing to close."""


class SimulatedEntries(KeyValueStore):
    """The store of a simulation. Who waits for it sleeps until it changes."""

    name, timeout = "the simulated store", 1.0

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    @override
    def get(self, key: str) -> str:
        store = self._process.store
        return store.get(key).decode() if store.check([key]) else ""

    @override
    def set(self, key: str, value: str) -> None:
        self._process.store.set(key, value)

    @override
    def compare_set(self, key: str, expected: str, value: str) -> str:
        return self._process.store.compare_set(key, expected, value).decode()

    @override
    def pauses(self, seconds: float, longest: float = 1.0) -> Iterator[object]:
        end = self._process.now() + seconds
        while self._process.now() < end:
            yield None
            self._process.store.wait_for_change(1.0)

    @override
    def close(self) -> None:
        """There is nothing to close."""
