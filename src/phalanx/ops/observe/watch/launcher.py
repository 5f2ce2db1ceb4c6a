"""The launcher's reports to watchers: the status of its ranks' processes.

A rank that is stopped or dead cannot say so itself. The launcher looks at its ranks all the time,
and reads their output. While somebody watches it publishes more than the ranks do (folder.py): the
stopped ranks, the ends of the dead ones, the last line of each, and at last the job's end. When
somebody watches on one of several hosts, all launchers listen (nodes.py).
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from typing_extensions import override

from phalanx.errors import MisuseError, plain
from phalanx.launch.observer import Observer, OtherNodes
from phalanx.launch.report import AGAIN, describe_failure
from phalanx.launch.supervisor import RankProcess
from phalanx.ops.observe.watch import folder
from phalanx.ops.observe.watch.nodes import WatchServer, as_address, serve
from phalanx.ops.observe.watch.state import JobState, RankState, Status
from phalanx.transport.tcp import addresses
from phalanx.wire.control import Endpoint


class NodeWatch(Observer):
    """The publisher of one host's launcher. If no folder can be made, a line on stderr says so, and
    the job goes on.
    """

    def __init__(self, name: str, node: int, environ: Mapping[str, str]) -> None:
        self._file = f"node-{node}.json"
        self._part = JobState(name=name, world_size=0, time=time.time(), ranks=[])
        self._folder: folder.WatchFolder | None = None
        self._next = 0.0
        self._servers: list[WatchServer] = []
        self._others: OtherNodes | None = None  # as they stand in the folder
        self.private = ""
        given = environ.get(folder.VARIABLE, "")
        above = given.startswith(f"{folder.private_base()}/")  # that of a launcher above this one
        endpoint = as_address(given)
        if given and not above and endpoint is None:
            self._folder = folder.open_folder(Path(given))
            return
        try:
            self._folder = folder.make_private_folder(f"{os.getpid()}-{secrets.token_hex(4)}")
            self.private = str(self._folder.path)
        except MisuseError as error:
            sys.stderr.write(f"phalanx: this job cannot be watched: {error}\n")
        if endpoint is not None and self._folder is not None:
            try:
                self._servers.append(serve(self._folder, endpoint))
            except BaseException:
                shutil.rmtree(self.private, ignore_errors=True)
                raise

    @override
    def environment(self) -> dict[str, str]:
        return {folder.VARIABLE: str(self._folder.path) if self._folder is not None else ""}

    @override
    def listen(self, toward: Endpoint, token: str, ranks: int) -> str:
        """Listen as an `Observer`: at the address on the route to `toward`, node 0's launcher. Its
        port is one of PHALANX_PORTS that the ranks leave free.
        """
        if self._folder is None:
            raise MisuseError("it has no folder in which its ranks publish")
        try:
            addresses.check_listening(ranks + 1)
        except MisuseError:
            addresses.chosen_interfaces()
            raise MisuseError(
                f"{addresses.PORTS}={os.environ[addresses.PORTS]} has a port for each of its "
                f"{ranks} ranks, and none for those who watch: give one more"
            ) from None
        listener = addresses.listen_on(addresses.address_toward(*toward, one_host=False))
        server = WatchServer(self._folder, listener, token.encode())
        self._servers.append(server)
        return str(server.endpoint)

    @override
    def begin(self, generation: int, world_size: int) -> None:
        self._part.generation, self._part.world_size = generation, world_size
        self._part.ranks = []
        self._publish()

    @override
    def look(
        self,
        ranks: Sequence[RankProcess],
        output: Mapping[int, bytes] = MappingProxyType({}),
        *,
        now: bool = False,
    ) -> None:
        if self._folder is None or (time.monotonic() < self._next and not now):
            return
        self._next = time.monotonic() + folder.PERIOD
        if self._folder.is_watched():
            self._tell_others()
            self._part.ranks = [self._state(rank, output.get(rank.rank, b"")) for rank in ranks]
            self._publish()

    @override
    def end(self, how: str) -> None:
        """Report the end of the job. Without watchers nothing stays of a private folder."""
        self._part.ended = how
        if self._folder is None:
            return
        if self._folder.is_watched():
            self._publish()
            for server in self._servers:
                server.finish()
        elif self.private:
            shutil.rmtree(self.private, ignore_errors=True)
        else:
            with suppress(OSError):
                (self._folder.path / self._file).unlink()

    def _tell_others(self) -> None:
        """Tell watchers here the other nodes' addresses; let these listen, if they do not."""
        if self.nodes is None or not self.private:  # else all nodes publish in one folder
            return
        self.nodes.watching.watched.set()
        others = self.nodes.watching.others()
        if others is not None and others != self._others:
            self._others = others
            self._write(folder.OTHERS, others)

    def _publish(self) -> None:
        self._part.time = time.time()
        self._write(self._file, self._part)

    def _write(self, name: str, part: JobState | OtherNodes) -> None:
        if self._folder is not None:
            try:
                self._folder.write(name, part)
            except OSError as error:  # a full disk, say: the job goes on
                sys.stderr.write(f"phalanx: this job cannot be watched any more: {error}\n")
                self._folder = None

    def _state(self, rank: RankProcess, output: bytes) -> RankState:
        status, reason = _status(rank)
        return RankState(
            rank=rank.rank,
            host=socket.gethostname(),
            pid=rank.process.pid,
            machine=folder.machine(),
            generation=self._part.generation,
            time=time.time(),
            status=status,
            reason=plain(reason),
            log=_last_line(output),
        )


def _status(rank: RankProcess) -> tuple[Status, str]:
    """Return the status of a rank's process, and the reason, as far as its launcher knows."""
    if rank.code is None and rank.report is None:
        found = folder.process_status(rank.process.pid)
        return found if found[0] == "stopped" else ("starting", "")
    if rank.failed:
        return "dead", describe_failure(rank, brief=True)
    if rank.code in (0, AGAIN) or rank.code is None:
        return "ended", ""
    return "dead", "its launcher has ended it, because another rank failed or after a signal"


def _last_line(output: bytes) -> str:
    """Return the last line that is not empty, as a terminal shows it."""
    lines = output.decode("utf-8", "replace").replace("\r", "\n").split("\n")
    return next((shown for line in reversed(lines) if (shown := plain(line).strip())), "")
