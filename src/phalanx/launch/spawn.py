"""`spawn`: a function on several ranks, each a fresh process of this host.

    parent                                   rank 0        rank 1
      | listens on 127.0.0.1, port 0  ------->  |             |      rank 0 inherits the listener
      | a fresh token  ---------------------->  |  -------->  |      through stdin: no command line
      |                                      fn(backend)  fn(backend)
      |  <----------------------- report -------'             |
      |  <----------------------- report ---------------------'      or a death, which is seen

The supervisor (supervisor.py) watches and ends the ranks, as it does for `phalanx run`.
"""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.spawn import get_preparation_data
from typing import IO, TYPE_CHECKING, Any, TypeVar

from phalanx.errors import InvalidWorldSizeError, MisuseError
from phalanx.launch.binding import threads_per_rank
from phalanx.launch.environment import World
from phalanx.launch.init import check_name
from phalanx.launch.reaper import Reaper
from phalanx.launch.report import root_cause
from phalanx.launch.supervisor import Supervisor, open_standard_streams
from phalanx.launch.worker import RUN_FUNCTION
from phalanx.transport.tcp.addresses import listen_on

if TYPE_CHECKING:
    from phalanx.core.backend import Backend
T = TypeVar("T")


def spawn(
    fn: Callable[[Backend], T], world_size: int, backend: str = "auto", *, timeout: float = 60.0
) -> list[T]:
    """Run `fn(backend)` in `world_size` fresh processes of this host; return their results.

    Results are in rank order, and come by value: a tensor is a copy. `fn` and the results are
    pickled, so `fn` is a function at the top level of a module, or a `functools.partial` of one.
    `timeout` (seconds) is the default of every call on the backend; the run itself has none. The
    backend is closed when `fn` returns. OMP_NUM_THREADS, if unset, is each rank's share of the
    cores. No rank outlives this call, or this process.

    When a rank fails the others are stopped, and its error is raised here with its own traceback
    as `__cause__`: the root cause, not the `PeerLostError`s that follow from it. A rank that was
    killed, or ended itself, is a `PeerLostError` whose `peer` is that rank. A result that cannot
    be pickled is a `MisuseError`. Fewer than one rank: `InvalidWorldSizeError`; a name that is no
    backend: `BackendUnavailableError`.
    """
    if world_size < 1:
        raise InvalidWorldSizeError(f"a world of {world_size} ranks cannot be: it takes one")
    check_name(backend)
    try:
        call = pickle.dumps(fn)
    except Exception as error:
        raise MisuseError(
            f"spawn cannot send {fn!r} to a fresh process ({error}): define it at the top level "
            "of a module; no lambda, no function inside another"
        ) from error
    try:
        preparation = get_preparation_data("")
    except RuntimeError:  # which says it for `multiprocessing`
        raise MisuseError(
            "spawn was called by a module while a fresh process imported it: put the call, and "
            'what goes with it, under `if __name__ == "__main__":`'
        ) from None
    open_standard_streams()
    with Reaper() as reaper, Supervisor(reaper, results=True) as ranks:
        _start(ranks, preparation, call, world_size, backend, timeout)
        while ranks.state() == "running":
            ranks.wait()
    if (root := root_cause(ranks.exits())) is not None:
        raise root.error()
    return [ended.report.result() for ended in ranks.exits() if ended.report is not None]


def _start(
    ranks: Supervisor,
    preparation: dict[str, Any],
    call: bytes,
    world_size: int,
    backend: str,
    timeout: float,
) -> None:
    """Start all ranks, then send each what it needs: they start beside each other."""
    token, job = secrets.token_hex(32), secrets.token_hex(8)
    preparation["authkey"] = bytes(preparation["authkey"])
    environ = {"OMP_NUM_THREADS": str(threads_per_rank(world_size)), **os.environ}
    inputs: list[IO[bytes] | None] = []
    with listen_on("127.0.0.1") as listener:
        address, held = f"127.0.0.1:{listener.getsockname()[1]}", listener.fileno()
        for rank in range(world_size):
            process = ranks.start(
                rank,
                RUN_FUNCTION,
                [str(rank)],
                environ=environ,
                options=subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                inherit=[held] if rank == 0 else [],
                stdin=subprocess.PIPE,
            )
            inputs.append(process.stdin)
    for rank, stdin in enumerate(inputs):
        place = World(rank, world_size, rank, world_size, run_id=job, address=address, token=token)
        assert stdin is not None
        with suppress(BrokenPipeError), stdin:  # if it has died, that is seen
            pickle.dump(preparation | {"name": f"rank {rank}"}, stdin)
            pickle.dump((call, place, held if rank == 0 else None, backend, timeout), stdin)
