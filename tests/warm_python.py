"""A Python whose processes are forks of the server of `processes`, for launchers that start ranks.

    subprocess.run(["mpirun", "-n", "2", warm_python(), "script.py"])
    run_python(["-m", "phalanx", "bench"], python=warm_python())

A launcher starts each rank as a fresh process of Python, which imports torch for two seconds. Where
the start of ranks is not what is tested, it is given the path of this program instead of Python's:

    launcher --- starts ---> stand-in   has the process id that the launcher knows, no torch
                                |       hands on its words, environment, folder and descriptors
                                v
              server --- forks ---> the process   does what Python would do with those words

Signals that the stand-in gets are the process's. Each ends with the other, in the same way: by the
same exit code or signal. To the process, its parent is that of the stand-in. It is a session of its
own, and its limits, processors and namespaces are those of the server. Words that begin with
another option than -c, -m and -u are Python's own: then nothing is forked.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import marshal
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from processes import Forked, fork_server, run_words

FAR = 500  # a descriptor beyond those that programs have

STAND_IN = """#!{python} -IS
import marshal, os, signal, socket, sys

if sys.argv[1] == "-u":
    del sys.argv[1]
    os.environ["PYTHONUNBUFFERED"] = "1"
if sys.argv[1][:1] == "-" and sys.argv[1] not in ("-c", "-m"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
sock = socket.socket(socket.AF_UNIX)
open_ones = [int(name) for name in os.listdir("/proc/self/fd")]
numbers = [n for n in open_ones if os.path.exists(f"/proc/self/fd/{{n}}") and n != sock.fileno()]
sock.connect({place!r})
said = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd(), os.getppid(), numbers))
socket.send_fds(sock, [len(said).to_bytes(8, "little")], numbers)
sock.sendall(said)

def read():
    found = b""
    while len(found) < 8:
        found += sock.recv(8 - len(found)) or os._exit(255)
    return int.from_bytes(found, "little", signed=True)

process = read()
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}}:
    if number < signal.SIGRTMIN and signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, _: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
code = read()
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def warm_python() -> str:
    """The path of the program, which works as long as this process lives. Elsewhere than on Linux
    it is Python itself."""
    if sys.platform != "linux":
        return sys.executable
    folder = tempfile.mkdtemp(prefix="python-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    program = Path(folder, "python")
    program.write_text(STAND_IN.format(python=sys.executable, place=f"{folder}/socket"))
    program.chmod(0o755)
    fork_server()
    forkserver.ensure_running()
    threading.Thread(target=_serve, args=(listener, str(program)), daemon=True).start()
    return str(program)


def _serve(listener: socket.socket, program: str) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_fork, args=(sock, program), daemon=True).start()


class _Apart(Forked):
    """One that is not among the children of this process, for whose ends other threads look."""

    def start(self) -> None:
        self._popen = self._Popen(self)  # type: ignore[attr-defined]


class _Descriptor:
    """Is the number of the descriptor in the process that gets this."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detach, (DupFd(self._number),)


def _detach(sent: Any) -> int:
    return sent.detach()


def _fork(sock: socket.socket, program: str) -> None:
    """Start what a stand-in asks for; see to it that both end together."""
    with sock:
        head, received, _, _ = socket.recv_fds(sock, 8, 250)
        said = b""
        while len(said) < int.from_bytes(head, "little"):
            said += sock.recv(1 << 20)
        descriptors = [_Descriptor(number) for number in received]
        process = _Apart(target=_become, args=(marshal.loads(said), descriptors, program))
        process.start()
        popen = process._popen  # type: ignore[attr-defined]
        for number in received:
            os.close(number)
        with suppress(ConnectionError):
            sock.sendall(popen.pid.to_bytes(8, "little"))
        if popen.sentinel not in connection.wait([popen.sentinel, sock]):  # the stand-in is gone
            with suppress(ProcessLookupError):
                os.kill(popen.pid, signal.SIGKILL)
        with suppress(ConnectionError):
            sock.sendall(popen.wait().to_bytes(8, "little", signed=True))


def _become(said: tuple[Any, ...], received: list[int], program: str) -> None:
    words, environ, folder, parent, numbers = said
    atexit._clear()
    os.setsid()
    _take_descriptors(dict(zip(numbers, received, strict=True)))
    os.chdir(folder)
    _take_environment(environ)
    sys.executable = program
    real, process = os.getppid, os.getpid()
    os.getppid = lambda: parent if os.getpid() == process else real()
    code: Any = 0
    try:
        run_words(words, folder)
    except SystemExit as error:
        code = error.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code or 0)


def _end(code: int) -> None:
    """End as Python does, but for what takes a second: to take every module apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:  # else it is Python's end that does this
        sys.modules["mpi4py.MPI"].Finalize()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _take_descriptors(received: Mapping[int, int]) -> None:
    """Have these under the same numbers as the stand-in. Nothing of the server's is in the way."""
    far = {n: fcntl.fcntl(has, fcntl.F_DUPFD_CLOEXEC, FAR) for n, has in received.items()}
    for number in received.values():
        os.close(number)
    for number, has in far.items():
        os.dup2(has, number)
        os.close(has)
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115


def _take_environment(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    paths = environ.get("PYTHONPATH", "").split(":")
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    if "MALLOC_MMAP_THRESHOLD_" in environ:  # which malloc reads at its start
        from given_back import give_back

        give_back()
    if "PYTHONUNBUFFERED" in environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if "OMP_NUM_THREADS" in environ:
        sys.modules["torch"].set_num_threads(int(environ["OMP_NUM_THREADS"]))
