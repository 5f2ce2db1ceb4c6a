"""`phalanx run`: a script on many ranks, on one host or on several.

    phalanx run -n 2 train.py --lr 3
      `- supervisor (supervisor.py) of this host's ranks
           |- rank 0: worker.run_script() -> train.py --lr 3        "[rank 0] loss 3.1"
           `- rank 1: worker.run_script() -> train.py --lr 3        "[rank 1] loss 3.2"

All ranks of one start are a generation. When a rank has failed all are stopped, and with
--max-restarts the next generation starts. Ranks that have left together, with exit code 75 after a
notice (`phalanx.Notice`), are not started again here: that is up to the launcher's own starter.

On one host everything stays on it: the store at which the ranks have their rendezvous listens on
loopback, and the job's token is fresh. On several, node 0 holds the store at --master (nodes.py),
and PHALANX_TOKEN or PHALANX_TOKEN_FILE has to be set on every host: only its holders may join. With
--insecure the token is one that everybody knows.

With --min the job is elastic. Each host's launcher has one generation of processes, in which failed
ones start again alone (elastic_run.py). Their ranks are what the job's members decide.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from multiprocessing import connection
from pathlib import Path

from phalanx.errors import InvalidRankError, InvalidWorldSizeError, MisuseError
from phalanx.hooks import check_observers
from phalanx.launch.binding import Processors, bind, threads_per_rank
from phalanx.launch.elastic_run import ElasticOptions, Replacements, exit_code
from phalanx.launch.environment import ELASTIC_VARIABLES, STORE_VARIABLE
from phalanx.launch.nodes import NodeExit, Nodes
from phalanx.launch.observer import Observer, observer
from phalanx.launch.output import RankPipes, shown_as_in_a_terminal
from phalanx.launch.reaper import GRACE, Reaper
from phalanx.launch.report import (
    AGAIN,
    RankExit,
    describe_failure,
    print_failure,
    print_restart,
    root_cause,
)
from phalanx.launch.signals import Signals, announce_end
from phalanx.launch.supervisor import Supervisor, open_standard_streams
from phalanx.launch.worker import RUN_SCRIPT
from phalanx.transport.tcp.addresses import check_listening
from phalanx.transport.tcp.admission import find_token
from phalanx.wire.control import is_loopback, parse_address

_POLL = 0.1
_SILENCE = 10.0  # seconds of waiting for other nodes before the launcher says so
# Seconds to leave in, when all ranks have ended: after a signal, and otherwise.
_LAST_CALL, _LAST_WORDS = 1.0, 6.0
# Seconds that ranks have after SIGTERM, to save a checkpoint, if the job does not say: as torchrun.
_TIME_TO_SAVE = 30.0


# The token of jobs that are started with --insecure: the same for all, so that their hosts meet.
_KNOWN_TO_ALL = "everybody knows this token: --insecure"


@dataclass(frozen=True)
class Job:
    """One script on `ranks` ranks of this host, and as many on each of `nodes` hosts."""

    ranks: int
    target: str  # a script's path, or with `module` the name of a module
    args: tuple[str, ...] = ()
    module: bool = False
    nodes: int = 1
    node_rank: int = 0
    master: str = ""  # host:port of node 0, the same for all; needed with several nodes
    max_restarts: int = 0  # how often all ranks of all hosts are started again when one has failed
    # Seconds that ranks have after a signal; None: 30 after SIGTERM, and else `GRACE`.
    grace: float | None = None
    bind: str = ""  # to which cores ranks are bound: one of `binding.WAYS`
    insecure: bool = False  # whether a job on several hosts may run without a token
    remark: str = ""  # a line for the user, at the beginning
    elastic: ElasticOptions | None = None  # with --min

    def check(self) -> None:
        """Raise `InvalidWorldSizeError`, `InvalidRankError` or `MisuseError` for wrong options."""
        if self.ranks < 1 or self.nodes < 1:
            raise InvalidWorldSizeError(
                f"-n {self.ranks} --nnodes {self.nodes}: it takes at least one rank and one node"
            )
        if not 0 <= self.node_rank < self.nodes:
            raise InvalidRankError(
                f"--node-rank {self.node_rank} is not one of {self.nodes} nodes: they count "
                f"from 0, the last is {self.nodes - 1}"
            )
        if self.max_restarts < 0:
            raise MisuseError(f"--max-restarts {self.max_restarts}: it is 0 or more")
        if self.grace is not None and not 0 <= self.grace < math.inf:
            raise MisuseError(f"--grace {self.grace:g}: it is seconds, 0 or more")
        if self.nodes > 1 and not self.master:
            raise MisuseError(
                f"--nnodes {self.nodes} needs --master host:port: a host name of node 0 and a "
                "free port there, the same on every node"
            )
        if self.master:
            try:
                parse_address(self.master).host.encode("idna")  # as names are looked up
            except ValueError as error:
                raise MisuseError(f"--master {self.master}: {error}") from None
        host = parse_address(self.master).host if self.nodes > 1 else ""
        if self.nodes > 1 and not (self.token() or is_loopback(host)):
            raise MisuseError(
                f"--nnodes {self.nodes} needs a token, by which the hosts of the job know each "
                "other: make one with phalanx token > FILE, copy that to every host, and set "
                "PHALANX_TOKEN_FILE=FILE there; or start all with --insecure, if everybody who "
                "reaches these hosts may read, join and end the job"
            )
        if self.elastic is not None:
            self.elastic.check(self.ranks, nodes=self.nodes, master=self.master, token=self.token())
        check_observers(os.environ)
        self._check_target()
        check_listening(self.ranks)
        self.processors()

    @property
    def alone(self) -> bool:
        """Return whether no launcher of another host takes part."""
        return self.nodes == 1 and not (self.elastic is not None and self.elastic.store)

    def _check_target(self) -> None:
        path, top = Path(self.target), self.target.partition(".")[0]
        if self.module:
            # Only the outermost name: looking further would import it, here.
            folders = [str(Path.cwd()), *sys.path]
            if top not in sys.builtin_module_names and not PathFinder.find_spec(top, folders):
                raise MisuseError(f"there is no module {top!r} in {Path.cwd()} or installed")
        elif not path.is_file() and not (path / "__main__.py").is_file():
            what = "a folder without __main__.py" if path.is_dir() else "not there"
            hint = "; for a module, add -m" if os.sep not in self.target and not path.suffix else ""
            raise MisuseError(f"the script {self.target} is {what} (in {Path.cwd()}){hint}")

    def token(self) -> str:
        """Return the job's token: that of the environment, or a fresh one for a job on one host.

        "" if all launchers are on one host, by a loopback address, which alone is let in then.
        """
        if self.alone:
            return find_token() or secrets.token_hex(32)
        return find_token() or (_KNOWN_TO_ALL if self.insecure else "")

    def processors(self) -> list[Processors]:
        """Return the processors of each rank of this host; empty ones for all. See `check`."""
        return bind(self.bind, self.ranks) if self.bind else [frozenset[int]()] * self.ranks


def run(job: Job) -> int:
    """Run `job` to its end; return the exit code.

    0, or that of the rank that failed first. 75 if ranks ended with that and none failed: they have
    left, and ask to be started again. 128 more than the number of a signal that ended the job
    (SIGINT, SIGTERM, SIGHUP, SIGQUIT), unless ranks left: it goes to the ranks, which have
    `job.grace` seconds. SIGUSR1 and SIGUSR2 go to the ranks, and nothing else follows. Of an
    elastic job it is 0 as soon as one process has ended with that, for the training has then.

    Each line that a rank prints appears here behind "[rank 3] ". When a rank fails the others are
    stopped, and the report of the first failure comes last, on stderr. A failure of the launch
    itself is a `BackendUnavailableError`.

    Ends this process itself if a thread still waits, inside torch or for the reader of the output:
    nothing else ends such a thread.
    """
    open_standard_streams()
    with Signals() as signals:
        job.check()
        if job.remark:
            sys.stderr.write(f"phalanx: {job.remark}\n")
        if job.insecure and not job.alone and not find_token():
            sys.stderr.write(
                "phalanx: --insecure: everybody who reaches these hosts can read what the ranks "
                "send, join the job as a rank, and end it\n"
            )
        watch = observer(" ".join([job.target, *job.args]), job.node_rank, os.environ)
        with Reaper(watch.private) as reaper:
            launch = _Launch(job, reaper, signals, watch)
            try:
                code = launch.run() if job.elastic is None else launch.run_elastic()
            except Exception as error:  # after a signal, any error follows from it
                launch.tell_why(error)
                if not signals.received:
                    raise
                code = announce_end(signals.received[0])
            finally:
                over = launch.close()
    if not over:
        os._exit(code)
    return code


class _Launch:
    """One `phalanx run` on this host: generations of ranks, and the nodes' decisions."""

    def __init__(self, job: Job, reaper: Reaper, signals: Signals, watch: Observer) -> None:
        self._job = job
        self._watch = watch
        self._reaper = reaper
        self._signals = signals
        self._processors = job.processors()
        self._token = job.token()
        self._run_id = secrets.token_hex(8) if job.nodes == 1 else "phalanx"
        if job.elastic is not None and job.elastic.job:
            self._run_id = job.elastic.job
        self._generation = 0
        self._last_call = math.inf
        self._shown = True
        self._how = ""  # the job has ended, in words
        self._nodes = Nodes(
            ranks=job.ranks,
            token=self._token,
            job=self._run_id,
            nodes=job.nodes,
            node_rank=job.node_rank,
            max_restarts=job.max_restarts,
            master=job.master,
            listen=watch.listen,
        )
        watch.nodes = self._nodes if job.nodes > 1 else None

    def run(self) -> int:
        """Run generations until one ends well, or none is left; return the exit code."""
        job = self._job
        silent_until = time.monotonic() + _SILENCE
        while self._nodes.placement is None:
            self._wait()
            if time.monotonic() > silent_until:
                silent_until = math.inf
                sys.stderr.write(f"phalanx: {self._nodes.awaited()}\n")
        while True:
            exits = self._run_generation(*self._nodes.placement)
            while (outcome := self._nodes.outcome(self._generation)) is None:
                self._wait()
            # In spite of the log, the end of this node's own ranks counts here.
            own = NodeExit.of_ranks(job.node_rank, exits)
            failed = [node for node in (*outcome, own) if node.failed]
            if not failed:
                left = any(node.code == AGAIN for node in (*outcome, own))
                return self._ended_well(AGAIN if left else 0)
            root = min(failed, key=lambda node: node.follows)  # of equal ones the first written
            self._how = root.summary
            elsewhere = ""
            if root.node != job.node_rank:
                elsewhere = f"the first failure was on another node, {root.node}: {root.summary}"
            if any(node.final for node in failed) or self._generation == job.max_restarts:
                print_failure(exits, elsewhere)
                return root.code if 0 < root.code < 256 else 1
            self._generation += 1
            restart = f"restarting all ranks ({self._generation} of {job.max_restarts})"
            print_restart(exits, elsewhere, restart)

    def run_elastic(self) -> int:
        """Run the processes of an elastic job until all have ended; return the exit code."""
        exits = self._run_generation(0, self._job.ranks)
        code, root = exit_code(exits), root_cause(exits)
        if code is not None or root is None:
            return self._ended_well(code or 0)
        self._how = describe_failure(root, brief=True)
        print_failure(exits)
        return root.shell_code

    def _ended_well(self, code: int) -> int:
        self._how = "it has ended well"
        if code == AGAIN:
            self._how = f"the ranks have left (exit code {AGAIN}): start the job again"
            sys.stderr.write(f"the ranks have left; exit code {AGAIN}: start the job again\n")
        return code

    def tell_why(self, error: Exception) -> None:
        """Tell the other nodes why this one leaves: the job ends with it, everywhere alike."""
        how, code = f"failed: {error}", 1
        if self._signals.received:
            signum = signal.Signals(self._signals.received[0])
            how, code = f"was stopped by {signum.name}", 128 + signum
        self._how = summary = f"its launcher {how}"
        self._nodes.write(NodeExit(self._job.node_rank, True, summary, code=code, final=True))

    def close(self) -> bool:
        """Leave the job; return whether no thread is left."""
        self._watch.end(self._how or "its launcher has ended")
        seconds = _LAST_CALL if self._signals.received else _LAST_WORDS
        return self._nodes.close(seconds) and self._shown

    def _run_generation(self, first_rank: int, world_size: int) -> list[RankExit]:
        """Run all ranks of this host once; return their ends, when their output is shown."""
        job, signals, environ = self._job, self._signals, self._environment(world_size)
        words = ["module" if job.module else "script", job.target, *job.args]
        pipes = RankPipes(sys.stdout.fileno(), sys.stderr.fileno())
        try:
            with Supervisor(self._reaper, pipes.open) as ranks:

                def start(local_rank: int) -> None:
                    rank = first_rank + local_rank
                    own = {"LOCAL_RANK": str(local_rank)}
                    if job.elastic is None:
                        own |= {"RANK": str(rank), "ROLE_RANK": str(rank)}
                    processors = self._processors[local_rank]
                    ranks.start(
                        rank, RUN_SCRIPT, words, environ=environ | own, processors=processors
                    )

                for local_rank in range(job.ranks):
                    start(local_rank)
                self._watch.begin(self._generation, world_size)
                look = partial(self._watch.look, ranks.ranks, pipes.last)
                if job.elastic is None:
                    ranks.watch(signals, look, self._failed_elsewhere)
                else:
                    Replacements(ranks, start, job.max_restarts).watch(signals, look)
                if signals.received:
                    self._stop(ranks, signals.received[0])
                else:
                    ranks.stop()
                look(now=True)
                if not signals.received:
                    self._nodes.write(NodeExit.of_ranks(job.node_rank, ranks.exits()))
        finally:
            self._shown &= pipes.close(self._give_up)
        signals.check()
        return ranks.exits()

    def _failed_elsewhere(self) -> bool:
        self._nodes.check()
        return self._nodes.failed(self._generation)

    def _stop(self, ranks: Supervisor, signum: int) -> None:
        """Pass on a signal that ends programs, and wait for the ranks' end.

        If they have left, with exit code 75, the signal has done its work, and is forgotten. So it
        is if an elastic training has come to its end.
        """
        grace = self._job.grace
        if grace is None:
            grace = _TIME_TO_SAVE if signum == signal.SIGTERM else GRACE
        ranks.stop(signum, hurry=self._signals.again, grace=grace)
        exits = ranks.exits()
        root = root_cause(exits)
        if root is None and any(one.code == AGAIN for one in exits):
            self._signals.forget()
        elif root is not None and root.report is not None and not root.follows:
            print_failure(exits)  # the checkpoint could not be written, perhaps
        if self._job.elastic is not None and exit_code(exits) == 0:
            self._signals.forget()

    def _wait(self) -> None:
        """Wait a moment for other nodes; raise `Interrupted` after a signal, or their error."""
        connection.wait(self._signals.descriptors, _POLL)
        self._signals.take()
        self._signals.check()
        self._nodes.check()

    def _give_up(self) -> bool:
        """Return whether the reader of the output is out of time for the rest."""
        if self._signals.received:
            self._last_call = min(self._last_call, time.monotonic() + _LAST_CALL)
        return time.monotonic() > self._last_call

    def _threads(self) -> int:
        """Return each rank's number of threads to compute with: that of its cores."""
        bound = self._processors
        if not bound[0]:
            return threads_per_rank(self._job.ranks)
        return max(1, min(len(own) // bound.count(own) for own in bound))

    def _environment(self, world_size: int) -> dict[str, str]:
        """Return the environment of all ranks of this host: as under `torchrun`."""
        job, endpoint = self._job, self._nodes.endpoint
        environ = {
            "OMP_NUM_THREADS": str(self._threads()),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            **shown_as_in_a_terminal(sys.stdout.fileno(), sys.stderr.fileno()),
            **os.environ,
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "PYTHONUNBUFFERED": "1",
        }
        if job.elastic is None:
            environ |= self._fixed_ranks(world_size)
            for name in (*ELASTIC_VARIABLES, "TORCHELASTIC_ERROR_FILE"):
                environ.pop(name, None)  # of a launcher above this one
        else:
            environ = job.elastic.environment(environ, job.ranks, str(endpoint), self._run_id)
        environ |= self._watch.environment()
        if self._token and not find_token():
            environ["PHALANX_TOKEN"] = self._token
        return environ

    def _fixed_ranks(self, world_size: int) -> dict[str, str]:
        """Return the variables of a job whose ranks stay as they are."""
        job, endpoint = self._job, self._nodes.endpoint
        return {
            "WORLD_SIZE": str(world_size),
            "ROLE_WORLD_SIZE": str(world_size),
            "ROLE_NAME": "rank",
            "GROUP_RANK": str(job.node_rank),
            "GROUP_WORLD_SIZE": str(job.nodes),
            "MASTER_ADDR": endpoint.host,
            "MASTER_PORT": str(self._nodes.master_port(self._generation)),
            "TORCHELASTIC_RESTART_COUNT": str(self._generation),
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
            "TORCHELASTIC_RUN_ID": self._run_id,
            # Torch's own groups have a store of their own there, anew after a restart.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            STORE_VARIABLE: str(endpoint),
        }
