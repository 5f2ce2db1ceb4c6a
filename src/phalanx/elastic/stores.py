"""The store through which the members of elastic groups find and tell each other.

    JobStore           a job's entries: typed, sealed with its token; keys begin with its name
    KeyValueStore      what it needs: get, set and compare_set of text, each within `timeout`
    LauncherStore      that of `phalanx run`, behind its door (launch/store.py)
    EtcdStore          etcd://a:2379,b:2379,c:2379: any of its hosts may die
    ForeignStore       an object with torch's get, set, check and compare_set

    elastic/decision/G          the `Decision` on generation G: the first write stays
    elastic/report/G/RANK       the `Report` of a member of G, which it alone writes
    elastic/newcomer/SLOT       a `Newcomer`, which renews it; without a process: free
    elastic/note/NAME           lines of rank 0: what is kept, that it lives, that the job has ended

A write that has failed may still arrive, so each is one that may be repeated. Nothing here has a
thread or a watch of its own: while nothing fails, nobody waits for a store.
"""

from __future__ import annotations

import hmac
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any, TypeVar

import msgspec
from typing_extensions import override

from phalanx.elastic.membership import Decision, Newcomer, Report
from phalanx.errors import AuthenticationError, BackendUnavailableError, DesyncError, plain
from phalanx.launch.store import StoreClient, connect_store
from phalanx.native.store_rendezvous import store_mac, tries
from phalanx.transport.tcp.admission import MAKE_ONE
from phalanx.wire.control import Endpoint, learned, parse_address

_LONGEST_PAUSE = 0.02  # seconds between two looks at a store
_ONE_ENDPOINT = 1.0  # seconds for one endpoint of etcd, if there are others
_ETCD = "etcd://"
_FREE = Newcomer("", "")


class Note(msgspec.Struct, frozen=True):
    """Lines that rank 0 writes for others to read."""

    lines: tuple[str, ...]


_T = TypeVar("_T")
_Entry = TypeVar("_Entry", Decision, Report, Newcomer, Note)


class KeyValueStore(ABC):
    """A linearizable store of text.

    name      what errors call it
    timeout   seconds for one operation

    Every operation may raise `BackendUnavailableError`, which names the store, the key and the
    seconds. It may have been carried out then, or be carried out later.
    """

    name: str
    timeout: float

    @abstractmethod
    def get(self, key: str) -> str:
        """Return the value of a key; "" if it has none."""

    @abstractmethod
    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""

    @abstractmethod
    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Set the value of a key that has `expected`, "" for none; return its value then."""

    def pauses(self, seconds: float, longest: float = _LONGEST_PAUSE) -> Iterator[object]:
        """Sleep between two looks at a value that changes, until `seconds` have passed."""
        return tries(time.monotonic() + seconds, longest)

    @abstractmethod
    def close(self) -> None:
        """Close its own connections; the next operation opens them again."""

    def failure(self, key: str, reason: object) -> BackendUnavailableError:
        """Return the error of an operation that has not come about."""
        return BackendUnavailableError(
            f"{self.name} cannot be used (key {key!r}, within {self.timeout:g} s: "
            f"{plain(str(reason))}): is it running, and may this host connect to it?",
            seconds=self.timeout,
        )


# ------------------------------------------------------------------------------
# A job's entries.


class JobStore:
    """The entries of one job. For one thread at a time.

    A value that was not sealed with the job's token for this key raises `AuthenticationError`, one
    that cannot be read `DesyncError`.
    """

    def __init__(self, store: KeyValueStore, job: str, token: bytes) -> None:
        if not token:
            raise AuthenticationError(
                f"job {job}: whoever reaches {store.name} can write to it, so its entries are "
                f"sealed with the job's token, and there is none. Set PHALANX_TOKEN, or "
                f"PHALANX_TOKEN_FILE, for every rank ({MAKE_ONE} makes one)"
            )
        self.store = store
        self._prefix, self._token = f"{job}/elastic/", token

    def decision(self, generation: int) -> Decision | None:
        """Return the decision on a generation, if there is one."""
        return self._read(f"decision/{generation}", Decision)

    def propose(self, decision: Decision) -> Decision:
        """Write the decision on a generation, unless there is one; return that which stays."""
        key = f"decision/{decision.generation}"
        return self._unseal(key, self._compare_set(key, None, decision), Decision)

    def report(self, generation: int, rank: int) -> Report | None:
        """Return the report of a member of a generation, if it has written one."""
        return self._read(f"report/{generation}/{rank}", Report)

    def write_report(self, report: Report) -> None:
        """Write this process's report over an earlier one of its own."""
        self._write(f"report/{report.generation}/{report.rank}", report)

    def drop_report(self, generation: int, rank: int) -> None:
        """Free the room of an own report, once there is a decision on the next generation."""
        self.store.set(f"{self._prefix}report/{generation}/{rank}", "")

    def newcomers(self) -> dict[int, Newcomer]:
        """Return all entries of newcomers, by slot; whether they still live, `beat` shows."""
        used = takewhile(lambda each: each[1] is not None, self._slots())
        return {slot: each for slot, each in used if each is not None and each.process}

    def enter(self, newcomer: Newcomer) -> int:
        """Write an entry into the first free slot, or its own one; return the slot."""
        for slot, each in self._slots():
            if each is None or each.process in ("", newcomer.process):
                key = f"newcomer/{slot}"
                if self._compare_set(key, each, newcomer) == self._seal(key, newcomer):
                    return slot
        raise AssertionError("the slots have no end")

    def renew(self, slot: int, newcomer: Newcomer) -> None:
        """Write this process's entry, with a higher `beat`."""
        self._write(f"newcomer/{slot}", newcomer)

    def vacate(self, slot: int, newcomer: Newcomer) -> None:
        """Free a slot that has this entry: of this process, or of one that lives no more."""
        self._compare_set(f"newcomer/{slot}", newcomer, _FREE)

    def note(self, name: str) -> tuple[str, ...] | None:
        """Return the lines of a note, if there is one."""
        note = self._read(f"note/{name}", Note)
        return None if note is None else note.lines

    def write_note(self, name: str, *lines: str) -> None:
        """Write a note over an earlier one."""
        self._write(f"note/{name}", Note(lines))

    def wait(
        self, look: Callable[[], _T | None], seconds: float, longest: float = _LONGEST_PAUSE
    ) -> _T | None:
        """Look again and again, until there is something; None after `seconds`.

        longest   seconds between two looks at most
        """
        for _ in self.store.pauses(seconds, longest):
            if (found := look()) is not None:
                return found
        return None

    def _slots(self) -> Iterator[tuple[int, Newcomer | None]]:
        return ((slot, self._read(f"newcomer/{slot}", Newcomer)) for slot in count())

    def _read(self, key: str, kind: type[_Entry]) -> _Entry | None:
        text = self.store.get(self._prefix + key)
        return self._unseal(key, text, kind) if text else None

    def _write(self, key: str, entry: Decision | Report | Newcomer | Note) -> None:
        self.store.set(self._prefix + key, self._seal(key, entry))

    def _compare_set(self, key: str, expected: Newcomer | None, entry: Decision | Newcomer) -> str:
        old = "" if expected is None else self._seal(key, expected)
        return self.store.compare_set(self._prefix + key, old, self._seal(key, entry))

    def _seal(self, key: str, entry: Decision | Report | Newcomer | Note) -> str:
        text = msgspec.json.encode(entry).decode()
        return f"{store_mac(self._token, b'elastic', [self._prefix + key, text])} {text}"

    def _unseal(self, key: str, sealed: str, kind: type[_Entry]) -> _Entry:
        seal, _, text = sealed.partition(" ")
        due = store_mac(self._token, b"elastic", [self._prefix + key, text])
        if not hmac.compare_digest(seal.encode(), due.encode()):
            raise AuthenticationError(
                f"the value of {self._prefix + key} in {self.store.name} is not sealed with this "
                "process's token: do all processes of the job hold the same PHALANX_TOKEN, has "
                "another job the same name, or does a stranger write there?"
            )
        try:
            return msgspec.json.decode(text, type=learned(kind))
        except msgspec.MsgspecError as error:
            raise DesyncError(
                f"the value of {self._prefix + key} in {self.store.name} cannot be read ({error}): "
                "is the same Phalanx installed everywhere?"
            ) from None


def open_store(
    where: object, token: str, *, job: str, launch: str = "", timeout: float = 10.0
) -> JobStore:
    """Return the store of a job; it connects at its first operation.

    where    "etcd://host:port,...", the address of the launcher's store, or a store of torch's
    launch   the name by which the launcher's store knows its job
    timeout  seconds for one operation
    """
    store: KeyValueStore
    if not isinstance(where, str):
        store = where if isinstance(where, KeyValueStore) else ForeignStore(where, timeout)
    elif where.startswith(_ETCD):
        store = EtcdStore(where, timeout)
    else:
        store = LauncherStore(parse_address(where), token, launch, timeout)
    return JobStore(store, job, token.encode())


# ------------------------------------------------------------------------------
# Stores.


class LauncherStore(KeyValueStore):
    """The launcher's store, behind its door."""

    def __init__(self, endpoint: Endpoint, token: str, launch: str, timeout: float) -> None:
        self.name, self.timeout = f"the launcher's store at {endpoint}", timeout
        self._endpoint, self._token, self._launch = endpoint, token, launch
        self._client: StoreClient | None = None

    @override
    def get(self, key: str) -> str:
        return (self._ask(key, lambda client: client.get(key)) or b"").decode()

    @override
    def set(self, key: str, value: str) -> None:
        self._ask(key, lambda client: client.set(key, value))

    @override
    def compare_set(self, key: str, expected: str, value: str) -> str:
        before, after = expected.encode(), value.encode()
        return self._ask(key, lambda client: client.compare_set(key, before, after)).decode()

    @override
    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _ask(self, key: str, ask: Callable[[StoreClient], _T]) -> _T:
        """Ask twice, in half of the time each: a connection that is there may be an old one."""
        failure, half = Exception(), self.timeout / 2
        for deadline in (time.monotonic() + half, time.monotonic() + 2 * half):
            try:
                if self._client is None:
                    place, token = self._endpoint, self._token
                    self._client = connect_store(place, token, deadline, job=self._launch)
                self._client.patience = max(deadline - time.monotonic(), 0.001)
                return ask(self._client)
            except BackendUnavailableError as error:
                failure = error
                self.close()
        raise self.failure(key, failure) from failure


class EtcdStore(KeyValueStore):
    """etcd, through its gateway for JSON: endpoints are tried in turn, the last good one first."""

    def __init__(self, where: str, timeout: float) -> None:
        try:
            from etcd3gw import exceptions  # noqa: PLC0415 -- an extra
            from etcd3gw.client import Etcd3Client  # noqa: PLC0415
            from requests import RequestException  # noqa: PLC0415
        except ImportError as error:
            raise BackendUnavailableError(
                f"{where} needs the package etcd3gw: pip install 'phalanx[etcd]'"
            ) from error
        self.name, self.timeout = f"etcd at {where.removeprefix(_ETCD)}", timeout
        self._transient = (
            RequestException,
            exceptions.ConnectionFailedError,
            exceptions.ConnectionTimeoutError,
            exceptions.InternalServerError,
        )
        self._refusal = exceptions.Etcd3Exception
        self._clients = [
            Etcd3Client(host, port, api_path="/v3/")
            for host, port in map(parse_address, where.removeprefix(_ETCD).split(","))
        ]

    @override
    def get(self, key: str) -> str:
        values = self._ask(key, lambda client: client.get(key.encode()))
        return values[0].decode() if values else ""

    @override
    def set(self, key: str, value: str) -> None:
        self._ask(key, lambda client: client.put(key.encode(), value.encode()))

    @override
    def compare_set(self, key: str, expected: str, value: str) -> str:
        before = (expected.encode(),) if expected else ()
        words = key.encode(), *before, value.encode()

        def ask(client: Any) -> bool:
            return bool((client.replace if expected else client.create)(*words))

        return value if self._ask(key, ask) else self.get(key)

    @override
    def close(self) -> None:
        for client in self._clients:
            client.session.close()

    def _ask(self, key: str, ask: Callable[[Any], _T]) -> _T:
        several, failure, reason = len(self._clients) > 1, Exception(), None
        for left in tries(time.monotonic() + self.timeout):
            client = self._clients[0]
            client.timeout = min(left, _ONE_ENDPOINT) if several else left
            try:
                return ask(client)
            except self._transient as error:
                failure, reason = error, getattr(error, "detail_text", error)
                self._clients.append(self._clients.pop(0))
            except self._refusal as error:
                raise self.failure(key, error.detail_text) from error
        raise self.failure(key, reason) from failure


class ForeignStore(KeyValueStore):
    """An object with torch's `get`, `set`, `check` and `compare_set`; its calls may block."""

    def __init__(self, store: Any, timeout: float) -> None:
        absent = [
            each for each in ("get", "set", "check", "compare_set") if not hasattr(store, each)
        ]
        if absent:
            raise TypeError(
                f"a store is etcd://host:port, an address, or has torch's get, set, check and "
                f"compare_set; {type(store).__name__} has no {', '.join(absent)}"
            )
        self.name, self.timeout = f"the given {type(store).__name__}", timeout
        self._store = store

    @override
    def get(self, key: str) -> str:
        # It would wait for a key that is not there.
        return self._within(key, lambda store: store.get(key) if store.check([key]) else b"")

    @override
    def set(self, key: str, value: str) -> None:
        self._within(key, lambda store: store.set(key, value))
        self.get(key)  # torch's TCPStore answers no `set`, and this only after it

    @override
    def compare_set(self, key: str, expected: str, value: str) -> str:
        return self._within(key, lambda store: store.compare_set(key, expected, value))

    @override
    def close(self) -> None:
        """Leave the store open: it is the caller's."""

    def _within(self, key: str, ask: Callable[[Any], bytes | str | None]) -> str:
        """Ask in a thread, which is left to itself if there is no answer in time."""
        answers: queue.SimpleQueue[bytes | str | Exception | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put(ask(self._store))
            except Exception as error:
                answers.put(error)

        threading.Thread(target=run, name=f"phalanx: {self.name}", daemon=True).start()
        try:
            answer = answers.get(timeout=self.timeout)
        except queue.Empty:
            raise self.failure(key, "it blocks") from None
        if isinstance(answer, Exception):
            raise self.failure(key, answer) from answer
        return answer.decode() if isinstance(answer, bytes) else answer or ""
