"""`close()` takes a bounded time and needs nobody else; who still waits is told that it left."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from multiprocessing.connection import Connection
from random import Random
from time import monotonic, sleep

from blame_acts import error_of
from blame_cast import Report, Verdict, cast, judge, let_pass
from networks import Network

import phalanx
from phalanx import Backend

BOUND = 6.0  # seconds; close() itself waits 5 at most
WITHIN = 1.0  # seconds after the call of close()


def close_beside(trouble: str, seed: int = 0, *, bound: float = BOUND) -> Verdict:
    """Rank 0 closes while rank 1 takes nothing, with all buffers full; rank 2 waits for it.

    trouble   rank 1 is `stopped`, or `cut off`; or it is `busy`: alive, and in no call
    """
    with ExitStack() as stack:
        network = stack.enter_context(Network(3)) if trouble == "cut off" else None
        # Else rank 2 may give rank 1 up before rank 0 has left, which is right, too.
        heartbeat = 60.0 if network is not None else None
        company = stack.enter_context(cast(3, heartbeat=heartbeat, network=network))
        company.start_all(close_or_wait)
        if network is not None:
            network.cut(1)
        elif trouble == "stopped":
            os.kill(company.process(1), signal.SIGSTOP)
        let_pass(Random(seed), 0.2)
        company.tell("close", 0)
        began, seconds = company.hear(0)
        verdict = judge({2: company.report(2)}, 0, began, bound, words="rank 0 left")
        late = f"close() took {seconds:.2f} s" if seconds > bound else ""
        return Verdict("; ".join(filter(None, (verdict.wrong, late))), seconds)


def close_or_wait(backend: Backend, wire: Connection) -> Report | None:
    """Each rank's part in that."""
    backend.barrier()
    wire.send("met")
    if backend.rank == 2:
        return error_of(lambda: backend.recv(bytearray(1), 0))
    if backend.rank == 1:
        wire.poll(60)
        return None
    wire.recv()
    phalanx.isend(bytearray(200 << 20), backend, 1)
    sleep(0.2)  # for the buffers to fill
    began = monotonic()
    backend.close()
    wire.send((began, monotonic() - began))
    return None
