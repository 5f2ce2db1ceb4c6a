"""What `phalanx run` is asked to start, checked before anything starts."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import InvalidRankError, InvalidWorldSizeError, MisuseError
from phalanx.wire.address import parse_address

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """One script on `ranks` ranks of this host, and as many of each of `nodes` hosts."""

    ranks: int
    target: str
    """A script's path, or with `module` the name of a module."""
    args: tuple[str, ...] = ()
    module: bool = False
    nodes: int = 1
    node_rank: int = 0
    master: str = ""
    """host:port of node 0, the same for all; needed with several nodes."""
    max_restarts: int = 0
    """How often all ranks of all hosts are started again when one has failed.

    Each host counts for itself. A failure ends the ranks of every host, and so they count alike;
    where one was already done it is not: the others wait for it, and say so.
    """

    def check(self) -> None:
        """Raise what is wrong: `InvalidWorldSizeError`, `InvalidRankError` or `MisuseError`."""
        if self.ranks < 1 or self.nodes < 1:
            raise InvalidWorldSizeError(
                f"{self.nodes} nodes of {self.ranks} ranks: it takes at least one of each"
            )
        if not 0 <= self.node_rank < self.nodes:
            raise InvalidRankError(
                f"--node-rank {self.node_rank} is not one of {self.nodes} nodes: they count "
                f"from 0, the last is {self.nodes - 1}"
            )
        if self.max_restarts < 0:
            raise MisuseError(f"--max-restarts {self.max_restarts}: it is 0 or more")
        if self.nodes > 1 and not self.master:
            raise MisuseError(
                f"--nnodes {self.nodes} needs --master host:port: a host name of node 0 and a "
                "free port there, the same on every node"
            )
        if self.master:
            try:
                parse_address(self.master)
            except ValueError as error:
                raise MisuseError(f"--master {self.master}: {error}") from None
        self._find_target()

    def _find_target(self) -> None:
        if self.module:
            top = self.target.partition(".")[0]
            # Only the outermost name: looking further would import it, here.
            known = top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(
                top, [str(Path.cwd()), *sys.path]
            )
            if not known:
                raise MisuseError(f"there is no module {top!r} in {Path.cwd()} or installed")
            return
        path = Path(self.target)
        if not path.is_file() and not (path / "__main__.py").is_file():
            what = "a folder without __main__.py" if path.is_dir() else "not there"
            hint = "; for a module, add -m" if os.sep not in self.target and not path.suffix else ""
            raise MisuseError(f"the script {self.target} is {what} (in {Path.cwd()}){hint}")
