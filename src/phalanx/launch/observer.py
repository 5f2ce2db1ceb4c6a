"""Reports of a launcher to the watchers of its job, and the addresses of its other nodes."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from phalanx import hooks
from phalanx.errors import DistributedError, MisuseError, plain
from phalanx.transport.tcp.admission import find_token
from phalanx.wire.control import learned

if TYPE_CHECKING:
    from phalanx.launch.nodes import Nodes
    from phalanx.launch.store import StoreClient
    from phalanx.launch.supervisor import RankProcess
    from phalanx.wire.control import Endpoint

_LOOK_EVERY = 5  # calls of `meet` between two checks for watchers on other nodes


class Observer:
    """An observer that reports nothing; `ops/observe/watch/launcher.py` has one that does.

    private   a folder made for this job alone, which the end of the job removes; "" for none
    nodes     the other nodes of the job, if there are any
    """

    private = ""
    nodes: Nodes | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables for the ranks' environment."""
        return {}

    def listen(self, toward: Endpoint, token: str, ranks: int) -> str:
        """Serve this node, of `ranks` ranks, to watchers on other nodes that hold the token.

        Returns the address. `MisuseError`, `BackendUnavailableError` or OSError if it cannot.
        """
        raise MisuseError(f"{hooks.OPS} is not installed on it")

    def begin(self, generation: int, world_size: int) -> None:
        """Report the beginning of a generation of ranks."""

    def look(
        self,
        ranks: Sequence[RankProcess],
        output: Mapping[int, bytes] = MappingProxyType({}),
        *,
        now: bool = False,
    ) -> None:
        """Report the ranks' state, if somebody watches, and it is time, or `now`.

        output   the last output of each rank, if this process has seen it
        """

    def end(self, how: str) -> None:
        """Report the end of the job."""


def observer(name: str, node: int, environ: Mapping[str, str]) -> Observer:
    """Return the observer of a job, or a node of one, of that name."""
    if not hooks.has_ops():
        return Observer()
    made: Observer = hooks.load(hooks.OF_LAUNCHERS, "a launcher").NodeWatch(name, node, environ)
    return made


class NodePlace(msgspec.Struct, kw_only=True, frozen=True):
    """A node of a job: its ranks, and its address for watchers.

    node, host         its number, and the name of its host
    first_rank, ranks  the first of its ranks, and their number
    address            host:port; "" while it is unknown
    reason             why it does not listen; "" if it does, or that is unknown
    """

    node: int
    host: str
    first_rank: int
    ranks: int
    address: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"node {self.node} ({plain(self.host)})"


class OtherNodes(msgspec.Struct, kw_only=True):
    """A launcher's note for the watchers on its host, if the job has several launchers.

    token   that these nodes ask of watchers
    nodes   all but this one
    """

    token: str
    nodes: list[NodePlace]


class WatchedNodes:
    """The nodes' addresses for watchers, which their launchers exchange in the job's store.

    listen    `listen(endpoint, token, ranks)` returns this node's address for watchers; raises if
              there is none; it is called when somebody watches the job, on any node
    watched   to be set when somebody watches on this node
    places    the nodes, as soon as all have joined
    """

    def __init__(self, node: int, listen: Callable[[Endpoint, str, int], str] | None) -> None:
        self.watched = threading.Event()
        self.places: dict[int, NodePlace] = {}
        self._node, self._listen = node, listen
        self._token, self._calls = "", 0  # the token of watchers, once there are some

    def others(self) -> OtherNodes | None:
        """Return the known places of the other nodes; None: not yet."""
        if not self._token:
            return None
        nodes = [place for place in self.places.values() if place.node != self._node]
        return OtherNodes(token=self._token, nodes=nodes)

    def meet(self, store: StoreClient, master: Endpoint) -> None:
        """Listen here when somebody watches, on any node, and learn the others' addresses.

        If the job was given no token, that of the watchers is drawn here, and stands in the store.
        """
        self._calls += 1
        watched, key = self.watched.is_set(), "phalanx/watch"
        if self._listen is None or not (watched or self._calls % _LOOK_EVERY == 0):
            return
        if not self._token:
            drawn = store.get(key)
            if not drawn and watched and store.add(f"{key}/drawn", 1) == 1:
                drawn = secrets.token_hex(32).encode()
                store.set(key, drawn)
            if drawn is None:
                return
            self._token = _token_of_watchers(drawn.decode())
            own = self.places[self._node]
            try:
                said = {"address": self._listen(master, self._token, own.ranks)}
            except (OSError, DistributedError) as error:
                said = {"reason": plain(str(error))}
            self.places[self._node] = msgspec.structs.replace(own, **said)
            store.set(f"{key}/{self._node}", msgspec.json.encode(said))
        for other, place in list(self.places.items()) if watched else ():
            if not (place.address or place.reason) and (data := store.get(f"{key}/{other}")):
                told = msgspec.json.decode(data, type=learned(dict[str, str]))
                address, reason = (plain(told.get(name, "")) for name in ("address", "reason"))
                self.places[other] = msgspec.structs.replace(place, address=address, reason=reason)


def _token_of_watchers(drawn: str) -> str:
    """Return the token of the nodes' watchers, which is derived from the job's.

    `drawn` is it without a token of the job: the ranks have one of rank 0's then.
    """
    given = find_token()
    return hmac.digest(given.encode(), b"phalanx watch", "sha256").hex() if given else drawn
