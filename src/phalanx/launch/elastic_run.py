"""An elastic job's processes on this host: one that has failed is started again, alone.

    phalanx run -n 3 --min 2 --max-restarts 20 train.py

    rank 0   runs ----------------------------------------------- ends with 0: the training's end
    rank 1   runs --- killed ..1 s.. runs --- killed ..2 s.. runs --- ends with 0
    rank 2   runs --- SIGTERM to it, a notice: ends with 75, and is not replaced

A rank is here a place on this host, LOCAL_RANK. The job's members give the process in it a rank of
the group when it joins them, and nothing here knows of their generations.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from phalanx.errors import BackendUnavailableError, InvalidWorldSizeError, MisuseError
from phalanx.launch.environment import (
    ELASTIC_VARIABLES,
    ETCD,
    JOB_VARIABLE,
    LAUNCH_VARIABLE,
    MAX_VARIABLE,
    MIN_VARIABLE,
    STORE_VARIABLE,
    check_elastic_store,
    check_job_name,
)
from phalanx.launch.reaper import GRACE, end_session
from phalanx.launch.report import AGAIN, RankExit, print_restart, root_cause
from phalanx.launch.signals import Signals
from phalanx.launch.supervisor import RankProcess, Supervisor
from phalanx.transport.tcp.admission import MAKE_ONE

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before a restart
_LONG_LIFE = 60.0  # seconds of a process after which the next pause is the first one again
_TIME_TO_END = 2 * GRACE  # seconds that a process has to end when it has reported its failure

# What other launchers, torchrun above all, say of a rank that is fixed.
_OF_FIXED_RANKS = frozenset(
    [f"{whose}{what}" for whose in ("", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")]
) | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class ElasticOptions:
    """The options of `phalanx run` that only elastic jobs have."""

    min_ranks: int
    max_ranks: int | None = None
    store: str = ""  # etcd://host:port,...; "" for that of this launcher
    job: str = ""  # the job's name, the same for all of its launchers; "" for any

    def check(self, ranks: int, *, nodes: int, master: str, token: str) -> None:
        """Raise `InvalidWorldSizeError` or `MisuseError` for options that cannot be."""
        if self.min_ranks < 1:
            raise InvalidWorldSizeError(f"--min {self.min_ranks}: it takes at least one rank")
        if self.max_ranks is not None and self.min_ranks > self.max_ranks:
            raise InvalidWorldSizeError(f"--min {self.min_ranks} is above --max {self.max_ranks}")
        if not self.store and self.min_ranks > ranks:
            raise InvalidWorldSizeError(
                f"--min {self.min_ranks} is above -n {ranks}, and without --store no other host "
                "adds ranks"
            )
        if nodes > 1 or master:
            raise MisuseError(
                "--min goes without --nnodes and --master: start the hosts in any order, each "
                "with the same --store etcd://host:port and --job NAME"
            )
        if self.job:
            check_job_name(self.job, f"--job {self.job}")
        if self.store:
            self._check_store(token)

    def _check_store(self, token: str) -> None:
        if not self.store.startswith(ETCD):
            raise MisuseError(
                f"--store {self.store}: it is {ETCD}host:port, of one or several members of etcd. "
                "Without --store the launcher holds one, for the ranks of its host"
            )
        check_elastic_store(self.store, f"--store {self.store}")
        if not self.job:
            raise MisuseError(
                "--store needs --job NAME: the same on every host, and a new one for each job"
            )
        if not token:
            raise MisuseError(
                f"--store needs a token, by which the job's entries are known: make one with "
                f"{MAKE_ONE} > FILE, copy that to every host, and set PHALANX_TOKEN_FILE=FILE there"
            )

    def environment(
        self, environ: Mapping[str, str], ranks: int, own_store: str, launch: str
    ) -> dict[str, str]:
        """Return `environ` for the processes: without a rank, and with the job.

        own_store   the address of the launcher's store, which knows the job as `launch`
        """
        kept = {
            name: value
            for name, value in environ.items()
            if not (name in _OF_FIXED_RANKS or name.startswith("TORCHELASTIC_"))
            and name not in ELASTIC_VARIABLES
        }
        kept |= {JOB_VARIABLE: self.job or launch, MIN_VARIABLE: str(self.min_ranks)}
        if self.max_ranks is not None or not self.store:
            kept[MAX_VARIABLE] = str(self.max_ranks or ranks)
        if self.store:
            return kept | {STORE_VARIABLE: self.store}
        return kept | {STORE_VARIABLE: own_store, LAUNCH_VARIABLE: launch}


def elastic_options(
    min_ranks: int | None, max_ranks: int | None, store: str, job: str
) -> ElasticOptions | None:
    """Return the options; None without --min, when the others are a `MisuseError`."""
    if min_ranks is not None:
        return ElasticOptions(min_ranks, max_ranks, store, job)
    given = {"--max": max_ranks is not None, "--store": store, "--job": job}
    if alone := [name for name, value in given.items() if value]:
        raise MisuseError(f"{alone[0]} is for elastic jobs: add --min N, the fewest that train")
    return None


def pause_before_restart(last: float, lived: float) -> float:
    """Return the seconds before a process is started again: 1, 2, 4 ... 30.

    last    the seconds before the one that has failed, 0 for a rank's first process
    lived   the seconds for which that one ran: after many the pauses begin anew
    """
    return min(2 * last, _LONGEST_PAUSE) if last and lived < _LONG_LIFE else _FIRST_PAUSE


def exit_code(exits: Collection[RankExit]) -> int | None:
    """Return the launcher's exit code, unless ranks have failed or were only stopped: then None.

    It is 0 if one process has ended with it, for the training has come to its end then. It is 75
    if ranks have left, and none failed.
    """
    codes = {one.code for one in exits if not one.failed}
    if 0 in codes:
        return 0
    return AGAIN if AGAIN in codes and root_cause(exits) is None else None


class Replacements:
    """Watches the processes of this host, and starts those again that have failed, each alone.

    start   starts a process at a local rank
    most    how many restarts there are for all of them
    """

    def __init__(self, ranks: Supervisor, start: Callable[[int], object], most: int) -> None:
        self._ranks, self._start, self._most = ranks, start, most
        self._restarts = 0
        self._pauses: dict[int, float] = {}  # before the latest restart of each rank
        self._due: dict[int, float] = {}  # when a rank is started again
        self._ended: dict[int, RankProcess] = {}  # the last process of a rank, once it has ended

    def watch(self, signals: Signals, look: Callable[..., object]) -> None:
        """Return when a signal has come, or all have ended and none is started again.

        A failure whose replacement is still to come is forgotten, and after a signal every one that
        was before it: the others went on.
        """
        ranks = self._ranks.ranks
        while not (signals.received or self._over()):
            self._ranks.attend(signals, look)
            for rank in ranks:
                if rank.code is None:
                    self._end_soon(rank)
                elif rank.rank not in self._ended:
                    self._end(rank)
            self._start_due()
        forgotten = self._ended if signals.received else self._due
        ranks[:] = [rank for rank in ranks if not (rank.failed and rank.rank in forgotten)]
        look(now=True)

    def _over(self) -> bool:
        """Return whether nobody runs, and a replacement has nobody to join, or there is none."""
        codes = {rank.code for rank in self._ranks.ranks}
        return None not in codes and not (self._due and codes.isdisjoint((0, AGAIN)))

    def _end_soon(self, rank: RankProcess) -> None:
        """Kill a process that has reported its failure long ago."""
        if rank.report is not None and time.monotonic() > rank.time + _TIME_TO_END:
            end_session(rank.process.pid)

    def _end(self, rank: RankProcess) -> None:
        self._ended[rank.rank] = rank
        if rank.failed:
            after = self._again(rank.rank, rank.time - rank.began)
            print_restart([rank], "", f"process {rank.process.pid} {after}")

    def _again(self, rank: int, lived: float) -> str:
        """Decide when a rank is started again; return it in words."""
        if self._restarts == self._most:
            return f"is not replaced: no restart is left of --max-restarts {self._most}"
        self._restarts += 1
        pause = pause_before_restart(self._pauses.get(rank, 0.0), lived)
        self._pauses[rank], self._due[rank] = pause, time.monotonic() + pause
        return f"is replaced in {pause:g} s (restart {self._restarts} of {self._most})"

    def _start_due(self) -> None:
        now = time.monotonic()
        for rank in [rank for rank, due in self._due.items() if due <= now]:
            del self._due[rank]
            try:
                self._start(rank)
                self._ranks.ranks.remove(self._ended.pop(rank))
            except BackendUnavailableError as error:
                sys.stderr.write(f"{error}; rank {rank} {self._again(rank, 0.0)}\n")
