"""How long a job takes to form with and without a crowd of other callers at its acceptor.

    python tests/backends/acceptor_flood.py [--ranks 4] [--runs 5] [--idle 500] [--partial 300] ...

Each rank is a process, and so is the crowd, which stands at the acceptor before the ranks come.
Rows:

    rank 0           the crowd calls rank 0; what it is hung up on stays away
    insistent        the same, and whoever is hung up on calls again at once
    rank 1           the crowd calls rank 1, which listens for those above it

Prints the medians, and in how many of the runs the job formed within a second of the median
without a crowd; ends with 1 if that is not all of them.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from listening import listening
from strangers import Crowd

from phalanx import TcpBackend
from phalanx.transport.tcp.addresses import listen_at

TOKEN = "the token of the flooded job"
ALLOWED = 1.0  # seconds
WAIT = 60.0


def be_a_rank(rank: int, size: int, pipe: Connection) -> None:
    """Does as it is told: listens, or forms a group and says when it was formed."""
    logging.getLogger("phalanx").setLevel(logging.ERROR)
    listener = None
    while (order := pipe.recv()) is not None:
        if order == "listen":
            listener = listen_at(2, ("127.0.0.1", 0))
            pipe.send(listener.getsockname()[1])
            continue
        backend = TcpBackend(
            rank, size, f"127.0.0.1:{order}", token=TOKEN, timeout=WAIT, listener=listener
        )
        listener = None
        pipe.send(time.monotonic())
        pipe.recv()  # until all have come
        backend.close()
        pipe.send("closed")


def be_a_crowd(pipe: Connection) -> None:
    """Calls an address, goes on until it is told to stop, and reports."""
    while (order := pipe.recv()) is not None:
        crowd = Crowd(order.pop("address"), **order)
        pipe.send("there")
        while not pipe.poll():
            crowd.mingle(0.02)
        pipe.recv()
        pipe.send((crowd.calls, crowd.left()))
        crowd.close()


class Player:
    """A process at the other end of a pipe."""

    def __init__(self, target: Any, *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*args, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, order: object) -> None:
        self._pipe.send(order)

    def hear(self) -> Any:
        if not self._pipe.poll(2 * WAIT):
            raise TimeoutError("a process of this benchmark does not answer")
        return self._pipe.recv()


def form(ranks: list[Player], crowd: Player, options: dict[str, Any], where: str) -> float:
    """One run; the seconds from the moment all ranks are told to meet to the last one's success."""
    ranks[0].tell("listen")
    port = ranks[0].hear()
    early: list[Player] = []
    if where.endswith("rank 1"):  # its acceptor opens when it has met rank 0
        early = ranks[:2]
        for rank in early:
            rank.tell(port)
        places: set[tuple[str, int]] = set()
        while not places:
            places = listening(str(ranks[1].process.pid))
        target = next(iter(places))
    else:
        target = ("127.0.0.1", port)
    there = not where.startswith("nobody")
    if there:
        crowd.tell({"address": target, **options, "insistent": where == "insistent"})
        crowd.hear()
    begin = time.monotonic()
    for rank in ranks:
        if rank not in early:
            rank.tell(port)
    seconds = max(rank.hear() for rank in ranks) - begin
    if there:
        crowd.tell("stop")
        calls, left = crowd.hear()
        assert not left, f"{left} of {calls} callers are still connected"
    for rank in ranks:
        rank.tell("close")
    for rank in ranks:
        rank.hear()
    return float(seconds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("ranks", 4),
        ("runs", 5),
        ("idle", 500),
        ("partial", 300),
        ("garbage", 200),
        ("hello", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args(arguments))
    size, runs = options.pop("ranks"), options.pop("runs")
    ranks = [Player(be_a_rank, rank, size) for rank in range(size)]
    crowd = Player(be_a_crowd)
    form(ranks, crowd, options, "nobody")  # until everything is imported
    print(f"{size} ranks, {options}, {runs} runs, seconds until all have met: median (worst)")
    good = total = 0
    medians: dict[str, float] = {}
    for where, base in (
        ("nobody", ""),
        ("rank 0", "nobody"),
        ("insistent", "nobody"),
        ("nobody at rank 1", ""),
        ("rank 1", "nobody at rank 1"),
    ):
        times = [form(ranks, crowd, options, where) for _ in range(runs)]
        medians[where] = statistics.median(times)
        line = f"  {where:18} {medians[where]:7.3f} ({max(times):.3f})"
        if base:
            within = sum(seconds < medians[base] + ALLOWED for seconds in times)
            good, total = good + within, total + runs
            line += f"   within {ALLOWED:g} s of {base}: {within} of {runs}"
        print(line, flush=True)
    for player in (*ranks, crowd):
        player.tell(None)
        player.process.join(WAIT)
    print(f"formed within a second of the undisturbed time: {good} of {total}")
    return int(good < total)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
