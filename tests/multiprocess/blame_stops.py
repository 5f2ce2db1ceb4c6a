"""SIGSTOP of one rank, on this host or on another: given up, or back soon enough."""

from __future__ import annotations

import os
import signal
from random import Random
from time import monotonic, sleep

from blame_acts import then_go_on, until_told, until_told_resting, went_on
from blame_cast import Cast, Verdict, cast, judge, let_pass
from networks import Network

WITHIN = 3.0  # seconds, at defaults


def stop_in(
    traffic: str,
    seed: int,
    *,
    ranks: int = 4,
    network: Network | None = None,
    heartbeat: float | None = None,
    within: float = WITHIN,
) -> Verdict:
    """Stop a rank: the others know within 3 seconds, and go on without it.

    It is woken then: it learns that it was given up, and the others' sums stay right.
    """
    random = Random(seed)
    victim = random.randrange(ranks)
    with cast(ranks, network=network, heartbeat=heartbeat) as company:
        company.start_all(then_go_on, traffic, seed, victim)
        let_pass(random, 0.5)
        stopped = _send(company, victim, signal.SIGSTOP)
        reports = {rank: company.hear(rank) for rank in company.others(victim)}
        verdict = judge(reports, victim, stopped, within)
        for rank in company.others(victim):
            company.hear(rank)  # that it goes on
        woken = _send(company, victim, signal.SIGCONT)
        wrong = [verdict.wrong] if verdict.wrong else []
        wrong += _about_the_returned(company, victim, woken, within)
        wrong += filter(None, [went_on(company, victim, after=0.3)])
        return Verdict("; ".join(wrong), verdict.seconds)


def _about_the_returned(company: Cast, victim: int, woken: float, within: float) -> list[str]:
    first, second = company.hear(victim), company.hear(victim)
    wrong = [
        f"rank {victim}, woken, got {report}"
        for report in (first, second)
        if report is None or report.peer != victim or f"gave rank {victim} up" not in report.text
    ]
    if first.moment - woken > within:
        wrong.append(f"rank {victim} needed {first.moment - woken:.1f} s once it was woken")
    return wrong


def stop_shortly(
    traffic: str, seed: int, *, seconds: float = 1.0, network: Network | None = None
) -> Verdict:
    """A rank that is stopped for a second, and goes on: nothing has happened."""
    random = Random(seed)
    ranks = 3 if network else 4
    victim = random.randrange(ranks)
    with cast(ranks, network=network) as company:
        company.start_all(until_told, traffic, seed)
        let_pass(random, 0.3)
        _send(company, victim, signal.SIGSTOP)
        sleep(seconds)
        _send(company, victim, signal.SIGCONT)
        return unharmed(company, after=0.5)


def stop_everyone(
    seed: int, *, seconds: float = 5.0, ranks: int = 4, network: Network | None = None
) -> Verdict:
    """All ranks are stopped, as on a laptop that is closed, and woken: nobody blames anyone."""
    with cast(ranks, network=network) as company:
        company.start_all(until_told, "all_reduce", seed)
        let_pass(Random(seed), 0.3)
        for rank in company.ranks:
            _send(company, rank, signal.SIGSTOP)
        sleep(seconds)
        for rank in company.ranks:
            _send(company, rank, signal.SIGCONT)
        return unharmed(company, after=1.0)


def hold_in(
    traffic: str,
    seed: int,
    *,
    seconds: float,
    ranks: int = 4,
    network: Network | None = None,
    how: str = "hold",
    heartbeat: float | None = None,
) -> Verdict:
    """A rank holds its interpreter, or computes, for so long: no alarm, every number is right."""
    victim = Random(seed).randrange(ranks)
    with cast(ranks, network=network, heartbeat=heartbeat) as company:
        company.start_all(until_told_resting, traffic, seed, seconds)
        began = monotonic()
        company.tell(how, victim)
        company.hear(victim)
        held = monotonic() - began
        return unharmed(company, after=0.3)._replace(seconds=held)


def train_for(seconds: float, seed: int, *, network: Network | None = None) -> Verdict:
    """Four ranks train for so long: no alarm, and every number is right."""
    with cast(4, network=network) as company:
        company.start_all(until_told, "training", seed)
        return unharmed(company, after=seconds)


def unharmed(company: Cast, *, after: float) -> Verdict:
    """End the traffic after so many seconds: whether all ranks were well to the end."""
    sleep(after)
    company.tell("end", 0)
    wrong = []
    for rank in company.ranks:
        how, what = company.outcomes[rank]()
        if how != "returned":
            wrong.append(f"rank {rank} {how}: {what}")
    return Verdict("; ".join(wrong), 0.0)


def _send(company: Cast, rank: int, signum: int) -> float:
    moment = monotonic()
    os.kill(company.process(rank), signum)
    return moment
