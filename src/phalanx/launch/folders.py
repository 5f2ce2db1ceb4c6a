"""Where torch's agent puts what each rank prints, and what the launcher learns by it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std, api

from phalanx.errors import BackendUnavailableError
from phalanx.launch.attempt import Attempt
from phalanx.launch.output import RankLines
from phalanx.launch.pipes import RankPipes
from phalanx.launch.story import describe, root_cause, summarise

__all__ = ["RankFolders", "keep_handlers", "quiet_agent"]

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
