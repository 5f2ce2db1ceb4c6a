"""The output of many ranks on one stream: whole lines only, each behind its rank."""

from __future__ import annotations

import logging
import os
import select
import selectors
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std, api

from phalanx.errors import BackendUnavailableError
from phalanx.launch.supervisor import Attempt, describe, root_cause, summarise

LONGEST_LINE = 1 << 20
"""Bytes of a line that are kept until its end comes; a longer one is shown in pieces."""


class RankLines:
    r"""Joins the pieces of each rank's lines, and passes on whole lines.

        rank 0: "los"   rank 1: "hello\n"   rank 0: "s 3\n"
        -> "[rank 1] hello\n"  "[rank 0] loss 3\n"

    Bytes go through as they are, whatever their encoding. A reader that has gone away is no
    error: the ranks go on. `finish()` passes on what has no end of line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False
        self._begun: dict[int, bytes] = {}

    def write(self, rank: int, data: bytes) -> None:
        """Take what `rank` has written, any part of it."""
        lines, newline, rest = (self._begun.pop(rank, b"") + data).rpartition(b"\n")
        if len(rest) >= LONGEST_LINE:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if newline:
            prefix = b"[rank %d] " % rank
            self._pass_on(prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")
        if rest:
            self._begun[rank] = rest

    def finish(self) -> None:
        """Pass on the lines that have begun, as whole ones."""
        for rank in list(self._begun):
            self.write(rank, b"\n")

    def _pass_on(self, data: bytes) -> None:
        if self._gone:
            return
        try:
            self._stream.flush()  # what others have written to it
            self._write(data)
        except (OSError, ValueError):
            self._gone = True
            self._forget_reader()

    def _write(self, data: bytes) -> None:
        try:
            descriptor = self._stream.fileno()
        except OSError:  # in memory, say
            self._write_above(data)
            return
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # somebody at the other end has made it so
                select.select([], [descriptor], [])

    def _write_above(self, data: bytes) -> None:
        binary = getattr(self._stream, "buffer", None)
        if binary is None:
            self._stream.write(data.decode(errors="replace"))
        else:
            binary.write(data)
        self._stream.flush()

    def _forget_reader(self) -> None:
        """Let what the stream still holds go nowhere: at its end Python would try once more."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


# ------------------------------------------------------------------------------
# The ranks' standard output and errors on their way to the launcher's: one named pipe for each.
#
#     rank 3 --- stdout --->  folder/.../3/stdout  ---.
#     rank 4 --- stdout --->  folder/.../4/stdout  ---+--- one thread ---> "[rank 4] loss 3.1"
#
# Torch's agent wants files, and follows them; a pipe has a name like a file, takes no room on the
# disk however long the job runs, and says at once when there is something. A launcher whose own
# output is not taken holds up the ranks, as any pipe does.

_PIECE, _MOST = 1 << 16, 1 << 20


class RankPipes:
    """Reads the pipes of all ranks in a thread, until `close()`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe()
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._closing = False
        self._drained = threading.Event()
        self._thread = threading.Thread(target=self._read, name="rank output", daemon=True)
        self._thread.start()

    def add(self, path: str, rank: int, lines: RankLines) -> None:
        """Make a pipe at `path`, and pass what comes out of it to `lines`. `OSError`: cannot."""
        os.mkfifo(path, 0o600)
        # Open for writing, too: so it never ends, whoever opens and closes it at the other end.
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._selector.register(pipe, selectors.EVENT_READ, (rank, lines))

    def drain(self) -> None:
        """Pass on all that has been written, and forget the pipes: their writers are gone."""
        self._drained.clear()
        os.write(self._writer, b"!")
        self._drained.wait()

    def close(self) -> None:
        """Drain the pipes, and read no more."""
        self._closing = True
        self.drain()
        self._thread.join()
        self._selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._take(key)
                    continue
                os.read(self._reader, 1)
                self._take_the_rest()
                # Read before the other thread goes on: it may close, or wait anew.
                closing = self._closing
                self._drained.set()
                if closing:
                    return
                break  # the others of these keys are closed

    def _take(self, key: selectors.SelectorKey) -> bool:
        """Pass on one piece of what is in a pipe; return whether there was one."""
        try:
            data = os.read(key.fd, _PIECE)
        except BlockingIOError:
            return False
        rank, lines = key.data
        lines.write(rank, data)
        return True

    def _take_the_rest(self) -> None:
        pipes = [key for key in self._selector.get_map().values() if key.data is not None]
        for key in pipes:
            # No more than a pipe holds: something that a rank has left behind may write on.
            for _ in range(_MOST // _PIECE):
                if not self._take(key):
                    break
            self._selector.unregister(key.fd)
            os.close(key.fd)
        for _, lines in {id(key.data[1]): key.data for key in pipes}.values():
            lines.finish()


# ------------------------------------------------------------------------------
# Where torch's agent puts what each rank prints, and what the launcher learns by it.

_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")

_TORCHS_HANDLER = "_terminate_process_handler"
_BOOT_TIME = 1.0


class RankFolders(DefaultLogsSpecs):
    """A folder a rank and attempt, under `folder`; all output is shown as it comes.

    The agent asks for the folders once an attempt, right before it starts the ranks, and that is
    how the launcher hears of a restart: it says which rank was the reason, and follows the new
    processes. `check()` is asked first, and may raise.
    """

    def __init__(self, folder: str, max_restarts: int, check: Callable[[], None]) -> None:
        super().__init__(log_dir=folder, redirects=Std.NONE, tee=Std.NONE)
        self._max_restarts = max_restarts
        self._check = check
        self._out, self._err = RankLines(sys.stdout), RankLines(sys.stderr)
        self._pipes = RankPipes()
        self.attempt = Attempt({})

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of one attempt; `envs` maps local ranks to their environment."""
        self._check()
        restart = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        self.attempt.close()
        self._pipes.drain()
        if restart > 0:
            self._announce(restart)
        try:
            destination = super().reify(envs)
            for local, env in envs.items():
                self._make_pipes(destination, local, int(env["RANK"]))
        except OSError as error:
            raise BackendUnavailableError(
                f"there is no room in {self.root_log_dir} for the ranks' folders ({error}): set "
                "TMPDIR to a folder of yours that is not full"
            ) from error
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self.attempt = Attempt(
            {ranks[local]: path for local, path in destination.error_files.items()}
        )
        return destination

    def settle(self) -> None:
        """Wait until the ranks that are being started can hear a signal, `_BOOT_TIME` at most."""
        self.attempt.settle(_BOOT_TIME)

    def end(self, signum: int) -> None:
        """Pass a signal on to the ranks; return when all have ended, killed after `GRACE`."""
        self.attempt.end(signum)

    def kill(self) -> None:
        """Kill the ranks that are there now."""
        self.attempt.kill()

    def close(self) -> None:
        """Show what is left of the ranks' output, and follow their processes no more."""
        self.attempt.close()
        self._pipes.close()

    def _make_pipes(self, destination: LogsDest, local: int, rank: int) -> None:
        folder = Path(destination.error_files[local]).parent
        for name, paths, lines in (
            ("stdout", destination.stdouts, self._out),
            ("stderr", destination.stderrs, self._err),
        ):
            paths[local] = str(folder / name)
            self._pipes.add(paths[local], rank, lines)

    def _announce(self, restart: int) -> None:
        endings = self.attempt.endings()
        why = "a rank failed"
        if endings:
            root = root_cause(endings)
            why = summarise(root)
            if root.record is not None and root.record.traceback:
                sys.stderr.write(f"{describe(root)}\n")
        sys.stderr.write(f"{why}; restarting all ranks ({restart} of {self._max_restarts})\n")
        sys.stderr.flush()


@contextmanager
def quiet_agent() -> Iterator[None]:
    """Keep the agent's own log from the user, who is told the same in a better way.

    Not if LOGLEVEL is set: who sets it wants to read it.
    """
    if "LOGLEVEL" in os.environ:
        yield
        return
    silent = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in _AGENT_LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(silent)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(silent)


@contextmanager
def keep_handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Keep the launcher's signal handler: the agent's raises in the middle of its own cleaning up.

    A torch that can be asked to install none is (`signals_to_handle`); an older one is given the
    launcher's in place of its own.
    """
    before = getattr(api, _TORCHS_HANDLER, None)
    setattr(api, _TORCHS_HANDLER, handler)
    try:
        yield
    finally:
        setattr(api, _TORCHS_HANDLER, before)
