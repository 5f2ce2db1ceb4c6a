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
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from phalanx.errors import BackendUnavailableError
from phalanx.launch.environment import STORE_VARIABLE
from phalanx.launch.scratch import scratch_folder
from phalanx.launch.signals import Signals
from phalanx.launch.store import Store, hold_store
from phalanx.launch.story import tell_failure
from phalanx.launch.threads import threads_per_rank
from phalanx.launch.warden import Warden
from phalanx.launch.worker import BOOT, LAUNCHER_VARIABLE
from phalanx.wire.address import Endpoint, parse_address

if TYPE_CHECKING:
    from phalanx.launch.folders import RankFolders
    from phalanx.launch.job import Job

__all__ = ["run"]

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

    from phalanx.launch.folders import RankFolders, keep_handlers, quiet_agent  # noqa: PLC0415

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
        from phalanx.backends.tcp.token import find_token  # noqa: PLC0415 -- torch comes with it

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
