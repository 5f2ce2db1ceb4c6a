"""News for every rank of a wide mesh: ranks that died or left, groups that are broken.

Beyond a bound, ranks have no connection each with each, so a rank can neither see every other one
end, nor tell all of them. Each is connected with a few from the start, its neighbours on a
circulant graph, whose skips are the powers of 4 up to half of the ranks:

    rank r  --  r - 16, r - 4, r - 1, r + 1, r + 4, r + 16      (of 32 to 127 ranks)

That is 1 + log2(ranks) neighbours at most, and as many hops at most between any two ranks. Word is
flooded: a rank that hears news passes it on to its neighbours. So it goes by many ways, around the
ranks that are dead. As ranks leave, the graph loses links; then each rank connects with the next
one that is still here, so that the rest is a ring at least.

News about a direct neighbour is taken only from its own connection, after its last message. Word
from others may arrive early, so it is only passed on.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING
from weakref import WeakSet

from phalanx.core.transport import Control
from phalanx.transport.tcp.admission import Acceptor
from phalanx.transport.tcp.connection import Connection
from phalanx.transport.tcp.dial import LazyConnection
from phalanx.transport.tcp.mesh import Mesh
from phalanx.wire.control import (
    FailureNotice,
    GroupFailed,
    GroupLeft,
    News,
    RankLeft,
    RankLost,
    Word,
    decode,
    encode,
)
from phalanx.wire.frame import FrameError, Kind

if TYPE_CHECKING:
    from phalanx.core.group import Group

log = logging.getLogger("phalanx")

RATIO = 4  # of one skip to the one before
TOGETHER = 0.01  # seconds that word of a leaving waits for more: the ranks of a job leave together
MEND_AFTER = 0.2  # seconds until a rank connects with the next one that is still here
WORD_WITHIN = 1.0  # seconds within which word of a death has come
SHORT_WORDS, LONGEST_REASON = 128, 1000  # in a frame; characters
REMEMBERED = 4096  # words about groups; those about ranks all are


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks with which a rank of a wide mesh is connected from the start, sorted."""
    skips = [1]
    while skips[-1] * RATIO <= size // 2:
        skips.append(skips[-1] * RATIO)
    return sorted({(rank + way * skip) % size for skip in skips for way in (1, -1)} - {rank})


class Flooding:
    """One rank's part in it, and its calls to peers. The engine's lock is held in all methods.

    neighbours   of this rank
    patience     seconds within which a peer's host has to take a call
    acceptor     takes the calls of peers, from the rendezvous to the end
    calls        peers that are being called, and the messages that wait for the connection
    """

    def __init__(self, mesh: Mesh, patience: float) -> None:
        self.mesh = mesh
        self.neighbours = neighbours(mesh.rank, mesh.world_size)
        self.patience = patience
        self.acceptor: Acceptor | None = None
        self.calls: dict[int, LazyConnection] = {}
        self._parted: WeakSet[Connection] = WeakSet()
        self._gone: dict[int, RankLeft | RankLost] = {}  # the first word about each rank
        self._groups: dict[tuple[int, int], Word] = {}  # and about groups, the last of it
        self._closed: dict[int, Collection[int]] = {}  # groups that this rank left, their members
        self._new: list[Word] = []  # news still to be passed on
        self._waits = self._mends = False

    # Connections ----------------------------------------------------------------------------

    def call(self, peer: int) -> LazyConnection | None:
        """Call a peer to which there is no connection; None if it is gone."""
        mesh, engine = self.mesh, self.mesh.engine
        call = self.calls.get(peer)
        if call is None and not (
            peer in engine.left or peer in engine.lost or engine.closed or not mesh.all_known
        ):
            call = self.calls[peer] = LazyConnection(mesh, self, peer, self.patience)
            mesh.reactor.wake()  # a thread may sleep there, and not know of its timers
        return call

    def drop_call(self, peer: int) -> None:
        """Call a peer no more, and drop the messages that wait for the connection."""
        call = self.calls.pop(peer, None)
        if call is not None:
            call.dial.drop()

    def accepts(self, peer: int) -> bool:
        """Return whether a peer's call may be accepted now; if not, it calls again."""
        mesh, call = self.mesh, self.calls.get(peer)
        if peer in mesh.connections:
            # It was accepted while this call was under way. Or it is rank 0, which has parted. Only
            # at the rendezvous is it a second copy, which has to be told so.
            return mesh.rank == 0 and mesh.rendezvous is not None
        # Of two that call each other, the lower rank's call counts; unless the other's host has not
        # taken it, and may never do so.
        return call is None or peer < mesh.rank or not call.dial.answered

    def opened(self, connection: Connection) -> None:
        if (self._gone or self._groups) and connection.peer in self._links():
            _send([*self._gone.values(), *self._groups.values()], [connection])  # it may know none
        for group, members in self._closed.items():
            if connection.peer in members:  # as it calls, it leaves that to the connection
                connection.send_control(Kind.LEAVE_GROUP, group=group)
        call = self.calls.pop(connection.peer, None)
        if call is not None:
            call.opened(connection)

    def part(self, peer: int) -> None:
        """Send a peer nothing more this way: it hangs up when it has all that is on its way."""
        self._parted.add(self.mesh.connections.pop(peer))

    def all_parted(self) -> bool:
        """Return whether all of it was sent to these peers."""
        return all(connection.idle for connection in self._parted)

    def take_leave(self) -> None:
        """Leave in good order: pass on the news, and hang up on peers that this rank calls."""
        self.pass_on()
        for call in self.calls.values():
            call.dial.take_leave()
        self.calls.clear()

    def sockets(self) -> Iterator[socket.socket]:
        """Return its sockets without those of the mesh's connections."""
        yield from (connection.sock for connection in self._parted)
        yield from (call.dial.sock for call in self.calls.values() if call.dial.sock is not None)
        if self.acceptor is not None:
            yield self.acceptor.listener

    def close(self) -> None:
        """Close these sockets; no peer is called any more, nor listened to."""
        for peer in list(self.calls):
            self.drop_call(peer)
        for connection in self._parted:
            connection.close()
        if self.acceptor is not None:
            self.acceptor.close()

    # Out ------------------------------------------------------------------------------------

    def rank_left(self, rank: int) -> None:
        """Pass on that a peer has said on its connection that it closes."""
        if self._is_new(RankLeft(rank)):
            self._pass_on_after(TOGETHER)
        self.mend_soon()

    def rank_lost(self, rank: int, reason: str) -> None:
        """Pass on that a peer is gone without closing."""
        self.drop_call(rank)
        if self._is_new(RankLost(rank, reason[:LONGEST_REASON])):
            self._pass_on_after(0.0)  # with others of this turn of the reactor
        self.mend_soon()

    def tell_members(self, group: Group, message: Control) -> None:
        """Tell the other members that a group is broken, or (None) that this rank has closed it."""
        mesh, failed = self.mesh, isinstance(message, FailureNotice)
        kind, payload = (Kind.FAILURE, encode(message)) if failed else (Kind.LEAVE_GROUP, b"")
        for rank in group.ranks:
            peer = mesh.connections.get(rank) or self.calls.get(rank)
            if peer is not None and rank not in mesh.engine.left:  # in order with other messages
                peer.send_control(kind, payload, group=group.id)
        if mesh.connections.keys() >= group.to_local.keys() - {mesh.rank}:
            return
        if not isinstance(message, FailureNotice):
            if self._is_new(GroupLeft(mesh.rank, group.id)):
                self._pass_on_after(TOGETHER)
            self._closed[group.id] = group.to_local
            if len(self._closed) > REMEMBERED:
                del self._closed[next(iter(self._closed))]
        elif self._is_new(GroupFailed(group.id, message)):
            self.pass_on()

    def pass_on(self) -> None:
        """Pass on the news, now."""
        self._waits = False
        words, self._new = self._new, []
        connections = self.mesh.connections
        _send(words, [connections[peer] for peer in self._links() if peer in connections])

    def _pass_on_after(self, seconds: float) -> None:
        if not self._waits or not seconds:
            self._waits = True
            self._later(seconds, self.pass_on)

    def _later(self, seconds: float, do: Callable[[], object]) -> None:
        self.mesh.reactor.call_later(seconds, do)
        self.mesh.reactor.wake()  # a thread may sleep there, and not know of it

    def _is_new(self, word: Word) -> bool:
        """Return whether it is news here; if so, queue it to be passed on."""
        if isinstance(word, (RankLeft, RankLost)):
            is_new = self._gone.setdefault(word.rank, word) is word
        else:
            # A group is broken once, whoever says it.
            key = (word.group, word.rank if isinstance(word, GroupLeft) else -1)
            is_new = self._groups.setdefault(key, word) is word
            if len(self._groups) > REMEMBERED:
                del self._groups[next(iter(self._groups))]
        if is_new:
            self._new.append(word)
        return is_new

    def _links(self) -> set[int]:
        return {*self.neighbours, self._next_here(1), self._next_here(-1)}

    def _next_here(self, way: int) -> int:
        """Return the next rank in one direction that is not known to be gone; or this one."""
        engine, size = self.mesh.engine, self.mesh.world_size
        rank = (self.mesh.rank + way) % size
        while rank in engine.left or rank in engine.lost:
            rank = (rank + way) % size
        return rank

    # In -------------------------------------------------------------------------------------

    def came(self, payload: bytes) -> None:
        """Take news from a peer. Raises `FrameError` if they make no sense."""
        mesh, urgent = self.mesh, False
        for word in decode(payload, News).words:
            if not isinstance(word, GroupFailed) and not 0 <= word.rank < mesh.world_size:
                raise FrameError(f"word about rank {word.rank}: there are {mesh.world_size} ranks")
            if not self._is_new(word):
                continue
            if isinstance(word, GroupFailed):
                urgent = True
                if not mesh.is_own_word(word.failure):
                    mesh.engine.on_control(word.failure.reporter, word.group, word.failure)
            elif word.rank == mesh.rank or word.rank in mesh.connections:
                continue
            elif isinstance(word, RankLost):
                urgent = True
                self.drop_call(word.rank)
                mesh.engine.peer_lost(word.rank, word.reason)
                self.mend_soon()
            elif word.rank not in self.calls:  # there, too, the connection tells, if it opens
                if isinstance(word, RankLeft):
                    self._left(word.rank)
                else:
                    mesh.engine.on_control(word.rank, word.group, None)
        if self._new:
            self._pass_on_after(0.0 if urgent else TOGETHER)

    def refused(self, peer: int) -> None:
        """Take a refused call: the peer listens no more, so it has left or is lost."""
        self.drop_call(peer)
        if isinstance(self._gone.get(peer), RankLeft):
            self._left(peer)
        else:  # word is on its way
            self._later(WORD_WITHIN, lambda: self._gone_without_word(peer))

    def _gone_without_word(self, rank: int) -> None:
        """Take a rank as left: its neighbours would have missed a death, so they left, too."""
        mesh = self.mesh
        if rank in mesh.engine.left or rank in mesh.engine.lost or mesh.engine.closed:
            return
        log.debug("rank %d: no word came of rank %d: it counts as having left", mesh.rank, rank)
        self._left(rank)

    def _left(self, rank: int) -> None:
        self.mesh.engine.peer_left(rank)
        self.mend_soon()

    # Ranks that are gone leave gaps ---------------------------------------------------------

    def mend_soon(self) -> None:
        """Connect with the next rank that is here, if there is no connection: one is gone."""
        if not self._mends:
            self._mends = True
            self._later(MEND_AFTER, self._mend)

    def _mend(self) -> None:
        self._mends = False
        rank = self._next_here(1)
        if rank not in (self.mesh.rank, *self.mesh.connections):
            self.call(rank)


def _send(words: list[Word], connections: list[Connection]) -> None:
    """Send words to these peers. That a group failed may be long, and fills a frame by itself."""
    short: list[Word] = [word for word in words if not isinstance(word, GroupFailed)]
    frames = [short[at : at + SHORT_WORDS] for at in range(0, len(short), SHORT_WORDS)]
    frames += [[word] for word in words if isinstance(word, GroupFailed)]
    for each in frames:
        payload = encode(News(each))
        for connection in connections:
            if not connection.left:
                connection.send_control(Kind.NEWS, payload)
