"""Slurm: the environment of `srun`, and the token that the ranks of a step share.

    srun -N 2 -n 4 python train.py

    step 77.0; every rank knows from the environment, without an export:
        rank 0's address        the first node, at a port that follows from 77 and 0
        the job's token         a file in the folder from which the job was submitted:

    rank 0   makes the file (0600) --- all ranks meet --- removes it
    rank k   waits until it is there, reads it

The token then stays in PHALANX_TOKEN of each rank's own environment, as under `phalanx run`.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

from phalanx.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    MisuseError,
)
from phalanx.files import write
from phalanx.launch.reaper import die_with_parent
from phalanx.native.store_rendezvous import tries
from phalanx.transport.tcp.addresses import resolve
from phalanx.transport.tcp.admission import MAKE_ONE, find_token
from phalanx.wire.control import Endpoint

log = logging.getLogger("phalanx")

RESTARTS = "SLURM_RESTART_COUNT"
"""How often this job was put back into the queue; not set the first time."""

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NO_STEP = 0xFFFFFFFA  # from here on: the batch script, an interactive shell, and so on


def step_number(environ: Mapping[str, str]) -> int | None:
    """Return the number of this step in its job, or None: `srun` has started none."""
    text = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return int(text) if text.isdecimal() and int(text) < _NO_STEP else None


def step_name(environ: Mapping[str, str]) -> str:
    """Return the name of this step, such as `77.0`; `77` for a job's script, "" without a job."""
    job, step = environ.get("SLURM_JOB_ID", ""), step_number(environ)
    return job if step is None else f"{job}.{step}"


def check_is_task(environ: Mapping[str, str], world_size: int) -> None:
    """Raise `MisuseError` if this is the script of a job of several tasks, and not one of them."""
    if world_size > 1 and step_number(environ) is None:
        raise MisuseError(
            f"job {step_name(environ)} of Slurm has {world_size} tasks (SLURM_NTASKS), and this is "
            "its script, not one of them (SLURM_STEP_ID is not set): start the ranks from it with "
            "srun, as in `srun python train.py`; or set RANK=0 and WORLD_SIZE=1 to run as one "
            "process"
        )


FIRST_PORT, PORTS, STEPS = 12000, 19997, 64
"""Ports below those that Linux gives to outgoing connections (from 32768); their number is prime.
Jobs that are less than 312 apart never have a port in common in their first 64 steps."""


def step_port(environ: Mapping[str, str]) -> str:
    """Return the port at which the ranks of this step meet, or "" without a job."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return ""
    return str(FIRST_PORT + (int(job) * STEPS + (step_number(environ) or 0)) % PORTS)


def first_node(environ: Mapping[str, str]) -> str:
    """Return the host of rank 0: the first of the step's nodes, or "" if none are named."""
    for name in _NODE_LISTS:
        if environ.get(name):
            try:
                return expand_hosts(environ[name])[0]
            except ValueError as error:
                raise MisuseError(
                    f"{name}={environ[name]!r}: {error}; set MASTER_ADDR to the host of rank 0"
                ) from None
    return ""


def check_first_node(environ: Mapping[str, str], rank: int, endpoint: Endpoint) -> None:
    """Raise `BackendUnavailableError` if the name of rank 0's host does not resolve here."""
    try:
        resolve(endpoint)
    except BackendUnavailableError as error:
        named = next((name for name in _NODE_LISTS if environ.get(name)), "")
        if environ.get("MASTER_ADDR") or not named:
            raise
        host = endpoint.host
        raise BackendUnavailableError(
            f"rank {rank}: {error}. {host} is the first node of this step ({named}="
            f"{environ[named]}), and rank 0 is there. Set MASTER_ADDR to an address of {host} that "
            f"every node reaches; `scontrol show node {host}` may know it (NodeAddr)",
            rank=rank,
            peer=0,
        ) from error


def die_with_step(environ: Mapping[str, str]) -> None:
    """Let this process end with the slurmstepd that has started it, if one has.

    A killed one (memory ran out, say) leaves its ranks behind: they would go on training without
    Slurm's knowledge. A process below the task that srun started stays as it is.
    """
    if environ.get("SLURM_TASK_PID") == str(os.getpid()):
        die_with_parent(os.getppid())


_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this host, from a list such as `4(x2),3`; None if unsaid."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


# Slurm's short form of many host names: `node[003-005,9]`.
_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts in `text`, in its order; `ValueError` if it is no host list.

    `node[003-005,9],gpu1` is `node003 node004 node005 node9 gpu1`: the first number of a range sets
    the width of all. A name may have several brackets.
    """
    names = _NAME.findall(text)
    if not names or _NAME.sub("", text).strip(", "):
        raise ValueError(f"{text!r} is not a list of hosts such as node[003-005,9],gpu1")
    hosts: list[str] = []
    for name in names:
        choices = [
            [plain] if plain else _expand_numbers(numbers) for numbers, plain in _PART.findall(name)
        ]
        hosts += map("".join, product(*choices))
    return hosts


def _expand_numbers(numbers: str) -> list[str]:
    expanded: list[str] = []
    for item in numbers.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"[{numbers}] is not a list of numbers such as [003-005,9]")
        first, last = match[1], match[2] or match[1]
        expanded += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    if not expanded:
        raise ValueError(f"[{numbers}] holds no number: a range runs from low to high")
    return expanded


# ------------------------------------------------------------------------------
# The token of a step. Every rank knows the folder from which a job was submitted, and clusters
# share it among their nodes; the working folder may be a rank's own.
#
# The file's name holds job, step and restart: an earlier start's file is another one.
# If there is one by this name all the same (numbers of jobs begin anew some day), rank 0 takes the
# token that is in it, as the others do.


@contextmanager
def shared_token(
    environ: MutableMapping[str, str], rank: int, *, one_host: bool, timeout: float
) -> Iterator[None]:
    """Give the ranks of this step a token, if they have none, for the `with` block.

    It is PHALANX_TOKEN in `environ` from then on. If the folder cannot be written to, rank 0 logs a
    warning. `CollectiveTimeoutError` when rank 0's file has not come in `timeout` seconds.
    """
    if find_token(environ):
        yield
        return
    folder = environ.get("SLURM_SUBMIT_DIR", "")
    name = f".phalanx-token-{step_name(environ)}.{environ.get(RESTARTS, '0')}"
    path = Path(folder, name)
    if not os.access(folder, os.W_OK | os.X_OK):
        if rank == 0:
            _warn(folder, "there is none that can be written to", one_host=one_host)
        yield
        return
    if rank:
        environ["PHALANX_TOKEN"] = _wait_for(path, rank, timeout)
        yield
        return
    try:
        environ["PHALANX_TOKEN"] = _leave(path)
    except OSError as error:
        _warn(folder, error.strerror or str(error), one_host=one_host)
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path) -> str:
    """Return the token in a file. `AuthenticationError` if there is none, or others can read it."""
    # A network file system looks at a folder anew when it is opened, and not at each lookup in it.
    with suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    return find_token({"PHALANX_TOKEN_FILE": str(path)})


def _leave(path: Path) -> str:
    """As rank 0: write the token's file, which is there whole or not at all."""
    with suppress(AuthenticationError):
        return _read(path)
    token = secrets.token_hex(32)
    write(str(path), f"{token}\n".encode(), 0o600)
    return token


def _wait_for(path: Path, rank: int, timeout: float) -> str:
    problem = ""
    for _ in tries(time.monotonic() + timeout):
        try:
            return _read(path)
        except AuthenticationError as error:
            problem = str(error)
    raise CollectiveTimeoutError(
        f"rank {rank} waited {timeout:g} s for the token that rank 0 leaves in {path} ({problem}): "
        "has rank 0 called phalanx.init(), and do all nodes share the folder from which the job "
        "was submitted (SLURM_SUBMIT_DIR)? If not, set PHALANX_TOKEN before srun; make one with "
        f"{MAKE_ONE}",
        rank=rank,
        peer=0,
        op="init",
        seconds=timeout,
    )


def _warn(folder: str, why: str, *, one_host: bool) -> None:
    means = (
        "any process of this user on this host may join the job"
        if one_host
        else "only ranks of rank 0's own host can join the job"
    )
    log.warning(
        "the ranks have no token, and rank 0 can leave none in the folder from which the job was "
        "submitted (SLURM_SUBMIT_DIR=%s: %s): %s. Set PHALANX_TOKEN before srun; make one with %s",
        folder,
        why,
        means,
        MAKE_ONE,
    )
