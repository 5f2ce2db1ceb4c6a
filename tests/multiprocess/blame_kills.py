"""`kill -9` of one of four ranks, at a random moment, whatever they are doing."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from random import Random
from time import monotonic

from blame_acts import error_of, then_go_on, until_error, went_on
from blame_cast import Cast, Report, Verdict, cast, judge, let_pass
from blame_traffic import TRAFFIC

from phalanx import Backend, isend

RANKS = 4
WITHIN = 1.0  # seconds after the death


def kill_in(traffic: str, seed: int, *, within: float = WITHIN) -> Verdict:
    """Kill a random rank in that traffic: every survivor names it within a second."""
    random = Random(seed)
    victim = random.randrange(RANKS)
    with cast(RANKS) as company:
        company.start_all(until_error, traffic, seed)
        let_pass(random, 0.5)
        died = _kill(company, victim)
        return judge(
            {rank: company.report(rank) for rank in company.others(victim)}, victim, died, within
        )


def kill_and_vanish(seed: int, *, within: float = WITHIN) -> Verdict:
    """Whoever hears of the death dies, too, in the same moment: nobody takes that for the cause."""
    random = Random(seed)
    victim = random.randrange(RANKS)
    with cast(RANKS) as company:
        company.start_all(until_error_then_vanish, random.choice(("all_reduce", "messages")), seed)
        let_pass(random, 0.3)
        died = _kill(company, victim)
        reports = {rank: company.hear(rank) for rank in company.others(victim)}
        return judge(reports, victim, died, within)


def until_error_then_vanish(backend: Backend, wire: Connection, name: str, seed: int) -> None:
    """Traffic until an error comes; then no word to the others, and no farewell."""
    wire.send(until_error(backend, wire, name, seed))
    os._exit(0)


def kill_and_go_on(seed: int, *, within: float = WITHIN) -> Verdict:
    """The others go on in a group of their own, and their sums are right."""
    random = Random(seed)
    victim = random.randrange(RANKS)
    with cast(RANKS) as company:
        company.start_all(then_go_on, random.choice(list(TRAFFIC)), seed, victim)
        let_pass(random, 0.3)
        died = _kill(company, victim)
        reports = {rank: company.hear(rank) for rank in company.others(victim)}
        for rank in company.others(victim):
            company.hear(rank)  # that it goes on
        verdict = judge(reports, victim, died, within)
        return verdict._replace(
            wrong="; ".join(filter(None, (verdict.wrong, went_on(company, victim))))
        )


def kill_while_closing(seed: int, *, within: float = WITHIN) -> Verdict:
    """The victim dies while it closes, or just before, or just after; the others wait for it."""
    random = Random(seed)
    victim = random.randrange(RANKS)
    with cast(RANKS) as company:
        company.start_all(close_or_wait, victim)
        company.tell("close", victim)
        let_pass(random, 0.01)
        died = _kill(company, victim)
        return judge(
            {rank: company.report(rank) for rank in company.others(victim)}, victim, died, within
        )


def close_or_wait(backend: Backend, wire: Connection, victim: int) -> Report | None:
    """The victim closes with much under way; the others wait for more than they get."""
    backend.barrier()
    wire.send("met")
    if backend.rank != victim:
        return error_of(lambda: [backend.recv(bytearray(32 << 20), victim) for _ in range(3)])
    wire.recv()
    for rank in range(backend.world_size):
        if rank != victim:
            isend(bytearray(32 << 20), backend, rank)
    backend.close()
    return None


def kill_while_meeting(seed: int) -> Verdict:
    """The victim dies while the ranks meet: whoever knows of it by then names it.

    One that has not come yet cannot be told from one that is late: rank 0 names it when its
    timeout, 3 seconds here, has passed.
    """
    random = Random(seed)
    victim = random.randrange(RANKS)
    timeout = 3.0
    with cast(RANKS, timeout=timeout) as company:
        for rank in company.ranks:
            company.start(rank, meet)
        let_pass(random, 0.12)
        died = _kill(company, victim)
        wrong, worst = [], 0.0
        for rank in company.others(victim):
            how, what = company.outcomes[rank]()
            name, text = ("", str(what)) if how != "returned" else (what.error, what.text)
            worst = max(worst, what.moment - died if how == "returned" else 0.0)
            if f"rank {victim}" not in text.splitlines()[0]:
                wrong.append(f"rank {rank}, victim {victim}: {how} {name} {text.splitlines()[0]}")
        if worst > timeout + WITHIN:
            wrong.append(f"{worst:.1f} s")
        return Verdict("; ".join(wrong), worst)


def meet(backend: Backend, wire: Connection) -> Report | None:
    """Wait for the others again and again."""

    def again_and_again() -> None:
        while True:
            backend.barrier()

    return error_of(again_and_again)


def _kill(company: Cast, victim: int) -> float:
    died = monotonic()
    os.kill(company.process(victim), signal.SIGKILL)
    return died
