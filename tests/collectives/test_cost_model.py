"""What algorithms cost on several hosts, counted on their schedules: a host has one way out."""

from __future__ import annotations

import pytest
from clusters import Hybrid
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_proof import ROWS
from topologies import crossing, on_all_hosts, topologies

from phalanx import Backend, simulate
from phalanx.collectives.cost import FORMULAS, LARGE, Choice, Pace, choose, seconds, walk
from phalanx.collectives.schedules import COLLECTIVES, Hosts, row_for
from phalanx.core.transport import BETWEEN_HOSTS, IN_SHARED_MEMORY, INSIDE_A_HOST, LinkCost, Links

FREE = LinkCost(latency=0.0, overhead=0.0, bandwidth=1e30, duplex=True)
BYTES = Links(inside=FREE, between=FREE._replace(bandwidth=1.0))  # a second for a byte that crosses
ROUNDS = Links(inside=FREE, between=FREE._replace(latency=2.0))  # those that wait for another host
MESSAGES = Links(inside=FREE._replace(overhead=1.0), between=FREE._replace(overhead=1.0))


def pace(
    collective: str, algorithm: str, hosts: Hosts, links: Links, *, large: int = LARGE
) -> Pace:
    share = 1 / len(hosts) if collective == "all_to_all" else None
    return walk(row_for(collective, algorithm, hosts), hosts, links, share=share, large=large)


@pytest.mark.checkered
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_on_one_host_it_counts_about_what_the_formulas_say(
    collective: str, algorithm: str, size: int
) -> None:
    """Where each rank has the same to do in a round: of the others the formulas take the worst."""
    links = Links(inside=INSIDE_A_HOST, between=FREE)
    counted = pace(collective, algorithm, (0,) * size, links)
    for count in (0, 1 << 28):
        due = seconds(FORMULAS[collective][algorithm](size, count), INSIDE_A_HOST)
        assert 0.5 * due <= counted.seconds(count) <= 1.5 * due


def test_a_world_of_one_costs_nothing() -> None:
    for collective, algorithm in ROWS:
        assert pace(collective, algorithm, (3,), MESSAGES) == Pace(0.0, 0.0)


@given(st.sampled_from(ROWS), topologies)
def test_what_crosses_takes_as_long_as_the_busiest_host_needs_in_each_round(
    row: tuple[str, str], hosts: Hosts
) -> None:
    out, in_ = crossing(*row, hosts)
    per_tensor = len(hosts) if row[0] == "all_to_all" else 1  # of which each rank has its own
    busiest = max([*out.values(), *in_.values()], default=0) * per_tensor
    total = sum(out.values()) * per_tensor
    crossed = pace(*row, hosts, BYTES).per_byte
    assert float(busiest) <= crossed * 1.000001
    assert crossed <= float(total) * 1.000001 + 1e-20


@on_all_hosts
def test_a_ring_is_as_slow_as_its_turns_make_it(hosts: Hosts) -> None:
    """As often as it leaves the host that it leaves most often, 2(p-1)/p of the tensor."""
    size = len(hosts)
    leaves = [
        sum(hosts[rank] == host != hosts[(rank + 1) % size] for rank in range(size))
        for host in set(hosts)
    ]
    counted = pace("all_reduce", "ring", hosts, BYTES).per_byte
    assert counted == pytest.approx(max(leaves) * 2 * (size - 1) / size)


def test_a_ring_of_ranks_that_follow_each_other_leaves_each_host_once() -> None:
    assert pace("all_reduce", "ring", (0, 0, 1, 1), BYTES).per_byte == pytest.approx(1.5)
    assert pace("all_reduce", "ring", (0, 1, 0, 1), BYTES).per_byte == pytest.approx(3.0)


def test_the_ranks_of_a_host_share_its_way_out() -> None:
    hosts = tuple(rank // 8 for rank in range(16))
    assert pace("all_reduce", "two_level", hosts, BYTES).per_byte == pytest.approx(1.0)
    assert pace("all_reduce", "direct", hosts, BYTES).per_byte == pytest.approx(8.0)
    assert pace("all_reduce", "star", hosts, BYTES).per_byte == pytest.approx(16.0)


def test_rounds_in_which_somebody_waits_for_another_host_count_at_its_latency() -> None:
    hosts = (0, 0, 1, 1)
    assert pace("all_reduce", "two_level", hosts, ROUNDS).fixed == 2  # each waits while it sends
    assert pace("all_reduce", "tree", hosts, ROUNDS).fixed == 4
    assert pace("all_reduce", "ring", hosts, ROUNDS).fixed == 6


def test_messages_count_at_the_busiest_rank() -> None:
    hosts = (0, 0, 1, 1)
    assert pace("all_reduce", "two_level", hosts, MESSAGES).fixed == 8  # one each way, in 4 rounds
    assert pace("all_reduce", "star", hosts, MESSAGES).fixed == 6
    assert pace("all_reduce", "direct", hosts, MESSAGES).fixed == 12


# -------------------------------------------------------------------------------------- the choice


def choices(collective: str, count: int, hosts: Hosts) -> list[Choice]:
    def run(backend: Backend) -> Choice:
        backend.topology = tuple(hosts)
        return choose(collective, count, backend)

    return list(simulate(run, len(hosts)))


@settings(max_examples=examples(60))
@given(st.sampled_from(list(COLLECTIVES)), st.integers(0, 1 << 28), topologies)
def test_auto_picks_the_same_on_every_rank_on_any_hosts_and_says_why(
    collective: str, count: int, hosts: Hosts
) -> None:
    first, *others = choices(collective, count, hosts)
    assert {choice.algorithm for choice in others} <= {first.algorithm}
    assert set(first.estimates) == set(COLLECTIVES[collective])
    assert first.estimates[first.algorithm] == min(first.estimates.values())
    assert str(first).startswith(f"{first.algorithm}: estimated {first.algorithm} ")


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("count", [1 << 20, 16 << 20])
def test_two_levels_are_cheapest_where_the_network_is_slow(collective: str, count: int) -> None:
    hosts = tuple(rank // 4 for rank in range(8))
    gigabit = LinkCost(latency=200e-6, overhead=20e-6, bandwidth=0.12e9, duplex=True)
    links = Links(inside=INSIDE_A_HOST, between=gigabit)
    estimates = {
        name: pace(collective, name, hosts, links).seconds(count)
        for name in COLLECTIVES[collective]
    }
    assert min(estimates, key=estimates.__getitem__) == "two_level", estimates


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_hosts_that_share_memory_work_in_two_levels_on_any_network(
    collective: str, ranks: int
) -> None:
    """A ring of hosts' ranks, one after the other, sends up to twice as much between them."""
    hosts = tuple(rank // ranks for rank in range(2 * ranks))
    links = Links(inside=IN_SHARED_MEMORY, between=BETWEEN_HOSTS)
    for count in (1 << 20, 64 << 20):
        estimates = {
            name: pace(collective, name, hosts, links).seconds(count)
            for name in COLLECTIVES[collective]
        }
        assert min(estimates, key=estimates.__getitem__) == "two_level", estimates


def test_ranks_of_the_hybrid_backend_know_that_their_hosts_share_memory() -> None:
    assert Hybrid().run(lambda backend: backend.links.inside, 2) == [IN_SHARED_MEMORY] * 2


def test_auto_takes_two_levels_with_many_ranks_on_each_host() -> None:
    hosts = tuple(rank // 8 for rank in range(16))
    for count in (1 << 18, 1 << 20):
        assert {each.algorithm for each in choices("all_reduce", count, hosts)} == {"two_level"}


def test_some_hosts_of_a_large_group_tell_what_all_do() -> None:
    links = Links(inside=INSIDE_A_HOST, between=BETWEEN_HOSTS)
    for hosts in (tuple(rank // 4 for rank in range(32)), tuple(rank % 8 for rank in range(32))):
        every = {row: pace(*row, hosts, links) for row in ROWS}
        for row, due in every.items():
            some = pace(*row, hosts, links, large=31)
            assert 0.7 * due.fixed <= some.fixed <= 1.1 * due.fixed
            assert 0.7 * due.per_byte <= some.per_byte <= 1.001 * due.per_byte


def test_a_thousand_ranks_are_looked_at_in_seconds() -> None:
    hosts = tuple(rank // 8 for rank in range(1000))
    links = Links(inside=INSIDE_A_HOST, between=BETWEEN_HOSTS)
    paces = {name: pace("all_reduce", name, hosts, links) for name in COLLECTIVES["all_reduce"]}
    assert min(paces, key=lambda name: paces[name].seconds(64 << 20)) == "two_level"
