"""`spawn`: a function on several ranks, each a fresh process of this host.

    parent                                   rank 0        rank 1
      | listens on 127.0.0.1, port 0  ------->  |             |      rank 0 inherits the listener
      | a fresh token  ---------------------->  |  -------->  |      through stdin: no command line
      |                                      fn(backend)  fn(backend)
      |  <----------------------- report -------'             |
      |  <----------------------- report ---------------------'      or a death, which is seen

The supervisor (supervisor.py) watches and ends the ranks, as it does for `phalanx run`.

A function goes by its name, if the ranks can import it. One that is defined in a notebook, a
console or another function goes by value, with its needs from `__main__`: cloudpickle does that. In
a notebook `sys.stdout` is an object, to which a thread (output.py) writes the ranks' lines.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import secrets
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.spawn import get_preparation_data
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, TypeVar

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.call import check_world_size
from phalanx.errors import MisuseError
from phalanx.hooks import check_observers
from phalanx.launch.binding import threads_per_rank
from phalanx.launch.environment import World
from phalanx.launch.init import check_name
from phalanx.launch.observer import observer
from phalanx.launch.output import RankPipes
from phalanx.launch.reaper import Reaper
from phalanx.launch.report import RankTraceback, describe_failure, error_line, root_cause
from phalanx.launch.signals import Signals
from phalanx.launch.supervisor import Supervisor, open_standard_streams
from phalanx.launch.worker import RUN_FUNCTION
from phalanx.transport.tcp.addresses import listen_on

if TYPE_CHECKING:
    from phalanx.core.backend import Backend
T = TypeVar("T")
# For ranks whose output is shown here: print at once, without moving displays of several lines.
_SHOWN: Mapping[str, str] = MappingProxyType({"PYTHONUNBUFFERED": "1", "TTY_INTERACTIVE": "0"})


def spawn(
    fn: Callable[[Backend], T],
    world_size: int,
    backend: str = "auto",
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[T]:
    """Run `fn(backend)` in `world_size` fresh processes of this host; return their results.

    Results are in rank order, and come by value: a tensor is a copy. `fn` and the results are
    pickled: `fn` is a function at the top level of a module, or a `functools.partial` of one. With
    cloudpickle (`pip install 'phalanx[notebook]'`), also one of a notebook or console, a lambda, or
    a function inside another; without, that is a `MisuseError`. `timeout` (seconds) is the default
    of every call on the backend; the run itself has none. The backend is closed when `fn` returns.
    OMP_NUM_THREADS, if unset, is each rank's share of the cores.

    Ranks write to this process's streams. If `sys.stdout` or `sys.stderr` is an object of this
    process alone, as in a notebook, their lines appear there behind "[rank 3] ".

    When a rank fails the others are stopped, and its error is raised here with its own traceback as
    `__cause__`: the root cause, not the `PeerLostError`s that follow from it. A rank that was
    killed, or ended itself, is a `PeerLostError` whose `peer` is that rank. A result that cannot be
    pickled is a `MisuseError`. Fewer than one rank: `InvalidWorldSizeError`; an unknown backend:
    `BackendUnavailableError`. Ctrl-C, or a notebook's interrupt, is a `KeyboardInterrupt` when the
    ranks have ended. No rank outlives this call, or this process.
    """
    check_world_size(world_size)
    check_name(backend)
    check_observers(os.environ)
    try:
        preparation = get_preparation_data("")
    except RuntimeError:  # which says it for `multiprocessing`
        raise MisuseError(
            "spawn was called by a module while a fresh process imported it: put the call, and "
            'what goes with it, under `if __name__ == "__main__":`'
        ) from None
    call = _pickle(fn, preparation)
    open_standard_streams()
    watch = observer(_name(fn), 0, os.environ)
    how = "its launcher has ended"
    try:
        with (
            Signals(goes_on=True) as interrupts,
            Reaper(watch.private) as reaper,
            _open_output(interrupts) as open_output,
            Supervisor(reaper, open_output, results=True) as ranks,
        ):
            shown = {} if open_output is None else _SHOWN
            environ = {"OMP_NUM_THREADS": str(threads_per_rank(world_size)), **shown, **os.environ}
            environ |= watch.environment()
            _start(ranks, preparation, call, world_size, backend, timeout, environ)
            watch.begin(0, world_size)
            look = partial(watch.look, ranks.ranks)
            ranks.watch(interrupts, look)
            ranks.stop(hurry=interrupts.again)
            look(now=True)
            root = root_cause(ranks.exits())
            how = "it has ended well" if root is None else describe_failure(root, brief=True)
            how = "it was interrupted" if interrupts.received else how
    finally:
        watch.end(how)
    if root is not None:
        error = root.error()
        if "IPython" in sys.modules and isinstance(error.__cause__, RankTraceback):
            vars(error)["_render_traceback_"] = partial(_render, error, error.__cause__)
        raise error
    return [ended.report.result() for ended in ranks.exits() if ended.report is not None]


def _name(fn: Callable[..., Any]) -> str:
    """Return the job's name for watchers."""
    while isinstance(fn, partial):
        fn = fn.func
    function = getattr(fn, "__qualname__", type(fn).__qualname__)
    return f"{os.path.basename(sys.argv[0])} spawn({function})".lstrip()


def _pickle(fn: Callable[..., Any], preparation: dict[str, Any]) -> bytes:
    """Return `fn` pickled; put the ranks' instructions for it into `preparation`."""
    main = {name for name in preparation if name.startswith("init_main_from_")}
    typed = hasattr(sys.modules["__main__"], "_ih")  # in IPython, even if it has a __file__, too
    preparation |= {"pickler": "pickle", "sources": {}}
    try:
        call = pickle.dumps(fn)
        by_name = b"__main__" not in call or (bool(main) and not typed)
        why = "it is defined in a notebook or console, which a fresh process cannot import"
    except Exception as error:
        by_name, why = False, error_line(error)
    if typed or not by_name:
        for name in main:
            del preparation[name]
    if by_name:
        return call
    try:
        import cloudpickle  # noqa: PLC0415 -- an extra
    except ImportError:
        raise MisuseError(
            f"spawn cannot send {fn!r} to a fresh process ({why}): define it at the top level of a "
            "module and import it from there, or install what sends functions by value: "
            "pip install 'phalanx[notebook]'"
        ) from None
    # The source code that is in no file, for tracebacks.
    sources = {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}
    preparation |= {"pickler": "cloudpickle", "sources": sources}
    try:
        sent: bytes = cloudpickle.dumps(fn)
    except Exception as error:
        raise MisuseError(
            f"spawn cannot send {fn!r} to a fresh process ({error_line(error)}): what it refers to "
            "is sent along; make inside the function what cannot be"
        ) from error
    return sent


def _render(error: BaseException, cause: RankTraceback) -> list[str]:
    """Return IPython's text of `error`: the call of `spawn`, and last the rank's part."""
    inside = __file__, *sys.modules["IPython"].__path__
    frames = traceback.extract_tb(error.__traceback__)
    called = [frame for frame in frames if not frame.filename.startswith(inside)]
    where = "".join(traceback.format_list(called))
    return [f"spawn was called here:\n{where}", f"Rank {cause.rank}:\n{cause.text.rstrip()}"]


@contextmanager
def _open_output(
    interrupts: Signals,
) -> Iterator[Callable[[int], tuple[int, int]] | None]:
    """Yield the supervisor's `open_output`, if ranks cannot write to this process's streams."""
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(sys.stderr, io.TextIOWrapper):
        yield None
        return
    pipes = RankPipes(sys.stdout, sys.stderr)
    try:
        yield pipes.open
    finally:
        pipes.close(interrupts.again)


def _start(
    ranks: Supervisor,
    preparation: dict[str, Any],
    call: bytes,
    world_size: int,
    backend: str,
    timeout: float,
    environ: dict[str, str],
) -> None:
    """Start all ranks, then send each its arguments: they start at the same time."""
    token, job = secrets.token_hex(32), secrets.token_hex(8)
    preparation["authkey"] = bytes(preparation["authkey"])
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
