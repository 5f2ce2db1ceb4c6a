"""`phalanx run`: a script on many ranks, on torch's elastic launcher.

    phalanx run -n 2 train.py --lr 3
      `- torch's elastic agent: starts, watches and restarts the ranks of this host
           |- rank 0: worker.main() -> train.py --lr 3        "[rank 0] loss 3.1"
           `- rank 1: worker.main() -> train.py --lr 3        "[rank 1] loss 3.2"

What a rank prints comes through pipes (`folders.py`). A launcher that is killed has a warden, and
its ranks die with it; one that is told to end stops them first (`signals.py`).

On one host everything stays on it: the store that the ranks meet at listens on loopback, and the
job's token is fresh. On several, node 0 holds the store at --master, and rank 0 shares a token
there; PHALANX_TOKEN or PHALANX_TOKEN_FILE, set on every host, keeps it out of the network.
"""

from __future__ import annotations

import errno
import importlib.machinery
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from phalanx.errors import (
    BackendUnavailableError,
    InvalidRankError,
    InvalidWorldSizeError,
    MisuseError,
)
from phalanx.launch.environment import STORE_VARIABLE, threads_per_rank
from phalanx.launch.reaper import PID_FILE, Warden, end_session
from phalanx.launch.report import Record, describe_exit, read_record
from phalanx.launch.scratch import GRACE, scratch_folder
from phalanx.launch.signals import Signals
from phalanx.launch.store import Store, hold_store
from phalanx.launch.worker import BOOT, INTERRUPTED, LAUNCHER_VARIABLE, STOPPED
from phalanx.wire.control import Endpoint, parse_address

if TYPE_CHECKING:
    from phalanx.launch.output import RankFolders
_JOIN_TIMEOUT = 300
"""Seconds that the nodes of a job wait for each other."""

_WHY_NOT = MappingProxyType(
    {
        errno.EADDRINUSE: "the port is in use, perhaps by another job or one that has not ended: "
        "end it, or give --master another port, on every node",
        errno.EADDRNOTAVAIL: "that is no address of this host: start --node-rank 0 on the host "
        "that --master names",
        errno.EACCES: "ports below 1024 are the system's: give --master another port, on every "
        "node",
    }
)


def run(job: Job) -> int:
    """Run `job` to its end; return the exit code: 0, or that of the rank that failed first.

    Each line that a rank prints appears here behind "[rank 3] ". When a rank fails the others are
    stopped, and the story of the first that failed comes last, on stderr. A failure of the
    launch itself is a `BackendUnavailableError`. A signal that ends a program (SIGINT, SIGTERM,
    SIGHUP, SIGQUIT) goes to the ranks, which have `GRACE` seconds; the exit code is 128 more.
    """
    with Signals() as signals:
        try:
            signals.arm()
            job.check()
            with ExitStack() as stack:
                folder = stack.enter_context(scratch_folder())
                stack.enter_context(Warden(folder))
                _held, address = _hold_store(job)  # the store lives as long as this name
                stack.enter_context(_variables(_worker_environment(job, address)))
                return _launch(job, address, folder, signals)
        except BaseException:
            if signals.received is None:
                raise
            return signals.say(signals.received)  # whatever was raised follows from it


def _launch(job: Job, address: str, folder: str, signals: Signals) -> int:
    # Torch is imported here and below, not above: it takes seconds, and --help needs none of it.
    from torch.distributed import DistError  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import RendezvousError  # noqa: PLC0415
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    from phalanx.launch.output import RankFolders, keep_handlers, quiet_agent  # noqa: PLC0415

    signals.check()
    folders = RankFolders(folder, job.max_restarts, signals.check)
    signals.settle = folders.settle
    signals.tell = folders.end
    signals.force = folders.kill
    signals.error = partial(_as_torch_does, SignalException)
    kind = "module" if job.module else "script"
    # The agent takes $ for the start of a name of its own.
    words = [word.replace("$", "$$") for word in ("-c", BOOT, kind, job.target, *job.args)]
    failures: dict[int, int] = {}
    try:
        with quiet_agent(), keep_handlers(signals.handle):
            elastic_launch(_config(job, address, folders), sys.executable)(*words)
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException as error:
        signals.received = signals.received or int(error.sigval)
    except (DistError, RendezvousError) as error:
        raise BackendUnavailableError(
            f"node {job.node_rank} of {job.nodes} did not meet the others at {job.master}: are "
            f"all of them started with the same --master, and may they connect to it? ({error})"
        ) from error
    finally:
        signals.disarm()
        folders.close()
    if signals.received is not None:
        return signals.say(signals.received)
    if not failures:
        return 0
    attempt = folders.attempt
    return tell_failure(attempt.endings(failures), nodes=job.nodes, left=attempt.left(failures))


def _as_torch_does(kind: Any, signum: int) -> BaseException:
    """Return what torch's agent takes for a signal: it ends what there still is."""
    error: BaseException = kind(f"signal {signum}", signal.Signals(signum))
    return error


def _config(job: Job, address: str, folders: RankFolders) -> Any:
    from torch.distributed.launcher.api import LaunchConfig  # noqa: PLC0415

    one_host = job.nodes == 1
    config = LaunchConfig(
        min_nodes=job.nodes,
        max_nodes=job.nodes,
        nproc_per_node=job.ranks,
        run_id=secrets.token_hex(8) if one_host else "phalanx",
        role="rank",
        rdzv_backend="c10d" if one_host else "static",
        rdzv_endpoint=address,
        rdzv_configs={"timeout": _JOIN_TIMEOUT, "rank": job.node_rank},
        max_restarts=job.max_restarts,
        monitor_interval=0.1,
        local_addr="127.0.0.1" if one_host else None,
        logs_specs=folders,
    )
    if hasattr(config, "signals_to_handle"):
        config.signals_to_handle = ""
    return config


def _hold_store(job: Job) -> tuple[Store | None, str]:
    """Return the store at which the ranks meet, if this launcher holds it, and its address."""
    if job.node_rank > 0:
        return None, job.master
    host, port = parse_address(job.master) if job.nodes > 1 else ("127.0.0.1", 0)
    try:
        store, port = hold_store(host, port, timeout=_JOIN_TIMEOUT)
    except OSError as error:
        why = _WHY_NOT.get(error.errno or 0, f"{error}: give --master a name and a port of node 0")
        raise BackendUnavailableError(
            f"node 0 cannot listen at {Endpoint(host, port)}: {why}"
        ) from error
    return store, str(Endpoint(host, port))


def _worker_environment(job: Job, address: str) -> dict[str, str | None]:
    """Return what the ranks find in their environment besides the agent's; None: unset."""
    added: dict[str, str | None] = {
        "PYTHONUNBUFFERED": "1",
        # Else the ranks of a restart find the addresses of dead ones in torch's store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(job.ranks))),
        LAUNCHER_VARIABLE: str(os.getpid()),
        STORE_VARIABLE: None,
    }
    if job.nodes == 1:
        added[STORE_VARIABLE] = address
        from phalanx.transport.tcp.admission import find_token  # noqa: PLC0415 -- torch comes with it

        if not find_token():  # else the ranks inherit where to find it
            added["PHALANX_TOKEN"] = secrets.token_hex(32)
    return added


@contextmanager
def _variables(values: dict[str, str | None]) -> Iterator[None]:
    """Set the variables of this process, which its ranks inherit, for a while."""
    before = {name: os.environ.get(name) for name in values}
    _assign(values)
    try:
        yield
    finally:
        _assign(before)


def _assign(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# ------------------------------------------------------------------------------
# One start of all ranks of this host by `phalanx run`: who ended when, and how.
#
# Torch's agent gives the others 30 seconds once a rank has failed, and knows the second in which
# it looked. So each process is waited for here too, without taking its exit code from the agent:
#
#     a rank fails ---> the agent sends the others SIGTERM ---> here, GRACE later, SIGKILL
#          `---> here, at once, SIGKILL for what it has started itself
#
# The process ids come from the ranks, which write them down, for the warden too; when a process has
# ended its file is removed, before its number may become another's.

_POLL = 0.05
_ORDERED = frozenset({-signal.SIGTERM, -signal.SIGINT, STOPPED, INTERRUPTED})
"""Exit codes of a rank that did as it was told."""


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    rank: int
    exitcode: int
    record: Record | None
    time: float
    follows: bool

    @property
    def order(self) -> tuple[bool, float]:
        """The smallest is the root cause."""
        return self.follows, self.time


@dataclass
class _Process:
    rank: int
    error_file: str
    pid: int | None = None
    exitcode: int | None = None
    ended: float | None = None
    killed: bool = False


class Attempt:
    """Follows the ranks of one attempt, in threads, until `close()`.

    `error_files` maps each rank to its record; where its process puts it, once it runs, there is
    its process id too.
    """

    def __init__(self, error_files: dict[int, str]) -> None:
        self._processes = {rank: _Process(rank, path) for rank, path in error_files.items()}
        self._closed = threading.Event()
        if hasattr(os, "waitid"):
            for process in self._processes.values():
                name = f"rank {process.rank}"
                threading.Thread(
                    target=self._follow, args=(process,), name=name, daemon=True
                ).start()

    def close(self) -> None:
        """Follow no more: nothing is killed from now on."""
        self._closed.set()

    def settle(self, seconds: float) -> None:
        """Wait until every rank is able to hear a signal, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while any(process.pid is None for process in self._processes.values()):
            if time.monotonic() > deadline or self._closed.wait(_POLL / 2):
                return

    def end(self, signum: int) -> None:
        """Pass a signal on to the ranks; return when all have ended, killed after `GRACE`.

        To them alone: what they have started ends with them.
        """
        for pid in self._alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        deadline = time.monotonic() + GRACE
        while self._alive() and time.monotonic() < deadline:
            time.sleep(_POLL / 5)
        self.kill()

    def kill(self) -> None:
        """Kill the ranks that are still there, and what they have started, now."""
        for pid, process in self._alive().items():
            # Its thread may not have got round to say that it ended by itself.
            process.killed = not _has_ended(pid)
            end_session(pid)  # the agent gave each a session of its own

    def endings(self, exitcodes: dict[int, int] | None = None) -> list[Ending]:
        """Return how the ranks failed that have, from what is known here and `exitcodes`."""
        known = {p.rank: p.exitcode for p in self._processes.values() if p.exitcode is not None}
        known.update(exitcodes or {})
        return [
            self._ending(self._processes[rank], code)
            for rank, code in known.items()
            if code != 0 and rank in self._processes
        ]

    def left(self, failures: Collection[int]) -> list[int]:
        """Return the ranks that have ended with exit code 0, which nobody orders.

        Of one that ended too soon to be followed, only the agent knows the code: `failures` are the
        ranks for which it is another one.
        """
        return sorted(
            rank
            for rank, p in self._processes.items()
            if p.exitcode == 0
            or (p.exitcode is None and p.ended is not None and rank not in failures)
        )

    def _alive(self) -> dict[int, _Process]:
        """Return the processes that run now, by their ids."""
        if self._closed.is_set():
            return {}
        return {
            process.pid: process
            for process in self._processes.values()
            if process.pid is not None and process.ended is None
        }

    def _ending(self, process: _Process, code: int) -> Ending:
        record = read_record(process.error_file)
        if record is not None:
            return Ending(process.rank, max(code, 1), record, record.time, record.follows)
        follows = process.killed or code in _ORDERED
        return Ending(process.rank, code, None, process.ended or time.time(), follows)

    def _follow(self, process: _Process) -> None:
        pid = self._read_pid(process)
        if pid is None:
            return
        process.pid = pid
        try:
            # WNOWAIT leaves the exit code for the agent.
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the agent was faster
            status = None
        process.ended = time.time()
        if status is not None:
            killed = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            process.exitcode = -status.si_status if killed else status.si_status
        if process.exitcode != 0:
            end_session(pid)  # what the rank has started: its data loader's workers, say
        with suppress(OSError):
            _pid_file(process).unlink()
        if process.exitcode not in (0, None) and process.exitcode not in _ORDERED:
            self._kill_others()

    def _read_pid(self, process: _Process) -> int | None:
        path = _pid_file(process)
        while not self._closed.wait(_POLL):
            try:
                text = path.read_text()
            except OSError:
                continue
            if text.endswith("\n"):
                return int(text)
        return None

    def _kill_others(self) -> None:
        """Kill, `GRACE` from now, the ranks (and what they started) that are still there."""
        if not self._closed.wait(GRACE):
            self.kill()


def _has_ended(pid: int) -> bool:
    """Whether this child has; whoever waits for it may still do so."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # and somebody has waited for it
        return True


def _pid_file(process: _Process) -> Path:
    return Path(process.error_file).with_name(PID_FILE)


# ------------------------------------------------------------------------------
# What `phalanx run` is asked to start, checked before anything starts.


@dataclass(frozen=True)
class Job:
    """One script on `ranks` ranks of this host, and as many of each of `nodes` hosts."""

    ranks: int
    target: str
    """A script's path, or with `module` the name of a module."""
    args: tuple[str, ...] = ()
    module: bool = False
    nodes: int = 1
    node_rank: int = 0
    master: str = ""
    """host:port of node 0, the same for all; needed with several nodes."""
    max_restarts: int = 0
    """How often all ranks of all hosts are started again when one has failed.

    Each host counts for itself. A failure ends the ranks of every host, and so they count alike;
    where one was already done it is not: the others wait for it, and say so.
    """

    def check(self) -> None:
        """Raise what is wrong: `InvalidWorldSizeError`, `InvalidRankError` or `MisuseError`."""
        if self.ranks < 1 or self.nodes < 1:
            raise InvalidWorldSizeError(
                f"{self.nodes} nodes of {self.ranks} ranks: it takes at least one of each"
            )
        if not 0 <= self.node_rank < self.nodes:
            raise InvalidRankError(
                f"--node-rank {self.node_rank} is not one of {self.nodes} nodes: they count "
                f"from 0, the last is {self.nodes - 1}"
            )
        if self.max_restarts < 0:
            raise MisuseError(f"--max-restarts {self.max_restarts}: it is 0 or more")
        if self.nodes > 1 and not self.master:
            raise MisuseError(
                f"--nnodes {self.nodes} needs --master host:port: a host name of node 0 and a "
                "free port there, the same on every node"
            )
        if self.master:
            try:
                parse_address(self.master)
            except ValueError as error:
                raise MisuseError(f"--master {self.master}: {error}") from None
        self._find_target()

    def _find_target(self) -> None:
        if self.module:
            top = self.target.partition(".")[0]
            # Only the outermost name: looking further would import it, here.
            known = top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(
                top, [str(Path.cwd()), *sys.path]
            )
            if not known:
                raise MisuseError(f"there is no module {top!r} in {Path.cwd()} or installed")
            return
        path = Path(self.target)
        if not path.is_file() and not (path / "__main__.py").is_file():
            what = "a folder without __main__.py" if path.is_dir() else "not there"
            hint = "; for a module, add -m" if os.sep not in self.target and not path.suffix else ""
            raise MisuseError(f"the script {self.target} is {what} (in {Path.cwd()}){hint}")


# ------------------------------------------------------------------------------
# What the user is told when a run has failed: which rank was first, and how.

_HINTS = {
    -signal.SIGKILL: "; nobody here sent it: the kernel does when memory runs out",
    -signal.SIGSEGV: "; a crash in compiled code: its output holds the stack",
    -signal.SIGTERM: ", sent from outside, before it had begun",
    STOPPED: " is what it ends with after a SIGTERM, sent from outside",
    INTERRUPTED: " is what it ends with after a SIGINT, sent from outside",
}


def root_cause(endings: Iterable[Ending]) -> Ending:
    """Return the ending that the others follow from."""
    return min(endings, key=lambda ending: ending.order)


def describe(ending: Ending) -> str:
    """Return the story of one rank's failure: a line, and its traceback if it left one."""
    how = describe_exit(ending.exitcode)
    if ending.record is None:
        hint = _HINTS.get(ending.exitcode, "; it left no traceback")
        return f"rank {ending.rank} {'was' if ending.exitcode < 0 else 'failed:'} {how}{hint}"
    if not ending.record.traceback:
        return f"rank {ending.rank} failed ({how}): {ending.record.summary}"
    text = ending.record.traceback.rstrip()
    return f"rank {ending.rank} failed ({how}); its traceback:\n{text}"


def summarise(ending: Ending) -> str:
    """Return how one rank failed in one line."""
    how = describe_exit(ending.exitcode)
    if ending.record is not None:
        return f"rank {ending.rank} failed ({how}: {ending.record.summary})"
    return f"rank {ending.rank} {'was' if ending.exitcode < 0 else 'failed:'} {how}"


def tell_failure(endings: list[Ending], *, nodes: int, left: Sequence[int] = ()) -> int:
    """Write the story of the first failure to stderr; return the exit code that fits it.

    `left` are ranks that ended in good order: too soon for the others, if these lost a peer or
    waited in vain.
    """
    root = root_cause(endings)
    if nodes > 1 and root.follows:
        sys.stderr.write("the first failure was on another node; here, because of it:\n")
    sys.stderr.write(f"{describe(root)}\n")
    if left:
        who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}"
        sys.stderr.write(f"{who} ended with exit code 0\n")
    return root.exitcode if root.exitcode > 0 else 128 - root.exitcode
