"""Every way to disagree, with each rank in turn as the odd one out, on every kind of backend.

    never a hang           each rank gets a `DesyncError`, and none times out
    never a wrong number   a call that returns gives what it would if every rank had made that call
    the right one named    each error is about the odd rank and another one

All disagreements of one world run at the same time, each in a group of its own, so that the half
second after which ranks that wait for each other ask what is going on passes once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from clusters import Cluster
from forms import sizes
from torch import Tensor

import phalanx
from phalanx import Backend, CollectiveTimeoutError, DesyncError, PendingCollective, ReduceOp

PROMPT = 20.0  # seconds after which a rank that was not told gives up, with an error that shows it
COUNT = 840  # divides by every number of ranks here
SIZES = {  # others: 3
    "turn": sizes((2, 3, 4, 5, 8), (2, 3, 4, 5, 6, 7, 8)),
    "simulated": sizes((2, 5), (2, 5, 8)),
    "tcp": (2, 3, 4),
}


class Call(NamedTuple):
    """What a rank calls, and what it is given if everybody calls that with their `tensors`."""

    start: Callable[[Tensor, Backend], PendingCollective[Tensor] | PendingCollective[None]]
    result: Callable[[list[Tensor], int], Tensor | None]
    shape: tuple[int, ...] = (COUNT,)
    dtype: torch.dtype = torch.float32

    def tensor(self, rank: int) -> Tensor:
        """What a rank contributes."""
        values = torch.arange(torch.Size(self.shape).numel()) % 7 + 1 + 10 * rank
        return values.to(self.dtype).reshape(self.shape)

    def expected(self, rank: int, size: int) -> Tensor | None:
        """What a rank has to get, if it gets anything."""
        return self.result([self.tensor(other) for other in range(size)], rank)


def reduce_all(
    algorithm: str,
    op: ReduceOp = ReduceOp.SUM,
    shape: tuple[int, ...] = (COUNT,),
    dtype: torch.dtype = torch.float32,
) -> Call:
    def result(tensors: list[Tensor], rank: int) -> Tensor:
        stack = torch.stack(tensors)
        return stack.amax(0) if op is ReduceOp.MAX else stack.sum(0).to(dtype)

    return Call(
        lambda tensor, b: phalanx.async_all_reduce(tensor, b, op, algorithm=algorithm),
        result,
        shape,
        dtype,
    )


def spread(root: int, algorithm: str) -> Call:
    return Call(
        lambda tensor, b: phalanx.async_broadcast(tensor, b, root, algorithm=algorithm),
        lambda tensors, _: tensors[root],
    )


RING = reduce_all("ring")
GATHER = Call(
    lambda tensor, b: phalanx.async_all_gather(tensor, b, algorithm="ring"),
    lambda tensors, _: torch.cat(tensors),
)
SCATTER = Call(
    lambda tensor, b: phalanx.async_reduce_scatter(tensor, b, algorithm="ring"),
    lambda tensors, rank: torch.stack(tensors).sum(0).chunk(len(tensors))[rank],
)
BARRIER = Call(lambda _, b: phalanx.async_barrier(b), lambda *_: None)

# What the odd one calls, and what all the others do; a barrier follows everywhere.
DISAGREEMENTS: dict[str, tuple[Sequence[Call], Sequence[Call]]] = {
    "another op": ([GATHER], [RING]),
    "another op that begins alike": ([SCATTER], [RING]),
    "a barrier": ([BARRIER], [RING]),
    "another shape": ([reduce_all("ring", shape=(2 * COUNT,))], [RING]),
    "the same bytes in another shape": ([reduce_all("ring", shape=(2, COUNT // 2))], [RING]),
    "no elements": ([reduce_all("ring", shape=(0,))], [RING]),
    "another dtype": ([reduce_all("ring", dtype=torch.int32)], [RING]),
    "another reduction": ([reduce_all("ring", ReduceOp.MAX)], [RING]),
    "another algorithm": ([reduce_all("tree")], [reduce_all("star")]),
    "another root of a star": ([spread(1, "star")], [spread(0, "star")]),
    "another root of a tree": ([spread(0, "tree")], [spread(1, "tree")]),
    "another root of a ring": ([spread(1, "ring")], [spread(0, "ring")]),
    "another order": ([GATHER, RING], [RING, GATHER]),
    "another order of two roots": (
        [spread(0, "star"), spread(1, "star")],
        [spread(1, "star"), spread(0, "star")],
    ),
    "one call more": ([RING, RING], [RING]),
    "one call less": ([RING], [RING, RING]),
    "one broadcast more": ([spread(0, "star"), spread(0, "star")], [spread(0, "star")]),
    "nothing": ([], [RING]),
}


class Outcome(NamedTuple):
    """What became of one rank's calls in one group."""

    returned: list[tuple[Call, Tensor | None]]
    errors: list[Exception]


def play(group: Backend, program: Sequence[Call]) -> Callable[[], Outcome]:
    """Issue calls and a barrier; the function waits for them."""
    outcome = Outcome([], [])
    pending = []
    for call in [*program, BARRIER]:
        try:
            pending.append((call, call.start(call.tensor(group.rank), group)))
        except Exception as error:
            outcome.errors.append(error)

    def wait() -> Outcome:
        for call, each in pending:
            try:
                outcome.returned.append((call, each.wait()))
            except Exception as error:
                outcome.errors.append(error)
        return outcome

    return wait


def test_whoever_is_the_odd_one_out_no_rank_hangs_or_gets_a_wrong_number(
    cluster: Cluster,
) -> None:
    cases = [(name, odd) for name in DISAGREEMENTS for odd in range(8)]

    def disagree(backend: Backend) -> dict[tuple[str, int], Outcome]:
        size = backend.world_size
        waits = {}
        for name, odd in cases:
            if odd < size:
                group = backend.subgroup(range(size))
                odds, usual = DISAGREEMENTS[name]
                waits[name, odd] = play(group, odds if group.rank == odd else usual)
        return {case: wait() for case, wait in waits.items()}

    for size in SIZES.get(cluster.name, (3,)):
        for rank, outcomes in enumerate(cluster.run(disagree, size, timeout=PROMPT)):
            for (name, odd), outcome in outcomes.items():
                case = f"{name}; rank {odd} of {size} is the odd one; rank {rank}"
                check(outcome, rank, odd, size, case)


def check(outcome: Outcome, rank: int, odd: int, size: int, case: str) -> None:
    """What is promised to each rank."""
    assert outcome.errors, f"{case} noticed nothing"
    for error in outcome.errors:
        assert isinstance(error, DesyncError), f"{case}: {error!r}"
        assert error.rank == rank, case
        if rank == odd:
            assert error.peer not in (None, odd), f"{case}: {error}"
        else:
            told = re.search(rf"\n  rank {odd} (\(.*\) )?called ", str(error))
            assert told or error.peer == odd, f"{case} does not hear of the odd one: {error}"
    for call, result in outcome.returned:
        expected = call.expected(rank, size)
        if expected is None:
            assert result is None
        else:
            assert result is not None
            assert torch.equal(result, expected), f"{case} got a wrong number"


def test_two_collectives_swapped_between_two_groups_are_no_disagreement(cluster: Cluster) -> None:
    """The order is that of each group; between a group and a part of it there is none."""

    def swap(backend: Backend) -> None:
        group = backend.subgroup([0, 1, 2])
        calls = [(RING, backend), (GATHER, group), (RING, group), (GATHER, backend)]
        if backend.rank == 1:
            calls = [calls[1], calls[0], calls[2], calls[3]]
        elif backend.rank == 2:
            calls = [calls[1], calls[2], calls[0], calls[3]]
        pending = [(call, call.start(call.tensor(backend.rank), b)) for call, b in calls]
        for call, each in pending:
            result, expected = each.wait(), call.expected(backend.rank, 3)
            assert result is not None
            assert expected is not None
            assert torch.equal(result, expected)

    cluster.run(swap, 3)


@pytest.mark.timeouts
@pytest.mark.together
@pytest.mark.usefixtures("asking_soon")
def test_a_rank_that_stays_away_is_no_disagreement(cluster: Cluster) -> None:
    """It is only late: the others ask, get no answer, and wait on."""

    def come_late(backend: Backend) -> None:
        if backend.rank == 2:
            with pytest.raises(CollectiveTimeoutError):
                backend.recv(bytearray(1), 0, timeout=0.3)
        result = phalanx.all_reduce(RING.tensor(backend.rank), backend, algorithm="ring")
        expected = RING.expected(backend.rank, 3)
        assert expected is not None
        assert torch.equal(result, expected)

    cluster.run(come_late, 3)
