"""The folder of one job on one host, in which its ranks publish while somebody watches.

    /dev/shm/phalanx-1000/4711-8f3a/    0700, of this user; made by the launcher
        watched        a watcher touches it, twice a second
        node-0.json    by the launcher: the status of its ranks' processes (see `node_part`)
        rank-3.json    by the rank: its state (publish.py)
        others.json    by the launcher: the addresses of the other nodes (launcher.py)

The first two are a `JobState`, a part of the job, and the last is `OtherNodes`. A file is written
whole or not at all (a new file is renamed), for its user only (0600). With `PHALANX_WATCH=folder`
the folder is that one, under any launcher.

Publishers look at the time of `watched`. As long as it changes, there is a watcher; the clocks of
two hosts that share a folder need not agree.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from phalanx import files
from phalanx.errors import MisuseError
from phalanx.launch.observer import OtherNodes
from phalanx.ops.observe.watch.state import MOST_BYTES, JobState, RankState, Status, read_state
from phalanx.transport.tcp.heartbeat import host_id, is_stopped
from phalanx.wire.control import learned

VARIABLE = "PHALANX_WATCH"
PERIOD = 0.5  # seconds between two states of a rank, and two touches of a watcher
LINGER = 5.0  # seconds after the last touch in which there is a watcher
OLD = 60.0  # seconds for which the last word of a job that has ended is kept for its watchers
OTHERS = "others.json"
GONE = "its launcher has gone without a word: it was killed, perhaps"
_MARKER = "watched"
_PART = re.compile(r"(node|rank)-(\d{1,7})\.json")


class WatchFolder:
    """The folder of one job on this host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._touched = self._touched_at()
        self._watched_until = -1.0

    # For publishers -------------------------------------------------------------------------

    def is_watched(self) -> bool:
        """Return whether a watcher has touched the marker lately; ask the file system, once."""
        now, touched = time.monotonic(), self._touched_at()
        if touched not in (0, self._touched):
            self._touched = touched
            self._watched_until = now + LINGER
        return now < self._watched_until

    def write(self, name: str, part: JobState | OtherNodes) -> None:
        """Publish a part of the job, or `OTHERS`. If it fails, leave nothing; raise `OSError`."""
        files.write(str(self.path / name), msgspec.json.encode(part), 0o600)

    def _touched_at(self) -> int:
        with suppress(OSError):
            return os.stat(self.path / _MARKER).st_mtime_ns
        return 0

    # For watchers ---------------------------------------------------------------------------

    def touch(self) -> None:
        """Ask for more. `OSError` when the folder is gone, or another user's."""
        marker = files.open_lock(str(self.path / _MARKER), 0o600)
        try:
            os.utime(marker, ns=(time.time_ns(),) * 2)
        finally:
            os.close(marker)

    def read(self) -> JobState | None:
        """Return the job as its parts here show it; None if nothing was published.

        The ranks' own states are completed by their launcher, which knows their ends, and by a look
        at their processes, if these are on this machine.
        """
        found = list(self._parts())
        nodes = [part for name, part in found if name == "node"]
        ranks = [part for name, part in found if name == "rank"]
        if not nodes and not ranks:
            return None
        newest = max(nodes or ranks, key=lambda part: (part.generation, part.time))
        latest = max(part.time for _, part in found)
        job = msgspec.structs.replace(newest, time=latest, ranks=[], slowest=None, chain=[])
        of_launchers = {state.rank: state for part in nodes for state in part.ranks}
        of_ranks = {
            state.rank: state
            for part in ranks
            for state in part.ranks
            if state.generation == job.generation or not nodes
        }
        for rank in sorted({*of_launchers, *of_ranks}):
            if 0 <= rank < job.world_size:
                job.ranks.append(_joined(of_ranks.get(rank), of_launchers.get(rank)))
        return job

    def others(self) -> OtherNodes | None:
        """Return the addresses of the job's other nodes; None if there are none, or not yet."""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(_content(self.path / OTHERS), type=learned(OtherNodes))
        return None

    def launcher(self) -> int:
        """Return the process of the launcher that made this folder; 0 if none did."""
        number, _, _ = self.path.name.partition("-")
        return int(number) if number.isdigit() and self.path.parent == private_base() else 0

    def is_gone(self) -> bool:
        """Return whether the launcher that made this folder has ended."""
        launcher = self.launcher()
        return bool(launcher) and process_status(launcher)[0] == "dead"

    def has_launcher(self) -> bool:
        """Return whether a launcher publishes here, too, and will report the end of the job."""
        return next(self.path.glob("node-*.json"), None) is not None

    def _parts(self) -> Iterator[tuple[str, JobState]]:
        for path in sorted(self.path.glob("*-*.json")):
            matched = _PART.fullmatch(path.name)
            part = read_state(_content(path)) if matched is not None else None
            if matched is not None and part is not None:
                yield matched[1], part


def _content(path: Path) -> bytes:
    """Return the content of a published file; b"" if there is no such file."""
    with suppress(OSError), files.reading(str(path), MOST_BYTES) as file:
        if os.fstat(file).st_uid == os.getuid():
            return os.read(file, MOST_BYTES)
    return b""


def _joined(own: RankState | None, launcher: RankState | None) -> RankState:
    """Return a rank's own state, with its process's status from its launcher, or the system."""
    if own is None:
        assert launcher is not None
        return launcher
    status: tuple[Status, str] = "running", ""
    if launcher is not None:
        status, own.log = (launcher.status, launcher.reason), launcher.log
    elif own.machine == machine() and own.status != "ended":
        status = process_status(own.pid)
    if status[0] not in ("starting", "running"):
        own.status, own.reason = status
    return own


# ------------------------------------------------------------------------------
# Processes of this machine.


@cache
def machine() -> str:
    """Return the value of `RankState.machine` for processes that this one sees."""
    return hashlib.blake2b(host_id().encode(), digest_size=8).hexdigest()


def process_status(pid: int) -> tuple[Status, str]:
    """Return the status of a process of this machine, and the reason in words."""
    if is_stopped(pid):
        return "stopped", f"process {pid} is stopped (SIGSTOP, or a debugger holds it)"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead", f"process {pid} is gone: it has ended, or was killed"
    except PermissionError:
        pass
    return "running", ""


# ------------------------------------------------------------------------------
# The places of the folders.

MEMORY = Path("/dev/shm")


def private_base() -> Path:
    """Return the parent folder of this user's jobs on this host; it may not exist.

    Another user may have made one of that name first: then its name is longer.
    """
    parent = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    base = parent / f"phalanx-{os.getuid()}"
    if _is_private(base) is False:
        return next(filter(_is_private, sorted(parent.glob(f"{base.name}-*"))), base)
    return base


def _is_private(path: Path) -> bool | None:
    """Return whether it is a folder that only this user owns and writes; None if it is absent."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    mode, mine = status.st_mode, status.st_uid == os.getuid()
    return stat.S_ISDIR(mode) and mine and not mode & 0o022


def open_folder(path: Path) -> WatchFolder:
    """Return the folder at `path`; make it for this user alone if it is not there.

    `MisuseError` if it cannot be made, or other users may write there.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_private = _is_private(path)
    except OSError as error:
        raise MisuseError(f"no state can be published in {path}: {error.strerror}") from error
    if not is_private:
        raise MisuseError(
            f"no state is published in {path}: it has to be a folder of yours, in which nobody "
            f"else may write: chmod 700 {path}, or name another one"
        )
    return WatchFolder(path)


def make_private_folder(name: str) -> WatchFolder:
    """Make and return a folder of this name for a job of this host. Remove those of old jobs.

    `MisuseError` if there can be none.
    """
    base = private_base()
    if _is_private(base) is False:
        with suppress(OSError):  # a name that nobody can have taken; ranks find the same one
            tempfile.mkdtemp(prefix=f"{base.name}-", dir=base.parent)
        base = private_base()
    base = open_folder(base).path
    for folder in private_folders():
        with suppress(OSError):
            if not folder.launcher() or time.time() - folder.path.stat().st_mtime < OLD:
                continue
            state = folder.read()  # the process of a notebook lives longer than its jobs
            if folder.is_gone() or (state is not None and state.ended):
                shutil.rmtree(folder.path, ignore_errors=True)
    return open_folder(base / name)


def private_folders() -> list[WatchFolder]:
    """Return the folders of this user's jobs on this host, also of those that ended just now."""
    base = private_base()
    with suppress(OSError):
        if base.lstat().st_uid == os.getuid():
            return [WatchFolder(path) for path in sorted(base.iterdir()) if path.is_dir()]
    return []
