"""What a launcher tells those who watch its job: what an observer is, and which one a job has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from phalanx import hooks
from phalanx.errors import MisuseError, plain

if TYPE_CHECKING:
    from phalanx.launch.nodes import Nodes
    from phalanx.launch.supervisor import RankProcess
    from phalanx.wire.control import Endpoint


class Observer:
    """An observer that tells nobody anything; `ops/observe/watch/launcher.py` has one that does.

    private   a folder made for this job alone, which whoever ends the job removes; "" for none
    nodes     the other nodes of the job, if there are any
    """

    private = ""
    nodes: Nodes | None = None

    def environment(self) -> dict[str, str]:
        """Return what ranks find in their environment."""
        return {}

    def listen(self, toward: Endpoint, token: str, ranks: int) -> str:
        """Serve this node, of so many ranks, to those who watch on other nodes and hold the token.

        Returns the address. `MisuseError`, `BackendUnavailableError` or OSError if it cannot.
        """
        raise MisuseError(f"{hooks.OPS} is not installed on it")

    def begin(self, generation: int, world_size: int) -> None:
        """Tell that a generation of ranks begins."""

    def look(
        self,
        ranks: Sequence[RankProcess],
        output: Mapping[int, bytes] = MappingProxyType({}),
        *,
        now: bool = False,
    ) -> None:
        """Tell how the ranks are, if somebody watches, and it is time to, or `now`.

        output   what each rank has printed last, if this process has seen it
        """

    def end(self, how: str) -> None:
        """Tell how the job has ended."""


def observer(name: str, node: int, environ: Mapping[str, str]) -> Observer:
    """Return the observer of a job, or a node of one, of that name."""
    if not hooks.has_ops():
        hooks.check_observers(environ)
        return Observer()
    made: Observer = hooks.load(hooks.OF_LAUNCHERS, "a launcher").NodeWatch(name, node, environ)
    return made


class NodePlace(msgspec.Struct, kw_only=True, frozen=True):
    """A node of a job: which ranks it has, and where it can be watched.

    node, host         its number, and the name of its host
    first_rank, ranks  the first of its ranks, and how many they are
    address            host:port; "" while it has not said
    reason             why it does not listen; "" if it does, or has not said
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
    """What a launcher leaves for those who watch on its host, of a job with several launchers.

    token   by which they let them in
    nodes   all but this one
    """

    token: str
    nodes: list[NodePlace]
