"""Where torch's agent puts what each rank prints, and what the launcher learns by it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from phalanx.launch.attempt import Attempt
from phalanx.launch.story import describe, root_cause

__all__ = ["RankFolders", "quiet_agent"]

_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


class RankFolders(DefaultLogsSpecs):
    """A folder a rank and attempt, under `folder`; all output is shown as it comes.

    The agent asks for the folders once an attempt, and that is how the launcher hears of a
    restart: it says which rank was the reason, and follows the new processes.
    """

    def __init__(self, folder: str, max_restarts: int) -> None:
        super().__init__(log_dir=folder, tee=Std.ALL)
        self._max_restarts = max_restarts
        self.attempt = Attempt({})

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of one attempt; `envs` maps local ranks to their environment."""
        restart = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if restart > 0:
            self._announce(restart)
        self.close()
        destination = super().reify(envs)
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self.attempt = Attempt(
            {ranks[local]: path for local, path in destination.error_files.items()}
        )
        return destination

    def close(self) -> None:
        """Follow the processes of the last attempt no more."""
        self.attempt.close()

    def _announce(self, restart: int) -> None:
        endings = self.attempt.endings()
        why = describe(root_cause(endings)) if endings else "a rank failed"
        sys.stderr.write(f"{why}\nrestarting all ranks ({restart} of {self._max_restarts})\n")


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
