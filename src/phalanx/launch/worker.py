"""One rank's process, from its start by a supervisor to its end.

Under `phalanx run` it runs the user's script as if Python had run it; under `phalanx.spawn` it
calls the user's function. Its result or its failure goes to the supervisor by a channel.
"""

from __future__ import annotations

import _thread
import faulthandler
import importlib
import linecache
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.errors import MisuseError, RankStopped
from phalanx.launch.reaper import GRACE, die_with_parent
from phalanx.launch.report import (
    AGAIN,
    INTERRUPTED,
    STOPPED,
    RankReport,
    error_line,
    follows_from_another,
    format_traceback,
)

if TYPE_CHECKING:
    from phalanx.launch.environment import World

RUN_SCRIPT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
    "from phalanx.launch.worker import run_script; run_script()"
)
"""What Python runs as a rank of `phalanx run`; its arguments are those of `run_script`.

The current folder is not searched for modules, as when Python runs a script elsewhere. And Ctrl-C
ends a rank without a word until its script runs.
"""

RUN_FUNCTION = (
    "import pickle, sys; preparation = pickle.load(sys.stdin.buffer); "
    "sys.path[:] = preparation['sys_path']; "
    "from phalanx.launch.worker import run_function; run_function(preparation)"
)
"""The same for `phalanx.spawn`, with what `multiprocessing` has its own processes do first. Modules
are searched for as in the parent."""

_HIDDEN = frozenset(
    {__file__, multiprocessing.spawn.__file__, runpy.__file__, "<frozen runpy>", "<string>"}
)


def run_script() -> None:
    """Run a script or module, and end this process with its exit code.

    The command line is the launcher's process id, the descriptor of the channel, "script" or
    "module", its name, and its arguments.
    """
    parent, descriptor, kind, name = sys.argv[1:5]
    del sys.argv[:4]
    send = _begin(parent, descriptor)
    code = 0
    try:
        _Stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        safe_path = getattr(sys.flags, "safe_path", False)
        if kind == "module":
            if not safe_path:
                sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            if not safe_path and not Path(name).is_dir():
                sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = _report_failure(error, send)
    _leave(code)


def _report_failure(error: BaseException, send: Callable[[RankReport], bool]) -> int:
    """Report the script's failure, if any; return the exit code that Python would end it with."""
    if isinstance(error, RankStopped):
        return STOPPED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    code, text = 1, ""
    if isinstance(error, SystemExit):
        if error.code is None or error.code in (0, AGAIN):
            return error.code or 0
        if isinstance(error.code, int):
            code = error.code
        else:
            sys.stderr.write(f"{error.code}\n")
        summary = f"sys.exit({error.code!r})"
        frames = traceback.extract_tb(error.__traceback__)
        shown = [frame for frame in frames if frame.filename not in _HIDDEN]
        places = [frame for frame in shown if frame.filename == shown[0].filename]
        if places:  # the last one in the script itself, rather than in argparse, say
            summary += f" from {places[-1].filename}, line {places[-1].lineno}"
    else:
        summary, text = error_line(error), format_traceback(error, hide=_HIDDEN)
    place = os.environ.get("RANK") or os.environ["LOCAL_RANK"]  # without a rank: an elastic job
    rank, follows = int(place), follows_from_another(error)
    ends_with = code & 0xFF or 1  # as the system counts, and not as if it had ended well
    if not send(RankReport(rank, True, b"", summary, text, follows, code=ends_with)):
        sys.stderr.write(text)
    return code


def run_function(preparation: dict[str, Any]) -> None:
    """Call a function, report its result, and end this process.

    The command line is the parent's process id, the descriptor of the channel, and the rank. Stdin
    holds the pickled arguments of `_call`. Objects pickled by `preparation["pickler"]`, a module,
    are not looked up in the parent's main module, and results go back in the same way.
    """
    parent, descriptor, rank = sys.argv[1:]
    send = _begin(parent, descriptor)
    dumps = pickle.dumps
    try:
        try:
            arguments = pickle.load(sys.stdin.buffer)  # for which the parent waits
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), sys.stdin.fileno())
            dumps = importlib.import_module(preparation["pickler"]).dumps
            linecache.cache.update(preparation["sources"])
            _import_main(preparation)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which stops us
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            _Stop()
            report = RankReport.of_result(int(rank), _call(*arguments), dumps)
        except RankStopped:
            raise
        except BaseException as error:
            report = RankReport.of_error(int(rank), error, dumps, hide=_HIDDEN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # half a report is worse than a late end
    except RankStopped:
        _leave(STOPPED)
    send(report)
    _leave(int(report.failed))


def _import_main(preparation: dict[str, Any]) -> None:
    """Import the parent's main module, as a process of `multiprocessing` does."""
    this: Any = multiprocessing.current_process()
    this._inheriting = True  # which `phalanx.spawn` is told, if that module calls it
    multiprocessing.spawn.prepare(preparation)
    del this._inheriting


def _call(call: bytes, world: World, listener: int | None, backend: str, timeout: float) -> Any:
    """Call the pickled function `call` with a new backend; return its result."""
    from phalanx.hooks import begin_observers  # noqa: PLC0415
    from phalanx.launch.environment import GIVEN  # noqa: PLC0415
    from phalanx.launch.init import make_backend, why_not_nccl  # noqa: PLC0415 -- imports torch

    try:
        function: Callable[[Any], Any] = pickle.loads(call)
    except Exception as error:
        raise MisuseError(
            f"a fresh process cannot load the function that was given to spawn "
            f"({error_line(error)}): define it, and what it uses, at the top level of a module "
            "that can be imported"
        ) from error
    if listener is not None:
        os.set_inheritable(listener, False)
        world = replace(world, listener=socket.socket(fileno=listener))
    if backend == "auto":  # all ranks are on this host, and count the same GPUs
        world = replace(world, nccl=not why_not_nccl(world.world_size - 1))
    made = make_backend(backend, world, timeout)
    begin_observers(made, world, os.environ)
    GIVEN.set(f"rank {world.rank} of {world.world_size} of phalanx.spawn")
    try:
        result = function(made)
    except BaseException:
        made.abort()
        raise
    made.close()
    return result


def _begin(parent: str, descriptor: str) -> Callable[[RankReport], bool]:
    """Wait until the supervisor lets this rank begin; end with the supervisor; return `send`."""
    faulthandler.enable()
    die_with_parent(int(parent))
    channel = int(descriptor)
    os.set_inheritable(channel, False)
    file, process = os.fstat(channel), os.getpid()
    begun = b""
    with suppress(OSError):
        begun = os.read(channel, 1)
    if not begun:
        os._exit(1)

    def send(report: RankReport) -> bool:
        """Send the report, and close the channel; return whether that could be done."""
        try:
            # A script that closes all descriptors may have given this number to another file.
            # And how a process ends that it has forked is not how the rank does.
            if os.getpid() != process or not os.path.samestat(os.fstat(channel), file):
                return False
            with open(channel, "wb") as stream:
                stream.write(report.encode())
        except OSError:
            return False
        return True

    return send


class _Stop:
    """Handler of SIGTERM: raises `RankStopped`, once; again if that was lost.

    It is lost in a `__del__`, or in a weakref's callback: there Python drops exceptions. Then the
    signal is sent again a moment later, and so is SIGINT.
    """

    def __init__(self) -> None:
        self._told = False
        signal.signal(signal.SIGTERM, self)
        sys.unraisablehook = self._dropped

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if not self._told:  # once is enough: cleaning up goes on
            self._told = True
            raise RankStopped("told to stop by SIGTERM: another rank failed, or the job has to end")

    def _dropped(self, what: sys.UnraisableHookArgs) -> None:
        signals = {RankStopped: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
        if what.exc_type in signals:  # `Thread` takes locks, which the main thread may hold
            _thread.start_new_thread(self._send_again, (signals[what.exc_type],))
        else:
            sys.__unraisablehook__(what)

    def _send_again(self, signum: int) -> None:
        time.sleep(0.001)
        self._told = self._told and signum != signal.SIGTERM
        signal.pthread_kill(threading.main_thread().ident or 0, signum)


def _leave(code: int) -> NoReturn:
    """End this process; a failed one soon, even if a leftover thread would keep it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is leaving already: let it clean up
    if code not in (0, AGAIN):
        end = threading.Timer(GRACE, os._exit, [code])
        end.daemon = True
        end.start()
    sys.exit(code)
