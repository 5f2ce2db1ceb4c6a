"""Jobs of torch.distributed whose ranks are processes, each of which may end as it likes.

`run(fn, size)` calls `fn(rank)` in each, after `init_process_group("phalanx")` as a launcher's
environment says it, and gives an outcome for each: ("returned", value), ("raised", text), ("died",
exit code), and when the process was gone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # for scripts that import this

import torch.distributed as dist
from processes import fork_server

import phalanx.torch_backend

PATIENCE = 300.0  # seconds for a rank to report, and to end
DONE = "done"  # what a rank says last


class Outcome(NamedTuple):
    """How a rank ended, with what, and seconds from its return to the end of its process."""

    how: str
    value: Any
    seconds_to_end: float


def run(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 20.0,
    lost: int | None = None,
    **environment: str,
) -> dict[int, Outcome]:
    """`fn(rank, *args)` in `size` processes, which do not call `destroy_process_group`.

    `lost` is a rank for which nobody waits.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank,
                args=(theirs, fn, rank, size, f"{folder}/store", timeout, args, environment),
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            return {rank: _outcome(*each) for rank, each in enumerate(started) if rank != lost}
        finally:
            for process, pipe in started:
                if process.is_alive():  # or its number may be another's: the fork server reaps it
                    process.kill()
                process.join()
                pipe.close()


def _outcome(process: Any, pipe: Connection) -> Outcome:
    if not pipe.poll(PATIENCE):
        return Outcome("silent", None, 0.0)
    try:
        how, value, at = pipe.recv()
    except EOFError:
        process.join(PATIENCE)
        return Outcome("died", process.exitcode, 0.0)
    process.join(PATIENCE)
    if process.exitcode != 0:
        return Outcome("died", process.exitcode, 0.0)
    return Outcome(how, value, time.monotonic() - at)


def _rank(
    pipe: Connection,
    fn: Callable[..., Any],
    rank: int,
    size: int,
    store: str,
    timeout: float,
    args: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)  # which the fork server has from when it was started
    dist.set_debug_level_from_env()
    try:
        phalanx.torch_backend.register()
        dist.init_process_group(
            "phalanx",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        pipe.send(("returned", fn(rank, *args), time.monotonic()))
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        pipe.send(("raised", text, time.monotonic()))
