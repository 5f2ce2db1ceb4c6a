"""Elastic jobs on several hosts, between which the network fails.

Each rank is on a host of its own, and the job's store on one more (multiprocess/networks.py).
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from forms import LONG, sizes
from networks import Network, why_not
from processes import fork_server

from phalanx.elastic.regrouping import blamed
from phalanx.errors import CollectiveTimeoutError, PeerLostError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from elastic_job import Job, Training, running

start = partial(running, context=fork_server())
RANKS = 4


@pytest.fixture
def network() -> Iterator[Network]:
    if why_not():
        pytest.skip(why_not())
    with Network(RANKS + 1) as made:
        yield made


def training(way: str = "full_shard") -> Training:
    return Training(way, "auto", RANKS, heartbeat=2.0)


def members(job: Job, generation: int) -> set[int]:
    """Return the hosts whose ranks had a step that counts in a generation."""
    return {
        process.host
        for process in job.processes
        if any(step.generation == generation for step in process.steps)
    }


DIRECTIONS: dict[str, dict[str, bool]] = {
    "inward": {"go_out": False},
    **({"both ways": {}, "outward": {"come_in": False}} if LONG else {}),
}


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
def test_others_go_on_without_a_host_that_is_cut_off_and_it_joins_again_later(
    network: Network, directions: dict[str, bool]
) -> None:
    with start(training(), network=network) as job:
        victim = job.until_all_train()[1]
        network.cut(victim.host, **directions)
        rest = job.until(lambda: job.training_since(1), "the others train")
        assert len(rest) == RANKS - 1
        assert victim not in rest
        network.heal(victim.host)
        assert job.until_all_train(2)[-1] is victim
        job.check()


@pytest.mark.parametrize("others", [[2], [1, 2, 3]], ids=["one", "all"])
def test_of_hosts_that_cannot_reach_each_other_most_go_on(
    network: Network, others: list[int]
) -> None:
    """The store is there for all. One host alone could not go on with its part of the state."""
    with start(training(), network=network) as job:
        job.until_all_train()
        for other in others:
            network.cut_between(0, other)
        rest = job.until(lambda: job.training_since(1), "the others train")
        hosts = {process.host for process in rest}
        assert hosts in ([{1, 2, 3}] if len(others) > 1 else [{0, 1, 3}, {1, 2, 3}])
        for host in range(RANKS):
            network.heal(host)
        job.until_all_train(2)
        job.check()


def test_halves_of_a_network_that_only_together_have_the_state_wait_until_it_is_whole(
    network: Network,
) -> None:
    with start(training(), network=network) as job:
        ranks = job.until_all_train()
        # Of ranks 0 and 2 each has a copy of the part of one of the others: they have all of it.
        for one in ranks[:2]:
            for other in ranks[2:]:
                network.cut_between(one.host, other.host)
        job.pause(4.0)
        assert not job.training_since(1)
        for host in range(RANKS):
            network.heal(host)
        assert job.until_all_train(1) == ranks
        job.check()


@pytest.mark.parametrize("seconds", [0.2, *[0.0, 0.4] * LONG])
def test_of_two_halves_of_a_network_one_goes_on_and_the_other_joins_when_it_is_whole(
    network: Network, seconds: float
) -> None:
    """The connections end one after the other, so many seconds apart."""
    with start(training("ddp"), network=network) as job:
        job.until_all_train()
        for one in (0, 1):
            for other in (2, 3):
                network.cut_between(one, other)
                job.pause(seconds)
        half = {process.host for process in job.until(lambda: job.training_since(1), "half")}
        assert half in ({0, 1}, {2, 3})
        job.pause(3.0)
        newest = max(process.generation for process in job.processes)
        assert [members(job, generation) for generation in range(2, newest + 1)] == [half] * (
            newest - 1
        )
        for host in range(RANKS):
            network.heal(host)
        job.until_all_train(newest)
        job.check()


@pytest.mark.parametrize("way", ["ddp", *["full_shard", "top_k"] * LONG])
def test_a_newcomer_joins_from_another_host(network: Network, way: str) -> None:
    with start(training(way), processes=RANKS - 1, network=network) as job:
        job.until(lambda: job.training_since(0), "the others train")
        job.start()
        assert len(job.until_all_train(1)) == RANKS
        job.check()


def test_what_error_feedback_had_left_over_is_lost_with_a_host_and_the_log_says_so(
    network: Network,
) -> None:
    with start(training("top_k"), network=network) as job:
        victim = job.until_all_train()[1]
        os.kill(victim.pid, signal.SIGKILL)
        assert len(job.until(lambda: job.training_since(1), "the others train")) == RANKS - 1
        told = "lacks what the compressors of ranks 1 had left over (of 4 ranks), and it is lost"
        assert told in job.story()
        job.check()


@pytest.mark.parametrize("seed", sizes([34], [*range(40), 68, 74]))
def test_after_drawn_cuts_all_train_again_and_no_step_is_lost(network: Network, seed: int) -> None:
    """Whole hosts, pairs, and one direction, the store's, too; some come back in between."""
    draw = random.Random(seed)
    way = draw.choice(["ddp", "full_shard", "top_k"])
    with start(training(way)._replace(heartbeat=1.0), network=network) as job:
        job.until_all_train()
        for _ in range(draw.randint(2, 10)):
            kind = draw.choice(["pair", "pair", "pair", "host", "inward", "heal"])
            one, other = draw.sample(range(RANKS + 1), 2)
            if kind == "pair":
                network.cut_between(one, other)
            elif kind == "heal":
                network.heal(one)
            else:
                network.cut(one, go_out=kind == "host")
            job.pause(draw.choice([0.0, 0.05, 0.3, 1.0, 2.0]))
        for host in range(RANKS + 1):
            network.heal(host)
        last = max(process.steps[-1].number for process in job.processes)

        def all_train() -> bool:
            there = job.training_since(0)
            return len(there) == RANKS and all(each.steps[-1].number > last for each in there)

        job.until(all_train, "all train again")
        job.check()


def test_a_rank_believes_others_who_did_not_come_but_not_whom_they_have_lost() -> None:
    """Of two that have lost each other, each tells this rank that the other is lost."""
    assert blamed(PeerLostError("lost", rank=1, peer=2, op="all_reduce")) == set()
    assert blamed(PeerLostError("lost", rank=1, peer=2, op="rendezvous")) == {2}
    assert blamed(CollectiveTimeoutError("late", rank=1, peer=2, op="all_reduce")) == {2}
    assert blamed(CollectiveTimeoutError("late", rank=1, op="all_reduce")) == set()


def test_a_rank_that_is_lost_while_no_store_can_be_reached_is_waited_for_until_one_can(
    network: Network,
) -> None:
    with start(training(), network=network) as job:
        ranks = job.until_all_train()
        network.cut(RANKS)
        trained = ranks[0].steps[-1].number
        job.until(lambda: ranks[0].steps[-1].number > trained + 50, "nobody needs a store")
        os.kill(ranks[2].pid, signal.SIGKILL)
        job.until(lambda: not ranks[2].open, "it is dead")
        job.pause(2.0)
        assert not job.training_since(1)
        network.heal(RANKS)
        rest = job.until(lambda: job.training_since(1), "the others train")
        assert rest == [ranks[0], ranks[1], ranks[3]]
        job.check()
