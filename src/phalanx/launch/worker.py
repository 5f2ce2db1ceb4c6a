"""One rank of `phalanx run`: the user's script, as if Python had run it, in a rank's process.

The launcher starts it as BOOT below, followed by "script" or "module", its name, its arguments.
It leaves two files beside each other, in the folder of TORCHELASTIC_ERROR_FILE: `pid`, and, if
the script fails, its record.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from phalanx.errors import RankStopped
from phalanx.launch.reaper import PID_FILE
from phalanx.launch.report import error_line, follows_from_another, format_traceback, write_record
from phalanx.launch.scratch import GRACE, die_with_parent, raise_when_stopped

__all__ = ["BOOT", "INTERRUPTED", "LAUNCHER_VARIABLE", "STOPPED", "main"]

BOOT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "from phalanx.launch.worker import main; main()"
)
"""The current folder is not searched for modules, as when Python runs a script elsewhere. And
Ctrl-C ends a rank without a word until its script runs."""

LAUNCHER_VARIABLE = "PHALANX_LAUNCHER_PID"
INTERRUPTED, STOPPED = 130, 143  # as a shell counts them: 128 + SIGINT, 128 + SIGTERM

_HIDDEN = frozenset({__file__, runpy.__file__, "<frozen runpy>", "<string>"})


def main() -> None:
    """Run what the command line says, and end this process as the script ended."""
    faulthandler.enable()
    die_with_parent(int(os.environ.pop(LAUNCHER_VARIABLE, os.getppid())))
    raise_when_stopped()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if error_file:
        with suppress(OSError):  # a full disk: the agent will still see how this process ends
            Path(error_file).with_name(PID_FILE).write_text(f"{os.getpid()}\n")
    kind, name = sys.argv[1:3]
    del sys.argv[:2]
    code = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run_module(name) if kind == "module" else _run_script(name)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = _exit_code(error, error_file)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is leaving already: let it clean up
    if code != 0:
        _leave_within_grace(code)
    sys.exit(code)


def _exit_code(error: BaseException, error_file: str) -> int:
    """Return what this process ends with, after the record of it if it is a failure."""
    if isinstance(error, RankStopped):
        return STOPPED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return _leave(error, error_file)
    _tell(error, error_file)
    return 1


def _run_script(name: str) -> None:
    if not getattr(sys.flags, "safe_path", False) and not Path(name).is_dir():
        sys.path.insert(0, str(Path(name).resolve().parent))
    runpy.run_path(name, run_name="__main__")


def _run_module(name: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _leave(error: SystemExit, error_file: str) -> int:
    """Return the exit code that `error` asks for, with the record if that is a failure."""
    if error.code is None or error.code == 0:
        return 0
    if not isinstance(error.code, int):
        sys.stderr.write(f"{error.code}\n")
    if error_file:
        summary = f"sys.exit({error.code!r}){_where(error)}"
        follows = follows_from_another(error)
        with suppress(OSError):
            write_record(error_file, summary=summary, traceback="", follows=follows)
    return error.code if isinstance(error.code, int) else 1


def _where(error: SystemExit) -> str:
    """Return the last place in the script itself, rather than in argparse, say."""
    shown = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in _HIDDEN
    ]
    places = [frame for frame in shown if frame.filename == shown[0].filename]
    return f" from {places[-1].filename}, line {places[-1].lineno}" if places else ""


def _tell(error: BaseException, error_file: str) -> None:
    text = format_traceback(error, hide=_HIDDEN)
    summary, follows = error_line(error), follows_from_another(error)
    with suppress(OSError):  # a full disk
        if error_file:
            write_record(error_file, summary=summary, traceback=text, follows=follows)
            return
    sys.stderr.write(text)


def _leave_within_grace(code: int) -> None:
    """End this process soon, even if a thread that the script left behind would keep it."""

    def leave() -> None:
        time.sleep(GRACE)
        os._exit(code)

    threading.Thread(target=leave, name="exit", daemon=True).start()
