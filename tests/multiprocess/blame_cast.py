"""The director of a scenario: starts ranks, hears what they say, tells how it went.

A rank runs an act: `act(backend, wire, ...)`, where the wire is its line to the director. Moments
are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from random import Random
from time import monotonic, sleep
from typing import Any, NamedTuple

from networks import Network
from ranks import Job

from phalanx import DistributedError

WAIT = 45.0  # seconds for an answer that has to come


class Report(NamedTuple):
    """An error that a rank met, and when."""

    error: str
    peer: int | None
    text: str
    moment: float

    @classmethod
    def of(cls, error: DistributedError) -> Report:
        """Just now."""
        return cls(type(error).__name__, error.peer, str(error), monotonic())


class Verdict(NamedTuple):
    """How one try went: what was wrong, or "", and the seconds until the last one knew."""

    wrong: str
    seconds: float


class Cast:
    """The ranks of one job, each with its wire."""

    def __init__(self, job: Job, size: int) -> None:
        self.job = job
        self.ranks = list(range(size))
        self.wires: dict[int, Connection] = {}
        self.outcomes: dict[int, Callable[[], tuple[str, Any]]] = {}

    def start(self, rank: int, act: Callable[..., Any], *args: Any) -> None:
        """Let a rank begin."""
        ours, theirs = Pipe()
        self.wires[rank] = ours
        self.outcomes[rank] = self.job.start(rank, act, theirs, *args)
        theirs.close()

    def start_all(self, act: Callable[..., Any], *args: Any) -> None:
        """Let all begin, and wait until they say that they have met."""
        for rank in self.ranks:
            self.start(rank, act, *args)
        for rank in self.ranks:
            self.hear(rank)

    def hear(self, rank: int) -> Any:
        """The next word of a rank."""
        if not self.wires[rank].poll(WAIT):
            raise AssertionError(f"rank {rank} said nothing for {WAIT:g} s")
        try:
            return self.wires[rank].recv()
        except (EOFError, ConnectionResetError):
            how, what = self.outcomes[rank]()
            raise AssertionError(f"rank {rank} {how}: {what}") from None

    def report(self, rank: int) -> Report:
        """The error that a rank has returned."""
        how, what = self.outcomes[rank]()
        if how == "returned" and isinstance(what, Report):
            return what
        raise AssertionError(f"rank {rank} {how}: {what}")

    def tell(self, word: object, *ranks: int) -> None:
        """Say something to some ranks, or to all; those that have ended do not hear it."""
        for rank in ranks or self.ranks:
            with suppress(BrokenPipeError):
                self.wires[rank].send(word)

    def process(self, rank: int) -> int:
        """A rank's process."""
        return self.job.processes[rank]

    def others(self, *but: int) -> list[int]:
        """All ranks but these."""
        return [rank for rank in self.ranks if rank not in but]


def let_pass(random: Random, within: float) -> None:
    """Go on at a random moment of the next seconds: whichever it is, it has to be right."""
    sleep(random.uniform(0, within))


@contextmanager
def cast(
    size: int,
    *,
    timeout: float = 30.0,
    heartbeat: float | None = None,
    network: Network | None = None,
) -> Iterator[Cast]:
    """A job of that many ranks; whatever is left of it at the end is killed."""
    with Job(size, timeout=timeout, heartbeat=heartbeat, network=network) as job:
        company = Cast(job, size)
        try:
            yield company
        finally:
            for wire in company.wires.values():
                wire.close()


def judge(
    reports: dict[int, Report],
    culprit: int,
    since: float,
    within: float,
    *,
    error: str = "PeerLostError",
    words: str = "",
) -> Verdict:
    """Whether all of them name the culprit, with that error and those words, in time."""
    wrong = []
    for rank, report in sorted(reports.items()):
        seconds = report.moment - since
        if report.error != error or report.peer != culprit or words not in report.text:
            wrong.append(f"rank {rank} got {report.error}, peer {report.peer}: {report.text}")
        elif seconds > within:
            wrong.append(f"rank {rank} needed {seconds:.2f} s: {report.text}")
    last = max(report.moment for report in reports.values())
    return Verdict("; ".join(wrong), last - since)
