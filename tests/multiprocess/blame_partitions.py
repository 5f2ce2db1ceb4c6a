"""Ranks on hosts of their own, and a network that fails: cut, lossy, one way or both ways."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from random import Random
from time import monotonic, sleep

from blame_acts import error_of, then_go_on, until_error, until_told, went_on
from blame_cast import Report, Verdict, cast, judge, let_pass
from blame_stops import unharmed
from networks import Network
from processes import fork_server

from phalanx import Backend

WITHIN = 3.0  # seconds, at defaults
DIRECTIONS = {
    "both ways": {"come_in": True, "go_out": True},
    "inward": {"come_in": True, "go_out": False},
    "outward": {"come_in": False, "go_out": True},
}


def cut_off(
    direction: str,
    traffic: str,
    seed: int,
    *,
    ranks: int = 3,
    heartbeat: float | None = None,
    within: float = WITHIN,
) -> Verdict:
    """One host is cut off: the others name its rank within 3 seconds, and go on without it.

    It knows, too, as soon; it names one that it cannot reach, or is told that it was given up.
    Then the network is healed, and the others' sums stay right.
    """
    random = Random(seed)
    victim = random.randrange(ranks)
    with Network(ranks) as network, cast(ranks, network=network, heartbeat=heartbeat) as company:
        company.start_all(then_go_on, traffic, seed, victim)
        let_pass(random, 0.5)
        cut = monotonic()
        network.cut(victim, **DIRECTIONS[direction])
        reports = {rank: company.hear(rank) for rank in company.others(victim)}
        verdict = judge(reports, victim, cut, within)
        wrong = [verdict.wrong] if verdict.wrong else []
        own: Report = company.hear(victim)
        if own.error != "PeerLostError" or own.moment - cut > within:
            wrong.append(f"the victim, {victim}, after {own.moment - cut:.2f} s: {own}")
        network.heal(victim)
        wrong += filter(None, [went_on(company, victim, after=0.5)])
        return Verdict("; ".join(wrong), max(verdict.seconds, own.moment - cut))


def cut_between_two(
    traffic: str, seed: int, *, heartbeat: float | None = None, within: float = WITHIN
) -> Verdict:
    """Two of three cannot reach each other: each names the other, and the third one of them."""
    with Network(3) as network, cast(3, network=network, heartbeat=heartbeat) as company:
        company.start_all(until_error, traffic, seed)
        cut = monotonic()
        network.cut_between(0, 1)
        wrong, last = [], 0.0
        for rank, suspects in enumerate(((0, 1), (0, 1), (0, 1))):
            how, report = company.outcomes[rank]()
            if how != "returned" or report.peer not in suspects:
                wrong.append(f"rank {rank} {how}: {report}")
            else:
                last = max(last, report.moment - cut)
        if last > within:
            wrong.append(f"{last:.2f} s")
        return Verdict("; ".join(wrong), last)


def cut_shortly(direction: str, traffic: str, seed: int, *, seconds: float) -> Verdict:
    """A host is cut off for less than 2 seconds: nothing has happened."""
    random = Random(seed)
    victim = random.randrange(3)
    with Network(3) as network, cast(3, network=network) as company:
        company.start_all(until_told, traffic, seed)
        let_pass(random, 0.3)
        network.cut(victim, **DIRECTIONS[direction])
        sleep(seconds)
        network.heal(victim)
        return unharmed(company, after=1.0)


def lose_some(traffic: str, seed: int, *, share: float = 0.1, seconds: float = 10.0) -> Verdict:
    """Every tenth packet of one host is lost: slow, but no alarm, and every number is right."""
    with Network(3) as network, cast(3, network=network, timeout=60.0) as company:
        company.start_all(until_told, traffic, seed)
        network.lose(Random(seed).randrange(3), share)
        return unharmed(company, after=seconds)


def slow_down(traffic: str, seed: int, *, megabits: int = 20, seconds: float = 10.0) -> Verdict:
    """One host's network is slow, and what it sends waits in queues: no alarm."""
    with Network(3) as network, cast(3, network=network, timeout=60.0) as company:
        company.start_all(until_told, traffic, seed)
        network.slow_down(Random(seed).randrange(3), megabits)
        return unharmed(company, after=seconds)


def full_and_waiting(seed: int, *, seconds: float = 5.0) -> Verdict:
    """A rank that is sent more than it keeps, and waits for another: it is not blamed, nor blames.

    Rank 0 sends 300 MiB to rank 1, which waits for rank 2 meanwhile: 44 of them wait in rank 0.
    """
    with Network(3) as network, cast(3, network=network) as company:
        company.start_all(send_too_much, seconds)
        wrong = []
        for rank in company.ranks:
            how, what = company.outcomes[rank]()
            if (how, what) != ("returned", None):
                wrong.append(f"rank {rank} {how}: {what}")
        return Verdict("; ".join(wrong), 0.0)


def send_too_much(backend: Backend, wire: Connection, seconds: float) -> Report | None:
    """Each rank's part in that."""
    backend.barrier()
    wire.send("met")
    count, size = 75, 4 << 20

    def part() -> None:
        if backend.rank == 0:
            for _ in range(count):
                backend.send(bytearray(size), 1)
        elif backend.rank == 1:
            backend.recv(bytearray(1), 2)
            for _ in range(count):
                backend.recv(bytearray(size), 0)
        else:
            sleep(seconds)
            backend.send(b"!", 1)
        backend.barrier()

    return error_of(part)


@contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    """So many processes that compute all the time, beside what is done here."""
    context = fork_server()
    burners = [context.Process(target=_burn, daemon=True) for _ in range(processes)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def _burn() -> None:
    director = multiprocessing.parent_process()
    while director is not None and director.is_alive():  # if it was killed, nobody ends this
        sum(range(100_000))
