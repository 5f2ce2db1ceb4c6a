"""Two-level schedules on any hosts: proved on symbols, and each byte that crosses counted."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_checker import assert_rounds_leave_memory_in_peace, join, ranks_in, run
from schedule_proof import assert_goal, prove, start
from topologies import (
    TWO_LEVEL,
    crossing,
    every_two_level,
    on_all_hosts,
    on_equal_hosts,
    topologies,
)

from phalanx.collectives.schedules import (
    ROOTED,
    Combine,
    Hosts,
    Recv,
    Schedule,
    Send,
    Step,
    for_root,
    row_for,
    schedule,
)
from phalanx.collectives.schedules.steps import backwards
from phalanx.collectives.schedules.tree import (
    tree_broadcast,
    tree_gather,
    tree_reduce,
    tree_scatter,
)
from phalanx.collectives.schedules.two_level import Agents


def roots(collective: str, hosts: Hosts) -> range:
    return range(len(hosts) if collective in ROOTED else 1)


@pytest.mark.checkered
@every_two_level
@on_all_hosts
def test_every_contribution_arrives_exactly_once_whoever_is_root(
    collective: str, hosts: Hosts
) -> None:
    for root in roots(collective, hosts):
        report = prove(collective, "two_level", len(hosts), root=root, hosts=hosts)
        assert not report.stray, "what is sent in round k is received in round k"
        assert len(set(report.rounds)) == 1, "ranks have equally many rounds"


@given(st.sampled_from(TWO_LEVEL), topologies, st.data(), st.randoms(use_true_random=False))
def test_whatever_the_hosts_and_in_whatever_order_ranks_run(
    collective: str, hosts: Hosts, data: st.DataObject, chance: random.Random
) -> None:
    size, root = len(hosts), data.draw(st.sampled_from(roots(collective, hosts)))
    report = prove(collective, "two_level", size, root=root, hosts=hosts, chance=chance)
    assert report == prove(collective, "two_level", size, root=root, hosts=hosts)
    assert not report.stray
    whole = partial(schedule, collective, "two_level", root=root, hosts=hosts)
    assert_rounds_leave_memory_in_peace(whole, size)
    assert_phases_part_where_owners_divide(collective, hosts, root)


@pytest.mark.checkered
@every_two_level
@on_all_hosts
def test_every_chunk_has_one_owner_which_divides_a_mean_once(collective: str, hosts: Hosts) -> None:
    for root in roots(collective, hosts):
        assert_phases_part_where_owners_divide(collective, hosts, root)


def assert_phases_part_where_owners_divide(collective: str, hosts: Hosts, root: int) -> None:
    size = len(hosts)
    row = row_for(collective, "two_level", hosts, root)
    owned = {rank: row.owned((rank - root) % size, size) for rank in range(size)}
    assert sorted(c for chunks in owned.values() for c in chunks) == [*range(row.chunks(size))]
    state = start(collective, size, row.chunks(size), root)
    divided = 1 << size  # one more bit
    if row.reduce:
        state = run(for_root(collective, row.reduce, root), state).state
    for rank, chunks in owned.items():
        for chunk in chunks:
            assert not row.reduce or state[rank][chunk] == divided - 1
            state[rank][chunk] |= divided
    if row.spread:
        state = run(for_root(collective, row.spread, root), state).state
    assert_goal(collective, state, root, mark=divided)


@every_two_level
@on_all_hosts
def test_the_first_phase_only_combines_and_the_second_only_copies(
    collective: str, hosts: Hosts
) -> None:
    row = row_for(collective, "two_level", hosts)
    for phase, forbidden in ((row.reduce, Recv), (row.spread, Combine)):
        for rank in range(len(hosts)):
            for steps in phase(rank, len(hosts)) if phase else ():
                assert not [step for step in steps if type(step) is forbidden]


def test_two_hundred_ranks_on_hosts_of_any_size() -> None:
    chance = random.Random(1)
    hosts = tuple(chance.randrange(25) for _ in range(200))
    for collective in TWO_LEVEL:
        prove(collective, "two_level", 200, hosts=hosts, root=77 if collective in ROOTED else 0)


# ------------------------------------------------------------------------------------ what crosses


def shares(hosts: Hosts) -> tuple[int, dict[int, Fraction]]:
    """The number of hosts, and the share of all ranks that each has."""
    counts = Counter(hosts)
    return len(counts), {host: Fraction(k, len(hosts)) for host, k in counts.items()}


@on_equal_hosts
def test_each_host_sends_for_an_all_reduce_what_the_ring_would_if_it_were_one_rank(
    hosts: Hosts,
) -> None:
    h, _ = shares(hosts)
    due = dict.fromkeys(hosts, Fraction(2 * (h - 1), h))
    assert crossing("all_reduce", "two_level", hosts) == (due, due)


@on_equal_hosts
def test_that_is_as_many_equal_streams_as_a_host_has_ranks(hosts: Hosts) -> None:
    size, (h, _) = len(hosts), shares(hosts)
    for rank in range(size):
        away = [
            step.count
            for steps in schedule("all_reduce", "two_level", rank, size, 0, hosts)
            for step in steps
            if type(step) is Send and hosts[step.peer] != hosts[rank]
        ]
        assert away == [1] * (2 * (h - 1))


@on_all_hosts
def test_what_crosses_is_what_the_docstrings_say(hosts: Hosts) -> None:
    h, share = shares(hosts)
    not_owned = {host: 1 - share[host] for host in share}
    owned = {host: share[host] * (h - 1) for host in share}
    assert crossing("reduce_scatter", "two_level", hosts) == nonzero(not_owned, owned)
    assert crossing("all_gather", "two_level", hosts) == nonzero(owned, not_owned)
    both = {host: not_owned[host] + owned[host] for host in share}
    assert crossing("all_reduce", "two_level", hosts) == nonzero(both, both)


@on_all_hosts
def test_the_roots_tensor_leaves_its_host_once_and_enters_each_other_once(hosts: Hosts) -> None:
    h, share = shares(hosts)
    for root in range(len(hosts)):
        home = hosts[root]
        once = {host: Fraction(host != home) for host in share}
        passed_on = {
            host: Fraction(h > 1) if host == home else share[host] / (1 - share[home]) * (h - 2)
            for host in share
        }
        assert crossing("broadcast", "two_level", hosts, root) == nonzero(passed_on, once)
        assert crossing("reduce", "two_level", hosts, root) == nonzero(once, passed_on)


@given(st.sampled_from(TWO_LEVEL), topologies)
def test_no_flat_algorithm_sends_less_between_hosts(collective: str, hosts: Hosts) -> None:
    for flat in ("ring", "direct", "tree", "halving_doubling", "star"):
        ours, theirs = (
            sum(crossing(collective, name, hosts)[0].values()) for name in ("two_level", flat)
        )
        assert ours <= theirs


def nonzero(
    out: dict[int, Fraction], in_: dict[int, Fraction]
) -> tuple[dict[int, Fraction], dict[int, Fraction]]:
    return {h: n for h, n in out.items() if n}, {h: n for h, n in in_.items() if n}


@on_all_hosts
def test_rounds_are_two_inside_and_two_between_at_most(hosts: Hosts) -> None:
    h = len(set(hosts))
    inside, between = int(h < len(hosts)), int(h > 1)
    home = int(hosts.count(hosts[0]) > 1)
    rounds = {
        "all_reduce": 2 * inside + 2 * between,
        "reduce_scatter": inside + between,
        "all_gather": between + inside,
        "broadcast": home + between + (h > 2) + inside,
        "reduce": inside + (h > 2) + between + home,
    }
    for collective, number in rounds.items():
        report = prove(collective, "two_level", len(hosts), hosts=hosts)
        assert report.rounds == [number] * len(hosts)


@on_all_hosts
def test_no_broadcast_tells_the_root_what_it_knows(hosts: Hosts) -> None:
    for root in range(len(hosts)):
        report = prove("broadcast", "two_level", len(hosts), root=root, hosts=hosts)
        assert report.received[root] == 0


@on_all_hosts
def test_nobody_acts_for_more_chunks_than_its_share_of_its_host(hosts: Hosts) -> None:
    """Its own, and of those that its host does not own, its share, rounded up."""
    agents = Agents(hosts, range(len(hosts)))
    for host, ranks in agents.ranks_on.items():
        others = len(hosts) - len(ranks)
        for runs in agents.chunks_of(host).values():
            assert sum(count for _, count in runs) <= 1 + -(-others // len(ranks))


@on_equal_hosts
def test_what_a_rank_acts_for_in_an_all_reduce_is_one_message_on_equal_hosts(hosts: Hosts) -> None:
    agents = Agents(hosts, Agents.by_place(hosts))
    for host in set(hosts):
        assert {len(runs) for runs in agents.chunks_of(host).values()} == {1}


@given(topologies)
def test_it_is_a_few_messages_otherwise(hosts: Hosts) -> None:
    """One more for each chunk that its host owns between those of others."""
    agents = Agents(hosts, Agents.by_place(hosts))
    for host, ranks in agents.ranks_on.items():
        total = sum(len(runs) for runs in agents.chunks_of(host).values())
        assert total <= 3 * len(ranks)


def test_in_a_gather_too_it_is_a_few_messages_if_ranks_follow_each_other() -> None:
    agents = Agents(tuple(rank // 8 for rank in range(128)), range(128))
    for host in range(16):
        assert max(len(runs) for runs in agents.chunks_of(host).values()) <= 3


# ----------------------------------------------------------------------------------------- sums


@on_all_hosts
def test_a_sum_adds_in_rank_order_inside_each_host_and_then_the_sums_of_the_hosts(
    hosts: Hosts,
) -> None:
    """Of whatever meets in one round, those first that have the lower rank where they come from."""
    size = len(hosts)
    whole = {host: sum(1 << rank for rank in range(size) if hosts[rank] == host) for host in hosts}

    def fold(values: list[int]) -> int:
        if all(len(ranks_in(value)) == 1 for value in values) and len(set(hosts)) < size:
            assert values == sorted(values)
            assert sum(values) in whole.values()
        else:
            assert set(values) <= set(whole.values())
        return join(values)

    state = start("all_reduce", size, size)
    run(partial(schedule, "all_reduce", "two_level", hosts=hosts), state, fold=fold)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("hosts", [(0,) * 6, tuple(range(6))], ids=["one host", "one each"])
def test_on_one_host_or_with_a_rank_on_each_it_is_the_direct_exchange(
    collective: str, hosts: Hosts
) -> None:
    for rank in range(6):
        two_level, direct = (
            [steps_of(steps) for steps in schedule(collective, name, rank, 6, 0, hosts)]
            for name in ("two_level", "direct")
        )
        assert two_level == direct


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_so_it_is_for_those_with_a_root_on_one_host(collective: str) -> None:
    for root in range(6):
        for rank in range(6):
            two_level, direct = (
                [steps_of(steps) for steps in schedule(collective, name, rank, 6, root)]
                for name in ("two_level", "direct")
            )
            assert two_level == direct


def steps_of(steps: tuple[Step, ...]) -> Counter[tuple[str, Step]]:
    return Counter((type(step).__name__, step) for step in steps)


def test_a_reduction_is_a_broadcast_backwards() -> None:
    for size in range(1, 10):
        for rank in range(size):
            for forth, back, take in (
                (tree_broadcast, tree_reduce, Combine),
                (tree_scatter, tree_gather, Recv),
            ):
                returned: Schedule = backwards(forth, take)(rank, size)
                assert [steps_of(s) for s in returned] == [steps_of(s) for s in back(rank, size)]


# -------------------------------------------------------------------------------- wrong requests


def test_there_has_to_be_a_host_for_each_rank() -> None:
    with pytest.raises(ValueError, match="hosts names the hosts of 3 ranks, and there are 4"):
        schedule("all_reduce", "two_level", 0, 4, hosts=(0, 0, 1))
