"""This process's rank, as its launcher left it in the environment.

    launcher       known by                   other variables
    torchrun       RANK and WORLD_SIZE        LOCAL_RANK, MASTER_ADDR, TORCHELASTIC_*, ...
    mpirun         OMPI_COMM_WORLD_RANK       OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, ...
    mpiexec        PMI_RANK                   PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun           SLURM_PROCID               SLURM_NTASKS, SLURM_LOCALID, the list of nodes

The first row that is there counts. A RANK set by hand, or by torchrun under srun, is meant; and
under mpirun in a job of Slurm all ranks of a host see one SLURM_PROCID. (With `srun --mpi=pmi2`
there is a PMI_RANK, but no MPI_LOCALRANKID: that is srun. So is a RANK that was set to
SLURM_PROCID, for torch.) MASTER_ADDR and MASTER_PORT are read for every launcher; for srun they
need not be set (slurm.py).

A process of an elastic job has PHALANX_STORE and PHALANX_JOB, and no rank: its members give it one.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.errors import DistributedError, InvalidRankError, InvalidWorldSizeError, MisuseError
from phalanx.launch import slurm
from phalanx.wire.control import is_loopback, parse_address

Source = Literal["torchrun", "mpirun", "slurm", "environment"]

# The address of `phalanx run`'s store, as host:port; it comes before MASTER_ADDR. In an elastic job
# also etcd://host:port,...
STORE_VARIABLE = "PHALANX_STORE"
# Of an elastic job: its name, that by which the launcher's store knows it if that is another one,
# and the least and the largest number of ranks.
JOB_VARIABLE, LAUNCH_VARIABLE = "PHALANX_JOB", "PHALANX_LAUNCH"
MIN_VARIABLE, MAX_VARIABLE = "PHALANX_MIN_RANKS", "PHALANX_MAX_RANKS"
ELASTIC_VARIABLES = (JOB_VARIABLE, LAUNCH_VARIABLE, MIN_VARIABLE, MAX_VARIABLE)
ETCD = "etcd://"
# What this thread is, in words, if its function has been given a backend: "rank 1 of 4 of ...".
GIVEN: ContextVar[str] = ContextVar("what has been given a backend", default="")
_JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class World:
    """The launcher's description of this process and the others of its job.

    The rendezvous adds rank 0's address, the token by which a rank belongs to the job, and whether
    "auto" is NCCL.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0  # 0: not said. Under mpirun the ranks can meet through MPI then
    restart_count: int = 0
    # The launcher holds a store at `master_addr:master_port`; else rank 0 may listen there.
    agent_store: bool = False
    source: Source = "environment"
    run_id: str = ""
    address: str = ""  # host:port of rank 0
    token: str | None = field(default=None, repr=False)  # None: the environment's, if there is one
    # Rank 0's, already listening at `address`; None: the backend listens there itself.
    listener: socket.socket | None = None
    own_store: bool = False  # the launcher's store is ours (store.py), and not torch's
    nccl: bool = False  # the ranks know that each of them has a GPU of its own, and NCCL

    @property
    def one_host(self) -> bool:
        """Return whether every rank runs on this host."""
        return self.local_world_size == self.world_size


class _Launcher(NamedTuple):
    """The names of one launcher's variables."""

    source: Source
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_BY_HAND = _Launcher("environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = _Launcher("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
_OPEN_MPI = _Launcher(
    "mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
_PMI = _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SHELLS = ("bash", "interactive")


def read_environment(environ: Mapping[str, str]) -> World | None:
    """Return the launcher's description in `environ`, or None without a launcher.

    An allocation without a started step (`salloc`, then `python`) is no launcher. Impossible
    numbers raise `InvalidRankError`, `InvalidWorldSizeError` or `MisuseError`, which name the
    variable, its value, and the remedy. So do an elastic job, in which no rank is fixed, and a rank
    of `spawn` or `simulate`, which has its backend already.
    """
    _check_may_join(environ)
    launcher = _find_launcher(environ)
    if launcher is None:
        return None
    rank = _number(environ, launcher.rank, InvalidRankError)
    world_size = _number(environ, launcher.world_size, InvalidWorldSizeError, at_least=1)
    if rank >= world_size:
        raise InvalidRankError(
            f"{launcher.rank}={rank} is not one of {launcher.world_size}={world_size} ranks: "
            f"ranks count from 0, the last is {world_size - 1}",
            peer=rank,
        )
    addr, port, agent_store = _master(environ, launcher, world_size)
    local_rank, local_world_size = _local(environ, launcher, rank, world_size, addr)
    elastic = "TORCHELASTIC_RUN_ID" in environ and launcher is _BY_HAND
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=addr,
        master_port=port,
        restart_count=_number(
            environ,
            slurm.RESTARTS if launcher is _SLURM else "TORCHELASTIC_RESTART_COUNT",
            MisuseError,
            default=0,
        ),
        agent_store=agent_store,
        own_store=STORE_VARIABLE in environ,
        source="torchrun" if elastic else launcher.source,
        run_id=slurm.step_name(environ)
        if launcher is _SLURM
        else environ.get("TORCHELASTIC_RUN_ID", ""),
    )


def _check_may_join(environ: Mapping[str, str]) -> None:
    """Raise `MisuseError` if this process comes to its ranks in another way."""
    if environ.get(STORE_VARIABLE) and environ.get(JOB_VARIABLE):
        raise MisuseError(
            f"this process belongs to the elastic job {environ[JOB_VARIABLE]} ({JOB_VARIABLE}), "
            "where ranks come and go: call phalanx.Elastic() in the place of init(), or start the "
            "script without --min"
        )
    if GIVEN.get():
        raise MisuseError(
            f"this is {GIVEN.get()}, and its function's first argument is the backend: take that, "
            "or else it would train alone beside the others"
        )


def _find_launcher(environ: Mapping[str, str]) -> _Launcher | None:
    if _BY_HAND.rank in environ or _BY_HAND.world_size in environ:
        names = ((_BY_HAND.rank, _SLURM.rank), (_BY_HAND.world_size, _SLURM.world_size))
        copied = all(environ.get(name) == environ.get(slurms) for name, slurms in names)
        return _SLURM if copied and "TORCHELASTIC_RUN_ID" not in environ else _BY_HAND
    for mpi in (_OPEN_MPI, _PMI):
        if mpi.rank in environ and mpi.local_rank in environ:
            return mpi
    # The shell of an interactive allocation may have these, too; its job is named after the shell,
    # and its step has no number of its own.
    shell = slurm.step_number(environ) is None and environ.get("SLURM_JOB_NAME") in _SHELLS
    if _SLURM.rank in environ and _SLURM.world_size in environ and not shell:
        return _SLURM
    return next((known for known in (_OPEN_MPI, _PMI) if known.rank in environ), None)


def _number(
    environ: Mapping[str, str],
    name: str,
    error: type[DistributedError],
    *,
    default: int | None = None,
    at_least: int = 0,
) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise error(
            f"{name} is not set, though this process seems to have a launcher: set it, or unset "
            "RANK and WORLD_SIZE to run as one process"
        )
    if not (text.isascii() and text.strip().isdigit()) or int(text) < at_least:
        raise error(
            f"{name}={text!r} is not a whole number of at least {at_least}: start the ranks with "
            "phalanx run, torchrun, mpirun or srun, which set it"
        )
    return int(text)


def _master(
    environ: Mapping[str, str], launcher: _Launcher, world_size: int
) -> tuple[str, int, bool]:
    """Return the address of the rendezvous, and whether the launcher holds a store there."""
    if STORE_VARIABLE in environ:
        try:
            return *parse_address(environ[STORE_VARIABLE]), True
        except ValueError as error:
            raise MisuseError(f"{STORE_VARIABLE}={environ[STORE_VARIABLE]!r}: {error}") from None
    addr = environ.get("MASTER_ADDR", "")
    local = environ.get(launcher.local_world_size)
    if launcher is _SLURM:
        slurm.check_is_task(environ, world_size)
        local = str(slurm.tasks_on_this_node(environ))
        environ = {"MASTER_PORT": slurm.step_port(environ), **environ}
    if not addr and (world_size == 1 or local == str(world_size)):
        addr = "127.0.0.1"
    if not addr and launcher is _SLURM:
        addr = slurm.first_node(environ)
    if launcher.source == "mpirun" and "MASTER_PORT" not in environ:
        return addr, 0, False  # the ranks can meet through MPI
    for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", environ.get("MASTER_PORT", ""))):
        if not value and world_size > 1:
            raise MisuseError(
                f"{name} is not set, and {launcher.world_size}={world_size} ranks have to meet "
                "somewhere: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port "
                "of it, the same for every rank, such as MASTER_PORT=29500"
            )
    port = _number(environ, "MASTER_PORT", MisuseError, default=0)
    if port > 65535 or (port == 0 and world_size > 1):
        raise MisuseError(f"MASTER_PORT={port} is not a port: they run from 1 to 65535")
    return addr, port, environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _local(
    environ: Mapping[str, str], launcher: _Launcher, rank: int, world_size: int, addr: str
) -> tuple[int, int]:
    """Return the local rank and the local world size; unsaid, loopback means one host."""
    shared = world_size if is_loopback(addr) else 1
    if launcher is _SLURM:
        shared = slurm.tasks_on_this_node(environ) or shared
    size = _number(
        environ, launcher.local_world_size, InvalidWorldSizeError, default=shared, at_least=1
    )
    if size > world_size:
        raise InvalidWorldSizeError(
            f"{launcher.local_world_size or 'the number of tasks on this node'}={size} is more "
            f"than {launcher.world_size}={world_size}"
        )
    local_rank = _number(environ, launcher.local_rank, InvalidRankError, default=rank % size)
    if launcher.local_world_size not in environ:
        size = max(size, local_rank + 1)
    if local_rank >= min(size, world_size):
        raise InvalidRankError(
            f"{launcher.local_rank}={local_rank} is not one of {size} ranks on this host"
        )
    return local_rank, size


# ------------------------------------------------------------------------------
# Elastic jobs.


@dataclass(frozen=True)
class ElasticJob:
    """The elastic job of this process, as its launcher, or who else started it, describes it.

    store                 where its members meet: host:port, or etcd://host:port,...
    job                   its name
    launch                the name by which the launcher's store knows it
    min_ranks, max_ranks  how many ranks it takes; None: not said
    local_rank            this process's place on its host
    """

    store: str
    job: str
    launch: str
    min_ranks: int | None = None
    max_ranks: int | None = None
    local_rank: int = 0


def read_elastic_environment(environ: Mapping[str, str]) -> ElasticJob | None:
    """Return the elastic job in `environ`; None unless it has both PHALANX_STORE and PHALANX_JOB.

    `MisuseError`, `InvalidRankError` or `InvalidWorldSizeError` for values that cannot be.
    """
    store, job = environ.get(STORE_VARIABLE), environ.get(JOB_VARIABLE)
    if not (store and job):
        return None
    check_elastic_store(store, f"{STORE_VARIABLE}={store}")
    check_job_name(job, f"{JOB_VARIABLE}={job}")
    least, most = (
        _number(environ, name, InvalidWorldSizeError, at_least=1) if environ.get(name) else None
        for name in (MIN_VARIABLE, MAX_VARIABLE)
    )
    if least is not None and most is not None and least > most:
        raise InvalidWorldSizeError(f"{MIN_VARIABLE}={least} is more than {MAX_VARIABLE}={most}")
    local_rank = _number(environ, "LOCAL_RANK", InvalidRankError, default=0)
    return ElasticJob(store, job, environ.get(LAUNCH_VARIABLE) or job, least, most, local_rank)


def check_elastic_store(store: str, given: str) -> None:
    """Raise `MisuseError`, which shows what was `given`, unless members can meet at `store`."""
    try:
        for address in store.removeprefix(ETCD).split(",") if store.startswith(ETCD) else [store]:
            parse_address(address)
    except ValueError as error:
        raise MisuseError(f"{given}: {error}; several of etcd are {ETCD}a:2379,b:2379") from None


def check_job_name(job: str, given: str) -> None:
    """Raise `MisuseError`, which shows what was `given`, unless `job` can name a job."""
    if not _JOB_NAME.fullmatch(job):
        raise MisuseError(
            f"{given}: a job's name is 1 to 100 letters, digits, dots, hyphens and underscores"
        )
