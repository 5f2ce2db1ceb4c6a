"""What a rank remembers of its collectives, to tell others when they disagree."""

from __future__ import annotations

import pytest
import torch
from raw_peer import rank_0_and_a_raw_peer

import phalanx
from phalanx import CollectiveTimeoutError, DesyncError, SimulatedBackend
from phalanx.core.checker import KEPT
from phalanx.wire.control import Ask, encode
from phalanx.wire.frame import Kind

ONES = torch.ones(2)
BOTH = (
    r"^rank \d: (all_reduce .*: )?two ranks disagree in collective #0:\n"
    r"  rank 0 called broadcast #0 .*\n  rank 1 called all_gather #0 .*"
)


@pytest.mark.parametrize("queued", [0, KEPT // 2, 3 * KEPT])
def test_a_rank_knows_what_it_has_done_however_many_collectives_it_has_queued_since(
    queued: int,
) -> None:
    first, second = SimulatedBackend.create_group(2)
    phalanx.broadcast(ONES, first, algorithm="star")  # of the root: over at once
    pending = [phalanx.async_all_reduce(ONES, first) for _ in range(queued)]
    with pytest.raises(DesyncError, match=BOTH):
        phalanx.all_gather(ONES, second, algorithm="ring")
    for each in pending:
        with pytest.raises(DesyncError, match=BOTH):
            each.wait()


def test_the_last_collectives_that_are_over_are_remembered_and_no_others() -> None:
    backends = SimulatedBackend.create_group(2)
    for _ in range(2):
        works = [
            phalanx.async_all_reduce(ONES, backend) for backend in backends for _ in range(3 * KEPT)
        ]
        assert [work.wait().tolist() for work in works] == [[2.0, 2.0]] * len(works)
    for backend in backends:
        phalanx.async_all_reduce(ONES, backend)
        calls = backend.group.checker.calls
        assert [call.sequence for call in calls] == [*range(5 * KEPT, 6 * KEPT + 1)]


def test_calls_that_a_broken_group_refuses_are_not_remembered() -> None:
    first, second = SimulatedBackend.create_group(2)
    second.abort()
    for _ in range(3):
        with pytest.raises(phalanx.PeerLostError, match="the group is broken"):
            first.barrier()
        with pytest.raises(phalanx.PeerLostError, match="the group is broken"):
            phalanx.async_all_reduce(ONES, first)
    assert not first.group.checker.calls


def test_a_rank_whose_group_is_broken_asks_no_other_what_it_has_done() -> None:
    """A member says that it has come to the last collective on another way: it does not matter."""
    with rank_0_and_a_raw_peer() as (backend, peer):
        with pytest.raises(CollectiveTimeoutError):
            phalanx.all_reduce(ONES, backend, timeout=0.05)
        call = backend.group.checker.calls[-1]
        ask = Ask(call.sequence, call.fingerprint, "all_reduce", 0, call.rolling_hash ^ 1)
        peer.send_control(Kind.ASK, encode(ask))
        peer.send_control(Kind.ASK, encode(Ask(-1, 0, "", query=1)))
        kinds: list[Kind] = []
        while Kind.ANSWER not in kinds:
            kinds.append(peer.read_frame()[0].channel.kind)
    assert Kind.FAILURE in kinds
    assert Kind.ASK not in kinds[kinds.index(Kind.FAILURE) :]
